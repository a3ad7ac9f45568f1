"""`doctor`, and the check that an adapter does anything."""

import os
import subprocess
import sys

import pytest

from essa_mpi.engine import Completion
from essa_mpi.evaluate import changes_output


def doctor(*arguments, cwd):
    return subprocess.run([sys.executable, "-m", "essa_mpi", "doctor", *arguments], cwd=cwd,
                          capture_output=True, text=True, timeout=120)


def test_doctor_says_what_is_there_and_that_a_run_can_start(tmp_path):
    outcome = doctor(cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    for word in ("python 3.", "MPI: ", "CPU: ", "1 rank:", "a run can start"):
        assert word in outcome.stdout


def test_doctor_exits_1_with_the_reason(tmp_path):
    (tmp_path / "c.toml").write_text('name = "a"\nmodel = "nowhere"\nadapter = "b"\ntask = "t.jsonl"\n')
    outcome = doctor("c.toml", cwd=tmp_path)
    assert outcome.returncode == 1
    assert "a run could not start: model nowhere: no config.json there" in outcome.stdout


def test_every_rank_has_its_seat_in_the_table(mpirun):
    outcome = mpirun(3, "doctor", timeout=120)
    assert outcome.rc == 0
    lines = outcome.stdout.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("  rank")) + 1:][:3]
    assert [line.split()[0] for line in table] == ["0", "1", "2"]
    assert outcome.stdout.count("a run can start") == 1
    assert ("ranks share cores" in outcome.stdout) == (len(os.sched_getaffinity(0)) < 3)


class OneVoice:
    """An engine whose answers depend on the adapter, or not."""

    def __init__(self, deaf):
        self._deaf, self._vector = deaf, None

    def place(self, vectors):
        [self._vector] = vectors

    def generate(self, requests):
        token = 0 if self._deaf or self._vector is None else 1
        return [Completion("", (token,), cut=False, too_long=False) for _ in requests]


@pytest.mark.parametrize("deaf", [True, False])
def test_an_adapter_that_changes_no_output_is_seen(deaf):
    assert changes_output(OneVoice(deaf), [[1, 2], [3]], 4) is not deaf
