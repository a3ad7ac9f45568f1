"""The search distribution N(m, sigma^2 C): sample it (`ask`), learn from fitness (`tell`).

CMA-ES after Hansen, "The CMA Evolution Strategy: A Tutorial", arXiv 1604.00772
v2; numbers in brackets are its equations. Fitness is MAXIMISED. Negative
weights (active CMA) are left out: the mu best have the weights of the tutorial,
renormalised to sum to 1, the rest have none.

A search is replicated: every rank holds one, tells it the same fitness and must
end with the same bits, which `digest` proves. Hence candidates are regenerated
from (seed, generation, candidate), exp and log come from `decimal` (libm's
differ between systems), and sums run in a written order. `SeparableCMA` calls
nothing else, so its bits are the same on every machine. `CMA` calls BLAS and
LAPACK: its bits are the same where library, threads and CPU type are the same.
"""

import decimal
import hashlib
import math
import numbers
import operator

import numpy as np

from essa_mpi import perturbation

# Guards. Healthy runs seldom meet them; all are functions of the state alone.
CONDITION_MAX = 1e14      # eigenvalues of C are kept above the largest / this
SCALE_RANGE = 1e16        # the largest deviation stays within sigma_0 / this and sigma_0 x this
SIGMA_BITS = 64           # sigma stays within sigma_0 2^-64 and sigma_0 2^64; C takes the rest, exactly
LOG_SIGMA_STEP_MAX = 1.0  # sigma grows at most e-fold a generation

_DECIMAL = decimal.Context(prec=40)


def make_search(kind, dimension, population, sigma, seed, **options):
    """A new search with mean 0 and C = I.

    kind: "cma" (full covariance) or "sep" (diagonal). dimension >= 1,
    population >= 2, finite sigma > 0, 0 <= seed < 2^64. options: `eigen_every`
    for "cma". Raises ValueError naming key, value and what is allowed.
    """
    if kind not in KINDS:
        raise ValueError(f"search = {kind!r}; allowed: {', '.join(map(repr, KINDS))}")
    unknown = sorted(set(options) - set(KINDS[kind].options))
    if unknown:
        allowed = ", ".join(KINDS[kind].options) or "none"
        raise ValueError(f"{unknown[0]} = {options[unknown[0]]!r}; allowed options of search = {kind!r}: {allowed}")
    return KINDS[kind](dimension, population, sigma, seed, **options)


class Search:
    """What every kind of CMA-ES shares: sampling, mean, step size, paths, state.

    A kind says what C is: `_transform` (z to y), `_isotropic` (C^(-1/2) y_w),
    `_learn` (the update of C), `_decompose`, `_variances` (C's diagonal) and its
    own arrays of the state.
    """

    options = ()  # keyword arguments of the kind beyond the common four

    def __init__(self, dimension, population, sigma, seed):
        """dimension D >= 1, population >= 2, finite sigma > 0, 0 <= seed < 2^64; else ValueError."""
        self.dimension = n = _integer("dimension", dimension, 1)
        self.population = _integer("population", population, 2)
        self.seed = _integer("seed", seed, 0, 2**64 - 1)
        if not isinstance(sigma, numbers.Real) or not 0.0 < sigma < math.inf:
            raise ValueError(f"sigma = {sigma!r}; allowed: a finite number > 0")
        self._sigma_0 = float(sigma)

        # Table 1 of the tutorial. w'_i = ln((lambda + 1)/2) - ln i; the mu positive ones, scaled to sum to 1.
        self.mu = self.population // 2
        raw = [_log((self.population + 1) / 2) - _log(i) for i in range(1, self.mu + 1)]  # (49)
        self.weights = np.array(raw) / math.fsum(raw)  # (53)
        self.mu_eff = mu_eff = 1.0 / math.fsum(self.weights**2)  # (8)
        self.c_sigma = (mu_eff + 2) / (n + mu_eff + 5)  # (55)
        self.d_sigma = 1 + 2 * max(0.0, math.sqrt((mu_eff - 1) / (n + 1)) - 1) + self.c_sigma  # (55)
        self.c_c = (4 + mu_eff / n) / (n + 4 + 2 * mu_eff / n)  # (56)
        self.c_1 = 2 / ((n + 1.3) * (n + 1.3) + mu_eff)  # (57)
        self.c_mu = min(1 - self.c_1, 2 * (1 / 4 + mu_eff + 1 / mu_eff - 2) / ((n + 2) * (n + 2) + mu_eff))  # (58)
        self.chi_n = math.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n * n))  # E||N(0, I)||

        self._generation = 0
        self._mean = np.zeros(n)
        self._sigma = self._sigma_0
        self._p_sigma = np.zeros(n)
        self._p_c = np.zeros(n)
        self._asked = None  # ask's result for `candidate`; no part of the state

    @property
    def generation(self):
        """The generation to ask for and tell next, int: how many have been told."""
        return self._generation

    @property
    def mean(self):
        """m, float64 (D,), a copy."""
        return self._mean.copy()

    @property
    def sigma(self):
        """The step size, float."""
        return self._sigma

    @property
    def deviations(self):
        """Standard deviation of each coordinate, float64 (D,): sigma alone says little once C has learnt."""
        return self._sigma * np.sqrt(self._variances())

    def ask(self, generation):
        """All candidates of a generation, float64 (population, D), a copy.

        A pure function of the state, the seed and the generation: asking twice
        gives the same bits. Raises ValueError unless generation is the next one.
        """
        return self._candidates(generation).copy()

    def candidate(self, generation, k):
        """Candidate k, float64 (D,), a copy: the bits of ask(generation)[k].

        It IS a row of ask's array, kept until the next `tell`: a matrix-vector
        product may round otherwise than the same row of a matrix-matrix one.
        Raises ValueError unless generation is the next one and 0 <= k < population.
        """
        return self._candidates(generation)[_integer("candidate", k, 0, self.population - 1)].copy()

    def tell(self, generation, fitness):
        """Learn from a generation's fitness.

        fitness: (population,) numbers, larger is better, in candidate order. A
        non-finite one (nan, inf, -inf) is the worst; ties go to the lower index.
        Raises ValueError, and changes nothing, if generation is not the next
        one, the shape is another, or no fitness is finite.
        """
        Z, Y = self._sample(generation)
        best = _ranking(fitness, self.population)[: self.mu]
        Y = Y[best]
        y_w = _weighted_sum(self.weights, Y)  # (41)
        z_w = _weighted_sum(self.weights, Z[best])

        self._mean = self._mean + self._sigma * y_w  # (42), c_m = 1 (54)

        # Step-size control.
        c_sigma, c_c, c_1, c_mu = self.c_sigma, self.c_c, self.c_1, self.c_mu
        step = math.sqrt(c_sigma * (2 - c_sigma) * self.mu_eff)
        self._p_sigma = (1 - c_sigma) * self._p_sigma + step * self._isotropic(z_w)  # (43)
        length = math.sqrt(math.fsum(self._p_sigma**2))  # fsum: the exact sum, so no order to agree on
        log_step = c_sigma / self.d_sigma * (length / self.chi_n - 1)
        self._sigma = self._sigma * _exp(min(LOG_SIGMA_STEP_MAX, log_step))  # (44)

        # Covariance matrix adaptation. h_sigma (tutorial, appendix A) stalls the path while sigma grows fast.
        start = 1 - _power(1 - c_sigma, 2 * (self._generation + 1))
        h_sigma = 1.0 if length / math.sqrt(start) < (1.4 + 2 / (self.dimension + 1)) * self.chi_n else 0.0
        self._p_c = (1 - c_c) * self._p_c + h_sigma * math.sqrt(c_c * (2 - c_c) * self.mu_eff) * y_w  # (45)
        delta = (1 - h_sigma) * c_c * (2 - c_c)
        self._learn(max(0.0, 1 + c_1 * delta - c_1 - c_mu), Y)  # (47)

        self._generation += 1
        self._asked = None
        self._decompose()
        self._guard()

    def state(self):
        """Everything needed to go on with identical bits: a dict of float64 and int64 arrays, copies.

        Beside what moves it holds what the search was made with, so that
        `load_state` can refuse the state of another search.
        """
        return {key: array.copy() for key, array in self._arrays().items()}

    def load_state(self, state):
        """Go on from `state()` of a search made with the same arguments.

        Raises ValueError, and changes nothing, if a key is missing or unknown,
        a dtype or shape differs, a number is not finite, or it comes from a
        search of other arguments.
        """
        own = self._arrays()
        if set(state) != set(own):
            raise ValueError(f"search state: keys {sorted(state)}; allowed: exactly {sorted(own)}, "
                             f"as written by the same kind of search")
        new = {key: np.array(state[key], order="C") for key in own}
        for key, array in new.items():
            if array.dtype != own[key].dtype or array.shape != own[key].shape:
                raise ValueError(f"search state: {key} is {array.dtype} {array.shape}; "
                                 f"allowed: {own[key].dtype} {own[key].shape}")
            if not np.isfinite(array).all():
                raise ValueError(f"search state: {key} has numbers that are not finite; use an older checkpoint")
        for key in self._arguments():
            if new[key] != own[key]:
                raise ValueError(f"search state: {key} = {new[key]}; allowed: {own[key]}, with which this search "
                                 f"was made; resume with the configuration of the run")
        self._load(new)
        self._asked = None

    def digest(self):
        """64 bits of BLAKE2b over the state, as a signed int (8 bytes on the wire): equal states, equal digests."""
        digest = hashlib.blake2b(digest_size=8)
        for key, array in sorted(self._arrays().items()):
            array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
            digest.update(f"{key} {array.dtype.str} {array.shape} ".encode())
            digest.update(array.data)
        return int.from_bytes(digest.digest(), "little", signed=True)

    # What follows is for this file alone.

    def _sample(self, generation):
        """z ~ N(0, I) (38) and y ~ N(0, C) (39) of the next generation, both (population, D)."""
        if generation != self._generation:
            raise ValueError(f"generation = {generation!r}; allowed: {self._generation}, "
                             f"as this search has been told {self._generation} generations")
        Z = perturbation.population_normals(self.seed, generation, range(self.population), self.dimension)
        return Z, self._transform(Z)

    def _candidates(self, generation):
        if self._asked is None or generation != self._generation:
            self._asked = self._mean + self._sigma * self._sample(generation)[1]  # (40)
        return self._asked

    def _guard(self):
        """Bound the deviations, then sigma.

        Only sigma^2 C means something, and on curved valleys sigma grows without
        end while C shrinks. So a power of two goes from sigma to C: it changes
        no bit of any candidate, and neither can overflow.
        """
        scale = self._sigma * math.sqrt(self._variances().max())
        bounded = min(max(scale, self._sigma_0 / SCALE_RANGE), self._sigma_0 * SCALE_RANGE)
        if bounded != scale:
            self._sigma *= bounded / scale
        shift = math.frexp(self._sigma / self._sigma_0)[1]
        if abs(shift) > SIGMA_BITS:
            self._sigma = math.ldexp(self._sigma, -shift)
            self._rescale(shift)

    def _rescale(self, shift):
        self._p_c = np.ldexp(self._p_c, shift)
        self._C = np.ldexp(self._C, 2 * shift)

    def _arguments(self):
        return {
            "dimension": np.array(self.dimension, dtype=np.int64),
            "population": np.array(self.population, dtype=np.int64),
            "seed": np.array(self.seed, dtype=np.uint64).astype(np.int64),  # the same 64 bits
            "initial_sigma": np.array(self._sigma_0),
        }

    def _arrays(self):
        return {
            **self._arguments(),
            "generation": np.array(self._generation, dtype=np.int64),
            "mean": self._mean,
            "sigma": np.array(self._sigma),
            "p_sigma": self._p_sigma,
            "p_c": self._p_c,
            "C": self._C,
        }

    def _load(self, arrays):
        self._generation = int(arrays["generation"])
        self._mean = arrays["mean"]
        self._sigma = float(arrays["sigma"])
        self._p_sigma = arrays["p_sigma"]
        self._p_c = arrays["p_c"]
        self._C = arrays["C"]


class CMA(Search):
    """Full covariance: C is (D, D), O(D^2) memory, O(D^3) a decomposition.

    eigen_every: C = B diag(d^2) B^T is decomposed whenever the number of
    generations told is a multiple of it (1: always, the textbook). In between
    candidates come from the last decomposition, while C goes on learning. The
    tutorial (B.2) finds 1 / (10 D (c_1 + c_mu)) generations harmless.
    """

    options = ("eigen_every",)

    def __init__(self, dimension, population, sigma, seed, *, eigen_every=1):
        """As `Search`; eigen_every >= 1, else ValueError."""
        super().__init__(dimension, population, sigma, seed)
        self.eigen_every = _integer("eigen_every", eigen_every, 1)
        self._C = np.eye(self.dimension)
        self._B = np.eye(self.dimension)
        self._d = np.ones(self.dimension)
        self._eigen_generation = 0

    def _transform(self, Z):
        return (Z * self._d) @ self._B.T  # (39), a row a candidate

    def _isotropic(self, z_w):
        return self._B @ z_w  # C^(-1/2) y_w = B diag(1/d) B^T B diag(d) z_w

    def _learn(self, decay, Y):
        Y = np.sqrt(self.weights)[:, None] * Y
        self._C *= decay
        self._C += self.c_1 * np.outer(self._p_c, self._p_c)
        self._C += self.c_mu * (Y.T @ Y)

    def _decompose(self):
        if self._generation % self.eigen_every == 0:
            self._C, self._B, self._d = eigen(self._C)
            self._eigen_generation = self._generation

    def _variances(self):
        return self._C.diagonal()

    def _rescale(self, shift):
        super()._rescale(shift)
        self._d = np.ldexp(self._d, shift)

    def _arguments(self):
        return {**super()._arguments(), "eigen_every": np.array(self.eigen_every, dtype=np.int64)}

    def _arrays(self):
        return {
            **super()._arrays(),
            "B": self._B,
            "d": self._d,
            "eigen_generation": np.array(self._eigen_generation, dtype=np.int64),
        }

    def _load(self, arrays):
        super()._load(arrays)
        self._B = arrays["B"]
        self._d = arrays["d"]
        self._eigen_generation = int(arrays["eigen_generation"])


class SeparableCMA(Search):
    """Diagonal covariance: C is (D,), all O(D). sep-CMA-ES, Ros & Hansen, PPSN X (2008).

    A diagonal has D instead of D (D + 1)/2 entries to learn, so c_1 and c_mu
    are (D + 2)/3 times those of the full matrix (there: c_cov, which scales
    both updates). The other constants are the tutorial's, newer than the paper's.
    """

    def __init__(self, dimension, population, sigma, seed):
        """As `Search`."""
        super().__init__(dimension, population, sigma, seed)
        factor = (self.dimension + 2) / 3
        self.c_1 = min(1.0, factor * self.c_1)
        self.c_mu = min(1 - self.c_1, factor * self.c_mu)
        self._C = np.ones(self.dimension)

    def _transform(self, Z):
        return np.sqrt(self._C) * Z  # (39) with B = I

    def _isotropic(self, z_w):
        return z_w

    def _learn(self, decay, Y):
        self._C = decay * self._C + self.c_1 * self._p_c**2 + self.c_mu * _weighted_sum(self.weights, Y**2)

    def _decompose(self):
        self._C = np.maximum(self._C, self._C.max() / CONDITION_MAX)

    def _variances(self):
        return self._C


KINDS = {"cma": CMA, "sep": SeparableCMA}


def eigen(C):
    """C = B diag(d^2) B^T.

    C: (D, D) float64. Returns (C, B, d): C made symmetric, its eigenvalues
    lifted to the largest / CONDITION_MAX where they are less; B (D, D), the
    eigenvectors as columns, each with its largest entry positive (LAPACK leaves
    the sign open); d (D,), roots of the eigenvalues, ascending.
    """
    C = (C + C.T) / 2
    values, B = np.linalg.eigh(C)
    B *= np.where(B[np.abs(B).argmax(axis=0), np.arange(len(B))] < 0, -1.0, 1.0)
    floor = values[-1] / CONDITION_MAX
    if values[0] < floor:
        values = np.maximum(values, floor)
        C = (B * values) @ B.T
        C = (C + C.T) / 2
    return C, B, np.sqrt(values)


def _ranking(fitness, population):
    """Candidate indices, best first."""
    fitness = np.asarray(fitness, dtype=np.float64)
    if fitness.shape != (population,):
        raise ValueError(f"fitness has shape {fitness.shape}; allowed: {(population,)}, one number a candidate")
    finite = np.isfinite(fitness)
    if not finite.any():
        raise ValueError("fitness: none of the candidates has a finite one; allowed: at least 1 (see the reward)")
    return np.argsort(np.where(finite, -fitness, np.inf), kind="stable")


def _weighted_sum(weights, rows):
    """sum_i w_i row_i, one after the other: a BLAS would choose the order by CPU and threads."""
    total = weights[0] * rows[0]
    for weight, row in zip(weights[1:], rows[1:]):
        total += weight * row
    return total


def _exp(x):
    return float(_DECIMAL.exp(decimal.Decimal(x)))


def _log(x):
    return float(_DECIMAL.ln(decimal.Decimal(x)))


def _power(x, exponent):
    return float(_DECIMAL.power(decimal.Decimal(x), decimal.Decimal(exponent)))


def _integer(key, value, low, high=None):
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low or (high is not None and number > high):
        allowed = f"an integer >= {low}" + ("" if high is None else f" and <= {high}")
        raise ValueError(f"{key} = {value!r}; allowed: {allowed}")
    return number
