"""Ends a job in which a rank hangs, and says which: without it all others wait in the all-gather till the walltime.

A thread on every rank tells rank 0 by UDP, every few seconds, what its rank is doing; MPI is left to the main threads.
If some rank has waited `seconds` in a collective operation that another has not come to, the job ends with its name.
Who was never heard of (a network without UDP) is not accused.
"""

import json
import os
import socket
import sys
import threading
import time

from . import trace

CODE = 1


class Watchdog:
    """Made on every rank at once (collective); `arrive` and `depart` around each collective operation."""

    def __init__(self, world, seconds: float):
        self._rank, self._size, self._hosts, self._err = world.rank, world.size, world.hosts, world.err
        self._seconds = seconds
        self._period = min(10.0, seconds / 4) * max(1.0, self._size / 2000)
        self._round, self._since = 0, None      # operations so far; monotonic seconds of the one it is in, or None
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        port = None
        if self._rank == 0:
            self._socket.bind(("", 0))
            self._socket.settimeout(self._period)
            port = self._socket.getsockname()[1]
        port = world.comm.bcast(port)
        here = self._hosts[self._rank] == self._hosts[0]
        self._address = ("127.0.0.1" if here else self._hosts[0], port)
        threading.Thread(target=self._listen if self._rank == 0 else self._tell, daemon=True).start()

    def arrive(self) -> None:
        self._since = time.monotonic()

    def depart(self) -> None:
        self._round, self._since = self._round + 1, None

    def _state(self) -> dict:
        """round: the operation it is in or will come to next; waits: seconds it has been in it, None if it is not."""
        since = self._since
        return {"rank": self._rank, "round": self._round, "waits": None if since is None else time.monotonic() - since,
                "doing": trace.doing()}

    def _tell(self) -> None:
        while True:
            try:
                self._socket.sendto(json.dumps(self._state()).encode(), self._address)
            except OSError:     # no name, no route: then nobody hears of this rank
                pass
            time.sleep(self._period)

    def _listen(self) -> None:
        heard = {}      # rank -> (its state, when)
        while True:
            try:
                state = json.loads(self._socket.recv(1000))
                heard[state["rank"]] = state, time.monotonic()
            except (TimeoutError, ValueError):
                pass
            heard[0] = self._state(), time.monotonic()
            said = verdict(heard, time.monotonic(), self._seconds, self._hosts)
            if said:
                print(f"essa_mpi: {said}", file=self._err, flush=True)
                sys.stdout.flush()
                os._exit(CODE)      # the launcher ends the others; MPI_Abort is the main thread's, which is waiting


def verdict(heard: dict[int, tuple[dict, float]], now: float, seconds: float, hosts: list[str]) -> str | None:
    """Who hangs, in a line; None if nobody does. heard: rank -> (its last state, when it came)."""
    waiting = {rank: (state["round"], state["waits"] + now - at) for rank, (state, at) in heard.items() if state["waits"] is not None}
    if not waiting:
        return None
    last = max(number for number, _ in waiting.values())
    longest = max(waits for number, waits in waiting.values() if number == last)
    if longest < seconds:
        return None
    missing = [rank for rank, (state, _) in heard.items() if state["round"] < last or rank not in waiting]
    if not missing:
        return None
    about = ", ".join(f"rank {rank} on {hosts[rank]} ({heard[rank][0]['doing']}, last heard of {now - heard[rank][1]:.0f} s ago)"
                      for rank in sorted(missing)[:5])
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    return (f"others have waited {longest:.0f} s for {about}{more}: ended, as hang_seconds = {seconds:g}; continue with "
            f"--resume, without that host if it was its fault")
