"""The training loop of the gradient methods, readable as GRPO's Algorithm 1. Knows nothing of files.

A step: rollouts by every rank's engine with the policy in place, an all-gather of scores and one of rewards,
then, for each update, the gradient of this rank's sequences by torch + peft and one all-reduce of it.
"""

import time
from dataclasses import dataclass

import numpy as np

from .. import trace
from ..config import Config, UserError
from ..departure import Departure
from ..evolve import Stopwatch
from ..rows import Rows
from ..world import Busy, World
from .learner import Learner
from .losses import CLIPS, Objective, normaliser
from .policy import Policy, Sequence
from .rollouts import Step, draw

COUNTS = 3      # numbers sent behind the gradient: tokens (two of them: float32 counts to 2^24) and sequences
SUMS = ("loss", "tokens", "clipped", "kl", "mismatch", "mismatch_kl", "mismatch_most")


@dataclass
class Training:
    """What one step was; equal on every rank but for `seconds`."""

    number: int
    step: Step
    digest: int                  # of the learner after it
    rate: float                  # learning rate of its last update
    norms: list[float]           # of each update's gradient, before clipping
    sums: dict[str, float]       # over all ranks: see SUMS; tokens that gave a gradient
    validation: float            # greedy mean reward of the policy before the step, nan if not done
    validation_rows: int
    bytes_reduced: int           # by one rank, in all-reduces of gradients
    cursor: int                  # batches drawn so far
    seconds: dict[str, float]    # of this rank: place, generate, score, wait, allgather, train, allreduce, update, total
    shares: np.ndarray           # (ranks, 2): every rank's seconds of train and allreduce


def objective_of(config: Config) -> Objective:
    low, high = CLIPS[config.loss]
    return Objective(config.loss, config.clip_low or low, config.clip_high or high, config.kl, config.max_tokens)


def learn(config: Config, world: World, task, scorer, policy: Policy, learner: Learner, start: int, cursor: int, record,
          validate=None, departure: Departure | None = None) -> int:
    """Train from step `start` (batch `cursor`) up to config.generations; `record(Training)` after each.

    validate(placed, digest) -> mean reward, every validation_every steps. departure: when to end before; returns what
    it asked for, 0 if nothing. Raises DigestError on every rank if the policies differ.
    """
    objective, rows, clock = objective_of(config), Rows(config, len(task.train)), Stopwatch()
    departure, stop = departure or Departure(config.max_seconds), 0
    policy.place(learner.flat)
    training = 0.0      # seconds, of the last step
    for number in range(start, config.generations):
        trace.generation(number)
        departure.begin()
        from_here = time.perf_counter()
        placed, digest = policy.parameters.placed(learner.flat), learner.digest()
        validation = float("nan")
        validates = bool(validate and config.validation_every and number % config.validation_every == 0)
        if validates:
            validation = validate(placed, digest)
            clock()     # what it took is in nobody's wait
        # Asked when the rollouts are there: training is still to come.
        step = draw(config, world, scorer, task, rows, placed, cursor, digest, clock, lambda: departure.asked(training))
        cursor += step.draws
        if not np.isfinite(step.drawn).any():
            raise UserError(f"step {number}: no rollout has a reward: {step.exchanged.total('too_long')} prompts did not fit "
                            f"max_model_len, {step.drawn.size} rewards are missing; raise max_model_len, or see why the "
                            f"reward gives none (logs/)")
        training = time.monotonic()
        norms, sums, sent, seconds = updates(config, world, objective, policy, learner, step)
        training = time.monotonic() - training
        clock()
        shared = world.gather(np.array([sums[name] for name in SUMS] + [seconds["train"], seconds["allreduce"]]))
        totals = dict(zip(SUMS, shared[:, :len(SUMS)].sum(0)))
        totals["mismatch_most"] = float(shared[:, SUMS.index("mismatch_most")].max())
        record(Training(number, step, learner.digest(), learner.rate, norms, totals, validation,
                        len(task.validation) if validates else 0, sent, cursor,
                        {**step.seconds, **seconds, "total": time.perf_counter() - from_here}, shared[:, len(SUMS):]))
        stop = step.stop
        if stop:
            break
    trace.generation(trace.AFTER)
    world.exchange([], [], learner.digest(), Busy())
    return stop


def updates(config: Config, world: World, objective: Objective, policy: Policy, learner: Learner, step: Step):
    """All updates of a step's rollouts: (norms, sums over this rank's sequences, bytes sent, seconds)."""
    seconds = dict.fromkeys(("train", "allreduce", "update"), 0.0)
    sums, norms, sent = dict.fromkeys(SUMS, 0.0), [], 0
    if not len(step.rewards):       # dynamic sampling found no group that teaches anything
        return norms, sums, sent, seconds
    began = time.perf_counter()
    batches = -(-len(step.rewards) // (config.mini_batch or len(step.rewards)))
    parts = [sequences_of(step, range(part, len(step.rewards), batches), objective.kl > 0) for part in range(batches)]
    # Part by part, in the micro-batches that the gradient has: in others the last bits would differ, and an unchanged
    # policy would have ratios that are not 1 and a divergence that is not 0.
    if batches * config.inner_epochs > 1:
        for part, _, _ in parts:
            for s, old in zip(part, policy.log_probabilities(part)):
                s.old = old
    if objective.kl:
        policy.place(policy.parameters.start)
        for part, _, _ in parts:
            for s, reference in zip(part, policy.log_probabilities(part)):
                s.reference = reference
        policy.place(learner.flat)
    for _ in range(config.inner_epochs):
        for part, tokens, count in parts:
            with trace.span("train"):
                gradient, some = policy.gradient(objective, part)
            seconds["train"] += time.perf_counter() - began
            buffer = np.concatenate([gradient, np.float32([tokens >> 12, tokens & 4095, count])])
            with trace.span("allreduce"):
                seconds["allreduce"] += world.reduce(buffer)
            began = time.perf_counter()
            tokens = (int(buffer[-3]) << 12) + int(buffer[-2])
            with trace.span("update"):
                norms.append(learner.update(buffer[:-COUNTS] / np.float32(normaliser(objective, int(buffer[-1]), tokens))))
                policy.place(learner.flat)
            seconds["update"] += time.perf_counter() - began
            began = time.perf_counter()
            sent += buffer.nbytes
            for name, value in some.items():
                sums[name] = max(sums[name], value) if name == "mismatch_most" else sums[name] + value
    return norms, sums, sent, seconds


def sequences_of(step: Step, groups: range, keep_all: bool) -> tuple[list[Sequence], int, int]:
    """(this rank's sequences of these groups that have a gradient, tokens, sequences that count).

    An advantage of 0 has no gradient, unless the divergence adds one (keep_all), but is in the loss's mean.
    """
    found, tokens, count = [], 0, 0
    for group in groups:
        for rollout, advantage, reward in zip(step.mine.get(group, ()), step.advantages[group], step.rewards[group]):
            drawn = rollout.completion
            if not np.isfinite(reward) or not drawn.tokens:
                continue
            tokens, count = tokens + len(drawn.tokens), count + 1
            if advantage or keep_all:
                found.append(Sequence(rollout.prompt, list(drawn.tokens), np.array(drawn.logprobs), float(advantage)))
    return found, tokens, count
