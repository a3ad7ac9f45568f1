"""The random numbers: known answers, accuracy, statistics, and that nothing but the arguments matters."""

import time

import numpy as np
import pytest

from essa_mpi import perturbation
from essa_mpi.perturbation import normals, philox4x32, population_normals, row_order, sampling_seed


# ---- Philox4x32-10

# Random123's own vectors, kat_vectors: (counter, key, words).
RANDOM123 = [
    ([0x00000000] * 4, [0x00000000] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
     [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]


@pytest.mark.parametrize("counter, key, words", RANDOM123)
def test_philox_known_answers(counter, key, words):
    out = philox4x32(np.array(counter, dtype=np.uint32), np.array(key, dtype=np.uint32))
    assert out.dtype == np.uint32 and out.tolist() == words


def scalar_philox(counter, key):
    """The algorithm again, on Python integers: an independent second opinion."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def test_philox_is_vectorised():
    rng = np.random.default_rng(0)
    counter = rng.integers(0, 2**32, size=(3, 5, 4), dtype=np.uint32)
    key = rng.integers(0, 2**32, size=2, dtype=np.uint32)
    out = philox4x32(counter, key)
    assert out.shape == (3, 5, 4)
    for i, j in np.ndindex(3, 5):
        assert out[i, j].tolist() == scalar_philox(counter[i, j].tolist(), key.tolist())


@pytest.mark.parametrize("counter, key", [([0, 0, 0], [0, 0]), ([0, 0, 0, 0], [0]), (0, [0, 0]), ([0] * 4, [[0, 0]])])
def test_philox_refuses_other_shapes(counter, key):
    with pytest.raises(ValueError, match="allowed"):
        philox4x32(counter, key)


# ---- normals

KNOWN_NORMALS = [
    (0, 0, 0, ["0x1.2d769e93cb51fp+0", "0x1.11fbd69d8e301p-2", "-0x1.69580971eeeebp-2", "-0x1.c913544cdba35p+0"]),
    (2**64 - 1, 2**32 - 1, 2**32 - 1, ["-0x1.96c5fce93f61dp+0", "-0x1.a467401cb15fap-4", "0x1.accb14a7fd547p-2"]),
    (0x0123456789ABCDEF, 7, 95, ["-0x1.69aabbb6b76e6p+0", "0x1.82a78750ac7e9p-2", "-0x1.86bfa5b7ea477p+0",
                                 "-0x1.bf8693a27ccfdp-1", "-0x1.d511baad6f6e1p+0"]),
]


@pytest.mark.parametrize("seed, generation, candidate, expected", KNOWN_NORMALS)
def test_normals_known_answers(seed, generation, candidate, expected):
    z = normals(seed, generation, candidate, len(expected))
    assert z.dtype == np.float64 and [value.hex() for value in z.tolist()] == expected


def test_normals_known_answer_in_the_tail():
    assert normals(1, 2, 3, 1977316)[-1].hex() == "-0x1.6ce6b365d8560p+2"  # the largest of four million


def test_normals_follow_the_recipe():
    """Counter, key, word order and uniform, spelt out on Python integers, then SciPy's ndtri."""
    ndtri = pytest.importorskip("scipy.special").ndtri
    seed, generation, candidate, stream = 0xFEDCBA9876543210, 11, 23, 5
    z = normals(seed, generation, candidate, 41, stream=stream)
    for index in range(41):
        words = scalar_philox([index >> 1, candidate, generation, stream], [seed % 2**32, seed >> 32])
        low, high = words[2 * (index % 2):][:2]
        u = ((low + 2**32 * high >> 12) + 0.5) / 2**52
        assert abs(z[index] - ndtri(u)) < 4e-15


def test_inverse_normal_equals_ndtri():
    ndtri = pytest.importorskip("scipy.special").ndtri
    powers = 2.0 ** -np.arange(2, 54)  # down to the smallest u there is, z = -8.2
    grid = (np.arange(2**18) + 0.5) / 2**18
    u = np.concatenate([grid, powers, 1 - powers, [0.5, 0.075, 0.925]])
    u = np.floor(u * 2**53) / 2**53
    assert np.abs(perturbation._inverse_normal(u) - ndtri(u)).max() < 4e-15
    assert perturbation._inverse_normal(np.array([0.5])) == 0.0
    np.testing.assert_array_equal(perturbation._inverse_normal(powers), -perturbation._inverse_normal(1 - powers))


def test_log_is_accurate():
    rng = np.random.default_rng(1)
    x = np.ldexp(rng.uniform(0.5, 1.0, 20000), rng.integers(-52, -2, 20000))
    assert np.abs(perturbation._log(x) / np.log(x) - 1).max() < 1e-15


def test_every_value_is_finite_at_the_ends_of_the_words(monkeypatch):
    for word in (0, 2**64 - 1):
        monkeypatch.setattr(perturbation, "_words", lambda *_, word=word: np.full((1, 2), word, dtype=np.uint64))
        assert abs(normals(0, 0, 0, 2)).max() == pytest.approx(8.2095, abs=1e-4)


# ---- statistics (fixed seed: these cannot fail by chance)

def test_moments_and_distribution():
    stats = pytest.importorskip("scipy.stats")
    z = population_normals(2024, 0, range(64), 5120)
    n = z.size
    assert abs(z.mean()) < 4 / np.sqrt(n)
    assert abs(z.var() - 1) < 4 * np.sqrt(2 / n)
    assert abs((z**3).mean()) < 4 * np.sqrt(15 / n)
    assert abs((z**4).mean() - 3) < 4 * np.sqrt(96 / n)
    assert stats.kstest(z.ravel(), "norm").pvalue > 1e-3
    assert stats.kstest([stats.kstest(row, "norm").pvalue for row in z], "uniform").pvalue > 1e-3


def test_neighbours_are_uncorrelated():
    n = 100_000
    z = normals(5, 0, 0, n)
    others = {
        "candidate": normals(5, 0, 1, n), "generation": normals(5, 1, 0, n), "seed": normals(6, 0, 0, n),
        "seed, upper word": normals(5 + 2**32, 0, 0, n), "stream": normals(5, 0, 0, n, stream=1),
        "candidate and generation exchanged": normals(5, 1, 0, n),
    }
    for name, other in others.items():
        assert abs(np.mean(z * other)) < 4 / np.sqrt(n), name
    assert abs(np.mean(z[0::2] * z[1::2])) < 4 / np.sqrt(n / 2)  # the two of a block
    assert not np.array_equal(normals(5, 1, 2, 8), normals(5, 2, 1, 8))


# ---- nothing but the arguments matters

def test_order_of_asking_does_not_matter():
    together = population_normals(3, 4, range(8), 33)
    backwards = population_normals(3, 4, range(7, -1, -1), 33)
    np.testing.assert_array_equal(backwards[::-1], together)
    for candidate in (5, 0, 7, 5):
        normals(99, 1, candidate, 3)  # asking for others in between
        np.testing.assert_array_equal(normals(3, 4, candidate, 33), together[candidate])
    shares = [population_normals(3, 4, range(rank, 8, 3), 33) for rank in range(3)]  # as three ranks would
    for rank, share in enumerate(shares):
        np.testing.assert_array_equal(share, together[rank::3])


def test_a_longer_size_only_appends():
    for size in (0, 1, 2, 7, 8):
        np.testing.assert_array_equal(normals(1, 2, 3, size), normals(1, 2, 3, 9)[:size])
    assert population_normals(1, 2, [], 9).shape == (0, 9)


def test_repeated_and_numpy_candidates():
    z = population_normals(1, 2, np.array([4, 4, 2]), 6)
    np.testing.assert_array_equal(z[0], z[1])
    np.testing.assert_array_equal(z[2], normals(np.uint64(1), np.int32(2), 2, 6))


def test_streams_are_distinct():
    streams = [perturbation.STREAM_NORMALS, perturbation.STREAM_SAMPLING, perturbation.STREAM_ROWS]
    assert len(set(streams)) == 3
    words = [perturbation._words(1, 2, [3], 64, stream)[0] for stream in streams]
    assert len(np.unique(np.concatenate(words))) == 3 * 64


def test_fast_enough():
    def seconds():
        start = time.perf_counter()
        population_normals(0, 0, range(64), 5120)
        return time.perf_counter() - start
    assert min(seconds() for _ in range(3)) < 0.3


# ---- sampling seeds and row orders

def test_sampling_seed_known_answers():
    assert sampling_seed(0, 0, 0, 0) == 694804623011559922
    assert sampling_seed(5, 1, 2, 3) == 923845893878198188


def test_sampling_seeds_differ_in_every_argument():
    seeds = {sampling_seed(seed, generation, row, sample)
             for seed in (0, 1, 2**32) for generation in range(4) for row in range(10) for sample in range(5)}
    assert len(seeds) == 3 * 4 * 10 * 5
    assert all(type(seed) is int and 0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # all 63 bits are in use


def test_row_order_is_a_function_of_seed_and_epoch():
    assert row_order(9, 1, 8).tolist() == [7, 3, 6, 0, 1, 4, 2, 5]
    order = row_order(1, 0, 1001)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(1001))
    np.testing.assert_array_equal(order, row_order(1, 0, 1001))
    assert not np.array_equal(order, row_order(1, 1, 1001))
    assert not np.array_equal(order, row_order(2, 0, 1001))
    assert row_order(1, 0, 0).shape == (0,) and row_order(1, 0, 1).tolist() == [0]


def test_row_order_is_uniform():
    """Each of four rows in each place: 24 orders, 4000 epochs, chi-square with 9 degrees of freedom."""
    counts = np.zeros((4, 4))
    for epoch in range(4000):
        counts[np.arange(4), row_order(7, epoch, 4)] += 1
    assert ((counts - 1000) ** 2 / 1000).sum() < 27.9  # the 0.999 quantile


def test_row_order_breaks_ties_by_index(monkeypatch):
    keys = np.array([[5, 1] * 50], dtype=np.uint64)
    monkeypatch.setattr(perturbation, "_words", lambda *_: keys)
    assert row_order(0, 0, 100).tolist() == [*range(1, 100, 2), *range(0, 100, 2)]


# ---- bad input

@pytest.mark.parametrize("call", [
    lambda: normals(-1, 0, 0, 4),
    lambda: normals(2**64, 0, 0, 4),
    lambda: normals(1.5, 0, 0, 4),
    lambda: normals("1", 0, 0, 4),
    lambda: normals(0, -1, 0, 4),
    lambda: normals(0, 2**32, 0, 4),
    lambda: normals(0, 0, -1, 4),
    lambda: normals(0, 0, 2**32, 4),
    lambda: normals(0, 0, 0, -1),
    lambda: normals(0, 0, 0, 4.0),
    lambda: normals(0, 0, 0, 4, stream=-1),
    lambda: population_normals(0, 0, [0, 2**32], 4),
    lambda: sampling_seed(-1, 0, 0, 0),
    lambda: sampling_seed(0, -1, 0, 0),
    lambda: sampling_seed(0, 0, 2**32, 0),
    lambda: sampling_seed(0, 0, 0, 0.5),
    lambda: row_order(0, -1, 4),
    lambda: row_order(2**64, 0, 4),
    lambda: row_order(0, 0, -1),
])
def test_bad_input(call):
    with pytest.raises(ValueError, match="allowed"):
        call()


def test_largest_seed_is_accepted():
    assert np.isfinite(normals(2**64 - 1, 0, 0, 4)).all()
