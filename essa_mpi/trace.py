"""Where the time goes: NVTX ranges for Nsight, and with `--trace FILE` a JSON that Perfetto and Chrome open, a row a rank.

The names are fixed: perturb, place, generate, score, wait, allgather, update, checkpoint (and train, allreduce of the
gradient methods). Waiting and gathering are one MPI call; what of it was waiting follows from the busy times in the
all-gather's header, so that no run needs a barrier; as an NVTX range both are allgather. With --trace ranks exchange
some messages at the start, to align their clocks. What follows the last generation, above all the held-out scores, has the generation AFTER.
"""

import contextlib
import json
import sys
import time

from .config import UserError

NAMES = ("perturb", "place", "generate", "score", "wait", "allgather", "update", "checkpoint", "train", "allreduce")

AFTER = -1

_events = None      # [(name, start, end, generation)], perf_counter seconds; None: not kept
_zero = 0.0
_generation = 0
_doing = ("start", time.perf_counter())     # the span it is in, or the last that ended, and since when


def start(world) -> None:
    """Keep events from now on, in rank 0's time. Collective."""
    global _events, _zero
    ahead = _ahead(world)
    _events, _zero = [], world.comm.bcast(time.perf_counter()) + ahead


def _ahead(world, rounds: int = 20) -> float:
    """Seconds this rank's clock is ahead of rank 0's (F. Cristian, Distributed Computing 3 (1989)).

    Of several questions the one answered fastest: its answer was read within half that time. The ranks of a host have
    one clock (CLOCK_MONOTONIC).
    """
    best, ahead = float("inf"), 0.0
    for rank in (r for r, host in enumerate(world.hosts) if host != world.hosts[0]):
        for _ in range(rounds):
            if world.rank == 0:
                world.comm.recv(source=rank)
                world.comm.send(time.perf_counter(), rank)
            elif world.rank == rank:
                asked = time.perf_counter()
                world.comm.send(None, 0)
                said, now = world.comm.recv(source=0), time.perf_counter()
                if now - asked < best:
                    best, ahead = now - asked, (asked + now) / 2 - said
    return ahead


def generation(number: int) -> None:
    """What follows belongs to this generation."""
    global _generation
    _generation = number


@contextlib.contextmanager
def span(name: str):
    """What happens within is an event of this name, and an NVTX range where there is a GPU."""
    began = time.perf_counter()
    try:
        with shown(name):
            yield
    finally:
        note(name, began, time.perf_counter())


@contextlib.contextmanager
def shown(name: str):
    """What happens within is an NVTX range, where there is a GPU, and what `doing` tells; no event."""
    global _doing
    _doing = (name, time.perf_counter())
    nvtx = _nvtx()
    if nvtx:
        nvtx.range_push(name)
    try:
        yield
    finally:
        if nvtx:
            nvtx.range_pop()


def doing() -> str:
    """What this rank is at, or was at last, in words."""
    name, since = _doing
    where = f"generation {_generation}" if _generation != AFTER else "after the last generation"
    return f"{where}: {name} since {time.perf_counter() - since:.0f} s"


def note(name: str, began: float, ended: float) -> None:
    """An event from `began` to `ended`, of time.perf_counter."""
    if _events is not None:
        _events.append((name, began, ended, _generation))


def gathered(began: float, ended: float, wait: float) -> None:
    """The all-gather's call, of which the first `wait` seconds were waiting for the slowest rank."""
    note("wait", began, began + wait)
    note("allgather", began + wait, ended)


def write(world, path: str) -> None:
    """All ranks' events, by rank 0, into `path`; a warning if the disk refuses: the run's own files are safe. Collective."""
    global _events
    if _events is None:
        return
    from .files import write_json
    everything = world.comm.gather([(name, a - _zero, b - _zero, g) for name, a, b, g in _events])
    _events = None
    if everything is None:
        return
    events = [{"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank} on {host}"}}
              for rank, host in enumerate(world.hosts)]
    events += [{"name": name, "ph": "X", "ts": a * 1e6, "dur": (b - a) * 1e6, "pid": rank, "tid": 0, "args": {"generation": g}}
               for rank, some in enumerate(everything) for name, a, b, g in some]
    try:
        write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"})
    except (OSError, UserError) as error:
        world.say(f"warning: no trace: {error}")


def read(path: str) -> list[dict]:
    """The events of a trace file that are not about names."""
    with open(path) as file:
        return [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]


_cuda = None        # False: there is none


def _nvtx():
    global _cuda
    if _cuda is None and "torch" in sys.modules:
        cuda = getattr(sys.modules["torch"], "cuda", None)
        _cuda = cuda if cuda is not None and cuda.is_available() else False
    return _cuda.nvtx if _cuda else None
