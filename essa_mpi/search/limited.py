"""Limited memory: LM-MA-ES, Loshchilov, Glasmachers & Beyer, IEEE TEVC 23 (2019), arXiv 1705.06693.

A of y = A z is a product of m = 4 + floor(3 ln D) factors (1 - c_d,i) I + c_d,i M_i M_i^T, one for each
evolution path M_i; the paths fade at rates from fast to slow. O(D ln D) memory.
"""

import math

import numpy as np

from .base import Search
from .exact import log


class LimitedCMA(Search):
    """LM-MA-ES. State: the paths M, (m, D)."""

    options = ("step_size", "mean_decay")  # its paths know no negative weights

    def __init__(self, dimension, population, sigma, seed, **options):
        """As `Search`."""
        super().__init__(dimension, population, sigma, seed, **options)
        n, self.paths = self.dimension, 4 + math.floor(3 * log(self.dimension))
        self.c_sigma = min(1.0, 2 * self.population / n)
        self.c_d = np.array([min(1.0, 1 / (1.5**i * n)) for i in range(self.paths)])
        self.c_paths = np.array([min(1.0, self.population / (4.0**i * n)) for i in range(self.paths)])
        self._M = np.zeros((self.paths, n))
        self._expand()

    def _expand(self):
        """A = s I + P^T Q from the paths, so that the whole population is two matrix products; P, Q (m, D)."""
        self._s = 1.0
        self._P, self._Q = np.zeros((0, self.dimension)), np.zeros((0, self.dimension))
        for c, M in zip(self.c_d[:self._generation], self._M):   # a path joins with its first step
            Q = self._s * M + (self._P @ M) @ self._Q            # A^T M
            self._P = np.vstack([(1 - c) * self._P, c * M])
            self._Q = np.vstack([self._Q, Q])
            self._s *= 1 - c

    def _transform(self, Z):
        return self._s * Z + (Z @ self._Q.T) @ self._P

    def _whiten(self, shift):
        """A^(-1) y, factor by factor in reverse (Sherman & Morrison)."""
        z = shift
        for c, M in list(zip(self.c_d[:self._generation], self._M))[::-1]:
            if c == 1.0:    # a projection: nothing to invert
                continue
            z = (z - M * (c * (M @ z) / (1 - c + c * (M @ M)))) / (1 - c)
        return z

    def _isotropic(self, z_w):
        return z_w

    def _log_step(self, length):
        return self.c_sigma / 2 * (length**2 / self.dimension - 1)

    def _accumulate(self, keep, gain, z_w, y_w):
        c = self.c_paths
        self._M = (1 - c)[:, None] * self._M + np.sqrt(self.mu_eff * c * (2 - c))[:, None] * z_w

    def _learn(self, decay, weights, Z, Y):
        """The paths are all there is."""

    def _decompose(self):
        self._expand()

    def _variances(self):
        return (self._s**2 + 2 * self._s * (self._P * self._Q).sum(axis=0)
                + (self._P * ((self._Q @ self._Q.T) @ self._P)).sum(axis=0))

    def _rescale(self, shift):
        """A is of the order of 1 by its making, so sigma keeps its scale: the guard of the deviations bounds it."""
        self._sigma = math.ldexp(self._sigma, shift)

    def _arrays(self):
        return {**super()._arrays(), "M": self._M}

    def _load(self, arrays):
        super()._load(arrays)
        self._M = arrays["M"]
        self._expand()
