"""MPI: the ranks, where they sit, how a run ends, and THE all-gather. Knows nothing of models.

A generation ends with one Allgather of 8-byte words (`World.exchange`). What is
sent a rank: a header (digest of the search state, busy time, flags, counters)
and a fixed number of words for each tile of candidates x rows the rank scored,
padded to the largest share. Its size depends on neither the model nor the rewards.
"""

import math
import os
import resource
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from . import trace
from .config import UserError
from .departure import at_once
from .shares import Tile, all_shares, bounds, share

# Rewards are summed as 128-bit fixed point with 64 fractional bits, so a sum does not depend on how
# the rows were tiled. A float64 of magnitude >= 2^-12 is represented exactly; a smaller one is
# rounded once, before any sum. |reward| <= 2^20 is checked where rewards are made, so that
# the squares of four million rows fit too.
FRACTION_BITS = 64

HEADER = ("digest", "stop", "busy_ns", "place_ns", "generate_ns", "score_ns",
          "completions", "tokens", "cut", "empty", "too_long")
# Sum (2), sum of squares (2), rows scored, rows missing, least reward; of the odd rows: sum (2), scored, missing.
TILE_WORDS = 11


def to_fixed(value: float) -> int:
    """A float64 as an integer multiple of 2^-64, rounded to nearest, ties to even."""
    return round(math.ldexp(value, FRACTION_BITS))    # ldexp is exact


def square(fixed: int) -> int:
    """The square of a fixed-point number, in the same format; rounded down once."""
    return fixed * fixed >> FRACTION_BITS


@dataclass
class ArmScore:
    """Fixed-point sums of rows' rewards and of their squares: of one candidate, whoever scored them."""

    total: int = 0
    squares: int = 0
    rows: int = 0
    missing: int = 0
    odd_total: int = 0      # of every second row of the batch: two halves tell noise from differences
    odd_rows: int = 0
    odd_missing: int = 0

    def join(self, other: "ArmScore") -> None:
        """Take the sums of further rows in."""
        for name in ("total", "squares", "rows", "missing", "odd_total", "odd_rows", "odd_missing"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def half(self, odd: bool) -> "ArmScore":
        """The odd rows alone, or the others (without their squares)."""
        if odd:
            return ArmScore(self.odd_total, 0, self.odd_rows, self.odd_missing)
        return ArmScore(self.total - self.odd_total, 0, self.rows - self.odd_rows, self.missing - self.odd_missing)

    def mean(self, worst: float) -> float:
        """Mean reward, correctly rounded; a missing row scores `worst`. -inf if nothing was scored.

        The exact sum is rounded once, so the result has the same bits on any number of ranks.
        """
        if self.rows == 0:
            return -np.inf
        total = self.total + self.missing * (to_fixed(worst) if self.missing else 0)
        return float(Fraction(total, (self.rows + self.missing) << FRACTION_BITS))

    def given_mean(self) -> float:
        """Mean of what was given, missing ones left out; nan if nothing was."""
        return float(Fraction(self.total, self.rows << FRACTION_BITS)) if self.rows else float("nan")

    def stderr(self, worst: float) -> float:
        """Standard error of the mean over rows (sample variance, n - 1); nan below two rows."""
        n = self.rows + self.missing
        if self.rows == 0 or n < 2:
            return float("nan")
        w = to_fixed(worst) if self.missing else 0
        total = Fraction(self.total + self.missing * w, 1 << FRACTION_BITS)
        squares = Fraction(self.squares + self.missing * square(w), 1 << FRACTION_BITS)
        return float(max(squares - total * total / n, 0) / (n - 1) / n) ** 0.5


@dataclass
class TileScore(ArmScore):
    """A tile while its rows are scored, and what it sends."""

    least: float = np.inf

    def add(self, reward: float, odd: bool = False) -> None:
        """Add one row's reward; a reward that is not finite counts as missing. odd: the row's place in the batch is."""
        if not np.isfinite(reward):
            self.missing += 1
            self.odd_missing += odd
            return
        fixed = to_fixed(reward)
        self.total += fixed
        self.squares += square(fixed)    # of a float64 product little would be left once the mean is taken out
        self.rows += 1
        if odd:
            self.odd_total += fixed
            self.odd_rows += 1
        self.least = min(self.least, reward)

    def words(self) -> list[int]:
        """The tile as TILE_WORDS signed 64-bit integers."""
        low = (1 << 64) - 1
        least = int(np.float64(self.least).view(np.int64))
        return [self.total >> 64, _signed(self.total & low), self.squares >> 64,
                _signed(self.squares & low), self.rows, self.missing, least,
                self.odd_total >> 64, _signed(self.odd_total & low), self.odd_rows, self.odd_missing]


def _unpacked(words: np.ndarray) -> tuple[ArmScore, float]:
    """(the sums, the least reward) of `TileScore.words`."""
    hi, lo, hi2, lo2, rows, missing, least, hi_odd, lo_odd, rows_odd, missing_odd = map(int, words)
    return (ArmScore((hi << 64) + _unsigned(lo), (hi2 << 64) + _unsigned(lo2), rows, missing,
                     (hi_odd << 64) + _unsigned(lo_odd), rows_odd, missing_odd),
            float(np.int64(least).view(np.float64)))


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _unsigned(word: int) -> int:
    return word & ((1 << 64) - 1)


@dataclass
class Exchanged:
    """What every rank knows after the all-gather: the same on all of them."""

    arms: list[ArmScore]
    worst: float                 # the least finite reward of the exchange: what a missing row scores
    header: dict[str, np.ndarray]  # name -> (ranks,) int64
    bytes_sent: int              # by one rank
    wait: float = 0.0            # seconds this rank waited for the slowest
    seconds: float = 0.0         # seconds in the all-gather, the wait taken out
    wait_mean: float = 0.0       # seconds the ranks waited, their mean
    count: int = 1               # all-gathers
    components: list[ArmScore] = field(default_factory=list)  # each part of the candidates' rewards

    def total(self, name: str) -> int:
        return int(self.header[name].sum())


@dataclass
class Busy:
    """A rank's work since the last all-gather, for the header; seconds as float."""

    place: float = 0.0
    generate: float = 0.0
    score: float = 0.0
    total: float = 0.0
    counters: dict = field(default_factory=dict)  # completions, tokens, cut, empty, too_long
    components: list = field(default_factory=list)  # TileScore of each part of the candidates' rewards


class World:
    """The ranks of a run. `comm` is an mpi4py communicator; only the main thread may use it.

    Attributes: rank, size; hosts, cpus: each rank's host and CPU model, (size,) names.
    """

    def __init__(self, seat, comm=None):
        """seat: where the ranks sit (`seat.take`). comm: COMM_WORLD unless a test gives another."""
        self._mpi = seat.mpi
        self.comm = seat.mpi.COMM_WORLD if comm is None else comm
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.hosts, self.cpus, self._crowded = seat.hosts, seat.cpus, seat.crowded
        self.out, self.err = sys.stdout, sys.stderr
        self.failure_file = None      # set once the run folder exists: see `fail`
        self.watchdog = None          # a `Watchdog`, for runs
        self.balance = None           # a `Balance`, if ranks of unequal speed are to have unequal shares

    # -- talking and ending --------------------------------------------------------------------

    def say(self, line: str) -> None:
        """Print a line once, from rank 0."""
        if self.rank == 0:
            print(line, file=self.out, flush=True)

    def agree(self, error: BaseException | None) -> None:
        """Set-up only: if any rank failed, all leave together with one readable line.

        Raises Agreed(2) on every rank for a UserError, Agreed(1) for anything else.
        """
        text = None if error is None else (_one_line(error), isinstance(error, UserError))
        if not self.gather(np.array([text is not None], float)).any():      # an engine of another rank may take minutes yet
            return
        failed = [(r, t) for r, t in enumerate(self.comm.allgather(text)) if t is not None]
        rank, (line, user) = failed[0]
        own_log = self.err is not sys.stderr      # else the terminal is everybody's: one traceback is enough
        if error is not None and not isinstance(error, UserError) and (own_log or self.rank == rank):
            traceback.print_exception(error, file=sys.stderr)
        where = f" (rank {rank} on {self.hosts[rank]})" if len(failed) < self.size else ""
        if self.rank == 0:
            print(f"essa_mpi: {line}{where}", file=self.err, flush=True)
        raise Agreed(2 if user else 1)

    def fail(self, error: BaseException) -> None:
        """End the whole job now, from any rank: one line, the traceback in a file, MPI_Abort."""
        code = 2 if isinstance(error, UserError) else 1
        try:
            self._report(error, code)
            time.sleep(0.3)     # launchers drop what a rank said just before it aborted
        finally:    # also when nothing can be printed any more
            self._abort(code)

    def leave_on_signal(self, line: str, code: int) -> None:
        """From now on SIGUSR1 to any rank ends the whole job at once, with `line` and this exit code."""
        def leave():
            try:
                print(line, file=self.out, flush=True)
                time.sleep(0.3)
            finally:
                self._abort(code)
        at_once(leave)

    def _abort(self, code: int) -> None:
        self._mpi.COMM_WORLD.Abort(code)
        os._exit(code)      # MPICH's Abort may return before the process is ended

    def _report(self, error: BaseException, code: int) -> None:
        """Say it, unless another rank has: ranks that fail together would repeat one another."""
        line = f"essa_mpi: rank {self.rank} on {self.hosts[self.rank]}: {_one_line(error)}"
        file, told = None, False
        if self.failure_file is not None:
            try:    # whoever creates the file speaks
                file = os.open(self.failure_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                told = self._wait_until_told()
            except OSError:
                pass
        try:
            if not told:
                where = f" (traceback in {self.failure_file})" if file is not None and code == 1 else ""
                print(line + where, file=self.err, flush=True)
        finally:
            if file is not None:
                text = line + "\n" + "".join(traceback.format_exception(error))
                os.write(file, text.encode(errors="replace"))
        sys.stdout.flush()
        sys.stderr.flush()

    def _wait_until_told(self) -> bool:
        """Whether the rank that created the failure file has spoken: then it fills the file and ends the job."""
        for _ in range(100):    # counted, not timed: on a machine that stood still all time is up at once
            time.sleep(0.05)
            if os.path.getsize(self.failure_file):
                time.sleep(2.0)
                return True
        return False

    def install_hooks(self) -> None:
        """An exception nobody caught, in any thread, ends the job instead of hanging the others."""
        sys.excepthook = lambda kind, error, trace: self.fail(error)
        # SystemExit ends a thread, not the program.
        threading.excepthook = lambda args: args.exc_type is SystemExit or self.fail(args.exc_value)

    def agree_equal(self, **things: str) -> None:
        """Set-up only: raise UserError on every rank if a thing (a hash, a text) is not the same on all."""
        seen = self.comm.allgather(things)
        for name, mine in things.items():
            differ = [r for r in range(self.size) if seen[r][name] != seen[0][name]]
            if differ:
                raise UserError(f"{name} differs between rank 0 on {self.hosts[0]} and ranks {_ranges(differ)} (first on "
                                f"{self.hosts[differ[0]]}); give every node the same files, libraries and settings")

    # -- the collective ------------------------------------------------------------------------

    def share(self, lengths: list[int]) -> list[Tile]:
        """The tiles this rank scores; see `shares.share`. With `balance` faster ranks have more of them."""
        if self.balance is not None:
            self.balance.settle()
        return share(lengths, self.rank, self.size, self._weights())

    def _weights(self) -> list[int] | None:
        return None if self.balance is None else self.balance.weights

    def exchange(self, lengths: list[int], scores: list[TileScore], digest: int,
                 busy: Busy, stop: bool = False) -> Exchanged:
        """THE all-gather: one a generation. Raises DigestError on every rank if digests differ.

        lengths: rows of each arm, the same on every rank. scores: of this rank's tiles, in the
        order of `share`. digest: int64 of the search state. busy.components: as many on every rank.
        Returns the same on every rank.
        """
        shares = all_shares(lengths, self.size, self._weights())
        most = max(map(len, shares))
        parts = len(HEADER) + most * TILE_WORDS     # where the components begin
        send = np.zeros(parts + len(busy.components) * TILE_WORDS, np.int64)
        values = {"digest": digest, "stop": stop, "busy_ns": busy.total * 1e9,
                  "place_ns": busy.place * 1e9, "generate_ns": busy.generate * 1e9,
                  "score_ns": busy.score * 1e9, **busy.counters}
        send[:len(HEADER)] = [int(values.get(name, 0)) for name in HEADER]
        places = [len(HEADER) + i * TILE_WORDS for i in range(len(scores))] + [
            parts + i * TILE_WORDS for i in range(len(busy.components))]
        for at, score in zip(places, [*scores, *busy.components]):
            send[at:at + TILE_WORDS] = score.words()
        received = np.empty((self.size, send.size), np.int64)
        began = time.perf_counter()
        with trace.shown("allgather"):
            self._call("Allgather", [send, self._mpi.INT64_T], [received, self._mpi.INT64_T])
        elapsed = time.perf_counter() - began
        header = {name: received[:, i].copy() for i, name in enumerate(HEADER)}
        self._check_digests(header["digest"])

        arms = [ArmScore() for _ in lengths]
        worst = np.inf
        for rank, tiles in enumerate(shares):
            for i, tile in enumerate(tiles):
                at = len(HEADER) + i * TILE_WORDS
                score, least = _unpacked(received[rank, at:at + TILE_WORDS])
                arms[tile.arm].join(score)
                worst = min(worst, least)
        components = [ArmScore() for _ in busy.components]
        for i, component in enumerate(components):
            for row in received:
                component.join(_unpacked(row[parts + i * TILE_WORDS:][:TILE_WORDS])[0])
        busy_ns = header["busy_ns"]
        wait = min(float(busy_ns.max() - busy_ns[self.rank]) / 1e9, elapsed)
        trace.gathered(began, began + elapsed, wait)
        if self.balance is not None:
            self.balance.note([sum(tile.stop - tile.start for tile in tiles) for tiles in shares],
                              (header["place_ns"] + header["generate_ns"] + header["score_ns"]).tolist())
        return Exchanged(arms, worst if np.isfinite(worst) else 0.0, header, send.nbytes, wait, elapsed - wait,
                         float(busy_ns.max() - busy_ns.mean()) / 1e9, components=components)

    def _call(self, name: str, *arguments) -> None:
        """A collective operation; where ranks share cores, asleep while it waits.

        MPI's own waiting polls, and takes half the core and more from a rank that still works: on two cores the generations
        of four ranks took 34 s with it and 14 s without. Where a rank has its core to itself polling is the faster.
        """
        if self.watchdog is not None:
            self.watchdog.arrive()
        if self._crowded:
            request, pause = getattr(self.comm, f"I{name.lower()}")(*arguments), 2e-5
            while not request.Test():
                time.sleep(pause)
                pause = min(2 * pause, 2e-3)
        else:
            getattr(self.comm, name)(*arguments)
        if self.watchdog is not None:
            self.watchdog.depart()

    def collect(self, mine: np.ndarray, lengths: list[int]) -> np.ndarray:
        """Evaluation only: the values (cells, ...) of all ranks' tiles, in the order of the cells; float64.

        mine: those of this rank's tiles, a row a cell, in the order of `share`. lengths: rows of each arm.
        """
        cells, width = sum(lengths), int(np.prod(mine.shape[1:]))
        at = bounds(cells, self.size, self._weights())
        shares = [(last - first) * width for first, last in zip(at, at[1:])]
        out = np.empty((cells, *mine.shape[1:]))
        self._call("Allgatherv", [np.ascontiguousarray(mine, np.float64), self._mpi.DOUBLE], [out, shares, self._mpi.DOUBLE])
        return out

    def peak_gib(self) -> float:
        """Once, at the end: the most memory any rank's process has held, GiB of resident set."""
        return max(self.comm.allgather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20))

    def gather(self, mine: np.ndarray) -> np.ndarray:
        """Set-up and gradient methods only: each rank's numbers (k,) float64, as (ranks, k)."""
        out = np.empty((self.size, len(mine)))
        self._call("Allgather", [np.ascontiguousarray(mine, np.float64), self._mpi.DOUBLE], [out, self._mpi.DOUBLE])
        return out

    def reduce(self, mine: np.ndarray) -> float:
        """Gradient methods only: THE all-reduce, a sum over the ranks in place of `mine` (parameters,) float32; seconds.

        The seconds hold the wait for the slowest rank. The sum's last bits depend on the number of ranks.
        """
        began = self._mpi.Wtime()
        self._call("Allreduce", self._mpi.IN_PLACE, [mine, self._mpi.FLOAT])
        return self._mpi.Wtime() - began

    def _check_digests(self, digests: np.ndarray) -> None:
        """Raise DigestError naming each digest with its ranks, hosts and CPU models if they differ."""
        if (digests == digests[0]).all():
            return
        groups = []
        for digest in dict.fromkeys(digests.tolist()):
            ranks = np.flatnonzero(digests == digest)
            hosts = ", ".join(sorted({self.hosts[r] for r in ranks}))
            cpus = ", ".join(sorted({self.cpus[r] for r in ranks}))
            groups.append(f"{_unsigned(digest):016x} on ranks {_ranges(ranks)} ({hosts}; {cpus})")
        raise DigestError(
            "the search state differs between ranks, so their candidates would too; stopped before its scores "
            "were used: " + "; ".join(groups) + ". Run on equal CPUs with equal libraries, or set the same "
            "OPENBLAS_CORETYPE (e.g. Haswell) or MKL_CBWR=COMPATIBLE and the same OMP_NUM_THREADS on every rank")


class Agreed(SystemExit):
    """All ranks leave together with this exit code. Raised by `World.agree`, on every rank at once."""


class DigestError(Exception):
    """The replicated search states are not equal. Raised on every rank at once."""


def _ranges(numbers) -> str:
    """0-3,7 for [0, 1, 2, 3, 7]."""
    runs = []
    for n in map(int, numbers):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, (UserError, DigestError)) else f"{type(error).__name__}: {text}"
