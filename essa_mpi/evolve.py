"""The generation loop (paper, Algorithm 1). Knows nothing of files, plots or how rows are scored."""

import time
from dataclasses import dataclass

import numpy as np

from . import trace
from .answers import Answers
from .config import Config, UserError
from .departure import Departure, bits
from .rounds import Round, Scores, score_generation
from .rows import Rows
from .scoring import Arm
from .search import choose, make_search
from .world import Busy, Exchanged, World


@dataclass
class Generation:
    """What one generation was, the same on every rank but for the seconds and samples."""

    number: int
    fitness: np.ndarray          # (population,) float64, -inf where nothing was scored
    sigma: float                 # after the update
    digest: int
    exchanged: Exchanged
    start: tuple[float, float]   # mean reward of the warm start on generation 0's batch and its stderr; nan later
    validation: float            # mean reward of the distribution's mean before the update, nan if not done
    validation_rows: int
    missing: int                 # rows without a score, over the population
    scores: Scores
    seconds: dict[str, float]    # of this rank: perturb, place, generate, score, wait, allgather, update, total


def evolve(config: Config, world: World, task, scorer, search, answers: Answers, start: int, record,
           departure: Departure | None = None) -> int:
    """Evolve from generation `start` up to config.generations; `record(Generation)` after each.

    departure: when to end before; returns what it asked for (FINISH, LEAVE), 0 if nothing.

    One collective a generation: `world.exchange` (more with racing or re-evaluation: see `rounds`). A closing
    one after the last update checks that the search states are still equal. Raises DigestError on every
    rank if they are not.
    """
    rows, clock, digest = Rows(config, len(task.train)), Stopwatch(), search.digest()
    departure, stop = departure or Departure(), 0
    for generation in range(start, config.generations):
        trace.generation(generation)
        departure.begin()
        began = time.perf_counter()
        with trace.span("perturb"):
            batch = rows.batch(generation)                                # the same rows on every rank
            population, mean = search.ask(generation), search.mean        # regenerated, not received
            candidates = [Arm(f"candidate {k}", x, task.train, batch, k) for k, x in enumerate(population)]
            others = companions(config, task, generation, mean, batch)    # ride in the same all-gather
        perturbed = time.perf_counter()

        rounds = Round(world, scorer, generation, digest, clock, departure.asked)
        scores = score_generation(config, rounds, candidates, list(others.values()), search.mu,
                                  rows.further(generation))               # the only collective
        gathered = time.perf_counter()
        if not np.isfinite(scores.fitness).any():
            raise UserError(f"generation {generation}: no candidate has a score: {scores.exchanged.total('too_long')} "
                            f"prompts did not fit max_model_len, {sum(a.missing for a in scores.people)} rewards are "
                            f"missing; raise max_model_len, or see why the reward gives none (logs/)")
        with trace.span("update"):
            search.tell(generation, scores.told)                          # the same update everywhere
            digest = search.digest()
        beside = dict(zip(others, scores.others))
        validation = beside.get("mean", (float("nan"), 0.0))[0]
        answers.note(mean, search.mean, population, scores.told, validation)
        ended = time.perf_counter()

        busy, exchanged = scores.busy, scores.exchanged
        record(Generation(
            generation, scores.fitness, search.sigma, digest, exchanged, beside.get("start", (float("nan"),) * 2),
            validation, len(task.validation) if "mean" in others else 0,
            sum(arm.missing for arm in scores.people), scores,
            {"perturb": perturbed - began, "place": busy.place, "generate": busy.generate, "score": busy.score,
             "wait": exchanged.wait, "allgather": exchanged.seconds, "update": ended - gathered,
             "total": ended - began}))
        stop = bits(exchanged.header["stop"])
        if stop:
            break
    trace.generation(trace.AFTER)
    world.exchange([], [], digest, Busy())
    return stop


def companions(config: Config, task, generation: int, mean: np.ndarray, batch: np.ndarray) -> dict[str, Arm]:
    """What is scored beside the candidates: the warm start on the first batch, the mean on the validation rows."""
    found = {}
    if generation == 0:
        found["start"] = Arm("start", mean, task.train, batch)
    if validates(config, task, generation):
        found["mean"] = Arm("mean", mean, task.validation, np.arange(len(task.validation)))
    return found


def validates(config: Config, task, generation: int) -> bool:
    """Whether the mean is scored on the validation rows in this generation."""
    every = config.validation_every
    return bool(every and task.validation and generation % every == 0)


def advice(generation: Generation, sigma: float) -> str | None:
    """What the first generation says about sigma: a line if it is flat or dead, else None.

    Flat: the candidates all scored as the warm start did, so they are too near to it to differ. Dead:
    even the best lies below the warm start by more than chance, so they are too far.
    """
    start, stderr = generation.start
    finite = generation.fitness[np.isfinite(generation.fitness)]
    if not np.isfinite(start) or not len(finite):
        return None
    if finite.max() == finite.min() == start:
        wide = f"sigma = {2 * sigma:g} or more, or a larger batch"
        what = (f"If all answers are wrong, warm-start further, or raise max_tokens if they are cut; else widen it: {wide}"
                if start <= 0 else
                f"Widen it: {wide}. If all answers are wrong warm-start further, if all are right take harder rows")
        return (f"warning: generation 0 is flat: every candidate scored {start:.3f}, as the warm start; the search learns "
                f"nothing from that. {what}")
    if finite.max() < start - 2 * (0.0 if np.isnan(stderr) else stderr):
        return (f"warning: generation 0 is dead: the best candidate scored {finite.max():.3f}, the warm start "
                f"{start:.3f} +- {stderr:.3f} on the same rows. Narrow it: sigma = {sigma / 2:g} or less")
    return None


class Stopwatch:
    """Seconds since the last call, or since it was made."""

    def __init__(self):
        self._at = time.perf_counter()

    def __call__(self) -> float:
        before, self._at = self._at, time.perf_counter()
        return self._at - before


def new_search(config: Config, dimension: int):
    """The search that `config` asks for, over `dimension` singular values. Raises UserError."""
    if config.active and config.search == "auto" and choose(dimension)[0] == "limited":
        raise UserError(f"config: active = true: search = 'auto' takes 'limited' for D = {dimension}, which has no negative "
                        f"weights; set active = false, or search = 'fast' or 'sep'")
    options = {"active": config.active, "step_size": config.step_size, "mean_decay": config.mean_decay}
    return make_search(config.search, dimension, config.population, config.sigma, config.seed,
                       **{key: value for key, value in options.items() if value})
