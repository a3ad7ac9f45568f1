"""The command line before a command runs: instant, light, and told once under N ranks."""

import subprocess
import sys
import time

import pytest

from conftest import ROOT
from essa_mpi import __version__


@pytest.mark.parametrize("words, says", [(["--help"], "run"), (["--version"], __version__), (["run", "--help"], "--resume")],
                         ids=" ".join)
def test_help_is_instant(words, says):
    """The best of three and of as many more as a busy machine needs: what slows it down is not what is measured."""
    best, patience = float("inf"), time.monotonic() + 60
    for attempt in range(1000):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "essa_mpi", *words], cwd=ROOT, capture_output=True, text=True)
        best = min(best, time.perf_counter() - began)
        assert done.returncode == 0 and says in done.stdout and not done.stderr
        if attempt >= 2 and (best < 0.5 or time.monotonic() > patience):
            break
    assert best < 0.5


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["run", "--help"]], ids=" ".join)
def test_help_imports_nothing_heavy(words):
    code = ("import sys\nfrom essa_mpi.cli import main\n"
            f"try:\n    main({words!r})\nexcept SystemExit:\n"
            "    print('imported:', {m.partition('.')[0] for m in sys.modules} & {'numpy', 'torch', 'mpi4py', 'h5py', 'vllm', "
            "'transformers', 'peft', 'safetensors'})")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("imported: set()\n"), done


def test_a_wrong_command_line_is_told_once(mpirun):
    outcome = mpirun(2, "run")
    assert outcome.rc == 2
    assert outcome.stderr.count("the following arguments are required: CONFIG") == 1 == outcome.stderr.count("usage:")
