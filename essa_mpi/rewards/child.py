"""Judging in a process of its own: a verifier that hangs, grows or dies costs its row, not the job.

The parent's `Child` sends rows; `serve`, in the child, answers row by row. What is not answered in time
is ended, with all it has started, and the rest is sent to a new process.
"""

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from ..config import UserError
from ..tasks import Row, one_line

START_SECONDS = 600     # to import what the verifier needs, a reward model's weights included


@dataclass(frozen=True)
class Item:
    """A completion to judge."""

    row: Row | None         # None: only whether it has the format is asked
    text: str
    tokens: tuple[int, ...] | None = None


@dataclass
class Reply:
    """What became of an Item: a value (None: the reward does not apply), or trouble in words."""

    value: float | None = None
    components: dict[str, float] = field(default_factory=dict)
    trouble: str | None = None


class Child:
    """A process with a verifier in it.

    verifier: "module:Class", made in the child as Class(**options); see `serve` for what it does. seconds: of
    wall time that a row may take, None for no limit. cpu_seconds: the same of CPU time, kept by the kernel.
    """

    def __init__(self, name: str, verifier: str, options: dict, seconds: float | None, cpu_seconds: int | None = None):
        self._name, self._verifier, self._options = name, verifier, options
        self._seconds, self._cpu_seconds = seconds, cpu_seconds
        self._process = self._pipe = None
        self._patience = seconds or 0.0     # for a whole batch, where the verifier answers for all at once
        self.facts: dict = {}               # what the verifier said of itself

    def start(self) -> None:
        """Start it, if it is not running. Raises UserError with what the verifier refuses."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        code = (f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; "
                f"serve({theirs.fileno()}, {os.getpid()}, {self._cpu_seconds})")
        # A session of its own: what the verifier starts can be ended with it, and signals sent to the job's
        # group do not reach it, for the rank still wants its generation scored.
        self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()],
                                         stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        self._pipe = Connection(ours.detach())
        try:
            self._pipe.send((self._verifier, self._options))
            if not self._pipe.poll(START_SECONDS):
                self.close()
                raise UserError(f"reward {self._name}: not ready after {START_SECONDS} s; what does it do when imported?")
            kind, said = self._pipe.recv()
        except (EOFError, OSError):
            raise UserError(f"reward {self._name}: its process ended while it started ({self._ended()}), and said why "
                            f"in the lines before this or in the rank's log") from None
        if kind == "refused":
            self.close()
            raise UserError(said)
        self.facts = said

    def judge(self, items: list[Item]) -> list[Reply]:
        """A Reply an item. Raises UserError with what the verifier refuses."""
        replies, batch = [], len(items)
        began, whole = time.monotonic(), True
        while len(replies) < len(items):
            todo = items[len(replies):][:batch]
            got, trouble = self._converse(todo)
            replies += got
            if trouble is None:
                continue
            if self.facts.get("together") and len(todo) > 1:
                batch, whole = 1, False     # one of them: they are judged one by one
            else:
                replies.append(Reply(trouble=trouble))
        if not whole and not any(r.trouble for r in replies):
            self._patience = max(self._patience, 2 * (time.monotonic() - began))     # slow, and nothing hung
        return replies

    def _converse(self, items: list[Item]) -> tuple[list[Reply], str | None]:
        """The replies that came, and why the next did not."""
        self.start()
        got = []
        seconds = self._patience if self.facts.get("together") and len(items) > 1 else self._seconds
        try:
            self._pipe.send(items)
            while len(got) < len(items):
                if not self._pipe.poll(seconds):
                    self.close()
                    return got, f"{self._name} took over {self._seconds:g} s"
                kind, said = self._pipe.recv()
                if kind == "refused":
                    raise UserError(said)
                got += said
        except (EOFError, OSError):
            return got, f"{self._name}: {self._ended()}"
        return got, None

    def _ended(self) -> str:
        """How the process ended, in words. Raises UserError if it left by itself: that is no row's fault."""
        status = self.close()
        if status == -signal.SIGPROF:
            return f"took over {self._cpu_seconds} s"
        if status < 0:
            return f"its process was ended by {signal.Signals(-status).name}"
        raise UserError(f"reward {self._name}: its process ended with exit code {status}; a reward must return, not exit")

    def close(self) -> int | None:
        """End it and all that it started; it starts again when needed. Returns its exit status."""
        process, self._process = self._process, None
        if process is None:
            return None
        pipe, self._pipe = self._pipe, None
        pipe.close()        # at that a child that is not busy ends by itself
        try:
            status = process.wait(0.5)
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait() if status is None else status


def serve(fd: int, parent: int, cpu_seconds: int | None) -> None:
    """The child: makes a verifier, then takes lists of Item and sends lists of Reply, until the parent closes.

    A verifier has `facts`, a dict: {"together": True} if it judges a whole list at once; `judge(items)`, which
    yields a Reply an item, in order, and raises UserError for what the user has to mend.
    """
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(stop, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel's default: end the process, whatever it computes
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    pipe = Connection(fd)
    kind, options = pipe.recv()
    module, _, name = kind.partition(":")
    try:
        verifier = getattr(importlib.import_module(module), name)(**options)
    except UserError as error:
        pipe.send(("refused", str(error)))
        return
    except Exception as error:
        pipe.send(("refused", f"reward: {one_line(error)}"))
        return
    pipe.send(("ready", verifier.facts))
    while True:
        try:
            items = pipe.recv()
        except EOFError:
            return
        try:
            _answer(pipe, verifier, items, cpu_seconds)
        except UserError as error:
            pipe.send(("refused", str(error)))
        except BrokenPipeError:
            return


def _answer(pipe, verifier, items, cpu_seconds) -> None:
    if verifier.facts.get("together"):
        pipe.send(("replies", list(verifier.judge(items))))
        return
    replies = iter(verifier.judge(items))
    for _ in items:
        if cpu_seconds:     # of CPU time: a busy machine changes no verdict
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        reply = next(replies)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(("replies", [reply]))


def _end_with(parent: int) -> None:
    """A rank that was killed leaves no verifier behind."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpid(), signal.SIGKILL)
