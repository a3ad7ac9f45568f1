"""Negative weights, two-point adaptation and decay of the mean: against pycma; limited memory against its paper."""

import warnings

import numpy as np
import pytest

from essa_mpi import perturbation
from essa_mpi.search import make_search
from test_search import (KINDS, TutorialCSA, assert_same_state, close, cma, ellipsoid, factor, give_our_constants,
                         needs_pycma, one_generation_of_both, pycma, run, sphere)

FULL = ["cma", "fast"]
WITH_NEGATIVE = ["cma", "fast", "sep"]


def noise(X):
    """A fitness that knows nothing of X, the same for the same X."""
    return np.sin(1e4 * X).sum(axis=1)


# ---- active: negative weights

# (D, population): -(sum of the negative weights) here, in GaussDiagonalSampler and with CMA_diagonal=True. The sampler
# has the rates of the full matrix, CMA_diagonal its own and no bound (52); by the same rates all of them are the same.
PYCMA_SEPARABLE_NEGATIVE = {
    (20, 12): (0.666054886478, 1.474401901848, 1.607160310363),
    (480, 22): (0.305653362910, 1.205180110134, 1.222958682348),
}


@needs_pycma
@pytest.mark.parametrize("kind", FULL)
@pytest.mark.parametrize("dimension, population", [(1, 4), (2, 3), (3, 40), (20, 12), (20, 13), (20, 96), (480, 22)])
def test_negative_weights_are_pycmas(kind, dimension, population):
    search = make_search(kind, dimension, population, 0.5, 1, active=True)
    theirs = cma.recombination_weights.RecombinationWeights(population)
    theirs.finalize_negative_weights(dimension, search.c_1, search.c_mu)
    close(search.weights, theirs.positive_weights, 1e-14)
    close(search.negative_weights, [w for w in theirs if w < 0], 1e-13)
    assert search._weight_sum == pytest.approx(sum(theirs), abs=1e-13)


@needs_pycma
@pytest.mark.parametrize("dimension, population", [(20, 12), (20, 96), (480, 22)])
def test_negative_weights_of_pycmas_own_rates(dimension, population):
    search, es = make_search("cma", dimension, population, 0.5, 1, active=True), pycma(dimension, population,
                                                                                       CMA_active=True)
    close([*search.weights, *search.negative_weights], es.sp.weights, 1e-13)


def test_negative_weights_by_hand():
    """Each bound where it is the least: (50) at the usual sizes, (51) at small ones, (52) where few dimensions meet many."""
    def bounds(search, raw):
        mu_eff = sum(raw) ** 2 / sum(w**2 for w in raw)
        return [1 + search.c_1 / search.c_mu, 1 + 2 * mu_eff / (search.mu_eff + 2),
                (1 - search.c_1 - search.c_mu) / (search.dimension * search.c_mu)]
    for dimension, population, least in [(20, 12, 0), (480, 22, 0), (3, 4, 1), (2, 40, 2), (20, 96, 2)]:
        search = make_search("cma", dimension, population, 0.5, 1, active=True)
        raw = np.log(np.arange(population // 2 + 1, population + 1)) - np.log((population + 1) / 2)
        limits = bounds(search, raw)
        assert np.argmin(limits) == least, (dimension, population, limits)
        close(search.negative_weights, -limits[least] * raw / raw.sum(), 1e-12)


@needs_pycma
@pytest.mark.parametrize("dimension, population", PYCMA_SEPARABLE_NEGATIVE)
def test_separable_negative_weights_against_pycma(dimension, population):
    search = make_search("sep", dimension, population, 0.5, 1, active=True)
    sampler = pycma(dimension, population, CMA_active=True, CMA_sampler=cma.sampler.GaussDiagonalSampler)
    diagonal = pycma(dimension, population, CMA_active=True, CMA_diagonal=True)
    found = [-w[w < 0].sum() for w in (search.negative_weights, sampler.sp.weights.asarray, diagonal.sp.weights.asarray)]
    assert found == pytest.approx(PYCMA_SEPARABLE_NEGATIVE[dimension, population], rel=1e-9)


def exact_norms(es, monkeypatch):
    """pycma divides by (|z| + 1e-9)^2 where (46) has |z|^2: 1e-9 off what we compare to 1e-9."""
    theirs = es.sm.norm
    monkeypatch.setattr(es.sm, "norm", lambda y: theirs(y) - 1e-9)


def pycma_full(search, monkeypatch, **options):
    """pycma with our normals, eigenvectors and constants; see `test_full_matrix_equals_pycma`."""
    def our_normals(number, n):
        return perturbation.population_normals(search.seed, search.generation, range(number), n)

    def our_eigenvectors(C):
        state = search.state()
        close((state["B"] * state["d"] ** 2) @ state["B"].T, C)
        return state["d"] ** 2, state["B"].copy()

    n = search.dimension
    es = pycma(n, search.population, **{"randn": our_normals, "CMA_eigenmethod": our_eigenvectors, **options})
    give_our_constants(es, search, monkeypatch)
    es.sm.C, es.sm.B, es.sm.D = np.eye(n), np.eye(n), np.ones(n)
    es.sm._sortBD = lambda: None
    return es


@needs_pycma
@pytest.mark.parametrize("dimension, population", [(20, 12), (20, 13), (20, 96), (3, 30)])
def test_active_full_matrix_equals_pycma(dimension, population, monkeypatch):
    search = make_search("cma", dimension, population, 0.5, 30, active=True)
    es = pycma_full(search, monkeypatch, CMA_active=True)
    exact_norms(es, monkeypatch)
    assert min(es.sp.weights) < 0
    for generation in range(40):
        one_generation_of_both(search, es, generation)
        close(search.state()["p_sigma"], es.adapt_sigma.ps)
    assert es.countiter == 40


@needs_pycma
@pytest.mark.parametrize("dimension, population", [(20, 12), (480, 22)])
def test_active_separable_equals_pycma(dimension, population, monkeypatch):
    search = make_search("sep", dimension, population, 0.5, 31, active=True)
    es = pycma(dimension, population, CMA_active=True, CMA_sampler=cma.sampler.GaussDiagonalSampler,
               CMA_sampler_options={"randn": lambda number, n: perturbation.population_normals(
                   31, search.generation, range(number), n)})
    give_our_constants(es, search, monkeypatch)
    es.sp.weights.finalize_negative_weights(dimension, search.c_1, search.c_mu)
    # (46) scales by C, and so does pycma's full sampler; its diagonal one by a C that has decayed already.
    monkeypatch.setattr(es.sm, "norm", lambda y: np.sqrt((y**2 / search.state()["C"]).sum()) - 1e-9)
    for generation in range(40):
        one_generation_of_both(search, es, generation)
    assert min(es.sp.weights) < 0 and es.countiter == 40


@pytest.mark.parametrize("kind", WITH_NEGATIVE)
@pytest.mark.parametrize("dimension, population", [(1, 4), (1, 40), (2, 5), (2, 40), (10, 10), (10, 60)])
def test_negative_weights_leave_C_positive_definite(kind, dimension, population):
    """Were all the bad steps in one direction, C would keep c_mu sum |w| of itself there: the bound (52) sees to it."""
    search = make_search(kind, dimension, population, 0.5, 2, active=True)
    kept = search.c_mu * -search.negative_weights.sum()
    for generation in range(60):
        before = factor(search)
        search.tell(generation, noise(search.ask(generation)))
        inside = np.linalg.solve(before, factor(search))
        if kind == "sep":   # C's own quadratic form is of the diagonal: only positive
            assert search.state()["C"].min() > 0
        else:
            assert np.linalg.eigvalsh(inside @ inside.T)[0] >= kept * (1 - 1e-9)
    assert np.isfinite(search.deviations).all()


@pytest.mark.parametrize("kind", FULL)
def test_all_bad_steps_in_one_direction_leave_C_positive_definite(kind):
    search = make_search(kind, 4, 10, 0.5, 2, active=True)
    before = factor(search)
    Z = np.zeros((10, 4))
    Z[5:, 0] = [1e-8, 0.1, 1, 3, 1e3]
    weights = search._signed_weights(Z[5:])
    search._learn(1 - search.c_1 - search.c_mu * search._weight_sum, weights, Z, Z @ before.T)
    C = search._C if kind == "cma" else search._A @ search._A.T
    kept = search.c_mu * -search.negative_weights.sum()
    assert kept > 1e-3
    least = 1 - search.c_1 - search.c_mu * search._weight_sum - search.dimension * kept
    assert C[0, 0] == pytest.approx(least, rel=1e-9) and least > 0


@pytest.mark.parametrize("kind", WITH_NEGATIVE)
def test_active_searches_no_worse(kind):
    passive = run(make_search(kind, 10, 10, 0.5, 1), ellipsoid, 250)
    active = run(make_search(kind, 10, 10, 0.5, 1, active=True), ellipsoid, 250)
    assert ellipsoid(active.mean[None])[0] > ellipsoid(passive.mean[None])[0]


# ---- tpa: two-point adaptation

if cma:
    class TutorialTPA(cma.sigma_adaptation.CMAAdaptSigmaTPA):
        """pycma's, its stall of p_c replaced as in TutorialCSA."""

        hsig = TutorialCSA.hsig


@needs_pycma
@pytest.mark.parametrize("dimension, population", [(1, 4), (2, 30), (20, 12), (480, 22), (20, 96)])
def test_damping_is_pycmas(dimension, population):
    search = make_search("cma", dimension, population, 0.5, 1, step_size="tpa")
    theirs = cma.sigma_adaptation.CMAAdaptSigmaTPA(dimension, popsize=population).initialize()
    assert search.d_tpa == pytest.approx(theirs.sp.damp, rel=1e-14)
    assert theirs.sp.c == 0.3 and theirs.sp.z_exponent == 0.5


@needs_pycma
@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("dimension, population", [(20, 12), (20, 96), (5, 4)])
def test_two_points_equal_pycma(dimension, population, active, monkeypatch):
    """pycma is told our candidates: mean, sigma, C and paths agree for 50 generations.

    It departs in two things, which are put right here. It draws the length of the pair anew, we take that of the normals
    replaced. And it compares candidates 0 and 1 in the first generation too, where they are no pair.
    """
    search = make_search("cma", dimension, population, 0.5, 40, step_size="tpa", active=active)
    rng = np.random.default_rng(0)
    es = pycma_full(search, monkeypatch, CMA_active=active, AdaptSigma=TutorialTPA,
                    randn=lambda number, n: rng.standard_normal((number, n)))
    if active:
        exact_norms(es, monkeypatch)
    for generation in range(50):
        X = search.ask(generation)
        fitness = ellipsoid(X)
        es.ask()
        with warnings.catch_warnings():
            warnings.simplefilter("error")   # pycma warns if the first two are not mirrors along its last step
            es.tell(list(X), (-fitness).tolist(), check_points=False)
        search.tell(generation, fitness)
        if generation == 0:
            assert es.sigma != 0.5 == search.sigma
            es.adapt_sigma.s, es.sigma = 0.0, 0.5
        close(search.mean, es.mean)
        close(search.sigma, es.sigma)
        close(search.state()["C"], es.sm.C)
        close(search.state()["p_c"], es.pc)
        close(search.state()["p_sigma"], es.adapt_sigma.ps)
        close(search.state()["ahead"], es.adapt_sigma.s)
    assert search.sigma != 0.5


@needs_pycma
@pytest.mark.parametrize("kind", KINDS)
def test_sigma_follows_pycmas_rule_from_the_same_ranks(kind):
    """Ties and numbers that are not finite among them."""
    search = make_search(kind, 9, 8, 0.5, 41, step_size="tpa")
    theirs = cma.sigma_adaptation.CMAAdaptSigmaTPA(9, popsize=8).initialize()
    es = type("", (), {"opts": {"TPA_dampfac": 1}})
    rng = np.random.default_rng(1)
    search.tell(0, rng.integers(5, size=8))
    assert search.sigma == 0.5
    for generation in range(1, 40):
        fitness = rng.integers(5, size=8).astype(float)
        fitness[rng.integers(8)] = [np.nan, np.inf, -np.inf, 2][generation % 4]
        before = search.sigma
        search.tell(generation, fitness)
        close(search.sigma / before, theirs.update2(es, np.where(np.isfinite(fitness), -fitness, 99)), 1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dimension, population", [(1, 4), (6, 30), (30, 9)])
def test_the_pair_lies_along_the_last_step_of_the_mean(kind, dimension, population):
    search = make_search(kind, dimension, population, 0.5, 42, step_size="tpa")
    plain = make_search(kind, dimension, population, 0.5, 42)
    assert search.ask(0).tobytes() == plain.ask(0).tobytes()   # no step yet, no pair
    for generation in range(25):
        old = search.mean
        search.tell(generation, noise(search.ask(generation)))
        step, X, m = search.mean - old, search.ask(generation + 1), search.mean
        ahead, behind = X[0] - m, X[1] - m
        close(behind, -ahead)
        close(ahead / np.linalg.norm(ahead), step / np.linalg.norm(step), 1e-7)   # ahead, not behind
        # As long as the candidate it replaces, in the distribution's own measure; the others are as they were.
        Z = perturbation.population_normals(42, generation + 1, range(population), dimension)
        if not (kind == "limited" and dimension == 1):   # its A of one dimension is learnt from the step itself
            z = np.linalg.solve(factor(search), ahead / search.sigma)
            assert np.linalg.norm(z) == pytest.approx(np.linalg.norm(Z[0]), rel=1e-6)
        close((X[2:] - m) / search.sigma, Z[2:] @ factor(search).T, 1e-9)


def test_sigma_follows_the_one_ahead():
    for ahead, behind, change in [(9, 0, 1), (0, 9, -1), (5, 5, 0)]:
        search = make_search("fast", 4, 6, 0.5, 1, step_size="tpa")
        search.tell(0, [5, 4, 3, 2, 1, 0])
        assert search.sigma == 0.5
        search.tell(1, [ahead, behind, 5, 5, 5, 5])
        expected = 0.5 * np.exp(0.3 * change / (0.7 + 2 * np.log(4) + 2 * np.log(2)))
        assert search.sigma == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_two_points_search(kind):
    search = run(make_search(kind, 20, 12, 0.01, 1, step_size="tpa"), sphere, 400)
    assert -sphere(search.mean[None])[0] < 1e-8


@pytest.mark.parametrize("kind", KINDS)
def test_two_points_need_a_population_of_four(kind):
    with pytest.raises(ValueError, match="population = 3; allowed with step_size = 'tpa': an integer >= 4"):
        make_search(kind, 5, 3, 0.5, 1, step_size="tpa")
    run(make_search(kind, 5, 4, 0.5, 1, step_size="tpa"), sphere, 5)


# ---- decay of the mean

@pytest.mark.parametrize("kind", KINDS)
def test_mean_decay(kind):
    """m = (1 - decay) (m + sigma y_w), and nothing else knows of it."""
    search, without = (make_search(kind, 7, 8, 0.5, 3, mean_decay=decay) for decay in (0.25, 0.0))
    for generation in range(8):
        old, sigma, X = search.mean, search.sigma, search.ask(generation)
        fitness = noise(X) if generation else ellipsoid(X)
        Y = (X - old) / sigma
        order = np.argsort(-fitness, kind="stable")[:search.mu]
        search.tell(generation, fitness), without.tell(generation, fitness)
        close(search.mean, 0.75 * (old + sigma * search.weights @ Y[order]), 1e-12)
        ours, plain = search.state(), without.state()
        assert {key for key in plain if ours[key].tobytes() != plain[key].tobytes()} == {"mean"}
    assert set(ours) - set(plain) == {"mean_decay"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_decay_of_0_is_the_search_without(kind):
    a, b = make_search(kind, 7, 8, 0.5, 3, mean_decay=0.0), make_search(kind, 7, 8, 0.5, 3)
    run(a, ellipsoid, 10), run(b, ellipsoid, 10)
    assert_same_state(a, b)
    assert a.digest() == b.digest()


def test_decay_anchors_a_neutral_search():
    free, held = make_search("sep", 30, 8, 0.5, 3), make_search("sep", 30, 8, 0.5, 3, mean_decay=0.2)
    run(free, noise, 100), run(held, noise, 100)
    assert np.linalg.norm(held.mean / held.sigma) < np.linalg.norm(free.mean / free.sigma) / 2


# ---- the options in the state

@pytest.mark.parametrize("made, resumed, message", [
    ({"active": True}, {}, "keys"), ({}, {"active": True}, "keys"),
    ({"step_size": "tpa"}, {}, "keys"), ({}, {"step_size": "tpa"}, "keys"),
    ({"mean_decay": 0.1}, {}, "keys"), ({}, {"mean_decay": 0.1}, "keys"),
    ({"mean_decay": 0.1}, {"mean_decay": 0.2}, "mean_decay = 0.1; allowed: 0.2")])
def test_load_state_refuses_another_option(made, resumed, message):
    state = run(make_search("fast", 4, 6, 0.3, 1, **made), sphere, 2).state()
    search = make_search("fast", 4, 6, 0.3, 1, **resumed)
    digest = search.digest()
    with pytest.raises(ValueError, match=message):
        search.load_state(state)
    assert search.digest() == digest


# ---- limited memory: LM-MA-ES

def lm_ma_es(n, population, sigma, normals, fitness, generations):
    """Algorithm 1 of arXiv 1705.06693, candidate by candidate and path by path; its h_sigma there is none."""
    mu, m = population // 2, 4 + int(np.floor(3 * np.log(n)))
    w = np.log((population + 1) / 2) - np.log(np.arange(1, mu + 1))
    w /= w.sum()
    mu_w = 1 / (w**2).sum()
    c_sigma = 2 * population / n
    y, p, M = np.zeros(n), np.zeros(n), [np.zeros(n) for _ in range(m)]
    for t in range(generations):
        z = normals(t)
        d = [None] * population
        for i in range(population):
            d[i] = z[i]
            for j in range(1, min(t, m) + 1):
                c_d = 1 / (1.5 ** (j - 1) * n)
                d[i] = (1 - c_d) * d[i] + c_d * M[j - 1] * (M[j - 1] @ d[i])
        order = sorted(range(population), key=lambda i: -fitness((y + sigma * d[i])[None])[0])
        z_w = sum(w[i] * z[order[i]] for i in range(mu))
        y = y + sigma * sum(w[i] * d[order[i]] for i in range(mu))
        p = (1 - c_sigma) * p + np.sqrt(mu_w * c_sigma * (2 - c_sigma)) * z_w
        for j in range(1, m + 1):
            c_c = population / (4 ** (j - 1) * n)
            M[j - 1] = (1 - c_c) * M[j - 1] + np.sqrt(mu_w * c_c * (2 - c_c)) * z_w
        sigma = sigma * np.exp(c_sigma / 2 * (p @ p / n - 1))
        yield y, sigma, p, np.array(M)


@pytest.mark.parametrize("dimension, population", [(40, 12), (25, 8)])
def test_limited_equals_its_paper(dimension, population):
    search = make_search("limited", dimension, population, 0.5, 50)
    assert search.paths == {40: 15, 25: 13}[dimension]
    paper = lm_ma_es(dimension, population, 0.5, lambda t: perturbation.population_normals(
        50, t, range(population), dimension), ellipsoid, 30)
    for generation, (mean, sigma, p, M) in enumerate(paper):
        search.tell(generation, ellipsoid(search.ask(generation)))
        close(search.mean, mean)
        close(search.sigma, sigma)
        close(search.state()["p_sigma"], p)
        close(search.state()["M"], M)


@pytest.mark.parametrize("dimension, population, told", [(40, 12, 0), (40, 12, 3), (40, 12, 40), (2, 8, 20), (3, 30, 9)])
def test_limited_whitening_and_deviations(dimension, population, told):
    search = run(make_search("limited", dimension, population, 0.5, 51), noise, told)
    A = search._transform(np.eye(dimension)).T
    close(A, factor(search), 1e-12)
    close(search.deviations, search.sigma * np.sqrt((A @ A.T).diagonal()), 1e-12)
    assert (told == 0) == np.allclose(A, np.eye(dimension))
    z = np.random.default_rng(0).standard_normal(dimension)
    close(search._whiten(search._transform(z[None])[0]), z)
    close(search._transform(search._whiten(z)[None])[0], z)
