"""When a run ends before all its generations are done: by the clock, by its walltime, by a signal of the scheduler.

What a rank wants travels in the next all-gather, so that all of them do it after the same generation. Standard
library only: the handler must be there before anything is loaded, for until then the signal ends the process.
"""

import signal
import time

LEFT = 75           # exit code, EX_TEMPFAIL of sysexits.h: checkpointed, to be continued with --resume
FINISH, LEAVE = 1, 2    # bits of `asked`: end as a run that is done; checkpoint and exit with LEFT

_began = time.monotonic()
_signals = []


def listen() -> None:
    """From now on SIGUSR1 asks this process to leave. Main thread only."""
    signal.signal(signal.SIGUSR1, lambda *_: _signals.append(time.monotonic()))


def at_once(leave) -> None:
    """From now on SIGUSR1, or one that has come and was not seen yet, calls leave(). Main thread only."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:      # nobody listens: a run that is called from Python
        return
    signal.signal(signal.SIGUSR1, lambda *_: leave())
    if _signals:
        leave()


class Departure:
    """What this rank wants after the generation it is in."""

    def __init__(self, max_seconds: float = 0.0, walltime_seconds: float = 0.0, elapsed: float = 0.0):
        """0: no limit. elapsed: seconds of max_seconds spent before. The walltime is that of this process."""
        self._max_seconds, self._walltime = max_seconds, walltime_seconds
        self._start, self._begun, self._longest = time.monotonic() - elapsed, time.monotonic(), 0.0

    def begin(self) -> None:
        """A generation begins, with which the one before is over."""
        now = time.monotonic()
        self._longest, self._begun = max(self._longest, now - self._begun), now

    def asked(self, ahead: float = 0.0) -> int:
        """FINISH, LEAVE, both, or 0; called once or more in a generation, the last time `ahead` seconds before it ends.

        LEAVE if SIGUSR1 came, or if another generation as long as the longest so far might not end in the walltime.
        """
        now = time.monotonic() + ahead
        longest = max(self._longest, now - self._begun)
        finish = self._max_seconds and now - self._start > self._max_seconds
        late = self._walltime and now - _began + 1.2 * longest > self._walltime
        return FINISH * bool(finish) | LEAVE * bool(late or _signals)


def bits(header) -> int:
    """What any rank asked for. header: Exchanged.header["stop"], (ranks,) int64."""
    found = 0
    for value in header.tolist():
        found |= value
    return found
