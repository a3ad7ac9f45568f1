"""A generation in rounds: races change no update, re-evaluation is what it says, signal and noise what they were of."""

import math
import time
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from deterministic_run import DeterministicScorer, Faults
from essa_mpi import config as configuration
from essa_mpi.answers import Answers
from essa_mpi.config import UserError
from essa_mpi.evolve import Generation, advice, evolve, new_search
from essa_mpi.rewards import Reward
from essa_mpi.rounds import Round, score_generation, spread
from essa_mpi.scoring import Arm, Scorer
from essa_mpi.search import make_search
from essa_mpi.tasks import Row
from essa_mpi.world import ArmScore, Busy, TileScore, World, share, to_fixed
from test_world import Pretended, _HandedIn, real_world, same_everywhere, seat_of, small_task

LIMITS = dict(reward_low=0.0, reward_high=1.0)


def settings(**keys):
    return configuration.make({"name": "x", "model": "x", "adapter": "x", "task": "x", "population": 7, "batch": 6,
                               **keys})


class Together:
    """All ranks of a job in one process: their tiles are scored in turn, and what each sends is exchanged."""

    rank = 0

    def __init__(self, size=1):
        self.size, self.exchanges = size, 0

    def share(self, lengths):
        return [tile for rank in range(self.size) for tile in share(lengths, rank, self.size)]

    def exchange(self, lengths, scores, digest, busy, stop=False):
        self.exchanges += 1
        comm, scores = Pretended(self.size), list(scores)
        world = World(seat_of(SimpleNamespace(COMM_WORLD=comm, Wtime=time.perf_counter, INT64_T=None), self.size))
        for rank in range(self.size):
            mine = [scores.pop(0) for _ in share(lengths, rank, self.size)]
            try:
                world.exchange(lengths, mine, digest, busy)
            except _HandedIn:
                pass
        return world.exchange(lengths, [], digest, busy)


class Table:
    """A scorer of given rewards, (candidate, row) -> float; nan is a missing score."""

    def __init__(self, rewards):
        self.rewards, self.asked = rewards, []

    def score(self, arms, tiles, generation):
        self.asked.append([(arm.name, arm.indices.tolist()) for arm in arms])
        scores = []
        for tile in tiles:
            scores.append(TileScore())
            for place in range(tile.start, tile.stop):
                value = self.rewards[arms[tile.arm].name, int(arms[tile.arm].indices[place])]
                scores[-1].add(value, odd=place % 2 == 1)
        return scores, Busy(counters={"completions": sum(t.stop - t.start for t in tiles)}), []


def scored(config, rewards, mu, ranks=1, further=(), generation=0):
    """(Scores, world, table) of one generation: rewards (population, rows), the first `batch` of them its batch."""
    rewards = np.asarray(rewards, float)
    table = Table({(k, i): rewards[k, i] for k in range(len(rewards)) for i in range(rewards.shape[1])})
    batch = np.arange(rewards.shape[1] - len(further))
    arms = [Arm(k, None, [], batch) for k in range(len(rewards))]
    world = Together(ranks)
    found = score_generation(config, Round(world, table, generation, 7, lambda: 0.0), arms, [], mu,
                             np.array(further, int))
    return found, world, table


def plain_fitness(rewards, low):
    """Exact means rounded once, a missing score being `low`; -inf where all are missing."""
    found = []
    for row in np.asarray(rewards, float).tolist():
        exact = [Fraction(to_fixed(low if math.isnan(r) else r), 1 << 64) for r in row]
        found.append(-math.inf if all(map(math.isnan, row)) else float(sum(exact) / len(exact)))
    return found


# -- racing ----------------------------------------------------------------------------------------

def drawn(kind, population, batch, low, high, rng):
    """Rewards of candidates that differ, so that some can be dropped: (population, batch)."""
    quality = rng.beta(0.4, 0.4, population)[:, None]
    if kind == "mixed":
        kind = rng.choice(["binary", "real", "ties"])
    if kind == "binary":
        rewards = low + (high - low) * (rng.random((population, batch)) < quality)
    elif kind == "real":
        rewards = low + (high - low) * np.clip(quality + rng.normal(0, 0.2, (population, batch)), 0, 1)
    else:   # few values, many candidates alike to the last bit
        thirds = np.round(2 * np.clip(quality + rng.normal(0, 0.2, (population, batch)), 0, 1))
        rewards = low + (high - low) * thirds / 2
        rewards[rng.random(population) < 0.4] = rewards[0]
    rewards = np.clip(rewards, low, high)
    gaps = rng.choice([0.0, 0.05, 0.5, 1.0], population, p=[0.55, 0.25, 0.15, 0.05])[:, None]
    return np.where(rng.random(rewards.shape) < gaps, np.nan, rewards)


@pytest.mark.parametrize("values, low, high", [("binary", 0.0, 1.0), ("real", 0.0, 1.0), ("real", -7.3, 0.1),
                                               ("ties", 0.1, 0.7), ("mixed", -1.0, 1.0)])
def test_a_race_changes_no_bit_of_the_search(values, low, high):
    """Of random rewards, populations, batches and rounds, over some generations, against searches that are told
    the exact mean over all rows; a missing score is reward_low in both."""
    rng, saved = np.random.default_rng([len(values), int(10 * high)]), 0
    for trial in range(14):
        population, batch = int(rng.choice([2, 3, 5, 7, 12])), int(rng.integers(8, 19))
        rounds, ranks = 2 + trial % 7, int(rng.choice([1, 2, 5]))
        config = settings(population=population, batch=batch, racing=rounds, reward_low=low, reward_high=high,
                          reward="m:f")
        other = dict(mean_decay=0.1)
        pairs = [[make_search(kind, 4, population, 0.3, trial, **options) for _ in range(2)]
                 for kind, options in (("sep", {}), ("cma", {}), ("fast", {}), ("sep", {"mean_decay": 0.1}))]
        for generation in range(3):
            rewards = drawn(values, population, batch, low, high, rng)
            if np.isnan(rewards).all():
                rewards[0, 0] = high
            found, world, _ = scored(config, rewards, pairs[0][0].mu, ranks)
            expected = np.array(plain_fitness(rewards, low))
            assert world.exchanges == rounds
            kept = found.told > -math.inf
            assert (found.told[kept] == expected[kept]).all()       # what stays is scored on all rows
            saved += found.rows_saved
            for raced, plain in pairs:
                raced.tell(generation, found.told)
                plain.tell(generation, expected)
                one, other = raced.state(), plain.state()
                assert all(one[key].tobytes() == other[key].tobytes() for key in other), (trial, generation)
                assert raced.digest() == plain.digest()
    assert saved > 0


def test_a_candidate_that_can_only_draw_level_is_not_dropped():
    """After half of the rows 1 and 2 have 5 of 5, 0 and 3 have none: level at the end, 0 wins by its index."""
    rewards = [[0] * 5 + [1] * 5, [1] * 5 + [0] * 5, [1] * 5 + [0] * 5, [0] * 10]
    found, _, _ = scored(settings(population=4, batch=10, racing=2), rewards, 2)
    assert found.rows_saved == 0 and found.told.tolist() == [0.5, 0.5, 0.5, 0.0]
    search, plain = (make_search("sep", 3, 4, 0.3, 1) for _ in range(2))
    search.tell(0, found.told)
    plain.tell(0, [0.5, 0.5, 0.4, 0.0])
    assert search.digest() == plain.digest()


def test_a_candidate_that_cannot_win_any_more_is_dropped():
    """Six rows of ten: 1 and 2 have all, 0 and 3 none, and at most four to come. The bound is rank mu's: with three
    to be chosen only 3 is beaten, and only when 4 has three rows and 3 has but two to come."""
    rewards = np.array([[0] * 6 + [1] * 4, [1] * 6 + [0] * 4, [1] * 6 + [0] * 4, [0] * 10, [0] * 5 + [1] * 5])
    config = settings(population=5, batch=10, racing=5)
    found, world, table = scored(config, rewards, 2)
    # Round 3 of two rows each: after it 0 and 3 are beaten, 4 too (5 at most, against 6).
    assert found.rows_saved == 3 * 4 and world.exchanges == 5
    assert found.told.tolist() == [-math.inf, 0.6, 0.6, -math.inf, -math.inf]
    assert found.fitness.tolist() == [0.0, 0.6, 0.6, 0.0, 1 / 6]    # over the rows they were scored on
    assert [[name for name, _ in round] for round in table.asked] == [[0, 1, 2, 3, 4]] * 3 + [[1, 2]] * 2
    assert [round[-1][1] for round in table.asked] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    found, _, _ = scored(config, rewards, 3)
    assert found.rows_saved == 1 * 2 and np.flatnonzero(found.told == -math.inf).tolist() == [3]
    # Wide bounds beat nobody either: one row might still give a hundred.
    wide = settings(population=5, batch=10, racing=5, reward="m:f", reward_low=0.0, reward_high=100.0)
    assert scored(wide, rewards, 2)[0].rows_saved == 0
    low = settings(population=5, batch=10, racing=5, reward="m:f", reward_low=-100.0, reward_high=1.0)
    assert scored(low, rewards, 2)[0].rows_saved == 0


def test_a_missing_row_counts_as_the_least_reward_in_a_race():
    rewards = [[1, math.nan], [0.5, 0.5], [math.nan, math.nan], [0.25, 0.25]]
    config = settings(population=4, batch=2, racing=2, reward="m:f", reward_low=-1.0, reward_high=1.0)
    found, _, _ = scored(config, rewards, 2)
    assert found.fitness.tolist() == [0.0, 0.5, -math.inf, 0.25]
    assert sum(arm.missing for arm in found.people) == 3


@pytest.mark.parametrize("keys, gathers", [({}, 1), (dict(racing=2), 2), (dict(racing=6), 6), (dict(reevaluate=3), 2)])
def test_the_number_of_allgathers_is_what_the_config_says(keys, gathers):
    """Whoever is dropped: one more or less on some rank would be a hang."""
    for rewards in (np.zeros((7, 9)), np.eye(7, 9), np.repeat(np.arange(7)[:, None] >= 4, 9, 1)):
        for ranks in (1, 4):
            found, world, _ = scored(settings(**keys), rewards, 3, ranks,
                                     further=(6, 7, 8) if "reevaluate" in keys else ())
            assert world.exchanges == found.exchanged.count == gathers
    _, world, table = scored(settings(**keys), np.zeros((7, 6)), 3, further=range(0))
    assert sum(len(rows) for round in table.asked[:max(1, keys.get("racing", 0))] for _, rows in round) == 7 * 6


def test_counters_and_times_of_all_rounds_are_added_up():
    found, _, _ = scored(settings(racing=3), np.zeros((7, 6)), 3, ranks=2)
    # each of the two pretended ranks sends the whole count
    assert found.exchanged.total("completions") == 2 * 7 * 6
    one, _, _ = scored(settings(), np.zeros((7, 6)), 3, ranks=2)
    assert found.exchanged.bytes_sent > one.exchanged.bytes_sent


class Echo:
    """An engine whose completions are the prompts."""

    capacity, seconds = 99, {"place": 0.0, "generate": 0.0}
    tokenizer = staticmethod(lambda text: {"input_ids": [len(text)]})

    def reset_clock(self):
        pass

    def place(self, vectors):
        pass

    def generate(self, requests, sampling=None, logprobs=False):
        return [SimpleNamespace(text="x", tokens=(1,), cut=False, too_long=False) for _ in requests]


def real_scores(config, values):
    """A TileScore of one row for each of `values`, by the real Scorer."""
    rows = [Row(f"row {i}", "", {}, None, f"rows.jsonl:{i}") for i in range(len(values))]

    class Given(Reward):
        def _score(self, row, completion):
            return values[rows.index(row)]

    reward = Given("given", config)
    arm = Arm("candidate 0", np.zeros(2), rows, np.arange(len(rows)))
    return Scorer(Echo(), reward, config).score([arm], share([len(rows)], 0, 1), 0)[0][0]


def test_a_reward_outside_the_bounds_ends_a_race_and_nothing_else():
    keys = dict(reward="m:f", reward_low=0.0, reward_high=0.5, chat=False)
    for value in (0.6, -0.1):
        with pytest.raises(UserError,
                           match=rf"reward {value} on rows.jsonl:1: outside reward_low = 0 and reward_high = 0.5, by "
                                            "which racing drops candidates; set them"):
            real_scores(settings(racing=2, **keys), [0.5, value])
        assert real_scores(settings(**keys), [0.5, value]).rows == 2
    assert real_scores(settings(racing=2, **keys), [0.0, 0.5, math.nan]).missing == 1


def test_the_scorer_tells_every_second_row_apart():
    found = real_scores(settings(chat=False), [1.0, 0.5, 0.25, math.nan])
    assert (found.total, found.rows, found.missing) == (to_fixed(1.75), 3, 1)
    assert (found.odd_total, found.odd_rows, found.odd_missing) == (to_fixed(0.5), 1, 1)


def test_a_mean_of_samples_is_not_rounded_out_of_the_bounds():
    """np.mean of three times 0.1 is more than 0.1, which a race would not have thought possible."""
    assert np.mean([0.1] * 3) > 0.1
    found = real_scores(settings(samples=3, racing=2, reward="m:f", reward_low=0.0, reward_high=0.1, chat=False), [0.1])
    assert found.total == to_fixed(0.1)
    assert real_scores(settings(samples=3, chat=False), [math.nan]).missing == 1


# -- re-evaluation ---------------------------------------------------------------------------------

def fitness_rows(*fitness):
    """Four rows of 0 and 1 of each mean."""
    return np.array([[1] * round(4 * f) + [0] * (4 - round(4 * f)) for f in fitness], float)


FIRST = fitness_rows(0.25, 1.0, 0.5, 0.75, 0.0, 0.5)      # in order: 1, 3, 2, 5, 0, 4; mu is 3


@pytest.mark.parametrize("asked, again", [(1, [2]), (2, [2, 5]), (3, [2, 3, 5]), (4, [0, 2, 3, 5]),
                                          (5, [0, 1, 2, 3, 5]),
                                          (6, [0, 1, 2, 3, 4, 5])])
def test_the_candidates_about_the_edge_are_scored_again(asked, again):
    config = settings(population=6, batch=4, reevaluate=asked)
    found, _, table = scored(config, np.hstack([FIRST, np.zeros((6, 4))]), 3, further=(4, 5, 6, 7))
    assert [(name, rows) for name, rows in table.asked[1]] == [(k, [4, 5, 6, 7]) for k in again]
    # All of them fell: the further rows are harder, which is no candidate's doing; but they drew closer together.
    mean = np.mean([FIRST[k].mean() for k in again])
    expected = [(FIRST[k].mean() + mean) / 2 if k in again else FIRST[k].mean() for k in range(6)]
    np.testing.assert_allclose(found.fitness, expected, atol=1e-15)
    assert found.told.tolist() == found.fitness.tolist()


def test_both_scores_weigh_by_their_rows_once_the_rows_own_difficulty_is_out():
    second = np.full((6, 4), math.nan)
    second[[2, 5]] = fitness_rows(0.0, 0.5)
    found, _, _ = scored(settings(population=6, batch=4, reevaluate=2), np.hstack([FIRST, second]), 3,
                         further=(4, 5, 6, 7))
    # 2 went from 0.5 to 0, 5 stayed at 0.5: the rows cost a quarter, so 2 has 0.25 on them and 5 has 0.75.
    assert found.fitness.tolist() == [0.25, 1.0, 0.375, 0.75, 0.0, 0.625]
    assert found.changed_ranks == 1 / (3 / 6)      # both moved by one; two independent orders differ by half of one
    # Two further rows count as two, against four.
    found, _, _ = scored(settings(population=6, batch=4, reevaluate=2), np.hstack([FIRST, second[:, 2:]]), 3,
                         further=(4, 5))
    assert found.fitness.tolist() == [0.25, 1.0, 0.5, 0.75, 0.0, 0.5]      # neither got one right: the shift is all
    assert found.changed_ranks == 0.0
    assert found.batch == 4
    found, _, _ = scored(settings(population=6, batch=4, reevaluate=2), np.hstack([FIRST, second[:, :2]]), 3,
                         further=(4, 5))
    assert found.fitness.tolist() == [0.25, 1.0, 1 / 3, 0.75, 0.0, 2 / 3]      # to 0 and to 1: the shift is none


def test_candidates_without_a_score_stay_without_one():
    first, second = FIRST.copy(), np.zeros((6, 4))
    first[2] = second[3] = math.nan
    found, _, table = scored(settings(population=6, batch=4, reevaluate=6), np.hstack([first, second]), 3,
                             further=(4, 5, 6, 7))
    assert found.fitness[2] == -math.inf and found.fitness[3] == 0.75      # 3 keeps what it had
    assert sum(arm.missing for arm in found.people) == 8
    second[:] = math.nan
    found, _, _ = scored(settings(population=6, batch=4, reevaluate=6), np.hstack([first, second]), 3,
                         further=(4, 5, 6, 7))
    assert found.told.tolist() == found.fitness.tolist() == [0.25, 1.0, -math.inf, 0.75, 0.0, 0.5]
    assert math.isnan(found.changed_ranks)


def test_changed_ranks_is_0_for_one_order_and_1_for_independent_ones():
    rng = np.random.default_rng(0)
    config, values = settings(population=8, batch=1, reevaluate=8), np.arange(8.0)[:, None]
    assert scored(config, np.hstack([values, values / 3 - 1]), 4, further=(1,))[0].changed_ranks == 0.0
    assert scored(config, np.hstack([values, -values]), 4, further=(1,))[0].changed_ranks == 4 / (63 / 24)
    ratios = [scored(config, np.stack([rng.permutation(8), rng.permutation(8)], 1), 4, further=(1,))[0].changed_ranks
              for _ in range(300)]
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.06)


# -- any number of ranks ---------------------------------------------------------------------------

def bits(found):
    return [value.tobytes() if isinstance(value, np.ndarray) else repr(value) for value in (
        found.fitness, found.told, found.people, found.others, found.signal, found.noise, found.rows_saved,
        found.changed_ranks)]


@pytest.mark.parametrize("keys", [{}, dict(racing=4, reward="m:f", **LIMITS), dict(reevaluate=4)], ids=str)
def test_scores_are_the_same_on_any_number_of_ranks(keys):
    rng = np.random.default_rng(3)
    for _ in range(4):
        rewards = drawn("real", 7, 14, 0.0, 1.0, rng)
        further = range(7, 14) if "reevaluate" in keys else ()
        alone = bits(scored(settings(batch=7, **keys), rewards, 3, 1, further)[0])
        for ranks in (2, 3, 4, 19):
            assert bits(scored(settings(batch=7, **keys), rewards, 3, ranks, further)[0]) == alone


BOUNDED = dict(reward="m:f", reward_low=0.0, reward_high=0.3)


def evolved(world, rank=0, faults=(), **keys):
    config, task = small_task(**keys)
    search, generations = new_search(config, 4), []
    evolve(config, world, task, DeterministicScorer(config, Faults(rank, list(faults)), 0.0), search, Answers(4), 0,
           generations.append)
    return search, generations


def told_by(generation):
    return [generation.fitness.tobytes(), generation.digest, generation.missing, repr(generation.start),
            repr(generation.validation), *bits(generation.scores)]


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("keys, gathers", [
    ({}, 1), (dict(racing=5, **BOUNDED), 5), (dict(reevaluate=3), 2),
    (dict(rows="growing", batch_growth=1.2, reevaluate=2), 2),
    (dict(rows="pool", pool_rows=8, pool_turnover=2, racing=5, search="fast", **BOUNDED), 5)], ids=str)
def test_ranks_go_through_the_rounds_together(keys, gathers):
    """Counted, and the same bits as on ranks that are only pretended."""
    faults = [{"kind": "nan", "candidates": [1], "rows": [0, 1, 2, 3]}]
    world = real_world(counting=True)
    search, generations = evolved(world, world.rank, faults, validation_every=2, **keys)
    assert world.comm.calls == {"Allgather": 6 * gathers + 1}
    assert [g.exchanged.count for g in generations] == [gathers] * 6
    # The faults name arms by their place among those scored, the same on any number of ranks.
    other, expected = evolved(Together(3), 0, faults, validation_every=2, **keys)
    assert search.digest() == other.digest()
    assert [told_by(g) for g in generations] == [told_by(g) for g in expected]
    assert sum(g.scores.rows_saved for g in generations) > 0 or "racing" not in keys
    same_everywhere([told_by(g) for g in generations])


@pytest.mark.parametrize("search", ["sep", "cma", "fast"])
def test_an_evolution_with_races_is_the_one_without(search):
    saved = 0
    for seed in range(2):
        plain, without = evolved(Together(), search=search, seed=seed, **BOUNDED)
        for rounds in (2, 3, 5):
            raced, generations = evolved(Together(2), search=search, seed=seed, racing=rounds, **BOUNDED)
            assert [g.digest for g in generations] == [g.digest for g in without]
            assert [g.fitness.max() for g in generations] == [g.fitness.max() for g in without]
            saved += sum(g.scores.rows_saved for g in generations)
    assert saved > 0


# -- signal and noise ------------------------------------------------------------------------------

def people_of(rewards):
    people = []
    for row in np.asarray(rewards, float).tolist():
        people.append(TileScore())
        for place, value in enumerate(row):
            people[-1].add(value, odd=place % 2 == 1)
    return people


def people_of_many(rewards):
    """The same in bulk, of rewards of at least 2^-12 in size: times 2^64 they are integers."""
    people = []
    for row in rewards.tolist():
        fixed = [int(value * 2.0**64) for value in row]
        people.append(ArmScore(sum(fixed), 0, len(row), 0, sum(fixed[1::2]), len(row) // 2, 0))
    return people


@pytest.mark.parametrize("signal, noise, batch", [(0.5, 1.0, 16), (0.1, 1.0, 24), (1.0, 0.3, 8), (0.0, 1.0, 100)])
def test_signal_and_noise_are_what_the_rewards_were_made_of(signal, noise, batch):
    """True fitness of that deviation, rows of that noise about it and of any difficulty."""
    rng, found = np.random.default_rng(batch), []
    for _ in range(500):
        rewards = rng.normal(0, signal, (24, 1)) + rng.normal(50, 3.0, batch) + rng.normal(0, noise, (24, batch))
        found.append(spread(people_of_many(rewards), 0.0))
    true, error = np.mean(np.square(found), axis=0)
    assert error == pytest.approx(noise**2 / batch, rel=0.04)
    if signal > noise / batch**0.5:     # below the noise its square is cut at 0 too often to be right on average
        assert true == pytest.approx(signal**2, rel=0.05)
    else:
        assert true < noise**2 / batch


def test_a_race_tells_the_noise_of_all_rows_from_its_first():
    rewards = np.random.default_rng(0).random((7, 16))
    bulk, one_by_one = people_of_many(rewards + 1), people_of(rewards + 1)
    assert [(p.total, p.odd_total, p.rows, p.odd_rows) for p in bulk] == [
        (p.total, p.odd_total, p.rows, p.odd_rows) for p in one_by_one]
    found, _, _ = scored(settings(batch=16, racing=4), rewards, 3)
    signal, noise = spread(people_of(rewards[:, :4]), 0.0)
    assert found.signal == signal > 0 and found.noise == pytest.approx(noise / 2)
    plain, _, _ = scored(settings(batch=16), rewards, 3)
    assert (plain.signal, plain.noise) == spread(people_of(rewards), 0.0)


def test_how_hard_the_rows_are_drops_out():
    rng = np.random.default_rng(1)
    rewards = rng.integers(-500, 500, (9, 16)) / 1024
    harder = rng.integers(-9000, 9000, 16) / 1024
    plain, moved = spread(people_of(rewards), 0.0), spread(people_of(rewards + harder), 0.0)
    assert plain[0] >= 0 and plain[1] > 0
    assert moved == pytest.approx(plain, rel=1e-9, abs=1e-9)


def test_signal_and_noise_by_hand():
    """Halves (2, 1), (1, 1), (0, -1): their covariance is 1; the differences 1, 0, 1 have the variance 1/3."""
    signal, noise = spread(people_of([[2, 1], [1, 1], [0, -1]]), 0.0)
    assert signal == pytest.approx(1.0) and noise == pytest.approx((1 / 3 / 4) ** 0.5)
    # Halves that contradict each other: no signal, not the root of a negative number.
    assert spread(people_of([[1, 0], [0, 1], [0.5, 0.5]]), 0.0)[0] == 0.0


def test_signal_and_noise_of_too_little_are_none():
    assert all(map(math.isnan, spread(people_of([[1, 0, 1], [0, 1, 1]]), 0.0)))
    assert all(map(math.isnan, spread(people_of([[1], [0], [0.5], [1]]), 0.0)))
    assert all(map(math.isnan, spread([ArmScore()] * 4, 0.0)))
    gaps = people_of([[1, 0, 1, 0], [0, 0, math.nan, 1], [1, 1, 1, 0], [math.nan] * 4])
    without = people_of([[1, 0, 1, 0], [0, 0, -2, 1], [1, 1, 1, 0]])
    assert spread(gaps, -2.0) == spread(without, 0.0)       # the last tells nothing; a missing row is the worst


# -- the first generation's extra arm --------------------------------------------------------------

def test_the_warm_start_is_scored_once_beside_the_candidates_of_generation_0():
    asked = []

    class Noting(DeterministicScorer):
        def score(self, arms, tiles, generation):
            asked.append((generation, [arm.name for arm in arms], [len(arm.indices) for arm in arms],
                          [None if arm.vector is None else arm.vector.any() for arm in arms]))
            return super().score(arms, tiles, generation)

    config, task = small_task(generations=3, racing=5, validation_every=2, **BOUNDED)
    for start in (0, 1):
        asked.clear()
        search, generations = make_search("sep", 4, 7, 0.3, 1), []
        if start:
            search.tell(0, range(7))
        evolve(config, Together(), task, Noting(config, Faults(0, []), 0.0), search, Answers(4), start,
               generations.append)
        first = [(generation, names[7:], lengths[7:]) for generation, names, lengths, _ in asked if len(names) >= 7]
        beside = {0: ["start", "mean"], 1: [], 2: ["mean"]}
        rounds_with_all = {g: [names for at, names, _ in first if at == g][0] for g in range(start, 3)}
        assert rounds_with_all == {g: beside[g] for g in range(start, 3)}
        later = [names for before, (g, names, _, _) in zip(asked, asked[1:]) if before[0] == g]
        assert len(later) == 4 * (3 - start) and not {"start", "mean"} & {name for names in later for name in names}
        assert [np.isfinite(g.start[0]) for g in generations] == [g == 0 for g in range(start, 3)]
        if start == 0:
            _, names, lengths, moved = asked[0]
            assert lengths == [1] * 7 + [5, 4] and not moved[7]     # the whole batch at once, at the warm start


def generation_0(fitness, start, stderr):
    return Generation(0, np.array(fitness, float), 0.5, 0, None, (start, stderr), math.nan, 0, 0, None, {})


def test_advice_on_a_flat_first_generation():
    said = advice(generation_0([0.25, 0.25, -math.inf, 0.25], 0.25, 0.1), 0.5)
    assert said.startswith("warning: generation 0 is flat: every candidate scored 0.250, as the warm start")
    assert "sigma = 1 or more" in said and "\n" not in said
    for fitness in ([0.25, 0.26], [0.3, 0.3]):      # one differs; or all do from the warm start, alike
        assert advice(generation_0(fitness, 0.25, 0.1), 0.5) is None


def test_advice_on_a_dead_first_generation():
    said = advice(generation_0([0.1, 0.19, -math.inf], 0.4, 0.1), 0.5)
    assert said.startswith("warning: generation 0 is dead: the best candidate scored 0.190, the warm start 0.400 +- ")
    assert "sigma = 0.25 or less" in said and "\n" not in said
    assert advice(generation_0([0.1, 0.21], 0.4, 0.1), 0.5) is None         # chance might do that
    assert "dead" in advice(generation_0([0.1, 0.21], 0.4, math.nan), 0.5)   # one row has no error


def test_no_advice_on_a_healthy_or_later_generation():
    assert advice(generation_0([0.1, 0.5, 0.9], 0.4, 0.01), 0.5) is None
    for start in (math.nan, -math.inf):     # a later generation; a warm start without a score
        assert advice(generation_0([0.0, 0.0], start, 0.0), 0.5) is None
    assert advice(generation_0([-math.inf] * 3, 0.4, 0.1), 0.5) is None


# -- what of the config reaches the search -----------------------------------------------------------

def test_the_searchs_options_reach_it():
    defaults = dict(mean_decay=0.0, active=False, step_size="csa")
    for keys in (dict(mean_decay=0.05), dict(active=True), dict(step_size="tpa"), {}):
        for kind in ("sep", "cma", "fast"):
            search = new_search(settings(search=kind, population=9, sigma=0.7, seed=5, **keys), 6)
            assert {key: getattr(search, key) for key in defaults} == {**defaults, **keys}
            assert (search.dimension, search.population, search.sigma, search.seed) == (6, 9, 0.7, 5)
    told = {}
    for name, keys in (("plain", {}), ("decay", dict(mean_decay=0.5)), ("active", dict(active=True)),
                       ("tpa", dict(step_size="tpa"))):
        search = new_search(settings(search="sep", population=9, **keys), 6)
        for generation in range(3):
            search.tell(generation, np.random.default_rng(generation).random(9))
        told[name] = search.mean.tobytes(), search.sigma, search.deviations.tobytes()
    assert len(set(told.values())) == len(told)


def test_an_end_without_any_score_names_the_generation():
    with pytest.raises(UserError, match="generation 2: no candidate has a score"):
        evolved(Together(), faults=[{"kind": "nan", "generation": 2}], racing=5, **BOUNDED)
