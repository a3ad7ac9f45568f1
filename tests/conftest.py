"""What tests share: the model and data they need, runs under mpirun, and order among the ranks of a test."""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from essa_mpi.config import UserError
import pytest_mpi

ROOT = Path(__file__).resolve().parent.parent


# -- what is on this machine ---------------------------------------------------------------------

def _needs(path: Path, file: str, how: str) -> Path:
    if not (path / file).exists():
        pytest.skip(f"needs {path}: {how}")
    return path


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of the quickstart's model, SmolLM2-135M-Instruct in bfloat16."""
    return _needs(ROOT / ".cache/models/SmolLM2-135M-Instruct", "config.json", "bash jobs/quickstart.sh --prepare")


@pytest.fixture(scope="session")
def warm_start(real_model) -> Path:
    """The folder of the quickstart's warm start, a peft adapter; its rows lie beside it."""
    return _needs(ROOT / ".cache/quickstart/warm_start", "adapter_config.json", "bash jobs/quickstart.sh --prepare")


@pytest.fixture(scope="session")
def public_data() -> Path:
    """A folder of public data sets, which the project does not carry."""
    path = Path(os.environ.get("ESSA_MPI_DATA") or ROOT.parent / "shared/data")
    return _needs(path, "MANIFEST.tsv", "set ESSA_MPI_DATA to a folder with gsm8k/ and the others")


# -- what tests of bad input ask --------------------------------------------------------------------

def refusal(function, *args) -> str:
    """The one line with which it refuses."""
    with pytest.raises(UserError) as refused:
        function(*args)
    message = str(refused.value)
    assert message and "\n" not in message
    return message


# -- runs under mpirun ---------------------------------------------------------------------------

@dataclass
class Outcome:
    """What became of a run: rc, the exit code of mpirun; stdout and stderr of all its ranks."""

    rc: int
    stdout: str
    stderr: str
    seconds: float


class Job:
    """A started mpirun. `wait` for it, or look at its `ranks` and signal them first."""

    def __init__(self, n: int, arguments, env: dict, cwd):
        command = ["mpirun", "-n", str(n), sys.executable]
        first = str(arguments[0])
        if first not in ("-c", "-m") and not first.endswith(".py"):
            command += ["-m", "essa_mpi"]
        command += [str(a) for a in arguments]
        # The environment that makes a bare mpirun work here is in .venv's activate, also for a pytest
        # that was started without it.
        activate = Path(sys.prefix) / "bin/activate"
        if activate.is_file():
            command = ["bash", "-c", '. "$0" && exec "$@"', str(activate), *command]
        # A launcher's variables would make the new job believe it is part of ours; unbuffered, the ranks'
        # lines come in pieces that mpirun mixes.
        clean = {k: v for k, v in os.environ.items()
                 if not k.startswith(("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "HYDI_", "MPI_LOCAL", "PYTHONUNBUFFERED"))}
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self._n, self._began = n, time.monotonic()
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err, cwd=cwd or ROOT,
            env={**clean, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in (env or {}).items()}},
            start_new_session=True, preexec_fn=_die_with_parent)
        self.pid = self.process.pid      # of mpirun

    def wait(self, timeout: float = 120) -> Outcome:
        """The outcome; a run that does not end in `timeout` seconds is killed and fails the test."""
        try:
            rc = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            rc = None
            self.kill()
        out, err = self.output()
        if rc is None:
            pytest.fail(f"mpirun -n {self._n} did not end in {timeout} s\n--- stdout\n{out[-4000:]}\n"
                        f"--- stderr\n{err[-4000:]}", pytrace=False)
        return Outcome(rc, out, err, time.monotonic() - self._began)

    def output(self) -> tuple[str, str]:
        """(stdout, stderr) so far."""
        return tuple(os.pread(f.fileno(), os.fstat(f.fileno()).st_size, 0).decode(errors="replace")
                     for f in (self._out, self._err))

    def ranks(self) -> list[psutil.Process]:
        """The ranks' processes, by rank; fewer than n while they are starting."""
        found = {}
        for process in self._descendants():
            try:
                rank = _launcher_rank(process.environ())
                # mpirun's own proxies may carry a rank too, and a rank may start children: its first is it.
                if rank is not None and process.name().startswith("python"):
                    found.setdefault(rank, process)
            except psutil.Error:
                pass
        return [found[rank] for rank in sorted(found)]

    def kill(self) -> None:
        """End it and all it started, whatever process groups they moved to."""
        everyone = self._descendants()
        if self.process.poll() is None:
            self.process.terminate()     # mpirun ends its ranks, on other hosts too
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                everyone += self._descendants()
                self.process.kill()
        for process in everyone:
            try:
                process.kill()
            except psutil.Error:
                pass
        psutil.wait_procs(everyone, timeout=10)
        self.process.wait(10)

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.Error:
            return []


_LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """Linux (PR_SET_PDEATHSIG): SIGTERM when the starting thread ends; a killed pytest leaves no run behind."""
    _LIBC.prctl(1, signal.SIGTERM)


def _launcher_rank(environment) -> int | None:
    for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None


class Mpirun:
    """mpirun(n, *arguments): arguments of `python -m essa_mpi`, or a script.py or -c and its own."""

    def __init__(self):
        self._jobs = []

    def __call__(self, n: int, *arguments, timeout: float = 120, env: dict = None, cwd=None) -> Outcome:
        """Run to its end; each rank has one thread. Fails the test after `timeout` seconds."""
        return self.start(n, *arguments, env=env, cwd=cwd).wait(timeout)

    def start(self, n: int, *arguments, env: dict = None, cwd=None) -> Job:
        """Start and return at once; whatever still runs when the test ends is killed."""
        self._jobs.append(Job(n, arguments, env, cwd))
        return self._jobs[-1]

    def close(self) -> None:
        for job in self._jobs:
            job.kill()


@pytest.fixture
def mpirun(request):
    if request.config.getoption("--with-mpi"):
        pytest.fail("the fixture mpirun starts ranks of its own: not in a test marked mpi")
    runs = Mpirun()
    yield runs
    runs.close()


# -- tests marked mpi: every rank runs them --------------------------------------------------------

def _comm(config):
    """COMM_WORLD in a session of several ranks, else None."""
    if not config.getoption("--with-mpi"):
        return None
    from mpi4py import MPI
    return MPI.COMM_WORLD if MPI.COMM_WORLD.Get_size() > 1 else None


def pytest_collection_modifyitems(config, items):
    """Tests that ask for more ranks than there are belong to a larger mpirun: not skipped, not here."""
    if not config.getoption("--with-mpi"):
        return
    from mpi4py import MPI
    size = MPI.COMM_WORLD.Get_size()
    here, elsewhere = [], []
    for item in items:
        least = max((m.kwargs.get("min_size") or 1 for m in item.iter_markers("mpi")), default=1)
        (here if least <= size else elsewhere).append(item)
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = here


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """The ranks leave a test together. If it failed on one while others wait in it, the failed one ends the job."""
    comm = _comm(item.config)
    _failures.clear()
    result = yield
    if comm is not None:
        arrived = comm.Ibarrier()
        patience = time.monotonic() + 20
        while not arrived.Test():
            if _failures and time.monotonic() > patience:
                report = "\n".join(_failures)
                terminal = item.config.pluginmanager.getplugin("terminalreporter")
                terminal.write_line(f"\n{report}\nrank {comm.Get_rank()} failed in {item.nodeid} and others are "
                                    f"still in it: ending the job")
                sys.__stdout__.flush()
                comm.Abort(1)
                time.sleep(60)      # MPICH's returns and leaves the rest to mpirun
            time.sleep(0.001)
    return result


# -- what became of each test, as it happens: tests/run.sh adds it up ------------------------------

_log = None
_failures = []


def _note(test: str, outcome: str) -> None:
    if _log is not None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)      # a test of full disks may be the one that ended
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits[1], limits[1]))
        _log.write(json.dumps([test, outcome]) + "\n")
        _log.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# Twenty lines on the MPI library at the end of every stage, for every rank.
if hasattr(pytest_mpi.MPIPlugin, "pytest_terminal_summary"):
    del pytest_mpi.MPIPlugin.pytest_terminal_summary


def pytest_configure(config):
    global _log
    path = os.environ.pop("ESSA_MPI_TEST_LOG", None)    # a pytest that a test starts must not write there
    if path:
        _log = open(path, "a")
    if not config.getoption("--with-mpi"):
        # A TERM ends the session in order: fixtures still stop what they started.
        def interrupt(number, frame):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            raise KeyboardInterrupt
        signal.signal(signal.SIGTERM, interrupt)


def pytest_runtest_logstart(nodeid):
    _note(nodeid, "started")


def pytest_runtest_logreport(report):
    if report.failed:
        _failures.append(report.longreprtext)
    if report.failed or report.skipped or report.when == "call":
        _note(report.nodeid, report.outcome)


def pytest_collectreport(report):
    if report.failed:
        _note(report.nodeid or "collection", "failed")
