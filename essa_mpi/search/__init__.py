"""The search distribution N(m, sigma^2 C): sample it (`ask`), learn from fitness (`tell`).

A search is replicated: every rank holds one, tells it the same fitness and must
end with the same bits, which `digest` proves. Hence candidates are regenerated
from (seed, generation, candidate), exp and log come from `decimal` (libm's
differ between systems), and sums run in a written order. `sep` calls nothing
else, so its bits are the same on every machine. The other kinds call BLAS and
LAPACK: their bits are the same where library, threads and CPU type are the same.
"""

from .base import CONDITION_MAX, LOG_SIGMA_STEP_MAX, SCALE_RANGE, SIGMA_BITS, Search
from .cma import CMA, SeparableCMA, eigen
from .exact import integer
from .fast import FastCMA
from .limited import LimitedCMA

KINDS = {"cma": CMA, "fast": FastCMA, "sep": SeparableCMA, "limited": LimitedCMA}


# D up to which `auto` takes the full covariance. It learns about 2 mu_eff / D^2 of its shape a generation: at D = 4096 with
# population 128 it was, after 400 generations, where the diagonal one was (benchmarks.highdimension), LM-MA-ES ahead of both.
FULL_UP_TO = 2048


def choose(dimension):
    """(kind, why) that `auto` takes for D = dimension."""
    if dimension <= FULL_UP_TO:
        return "fast", f"a full covariance of {8 * dimension**2 / 2**20:.0f} MiB"
    return "limited", f"a full covariance, {8 * dimension**2 / 2**30:.1f} GiB, would learn too slowly"


def make_search(kind, dimension, population, sigma, seed, **options):
    """A new search with mean 0 and C = I.

    kind: "cma" (full covariance, the textbook), "fast" (the same covariance by a factor of it), "sep"
    (diagonal), "limited" (LM-MA-ES) or "auto" (see `choose`). dimension >= 1, population >= 2, finite sigma > 0, 0 <= seed < 2^64.
    options: `active`, `step_size`, `mean_decay` (see `Search`), `eigen_every` for "cma".
    Raises ValueError naming key, value and what is allowed.
    """
    if kind == "auto":
        kind = choose(integer("dimension", dimension, 1))[0]
    if kind not in KINDS:
        raise ValueError(f"search = {kind!r}; allowed: 'auto', {', '.join(map(repr, KINDS))}")
    unknown = sorted(set(options) - set(KINDS[kind].options))
    if unknown:
        allowed = ", ".join(KINDS[kind].options) or "none"
        raise ValueError(f"{unknown[0]} = {options[unknown[0]]!r}; allowed options of search = {kind!r}: {allowed}")
    return KINDS[kind](dimension, population, sigma, seed, **options)
