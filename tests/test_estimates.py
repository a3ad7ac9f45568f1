"""Estimates and their errors against closed forms, exact arithmetic and simulation."""

import math
from fractions import Fraction

import numpy as np
import pytest

from essa_mpi.estimates import mean_and_error, pass_at_k, powers_of_two, ratio_and_error
from essa_mpi.evaluate import Evaluation, paired, rates


@pytest.mark.parametrize("n", [1, 2, 5, 16, 256])
def test_pass_at_k_is_the_closed_form(n):
    right = np.arange(n + 1)
    for k in sorted({1, 2, 3, n // 2, n - 1, n} & set(range(1, n + 1))):
        exact = [float(1 - Fraction(math.comb(n - c, k), math.comb(n, k))) for c in range(n + 1)]
        assert pass_at_k(n, right, k) == pytest.approx(exact, abs=1e-12)


def test_pass_at_k_has_no_bias():
    """Over all draws of n samples its mean is 1 - (1 - p)^k; the plain rate of the best of k, redrawn, is not."""
    n, k, p = 6, 4, 0.3
    weights = np.array([math.comb(n, c) * p**c * (1 - p)**(n - c) for c in range(n + 1)])
    assert weights @ pass_at_k(n, np.arange(n + 1), k) == pytest.approx(1 - (1 - p)**k, abs=1e-12)


@pytest.mark.parametrize("k", [0, 3])
def test_k_beyond_the_samples(k):
    with pytest.raises(ValueError):
        pass_at_k(2, np.array([1]), k)


def test_powers_of_two():
    assert powers_of_two(1) == [1] and powers_of_two(6) == [1, 2, 4, 6]
    assert powers_of_two(256) == [1, 2, 4, 8, 16, 32, 64, 128, 256]


def test_mean_and_error():
    assert mean_and_error(np.array([1.0, 2.0, 6.0])) == pytest.approx((3, math.sqrt(7 / 3)))
    assert math.isnan(mean_and_error(np.array([1.0]))[1]) and math.isnan(mean_and_error(np.zeros(0))[0])


def test_ratio_and_error():
    """Of equal denominators it is the mean; else the spread over many draws is what it says."""
    a = np.array([1.0, 4.0, 2.0])
    assert ratio_and_error(a * 5, np.full(3, 5.0)) == pytest.approx(mean_and_error(a))
    draw = np.random.default_rng(0)
    found = []
    for _ in range(2000):
        tokens = draw.integers(1, 20, 100)
        found.append(ratio_and_error(tokens * 0.3 + draw.normal(size=100) * np.sqrt(tokens), tokens))
    ratios, errors = np.array(found).T
    assert ratios.mean() == pytest.approx(0.3, abs=0.01) and errors.mean() == pytest.approx(ratios.std(), rel=0.05)


def found(**values):
    values = {name: np.array(v, float) for name, v in values.items()}
    return Evaluation(len(next(iter(values.values()))), {}, {}, 0.0, values)


def test_rates():
    table = rates(found(base=[[1, 0, 0, 0], [1, 1, 0.5, np.nan]]), 1.0)["base"]
    assert list(table) == ["avg@4", "pass@1", "pass@2", "pass@4"]
    assert table["avg@4"][0] == pytest.approx((0.25 + 0.625) / 2)      # the missing one as the worst, 0
    assert table["pass@1"][0] == pytest.approx((1 / 4 + 2 / 4) / 2)
    assert table["pass@2"] == pytest.approx(((1 / 2 + 5 / 6) / 2, 1 / 6))
    assert table["pass@4"][0] == 1
    assert rates(found(base=[[1, 0, 0, 0], [1, 1, 0.5, np.nan]]), 0.5)["base"]["pass@1"][0] == pytest.approx((1 / 4 + 3 / 4) / 2)


def test_pairs():
    pairs = paired(found(base=[[0], [0], [1], [np.nan]], warm_start=[[1], [0], [1], [1]], evolved=[[1], [1], [1], [1]]))
    assert [(p["arm"], p["minus"], p["rows"]) for p in pairs] == [
        ("warm_start", "base", 3), ("evolved", "base", 3), ("evolved", "warm_start", 4)]
    assert pairs[0]["difference"] == pytest.approx(1 / 3) and pairs[0]["stderr"] == pytest.approx(1 / 3)
    assert pairs[2]["difference"] == pytest.approx(1 / 4) and pairs[2]["stderr"] == pytest.approx(1 / 4)
