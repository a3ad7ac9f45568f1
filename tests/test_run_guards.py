"""What keeps two runs, and a run and its inputs, from being mixed up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from deterministic_run import write_run
from essa_mpi.config import UserError, make
from essa_mpi.rewards import load_reward
from essa_mpi.runfile import RunFolder, lock
from essa_mpi.tasks import Row


def test_one_live_process_a_run_name(tmp_path):
    held = lock("a", tmp_path)
    program = ("import sys; from essa_mpi.runfile import lock; from essa_mpi.config import UserError\n"
               "try: lock('a', sys.argv[1], patience=0.5)\n"
               "except UserError as error: print(error)\n"
               "lock('b', sys.argv[1]); print('b is free')")
    def other():
        return subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True).stdout
    assert "is being written by another run of that name that is still alive" in other()
    held.close()
    assert other() == "b is free\n"


def test_a_start_that_was_killed_leaves_nothing_to_the_next(tmp_path):
    (tmp_path / ".a.tmp" / "checkpoints").mkdir(parents=True)
    (tmp_path / ".a.tmp" / "checkpoints" / "generation_000009.h5").write_text("old")
    folder = RunFolder.create("a", "", tmp_path)
    assert not list(folder.checkpoints.iterdir())


@pytest.mark.parametrize("returned", ["{0: 1.0, 1: 2.0}", "'ab'"])
def test_a_reward_that_returns_no_list_is_refused(tmp_path, monkeypatch, returned):
    name = f"guards_{'dict' if returned[0] == '{' else 'text'}"
    (tmp_path / f"{name}.py").write_text(f"def score(completions): return {returned}\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = make({"name": "a", "model": "m", "adapter": "a", "task": "t.jsonl", "reward": f"{name}:score"})
    rows = [Row("p", "a", {}, None, f"t.jsonl:{i}") for i in (1, 2)]
    with pytest.raises(UserError, match="needs a list with a number for each completion"):
        load_reward(config).score(rows, ["x", "y"])


@pytest.mark.parametrize("name", ["a\nb", "a\x00", "\udcff", ".a", "a/b", ""])
def test_names_are_plain(name):
    with pytest.raises(UserError, match="config: name = "):
        make({"name": name, "model": "m", "adapter": "a", "task": "t.jsonl"})


def test_export_touches_nothing_but_its_folder(tmp_path, warm_start):
    from essa_mpi.results import export
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "notes.txt").write_text("precious")
    config = make({"name": "a", "model": "m", "adapter": "a", "task": "t.jsonl"})
    export(config, "no run", str(warm_start), str(tmp_path / "out"), merged=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.tmp"]
    assert (tmp_path / "out.tmp" / "notes.txt").read_text() == "precious"
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["peft_type"] == "LORA"


@pytest.mark.parametrize("what", ["adapter", "rows", "column", "checkpoints"])
def test_resume_refuses_changed_inputs(what, mpirun, tmp_path):
    """The deterministic loop on a tiny model: two generations, then something changes under the run."""
    write_run(tmp_path, generations=2)
    script = Path(__file__).parent / "deterministic_run.py"
    assert mpirun(1, script, "config.toml", cwd=tmp_path).rc == 0
    if what == "checkpoints":
        for path in (tmp_path / "runs/run/checkpoints").iterdir():
            path.unlink()
    elif what in ("rows", "column"):
        path = tmp_path / "rows.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = rows[::-1] if what == "rows" else [*rows[:-1], {**rows[-1], "seen by a reward": 1}]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        [weights] = (p for p in tmp_path.rglob("adapter_model.safetensors") if "runs" not in p.parts)
        save_file({k: 2 * v for k, v in load_file(weights).items()}, weights)
    outcome = mpirun(1, script, "config.toml", "--resume", "--set", "generations=3", cwd=tmp_path)
    assert outcome.rc == 2
    says = {"adapter": "the adapter", "rows": "the rows of", "column": "the rows of",
            "checkpoints": "a history but no checkpoint"}[what]
    assert says in outcome.stderr and "--resume: " in outcome.stderr
