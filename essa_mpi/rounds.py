"""One generation's scores: one all-gather, or, where the config asks for it, a few.

Plain: every candidate is scored on the whole batch, and one all-gather ends it.

Racing (`racing` = R rounds): a round scores a part of the batch and ends with an all-gather of the same
form. A candidate is dropped once it cannot be among the mu best any more, whatever its remaining rows
give: its fitness with the largest reward on all of them lies below the mu-th largest of the fitnesses
with the least. With weights that are zero below rank mu the update is that of the run without a race
(maximal rewards bound it: nothing is estimated). A missing row scores the least reward there can be.

Re-evaluation (`reevaluate` = r): after the scores are in, the r candidates about the selection's edge
are scored on as many further rows, the same for all of them, and their fitness becomes the mean of both
(after UH-CMA-ES: Hansen et al., IEEE TEVC 13 (2009); the treatment by more evaluations, where they
decide). How the ranks among them changed tells the noise.
"""

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from .config import Config, reward_bounds
from .scoring import Arm
from .search.exact import ranking
from .world import ArmScore, Busy, Exchanged, World, to_fixed


@dataclass
class Scores:
    """What a generation's completions were worth; equal on every rank but for samples and seconds."""

    fitness: np.ndarray              # (population,): over the rows scored, -inf where nothing was
    told: np.ndarray                 # (population,): the same, -inf for those that a race dropped
    people: list[ArmScore]
    others: list[tuple[float, float]]  # mean and standard error of the arms beside the candidates
    exchanged: Exchanged             # of all the all-gathers
    signal: float                    # standard deviation of the candidates' true fitness, and of its noise; nan: unknown
    noise: float
    batch: int                       # rows each candidate was to be scored on, further rows aside
    rows_saved: int = 0              # by racing
    changed_ranks: float = float("nan")  # re-evaluation: mean change of rank among the re-evaluated, over the expected
    busy: Busy = field(default_factory=Busy)
    samples: list[dict] = field(default_factory=list)


class Round:
    """Scores arms on this rank and exchanges; counts what the rounds of a generation cost together."""

    def __init__(self, world: World, scorer, generation: int, digest: int, clock, stop=lambda: False):
        """clock() -> seconds since the last call: what this rank was busy before the all-gather.

        stop() -> whether this rank wants the run to end after this generation.
        """
        self._world, self._scorer, self._generation, self._digest = world, scorer, generation, digest
        self._stop = stop
        self._clock, self.exchanged, self.busy, self.samples = clock, None, Busy(), []

    def score(self, arms: list[Arm]) -> tuple[list[ArmScore], float]:
        """(a score an arm, the least finite reward). One all-gather."""
        lengths = [len(arm.indices) for arm in arms]
        scores, busy, samples = self._scorer.score(arms, self._world.share(lengths), self._generation)
        busy.total = self._clock()
        found = self._world.exchange(lengths, scores, self._digest, busy, self._stop())
        self._clock()
        for name in ("place", "generate", "score", "total"):
            setattr(self.busy, name, getattr(self.busy, name) + getattr(busy, name))
        self.samples = self.samples or samples
        self.exchanged = found if self.exchanged is None else together(self.exchanged, found)
        return found.arms, found.worst


def together(a: Exchanged, b: Exchanged) -> Exchanged:
    """What two all-gathers of a generation were in all."""
    header = {name: a.header[name] + b.header[name] for name in a.header}
    header["digest"] = b.header["digest"]
    for mine, more in zip(a.components, b.components):
        mine.join(more)
    return Exchanged(a.arms, min(a.worst, b.worst), header, a.bytes_sent + b.bytes_sent, a.wait + b.wait,
                     a.seconds + b.seconds, a.wait_mean + b.wait_mean, a.count + b.count, a.components)


def score_generation(config: Config, rounds: Round, candidates: list[Arm], others: list[Arm], mu: int,
                     further: np.ndarray) -> Scores:
    """Score `candidates` (all on the same batch) and, in the first all-gather, `others`.

    mu: how many of the best the search learns from. further: rows for re-evaluation.
    """
    batch = len(candidates[0].indices)
    parts = np.array_split(np.arange(batch), config.racing or 1)
    first, worst = rounds.score([_on(arm, parts[0]) for arm in candidates] + others)
    low, high = (reward_bounds(config) if config.racing else None) or (worst, worst)
    people, rest = first[:len(candidates)], first[len(candidates):]
    signal, noise = spread(people, low)
    noise *= (len(parts[0]) / batch) ** 0.5
    beside = [(arm.mean(low), arm.stderr(low)) for arm in rest]
    running, saved = list(range(len(candidates))), 0
    for part in parts[1:]:
        left = batch - people[running[0]].rows - people[running[0]].missing
        staying = _can_still_win(people, running, mu, left, low, high)
        saved += left * (len(running) - len(staying))
        running = staying
        more, _ = rounds.score([_on(candidates[k], part) for k in running])
        for k, score in zip(running, more):
            people[k].join(score)
    fitness = np.array([arm.mean(low) for arm in people])
    told = np.full(len(people), -np.inf)
    told[running] = fitness[running]
    scores = Scores(fitness, told, people, beside, rounds.exchanged, signal, noise, batch, saved)
    if config.reevaluate:
        _reevaluate(config, rounds, candidates, scores, mu, further)
    scores.exchanged, scores.busy, scores.samples = rounds.exchanged, rounds.busy, rounds.samples
    return scores


def _on(arm: Arm, part: np.ndarray) -> Arm:
    return replace(arm, indices=arm.indices[part])


def _can_still_win(people, running, mu, left, low, high) -> list[int]:
    """Those of `running` that may end among the mu best if each has `left` rows to go, worth low to high each.

    Fitnesses are compared as the floats they will be: rounding never turns an order around.
    """
    least, most = {}, {}
    for k in running:
        arm = people[k]
        total, rows = arm.total + arm.missing * to_fixed(low), arm.rows + arm.missing + left
        least[k] = float(Fraction(total + left * to_fixed(low), rows << 64))
        most[k] = float(Fraction(total + left * to_fixed(high), rows << 64))
    edge = sorted(least.values(), reverse=True)[mu - 1]
    return [k for k in running if most[k] >= edge]


def _reevaluate(config, rounds, candidates, scores: Scores, mu, further) -> None:
    """Score the candidates about rank mu again; their fitness becomes the mean over all their rows."""
    order = ranking(scores.fitness)
    begin = min(max(0, mu - (config.reevaluate + 1) // 2), len(candidates) - config.reevaluate)
    again = sorted(order[begin:begin + config.reevaluate].tolist())
    arms = [replace(candidates[k], indices=further) for k in again]
    found, worst = rounds.score(arms)
    old = np.array([scores.fitness[k] for k in again])
    new = np.array([arm.mean(worst) for arm in found])
    both = np.isfinite(old) & np.isfinite(new)
    if not both.any():
        return
    # The further rows may be harder: what all of them lost or gained on average is no candidate's doing.
    shift = math.fsum(old[both] - new[both]) / int(both.sum())
    size = len(candidates[0].indices)
    for k, score, before, after in zip(again, found, old, new):
        scores.people[k].join(score)
        if np.isfinite(before) and np.isfinite(after):
            scores.fitness[k] = (size * before + len(further) * (after + shift)) / (size + len(further))
    scores.told = scores.fitness.copy()
    count = int(both.sum())
    if count > 1:
        ranks = [np.argsort(ranking(values[both])) for values in (old, new)]
        # Two independent orders of n differ by (n^2 - 1) / (3 n) a rank on average.
        scores.changed_ranks = float(np.abs(ranks[0] - ranks[1]).mean() / ((count**2 - 1) / (3 * count)))


def spread(people: list[ArmScore], worst: float) -> tuple[float, float]:
    """(signal, noise): standard deviations, over the candidates, of their true fitness and of its error.

    From the two halves of the batch: what a candidate gains on both is its own, so the covariance of the
    halves is the signal's variance, and the variance of their difference, times n1 n2 / (n1 + n2)^2 of
    their rows (a quarter), that of the mean's noise. How hard the rows are is in all candidates alike and
    drops out. nan with fewer than 3 candidates or 2 rows.
    """
    halves = np.array([[arm.half(odd).mean(worst) for odd in (False, True)] for arm in people])
    halves = halves[np.isfinite(halves).all(axis=1)]
    if len(halves) < 3:
        return float("nan"), float("nan")
    first, second = halves.T
    covariance = float(np.cov(first, second)[0, 1])
    n1, n2 = (people[0].half(odd).rows + people[0].half(odd).missing for odd in (False, True))
    return max(covariance, 0.0) ** 0.5, float(np.var(first - second, ddof=1) * n1 * n2 / (n1 + n2) ** 2) ** 0.5
