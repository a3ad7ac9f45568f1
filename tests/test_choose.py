"""mode = "auto": which way of placing is taken, and why."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from adapters import make_adapter, make_model, shapes_of

from essa_mpi import config as configuration
from essa_mpi.choose import MERGED_MUST_GAIN, fastest, settle_mode
from essa_mpi.config import UserError, make


def test_the_slowest_rank_counts():
    mode, why = fastest([{"shared": 2.0, "slots": 1.0, "merged": 9.0}, {"shared": 2.0, "slots": 3.0, "merged": 9.0}])
    assert mode == "shared" and why == "shared 2.00 s; slots 3.00 s; merged 9.00 s"


def test_merged_must_be_clearly_faster():
    slightly = {"shared": 2.0, "slots": 3.0, "merged": 2.0 / MERGED_MUST_GAIN + 0.01}
    assert fastest([slightly])[0] == "shared" and "merged rounds candidates" in fastest([slightly])[1]
    mode, why = fastest([{**slightly, "merged": 2.0 / MERGED_MUST_GAIN - 0.01}])
    assert mode == "merged" and "rounds" not in why


def test_what_does_not_work_is_left_out_with_its_reason():
    mode, why = fastest([{"shared": 2.0, "slots": 1.0, "merged": "config: quantised"}, {"shared": 2.0, "slots": "broke", "merged": 1.0}])
    assert mode == "shared"
    assert why == "shared 2.00 s; slots does not work here: broke; merged does not work here: config: quantised"
    with pytest.raises(UserError, match="no mode works: shared does not work here: a"):
        fastest([{"shared": "a", "slots": "b", "merged": "c"}])


class Alone:
    """A world of one rank that keeps what is said."""

    rank, size = 0, 1

    def __init__(self):
        self.said, self.comm = [], SimpleNamespace(allgather=lambda mine: [mine])

    def say(self, line):
        self.said.append(line)

    def agree(self, error):
        if error:
            raise error


def test_a_named_mode_is_kept_and_a_resumed_run_keeps_what_it_chose():
    config = make({"name": "test", "model": "m", "adapter": "a", "task": "t", "mode": "merged"})
    assert settle_mode(Alone(), config, None, None) is config
    auto = make({"name": "test", "model": "m", "adapter": "a", "task": "t", "mode": "auto"})
    world = Alone()
    assert settle_mode(world, auto, None, {"attributes": {"mode": "slots"}}).mode == "slots"
    assert world.said == ["mode auto: slots, as when the run was started"]


def test_a_try_ends_with_its_rank(tmp_path):
    """However the rank ends; and one whose rank has gone before it could tell does not begin."""
    code = ("import os, subprocess, sys\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import os, time; from essa_mpi.process import die_with; "
            "die_with(os.getppid()); print(os.getpid(), flush=True); time.sleep(600)'], stdout=subprocess.PIPE, text=True)\n"
            "print(child.stdout.readline(), flush=True)\n"
            "os.kill(os.getpid(), 9)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    pid, end = int(done.stdout), time.monotonic() + 10
    while time.monotonic() < end and Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text()
    late = subprocess.run([sys.executable, "-c", "from essa_mpi.process import die_with; _die_with(1); print('began')"],
                          capture_output=True, text=True)
    assert late.returncode == 1 and "began" not in late.stdout


@pytest.mark.slow
def test_three_engines_are_tried(real_model, tmp_path):
    from transformers import AutoConfig
    model = make_model(tmp_path / "model", "llama", tokenizer=real_model)
    adapter = make_adapter(tmp_path / "adapter", shapes_of(AutoConfig.from_pretrained(model)), scale=0.2)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i} and {i}", "answer": str(2 * i)}) + "\n" for i in range(8)))
    config = make({"name": "test", "model": str(model), "adapter": str(adapter), "task": str(rows), "mode": "auto",
                   "chat": False, "population": 4, "batch": 4, "max_tokens": 4, "max_model_len": 64, "max_num_seqs": 8,
                   "kv_cache_gib": 0.1})
    (tmp_path / "logs").mkdir()
    # What the folder holds is what the run was started with; a resumed one may have been given room since.
    (tmp_path / "config.toml").write_text(configuration.dump(replace(config, kv_cache_gib=1e-5)))
    world = Alone()
    chosen = settle_mode(world, config, SimpleNamespace(path=tmp_path, config=tmp_path / "config.toml"), None).mode
    assert chosen in ("shared", "slots", "merged")
    assert world.said[-1].startswith(f"mode auto: {chosen} (shared ") and "does not work" not in world.said[-1]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        f"auto_{mode}_rank0000.log" for mode in ("merged", "shared", "slots")]
