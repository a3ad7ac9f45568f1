"""The search: against pycma, against the tutorial, and the promises ranks rely on."""

import numpy as np
import pytest

from essa_mpi import perturbation, search as search_module
from essa_mpi.search import CMA, FastCMA, LimitedCMA, SeparableCMA, choose, eigen, make_search

KINDS = ["cma", "fast", "sep", "limited"]


def sphere(X):
    return -((X - 1) ** 2).sum(axis=1)


def ellipsoid(X):
    scale = 10.0 ** (4 * np.arange(X.shape[1]) / (X.shape[1] - 1))
    return -(scale * (X - 1) ** 2).sum(axis=1)


def rosenbrock(X):
    return -(100 * (X[:, 1:] - X[:, :-1] ** 2) ** 2 + (1 - X[:, :-1]) ** 2).sum(axis=1)


def run(search, objective, generations):
    for generation in range(search.generation, search.generation + generations):
        search.tell(generation, objective(search.ask(generation)))
    return search


def assert_same_state(a, b):
    a, b = a.state(), b.state()
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].tobytes() == b[key].tobytes(), key


def factor(search):
    """A of y = A z, (D, D), from the state."""
    state = search.state()
    if "B" in state:
        return state["B"] * state["d"]
    if "A" in state:
        return state["A"]
    if "C" in state:
        return np.diag(np.sqrt(state["C"]))
    A = np.eye(search.dimension)   # LM-MA-ES: a factor a path, the first nearest to z
    for c, M in list(zip(search.c_d, state["M"]))[:search.generation]:
        A = (1 - c) * A + c * np.outer(M, M @ A)
    return A


# ---- the oracle: pycma, the reference implementation of the tutorial's author

try:
    import cma
except ImportError:
    cma = None
needs_pycma = pytest.mark.skipif(cma is None, reason="the oracle is pycma: pip install cma")


class TutorialCSA(cma.sigma_adaptation.CMAAdaptSigmaCSA if cma else object):
    """pycma's step-size control with the tutorial's h_sigma in place of its own.

    pycma 4.5 stalls p_c unless |p_sigma|^2 / D / (1 - (1 - c_sigma)^(2 g)) < 2 + 4/(D + 1).
    The tutorial compares the length with (1.4 + 2/(D + 1)) E|N(0, I)|; `PYCMA_DEPARTS`
    has both thresholds in pycma's units.
    """

    def hsig(self, es):
        self._update_ps(es)
        length = np.linalg.norm(self.ps) / np.sqrt(1 - (1 - self.cs) ** (2 * es.countiter))
        return length < (1.4 + 2 / (es.N + 1)) * es.const.chiN


# (D, population): constant -> (tutorial, pycma 4.5.0). What is not listed is equal: the weights, c_c, c_1, c_mu,
# and that log sigma rises by at most 1 a generation (here a guard: the tutorial has no bound).
PYCMA_DEPARTS = {
    # c_sigma: + 3 in the denominator where the tutorial has + 5, and at most 1/2.
    # d_sigma: pycma adds its c_sigma, and has f sqrt(.) - 1 for sqrt(.) - 1, f = 3 (1 - 2^(-D/9)): large populations.
    # h_sigma: see TutorialCSA.
    # chi_n, E|N(0, I)|: pycma's step-size control has a closer approximation than the tutorial's.
    # C_0: pycma spreads the variances from 1 to exp(1e-4 (D - 1)/D), so that no two eigenvalues are equal.
    (20, 12): {"c_sigma": (0.199428013852, 0.214349977992), "d_sigma": (1.199428013852, 1.214349977992),
               "h_sigma": (2.180718567346, 2.190476190476), "chi_n": (4.416766652700, 4.416605124547),
               "C_0": (1.0, 1.000095004513)},
    (20, 96): {"c_sigma": (0.548426964160, 0.5), "d_sigma": (1.727682743060, 4.636651909032),
               "h_sigma": (2.180718567346, 2.190476190476), "chi_n": (4.416766652700, 4.416605124547),
               "C_0": (1.0, 1.000095004513)},
    (480, 22): {"c_sigma": (0.017261448633, 0.017331977837), "d_sigma": (1.017261448633, 1.017331977837),
                "h_sigma": (1.969607237880, 2.008316008316), "chi_n": (21.897495941722, 21.897494385177),
                "C_0": (1.0, 1.000099796646)},
}
# The separable kind: pycma's GaussDiagonalSampler uses the rates of the full matrix; its CMA_diagonal has its own.
PYCMA_SEPARABLE_DEPARTS = {  # constant -> (tutorial rate x (D + 2)/3, GaussDiagonalSampler, CMA_diagonal=True)
    (20, 12): {"c_1": (0.032063932525, 0.004372354435, 0.034327992810),
               "c_mu": (0.067588119693, 0.009216561776, 0.056538598167),
               "c_c": (0.171767211277, 0.171767211277, 0.252594948359)},
    (480, 22): {"c_1": (0.001387113187, 0.000008633485, 0.001909010150),
                "c_mu": (0.006760466137, 0.000042077590, 0.008562176100),
                "c_c": (0.008291908558, 0.008291908558, 0.046293692805)},
}


def pycma(dimension, population, **options):
    return cma.CMAEvolutionStrategy(dimension * [0.0], 0.5, {
        "popsize": population, "AdaptSigma": TutorialCSA, "CMA_active": False, "CMA_mirrors": 0, "updatecovwait": 0,
        "seed": np.nan, "verbose": -9, "verb_log": 0, "verb_disp": 0, **options})


def give_our_constants(es, search, monkeypatch):
    monkeypatch.setattr(cma.utilities.math.Mh, "chiN", staticmethod(lambda dimension: search.chi_n))
    es.adapt_sigma.cs, es.adapt_sigma.damps = search.c_sigma, search.d_sigma
    es.sp.cc = es.sp.cc_sep = search.c_c
    es.sp.c1_sep, es.sp.cmu_sep = search.c_1, search.c_mu
    es.sm.parameters = lambda mueff=None, lam=None: {"c1": search.c_1, "cmu": search.c_mu}


def close(a, b, tolerance=1e-9):
    a, b = np.asarray(a), np.asarray(b)
    assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


@needs_pycma
@pytest.mark.parametrize("dimension, population", PYCMA_DEPARTS)
def test_constants_against_pycma(dimension, population):
    search = make_search("cma", dimension, population, 0.5, 1)
    es = pycma(dimension, population)
    rates = es.sm.parameters(mueff=es.sp.weights.mueff, lam=population)
    for ours, theirs in [(search.weights, es.sp.weights[: search.mu]), (search.mu_eff, es.sp.weights.mueff),
                         (search.c_c, es.sp.cc), (search.c_1, rates["c1"]), (search.c_mu, rates["cmu"]),
                         (search_module.LOG_SIGMA_STEP_MAX, es.adapt_sigma.max_delta_log_sigma)]:
        close(ours, theirs, 1e-14)
    found = {
        "c_sigma": (search.c_sigma, es.adapt_sigma.cs),
        "d_sigma": (search.d_sigma, es.adapt_sigma.damps),
        "h_sigma": (((1.4 + 2 / (dimension + 1)) * search.chi_n) ** 2 / dimension, 2 + 4 / (dimension + 1)),
        "chi_n": (search.chi_n, cma.utilities.math.Mh.chiN(dimension)),
        "C_0": (search.state()["C"].max(), es.sm.C.max()),
    }
    assert found.keys() == PYCMA_DEPARTS[dimension, population].keys()
    for name, expected in PYCMA_DEPARTS[dimension, population].items():
        assert found[name] == pytest.approx(expected, rel=1e-9), name


def one_generation_of_both(search, es, generation):
    """Ours and pycma's candidates, mean, sigma, C and p_c are the same numbers."""
    X = search.ask(generation)
    theirs = es.ask()
    close(X, theirs)
    fitness = ellipsoid(X)
    es.tell(theirs, (-fitness).tolist())
    search.tell(generation, fitness)
    close(search.mean, es.mean)
    close(search.sigma, es.sigma)
    close(search.state()["C"], es.sm.C)
    close(search.state()["p_c"], es.pc)


@needs_pycma
@pytest.mark.parametrize("dimension, population", PYCMA_DEPARTS)
def test_full_matrix_equals_pycma(dimension, population, monkeypatch):
    """The same normals, the tutorial's constants: mean, sigma, C and candidates agree for 50 generations."""
    search = make_search("cma", dimension, population, 0.5, seed=20)

    def our_normals(number, n):
        return perturbation.population_normals(20, search.generation, range(number), n)

    def our_eigenvectors(C):
        # Equal eigenvalues leave the eigenvectors open, so pycma gets ours, after we have checked them.
        state = search.state()
        B, d = state["B"], state["d"]
        close((B * d**2) @ B.T, C)
        close(B.T @ B, np.eye(dimension))
        return d**2, B.copy()

    es = pycma(dimension, population, randn=our_normals, CMA_eigenmethod=our_eigenvectors)
    give_our_constants(es, search, monkeypatch)
    es.sm.C, es.sm.B, es.sm.D = np.eye(dimension), np.eye(dimension), np.ones(dimension)
    es.sm._sortBD = lambda: None  # ours are sorted; its unstable sort would exchange equal ones

    for generation in range(50):
        one_generation_of_both(search, es, generation)
        close(search.state()["p_sigma"], es.adapt_sigma.ps)
    assert search.sigma != 0.5 and es.countiter == 50


@needs_pycma
@pytest.mark.parametrize("dimension, population", PYCMA_SEPARABLE_DEPARTS)
def test_separable_constants_against_pycma(dimension, population):
    search = make_search("sep", dimension, population, 0.5, 1)
    sampler = pycma(dimension, population, CMA_sampler=cma.sampler.GaussDiagonalSampler)
    diagonal = pycma(dimension, population, CMA_diagonal=True)
    rates = sampler.sm.parameters(mueff=sampler.sp.weights.mueff, lam=population)
    found = {
        "c_1": (search.c_1, rates["c1"], diagonal.sp.c1_sep),
        "c_mu": (search.c_mu, rates["cmu"], diagonal.sp.cmu_sep),
        "c_c": (search.c_c, sampler.sp.cc, diagonal.sp.cc_sep),
    }
    for name, expected in PYCMA_SEPARABLE_DEPARTS[dimension, population].items():
        assert found[name] == pytest.approx(expected, rel=1e-6), name
    full = make_search("cma", dimension, population, 0.5, 1)
    assert search.c_1 == pytest.approx((dimension + 2) / 3 * full.c_1, rel=1e-15)
    assert search.c_mu == pytest.approx((dimension + 2) / 3 * full.c_mu, rel=1e-15)


@needs_pycma
@pytest.mark.parametrize("dimension, population", PYCMA_SEPARABLE_DEPARTS)
def test_separable_equals_pycma(dimension, population, monkeypatch):
    """pycma's linear diagonal update (GaussDiagonalSampler) with our constants: equal for 50 generations."""
    search = make_search("sep", dimension, population, 0.5, seed=21)

    def our_normals(number, n):
        return perturbation.population_normals(21, search.generation, range(number), n)

    es = pycma(dimension, population, CMA_sampler=cma.sampler.GaussDiagonalSampler,
               CMA_sampler_options={"randn": our_normals})
    give_our_constants(es, search, monkeypatch)
    np.testing.assert_array_equal(es.sm.C, 1.0)

    for generation in range(50):
        one_generation_of_both(search, es, generation)
    assert search.sigma != 0.5 and es.countiter == 50


@needs_pycma
def test_how_pycmas_own_diagonal_departs(monkeypatch):
    """CMA_diagonal=True, even with our constants, has another update of the variances: exponential, times log 2.

    sep-CMA-ES:  C_i <- C_i (1 + s_i),          s_i = sum_k w_k (v_ki^2 / C_i - 1)
    pycma:       C_i <- C_i exp(log 2 s_i),     over the same v (path and steps) and weights c_1, c_mu w_k
    Mean and sigma of the first generation do not depend on it, and agree.
    """
    search = make_search("sep", 20, 12, 0.5, seed=22)
    es = pycma(20, 12, CMA_diagonal=True, randn=lambda number, n: perturbation.population_normals(
        22, search.generation, range(number), n))
    give_our_constants(es, search, monkeypatch)
    X, theirs = search.ask(0), es.ask()
    close(X, theirs)
    es.tell(theirs, (-ellipsoid(X)).tolist())
    search.tell(0, ellipsoid(X))
    close(search.mean, es.mean)
    close(search.sigma, es.sigma)
    s = search.state()["C"] - 1
    close(es.sigma_vec.scaling**2, np.exp(np.log(2) * s))
    assert np.abs(es.sigma_vec.scaling**2 - search.state()["C"]).max() > 1e-3


def test_separable_is_the_diagonal_of_the_full_matrix():
    """With the same rates, C of `sep` starts as the diagonal of what `cma` learns."""
    full, diagonal = make_search("cma", 6, 8, 0.5, 3), make_search("sep", 6, 8, 0.5, 3)
    diagonal.c_1, diagonal.c_mu = full.c_1, full.c_mu
    fitness = ellipsoid(full.ask(0))
    full.tell(0, fitness), diagonal.tell(0, fitness)
    np.testing.assert_allclose(full.state()["C"].diagonal(), diagonal.state()["C"], rtol=1e-14)


# ---- it searches

@pytest.mark.parametrize("kind, dimension, population, objective, generations, goal", [
    ("cma", 20, 12, sphere, 300, 1e-10),
    ("cma", 10, 10, ellipsoid, 500, 1e-10),
    ("cma", 6, 10, rosenbrock, 500, 1e-10),
    ("cma", 1, 4, sphere, 150, 1e-10),
    ("fast", 20, 12, sphere, 300, 1e-10),
    ("fast", 10, 10, ellipsoid, 500, 1e-10),
    ("fast", 6, 10, rosenbrock, 500, 1e-10),
    ("fast", 6, 40, rosenbrock, 300, 1e-10),
    ("fast", 1, 4, sphere, 150, 1e-10),
    ("sep", 20, 12, sphere, 300, 1e-10),
    ("sep", 20, 12, ellipsoid, 450, 1e-10),
    ("sep", 2, 12, rosenbrock, 800, 1e-4),  # a curved valley, which a diagonal follows slowly
    ("sep", 1, 4, sphere, 150, 1e-10),
    ("sep", 100, 16, sphere, 600, 1e-4),
    ("limited", 100, 16, sphere, 600, 1e-8),
])
def test_converges(kind, dimension, population, objective, generations, goal):
    search = run(make_search(kind, dimension, population, 0.5, seed=1), objective, generations)
    assert -objective(search.mean[None])[0] < goal
    np.testing.assert_allclose(search.mean, 1.0, atol=3 * np.sqrt(goal))


@pytest.mark.parametrize("kind", ["cma", "fast"])
def test_full_matrix_learns_a_rotation(kind):
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.standard_normal((8, 8)))[0]
    search = run(make_search(kind, 8, 10, 0.5, 4), lambda X: ellipsoid(X @ rotation + 1), 500)
    np.testing.assert_allclose(search.mean, 0.0, atol=1e-5)
    state = search.state()
    curvature = rotation @ np.diag(10.0 ** (4 * np.arange(8) / 7)) @ rotation.T
    C = state["C"] if kind == "cma" else state["A"] @ state["A"].T
    learnt = np.linalg.eigvals(C @ curvature).real  # C is about the inverse Hessian
    assert learnt.max() / learnt.min() < 30 < 9999 < np.linalg.cond(curvature)


def test_lazy_eigendecomposition_searches_as_well():
    search = run(make_search("cma", 10, 10, 0.5, 5, eigen_every=5), ellipsoid, 600)
    assert -ellipsoid(search.mean[None])[0] < 1e-8
    assert search.state()["eigen_generation"] == 600
    run(search, ellipsoid, 3)
    assert search.state()["eigen_generation"] == 600


def test_it_maximises():
    search = make_search("sep", 3, 8, 0.1, 0)
    before = search.mean
    for generation in range(20):
        search.tell(generation, search.ask(generation)[:, 0])
    assert search.mean[0] > before[0] + 0.3 and search.sigma > 0.1


# ---- candidates

@pytest.mark.parametrize("kind", KINDS)
def test_ask_is_pure(kind):
    search = run(make_search(kind, 50, 9, 0.3, 8), ellipsoid, 5)
    digest = search.digest()
    first = search.ask(5)
    first_bytes = first.tobytes()
    first[:] = np.nan  # the caller's copy is the caller's
    assert search.ask(5).tobytes() == first_bytes
    search._asked = None
    assert search.ask(5).tobytes() == first_bytes  # computed anew, not only remembered
    assert search.digest() == digest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dimension, population", [(1, 2), (37, 5), (480, 22)])
def test_candidate_is_a_row_of_ask(kind, dimension, population):
    search = run(make_search(kind, dimension, population, 0.3, 8), sphere, 4)
    alone = [search.candidate(4, k) for k in reversed(range(population))][::-1]
    assert np.array(alone).tobytes() == search.ask(4).tobytes()
    alone[0][:] = np.nan
    assert np.isfinite(search.candidate(4, 0)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_follow_the_formula(kind):
    """x = m + sigma A z, C = A A^T, z regenerated from (seed, generation, candidate)."""
    search = run(make_search(kind, 12, 8, 0.3, 77), ellipsoid, 30)
    A = factor(search)
    for k in range(8):
        z = perturbation.normals(77, 30, k, 12)
        np.testing.assert_allclose(search.candidate(30, k), search.mean + search.sigma * (A @ z), rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_tell_needs_no_ask(kind):
    """tell regenerates the candidates: what was asked in between, and how, leaves no trace."""
    asked, silent = make_search(kind, 30, 8, 0.3, 5), make_search(kind, 30, 8, 0.3, 5)
    for generation in range(10):
        fitness = ellipsoid(asked.ask(generation))
        asked.candidate(generation, 3)
        asked.tell(generation, fitness), silent.tell(generation, fitness)
    assert_same_state(asked, silent)


@pytest.mark.parametrize("kind", KINDS)
def test_seed_and_generation_matter(kind):
    a, b = make_search(kind, 5, 4, 0.3, 1), make_search(kind, 5, 4, 0.3, 2)
    assert not np.any(a.ask(0) == b.ask(0))
    first = a.ask(0)
    a.tell(0, [0, 0, 0, 0])
    assert not np.any(a.ask(1) == first)


# ---- fitness that is missing or tied

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_fitness_that_is_not_finite_is_the_worst(kind, bad):
    a, b = make_search(kind, 6, 8, 0.5, 1), make_search(kind, 6, 8, 0.5, 1)
    fitness = np.array([3.0, 1.0, 7.0, 2.0, 9.0, 5.0, 8.0, 4.0])
    worst = fitness.copy()
    fitness[4], worst[4] = bad, -1e300
    a.tell(0, fitness), b.tell(0, worst)
    assert_same_state(a, b)
    assert np.isfinite(a.mean).all()


@pytest.mark.parametrize("kind", KINDS)
def test_one_finite_fitness_is_enough(kind):
    a, b = make_search(kind, 6, 8, 0.5, 1), make_search(kind, 6, 8, 0.5, 1)
    a.tell(0, [np.nan, -np.inf, np.nan, np.nan, np.nan, -5.0, np.inf, np.nan])
    b.tell(0, [6, 5, 4, 3, 2, 7, 1, 0])  # the finite one first, the others by index
    assert_same_state(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_ties_break_by_candidate_index(kind):
    a, b = make_search(kind, 6, 20, 0.5, 1), make_search(kind, 6, 20, 0.5, 1)
    a.tell(0, np.array([1.0, 0.0] * 10))
    b.tell(0, [20, 10, 19, 9, 18, 8, 17, 7, 16, 6, 15, 5, 14, 4, 13, 3, 12, 2, 11, 1])
    assert_same_state(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_ranking_matters(kind):
    a, b = make_search(kind, 6, 8, 0.5, 1), make_search(kind, 6, 8, 0.5, 1)
    run(a, ellipsoid, 20), run(b, lambda X: np.arctan(1e-3 * ellipsoid(X)), 20)
    assert_same_state(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fitness, message", [
    ([np.nan, -np.inf, np.inf, np.nan], "finite"),
    ([1, 2, 3], "shape"),
    ([1, 2, 3, 4, 5], "shape"),
    ([[1, 2, 3, 4]], "shape"),
    ([], "shape"),
    (1.0, "shape"),
])
def test_unusable_fitness_changes_nothing(kind, fitness, message):
    search = make_search(kind, 5, 4, 0.3, 1)
    digest = search.digest()
    with pytest.raises(ValueError, match=message):
        search.tell(0, fitness)
    assert search.digest() == digest and search.generation == 0


# ---- state, resume, digest

def through_bytes(state):
    """As a checkpoint would: only dtype, shape and bytes survive."""
    return {key: np.frombuffer(a.tobytes(), dtype=a.dtype).reshape(a.shape) for key, a in state.items()}


@pytest.mark.parametrize("kind, options, stop", [
    ("cma", {}, 13), ("cma", {"eigen_every": 5}, 13), ("cma", {"eigen_every": 5}, 15), ("sep", {}, 13), ("sep", {}, 0),
    ("fast", {}, 13), ("fast", {}, 0), ("fast", {"active": True, "step_size": "tpa"}, 13),
    ("limited", {}, 3), ("limited", {}, 25), ("limited", {}, 0), ("cma", {"active": True, "mean_decay": 0.01}, 13),
    *((kind, {"step_size": "tpa"}, stop) for kind in KINDS for stop in (0, 1, 13))])
def test_resume_has_the_same_bits(kind, options, stop):
    whole = run(make_search(kind, 40, 10, 0.4, 2**63 + 9, **options), ellipsoid, 30)
    first = run(make_search(kind, 40, 10, 0.4, 2**63 + 9, **options), ellipsoid, stop)
    saved = through_bytes(first.state())
    run(first, ellipsoid, 2)  # the checkpoint is a copy: going on does not change it
    second = make_search(kind, 40, 10, 0.4, 2**63 + 9, **options)
    second.ask(0)
    second.load_state(saved)
    assert second.generation == stop
    run(second, ellipsoid, 30 - stop)
    assert_same_state(whole, second)
    assert whole.digest() == second.digest()
    assert whole.ask(30).tobytes() == second.ask(30).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_plain_arrays(kind):
    state = make_search(kind, 4, 6, 0.3, 2**64 - 1).state()
    assert {array.dtype.str for array in state.values()} == {"<f8", "<i8"}
    assert all(type(array) is np.ndarray for array in state.values())
    state["mean"][:] = 9.0
    assert (make_search(kind, 4, 6, 0.3, 0).mean == 0).all()


@pytest.mark.parametrize("kind, options", [*((kind, {}) for kind in KINDS), ("limited", {"step_size": "tpa"}),
                                           ("fast", {"active": True, "step_size": "tpa", "mean_decay": 0.1})])
def test_digest_sees_every_bit(kind, options):
    search = run(make_search(kind, 4, 6, 0.3, 1, **options), sphere, 3)
    digest = search.digest()
    assert type(digest) is int and -(2**63) <= digest < 2**63
    arguments = search._arguments()
    for key, array in search.state().items():
        for bit in (0, array.nbytes * 8 - 2):  # the last bit of the first number, and the top one below the sign
            flipped = search.state()
            view = flipped[key].reshape(-1).view(np.uint8)
            view[bit // 8] ^= 1 << bit % 8
            flipped[key] = view.view(array.dtype).reshape(array.shape)
            other = make_search(kind, 4, 6, 0.3, 1, **options)
            if key in arguments:
                other._arguments = lambda flipped=flipped, key=key: {**arguments, key: flipped[key]}
                other._load(search.state())
            else:
                with np.errstate(all="ignore"):   # some flipped numbers are huge
                    other._load(flipped)
            assert other.digest() != digest, (key, bit)
    same = make_search(kind, 4, 6, 0.3, 1, **options)
    same.load_state(search.state())
    assert same.digest() == digest


def test_digests_of_different_searches_differ():
    searches = [*(make_search(kind, 4, 6, 0.3, 1) for kind in KINDS), make_search("cma", 4, 6, 0.3, 2),
                make_search("cma", 4, 7, 0.3, 1), make_search("cma", 4, 6, 0.4, 1),
                make_search("cma", 4, 6, 0.3, 1, eigen_every=2), make_search("cma", 4, 6, 0.3, 1, active=True),
                make_search("cma", 4, 6, 0.3, 1, step_size="tpa"), make_search("cma", 4, 6, 0.3, 1, mean_decay=0.1),
                make_search("cma", 4, 6, 0.3, 1, mean_decay=0.2)]
    assert len({search.digest() for search in searches}) == len(searches)


def test_separable_bits_are_the_same_on_every_machine():
    """A known answer: no BLAS, no libm. The fitness is a dot product in a written order, too."""
    search = make_search("sep", 40, 12, 0.5, seed=1)
    for generation in range(60):
        X = search.ask(generation)
        fitness = np.zeros(12)
        for i in range(40):
            fitness -= (i + 1) * (X[:, i] - 1) ** 2
        search.tell(generation, fitness)
    assert search.digest() == -5394481381572413257


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change, message", [
    (lambda s: s.pop("p_sigma"), "keys"),
    (lambda s: s.update(extra=np.zeros(3)), "keys"),
    (lambda s: s.update(mean=np.zeros(5)), "mean"),
    (lambda s: s.update(mean=np.zeros(4, dtype=np.float32)), "mean"),
    (lambda s: s.update(generation=np.array(3.0)), "generation"),
    (lambda s: s.update(mean=np.array([0, 0, np.nan, 0])), "finite"),
    (lambda s: s.update(seed=np.array(2)), "seed"),
    (lambda s: s.update(population=np.array(7)), "population"),
    (lambda s: s.update(dimension=np.array(5)), "dimension"),
    (lambda s: s.update(initial_sigma=np.array(0.7)), "initial_sigma"),
])
def test_load_state_refuses_what_does_not_fit(kind, change, message):
    search = run(make_search(kind, 4, 6, 0.3, 1), sphere, 3)
    state, digest = search.state(), search.digest()
    change(state)
    with pytest.raises(ValueError, match=message):
        search.load_state(state)
    assert search.digest() == digest


def test_load_state_refuses_another_kind():
    for kind in KINDS:
        for other in set(KINDS) - {kind}:
            with pytest.raises(ValueError, match="kind"):
                make_search(kind, 4, 6, 0.3, 1).load_state(make_search(other, 4, 6, 0.3, 1).state())
    with pytest.raises(ValueError, match="eigen_every"):
        make_search("cma", 4, 6, 0.3, 1).load_state(make_search("cma", 4, 6, 0.3, 1, eigen_every=2).state())


# ---- guards

def test_eigen():
    rng = np.random.default_rng(0)
    A = rng.standard_normal((9, 9))
    C = A @ A.T
    C[0, 1] += 1e-3  # not symmetric
    same, B, d = eigen(C)
    np.testing.assert_array_equal(same, same.T)
    np.testing.assert_allclose((B * d**2) @ B.T, same, atol=1e-12)
    np.testing.assert_allclose(B.T @ B, np.eye(9), atol=1e-13)
    assert (B[np.abs(B).argmax(axis=0), np.arange(9)] > 0).all()
    assert (np.diff(d) >= 0).all()


def test_eigen_signs_do_not_depend_on_lapack(monkeypatch):
    A = np.random.default_rng(1).standard_normal((7, 7))
    _, B, _ = eigen(A @ A.T)
    values, vectors = np.linalg.eigh(A @ A.T)
    monkeypatch.setattr(np.linalg, "eigh", lambda C: (values, -vectors))
    np.testing.assert_array_equal(eigen(A @ A.T)[1], B)


def test_eigenvalues_are_floored():
    C, B, d = eigen(np.diag([1.0, -1e-3, 1e-20, 4.0]))
    assert d.min() == pytest.approx(2e-7) and d.max() == 2.0
    np.testing.assert_allclose((B * d**2) @ B.T, C, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_a_neutral_or_collapsing_search_stays_finite(kind):
    """Random fitness, constant fitness, and a direction that runs away: no nan, no overflow, bounded deviations."""
    rng = np.random.default_rng(0)
    for objective in (lambda X: rng.standard_normal(len(X)), lambda X: np.zeros(len(X)), lambda X: X[:, 0],
                      lambda X: -np.abs(X).max(axis=1)):
        search = run(make_search(kind, 3, 8, 0.5, 1), objective, 300)
        assert np.isfinite(search.mean).all() and np.isfinite(search.ask(300)).all()
        assert 0 < search.deviations.max() <= 0.5 * search_module.SCALE_RANGE * (1 + 1e-9)
        assert 0.5 / search_module.SCALE_RANGE * (1 - 1e-9) <= search.deviations.max()


@pytest.mark.parametrize("kind, keys", [("cma", ["p_c", "d"]), ("sep", ["p_c"]), ("fast", ["p_c", "A"])])
def test_moving_scale_between_sigma_and_C_changes_no_bit(kind, keys):
    """The guard of sigma: a search whose sigma has run away by 2^70 is the same search."""
    a = run(make_search(kind, 6, 8, 0.5, 1), ellipsoid, 20)
    state = a.state()
    state["sigma"] = state["sigma"] * 2.0**70
    if kind != "fast":
        state["C"] = state["C"] * 2.0**-140
    for key in keys:
        state[key] = state[key] * 2.0**-70
    b = make_search(kind, 6, 8, 0.5, 1)
    b.load_state(state)
    for generation in range(20, 40):
        X = a.ask(generation)
        assert X.tobytes() == b.ask(generation).tobytes()
        assert a.deviations.tobytes() == b.deviations.tobytes()
        a.tell(generation, ellipsoid(X)), b.tell(generation, ellipsoid(X))
    assert 2.0**-1 <= b.sigma / a.sigma * 2.0 ** round(-np.log2(b.sigma / a.sigma)) <= 2.0
    assert b.sigma < 0.5 * 2.0**64


# ---- bad input

@pytest.mark.parametrize("arguments, key, value", [
    (("cmaes", 4, 6, 0.3, 1), "search", "'cmaes'"),
    ((None, 4, 6, 0.3, 1), "search", "None"),
    (("auto", 0, 6, 0.3, 1), "dimension", "0"),
    (("KIND", 0, 6, 0.3, 1), "dimension", "0"),
    (("KIND", -3, 6, 0.3, 1), "dimension", "-3"),
    (("KIND", 4.5, 6, 0.3, 1), "dimension", "4.5"),
    (("KIND", 4, 1, 0.3, 1), "population", "1"),
    (("KIND", 4, "6", 0.3, 1), "population", "'6'"),
    (("KIND", 4, 6, 0.0, 1), "sigma", "0.0"),
    (("KIND", 4, 6, -1, 1), "sigma", "-1"),
    (("KIND", 4, 6, float("nan"), 1), "sigma", "nan"),
    (("KIND", 4, 6, float("inf"), 1), "sigma", "inf"),
    (("KIND", 4, 6, "0.3", 1), "sigma", "'0.3'"),
    (("KIND", 4, 6, 0.3, -1), "seed", "-1"),
    (("KIND", 4, 6, 0.3, 2**64), "seed", str(2**64)),
    (("KIND", 4, 6, 0.3, None), "seed", "None"),
])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_arguments(kind, arguments, key, value):
    arguments = (kind if arguments[0] == "KIND" else arguments[0],) + arguments[1:]
    with pytest.raises(ValueError, match="allowed") as error:
        make_search(*arguments)
    assert str(error.value).startswith(f"{key} = {value};")


@pytest.mark.parametrize("kind, options", [
    ("cma", {"eigen_every": 0}), ("cma", {"eigen_every": 1.5}), ("cma", {"lazy": 1}), ("sep", {"eigen_every": 2}),
    ("fast", {"eigen_every": 2}), ("limited", {"active": True}), ("cma", {"eigen_every": 2, "active": True}),
    *((kind, {"step_size": value}) for kind in KINDS for value in ("psr", None, True)),
    *((kind, {"mean_decay": value}) for kind in KINDS for value in (1.0, -0.1, float("nan"), "0.1", None))])
def test_bad_options(kind, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} = .*allowed"):
        make_search(kind, 4, 6, 0.3, 1, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_generations_come_in_order(kind):
    search = run(make_search(kind, 4, 6, 0.3, 1), sphere, 3)
    for generation in (2, 4, -1):
        for call in (lambda: search.ask(generation), lambda: search.candidate(generation, 0),
                     lambda: search.tell(generation, np.zeros(6))):
            with pytest.raises(ValueError, match=f"generation = {generation}; allowed: 3"):
                call()
    for k in (-1, 6, 0.5):
        with pytest.raises(ValueError, match="candidate"):
            search.candidate(3, k)


def test_kinds():
    for kind, expected in [("cma", CMA), ("sep", SeparableCMA), ("fast", FastCMA), ("limited", LimitedCMA)]:
        assert type(make_search(kind, 1, 2, 1, 0)) is expected


def test_auto_takes_the_full_covariance_while_it_is_small():
    assert choose(1)[0] == choose(2048)[0] == "fast" and choose(2049)[0] == choose(10**7)[0] == "limited"
    assert choose(2048)[1] == "a full covariance of 32 MiB"
    assert choose(32768)[1] == "a full covariance, 8.0 GiB, would learn too slowly"
    few = make_search("auto", 5, 6, 0.3, 1, active=True)
    assert type(few) is FastCMA and few.active
    many = make_search("auto", 2049, 4, 0.3, 1, step_size="tpa")
    assert type(many) is LimitedCMA and (many.dimension, many.population, many.step_size) == (2049, 4, "tpa")
    with pytest.raises(ValueError, match="active = True; allowed options of search = 'limited'"):
        make_search("auto", 2049, 4, 0.3, 1, active=True)
