"""Advantages and losses, held against TRL's trainer and against cases done by hand."""

from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from conftest import refusal
from essa_mpi import config as configuration
from essa_mpi.engine import Completion
from essa_mpi.gradient import rollouts
from essa_mpi.gradient.grpo import SUMS, objective_of, updates
from essa_mpi.gradient.losses import (CLIPS, Objective, advantages, flat, focal_weight, normaliser, token_losses,
                                      total_loss)
from essa_mpi.scoring import Rollout

NAN = float("nan")
CLIPPING = [(loss, *clips) for loss in ("grpo", "dapo", "dr_grpo") for clips in ((0.2, 0.2), (0.2, 0.28))]
MOST = 12       # tokens of a completion
TABLE = {"name": "t", "model": "none", "adapter": "none", "task": "none"}


def batch(sequences=7, seed=0) -> SimpleNamespace:
    """Random tokens in float64: ragged, with both signs of advantage at ratios inside and beyond all clips."""
    draw = torch.Generator().manual_seed(seed)
    shape = sequences, MOST - 1
    old = -3 * torch.rand(shape, generator=draw, dtype=torch.float64)
    ratio = torch.tensor([0.01, 0.7, 0.9, 1.0, 1.1, 1.24, 1.5, 5.5, 6.5, 9.0]).double()
    apart = ratio[torch.randint(len(ratio), shape, generator=draw)].log()
    lengths = torch.randint(1, MOST, (sequences,), generator=draw)
    lengths[0] = MOST - 1
    sign = torch.tensor([1.0, -1.0]).repeat(sequences)[:sequences]
    return SimpleNamespace(
        old=old, logp=old + apart + 0.01 * torch.randn(shape, generator=draw, dtype=torch.float64),
        reference=old + 0.5 * torch.randn(shape, generator=draw, dtype=torch.float64),
        advantage=(sign * (0.1 + torch.rand(sequences, generator=draw))).double(),
        mask=(torch.arange(MOST - 1) < lengths[:, None]).double())


def rows(b, some) -> SimpleNamespace:
    return SimpleNamespace(**{name: value[some] for name, value in vars(b).items()})


def ours(objective, b):
    """(loss, gradient with respect to logp, which tokens are clipped) of the whole batch."""
    logp = b.logp.clone().requires_grad_()
    losses, clipped = token_losses(objective, logp, b.old, b.advantage, b.reference if objective.kl else None)
    loss = total_loss(objective, losses, b.mask) / normaliser(objective, len(logp), int(b.mask.sum()))
    loss.backward()
    return loss.item(), logp.grad, clipped


def grpo_trainer():
    """TRL's class, without its vLLM side, which takes seconds to import."""
    with mock.patch("trl.import_utils.is_vllm_available", lambda *_, **__: False):
        from trl.trainer.grpo_trainer import GRPOTrainer
    return GRPOTrainer


def trl(loss_type, low, high, beta, b):
    """(loss, gradient, metrics) of GRPOTrainer._compute_loss for these log-probabilities."""
    logp = b.logp.clone().requires_grad_()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
        loss_type=loss_type, epsilon_low=low, epsilon_high=high, beta=beta, max_completion_length=MOST,
        importance_sampling_level="token", top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        aux_loss_enabled=False, _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True), _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x))
    ids = torch.zeros_like(b.mask, dtype=torch.long)
    loss = grpo_trainer()._compute_loss(trainer, None, {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": b.mask,
        "advantages": b.advantage, "old_per_token_logps": b.old, "ref_per_token_logps": b.reference,
        "num_items_in_batch": b.mask.sum()})
    loss.backward()
    return loss.item(), logp.grad, trainer._metrics["train"]


# -- losses --------------------------------------------------------------------------------------

@pytest.mark.parametrize("kl", [0.0, 0.04])
@pytest.mark.parametrize("loss, low, high", CLIPPING)
def test_losses_are_trls(loss, low, high, kl):
    b = batch()
    value, gradient, clipped = ours(Objective(loss, low, high, kl, MOST), b)
    wanted, wanted_gradient, metrics = trl(loss, low, high, kl, b)
    assert value == pytest.approx(wanted, rel=1e-12)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-12, atol=1e-15)
    share = (clipped * b.mask).sum() / b.mask.sum()
    assert metrics["clip_ratio/region_mean"][0] == pytest.approx(share.item()) and 0.1 < share < 0.9


@pytest.mark.parametrize("kl", [0.0, 0.04])
@pytest.mark.parametrize("high", [0.28, 5.0])
def test_cispo_is_trls_with_the_cap_a_distance_from_one(high, kl):
    """The paper's cap is 1 + high, TRL's epsilon_high the cap itself; TRL has no floor, nor has clip_low = 1."""
    b = batch()
    value, gradient, _ = ours(Objective("cispo", 1.0, high, kl, MOST), b)
    wanted, wanted_gradient, _ = trl("cispo", NAN, 1 + high, kl, b)
    assert value == pytest.approx(wanted, rel=1e-12)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-12, atol=1e-15)


def test_the_batch_has_every_case():
    """All sides of all clips, with both signs of advantage."""
    b = batch()
    ratio = (b.logp - b.old).exp()
    for low, high in ((0, 0.79), (0.81, 1.19), (1.21, 1.27), (1.29, 5.9), (6.1, 99)):
        for sign in (-1, 1):
            assert ((ratio > low) & (ratio < high) & (b.advantage.sign()[:, None] == sign) & (b.mask > 0)).any()


def test_cispo_by_hand():
    """Ratios 1/2, 1 and 8 between a floor of 0.8 and a cap of 6: -weight * A * logp, and its gradient -weight * A."""
    logp = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64, requires_grad=True)
    old = logp.detach() - torch.tensor([[0.5, 1.0, 8.0]]).double().log()
    losses, clipped = token_losses(Objective("cispo", 0.2, 5.0, 0.0, MOST), logp, old, torch.tensor([2.0]).double())
    losses.sum().backward()
    torch.testing.assert_close(losses, torch.tensor([[1.6, 4.0, 36.0]]).double())
    torch.testing.assert_close(logp.grad, torch.tensor([[-1.6, -2.0, -12.0]]).double())
    assert clipped.tolist() == [[True, False, True]]


def test_the_papers_clips():
    assert CLIPS == {"grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "cispo": (1.0, 5.0), "dr_grpo": (0.2, 0.2)}
    table = {**TABLE, "max_tokens": 9, "kl": 0.1}
    assert objective_of(configuration.make({**table, "loss": "dapo"})) == Objective("dapo", 0.2, 0.28, 0.1, 9)
    assert objective_of(configuration.make({**table, "loss": "cispo", "clip_high": 4.0})).clip_high == 4


@pytest.mark.parametrize("parts", [[1] * 9, [4, 5], [2, 1, 3, 3]])
@pytest.mark.parametrize("loss", CLIPS)
def test_parts_add_up_to_the_batch(loss, parts):
    """As ranks and micro-batches share it; a part may be padded less than the whole."""
    objective, b, total = Objective(loss, *CLIPS[loss], 0.04, MOST), batch(9, seed=1), 0.0
    value, gradient, _ = ours(objective, b)
    logp = b.logp.clone().requires_grad_()
    for some in torch.tensor([4, 0, 7, 2, 8, 1, 3, 6, 5]).split(parts):
        part = rows(b, some)
        part.logp = logp[some]
        longest = int(part.mask.sum(1).max())
        for name in ("old", "logp", "reference", "mask"):
            setattr(part, name, getattr(part, name)[:, :longest])
        losses, _ = token_losses(objective, part.logp, part.old, part.advantage, part.reference)
        total += total_loss(objective, losses, part.mask)
    loss = total / normaliser(objective, 9, int(b.mask.sum()))
    loss.backward()
    assert loss.item() == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-12, atol=1e-15)


def test_normalisers_by_hand():
    """Of 3 sequences with 10 tokens."""
    found = {loss: normaliser(Objective(loss, 0.2, 0.2, 0.0, 8), 3, 10) for loss in CLIPS}
    assert found == {"grpo": 3, "dapo": 10, "cispo": 10, "dr_grpo": 24}
    assert all(normaliser(Objective(loss, 0.2, 0.2, 0.0, 8), 0, 0) == 1 for loss in CLIPS)


# -- advantages ----------------------------------------------------------------------------------

def test_advantages_by_hand():
    """Sample standard deviations: of 0, 0, 0, 1 it is 1/2; of 1, 3 it is sqrt(2)."""
    found = advantages(torch.tensor([[0.0, 0, 0, 1], [1, NAN, NAN, 3], [0, 1, NAN, NAN]]), scale=True)
    assert found.dtype == torch.float64
    root, half = 1 / (2**0.5 + 1e-4), 0.5 / (0.5**0.5 + 1e-4)
    quarter = 0.25 / 0.5001
    wanted = [[-quarter, -quarter, -quarter, 3 * quarter], [-root, 0, 0, root], [-half, half, 0, 0]]
    np.testing.assert_allclose(found, wanted, rtol=1e-14)


def test_advantages_without_scale():
    found = advantages(torch.tensor([[0.0, 0, 0, 1], [1, NAN, NAN, 3], [2, 2, 2, 2]]), scale=False)
    assert found.tolist() == [[-0.25, -0.25, -0.25, 0.75], [-1, 0, 0, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize("scale", [True, False])
def test_a_group_without_a_difference_teaches_nothing(scale):
    """Exactly: three times 0.1 has not the mean 0.1 in floating point."""
    same = torch.tensor([[0.1, 0.1, 0.1], [NAN, 0.7, NAN], [NAN, NAN, NAN], [-1, -1, NAN]], dtype=torch.float64)
    assert (same[0].sum() / 3 != 0.1) and not advantages(same, scale).any()


def test_missing_rewards_are_as_if_never_drawn():
    drawn = torch.tensor([[0.2, 0.9, 0.5]])
    holes = torch.tensor([[NAN, 0.2, float("inf"), 0.9, 0.5, float("-inf")]])
    np.testing.assert_allclose(advantages(holes, True)[:, [1, 3, 4]], advantages(drawn, True), rtol=1e-14)
    assert not advantages(holes, True)[:, [0, 2, 5]].any()


def test_flat():
    rewards = torch.tensor([[0.1, 0.1, 0.1], [0, 0, 1], [NAN, 1, 1], [NAN, 0, 1], [NAN, NAN, 1], [NAN, NAN, NAN]])
    assert flat(rewards).tolist() == [True, False, True, False, True, True]


# -- the focal weight ----------------------------------------------------------------------------

@pytest.mark.parametrize("gamma, three_quarters", [(0.5, 0.75**0.5), (1.0, 0.75), (2.0, 0.5625)])
def test_focal_weight_by_hand(gamma, three_quarters):
    """One of four right, none, all; -1 is as wrong as 0; of three known one is right, and of none known none."""
    def weight(*rewards):
        return focal_weight(torch.tensor([rewards]), gamma, None).item()
    assert weight(0.0, 1, 0, 0) == weight(-1.0, 1, -1, -1) == pytest.approx(three_quarters)
    assert weight(0.0, 0, 0, 0) == weight(-1.0, -1, NAN, NAN) == weight(NAN, NAN, NAN, NAN) == 1
    assert weight(1.0, 1, 1, 1) == weight(1.0, NAN, NAN, NAN) == 0
    assert weight(0.0, 1, NAN, 0) == pytest.approx((2 / 3)**gamma)


def test_focal_threshold():
    """What is at the threshold is right."""
    rewards = torch.tensor([[0.2, 0.5, 0.9, NAN], [0.4, 0.3, 0.2, 0.1]])
    np.testing.assert_allclose(focal_weight(rewards, 1.0, 0.5), [1 / 3, 1])


def test_rewards_that_are_not_binary_need_a_threshold():
    message = refusal(focal_weight, torch.tensor([[0.0, 1.0, NAN], [1.0, 0.25, 0.0]]), 0.5, None)
    assert "focal_threshold" in message and "0.25" in message


# -- as a step has them ---------------------------------------------------------------------------

def step(rewards, **keys):
    """What rollouts.draw makes of these rewards."""
    rewards = np.array(rewards, float)
    config = configuration.make({**TABLE, "batch": len(rewards), "group": rewards.shape[1], **keys})
    header = {"stop": np.zeros(1, bool)}
    world = SimpleNamespace(share=lambda n: [], collect=lambda mine, n: rewards,
                            exchange=lambda *_: SimpleNamespace(header=header, seconds=0.0, wait=0.0))
    busy = SimpleNamespace(place=0.0, generate=0.0, score=0.0)
    scorer, task = SimpleNamespace(score=lambda *_, rollouts: ([], busy, [])), SimpleNamespace(train=None)
    every = SimpleNamespace(batch=lambda n: list(range(len(rewards))))
    return rollouts.draw(config, world, scorer, task, every, None, 0, 0, lambda: 0.0, lambda: False)


REWARDS = [[0, 1, 1, 0], [0.0, 0, 0, 1], [1, 1, 1, 1], [NAN, 1, 0, NAN]]


@pytest.mark.parametrize("loss", CLIPS)
def test_gamma_0_is_the_base_method(loss):
    found = step(REWARDS, loss=loss, focal_gamma=0.0)
    base = advantages(torch.tensor(REWARDS, dtype=torch.float64), scale=loss != "dr_grpo")
    assert found.weights.tobytes() == np.ones(4).tobytes()
    assert found.advantages.tobytes() == base.numpy().tobytes()


def test_gamma_0_asks_for_no_threshold():
    assert step([[0.1, 0.7, 0.3]]).weights == 1
    assert "focal_threshold" in refusal(lambda: step([[0.1, 0.7, 0.3]], focal_gamma=1.0))


def test_the_focal_weight_is_on_the_normalised_advantages():
    found, base = step(REWARDS, focal_gamma=2.0), step(REWARDS)
    assert found.weights == pytest.approx([0.25, 0.5625, 0, 0.25])
    np.testing.assert_allclose(found.advantages, base.advantages * found.weights[:, None], rtol=1e-14)
    assert (found.rewards == base.rewards)[:3].all() and found.flat_groups == 1


def test_which_advantages_are_scaled():
    """Dr. GRPO's are not, unless asked for."""
    by_mean, by_std = (advantages(torch.tensor(REWARDS), scale).numpy() for scale in (False, True))
    for keys, wanted in (({"loss": "dr_grpo"}, by_mean), ({"loss": "dr_grpo", "advantages": "std"}, by_std),
                         ({"loss": "grpo", "advantages": "mean"}, by_mean), ({"loss": "cispo"}, by_std)):
        np.testing.assert_array_equal(step(REWARDS, **keys).advantages, wanted)


# -- a step's updates ----------------------------------------------------------------------------

class Counter:
    """A policy, whose gradient is one and whose log-probabilities are its number of updates, and its learner."""

    def __init__(self):
        self.flat, self.seen, self.gradients = np.zeros(1, np.float32), [], []
        self.placed = self.flat
        self.parameters = SimpleNamespace(start=self.flat)

    def place(self, flat):
        self.placed = flat

    def log_probabilities(self, sequences):
        return [np.full(len(s.completion), self.placed[0]) for s in sequences]

    def gradient(self, objective, sequences):
        self.seen.append([(s.prompt[0], s.old) for s in sequences])
        return np.ones(1, np.float32), dict.fromkeys(SUMS, 1.0)

    def update(self, gradient):
        self.gradients.append(gradient.item())
        self.flat = self.flat + 1
        return 1.0


def updated(config, lengths, ranks):
    """A Counter after the updates of two rollouts a prompt of these lengths, on so many ranks that are alike."""
    def reduce(buffer):
        buffer *= ranks
        return 0.0
    mine = {i: [Rollout(i, [i], Completion("", (1,) * n, False, False, (-1.0,) * n), r) for r in (0.0, 1.0)]
            for i, n in enumerate(lengths)}
    rewards, counter = np.array([[0.0, 1.0]] * len(lengths)), Counter()
    step = rollouts.Step(rewards, 2 * rewards - 1, np.ones(len(lengths)), mine, None, rewards, 1, 0, False, [])
    norms, _, sent, _ = updates(config, SimpleNamespace(reduce=reduce), objective_of(config), counter, counter, step)
    assert len(norms) == len(counter.gradients) and sent == len(norms) * 4 * (1 + 3)
    return counter


@pytest.mark.parametrize("loss, wanted", [("dapo", 1 / (2 * 4101)), ("grpo", 1 / 2), ("dr_grpo", 1 / (2 * 5000))])
def test_an_update_is_over_what_all_ranks_drew(loss, wanted):
    """More tokens than float32 can count."""
    assert 2 * 4101 * 5000 > 2**25
    counter = updated(configuration.make({**TABLE, "max_tokens": 5000, "loss": loss}), [4101], ranks=5000)
    assert counter.gradients == [pytest.approx(wanted, rel=1e-6)] and counter.seen[0][0][1] is None


def test_mini_batches_share_the_prompts():
    """Two passes over five prompts, two or less an update; the old policy is that of before the first."""
    keys = {"batch": 5, "mini_batch": 2, "inner_epochs": 2, "loss": "dapo"}
    counter = updated(configuration.make({**TABLE, **keys}), [1, 2, 3, 4, 5], ranks=1)
    parts = [sorted({prompt for prompt, _ in part}) for part in counter.seen]
    assert len(parts) == 6 and parts[:3] == parts[3:] and sorted(sum(parts[:3], [])) == [0, 1, 2, 3, 4]
    assert max(map(len, parts)) == 2 and [len(part) for part in counter.seen] == [2 * len(part) for part in parts]
    assert counter.gradients == pytest.approx([1 / (2 * sum(i + 1 for i in part)) for part in parts])
    assert all((old == 0).all() for part in counter.seen for _, old in part)
