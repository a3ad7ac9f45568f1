"""The textbook's two kinds: full covariance, kept as the oracle, and separable."""

import numpy as np

from .base import CONDITION_MAX, Search
from .exact import integer, weighted_sum


class _Explicit(Search):
    """What the two share: C itself and the path p_c, both in the coordinates of y."""

    def __init__(self, dimension, population, sigma, seed, **options):
        super().__init__(dimension, population, sigma, seed, **options)
        self._p_c = np.zeros(self.dimension)

    def _accumulate(self, keep, gain, z_w, y_w):
        self._p_c = keep * self._p_c + gain * y_w

    def _rescale(self, shift):
        self._p_c = np.ldexp(self._p_c, shift)
        self._shift = np.ldexp(self._shift, shift)
        self._C = np.ldexp(self._C, 2 * shift)

    def _arrays(self):
        return {**super()._arrays(), "p_c": self._p_c, "C": self._C}

    def _load(self, arrays):
        super()._load(arrays)
        self._p_c = arrays["p_c"]
        self._C = arrays["C"]


class CMA(_Explicit):
    """Full covariance: C is (D, D), O(D^2) memory, O(D^3) a decomposition.

    eigen_every: C = B diag(d^2) B^T is decomposed whenever the number of
    generations told is a multiple of it (1: always, the textbook). In between
    candidates come from the last decomposition, while C goes on learning. The
    tutorial (B.2) finds 1 / (10 D (c_1 + c_mu)) generations harmless.
    """

    options = (*Search.options, "eigen_every")

    def __init__(self, dimension, population, sigma, seed, *, eigen_every=1, **options):
        """As `Search`; eigen_every >= 1, and 1 with `active`, else ValueError."""
        super().__init__(dimension, population, sigma, seed, **options)
        self.eigen_every = integer("eigen_every", eigen_every, 1)
        if self.active and self.eigen_every > 1:
            raise ValueError(f"eigen_every = {eigen_every!r}; allowed with active = True: 1, as negative weights are "
                             f"scaled by the decomposition and could make C indefinite if it is of another C")
        self._C = np.eye(self.dimension)
        self._B = np.eye(self.dimension)
        self._d = np.ones(self.dimension)
        self._eigen_generation = 0

    def _transform(self, Z):
        return (Z * self._d) @ self._B.T  # (39), a row a candidate

    def _whiten(self, y):
        return (y @ self._B) / self._d

    def _isotropic(self, z_w):
        return self._B @ z_w  # C^(-1/2) y_w = B diag(1/d) B^T B diag(d) z_w

    def _learn(self, decay, weights, Z, Y):
        Y = np.sqrt(np.abs(weights))[:, None] * Y
        self._C *= decay
        self._C += self.c_1 * np.outer(self._p_c, self._p_c)
        self._C += self.c_mu * (Y[:self.mu].T @ Y[:self.mu])
        if len(Y) > self.mu:
            self._C -= self.c_mu * (Y[self.mu:].T @ Y[self.mu:])

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


class SeparableCMA(_Explicit):
    """Diagonal covariance: C is (D,), all O(D). sep-CMA-ES, Ros & Hansen, PPSN X (2008).

    A diagonal has D instead of D (D + 1)/2 entries to learn, so c_1 and c_mu
    are (D + 2)/3 times those of the full matrix (there: c_cov, which scales
    both updates). The other constants are the tutorial's, newer than the paper's.
    It calls neither BLAS nor libm: its bits are the same on every machine.
    """

    def __init__(self, dimension, population, sigma, seed, **options):
        """As `Search`."""
        super().__init__(dimension, population, sigma, seed, **options)
        self._C = np.ones(self.dimension)

    def _set_rates(self):
        factor = (self.dimension + 2) / 3
        self.c_1 = min(1.0, factor * self.c_1)
        self.c_mu = min(1 - self.c_1, factor * self.c_mu)

    def _transform(self, Z):
        return np.sqrt(self._C) * Z  # (39) with B = I

    def _whiten(self, y):
        return y / np.sqrt(self._C)

    def _isotropic(self, z_w):
        return z_w

    def _learn(self, decay, weights, Z, Y):
        self._C = decay * self._C + self.c_1 * self._p_c**2 + self.c_mu * weighted_sum(weights, Y**2)

    def _decompose(self):
        self._C = np.maximum(self._C, self._C.max() / CONDITION_MAX)

    def _variances(self):
        return self._C


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
