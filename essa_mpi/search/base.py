"""What every kind of search shares: sampling, the mean, the step size, state and digest.

CMA-ES after Hansen, "The CMA Evolution Strategy: A Tutorial", arXiv 1604.00772
v2; numbers in brackets are its equations. Fitness is MAXIMISED.
"""

import hashlib
import math
import numbers

import numpy as np

from essa_mpi import perturbation

from .exact import exp, finite_or_worst, integer, log, norm, power, ranking, weighted_sum

# Guards. Healthy runs seldom meet them; all are functions of the state alone.
CONDITION_MAX = 1e14      # eigenvalues of C are kept above the largest / this
SCALE_RANGE = 1e16        # the largest deviation stays within sigma_0 / this and sigma_0 x this
SIGMA_BITS = 64           # sigma stays within sigma_0 2^-64 and sigma_0 2^64; C takes the rest, exactly
LOG_SIGMA_STEP_MAX = 1.0  # sigma grows at most e-fold a generation

STEP_SIZES = ("csa", "tpa")
TPA_MEMORY = 0.3          # pycma's c: the share of the newest comparison in the smoothed one
_HASHED = 1 << 20         # bytes up to which an array of the state is hashed as it is


class Search:
    """The search distribution N(m, sigma^2 C): sample it (`ask`), learn from fitness (`tell`).

    A kind says what C is: `_transform` (z to y), `_whiten` (back), `_isotropic`
    (C^(-1/2) y_w), `_accumulate` (p_c) and `_learn` (the update of C),
    `_variances` (C's diagonal) and its own arrays of the state.
    """

    options = ("active", "step_size", "mean_decay")  # keyword arguments beyond the common four

    def __init__(self, dimension, population, sigma, seed, *, active=False, step_size="csa", mean_decay=0.0):
        """dimension D >= 1, population >= 2, finite sigma > 0, 0 <= seed < 2^64; else ValueError.

        active: candidates below the mu best get negative weights in C (tutorial, 2016).
        step_size: "csa", cumulative step-size adaptation, or "tpa", two-point adaptation (Hansen 2008;
        in pycma's form and constants): from the second generation on candidates 0 and 1 lie on either
        side of the mean, along its last step, and sigma grows if the one ahead ranks better. It needs
        population >= 4.
        mean_decay: after each update the mean shrinks towards 0, the warm start, by this share (an
        anchor against forgetting, as the weight decay of arXiv 2605.30148); 0 <= mean_decay < 1.
        """
        self.dimension = n = integer("dimension", dimension, 1)
        self.population = integer("population", population, 2)
        self.seed = integer("seed", seed, 0, 2**64 - 1)
        if not isinstance(sigma, numbers.Real) or not 0.0 < sigma < math.inf:
            raise ValueError(f"sigma = {sigma!r}; allowed: a finite number > 0")
        if step_size not in STEP_SIZES:
            raise ValueError(f"step_size = {step_size!r}; allowed: {', '.join(map(repr, STEP_SIZES))}")
        if step_size == "tpa" and population < 4:
            raise ValueError(f"population = {population}; allowed with step_size = 'tpa': an integer >= 4, as two "
                             f"candidates are spent on the step size")
        if not isinstance(mean_decay, numbers.Real) or not 0.0 <= mean_decay < 1.0:
            raise ValueError(f"mean_decay = {mean_decay!r}; allowed: a number >= 0 and < 1")
        self.active, self.step_size, self.mean_decay = bool(active), step_size, float(mean_decay)
        self._sigma_0 = float(sigma)

        # Table 1 of the tutorial. w'_i = ln((lambda + 1)/2) - ln i; the mu positive ones, scaled to sum to 1.
        self.mu = self.population // 2
        raw = [log((self.population + 1) / 2) - log(i) for i in range(1, self.population + 1)]  # (49)
        positive, negative = raw[:self.mu], [w for w in raw[self.mu:] if w < 0]
        self.weights = np.array(positive) / math.fsum(positive)  # (53)
        self.mu_eff = mu_eff = 1.0 / math.fsum(self.weights**2)  # (8)
        self.c_sigma = (mu_eff + 2) / (n + mu_eff + 5)  # (55)
        self.d_sigma = 1 + 2 * max(0.0, math.sqrt((mu_eff - 1) / (n + 1)) - 1) + self.c_sigma  # (55)
        self.c_c = (4 + mu_eff / n) / (n + 4 + 2 * mu_eff / n)  # (56)
        self.c_1 = 2 / ((n + 1.3) * (n + 1.3) + mu_eff)  # (57)
        self.c_mu = min(1 - self.c_1, 2 * (1 / 4 + mu_eff + 1 / mu_eff - 2) / ((n + 2) * (n + 2) + mu_eff))  # (58)
        self._set_rates()
        self.chi_n = math.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n * n))  # E||N(0, I)||
        self.negative_weights = self._negative(negative) if self.active else np.zeros(0)
        self._weight_sum = 1.0 + math.fsum(self.negative_weights)
        # pycma 4.5's damping of the two-point adaptation.
        self.d_tpa = 0.7 + 2 * log(n) + 2 * log(max(1, self.population - n))

        self._generation = 0
        self._mean = np.zeros(n)
        self._sigma = self._sigma_0
        self._p_sigma = np.zeros(n)
        self._shift = np.zeros(n)   # tpa: the mean's last step in units of sigma, in the kind's coordinates
        self._ahead = 0.0           # tpa: the smoothed rank difference
        self._asked = None          # (Z, Y) and ask's result for `candidate`; no part of the state

    def _set_rates(self):
        """A kind's own c_1 and c_mu."""

    def _negative(self, raw):
        """(50) to (53): the negative weights, float64, scaled so that C stays positive definite."""
        total = math.fsum(-w for w in raw)
        mu_eff = total**2 / math.fsum(w * w for w in raw)
        bounds = [1 + 2 * mu_eff / (self.mu_eff + 2)]  # (51)
        if self.c_mu > 0:
            bounds += [1 + self.c_1 / self.c_mu, (1 - self.c_1 - self.c_mu) / (self.dimension * self.c_mu)]  # (50, 52)
        return np.array([min(bounds) / total * w for w in raw])

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
        return self._candidates(generation)[integer("candidate", k, 0, self.population - 1)].copy()

    def tell(self, generation, fitness):
        """Learn from a generation's fitness.

        fitness: (population,) numbers, larger is better, in candidate order. A
        non-finite one (nan, inf, -inf) is the worst; ties go to the lower index.
        Raises ValueError, and changes nothing, if generation is not the next
        one, the shape is another, or no fitness is finite.
        """
        Z, Y = self._sample(generation)
        fitness = finite_or_worst(fitness, self.population)
        order = ranking(fitness)
        best = order[:self.mu]
        y_w = weighted_sum(self.weights, Y[best])  # (41)
        z_w = weighted_sum(self.weights, Z[best])

        self._mean = (1 - self.mean_decay) * (self._mean + self._sigma * y_w)  # (42), c_m = 1 (54)

        # Step-size control.
        c_sigma, c_c, c_1, c_mu = self.c_sigma, self.c_c, self.c_1, self.c_mu
        step = math.sqrt(c_sigma * (2 - c_sigma) * self.mu_eff)
        self._p_sigma = (1 - c_sigma) * self._p_sigma + step * self._isotropic(z_w)  # (43)
        length = norm(self._p_sigma)
        log_step = self._two_points(fitness) if self.step_size == "tpa" else self._log_step(length)
        self._sigma = self._sigma * exp(min(LOG_SIGMA_STEP_MAX, log_step))  # (44)

        # Covariance matrix adaptation. h_sigma (tutorial, appendix A) stalls the path while sigma grows fast.
        start = 1 - power(1 - c_sigma, 2 * (self._generation + 1))
        h_sigma = 1.0 if length / math.sqrt(start) < (1.4 + 2 / (self.dimension + 1)) * self.chi_n else 0.0
        self._accumulate(1 - c_c, h_sigma * math.sqrt(c_c * (2 - c_c) * self.mu_eff), z_w, y_w)  # (45)
        delta = (1 - h_sigma) * c_c * (2 - c_c)
        worst = order[self.population - len(self.negative_weights):]
        chosen = np.concatenate([best, worst])
        self._learn(max(0.0, 1 + c_1 * delta - c_1 - c_mu * self._weight_sum),
                    self._signed_weights(Z[worst]), Z[chosen], Y[chosen])  # (47)
        if self.step_size == "tpa":
            self._shift = self._keep_shift(z_w, y_w)

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
        """64 bits of BLAKE2b over the state, as a signed int (8 bytes on the wire): equal states, equal digests.

        Of a matrix above a mebibyte the wrapping integer sums of its rows and of its columns are
        hashed: any one changed bit changes them, at the speed of the memory.
        """
        digest = hashlib.blake2b(digest_size=8)
        for key, array in sorted(self._arrays().items()):
            array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
            digest.update(f"{key} {array.dtype.str} {array.shape} ".encode())
            if array.ndim < 2 or array.nbytes <= _HASHED:
                digest.update(array.data)
            else:
                words = array.view(np.uint64)
                digest.update(words.sum(axis=0).data)
                digest.update(words.sum(axis=1).data)
        return int.from_bytes(digest.digest(), "little", signed=True)

    # What follows is for the kinds alone.

    def _sample(self, generation):
        """z ~ N(0, I) (38) and y ~ N(0, C) (39) of the next generation, both (population, D)."""
        if generation != self._generation:
            raise ValueError(f"generation = {generation!r}; allowed: {self._generation}, "
                             f"as this search has been told {self._generation} generations")
        if self._asked is not None:
            return self._asked[:2]
        Z = perturbation.population_normals(self.seed, generation, range(self.population), self.dimension)
        if self.step_size == "tpa":
            ahead = self._whiten(self._shift)
            length = norm(ahead)
            if length > 0:    # before the first step there is no direction
                Z[0] = ahead * (norm(Z[0]) / length)   # as long as the candidate it replaces
                Z[1] = -Z[0]
        return Z, self._transform(Z)

    def _candidates(self, generation):
        if self._asked is None or generation != self._generation:
            Z, Y = self._sample(generation)
            self._asked = Z, Y, self._mean + self._sigma * Y  # (40)
        return self._asked[2]

    def _log_step(self, length):
        """CSA: what is added to log sigma for p_sigma of this length (44)."""
        return self.c_sigma / self.d_sigma * (length / self.chi_n - 1)

    def _two_points(self, fitness):
        """TPA: what is added to log sigma; `fitness` as ranked."""
        if self._shift.any():
            better = [int((fitness > fitness[k]).sum()) for k in (0, 1)]
            lead = (better[1] - better[0]) / (self.population - 1)  # in [-1, 1]
            self._ahead = ((1 - TPA_MEMORY) * self._ahead
                           + TPA_MEMORY * math.copysign(math.sqrt(abs(lead)), lead))
        return self._ahead / self.d_tpa

    def _signed_weights(self, worst):
        """The mu weights, then the negative ones, each scaled to the length of its z (46); worst: (k, D)."""
        if not len(worst):
            return self.weights
        scaled = [w * self.dimension / max(math.fsum(z * z), 1e-300) for w, z in zip(self.negative_weights, worst)]
        return np.concatenate([self.weights, scaled])

    def _keep_shift(self, z_w, y_w):
        """The step of the mean in coordinates that `_whiten` takes back to z after the update of C."""
        return y_w

    def _decompose(self):
        """What must follow an update of C."""

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

    def _arguments(self):
        given = {
            "dimension": np.array(self.dimension, dtype=np.int64),
            "population": np.array(self.population, dtype=np.int64),
            "seed": np.array(self.seed, dtype=np.uint64).astype(np.int64),  # the same 64 bits
            "initial_sigma": np.array(self._sigma_0),
        }
        if self.active:
            given["active"] = np.array(1, dtype=np.int64)
        if self.mean_decay:
            given["mean_decay"] = np.array(self.mean_decay)
        return given

    def _arrays(self):
        arrays = {
            **self._arguments(),
            "generation": np.array(self._generation, dtype=np.int64),
            "mean": self._mean,
            "sigma": np.array(self._sigma),
            "p_sigma": self._p_sigma,
        }
        if self.step_size == "tpa":
            arrays.update(shift=self._shift, ahead=np.array(self._ahead))
        return arrays

    def _load(self, arrays):
        self._generation = int(arrays["generation"])
        self._mean = arrays["mean"]
        self._sigma = float(arrays["sigma"])
        self._p_sigma = arrays["p_sigma"]
        if self.step_size == "tpa":
            self._shift, self._ahead = arrays["shift"], float(arrays["ahead"])
