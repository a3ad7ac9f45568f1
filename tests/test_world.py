"""The ranks: who scores what, what is sent, and that sums, errors and places come out right on any number of them."""

import io
import itertools
import math
import os
import random
import statistics
import sys
import threading
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from deterministic_run import Counting, DeterministicScorer, Faults, flip, reward
from essa_mpi import config as configuration
from essa_mpi import seat as seating
from essa_mpi.answers import Answers
from essa_mpi.config import UserError
from essa_mpi.evolve import evolve
from essa_mpi.rows import Rows
from essa_mpi.search import make_search
from essa_mpi.tasks import Row, Task
from essa_mpi.shares import Balance, bounds
from essa_mpi.world import (HEADER, TILE_WORDS, Agreed, ArmScore, Busy, DigestError, Tile, TileScore, World, all_shares,
                            _ranges, share, to_fixed)

# Populations and batches that no number of ranks divides, arms of other lengths, fewer cells than ranks, none.
LENGTHS = ([5] * 7, [1] * 2, [3, 3, 3, 17], [1] * 3 + [40], [97] * 11, [1], [], [2, 0, 3], [13])


# -- tiles ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_cell_is_in_exactly_one_tile(lengths):
    for size in (1, 2, 3, 4, 5, 7, 8, 64, 1000):
        shares = [share(lengths, rank, size) for rank in range(size)]
        cells = [(tile.arm, row) for tiles in shares for tile in tiles for row in range(tile.start, tile.stop)]
        assert cells == [(arm, row) for arm, length in enumerate(lengths) for row in range(length)]
        loads = [sum(tile.stop - tile.start for tile in tiles) for tiles in shares]
        assert max(loads) - min(loads) <= 1
        for tiles in shares:    # scoring.py counts on it: a rank has at most one tile an arm
            assert len({tile.arm for tile in tiles}) == len(tiles)


def test_more_ranks_than_candidates_all_work():
    shares = [share([8, 8], rank, 16) for rank in range(16)]
    assert shares == [[Tile(rank // 8, rank % 8, rank % 8 + 1)] for rank in range(16)]


# -- sums, against exact fractions ---------------------------------------------------------------

def drawn(kind, n, rng):
    """n rewards. All but the tiny ones are at least 2^-12 in size, so that fixed point holds them exactly."""
    match kind:
        case "fractions": return [rng.randrange(1, 30) / rng.choice((3, 7, 11, 13)) for _ in range(n)]
        case "negative": return [-rng.random() - 2**-10 for _ in range(n)]
        case "large": return [rng.choice((-1, 1)) * rng.random() * 2.0**20 for _ in range(n)]
        case "far from zero": return [1e6 + rng.random() for _ in range(n)]
        case "mixed": return [rng.choice((-1, 1)) * max(rng.random(), 0.001) * 10.0 ** rng.randrange(-1, 6) for _ in range(n)]
        case "tiny": return [rng.choice((-1, 1)) * rng.random() * 2.0 ** -rng.randrange(1, 80) for _ in range(n)]
        case "binary": return [float(rng.random() < 0.3) for _ in range(n)]


KINDS = ("fractions", "negative", "large", "far from zero", "mixed", "binary")


def arm_of(rewards, missing=0):
    tile = TileScore()
    for value in rewards:
        tile.add(value)
    return ArmScore(tile.total, tile.squares, tile.rows, missing)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_is_the_exact_mean_rounded_once(kind):
    rng = random.Random(kind)
    for n in (1, 2, 3, 10, 101, 1000):
        for missing in (0, 1, n):
            rewards = drawn(kind, n, rng)
            worst = min(rewards)
            exact = sum(map(Fraction, rewards)) + missing * Fraction(worst)
            assert arm_of(rewards, missing).mean(worst) == float(exact / (n + missing))


def test_the_mean_of_tiny_rewards_is_within_the_grid():
    rng = random.Random(1)
    rewards = drawn("tiny", 1000, rng)
    exact = sum(map(Fraction, rewards)) / 1000
    assert abs(Fraction(arm_of(rewards).mean(0.0)) - exact) <= Fraction(1, 2**64)
    assert to_fixed(5e-324) == 0 and to_fixed(2.0**-64) == 1 and to_fixed(-(2.0**-64)) == -1


@pytest.mark.parametrize("kind", KINDS)
def test_the_standard_error_is_that_of_the_rows(kind):
    rng = random.Random(kind)
    for n, missing in ((2, 0), (3, 2), (50, 0), (400, 7)):
        rewards = drawn(kind, n, rng)
        rows = rewards + [min(rewards)] * missing
        expected = statistics.stdev(map(Fraction, rows)) / math.sqrt(len(rows))
        assert arm_of(rewards, missing).stderr(min(rewards)) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_scores_of_almost_nothing():
    assert ArmScore().mean(0.0) == ArmScore(missing=4).mean(0.3) == -math.inf
    assert arm_of([0.5]).mean(0.0) == 0.5
    assert all(math.isnan(arm.stderr(0.0)) for arm in (ArmScore(), ArmScore(missing=5), arm_of([0.5])))
    assert arm_of([0.25] * 9).stderr(0.0) == 0.0


def test_a_reward_that_is_not_finite_is_missing():
    tile = TileScore()
    for value in (1 / 3, math.nan, -math.inf, math.inf, 2 / 3):
        tile.add(value)
    assert (tile.rows, tile.missing, tile.least) == (2, 3, 1 / 3)
    assert tile.total == to_fixed(1 / 3) + to_fixed(2 / 3)


# -- the exchange on ranks that are only pretended: any number of them ---------------------------

class Pretended:
    """A communicator of `size` ranks: each hands in what it would send, then all see it."""

    def __init__(self, size):
        self.size, self.rank, self.sent = size, 0, []

    def Get_size(self):
        return self.size

    def Get_rank(self):
        return self.rank

    def Allgather(self, send, receive):
        if len(self.sent) < self.size:
            self.sent.append(send[0].copy())
            raise _HandedIn
        receive[0][:] = self.sent


class _HandedIn(Exception):
    pass


def seat_of(mpi, size):
    return seating.Seat(mpi, "an MPI", [f"node{r // 2}" for r in range(size)], [f"cpu{r % 2}" for r in range(size)],
                        0, 1, [0], [])


def test_all_shares_are_each_ranks_share():
    """And every cell is in one of them, in order, whatever the weights."""
    draw = np.random.default_rng(0)
    for _ in range(200):
        lengths = draw.integers(0, 6, draw.integers(0, 8)).tolist()
        for size in (1, 2, 3, 7, 40):
            for weights in (None, draw.integers(1, 9, size).tolist()):
                found = all_shares(lengths, size, weights)
                assert found == [share(lengths, rank, size, weights) for rank in range(size)]
                cells = [(t.arm, i) for tiles in found for t in tiles for i in range(t.start, t.stop)]
                assert cells == [(arm, i) for arm, n in enumerate(lengths) for i in range(n)]


def test_a_slow_rank_gets_less_until_all_take_as_long():
    seconds, balance = [1.0, 1.0, 2.0, 0.5], Balance(4)     # a cell
    for _ in range(12):
        cuts = bounds(9000, 4, balance.weights)
        cells = [b - a for a, b in zip(cuts, cuts[1:])]
        balance.note(cells, [int(n * s * 1e9) for n, s in zip(cells, seconds)])
        balance.settle()
    times = [n * s for n, s in zip(cells, seconds)]
    assert max(times) < 1.01 * min(times)
    balance.note([5, 0, 5, 5], [1, 1, 1, 1])        # nothing can be said of rank 1
    before = list(balance.weights)
    balance.settle()
    assert balance.weights == before


@pytest.mark.mpi(min_size=1)
def test_balance_changes_no_fitness():
    """Rank 0 is slow: it gets less, and every candidate's fitness keeps its bits."""
    settings, task = small_task(generations=5)

    class Slow(DeterministicScorer):
        def score(self, arms, tiles, generation, *more):
            scores, busy, samples = super().score(arms, tiles, generation, *more)
            counts.append(sum(t.stop - t.start for t in tiles))
            busy.place = busy.score = 0.0
            busy.generate = counts[-1] * (3e-3 if world.rank == 0 else 1e-3)
            return scores, busy, samples

    found = []
    for balanced in (False, True):
        world, counts, generations = real_world(), [], []
        world.balance = Balance(world.size) if balanced else None
        evolve(settings, world, task, Slow(settings, Faults(world.rank, []), 0.0), make_search("sep", 4, 7, 0.3, 1), Answers(4),
               0, generations.append)
        found.append([g.fitness.tolist() for g in generations])
        if balanced and world.size > 1:
            assert (counts[-1] < counts[1]) == (world.rank == 0)
    assert found[0] == found[1]


def exchange_on(size, lengths, rewards, digests=None, rank=0):
    """What `rank` of `size` knows after the exchange. rewards: (arm, row) -> float."""
    comm = Pretended(size)
    mpi = SimpleNamespace(COMM_WORLD=comm, Wtime=time.perf_counter, INT64_T=None)
    for comm.rank in [*range(size), rank]:
        world = World(seat_of(mpi, size))
        scores = scored(world.share(lengths), rewards)
        busy = Busy(total=comm.rank + 0.5, counters={"tokens": 10 + comm.rank})
        try:
            result = world.exchange(lengths, scores, (digests or [-5] * size)[comm.rank], busy)
        except _HandedIn:
            pass
    return result


def scored(tiles, rewards):
    scores = []
    for tile in tiles:
        scores.append(TileScore())
        for row in range(tile.start, tile.stop):
            scores[-1].add(rewards[tile.arm, row], odd=row % 2 == 1)
    return scores


def rewards_for(lengths, kind, seed=0, gaps=0.0):
    rng = random.Random(f"{seed} {kind}")
    cells = [(arm, row) for arm, length in enumerate(lengths) for row in range(length)]
    return {cell: math.nan if rng.random() < gaps else value for cell, value in zip(cells, drawn(kind, len(cells), rng))}


@pytest.mark.parametrize("lengths", [x for x in LENGTHS if x], ids=str)
@pytest.mark.parametrize("kind, gaps", [("fractions", 0), ("mixed", 0.2), ("tiny", 0.2), ("large", 0)])
def test_sums_do_not_depend_on_the_number_of_ranks(lengths, kind, gaps):
    rewards = rewards_for(lengths, kind, gaps=gaps)
    alone = exchange_on(1, lengths, rewards)
    for arm, length in enumerate(lengths):      # and are right
        rows = [rewards[arm, row] for row in range(length)]
        finite = [r for r in rows if math.isfinite(r)]
        assert (alone.arms[arm].rows, alone.arms[arm].missing) == (len(finite), length - len(finite))
        assert alone.arms[arm].total == sum(map(to_fixed, finite))
        for odd in (False, True):
            half, rows_of_it = alone.arms[arm].half(odd), [r for r in rows[odd::2] if math.isfinite(r)]
            assert (half.total, half.rows) == (sum(map(to_fixed, rows_of_it)), len(rows_of_it))
            assert half.missing == len(rows[odd::2]) - len(rows_of_it)
    finite = [r for r in rewards.values() if math.isfinite(r)]
    assert alone.worst == (min(finite) if finite else 0.0)
    for size in (2, 3, 4, 5, 19, 50):
        result = exchange_on(size, lengths, rewards, rank=size // 2)
        assert result.arms == alone.arms and result.worst == alone.worst
        assert result.total("tokens") == sum(range(10, 10 + size))
        assert result.header["busy_ns"].tolist() == [int((r + 0.5) * 1e9) for r in range(size)]


def test_what_is_sent_has_one_size():
    for size, lengths in itertools.product((1, 2, 3, 4, 50), ([5] * 7, [1] * 2, [3, 3, 3, 17])):
        most = max(len(share(lengths, r, size)) for r in range(size))
        for kind in ("binary", "large", "tiny"):
            sent = exchange_on(size, lengths, rewards_for(lengths, kind, gaps=0.3)).bytes_sent
            assert sent == 8 * (len(HEADER) + TILE_WORDS * most)


def test_the_message_of_digests_that_differ_says_who_where_and_what_to_do():
    lengths = [3] * 4
    rewards = rewards_for(lengths, "binary")
    digests = [7, 7, -1, 7, 7, -1, 5]
    messages = set()
    for rank in range(7):
        with pytest.raises(DigestError) as error:
            exchange_on(7, lengths, rewards, digests, rank)
        messages.add(str(error.value))
    message, = messages
    assert "0000000000000007 on ranks 0-1,3-4 (node0, node1, node2; cpu0, cpu1)" in message
    assert "ffffffffffffffff on ranks 2,5 (node1, node2; cpu0, cpu1)" in message
    assert "0000000000000005 on ranks 6 (node3; cpu0)" in message
    for setting in ("OPENBLAS_CORETYPE", "MKL_CBWR", "OMP_NUM_THREADS"):
        assert setting in message
    exchange_on(7, lengths, rewards, [-1] * 7)


def test_ranges():
    assert _ranges([0, 1, 2, 3, 7]) == "0-3,7" and _ranges([5]) == "5" and _ranges([1, 3, 5, 6]) == "1,3,5-6"


# -- the launcher, hosts, cores, GPUs --------------------------------------------------------------

@pytest.mark.parametrize("environment", [
    {"OMPI_COMM_WORLD_SIZE": "4"}, {"PMI_SIZE": "2"}, {"PMIX_SIZE": "128"}, {"MV2_COMM_WORLD_SIZE": "2"},
    {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"}, {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "1"},
], ids=str)
def test_a_launcher_that_started_more_processes_than_mpi_sees(environment):
    with pytest.raises(UserError) as error:
        seating.check_launcher(1, "Open MPI v5.0.11", environment)
    for part in ("Open MPI v5.0.11", "MPICC", "--no-binary=mpi4py", next(reversed(environment.values()))
                 if "SLURM_STEP_NUM_TASKS" not in environment else "3"):
        assert part in str(error.value)


@pytest.mark.parametrize("environment, size", [
    ({}, 1), ({"PMI_SIZE": "4"}, 4), ({"OMPI_COMM_WORLD_SIZE": "1"}, 1),
    ({"SLURM_NTASKS": "8"}, 1),                                             # a batch script, outside a step
    ({"SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, 1),   # a shell within an allocation
    ({"SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "OMPI_COMM_WORLD_SIZE": "2"}, 2),   # mpirun there
    ({"PMI_SIZE": "nonsense"}, 1),
], ids=str)
def test_a_launcher_that_agrees_with_mpi(environment, size):
    seating.check_launcher(size, "an MPI", environment)


def test_the_launchers_rank():
    assert [seating.launcher_rank(e) for e in (
        {}, {"PMI_RANK": "3"}, {"OMPI_COMM_WORLD_RANK": "2"}, {"SLURM_PROCID": "5"}, {"PMI_RANK": ""})] == [0, 3, 2, 5, 0]


@pytest.mark.parametrize("affinities, machine, expected", [
    ([[0, 1]], 2, [[0, 1]]),                                    # alone
    ([[0], [1]], 2, [[0], [1]]),                                # apart: left alone
    ([[0, 1, 2], [5]], 8, [[0, 1, 2], [5]]),                    # also unevenly
    ([[0, 1], [0, 1]], 2, [[0], [1]]),                          # not bound
    ([[0], [0]], 2, [[0], [1]]),                                # both on one core
    ([[0]] * 4, 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ([[4, 5, 6, 7]] * 2, 8, [[4, 5], [6, 7]]),                  # within what both may use
    ([[0, 1, 2, 3]] * 3, 4, [[0], [1], [2]]),                   # does not divide
    ([[0], [0, 1, 2, 3]], 4, [[0, 1], [2, 3]]),                 # overlap in part
    ([[0, 1]] * 3, 2, [[0, 1]] * 3),                            # more ranks than cores: shared
], ids=str)
def test_ranks_of_a_host_have_cores_of_their_own(affinities, machine, expected):
    assert [seating.spread(affinities, r, list(range(machine))) for r in range(len(affinities))] == expected


@pytest.mark.parametrize("hosts, cores, threads, shared", [
    ("a", [[0, 1, 2]], 3, False),
    ("aa", [[0], [1]], 1, False),
    ("aabb", [[0, 1], [2, 3], [0, 1, 2, 3], [4, 5, 6, 7]], 2, False),     # equal on all, or BLAS would round differently
    ("aa", [[0, 1], [0, 1]], 1, True),
    ("aab", [[0, 1], [1, 2], [0, 1, 2, 3]], 1, True),
    ("ab", [[0, 1], [0, 1]], 2, False),                                  # the same numbers on two hosts are two sets
])
def test_every_rank_has_the_same_number_of_threads(hosts, cores, threads, shared):
    assert seating.thread_count(list(hosts), cores) == threads
    assert seating.share_cores(list(hosts), cores) == shared


@pytest.mark.parametrize("visible, local_size, tensor_parallel, expected", [
    ([], 3, 1, [[], [], []]),                                         # a CPU
    (["2"], 1, 1, [["2"]]), (["0", "1"], 1, 2, [["0", "1"]]),          # the launcher gave each rank its own
    (["4", "5", "6", "7"], 4, 1, [["4"], ["5"], ["6"], ["7"]]),
    (["0", "1", "2", "3"], 2, 2, [["0", "1"], ["2", "3"]]),
    (["GPU-a", "MIG-b"], 2, 1, [["GPU-a"], ["MIG-b"]]),
], ids=str)
def test_each_rank_takes_its_gpus(visible, local_size, tensor_parallel, expected):
    assert [seating.choose_gpus(visible, r, local_size, tensor_parallel) for r in range(local_size)] == expected


@pytest.mark.parametrize("visible, local_size, tensor_parallel, said", [
    ([], 1, 2, "no GPU is visible"),
    (["0", "1", "2"], 2, 1, "2 ranks on this host x tensor_parallel = 1 ask for 2 GPUs but 3 are visible"),
    (["0", "1"], 4, 1, "start 2 ranks a host"),
    (["0", "1", "2", "3"], 4, 2, "start 2 ranks a host"),
    (["0"], 1, 4, "ask for 4 GPUs but 1 are visible"),
], ids=str)
def test_gpus_that_do_not_add_up_are_refused(visible, local_size, tensor_parallel, said):
    with pytest.raises(UserError, match=said):
        seating.choose_gpus(visible, 0, local_size, tensor_parallel)


@pytest.mark.parametrize("name", ["MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_LOCAL_RANK",
                                  "PALS_LOCAL_RANKID", "FLUX_TASK_LOCAL_ID", "JSM_NAMESPACE_LOCAL_RANK", "SLURM_LOCALID"])
def test_the_launcher_says_which_rank_of_the_host_this_is(name):
    assert seating.announced_local_rank({name: "3"}) == 3
    assert seating.announced_local_rank({name: "3", "SLURM_LOCALID": "0"}) == (0 if name == "SLURM_LOCALID" else 3)


@pytest.mark.parametrize("announced, expected", [
    ([1, 0, 0, 1], [1, 0, 0, 1]),               # the launcher's order holds
    ([None, None, None, None], [0, 1, 0, 1]),   # it says nothing
    ([0, 0, 0, 0], [0, 1, 0, 1]),               # a batch script's own, inherited by all
    ([2, 3, 0, None], [0, 1, 0, 1]),            # numbers of more ranks than are here, or not of all
], ids=str)
def test_the_launchers_local_ranks_are_taken_if_they_add_up(announced, expected):
    """Ranks 0 and 1 on one host, 2 and 3 on another."""
    assert [seating.local_rank_of(rank, [0, 1] if rank < 2 else [2, 3], announced) for rank in range(4)] == expected
    assert seating.announced_local_rank({}) is None


def test_amds_are_counted_as_hip_counts_them():
    assert seating.visible_gpus({"ROCR_VISIBLE_DEVICES": "4,5"}) == ["0", "1"]
    assert seating.visible_gpus({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1"}) == ["1"]


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """An nvidia-smi that lists two GPUs."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-aa)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-bb)'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")        # so that what is set below is taken back
        monkeypatch.delenv(name)


def test_gpus_are_told_apart_by_their_uuids(nvidia_smi, monkeypatch):
    """A cgroup may call every rank's own GPU 0, and a launcher may give two ranks the same."""
    assert seating.visible_gpus({}) == ["0", "1"]
    assert seating.uuids(["1", "GPU-cc", "7"]) == ["GPU-bb", "GPU-cc", ""] and seating.uuids([]) == []
    seating.check_apart(["a", "a", "b"], [["GPU-aa"], ["GPU-bb"], ["GPU-aa"]])
    seating.check_apart(["a", "a"], [[""], [""]])       # nothing is known
    with pytest.raises(UserError, match="ranks 0 and 2 on a are both bound to GPU-aa: .*share_gpus = true"):
        seating.check_apart(["a", "b", "a"], [["GPU-aa"], ["GPU-aa"], ["GPU-bb", "GPU-aa"]])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    seat = SimpleNamespace(local_rank=0, local_size=1)
    seating.take_gpus(seat, 1)
    assert seat.gpus == ["1"] and os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_both_names_are_set_on_amd(nvidia_smi, monkeypatch):
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "2,3")
    seat = SimpleNamespace(local_rank=1, local_size=2)
    seating.take_gpus(seat, 1)
    assert os.environ["HIP_VISIBLE_DEVICES"] == os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_visible_gpus_are_those_named():
    assert seating.visible_gpus({"CUDA_VISIBLE_DEVICES": "0, 3,GPU-x"}) == ["0", "3", "GPU-x"]
    assert seating.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == seating.visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []


# -- ending, on a rank that is only pretended --------------------------------------------------------

class Aborted(BaseException):
    pass


@pytest.fixture
def lonely(tmp_path):
    """A World of one pretended rank, whose Abort raises."""
    def abort(code):
        raise Aborted(code)
    comm = Pretended(1)
    comm.Abort = abort
    world = World(seat_of(SimpleNamespace(COMM_WORLD=comm), 1))
    world.out, world.err = io.StringIO(), io.StringIO()
    world.failure_file = str(tmp_path / "failed.txt")
    return world


def failing(world, error):
    try:
        raise error
    except BaseException as raised:
        with pytest.raises(Aborted) as abort:
            world.fail(raised)
    return abort.value.args[0], world.err.getvalue()


def test_a_failure_is_one_line_and_its_traceback_a_file(lonely, tmp_path):
    code, said = failing(lonely, RuntimeError("over\ntwo lines"))
    assert code == 1
    assert said == f"essa_mpi: rank 0 on node0: RuntimeError: over two lines (traceback in {tmp_path}/failed.txt)\n"
    written = (tmp_path / "failed.txt").read_text()
    assert written.startswith("essa_mpi: rank 0 on node0: RuntimeError: over two lines\nTraceback") and __file__ in written


def test_a_users_error_ends_with_code_2(lonely):
    assert failing(lonely, UserError("mend it")) == (2, "essa_mpi: rank 0 on node0: mend it\n")


@pytest.mark.parametrize("first_has_spoken", [True, False])
def test_who_fails_second_speaks_only_if_the_first_never_does(lonely, monkeypatch, first_has_spoken):
    monkeypatch.setattr("essa_mpi.world.time.sleep", lambda seconds: None)
    Path(lonely.failure_file).write_text("essa_mpi: rank 1 ..." if first_has_spoken else "")
    said = "" if first_has_spoken else "essa_mpi: rank 0 on node0: RuntimeError: x\n"
    assert failing(lonely, RuntimeError("x")) == (1, said)


def test_who_fails_second_waits_for_the_first_to_speak(lonely, monkeypatch):
    path, naps = Path(lonely.failure_file), []
    path.touch()

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 90:
            path.write_text("essa_mpi: rank 1 ...")
    monkeypatch.setattr("essa_mpi.world.time.sleep", nap)
    assert failing(lonely, RuntimeError("x")) == (1, "") and naps.count(0.05) == 90


@pytest.mark.parametrize("obstacle", ["no folder", "no stderr"])
def test_a_failure_that_cannot_be_told_still_ends_the_job(lonely, tmp_path, obstacle):
    if obstacle == "no folder":
        lonely.failure_file = str(tmp_path / "nowhere" / "failed.txt")
        code, said = failing(lonely, RuntimeError("x"))
        assert said.startswith("essa_mpi: rank 0 on node0: RuntimeError: x")
    else:
        lonely.err.close()
        lonely.err = SimpleNamespace(write=None, getvalue=lambda: "")
        code, _ = failing(lonely, RuntimeError("x"))
    assert code == 1


def test_an_exit_of_a_thread_is_no_failure(lonely, monkeypatch):
    failures = []
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(lonely, "fail", failures.append)
    lonely.install_hooks()

    def dies():
        raise RuntimeError("in a thread")
    for target in (sys.exit, dies):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert [str(f) for f in failures] == ["in a thread"]


# -- on real ranks ------------------------------------------------------------------------------------

def real_world(counting=False, crowded=False):
    from mpi4py import MPI
    size = MPI.COMM_WORLD.Get_size()
    comm = Counting(MPI.COMM_WORLD) if counting else None
    world = World(replace(seat_of(MPI, size), crowded=crowded), comm)
    world.out, world.err = io.StringIO(), io.StringIO()
    return world


def same_everywhere(thing):
    from mpi4py import MPI
    seen = MPI.COMM_WORLD.allgather(thing)
    assert all(s == seen[0] for s in seen)
    return thing


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("lengths", [x for x in LENGTHS if x], ids=str)
@pytest.mark.parametrize("kind", ["fractions", "mixed", "tiny"])
def test_ranks_add_up_to_the_exact_sums(lengths, kind):
    world = real_world(counting=True)
    rewards = rewards_for(lengths, kind, gaps=0.2)
    busy = Busy(total=0.25, counters={"tokens": 10 + world.rank})
    result = world.exchange(lengths, scored(world.share(lengths), rewards), 42, busy)
    alone = exchange_on(1, lengths, rewards)       # no MPI in it
    assert result.arms == alone.arms and result.worst == alone.worst
    assert result.total("tokens") == sum(range(10, 10 + world.size))
    assert world.comm.calls == {"Allgather": 1}
    most = max(len(share(lengths, r, world.size)) for r in range(world.size))
    assert world.comm.sent == [result.bytes_sent] == [8 * (len(HEADER) + TILE_WORDS * most)]
    same_everywhere([(arm.mean(result.worst).hex(), repr(arm.stderr(result.worst))) for arm in result.arms])


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("crowded", [False, True])
def test_the_watchdog_sees_every_collective_operation(crowded):
    """A rank may hang before any of them: the all-gather, the rewards of a training, its all-reduce."""
    world, seen = real_world(crowded=crowded), []
    world.watchdog = SimpleNamespace(arrive=lambda: seen.append("in"), depart=lambda: seen.append("out"))
    for call in (lambda: world.exchange([], [], 42, Busy()), lambda: world.reduce(np.float32([1])),
                 lambda: world.gather(np.zeros(2)), lambda: world.agree(None),
                 lambda: world.collect(np.zeros((len(world.share([world.size])), 1)), [world.size])):
        call()
        assert seen == ["in", "out"]
        seen.clear()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_share_cores_wait_asleep_and_learn_the_same():
    """Who waits must not take the core from who works; what is exchanged is no other, and still one all-gather."""
    lengths = [5, 3]
    rewards = rewards_for(lengths, "fractions", gaps=0.2)
    world, plain = real_world(counting=True, crowded=True), real_world()
    mine = scored(world.share(lengths), rewards)
    wanted = plain.exchange(lengths, mine, 42, Busy(total=0.25))
    plain.comm.Barrier()
    if world.rank == 0:
        time.sleep(1.0)
    began = time.process_time()
    result = world.exchange(lengths, mine, 42, Busy(total=0.25 + (world.rank == 0)))
    assert time.process_time() - began < 0.3
    assert result.arms == wanted.arms and result.worst == wanted.worst
    assert world.comm.calls == {"Iallgather": 1}
    values = np.arange(10.0) + world.rank
    assert world.gather(values).tolist() == plain.gather(values).tolist()
    at = [tile for tile in world.share([7])]
    cells = np.concatenate([np.arange(tile.start, tile.stop) * 1.5 for tile in at] + [np.empty(0)]).reshape(-1, 1)
    assert world.collect(cells, [7]).ravel().tolist() == [1.5 * k for k in range(7)]
    total = np.float32([1, 2, world.rank])
    world.reduce(total)
    assert total.tolist() == [world.size, 2 * world.size, sum(range(world.size))]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("odd", ["first", "last"])
def test_digests_that_differ_stop_every_rank(odd):
    world = real_world()
    lengths = [3] * 5
    mine = 1 if world.rank == (0 if odd == "first" else world.size - 1) else 2
    with pytest.raises(DigestError) as error:
        world.exchange(lengths, scored(world.share(lengths), rewards_for(lengths, "binary")), mine, Busy())
    message = same_everywhere(str(error.value))
    odd_rank = 0 if odd == "first" else world.size - 1
    assert f"0000000000000001 on ranks {odd_rank} (node{odd_rank // 2}; cpu{odd_rank % 2})" in message
    world.exchange([], [], 3, Busy())       # and only then


@pytest.mark.mpi(min_size=1)
def test_all_leave_together_with_one_line():
    world = real_world()
    world.agree(None)
    for error, code, line in ((UserError("mend\nit"), 2, "mend it"), (KeyError("k"), 1, "KeyError: 'k'")):
        world.err = io.StringIO()
        with pytest.raises(Agreed) as end:
            world.agree(error if world.rank == world.size - 1 else None)
        assert end.value.code == code
        where = f" (rank {world.size - 1} on node{(world.size - 1) // 2})" if world.size > 1 else ""
        assert world.err.getvalue() == (f"essa_mpi: {line}{where}\n" if world.rank == 0 else "")
    world.err = io.StringIO()
    with pytest.raises(Agreed):
        world.agree(UserError("all alike"))
    assert world.err.getvalue() == ("essa_mpi: all alike\n" if world.rank == 0 else "")


@pytest.mark.mpi(min_size=2)
def test_things_that_should_be_equal_on_all_ranks():
    world = real_world()
    world.agree_equal(model="m", adapter="a")
    with pytest.raises(UserError) as error:
        world.agree_equal(model="m", adapter=f"a{world.rank == 1}")
    assert same_everywhere(str(error.value)).startswith(
        "adapter differs between rank 0 on node0 and ranks 1 (first on node0)")


# -- the generation loop on real ranks, counted --------------------------------------------------------

def small_task(**keys):
    """(Config, Task): 17 rows to evolve on, 4 to validate on."""
    def rows(split, n):
        return [Row(f"{split} {i}", "", {}, None, f"{split}[{i}]") for i in range(n)]
    settings = configuration.make({"name": "x", "model": "x", "adapter": "x", "task": "x", "population": 7, "batch": 5,
                                   "generations": 6, **keys})
    return settings, Task(sft=[], train=rows("train", 17), validation=rows("validation", 4), heldout=[])


def evolved(settings, task, world, search, faults=(), start=0):
    generations = []
    scorer = DeterministicScorer(settings, Faults(world.rank, list(faults)), 0.0)
    evolve(settings, world, task, scorer, search, Answers(search.dimension), start, generations.append)
    return generations


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("dimension", [3, 200])
def test_one_collective_a_generation_whatever_the_dimension(dimension):
    sent = []
    for generations in (2, 7):
        world = real_world(counting=True)
        settings, task = small_task(generations=generations)
        evolved(settings, task, world, make_search("sep", dimension, 7, 0.3, 1))
        assert world.comm.calls == {"Allgather": generations + 1}       # the closing check
        sent.append(world.comm.sent)
    # Beside the first generation's seven candidates the warm start is scored on the same rows.
    words = [TILE_WORDS * max(len(share([5] * arms, r, world.size)) for r in range(world.size)) for arms in (8, *[7] * 6)]
    assert sent[1] == [8 * (len(HEADER) + w) for w in words] + [8 * len(HEADER)]


@pytest.mark.mpi(min_size=1)
def test_the_mean_is_validated_in_the_same_collective():
    world = real_world(counting=True)
    settings, task = small_task(validation_every=3)
    search = make_search("cma", 4, 7, 0.3, 1)
    generations = evolved(settings, task, world, search)
    assert world.comm.calls == {"Allgather": 7}
    assert [g.validation_rows for g in generations] == [4, 0, 0, 4, 0, 0]
    first = scored([Tile(0, 0, 4)], {(0, i): reward(np.zeros(4), task.validation[i], i) for i in range(4)})[0]
    assert generations[0].validation == ArmScore(first.total, first.squares, first.rows, 0).mean(0.0)


class Parted(DeterministicScorer):
    """Each completion of a candidate also has two parts: a third of its row's index, and one that may be absent."""

    def score(self, arms, tiles, generation, keep=None):
        scores, busy, samples = super().score(arms, tiles, generation, keep)
        busy.components = [TileScore(), TileScore()]
        for tile in tiles:
            for index in arms[tile.arm].indices[tile.start:tile.stop] if arms[tile.arm].candidate is not None else ():
                busy.components[0].add(index / 3)
                busy.components[1].add(0.1 if index % 2 else math.nan)
        return scores, busy, samples


@pytest.mark.mpi(min_size=1)
def test_parts_of_the_reward_ride_in_the_same_collective():
    """Their means have the same bits on any number of ranks: exact arithmetic says which."""
    world = real_world(counting=True)
    settings, task = small_task(generations=3, validation_every=1)
    generations, batches = [], Rows(settings, 17)
    evolve(settings, world, task, Parted(settings, Faults(world.rank, []), 0.0), make_search("sep", 4, 7, 0.3, 1),
           Answers(4), 0, generations.append)
    assert world.comm.calls == {"Allgather": 4}
    for generation in generations:
        batch = [int(i) for i in batches.batch(generation.number)]
        first, second = generation.exchanged.components
        exact = sum(Fraction(i / 3) for i in batch) / len(batch)        # the validation rows are not in it
        assert first.given_mean() == pytest.approx(float(exact), abs=1e-15)
        assert (first.rows, first.missing) == (35, 0)
        assert second.rows == 7 * sum(i % 2 for i in batch) and second.rows + second.missing == 35
        assert second.given_mean() == 0.1 or not second.rows
        assert same_everywhere(first) == first


@pytest.mark.mpi(min_size=1)
def test_rows_are_collected_in_order():
    world = real_world()
    for lengths in ([5, 5, 5], [1], [3, 0, 4]):
        mine = [[[100 * tile.arm + i, -i] for i in range(tile.start, tile.stop)] for tile in world.share(lengths)]
        found = world.collect(np.concatenate([*map(np.array, mine), np.empty((0, 2))]), lengths)
        assert found.tolist() == [[100 * arm + i, -i] for arm, n in enumerate(lengths) for i in range(n)]


@pytest.mark.mpi(min_size=1)
def test_ties_go_to_the_lower_index():
    """Equal rewards everywhere: the update is that of fitness that falls with the index."""
    settings, task = small_task(generations=3)

    class Equal(DeterministicScorer):
        def score(self, arms, tiles, generation):
            scores, busy, samples = super().score(arms, tiles, generation)
            return scored(tiles, _Constant(1 / 3)), busy, samples

    search, told = make_search("cma", 4, 7, 0.3, 1), make_search("cma", 4, 7, 0.3, 1)
    world = real_world()
    generations = []
    evolve(settings, world, task, Equal(settings, Faults(world.rank, []), 0.0), search, Answers(4), 0, generations.append)
    for generation in range(3):
        told.tell(generation, [7, 6, 5, 4, 3, 2, 1])
        assert generations[generation].digest == told.digest()
        assert generations[generation].fitness.tolist() == [1 / 3] * 7


class _Constant:
    def __init__(self, value):
        self.value = value

    def __getitem__(self, cell):
        return self.value


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_missing_scores_are_the_worst_and_counted(value):
    settings, task = small_task(generations=1)
    batch = Rows(settings, 17).batch(0).tolist()
    faults = [{"kind": "nan", "value": value, "candidates": [2], "rows": batch[1:3]},      # two rows of candidate 2
              {"kind": "nan", "value": value, "candidates": [4]}]                         # candidate 4 altogether
    search, told = make_search("cma", 4, 7, 0.3, 1), make_search("cma", 4, 7, 0.3, 1)
    world = real_world()
    generation, = evolved(settings, task, world, search, faults)
    vectors = told.ask(0)
    rewards = {(k, i): reward(vectors[k], task.train[i], i) for k in range(7) for i in batch}
    start = [reward(np.zeros(4), task.train[i], i) for i in batch]      # scored beside the candidates
    worst = min([*start, *(r for (k, i), r in rewards.items() if k != 4 and not (k == 2 and i in batch[1:3]))])
    expected = [float(sum(Fraction(worst if k == 2 and i in batch[1:3] else rewards[k, i]) for i in batch) / 5)
                for k in range(7)]
    expected[4] = -math.inf
    assert generation.fitness.tolist() == expected
    assert generation.missing == 7 and np.argmin(generation.fitness) == 4
    told.tell(0, expected)
    assert search.digest() == told.digest()


@pytest.mark.mpi(min_size=1)
def test_a_generation_without_any_score_is_an_error_on_every_rank():
    settings, task = small_task()
    with pytest.raises(UserError, match="no candidate has a score"):
        evolved(settings, task, real_world(), make_search("cma", 4, 7, 0.3, 1), [{"kind": "nan", "generation": 2}])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("after", [-1, 1, 5])
def test_a_flipped_bit_stops_all_ranks_before_its_scores_are_used(after):
    """After generation 1: at the next all-gather. After the last, 5: at the closing check. Before any: at the first."""
    settings, task = small_task()
    world = real_world(counting=True)
    search = make_search("cma", 4, 7, 0.3, 1)
    generations = []

    def record(generation):
        generations.append(generation)

    tell = search.tell

    def told(generation, fitness):
        tell(generation, fitness)
        if generation == after and world.rank == world.size - 1:
            flip(search)
    search.tell = told
    if after < 0 and world.rank == world.size - 1:
        flip(search)
    with pytest.raises(DigestError, match=f"on ranks {world.size - 1} "):
        evolve(settings, world, task, DeterministicScorer(settings, Faults(0, []), 0.0), search, Answers(4), 0, record)
    assert [g.number for g in generations] == list(range(after + 1))
    assert search.generation == after + 1           # nothing was learnt from the scores that came with it
    assert world.comm.calls == {"Allgather": after + 2}


@pytest.mark.mpi(min_size=1)
def test_the_loop_starts_where_it_is_told():
    settings, task = small_task()
    world = real_world()
    whole = make_search("cma", 4, 7, 0.3, 1)
    generations = evolved(settings, task, world, whole)
    half = make_search("cma", 4, 7, 0.3, 1)
    for g in generations[:3]:
        half.tell(g.number, g.fitness)
    rest = evolved(settings, task, world, half, start=3)
    assert [g.digest for g in rest] == [g.digest for g in generations[3:]]
    assert half.digest() == whole.digest()


@pytest.mark.mpi(min_size=1)
def test_the_seats_of_real_ranks(monkeypatch):
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    allowed = os.sched_getaffinity(0)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    try:
        for bound in (allowed, {min(allowed)}):        # as a launcher leaves them that binds nobody, or all to one core
            os.sched_setaffinity(0, bound)
            seat = seating.take()
            assert (seat.local_rank, seat.local_size) == (comm.Get_rank(), comm.Get_size())
            assert len(seat.hosts) == len(seat.cpus) == comm.Get_size()
            assert set(seat.cores) == os.sched_getaffinity(0)
            taken = sum(comm.allgather(seat.cores), [])
            if comm.Get_size() <= len(allowed) == os.cpu_count():
                assert len(set(taken)) == len(taken)
            threads = same_everywhere(os.environ["OMP_NUM_THREADS"])
            assert threads == "1" or len(set(taken)) == len(taken)
            for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
                monkeypatch.delenv(name)
            comm.Barrier()                  # nobody is bound anew before all have looked
    finally:
        os.sched_setaffinity(0, allowed)
