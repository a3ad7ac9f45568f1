"""Held-out scores of the base model, the warm start and an evolved adapter: the training path, other rows."""

from dataclasses import dataclass

import numpy as np

from .config import Config
from .scoring import Arm
from .world import World

# The generation evaluation's sampling seeds are keyed by: one no run reaches.
EVALUATION = 2**32 - 1


@dataclass
class Evaluation:
    """What `evaluate` found; equal on every rank. scores: arm -> {"accuracy", "stderr", "missing"}."""

    n: int
    scores: dict[str, dict]
    counters: dict[str, int]
    seconds: float


def evaluate(config: Config, world: World, scorer, vectors: dict, rows: list, digest: int = 0) -> Evaluation:
    """Mean reward and its standard error over `rows` for each of vectors (name -> (D,) or None: base).

    Rows are shared over the ranks like a generation's; one all-gather.
    """
    indices = np.arange(len(rows))
    arms = [Arm(name, vector, rows, indices) for name, vector in vectors.items()]
    lengths = [len(rows)] * len(arms)
    scores, busy, _ = scorer.score(arms, world.share(lengths), EVALUATION)
    busy.total = busy.place + busy.generate + busy.score
    result = world.exchange(lengths, scores, digest, busy)
    found = {arm.name: {"accuracy": score.mean(result.worst), "stderr": score.stderr(result.worst),
                        "missing": score.missing} for arm, score in zip(arms, result.arms)}
    counters = {name: result.total(name) for name in ("completions", "tokens", "cut", "empty", "too_long")}
    return Evaluation(len(rows), found, counters, float(result.header["busy_ns"].max()) / 1e9)


def changes_output(engine, prompts: list[list[int]], dimension: int) -> bool:
    """Whether the warm start answers any of `prompts` otherwise than the base model does (greedy)."""
    from .engine import Request
    answers = []
    for vector in (None, np.zeros(dimension)):
        engine.place([vector])
        answers.append([c.tokens for c in engine.generate([Request(0, p, 0) for p in prompts])])
    return answers[0] != answers[1]
