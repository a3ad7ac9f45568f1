"""Full covariance without an eigendecomposition of it: a factor A of C = A A^T, updated in O(D^2 mu).

The tutorial's update (47) in the coordinates z of the samples y = A z is

    C' = A (a I + V S V^T) A^T = (A R) (A R)^T,    R = (a I + V S V^T)^(1/2),

V (D, k): the chosen z and q = A^(-1) p_c, each times the root of its weight; S = diag(+-1); a: the decay.
R differs from sqrt(a) I by rank k = mu + 1 (population + 1 with negative weights), and for any function f,

    f(a + V S V^T) = f(a) I + V N V^T   with N from the k x k Gram matrix V^T V alone,

so A' = sqrt(a) A + (A V) N V^T is one product of rank k, and A V is known: it is the chosen y and p_c.
C is the textbook's, exactly. Any factor of C gives the same distribution of candidates; this one is not
the textbook's B diag(d), so the same z are other candidates, and p_sigma sums the z of successive factors
(as MA-ES does: Beyer & Sendhoff, "Simplify your covariance matrix adaptation evolution strategy", 2017).
"""

import numpy as np

from .base import Search

BLOCK = 1 << 21  # numbers of A updated at a time: what the caches hold


class FastCMA(Search):
    """Full covariance by its factor A, (D, D): O(D^2) memory, O(D^2 population) a generation, always the same."""

    def __init__(self, dimension, population, sigma, seed, **options):
        """As `Search`."""
        super().__init__(dimension, population, sigma, seed, **options)
        self._A = np.eye(self.dimension)
        self._p_c = np.zeros(self.dimension)
        self._q = np.zeros(self.dimension)  # A^(-1) p_c
        self._row_norms = np.ones(self.dimension)  # C's diagonal, of A alone

    def _transform(self, Z):
        return Z @ self._A.T

    def _whiten(self, shift):
        return shift

    def _isotropic(self, z_w):
        return z_w

    def _accumulate(self, keep, gain, z_w, y_w):
        self._p_c = keep * self._p_c + gain * y_w
        self._q = keep * self._q + gain * z_w

    def _learn(self, decay, weights, Z, Y):
        scale = np.append(np.sqrt(self.c_mu * np.abs(weights)), np.sqrt(self.c_1))[:, None]
        sign = np.append(np.sign(weights), 1.0)
        V = scale * np.vstack([Z, self._q])   # V^T of the text: a row a vector
        AV = scale * np.vstack([Y, self._p_c])
        if len(V) < self.dimension:
            N, N_inverse = root_update(V @ V.T, sign, decay)
            self._update_A(np.sqrt(decay), AV.T @ N, V)
            self._back = lambda z: z / np.sqrt(decay) + (N_inverse @ (V @ z)) @ V
        else:
            R, inverse = dense_root(decay * np.eye(self.dimension) + (V.T * sign) @ V)
            self._update_A(0.0, self._A @ R, np.eye(self.dimension))
            self._back = lambda z: inverse @ z
        self._q = self._back(self._q)

    def _keep_shift(self, z_w, y_w):
        return self._back(z_w)

    def _update_A(self, keep, W, V):
        """A = keep A + W V, W (D, k), V (k, D); some rows at a time, so that A passes the caches once."""
        for rows in self._blocks():
            block = self._A[rows]
            block *= keep
            block += W[rows] @ V
            self._row_norms[rows] = np.einsum("ij,ij->i", block, block)

    def _blocks(self):
        rows = 1 + BLOCK // self.dimension
        return [slice(at, at + rows) for at in range(0, self.dimension, rows)]

    def _variances(self):
        return self._row_norms

    def _rescale(self, shift):
        self._A = np.ldexp(self._A, shift)
        self._p_c = np.ldexp(self._p_c, shift)
        self._row_norms = np.ldexp(self._row_norms, 2 * shift)

    def _arrays(self):
        return {**super()._arrays(), "p_c": self._p_c, "q": self._q, "A": self._A}

    def _load(self, arrays):
        super()._load(arrays)
        self._p_c, self._q, self._A = arrays["p_c"], arrays["q"], arrays["A"]
        for rows in self._blocks():
            self._row_norms[rows] = np.einsum("ij,ij->i", self._A[rows], self._A[rows])


def root_update(gram, sign, a):
    """N and N' with (a + V S V^T)^(+-1/2) = a^(+-1/2) I + V N V^T, and N' for the minus.

    gram: V^T V, (k, k); sign: S's diagonal, +-1, (k,); a > 0, and a + V S V^T positive definite.
    For f(x) = (a + x)^(+-1/2) write f(x) = f(0) + x (g + x h(x)), g = f'(0). Since p(X Y) X = X p(Y X),
    V S (g + ...) V^T needs h of the symmetric L^T S L alone, where V^T V = L L^T; g and h below are
    rearranged so that nothing cancels. V need not have full rank.
    """
    values, E = np.linalg.eigh(gram)
    L = E * np.sqrt(np.maximum(values, 0.0))
    x, F = np.linalg.eigh((L.T * sign) @ L)
    s, t = np.sqrt(a), np.sqrt(a + x)
    LF = (sign[:, None] * L) @ F
    root = np.diag(sign / (2 * s)) - (LF / (2 * s * (s + t) ** 2)) @ LF.T
    inverse = np.diag(sign / (-2 * s**3)) + (LF * ((t + 2 * s) / (2 * s**3 * t * (s + t) ** 2))) @ LF.T
    return root, inverse


def dense_root(M):
    """M^(1/2) and M^(-1/2) of a symmetric positive definite M (D, D), D at most the number of vectors."""
    values, E = np.linalg.eigh((M + M.T) / 2)
    values = np.maximum(values, values[-1] * 1e-14)
    root = np.sqrt(values)
    return (E * root) @ E.T, (E / root) @ E.T
