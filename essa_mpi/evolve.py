"""The generation loop (paper, Algorithm 1). Knows nothing of files, plots or how rows are scored."""

import time
from dataclasses import dataclass

import numpy as np

from .config import Config, UserError
from .rows import Rows
from .scoring import Arm
from .search import make_search
from .world import Busy, Exchanged, World


@dataclass
class Generation:
    """What one generation was, the same on every rank but for the seconds and samples."""

    number: int
    fitness: np.ndarray          # (population,) float64, -inf where nothing was scored
    sigma: float                 # after the update
    digest: int
    exchanged: Exchanged
    validation: float            # mean reward of the distribution's mean before the update, nan if not done
    validation_rows: int
    missing: int                 # rows without a score, over the population
    seconds: dict[str, float]    # of this rank: perturb, place, generate, score, wait, allgather, update, total
    samples: list[dict]          # of this rank


def evolve(config: Config, world: World, task, scorer, search, start: int, record) -> None:
    """Evolve from generation `start` up to config.generations; `record(Generation)` after each.

    One collective a generation: `world.exchange`. A closing one after the last update checks
    that the search states are still equal. Raises DigestError on every rank if they are not.
    """
    rows = Rows(config, len(task.train))
    digest, gathered = search.digest(), time.perf_counter()
    for generation in range(start, config.generations):
        began, idle_until = time.perf_counter(), gathered
        batch = rows.batch(generation)                                    # the same rows on every rank
        population = search.ask(generation)                               # regenerated, not received
        arms = [Arm(f"candidate {k}", x, task.train, batch) for k, x in enumerate(population)]
        if validates(config, task, generation):                           # rides in the same all-gather
            arms.append(Arm("mean", search.mean, task.validation, np.arange(len(task.validation))))
        lengths = [len(arm.indices) for arm in arms]
        perturbed = time.perf_counter()

        scores, busy, samples = scorer.score(arms, world.share(lengths), generation)
        busy.total = time.perf_counter() - idle_until                     # all since the last all-gather
        exchanged = world.exchange(lengths, scores, digest, busy)         # the only collective

        gathered = time.perf_counter()
        people = exchanged.arms[:config.population]
        fitness = np.array([arm.mean(exchanged.worst) for arm in people])
        if not np.isfinite(fitness).any():
            raise UserError(f"generation {generation}: no candidate has a score: {exchanged.total('too_long')} prompts "
                            f"did not fit max_model_len, {sum(a.missing for a in people)} rewards are missing; "
                            f"raise max_model_len, or see why the reward gives none (logs/)")
        search.tell(generation, fitness)                                  # the same update everywhere
        digest = search.digest()
        ended = time.perf_counter()

        mean = exchanged.arms[config.population] if len(arms) > config.population else None
        record(Generation(
            generation, fitness, search.sigma, digest, exchanged,
            mean.mean(exchanged.worst) if mean else float("nan"), len(task.validation) if mean else 0,
            sum(arm.missing for arm in people),
            {"perturb": perturbed - began, "place": busy.place, "generate": busy.generate, "score": busy.score,
             "wait": exchanged.wait, "allgather": exchanged.seconds, "update": ended - gathered,
             "total": ended - began}, samples))
    world.exchange([], [], digest, Busy())


def validates(config: Config, task, generation: int) -> bool:
    """Whether the mean is scored on the validation rows in this generation."""
    every = config.validation_every
    return bool(every and task.validation and generation % every == 0)


def new_search(config: Config, dimension: int):
    """The search that `config` asks for, over `dimension` singular values."""
    options = {"active": config.active, "step_size": config.step_size, "mean_decay": config.mean_decay}
    return make_search(config.search, dimension, config.population, config.sigma, config.seed,
                       **{key: value for key, value in options.items() if value})
