"""Arithmetic whose bits do not depend on the machine: exp and log by `decimal`, sums in a written order."""

import decimal
import math
import operator

import numpy as np

_DECIMAL = decimal.Context(prec=40)


def exp(x):
    """e^x, correctly rounded but for one case in 1e20: libm's differ between systems in the last bit."""
    return float(_DECIMAL.exp(decimal.Decimal(x)))


def log(x):
    """The natural logarithm of x > 0; see `exp`."""
    return float(_DECIMAL.ln(decimal.Decimal(x)))


def power(x, exponent):
    """x^exponent, x >= 0; see `exp`."""
    return float(_DECIMAL.power(decimal.Decimal(x), decimal.Decimal(exponent)))


def norm(vector):
    """The Euclidean length of a vector: fsum is the exact sum, so there is no order to agree on."""
    return math.sqrt(math.fsum(vector**2))


def weighted_sum(weights, rows):
    """sum_i w_i row_i, one after the other: a BLAS would choose the order by CPU and threads."""
    total = weights[0] * rows[0]
    for weight, row in zip(weights[1:], rows[1:]):
        total += weight * row
    return total


def finite_or_worst(fitness, population):
    """Fitness as float64 (population,), -inf where it is not finite. Raises ValueError as `Search.tell` says."""
    fitness = np.asarray(fitness, dtype=np.float64)
    if fitness.shape != (population,):
        raise ValueError(f"fitness has shape {fitness.shape}; allowed: {(population,)}, one number a candidate")
    finite = np.isfinite(fitness)
    if not finite.any():
        raise ValueError("fitness: none of the candidates has a finite one; allowed: at least 1 (see the reward)")
    return np.where(finite, fitness, -np.inf)


def ranking(fitness):
    """Candidate indices, best first; ties go to the lower index."""
    return np.argsort(-fitness, kind="stable")


def integer(key, value, low, high=None):
    """`value` as an int within its bounds, else ValueError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low or (high is not None and number > high):
        allowed = f"an integer >= {low}" + ("" if high is None else f" and <= {high}")
        raise ValueError(f"{key} = {value!r}; allowed: {allowed}")
    return number
