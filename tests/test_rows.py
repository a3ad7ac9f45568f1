"""Which rows a generation is scored on: fresh, from a pool, growing, and the further ones of re-evaluation."""

import numpy as np
import pytest

from conftest import refusal
from essa_mpi import config as configuration
from essa_mpi.perturbation import row_order
from essa_mpi.rows import Rows

POLICIES = [dict(rows="fresh"), dict(rows="pool"), dict(rows="pool", pool_rows=20),
            dict(rows="pool", pool_rows=20, pool_turnover=3), dict(rows="growing"),
            dict(rows="growing", batch_growth=1.5, batch_max=23), dict(rows="growing", batch_growth=1.3, batch_max=45)]


def rows(n, batch, **keys):
    return Rows(configuration.make({"name": "t", "model": "m", "adapter": "a", "task": "t.jsonl", "seed": 3,
                                    "population": 8, "batch": batch, **keys}), n)


# -- fresh ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("n, batch", [(10, 5), (10, 4), (10, 3), (7, 4), (11, 6), (100, 32), (3, 1), (1, 1), (9, 5)])
def test_every_row_once_an_epoch_and_none_twice_a_generation(n, batch):
    assert n >= 2 * batch - 1
    drawn = [rows(n, batch).batch(g) for g in range(5 * n)]  # 5 batch whole epochs
    assert all(b.shape == (batch,) and b.dtype == np.int64 and len(set(b.tolist())) == batch for b in drawn)
    epochs = np.concatenate(drawn).reshape(-1, n)
    assert (np.sort(epochs, axis=1) == np.arange(n)).all()
    if n > 3:
        assert len({tuple(epoch) for epoch in epochs}) > 1
    assert epochs[0].tolist() == row_order(3, 0, n).tolist()


def as_in_release_0_1(n, batch, generation, seed):
    """The rows that runs were scored on before there were policies: a resumed one must go on with the same."""
    def epoch_order(epoch):
        order, begun = row_order(seed, epoch, n).tolist(), epoch * n % batch
        if begun:
            taken = row_order(seed, epoch - 1, n).tolist()[n - begun:]
            order[:batch] = [r for r in order[:batch] if r not in taken] + [r for r in order[:batch] if r in taken]
        return order
    if n < 2 * batch - 1:
        return row_order(seed, generation, n).tolist()[:batch]
    epoch, start = divmod(generation * batch, n)
    return (epoch_order(epoch) + epoch_order(epoch + 1))[start:start + batch]


@pytest.mark.parametrize("n, batch", [(10, 5), (10, 4), (10, 7), (17, 5), (100, 32), (3, 1), (9, 9)])
def test_fresh_rows_are_those_of_release_0_1(n, batch):
    fresh = rows(n, batch)
    for g in range(4 * n):
        assert fresh.batch(g).tolist() == as_in_release_0_1(n, batch, g, 3)


def test_fewer_than_two_batches_of_rows():
    for g in range(20):
        assert rows(10, 7).batch(g).tolist() == row_order(3, g, 10)[:7].tolist()


# -- of all policies -----------------------------------------------------------------------------

@pytest.mark.parametrize("keys", POLICIES, ids=str)
def test_a_batch_is_a_function_of_config_rows_and_generation_alone(keys):
    """Asked in any order, by another object, or twice."""
    inorder = rows(47, 7, **keys)
    expected = [inorder.batch(g).tolist() for g in range(60)]
    for order in (range(59, -1, -1), np.random.default_rng(0).permutation(60).tolist()):
        other = rows(47, 7, **keys)
        assert all(other.batch(g).tolist() == expected[g] and other.size(g) == len(expected[g]) for g in order)
        assert all(other.batch(g).tolist() == expected[g] for g in order)
    assert [rows(47, 7, **{**keys, "seed": 4}).batch(g).tolist() for g in range(60)] != expected
    # What --resume may change changes no row.
    assert [rows(47, 7, generations=900, **keys).batch(g).tolist() for g in range(60)] == expected


@pytest.mark.parametrize("keys", POLICIES, ids=str)
def test_no_row_is_twice_in_a_generation(keys):
    found = rows(47, 7, **keys)
    for g in range(120):
        batch = found.batch(g)
        assert batch.dtype == np.int64 and len(set(batch.tolist())) == len(batch) == found.size(g)
        assert batch.min() >= 0 and batch.max() < 47


@pytest.mark.parametrize("keys", POLICIES, ids=str)
def test_further_rows_are_new_ones(keys):
    found, without = rows(47, 7, reevaluate=2, **keys), rows(47, 7, **keys)
    seen = set()
    for g in range(40):
        batch, further = found.batch(g), found.further(g)
        assert batch.tolist() == without.batch(g).tolist()          # asking for more leaves the batch as it is
        assert not set(batch.tolist()) & set(further.tolist())
        assert further.dtype == np.int64 and len(further) == min(len(batch), 47 - len(batch))
        assert len(set(further.tolist())) == len(further)
        assert further.tolist() == rows(47, 7, reevaluate=2, **keys).further(g).tolist()
        assert without.further(g).tolist() == []
        seen.add(tuple(further.tolist()))
    assert len(seen) == 40          # other ones each generation


# -- pool ----------------------------------------------------------------------------------------

def test_a_pool_as_large_as_the_batch_is_one_fixed_batch():
    for keys in (dict(), dict(pool_rows=6)):
        fixed = rows(50, 6, rows="pool", **keys)
        assert len({tuple(fixed.batch(g).tolist()) for g in range(30)}) == 1
    turning = rows(50, 6, rows="pool", pool_turnover=1)      # in turned order, but the same rows
    assert {tuple(sorted(turning.batch(g).tolist())) for g in range(30)} == {tuple(sorted(fixed.batch(0).tolist()))}


@pytest.mark.parametrize("pool, batch, turnover", [(20, 8, 3), (20, 8, 8), (20, 8, 0), (17, 5, 1), (9, 8, 2),
                                                   (30, 10, 5)])
def test_a_pool_turns_over(pool, batch, turnover):
    found = rows(60, batch, rows="pool", pool_rows=pool, pool_turnover=turnover)
    replaced, tour = turnover or batch, pool // np.gcd(turnover or batch, pool)
    drawn = [found.batch(g).tolist() for g in range(3 * tour)]
    everything = {row for batch in drawn for row in batch}
    assert everything == set(row_order(3, 0, 60)[:pool].tolist())
    for before, after in zip(drawn, drawn[1:]):
        # Near the end of a small pool the new ones are some of the old.
        assert len(set(before) & set(after)) == max(batch - replaced, 2 * batch - pool)
        assert after[:batch - replaced] == before[replaced:]
    for start in range(0, 3 * tour, tour):      # each row as often as any other, in every tour
        uses = [row for batch in drawn[start:start + tour] for row in batch]
        assert {uses.count(row) for row in everything} == {tour * batch // pool}
    assert drawn[tour] == drawn[0]


# -- growing -------------------------------------------------------------------------------------

def test_growing_batches_have_the_sizes_of_the_formula():
    for batch, growth, most in ((10, 1.05, 200), (1, 1.3, 50), (7, 1.5, 60), (3, 2.0, 64), (5, 1.0, 100)):
        found = rows(1000, batch, rows="growing", batch_growth=growth, batch_max=most)
        for g in range(80):
            exact = batch * growth**g
            # A product at a time may round otherwise than the power just below an integer.
            assert found.size(g) == min(int(exact), most) or abs(exact - round(exact)) < 1e-9 * exact
        assert found.size(80) == (5 if growth == 1.0 else most)


@pytest.mark.parametrize("n, batch, most", [(101, 10, 51), (100, 10, 50), (9, 5, 5), (8, 5, 5)])
def test_growing_batches_reach_half_the_train_split(n, batch, most):
    found = rows(n, batch, rows="growing", batch_growth=1.5)
    assert found.size(0) == batch and found.size(200) == found.size(10_000) == most


@pytest.mark.parametrize("n, batch, growth, most", [(101, 10, 1.05, 0), (47, 7, 1.5, 23), (1000, 3, 1.2, 400),
                                                    (10, 2, 2.0, 0)])
def test_growing_batches_use_each_row_once_an_epoch(n, batch, growth, most):
    found = rows(n, batch, rows="growing", batch_growth=growth, batch_max=most)
    drawn, g = [], 0
    while len(drawn) < 12 * n:
        drawn += found.batch(g).tolist()
        g += 1
    epochs = np.array(drawn[:12 * n]).reshape(12, n)
    assert (np.sort(epochs, axis=1) == np.arange(n)).all()
    assert len({tuple(epoch) for epoch in epochs}) > 1


# -- too few rows --------------------------------------------------------------------------------

@pytest.mark.parametrize("n, batch, keys, says", [
    (3, 4, {}, "batch = 4: the train split of task = 't.jsonl' has only 3 rows; lower batch or give more rows"),
    (3, 4, dict(rows="pool", pool_rows=9), "batch = 4: the train split of task = 't.jsonl' has only 3 rows"),
    (8, 4, dict(rows="pool", pool_rows=9),
     "pool_rows = 9: the train split of task = 't.jsonl' has only 8 rows; lower pool_rows"),
    (8, 4, dict(rows="growing", batch_max=9),
     "batch_max = 9: the train split of task = 't.jsonl' has only 8 rows; lower batch_max"),
    (4, 4, dict(reevaluate=2), "reevaluate = 2: the train split of task = 't.jsonl' has only 4 rows, all in the batch"),
    (9, 4, dict(reevaluate=2, rows="growing", batch_max=9),
     "reevaluate = 2: the train split of task = 't.jsonl' has only 9 rows"),
    (1, 4, dict(rows="growing"), "batch = 4: the train split of task = 't.jsonl' has only 1 rows"),
])
def test_too_few_rows_are_refused(n, batch, keys, says):
    assert refusal(lambda: rows(n, batch, **keys)).startswith(f"config: {says}")
    assert rows(n + 6, batch, **keys).batch(5).shape == (rows(n + 6, batch, **keys).size(5),)


def test_a_limit_of_another_policy_is_no_matter():
    """batch_max with fresh rows, pool_rows with growing ones: not used, so not refused."""
    assert rows(8, 4, batch_max=9).size(3) == rows(8, 4, pool_rows=9).size(3) == 4
