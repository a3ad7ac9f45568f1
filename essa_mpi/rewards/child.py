"""Judging in a process of its own: a verifier that hangs, grows or dies costs its row, not the job.

The parent's `Child` sends rows; `serve`, in the child, answers row by row. What is not answered in time
is ended, with all it has started, and the rest is sent to a new process. Between the two stands a guard, which
runs no foreign code and therefore sees to that also when the rank is killed and the verifier is in a loop that no
Python thread can interrupt.
"""

import contextlib
import ctypes
import fcntl
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from ..config import UserError
from ..process import die_with
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
        watched, self._lifeline = os.pipe()     # closed on our side, by us or by our end, everything ends
        code = (f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import guarded; "
                f"guarded({theirs.fileno()}, {watched}, {os.getpid()}, {self._cpu_seconds})")
        # A session of its own: signals sent to the job's group do not reach it, for the rank still wants its
        # generation scored.
        self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno(), watched],
                                         stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        os.close(watched)
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
            # Each for itself: rows that several items share would still be shared over there, and a function
            # may change its arguments.
            self._pipe.send([pickle.dumps(item) for item in items])
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
        pipe.close()        # at that a child that is not busy ends by itself, and its guard after it
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
        os.close(self._lifeline)
        return process.wait()


def guarded(fd: int, lifeline: int, parent: int, cpu_seconds: int | None) -> None:
    """The process that a `Child` starts: a verifier, and the guard that ends it and all that it started.

    lifeline: a pipe that the parent holds open as long as it lives and wants its verifier.
    """
    adopt_orphans()     # what a verifier starts stays below the guard, in whatever session
    guard = os.getpid()
    verifier = os.fork()
    if verifier == 0:
        os.close(lifeline)
        die_with(guard)
        serve(fd, cpu_seconds)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    os.close(fd)
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(stop, signal.SIG_IGN)
    status, ended = None, os.pidfd_open(verifier)
    while status is None:
        ready, _, _ = select.select([lifeline, ended], [], [], 1.0)
        if ended in ready:
            status = os.waitstatus_to_exitcode(os.waitpid(verifier, 0)[1])
        elif lifeline in ready or os.getppid() != parent:
            break
    end_descendants()
    if status is None:
        os._exit(0)
    if status < 0:      # the parent asks how it ended
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(guard, -status)
        time.sleep(1)
    os._exit(max(0, status))


def adopt_orphans() -> None:
    """What this process's descendants leave behind becomes its child, not init's (Linux: PR_SET_CHILD_SUBREAPER)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def end_descendants() -> None:
    """Kill all processes below this one, and reap its children."""
    import psutil
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        below = [p for p in psutil.Process().children(recursive=True) if _alive(p)]
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not below:
            return
        time.sleep(0.01)


def _alive(process) -> bool:
    import psutil
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def serve(fd: int, cpu_seconds: int | None) -> None:
    """The verifier's process: makes a verifier, then takes lists of Item and sends lists of Reply, until the parent closes.

    A verifier has `facts`, a dict: {"together": True} if it judges a whole list at once; `judge(items)`, which
    yields a Reply an item, in order, and raises UserError for what the user has to mend.
    """
    # Handlers that do nothing, not SIG_IGN, which what the verifier starts would inherit: it could not be terminated.
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    for stop in stops:
        signal.signal(stop, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: [signal.signal(stop, signal.SIG_DFL) for stop in stops])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel's default: end the process, whatever it computes
    # Where nobody writes by mistake; closed in whatever is executed.
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, min(700, files - 20) if files > 40 else fd + 1)
    os.close(fd)
    pipe, me = Connection(high), os.getpid()

    def send(message):
        if os.getpid() != me:       # a fork that came back out of the user's function
            os._exit(0)
        pipe.send(message)

    kind, options = pipe.recv()
    module, _, name = kind.partition(":")
    try:
        verifier = getattr(importlib.import_module(module), name)(**options)
    except UserError as error:
        send(("refused", str(error)))
        return
    except Exception as error:
        send(("refused", f"reward: {one_line(error)}"))
        return
    send(("ready", verifier.facts))
    while True:
        try:
            items = [pickle.loads(item) for item in pipe.recv()]
        except EOFError:
            return
        try:
            _answer(send, verifier, items, cpu_seconds)
        except UserError as error:
            send(("refused", str(error)))
        except BrokenPipeError:
            return


def _answer(send, verifier, items, cpu_seconds) -> None:
    if verifier.facts.get("together"):
        send(("replies", list(verifier.judge(items))))
        return
    replies = iter(verifier.judge(items))
    for _ in items:
        if cpu_seconds:     # of CPU time: a busy machine changes no verdict
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        reply = next(replies)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(("replies", [reply]))
