"""The full covariance by a factor of it: against the textbook's update, and its algebra against dense matrices."""

import numpy as np
import pytest

from essa_mpi.search import fast, make_search
from test_search import assert_same_state, close, ellipsoid, run, sphere, through_bytes

SIZES = [(1, 4), (1, 96), (3, 4), (3, 12), (20, 4), (20, 12), (20, 96), (60, 22), (60, 96)]


def rotated(X):
    """An ellipsoid off the axes and of only 100 between its longest and shortest."""
    n = X.shape[1]
    rotation = np.linalg.qr(np.random.default_rng(n).standard_normal((n, n)))[0]
    return -((X - 1) @ rotation) ** 2 @ 10.0 ** (2 * np.arange(n) / max(1, n - 1))


def textbook(search, before, C, generation, fitness):
    """C and p_c after a generation: (41) to (47) as the tutorial prints them, from `before` and C alone."""
    n, mu = search.dimension, search.mu
    Z = search._sample(generation)[0]
    Y = Z @ before["A"].T
    order = np.argsort(-fitness, kind="stable")
    Z, Y = Z[order], Y[order]
    c_s, c_c, c_1, c_mu, mu_eff = search.c_sigma, search.c_c, search.c_1, search.c_mu, search.mu_eff
    p_sigma = (1 - c_s) * before["p_sigma"] + np.sqrt(c_s * (2 - c_s) * mu_eff) * search.weights @ Z[:mu]
    threshold = (1.4 + 2 / (n + 1)) * search.chi_n
    h = float(np.linalg.norm(p_sigma) / np.sqrt(1 - (1 - c_s) ** (2 * (generation + 1))) < threshold)
    p_c = (1 - c_c) * before["p_c"] + h * np.sqrt(c_c * (2 - c_c) * mu_eff) * search.weights @ Y[:mu]
    negative = search.negative_weights
    w = np.concatenate([search.weights, np.zeros(len(Y) - mu - len(negative)), negative])
    whitened = np.linalg.solve(before["A"], Y.T).T
    w_scaled = np.where(w >= 0, w, w * n / (whitened**2).sum(axis=1))   # (46)
    decay = 1 + c_1 * (1 - h) * c_c * (2 - c_c) - c_1 - c_mu * w.sum()
    return decay * C + c_1 * np.outer(p_c, p_c) + c_mu * (w_scaled * Y.T) @ Y, p_c, h


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("dimension, population", SIZES)
def test_a_generation_is_the_textbooks_update(dimension, population, active):
    search = make_search("fast", dimension, population, 0.5, 3, active=active)
    assert len(search.negative_weights) == (population - search.mu if active else 0)
    stalled = 0
    for generation in range(25):
        before = search.state()
        fitness = rotated(search.ask(generation))
        C, p_c, h = textbook(search, before, before["A"] @ before["A"].T, generation, fitness)
        search.tell(generation, fitness)
        after = search.state()
        A = after["A"]
        close(A @ A.T, C)
        close(after["p_c"], p_c)
        close(A @ after["q"], after["p_c"])
        close(search.deviations, np.sqrt((A @ A.T).diagonal()) * search.sigma, 1e-12)
        assert np.linalg.eigvalsh(A @ A.T)[0] > 0
        stalled += h == 0
    assert stalled < 25


def test_a_stalled_path_is_the_textbooks_too():
    """sigma far too small: p_sigma is long, h_sigma 0 and the decay of C less."""
    search = make_search("fast", 8, 12, 1e-6, 3)
    stalled = []
    for generation in range(12):
        before = search.state()
        fitness = search.ask(generation)[:, 0]
        C, p_c, h = textbook(search, before, before["A"] @ before["A"].T, generation, fitness)
        search.tell(generation, fitness)
        close(search.state()["A"] @ search.state()["A"].T, C)
        close(search.state()["p_c"], p_c)
        stalled.append(h == 0)
    assert any(stalled) and not all(stalled)


@pytest.mark.parametrize("dimension, population", [(3, 12), (20, 12), (20, 96), (60, 22)])
def test_the_factor_does_not_drift_from_the_textbook(dimension, population):
    """C by the textbook's recursion alone for 150 generations, A never squared into it."""
    search = make_search("fast", dimension, population, 0.5, 5)
    C = np.eye(dimension)
    for generation in range(150):
        fitness = rotated(search.ask(generation))
        C, _, _ = textbook(search, search.state(), C, generation, fitness)
        search.tell(generation, fitness)
        A = search.state()["A"]
        close(A @ A.T, C)
    close(A @ search.state()["q"], search.state()["p_c"])
    values = np.linalg.eigvalsh(C)
    assert values[-1] / values[0] > 2   # it has learnt


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("dimension, population", [(20, 12), (5, 30)])
def test_first_generation_is_that_of_the_textbooks_kind(dimension, population, active):
    """A = B diag(d) = I at first: the same candidates, so all that is learnt from them is the same."""
    textbooks = make_search("cma", dimension, population, 0.5, 7, active=active)
    ours = make_search("fast", dimension, population, 0.5, 7, active=active)
    fitness = ellipsoid(ours.ask(0))
    ours.tell(0, fitness), textbooks.tell(0, fitness)
    close(ours.state()["A"] @ ours.state()["A"].T, textbooks.state()["C"], 1e-13)
    close(ours.deviations, textbooks.deviations, 1e-13)
    for key in ("mean", "sigma", "p_c", "p_sigma"):
        close(ours.state()[key], textbooks.state()[key], 1e-13)


# ---- its algebra

def roots(V, sign, a):
    """(a + V S V^T)^(1/2) and its inverse by scipy; V (D, k)."""
    M = a * np.eye(len(V)) + (V * sign) @ V.T
    root = pytest.importorskip("scipy.linalg").sqrtm(M).real
    return root, np.linalg.inv(root)


def from_update(V, sign, a):
    N, N_inverse = fast.root_update(V.T @ V, sign, a)
    return np.sqrt(a) * np.eye(len(V)) + V @ N @ V.T, np.eye(len(V)) / np.sqrt(a) + V @ N_inverse @ V.T


@pytest.mark.parametrize("signs", ["plus", "minus", "mixed"])
@pytest.mark.parametrize("a", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("dimension, k, rank", [(9, 1, 1), (9, 5, 5), (20, 13, 13), (20, 13, 4), (6, 9, 6), (9, 4, 0)])
def test_root_update(dimension, k, rank, a, signs):
    rng = np.random.default_rng(dimension + k)
    V = rng.standard_normal((dimension, rank)) @ rng.standard_normal((rank, k))
    sign = {"plus": np.ones(k), "minus": -np.ones(k), "mixed": np.where(np.arange(k) % 3 == 1, -1.0, 1.0)}[signs]
    V *= np.sqrt(0.9 * a) / max(np.linalg.norm(V, 2), 1e-300)   # so that the minus leaves a + V S V^T > a / 10
    for ours, dense in zip(from_update(V, sign, a), roots(V, sign, a)):
        close(ours, dense, 1e-12)


def test_root_update_of_long_vectors():
    V = 30 * np.random.default_rng(1).standard_normal((12, 5))
    for ours, dense in zip(from_update(V, np.ones(5), 0.8), roots(V, np.ones(5), 0.8)):
        close(ours, dense, 1e-10)


def test_root_update_of_short_vectors_cancels_nothing():
    """To first order (a + x)^(+-1/2) = a^(+-1/2) +- x/2 a^(-1 +- 1/2): what is 1e-16 of the whole has all its digits."""
    V, sign, a = 1e-8 * np.random.default_rng(2).standard_normal((12, 5)), np.array([1.0, -1, 1, -1, 1]), 0.7
    N, N_inverse = fast.root_update(V.T @ V, sign, a)
    close(V @ N @ V.T, (V * sign) @ V.T / (2 * np.sqrt(a)), 1e-13)
    close(V @ N_inverse @ V.T, (V * sign) @ V.T / (-2 * a * np.sqrt(a)), 1e-13)


def test_dense_root():
    A = np.random.default_rng(3).standard_normal((7, 7))
    root, inverse = fast.dense_root(A @ A.T)
    close(root @ root, A @ A.T, 1e-13)
    close(inverse @ root, np.eye(7), 1e-11)
    assert np.isfinite(fast.dense_root(np.ones((3, 3)))[1]).all()   # singular but for rounding


@pytest.mark.parametrize("dimension, population", [(3, 12), (20, 12)])
def test_what_takes_q_along_is_the_inverse_of_what_A_was_multiplied_by(dimension, population):
    search = run(make_search("fast", dimension, population, 0.5, 3, active=True), rotated, 10)
    before = search.state()["A"]
    search.tell(10, rotated(search.ask(10)))
    R = np.linalg.solve(before, search.state()["A"])
    z = np.random.default_rng(0).standard_normal(dimension)
    close(search._back(R @ z), z)


# ---- blocks, resume, digest

def test_blocks_of_rows_are_only_an_order_of_work(monkeypatch):
    whole = run(make_search("fast", 20, 8, 0.5, 3), ellipsoid, 10)
    monkeypatch.setattr(fast, "BLOCK", 130)   # 7 rows, and 6 at the end
    blocks = run(make_search("fast", 20, 8, 0.5, 3), ellipsoid, 10)
    close(blocks.state()["A"], whole.state()["A"], 1e-12)
    close(blocks.deviations, whole.deviations, 1e-12)
    close(blocks.deviations, blocks.sigma * np.linalg.norm(blocks.state()["A"], axis=1), 1e-12)
    again = make_search("fast", 20, 8, 0.5, 3)
    again.load_state(through_bytes(blocks.state()))
    assert again.deviations.tobytes() == blocks.deviations.tobytes()


@pytest.mark.parametrize("dimension, population", [(1, 6), (5, 30), (60, 10)])
@pytest.mark.parametrize("active", [False, True])
def test_resume_has_the_same_bits_whichever_branch(dimension, population, active):
    whole = run(make_search("fast", dimension, population, 0.4, 9, active=active), sphere, 20)
    first = run(make_search("fast", dimension, population, 0.4, 9, active=active), sphere, 9)
    second = make_search("fast", dimension, population, 0.4, 9, active=active)
    second.load_state(through_bytes(first.state()))
    assert second.deviations.tobytes() == first.deviations.tobytes()
    run(second, sphere, 11)
    assert_same_state(whole, second)
    assert whole.digest() == second.digest() and whole.ask(20).tobytes() == second.ask(20).tobytes()


@pytest.mark.parametrize("kind, key, dimension", [("fast", "_A", 400), ("limited", "_M", 8192)])
def test_digest_of_a_large_matrix_sees_every_bit(kind, key, dimension):
    search = make_search(kind, dimension, 4, 0.5, 1)
    matrix = getattr(search, key)
    matrix += np.random.default_rng(1).standard_normal(matrix.shape)
    assert matrix.nbytes > 1 << 20
    words, digest, rng = matrix.view(np.uint64), search.digest(), np.random.default_rng(2)
    rows, columns = matrix.shape
    places = [(0, 0), (0, columns - 1), (rows - 1, 0), (rows - 1, columns - 1),
              *zip(rng.integers(rows, size=28), rng.integers(columns, size=28))]
    for bit, (row, column) in zip([*range(64)][::-1], places * 2):
        words[row, column] ^= np.uint64(1 << bit)
        assert search.digest() != digest, (row, column, bit)
        words[row, column] ^= np.uint64(1 << bit)
    for pair in [([3, 3], [5, columns - 1]), ([3, rows - 1], [5, 5])]:   # in a row, in a column
        for bit in (0, 52, 63):
            change = np.array([1, -1]).astype(np.uint64) << np.uint64(bit)
            words[pair] += change
            assert search.digest() != digest, (pair, bit)
            words[pair] -= change
        words[pair] = words[pair][::-1]   # exchanged
        assert search.digest() != digest, pair
        words[pair] = words[pair][::-1]
    assert search.digest() == digest
    matrix[[1, 2]] = matrix[[2, 1]]   # two rows exchanged: the columns' sums are the same
    assert search.digest() != digest


def test_digest_of_a_small_matrix_is_of_all_its_bytes():
    """Four changes at the corners of a rectangle leave the sums of rows and columns."""
    search = run(make_search("fast", 20, 8, 0.5, 3), ellipsoid, 3)
    digest, words = search.digest(), search._A.view(np.uint64)
    words[[2, 5], [3, 7]] += np.uint64(1)
    words[[2, 5], [7, 3]] -= np.uint64(1)
    assert search.digest() != digest
