"""The gradient methods' loop: the same policy on every rank, the same training on any number of them, exact resume.

A tiny model is trained on rollouts that are a function of (draw, row, sample); no engine.
"""

import hashlib
import io
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from adapters import ATTENTION, make_adapter, shapes_of
from deterministic_run import Counting
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import refusal
from essa_mpi import config as configuration
from essa_mpi.engine import Completion
from essa_mpi.gradient.grpo import learn
from essa_mpi.gradient.learner import Learner
from essa_mpi.gradient.policy import Policy, Sequence
from essa_mpi.gradient.run import settled, title
from essa_mpi.scoring import Rollout
from essa_mpi.spectrum import Spectrum
from essa_mpi.tasks import Row
from essa_mpi.world import Busy, DigestError, TileScore, World

SHAPE = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.3)
ROWS = 13


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(model folder, adapter folder); on every rank its own."""
    folder = tmp_path_factory.mktemp("grpo")
    torch.manual_seed(0)
    LlamaForCausalLM(SHAPE).save_pretrained(folder / "model")
    return folder / "model", make_adapter(folder / "adapter", shapes_of(SHAPE, ATTENTION), rank=2, scale=0.3)


@pytest.fixture
def settings(base):
    def of(**keys):
        model, adapter = base
        table = {"name": "t", "model": str(model), "adapter": str(adapter), "task": "none", "batch": 5, "group": 4,
                 "generations": 4, "lr": 1e-2, "warmup_steps": 2, "temperature": 1.0, "max_tokens": 6, "micro_batch": 3}
        return settled(configuration.make(table | keys))
    return of


TASK = SimpleNamespace(train=[Row(f"row {i}", None, {}, None, f"rows[{i}]") for i in range(ROWS)], validation=[])


class Drawn:
    """A scorer: tokens are a function of (draw, row, sample), the reward of the tokens, some of them missing."""

    def __init__(self, config, missing=()):
        self._config, self._missing, self.placed = config, missing, []

    def score(self, arms, tiles, generation, keep=None, rollouts=None):
        [arm] = arms
        self.placed.append(arm.vector)
        scores = []
        for tile in tiles:
            scores.append(TileScore())
            for place in range(tile.start, tile.stop):
                index, rewards = int(arm.indices[place]), []
                for sample in range(self._config.group):
                    word = int.from_bytes(hashlib.blake2b(f"{generation} {index} {sample}".encode(), digest_size=8).digest())
                    tokens = tuple((word >> 3 * k) % 40 for k in range(1 + word % 6))
                    rewards.append(float("nan") if (index, sample) in self._missing else float(tokens[0] % 2))
                    rollouts.append(Rollout(place, [1 + index, 2, 3][:1 + index % 3],
                                            Completion("", tokens, False, False, (-1.0,) * len(tokens)), rewards[-1]))
                scores[-1].add(np.mean(rewards))
        return scores, Busy(counters={"completions": 1, "tokens": 3}), []


def world_of(comm, counting=False):
    from mpi4py import MPI
    seat = SimpleNamespace(mpi=MPI, hosts=["here"] * comm.Get_size(), cpus=["cpu"] * comm.Get_size(),
                           crowded=False)
    world = World(seat, Counting(comm) if counting else comm)
    world.out, world.err = io.StringIO(), io.StringIO()
    return world


def trained(config, world, missing=(), start=0, state=None, each=None):
    """(the learner, its policy, the steps) after config.generations steps."""
    policy = Policy(config, Spectrum.load(config.adapter, config.alpha, config.offsets))
    learner, steps = Learner(policy.parameters.start, config), []
    cursor = 0
    if state:
        learner.load_state(state)
        cursor = state["cursor"]

    def record(step):
        steps.append(step)
        if each:
            each(step, learner)
    learn(config, world, TASK, Drawn(config, missing), policy, learner, start, cursor, record)
    return learner, policy, steps


def everywhere():
    from mpi4py import MPI
    return world_of(MPI.COMM_WORLD)


def alone():
    from mpi4py import MPI
    return world_of(MPI.COMM_SELF)


METHODS = [{}, {"loss": "dapo", "mini_batch": 2, "inner_epochs": 2}, {"loss": "cispo", "parameters": "spectrum", "alpha": 0.5},
           {"loss": "dr_grpo", "kl": 0.1, "focal_gamma": 1.0}, {"loss": "dapo", "dynamic_sampling": 3}]


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("keys", METHODS, ids=lambda keys: "-".join(f"{v}" for v in keys.values()) or "grpo")
def test_ranks_share_the_work_of_one(settings, keys):
    """All ranks have the same bits; and one rank alone gets there too, but for the order of float32 sums."""
    config, world = settings(**keys), everywhere()
    missing = {(2, 1), (4, 0), (4, 1), (4, 2), (4, 3)}
    learner, policy, steps = trained(config, world, missing)
    assert len(set(world.comm.allgather((learner.digest(), learner.updates)))) == 1
    single, _, reference = trained(config, alone(), missing)
    assert np.abs(single.flat - policy.parameters.start).max() > 1e-3
    np.testing.assert_allclose(learner.flat, single.flat, rtol=2e-3, atol=2e-5)
    for step, other in zip(steps, reference, strict=True):
        np.testing.assert_array_equal(step.step.rewards, other.step.rewards)
        np.testing.assert_array_equal(step.step.advantages, other.step.advantages)
        assert (step.step.draws, step.step.flat_groups, step.cursor) == (other.step.draws, other.step.flat_groups, other.cursor)
        np.testing.assert_allclose(step.norms, other.norms, rtol=1e-3)
        assert step.sums["tokens"] == other.sums["tokens"] and step.sums["clipped"] == other.sums["clipped"]


@pytest.mark.mpi(min_size=1)
def test_it_learns(settings):
    """What the first step rewarded has become likelier than what it did not."""
    config, world = settings(generations=12, batch=ROWS), everywhere()
    learner, policy, steps = trained(config, world)
    step = steps[0].step
    rollouts = [(r, a) for group, some in step.mine.items() for r, a in zip(some, step.advantages[group]) if a]
    sequences = [Sequence(r.prompt, list(r.completion.tokens), np.zeros(len(r.completion.tokens)), a) for r, a in rollouts]
    after = policy.log_probabilities(sequences)
    policy.place(policy.parameters.start)
    before = policy.log_probabilities(sequences)
    gain = sum(s.advantage * (now.sum() - then.sum()) for s, now, then in zip(sequences, after, before))
    assert sum(world.comm.allgather(float(gain))) > 1


@pytest.mark.mpi(min_size=1)
def test_collectives_of_a_step(settings):
    """Scores and rewards gathered, one all-reduce an update, a row of sums; a closing check."""
    from mpi4py import MPI
    world = world_of(MPI.COMM_WORLD, counting=True)
    config = settings(mini_batch=2, inner_epochs=2)
    learner, _, steps = trained(config, world)
    assert world.comm.calls == {"Allgather": 4 * 2 + 1, "Allgatherv": 4, "Allreduce": 4 * 3 * 2}
    assert steps[0].bytes_reduced == 6 * 4 * (len(learner.flat) + 3)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("keys", [{}, {"loss": "dapo", "dynamic_sampling": 3, "mini_batch": 2}])
def test_resumed_it_goes_on_bit_by_bit(settings, keys):
    config, world, states = settings(**keys), everywhere(), []

    def each(step, learner):
        states.append({**learner.state(), "cursor": step.cursor})
    whole, _, _ = trained(config, world, each=each)
    again, _, steps = trained(config, world, start=2, state=states[1])
    assert again.digest() == whole.digest() and [s.number for s in steps] == [2, 3]


@pytest.mark.mpi(min_size=2)
def test_a_flipped_bit_stops_all_ranks(settings):
    world = everywhere()

    def each(step, learner):
        if step.number == 1 and world.rank == world.size - 1:
            with torch.no_grad():
                learner._weights[0] = torch.nextafter(learner._weights[0], torch.tensor(9.0))
    with pytest.raises(DigestError, match="differs between ranks"):
        trained(settings(), world, each=each)


def test_gamma_zero_is_the_base_method_to_the_bit(settings, monkeypatch):
    from essa_mpi.gradient import rollouts
    focal = trained(settings(focal_gamma=0.7), alone())[0]
    monkeypatch.setattr(rollouts, "focal_weight", None)     # not even called
    zero = trained(settings(focal_gamma=0.0), alone())[0]
    plain = trained(settings(), alone())[0]
    assert zero.digest() == plain.digest() != focal.digest()


def test_the_policy_that_is_placed_is_the_one_that_is_trained(settings):
    """Each step's rollouts are drawn with the factors as the last update left them."""
    config = settings(generations=2)
    policy = Policy(config, Spectrum.load(config.adapter, config.alpha))
    learner, scorer, seen = Learner(policy.parameters.start, config), Drawn(config), []
    learn(config, alone(), TASK, scorer, policy, learner, 0, 0, lambda step: seen.append(learner.flat))
    first, second = (placed.factors(np.zeros(placed.dimension)) for placed in scorer.placed)
    for name, start in policy.parameters.factors(policy.parameters.start).items():
        np.testing.assert_array_equal(first[name], start)
    for name, value in policy.parameters.factors(seen[0]).items():
        np.testing.assert_array_equal(second[name], value)
        assert not np.array_equal(value, first[name])


def test_dynamic_sampling_draws_on_until_enough_groups_differ(settings):
    config = settings(dynamic_sampling=4, batch=4, group=2)
    _, _, steps = trained(config, alone())
    for step in steps:
        kept = step.step.rewards
        assert (kept.max(1) > kept.min(1)).all()
        assert len(kept) == 4 or step.step.draws == 4
    assert max(step.step.draws for step in steps) > 1
    assert steps[-1].cursor == sum(step.step.draws for step in steps)


def test_max_seconds_ends_it(settings):
    config = replace(settings(generations=50), max_seconds=1e-9)
    _, _, steps = trained(config, alone())
    assert len(steps) == 1      # it had begun before its time was up


def test_the_step_in_which_max_seconds_pass_is_the_last(settings):
    class Slow(Drawn):
        def score(self, *arguments, **named):
            time.sleep(0.5)
            return super().score(*arguments, **named)
    config, numbers = replace(settings(generations=50), max_seconds=0.4), []
    policy = Policy(config, Spectrum.load(config.adapter, config.alpha))
    learn(config, alone(), TASK, Slow(config), policy, Learner(policy.parameters.start, config), 0, 0,
          lambda step: numbers.append(step.number))
    assert numbers == [0]       # not one more, begun when they had passed


def test_names_of_the_methods(settings):
    assert title(settings()) == "GRPO"
    assert title(settings(loss="dapo", focal_gamma=0.5)) == "F-DAPO (gamma 0.5)"
    assert title(settings(parameters="spectrum")) == "SVD-GRPO"


@pytest.mark.parametrize("keys, says", [
    ({"temperature": 0.0}, "temperature = 0.0: the rollouts of a prompt would all be the same"),
    ({"top_p": 0.9}, "top_p = 0.9"),
    ({"samples": 3}, "samples = 3: .* set samples = 1"),
    ({"temperature": 0.003}, "temperature = 0.003: vLLM draws at no less than 0.01"),
    ({"rows": "growing"}, "rows = 'growing'"), ({"lr": 1e39}, "lr = 1e[+]39: must be .* at most 1000"),
    ({"mode": "merged"}, "mode = 'merged': parameters = 'lora'"),
    ({"mini_batch": 9}, "mini_batch = 9: must be at most batch = 5"),
    ({"clip_low": 1.5}, "clip_low = 1.5: must be at most 1"),
    ({"group": 1}, "group = 1: must be at least 2"),
    ({"loss": "ppo"}, "must be one of grpo, dapo, cispo, dr_grpo"),
])
def test_what_cannot_be_trained_is_refused_in_one_line(settings, keys, says):
    import re
    assert re.search(says, refusal(lambda: settings(**keys)))


class Changed(Drawn):
    """Rollouts with something in them replaced."""

    def __init__(self, config, change):
        super().__init__(config)
        self._change = change

    def score(self, *arguments, rollouts=None, **named):
        some = []
        found = super().score(*arguments, rollouts=some, **named)
        rollouts += [self._change(r) for r in some]
        return found


def told(config, change):
    """The refusal that training ends with, if its rollouts are changed so; the learner, if with none."""
    policy = Policy(config, Spectrum.load(config.adapter, config.alpha))
    learner = Learner(policy.parameters.start, config)
    learn(config, alone(), TASK, Changed(config, change), policy, learner, 0, 0, lambda step: None)
    return learner


@pytest.mark.parametrize("keys", [{"mini_batch": 2}, {"mini_batch": 2, "inner_epochs": 2}, {"inner_epochs": 3}, {}], ids=str)
def test_an_unchanged_policy_has_no_divergence_to_learn_from(settings, keys):
    """All rewards equal, so only the divergence is left, and at the start it is 0: to the bit, in whatever parts."""
    config = settings(kl=0.1, weight_decay=0.0, generations=1, **keys)
    learner = told(config, lambda r: replace(r, reward=1.0))
    np.testing.assert_array_equal(learner.flat, Policy(config, Spectrum.load(config.adapter, config.alpha)).parameters.start)
    assert learner.updates == (3 if "mini_batch" in keys else 1) * keys.get("inner_epochs", 1)


def test_rollouts_that_all_lack_a_reward_end_it(settings):
    message = refusal(lambda: told(settings(), lambda r: replace(r, reward=float("nan"))))
    assert message.startswith("step 0: no rollout has a reward: 0 prompts did not fit max_model_len, 20 rewards are missing")


def test_a_policy_without_probabilities_ends_it(settings):
    """Before its nan gets anywhere: an engine answers with empty completions then, and all groups are flat."""
    def broken(rollout):
        drawn = rollout.completion
        return replace(rollout, completion=replace(drawn, logprobs=(float("nan"),) * len(drawn.tokens)))
    assert "gives no probabilities any more (nan); lower lr = 0.01" in refusal(lambda: told(settings(), broken))


def test_values_that_are_not_finite_any_more_end_it(settings):
    learner = Learner(np.full(4, 3e38, np.float32), replace(settings(), lr=1e3, warmup_steps=0, weight_decay=1e3))
    assert "trained values are not finite any more; lower lr" in refusal(lambda: learner.update(np.ones(4, np.float32)))


def test_focal_without_a_threshold_needs_binary_rewards(settings):
    message = refusal(lambda: told(settings(focal_gamma=1.0), lambda r: replace(r, reward=0.25)))
    assert "needs focal_threshold" in message and "0.25" in message
