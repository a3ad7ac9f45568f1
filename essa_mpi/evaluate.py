"""Scores of the base model, the warm start and evolved adapters on rows: the training path, other rows."""

from dataclasses import dataclass, replace

import numpy as np

from .config import Config
from .estimates import mean_and_error, pass_at_k, powers_of_two
from .scoring import Arm
from .world import World

# The generation evaluation's sampling seeds are keyed by: one no run reaches.
EVALUATION = 2**32 - 1
BLOCK = 16      # samples of a row made at once: a rank's completions must fit its memory


@dataclass
class Evaluation:
    """What `evaluate` found; equal on every rank. scores: arm -> {"accuracy", "stderr", "missing"}.

    values: arm -> (rows, samples) float64, nan where there is no score.
    """

    n: int
    scores: dict[str, dict]
    counters: dict[str, int]
    seconds: float
    values: dict[str, np.ndarray]


def evaluate(config: Config, world: World, scorer, vectors: dict, rows: list, digest: int = 0) -> Evaluation:
    """Mean reward and its standard error over `rows` for each of vectors (name -> (D,) or None: base).

    Rows are shared over the ranks like a generation's; one all-gather of the scores, and one of the rows' values. A vector
    that is there under two names (the final mean may be the best validated one) is scored once: near-ties would else
    give it two scores.
    """
    indices, same = np.arange(len(rows)), _first_names(vectors)
    arms = [Arm(name, vectors[name], rows, indices) for name in dict.fromkeys(same.values())]
    lengths, mine = [len(rows)] * len(arms), []
    scores, busy, _ = scorer.score(arms, world.share(lengths), EVALUATION, mine)
    busy.total, busy.components = busy.place + busy.generate + busy.score, []
    result = world.exchange(lengths, scores, digest, busy)
    found = {arm.name: {"accuracy": score.mean(result.worst), "stderr": score.stderr(result.worst),
                        "missing": score.missing} for arm, score in zip(arms, result.arms)}
    counters = {name: result.total(name) for name in ("completions", "tokens", "cut", "empty", "too_long")}
    samples = max(1, config.samples)
    values = world.collect(np.concatenate([*mine, np.empty((0, samples))]), lengths)
    values = dict(zip(found, values.reshape(len(arms), len(rows), samples)))
    return Evaluation(len(rows), {name: dict(found[first]) for name, first in same.items()}, counters,
                      float(result.header["busy_ns"].max()) / 1e9, {name: values[first] for name, first in same.items()})


def _first_names(vectors: dict) -> dict[str, str]:
    """name -> the first name under which the same array is in `vectors`."""
    def first(name):
        return next(other for other, vector in vectors.items() if other == name or (
            isinstance(vector, np.ndarray) and isinstance(vectors[name], np.ndarray) and np.array_equal(vector, vectors[name])))
    return {name: first(name) for name in vectors}


def sample(config: Config, world: World, make_scorer, vectors: dict, rows: list, samples: int) -> Evaluation:
    """The same with `samples` completions a row, at config.temperature; values (rows, samples).

    make_scorer(config) -> a scorer with that config's sampling.
    """
    found = None
    for start in range(0, samples, BLOCK):
        # Further samples are those of another seed: no two of a row are drawn alike.
        part = replace(config, samples=min(BLOCK, samples - start), seed=(config.seed + start) % 2**63)
        more = evaluate(part, world, make_scorer(part), vectors, rows)
        if found is None:
            found = more
            continue
        found.values = {arm: np.hstack([found.values[arm], more.values[arm]]) for arm in vectors}
        found.counters = {name: found.counters[name] + more.counters[name] for name in found.counters}
        found.seconds += more.seconds
    return found


def rates(found: Evaluation, right_at: float) -> dict[str, dict]:
    """arm -> {"avg@n", "pass@1", "pass@2", ...}: [estimate, standard error], of n samples a row.

    avg@n is the mean reward, a missing one counted as the worst; pass@k: a sample is right if its reward is at
    least right_at.
    """
    out = {}
    worst = min((float(np.nanmin(v)) for v in found.values.values() if np.isfinite(v).any()), default=0.0)
    for arm, values in found.values.items():
        samples = values.shape[1]
        filled = np.where(np.isfinite(values), values, worst)
        right = (values >= right_at).sum(axis=1)
        out[arm] = {f"avg@{samples}": mean_and_error(filled.mean(axis=1)),
                    **{f"pass@{k}": mean_and_error(pass_at_k(samples, right, k)) for k in powers_of_two(samples)}}
    return out


def paired(found: Evaluation) -> list[dict]:
    """Each arm against each before it on the same rows: {"arm", "minus", "difference", "stderr", "rows"}."""
    arms, out = list(found.values), []
    for i, arm in enumerate(arms):
        for other in arms[:i]:
            difference = (found.values[arm] - found.values[other]).mean(axis=1)
            difference = difference[np.isfinite(difference)]     # rows that both have a score for
            mean, error = mean_and_error(difference)
            out.append({"arm": arm, "minus": other, "difference": mean, "stderr": error, "rows": len(difference)})
    return out


def changes_output(engine, prompts: list[list[int]], dimension: int) -> bool:
    """Whether the warm start answers any of `prompts` otherwise than the base model does (greedy)."""
    from .engine import Request
    answers = []
    for vector in (None, np.zeros(dimension)):
        engine.place([vector])
        answers.append([c.tokens for c in engine.generate([Request(0, p, 0) for p in prompts])])
    return answers[0] != answers[1]
