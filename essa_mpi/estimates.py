"""From rewards of rows and samples to numbers with their errors. Rows are what was drawn, so errors are over rows."""

import math

import numpy as np


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error (sample variance, n - 1) of values (n,); nan below one, below two."""
    n = len(values)
    return (float(np.mean(values)) if n else math.nan,
            float(np.std(values, ddof=1) / n**0.5) if n > 1 else math.nan)


def pass_at_k(samples: int, right: np.ndarray, k: int) -> np.ndarray:
    """The chance (rows,) that one of k samples is right, without bias, from `samples` of which right (rows,) were.

    1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374, eq. 1) as a product that does not overflow; unlike the
    best of k drawn again from the n (a bootstrap), its mean is the true one. Raises ValueError unless 1 <= k <= samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k} of {samples} samples")
    left = np.arange(samples - k + 1, samples + 1)[None, :] * 1.0     # C(n-c, k) / C(n, k) = prod (i - c) / i
    return 1.0 - np.prod(np.clip(left - np.asarray(right)[:, None], 0.0, None) / left, axis=1)


def powers_of_two(samples: int) -> list[int]:
    """1, 2, 4, ... up to `samples`, which is the last."""
    return sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})


def ratio_and_error(numerators: np.ndarray, denominators: np.ndarray) -> tuple[float, float]:
    """sum(numerators) / sum(denominators), as of tokens, and its standard error over the rows (first order)."""
    n, total = len(numerators), float(np.sum(denominators))
    if n == 0 or total == 0:
        return math.nan, math.nan
    ratio = float(np.sum(numerators)) / total
    residuals = numerators - ratio * denominators
    return ratio, float(np.std(residuals, ddof=1) * n**0.5 / total) if n > 1 else math.nan
