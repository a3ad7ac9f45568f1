"""`grpo` on a real model with real engines on two ranks: train, be killed, resume, eval, export."""

import json
import os
import signal
import time

import numpy as np
import pytest

from essa_mpi.runfile import RunFolder, load_checkpoint, read_history

pytestmark = pytest.mark.slow

CONFIG = '''
name = "run"
model = "{model}"
adapter = "{adapter}"
task = "{rows}/train.jsonl"
validation_data = "{rows}/validation.jsonl"
heldout_data = "{rows}/heldout.jsonl"
heldout_rows = 8
validation_rows = 4
validation_every = 2
reward = "boxed"
max_tokens = 12
batch = 4
group = 4
generations = 4
temperature = 1.0
lr = 1e-3
warmup_steps = 1
max_model_len = 256
max_num_seqs = 32
kv_cache_gib = 0.25
dtype = "bfloat16"
samples_logged = 50
'''


@pytest.fixture(scope="module")
def files(real_model, warm_start):
    return {"model": real_model, "adapter": warm_start, "rows": warm_start.parent}


def test_lora_trained_killed_resumed_evaluated_exported(mpirun, files, tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG.format(**files))
    folder = RunFolder(tmp_path / "runs/run")
    job = mpirun.start(2, "grpo", "config.toml", cwd=tmp_path)
    deadline = time.monotonic() + 400
    while not list(folder.checkpoints.glob("generation_000002.h5")) and job.process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.kill(job.ranks()[1].pid, signal.SIGKILL)
    job.wait(60)
    before = load_checkpoint(folder)
    resumed = mpirun(2, "grpo", "config.toml", "--resume", cwd=tmp_path, timeout=400)
    assert resumed.rc == 0, resumed.stderr + resumed.stdout
    assert f"resuming runs/run at step {before.generation} of 4" in resumed.stdout

    history, attributes = read_history(folder.history)
    assert attributes["method"] == "GRPO" and history["generation"].tolist() == [0, 1, 2, 3]
    for name, values in before.groups["history"].items():       # what was there is there, bit by bit
        np.testing.assert_array_equal(values, history[name][:before.generation])
    assert np.isfinite(history["validation"]).tolist() == [True, False, True, False]
    trained = load_checkpoint(folder).groups["policy"]
    assert trained["steps"] == 4 and trained["cursor"] == 4 and trained["updates"] == 4
    parameters = len(trained["flat"])
    assert (history["bytes_reduced"] == 4 * (parameters + 3)).all() and (history["bytes_gathered"] < 2000).all()
    # The trainer's arithmetic is not the engine's, but both are bfloat16 of the same policy.
    assert (history["mismatch"] < 0.1).all() and (history["mismatch"] > 0).any()
    metrics = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [m["completions"] for m in metrics] == [16] * 4 and [m["generation"] for m in metrics] == [0, 1, 2, 3]
    samples = [json.loads(line) for line in folder.samples.read_text().splitlines()]
    assert {s["arm"] for s in samples} == {"policy"} and {s["reward"] for s in samples} <= {0.0, 1.0}
    summary = json.loads(folder.summary.read_text())
    assert set(summary["heldout"]) == {"n", "base", "warm_start", "trained"}
    assert f"a rank sent {4 * 4 * (parameters + 3) / 1e6:.3g} MB of gradients" in resumed.stdout

    other = mpirun(1, "run", "config.toml", "--resume", "--set", "search=sep", cwd=tmp_path, timeout=100)
    assert other.rc == 2 and "was started by `grpo`; continue it with that command" in other.stderr
    other = mpirun(1, "run", "runs/run/config.toml", "--resume", cwd=tmp_path, timeout=100)
    assert other.rc == 2 and "was started by `grpo`; continue it with that command" in other.stderr

    other = mpirun(1, "eval", "runs/run", "--set", "mode=merged", cwd=tmp_path, timeout=100)
    assert other.rc == 2 and "mode = 'merged': parameters = 'lora' changes what candidates share" in other.stderr
    assert "engines ready" not in other.stdout
    found = mpirun(2, "eval", "runs/run", "--json", "found.json", cwd=tmp_path, timeout=400)
    assert found.rc == 0, found.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["trained"]["accuracy"] == summary["heldout"]["trained"]["accuracy"] and not {"evolved", "sampled"} & set(found)
    exported = mpirun(1, "export", "runs/run", "--out", "out", cwd=tmp_path, timeout=100)
    assert exported.rc == 0, exported.stderr
    assert "trained with GRPO" in (tmp_path / "out/README.md").read_text()
    from essa_mpi.gradient.policy import Lora
    from essa_mpi.spectrum import Spectrum, read_adapter
    wanted = Lora(Spectrum.load(files["adapter"], 1.0)).factors(trained["flat"])
    for name, tensor in read_adapter(tmp_path / "out")[1].items():
        np.testing.assert_allclose(tensor, wanted[name], atol=1e-7)
    shown = mpirun(1, "show", "runs/run", cwd=tmp_path, timeout=100)
    assert shown.rc == 0 and "GRPO: batch 4 x 4 rollouts" in shown.stdout and "trained" in shown.stdout


def test_spectrum_with_all_that_can_be_asked(mpirun, files, tmp_path):
    """F-DAPO on the singular values, dynamic sampling, two updates of two epochs a step, divergence; and what eval makes of it."""
    (tmp_path / "config.toml").write_text(CONFIG.format(**files))
    words = [f"--set={key}" for key in ("parameters=spectrum", "loss=dapo", "focal_gamma=0.5", "dynamic_sampling=2", "kl=0.01",
                                        "mini_batch=2", "inner_epochs=2", "generations=2", "lr=0.05", "temperature=1.2")]
    outcome = mpirun(2, "grpo", "config.toml", *words, cwd=tmp_path, timeout=400)
    assert outcome.rc == 0, outcome.stderr + outcome.stdout
    assert "SVD-F-DAPO (gamma 0.5) on 480 singular values" in outcome.stdout
    history, _ = read_history(tmp_path / "runs/run/history.h5")
    assert (history["kl"][1] > 0) and (history["mismatch"] < 0.1).all()
    assert set(history["bytes_reduced"]) <= {0, 4 * 483 * 2, 4 * 483 * 4}
    found = mpirun(2, "eval", "runs/run", "--set", "temperature=0.0", "--json", "found.json", cwd=tmp_path, timeout=400)
    assert found.rc == 0, found.stderr
    summary = json.loads((tmp_path / "runs/run/summary.json").read_text())
    assert json.loads((tmp_path / "found.json").read_text())["trained"] == summary["heldout"]["trained"]
