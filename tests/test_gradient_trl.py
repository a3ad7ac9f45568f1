"""A step of the gradient methods against a real GRPOTrainer: the same model, adapter, completions and rewards."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from adapters import make_adapter, make_model, shapes_of
from datasets import Dataset
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from essa_mpi import config as configuration
from essa_mpi.engine import Completion
from essa_mpi.gradient.grpo import objective_of, updates
from essa_mpi.gradient.losses import CLIPS, advantages
from essa_mpi.gradient.policy import Policy
from essa_mpi.gradient.rollouts import Step
from essa_mpi.scoring import Rollout
from essa_mpi.spectrum import Spectrum
from test_losses import grpo_trainer
from test_sft import byte_tokenizer

PROMPTS, GROUP, MOST = ["one", "two and three", "4?"], 4, 10
REWARDS = [0.0, 1, 1, 0, 0.3, -0.1, 0.7, 0.2, 1, 1, 1, 1]     # the last group teaches nothing
MISSING = [0.0, None, 1, 0, 0.3, -0.1, None, None, 1, None, None, None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama of two layers and an adapter with an update."""
    path = tmp_path_factory.mktemp("trl")
    make_model(path / "model", "llama", vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
               head_dim=8, bos_token_id=None, eos_token_id=0, pad_token_id=0)
    make_adapter(path / "adapter", shapes_of(AutoConfig.from_pretrained(path / "model")), rank=4, scale=0.2)
    return path


@pytest.fixture
def settings(folder):
    return lambda **keys: configuration.make({
        "name": "t", "model": str(folder / "model"), "adapter": str(folder / "adapter"), "task": "none",
        "temperature": 0.7, "batch": len(PROMPTS), "group": GROUP, "max_tokens": MOST, "micro_batch": 5,
        "train_dtype": "float32", **keys})


def place(model, factors):
    """Put factors into the adapter that TRL trains. Returns them as the model has them, by our names."""
    weights = dict(model.named_parameters())
    found = {name: weights[name.replace(".weight", ".default.weight")] for name in factors}
    with torch.no_grad():
        for name, value in factors.items():
            found[name].copy_(torch.from_numpy(value))
    return found


def trainer_of(config, folder, rewards, factors=()):
    """(TRL's trainer with our config's method, what it drew with these factors), ends early enough to be ragged."""
    GRPOTrainer = grpo_trainer()
    from trl import GRPOConfig
    objective = objective_of(config)
    args = GRPOConfig(
        output_dir=str(folder / "out"), use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False,
        per_device_train_batch_size=len(rewards), num_generations=GROUP, max_completion_length=MOST,
        temperature=config.temperature, num_iterations=2, loss_type=config.loss, beta=config.kl,
        use_bias_correction_kl=False,       # TRL's default multiplies GRPO's divergence by the ratio (DeepSeek-V3.2)
        epsilon=objective.clip_low, epsilon_high=objective.clip_high + (config.loss == "cispo"),
        scale_rewards="none" if config.loss == "dr_grpo" else "group",
        generation_kwargs={"sequence_bias": [[[0], 3.0]]})
    base = AutoModelForCausalLM.from_pretrained(config.model)
    model = PeftModel.from_pretrained(base, config.adapter, is_trainable=True)
    trainer = GRPOTrainer(model=model, reward_funcs=lambda **_: rewards, args=args, processing_class=byte_tokenizer(),
                          train_dataset=Dataset.from_list([{"prompt": "x"}] * len(rewards)))
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    place(trainer.model, dict(factors))
    torch.manual_seed(0)
    return trainer, trainer._generate_and_score_completions([{"prompt": p} for p in PROMPTS for _ in range(GROUP)])


def step_of(inputs, rewards, scale) -> Step:
    """As `rollouts.draw` would have it, of TRL's completions."""
    def kept(name, i):
        return inputs[f"{name}_ids"][i][inputs[f"{name}_mask"][i] > 0].tolist()
    rewards = np.array(rewards, float).reshape(-1, GROUP)
    mine = {}
    for i, reward in enumerate(rewards.ravel()):
        tokens = kept("completion", i)
        completion = Completion("", tuple(tokens), False, False, (0.0,) * len(tokens))
        mine.setdefault(i // GROUP, []).append(Rollout(i // GROUP, kept("prompt", i), completion, reward))
    A = advantages(torch.from_numpy(rewards), scale).numpy()
    return Step(rewards, A, np.ones(len(rewards)), mine, None, rewards, 1, 0, False, [])


class Walk:
    """A learner that takes the steps it was told to, and keeps the gradients."""

    def __init__(self, start, steps):
        self.flat, self.steps, self.gradients = start, list(steps), []

    def update(self, gradient):
        self.gradients.append(gradient)
        self.flat = self.flat + self.steps.pop(0)
        return 0.0


def gradients_of(config, folder, rewards, monkeypatch, epochs=2):
    """(ours, TRL's, its trainer and inputs): of each update a name -> gradient; its model walks the same way as ours.

    Ours is one rank's `updates`: all that follows the rollouts, which are drawn some way from the warm start.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    policy = Policy(config, Spectrum.load(config.adapter, 1.0))
    parameters = policy.parameters
    steps = 0.05 * np.random.default_rng(0).standard_normal((1 + epochs, len(parameters.start))).astype(np.float32)
    flat = parameters.start + steps[0]
    policy.place(flat)
    trainer, inputs = trainer_of(config, folder, rewards, parameters.factors(flat))
    walk = Walk(flat, steps[1:])
    step = step_of(inputs, rewards, config.loss != "dr_grpo")
    updates(config, SimpleNamespace(reduce=lambda buffer: 0.0), objective_of(config), policy, walk, step)

    wanted = []
    for move in steps[1:]:
        weights = place(trainer.model, parameters.factors(flat))
        trainer._compute_loss(trainer.model, inputs).backward()
        wanted.append({name: weight.grad.numpy() for name, weight in weights.items()})
        trainer.model.zero_grad()
        flat = flat + move
    return [parameters.factors(gradient) for gradient in walk.gradients], wanted, trainer, inputs


def assert_same(found, wanted):
    assert len(found) == len(wanted) == 2 * 2 * 4
    for name, gradient in wanted.items():
        size = np.linalg.norm(gradient)
        assert size > 0 and np.linalg.norm(found[name] - gradient) < 1e-5 * size, name


@pytest.mark.parametrize("scale", [True, False])
def test_advantages_are_trls(settings, folder, scale):
    config = settings(loss="grpo" if scale else "dr_grpo")
    for rewards in (REWARDS, MISSING):
        _, inputs = trainer_of(config, folder, rewards)
        ours = step_of(inputs, rewards, scale).advantages
        np.testing.assert_allclose(ours.ravel(), inputs["advantages"], atol=1e-6)
        assert np.abs(ours).max() > 0.4


@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize("loss", CLIPS)
def test_gradients_are_trls(settings, folder, monkeypatch, loss, kl):
    """Of all factors, in two passes over the rollouts: the second has moved away from the policy that drew them."""
    config = settings(loss=loss, kl=kl, inner_epochs=2, **({"clip_high": 0.1} if loss == "cispo" else {}))
    ours, trls, trainer, inputs = gradients_of(config, folder, REWARDS, monkeypatch)
    lengths = inputs["completion_mask"].sum(1)
    assert len(lengths.unique()) > 3 and len(inputs["prompt_mask"].sum(1).unique()) == 3
    clipped = trainer._metrics["train"]["cispo_clip_ratio" if loss == "cispo" else "clip_ratio/region_mean"]
    assert clipped[0] == 0 and 0.05 < clipped[1] < 0.95
    for found, wanted in zip(ours, trls, strict=True):
        assert_same(found, wanted)


@pytest.mark.parametrize("loss", CLIPS)
def test_rollouts_without_a_reward_are_not_counted(settings, folder, monkeypatch, loss):
    """TRL gives them no advantage but leaves them in the mean; here the gradient is that of the known ones alone."""
    ours, trls, _, inputs = gradients_of(settings(loss=loss), folder, MISSING, monkeypatch, epochs=1)
    known = np.array([reward is not None for reward in MISSING])
    if loss in ("grpo", "dr_grpo"):
        share = known.mean()
    else:
        lengths = inputs["completion_mask"].sum(1).numpy()
        share = lengths[known].sum() / lengths.sum()
    assert_same(ours[0], {name: gradient / share for name, gradient in trls[0].items()})
