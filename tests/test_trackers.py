"""Copies of metrics.jsonl for TensorBoard and Weights & Biases: read back from their files, and what fails in them."""

import json
import math
import os
import struct
import sys
import threading
import types

import numpy as np
import psutil
import pytest

from conftest import ROOT, refusal
from deterministic_run import write_run
from essa_mpi import config as configuration
from essa_mpi import trackers
from essa_mpi.config import check_resumable
from essa_mpi.files import JsonLines, read_json_lines
from test_run_mpi import PATIENCE, SCRIPT, fault, run, sets, start, told, wait_for

BOTH = ["tensorboard", "wandb"]
KEYS = dict(generations=4, heldout_rows=3)


def make(**keys):
    return configuration.make({"name": "t", "model": "m", "adapter": "a", "task": "t.jsonl", **keys})


# -- reading them back -------------------------------------------------------------------------------

def events(folder, name="run") -> dict:
    """tag -> [(step, value)] of all there is to see in runs/<name>/tensorboard."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    found = EventAccumulator(str(folder / f"runs/{name}/tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def wandb_records(path):
    """The records of a .wandb file: blocks of 32 KiB of pieces, each a checksum, a length and first, middle or last."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at:at + 7])
        whole, at = whole + data[at + 7:at + 7 + length], at + 7 + length
        if kind in (1, 4):      # the whole of one, or its last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def offline(folder, name="run"):
    return sorted((folder / f"runs/{name}/wandb").glob("offline-run-*"))


def history_of(run_folder) -> dict:
    """tag -> [(step, value)] of an offline run's history, what wandb adds left out."""
    path, = run_folder.glob("*.wandb")
    found = {}
    for record in wandb_records(path):
        for item in record.history.item:
            tag = item.key or "/".join(item.nested_key)
            if not tag.startswith("_"):
                found.setdefault(tag, []).append((record.history.step.num, json.loads(item.value_json)))
    return found


def expected(folder, heldout=True, name="run") -> dict:
    """tag -> [(step, value)] as metrics.jsonl and summary.json have them."""
    found = {}
    lines = read_json_lines(folder / f"runs/{name}/metrics.jsonl")
    for line in lines:
        for key, value in {**line, **{f"seconds/{k}": v for k, v in line["seconds"].items()}}.items():
            if type(value) in (int, float):
                found.setdefault(key, []).append((line["generation"], value))
    if heldout:
        summary = json.loads((folder / f"runs/{name}/summary.json").read_text())
        for arm, score in summary["heldout"].items():
            if arm != "n":
                found[f"heldout/{arm}"] = [(len(lines), score["accuracy"])]
    return found


def single(series: dict) -> dict:
    """In float32, as TensorBoard keeps them."""
    return {tag: [(step, float(np.float32(value))) for step, value in points] for tag, points in series.items()}


# -- whole runs ----------------------------------------------------------------------------------------

def test_they_hold_what_metrics_jsonl_holds(mpirun, tmp_path):
    """On two ranks, of which one writes; offline, whatever the environment says; and the run ends."""
    pytest.importorskip("tensorboard"), pytest.importorskip("wandb")
    write_run(tmp_path, trackers=BOTH, **KEYS)
    env = {"WANDB_MODE": "disabled", "WANDB_DIR": str(tmp_path / "elsewhere"), "WANDB_PROJECT": "other"}
    job = mpirun.start(2, SCRIPT, "config.toml", cwd=tmp_path, env=env)
    outcome = job.wait(PATIENCE)
    assert outcome.rc == 0 and "warning: tracker" not in outcome.stdout and not outcome.stderr, outcome
    wanted = expected(tmp_path)
    assert {"mean_fitness", "seconds/total", "tokens", "heldout/base", "heldout/evolved"} <= wanted.keys()
    assert [step for step, _ in wanted["validation"]] == [0, 2]     # null in the others
    assert events(tmp_path) == single(wanted)
    assert len(list((tmp_path / "runs/run/tensorboard").iterdir())) == 1

    found, = offline(tmp_path)
    assert history_of(found) == wanted
    first = next(r.run for r in wandb_records(*found.glob("*.wandb")) if r.WhichOneof("record_type") == "run")
    assert (first.project, first.display_name) == ("essa_mpi", "run")
    config = {item.key: json.loads(item.value_json) for item in first.config.update}
    assert (config["population"], config["trackers"], config["sigma"]) == (7, BOTH, 0.3)
    assert not (tmp_path / "elsewhere").exists() and not (tmp_path / "wandb").exists()
    assert (tmp_path / "runs/run/summary.json").exists()


def test_a_resumed_run_shows_each_generation_once(mpirun, tmp_path):
    """A generation that is evolved again, and those before the trackers were asked for."""
    write_run(tmp_path, **KEYS)
    assert start(mpirun, 1, tmp_path, *fault("kill", at="after metrics", generation=1)).wait(PATIENCE).rc != 0
    more = sets(trackers=BOTH)
    outcome = start(mpirun, 2, tmp_path, "--resume", *more, *fault("kill", at="before checkpoint", generation=2))
    assert outcome.wait(PATIENCE).rc != 0
    assert [step for step, _ in events(tmp_path)["sigma"]] == [0, 1, 2]     # generation 2 is not in a checkpoint
    run(mpirun, 1, tmp_path, "--resume", *more)
    assert len(list((tmp_path / "runs/run/tensorboard").iterdir())) == 2
    assert events(tmp_path) == single(expected(tmp_path))
    assert history_of(offline(tmp_path)[-1]) == expected(tmp_path)
    # Further, past held-out scores that are then another's.
    run(mpirun, 1, tmp_path, "--resume", *more, *sets(generations=6))
    assert [step for step, _ in events(tmp_path)["heldout/evolved"]] == [6]
    assert events(tmp_path) == single(expected(tmp_path))


def test_a_tracker_that_cannot_start_is_told_and_left_out(mpirun, tmp_path):
    write_run(tmp_path, **KEYS)
    run(mpirun, 1, tmp_path, *sets(generations=2))
    (tmp_path / "runs/run/tensorboard").write_text("a file is in the way")
    outcome = run(mpirun, 2, tmp_path, "--resume", *sets(trackers=["tensorboard"]))
    assert outcome.stdout.count("warning: tracker tensorboard failed and is left out from here on") == 1
    assert len(read_json_lines(tmp_path / "runs/run/metrics.jsonl")) == 4
    assert (tmp_path / "runs/run/summary.json").exists()


def test_a_run_outlives_the_service_of_wandb(mpirun, tmp_path):
    """Its process is killed in the middle; TensorBoard goes on."""
    pytest.importorskip("wandb")
    write_run(tmp_path, trackers=BOTH, **{**KEYS, "generations": 8})
    job = start(mpirun, 2, tmp_path, "--sleep", 1.0)
    wait_for(job, "generation 2/8")
    service, = [p for p in psutil.Process(job.pid).children(recursive=True) if p.name() == "wandb-core"]
    service.kill()
    outcome = job.wait(PATIENCE)
    assert outcome.rc == 0 and not outcome.stderr, outcome
    assert outcome.stdout.count("warning: tracker wandb failed and is left out") == 1
    assert events(tmp_path) == single(expected(tmp_path))


def test_a_run_that_fails_takes_the_service_of_wandb_with_it(mpirun, tmp_path):
    pytest.importorskip("wandb")
    write_run(tmp_path, trackers=["wandb"], **KEYS)
    job = start(mpirun, 2, tmp_path, "--sleep", 1.0, *fault("raise", rank=0, generation=2))
    wait_for(job, "generation 1/4")
    service, = [p for p in psutil.Process(job.pid).children(recursive=True) if p.name() == "wandb-core"]
    outcome = job.wait(PATIENCE)
    assert outcome.rc == 1 and "rank 0 on" in told(outcome)
    until_gone(service)


def until_gone(process, patience=30):
    """Ended; whoever inherits it may leave it a zombie."""
    try:
        process.wait(patience)
    except psutil.TimeoutExpired:
        assert process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        pass


# -- one at a time -----------------------------------------------------------------------------------

def test_what_is_a_scalar():
    record = {"a": 1, "b": np.float32(0.5), "none": None, "nan": math.nan, "inf": -math.inf, "text": "1", "list": [1],
              "yes": True, "n": np.int64(3), "in": {"c": 2.0, "deep": {"d": 4, "e": None}}}
    assert trackers.scalars(record) == {"a": 1.0, "b": 0.5, "n": 3.0, "in/c": 2.0, "in/deep/d": 4.0}


@pytest.mark.parametrize("names, says", [
    (["tensorbord"], "trackers = [\"tensorbord\"]: 'tensorbord' must be one of tensorboard, wandb"),
    (["wandb", ""], "trackers = [\"wandb\", \"\"]: '' must be one of tensorboard, wandb"),
    (["wandb", "tensorboard", "wandb"],
     "trackers = [\"wandb\", \"tensorboard\", \"wandb\"]: 'wandb' is there twice; name it once"),
    ("wandb", "trackers = \"wandb\": needs a list of strings"),
], ids=str)
def test_other_names_are_refused(names, says):
    assert refusal(lambda: make(trackers=names)) == f"config: {says}"


def test_a_run_is_resumed_with_other_trackers():
    check_resumable(make(), make(trackers=BOTH))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_package_is_refused_before_anything_is_read(mpirun, tmp_path, rank):
    """By rank 0; no other needs it. A folder of that name is no package."""
    write_run(tmp_path, trackers=["wandb"], **{**KEYS, "generations": 1})
    (tmp_path / "wandb").mkdir()
    (tmp_path / "sitecustomize.py").write_text("""
import importlib.metadata as metadata, os
version = metadata.version
def without(name):
    if name == "wandb" and os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == os.environ["LACKS_IT"]:
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = without
""")
    more = sets(model="nowhere") if rank == 0 else ()       # which would be refused too
    job = mpirun.start(2, SCRIPT, "config.toml", *more, cwd=tmp_path,
                       env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "LACKS_IT": rank})
    outcome = job.wait(PATIENCE)
    if rank == 0:
        assert outcome.rc == 2 and not (tmp_path / "runs/run").exists()
        assert told(outcome).startswith("essa_mpi: config: trackers = ['wandb']: not installed: wandb; python -m pip install "
                                        "wandb, or leave out what is missing")
    else:
        assert outcome.rc == 0 and offline(tmp_path), outcome


@pytest.mark.parametrize("said, mode", [(None, "offline"), ("disabled", "offline"), ("dryrun", "offline"),
                                        ("offline", "offline"), ("online", "online")])
def test_wandb_is_online_only_if_asked(monkeypatch, tmp_path, said, mode):
    asked = {}
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if said:
        monkeypatch.setenv("WANDB_MODE", said)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **keys: asked.update(keys), Settings=dict))
    trackers.Wandb(make(), tmp_path)
    assert asked["mode"] == mode and asked["project"] == "essa_mpi" and asked["dir"] == str(tmp_path)
    assert os.environ["WANDB_ERROR_REPORTING"] == ("false" if mode == "offline" else "true")


def test_the_hooks_that_end_a_job_stay(monkeypatch, tmp_path):
    def init(**keys):
        sys.exit = sys.excepthook = print
        raise ValueError("no")
    hooks = sys.exit, sys.excepthook
    for name in ("exit", "excepthook"):     # put back, whatever comes of it
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Settings=dict))
    with pytest.raises(ValueError):
        trackers.Wandb(make(), tmp_path)
    assert (sys.exit, sys.excepthook) == hooks


def test_a_failure_in_a_trackers_own_thread_is_the_trackers(monkeypatch, tmp_path):
    """TensorBoard writes in a thread, which a full disk ends; any other thread's exception still ends the job."""
    pytest.importorskip("tensorboard")
    from tensorboard.summary.writer.record_writer import RecordWriter
    said, ended, write = [], [], RecordWriter.write
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(args.exc_value))
    JsonLines(tmp_path / "metrics.jsonl").close()
    tracked = trackers.Trackers(make(trackers=["tensorboard"]), tmp_path, said.append)
    tracked.start([])
    tracked.write(0, {"x": 1.0}, 0.0)

    def full(self, data):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(RecordWriter, "write", full)
    for step in (1, 2, 3):
        tracked.write(step, {"x": 2.0, "y": 3.0}, 0.0)
    tracked.close()
    assert ended == [] and len(said) == 1 and said[0].startswith("warning: tracker tensorboard failed")
    assert said[0].endswith("OSError: [Errno 28] No space left on device")

    error = ValueError("another's")
    def other():
        raise error
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert ended == [error]
