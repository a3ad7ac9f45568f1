"""The run folder: nothing is lost, nothing is half-written."""

import contextlib
import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import h5py
import numpy as np
import pytest

from essa_mpi import files, provenance as origin, runfile
from essa_mpi.config import UserError
from essa_mpi.files import JsonLines, read_json_lines, write_atomically, write_json
from essa_mpi.provenance import hash_model, provenance
from essa_mpi.runfile import (
    History, RunFolder, history_schema, load_checkpoint, read_history, save_checkpoint,
)


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create("run", "seed = 1\n", root=tmp_path)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def groups_of(generation):
    """A checkpoint's arrays, different for each generation; 400 kB, so that they span several chunks."""
    return {"search": {"mean": np.random.default_rng(generation).normal(size=50_000)},
            "history": {"generation": np.arange(generation), "times/seconds": np.ones(generation)}}


def save(folder, *generations, keep=2):
    for generation in generations:
        path, _ = save_checkpoint(folder, generation, groups_of(generation), {"seed": 1}, keep)
    return path


def names(folder):
    return sorted(os.listdir(folder.checkpoints))


def assert_holds(checkpoint, generation):
    assert checkpoint.generation == generation
    for group, arrays in groups_of(generation).items():
        assert checkpoint.groups[group].keys() == arrays.keys()
        assert all(same_bits(checkpoint.groups[group][name], arrays[name]) for name in arrays)


# Checkpoints: what comes back.

def test_a_checkpoint_comes_back_bit_by_bit(folder):
    groups = {
        "search": {
            "odd floats": np.array([np.nan, -np.nan, np.inf, -0.0, 5e-324, 0.1]),
            "nan payload": np.array([0x7FF8_0000_0000_1234], np.uint64).view(np.float64),
            "int64": np.array([-2**63, 2**63 - 1, 2**53 + 1]),
            "uint64": np.array([2**64 - 1], np.uint64),
            "matrix": np.random.default_rng(0).normal(size=(70, 50)),
            "transposed": np.arange(12.0).reshape(3, 4).T,
            "float32": np.float32([0.1]), "flags": np.array([True, False]),
            "scalar": np.array(3), "text": np.array(b"ab", "S5"), "float": 0.25, "no rows": np.zeros((0, 96)),
            "hosts": np.array([b"a", b"node17"]),
        },
        "history": {"generation": np.arange(3), "times/seconds": np.ones(3)},
        "nothing": {},
    }
    attributes = {"text": "a = 1\n" * 50_000, "none": "", "umlaut": "ü", "seed": 2**63 - 1, "sigma": 0.1, "on": True,
                  "vector": np.arange(3)}
    path, nbytes = save_checkpoint(folder, 12, groups, attributes, keep=2)
    assert path == folder.checkpoints / "generation_000012.h5" and path.stat().st_size == nbytes

    checkpoint = load_checkpoint(RunFolder.open(folder.path))
    assert (checkpoint.path, checkpoint.generation, checkpoint.notes) == (path, 12, [])
    assert checkpoint.groups.keys() == groups.keys()
    for group, arrays in groups.items():
        assert checkpoint.groups[group].keys() == arrays.keys()
        for name, array in arrays.items():
            assert same_bits(checkpoint.groups[group][name], np.asarray(array)), name
    assert np.array_equal(checkpoint.attributes.pop("vector"), attributes.pop("vector"))
    assert checkpoint.attributes == attributes | {"schema": runfile.SCHEMA, "generation": 12}
    assert type(checkpoint.attributes["seed"]) is int and checkpoint.attributes["on"] is True


def test_other_programs_can_read_a_checkpoint(folder):
    path = save(folder, 3)
    with h5py.File(path, "r", locking="best-effort") as file:
        assert file["search/mean"].fletcher32
        assert np.array_equal(file["search/mean"], groups_of(3)["search"]["mean"])


def test_without_checkpoints_there_is_nothing_to_load(folder):
    assert load_checkpoint(folder) is None
    os.rmdir(folder.checkpoints)
    assert load_checkpoint(folder) is None
    save(folder, 0)
    assert load_checkpoint(folder).generation == 0


# Checkpoints: damage.

def flip(path, position, bit=0):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("where", ["data", "metadata", "checksum", "padding", "last byte"])
def test_a_flipped_bit_falls_back_with_a_note(folder, where):
    newest = save(folder, 4, 5)
    data = newest.read_bytes()
    mean = groups_of(5)["search"]["mean"].tobytes()
    flip(newest, {"data": data.index(mean[:64]) + 9, "metadata": data.index(b"mean\0"), "checksum": 30,
                  "padding": 400, "last byte": -1}[where], bit=3)
    checkpoint = load_checkpoint(folder)
    assert_holds(checkpoint, 4)
    assert len(checkpoint.notes) == 1 and str(newest) in checkpoint.notes[0] and "checksum" in checkpoint.notes[0]


def test_any_flipped_bit_is_seen(folder):
    """HDF5 alone would not see most of these: its checksums do not cover its own structures."""
    save(folder, 4)
    newest, _ = save_checkpoint(folder, 5, {"a": {"b": np.arange(8)}}, {}, keep=2)
    size = newest.stat().st_size
    for position in random.Random(0).sample(range(size), 200):
        flip(newest, position)
        assert load_checkpoint(folder).generation == 4
        flip(newest, position)
    assert load_checkpoint(folder).generation == 5


@pytest.mark.parametrize("length", [0, 100, 512, 5000, -1])
def test_a_truncated_checkpoint_falls_back_with_a_note(folder, length):
    newest = save(folder, 4, 5)
    os.truncate(newest, length % newest.stat().st_size)
    checkpoint = load_checkpoint(folder)
    assert_holds(checkpoint, 4)
    assert len(checkpoint.notes) == 1


def test_a_foreign_and_a_renamed_file_are_skipped(folder):
    save(folder, 3, 4)
    with h5py.File(folder.checkpoints / "generation_000009.h5", "w") as file:
        file["a"] = 1
    os.rename(folder.checkpoints / "generation_000004.h5", folder.checkpoints / "generation_000008.h5")
    checkpoint = load_checkpoint(folder)
    assert_holds(checkpoint, 3)
    assert ["no checksum" in note for note in checkpoint.notes] == [True, False]
    assert "holds generation 4" in checkpoint.notes[1]


def test_no_valid_checkpoint_is_an_error_that_names_them(folder):
    save(folder, 4, 5)
    for name in names(folder):
        flip(folder.checkpoints / name, 700)
    with pytest.raises(UserError, match=r"(?s)generation_000005.*generation_000004") as error:
        load_checkpoint(folder)
    assert "\n" not in str(error.value)


def test_a_newer_schema_is_refused_not_passed_by(folder, monkeypatch):
    save(folder, 4)
    history = History({"generation": ((), np.int64)})
    monkeypatch.setattr(runfile, "SCHEMA", 2)
    save_checkpoint(folder, 5, {}, {"package_version": "9.9"}, keep=2)
    history.write(folder.history, {"package_version": "9.9"})
    monkeypatch.undo()
    with pytest.raises(UserError, match="generation_000005.h5 has schema 2, written by essa_mpi 9.9"):
        load_checkpoint(folder)
    with pytest.raises(UserError, match="history.h5 has schema 2"):
        read_history(folder.history)


# Checkpoints: which ones stay.

def test_the_newest_stay_and_strays_go(folder):
    stray = folder.checkpoints / "generation_000009.h5.tmp"
    stray.write_bytes(b"half")
    (folder.checkpoints / "notes.txt").write_text("the user's own")
    save(folder, 1, 2, 3, 10, keep=3)
    assert names(folder) == ["generation_000002.h5", "generation_000003.h5", "generation_000010.h5", "notes.txt"]
    with pytest.raises(ValueError, match="keep = 1"):
        save(folder, 11, keep=1)


def test_damaged_checkpoints_do_not_count_as_kept(folder):
    save(folder, 1, 2, 3, 4, keep=4)
    for generation in (2, 3, 4):
        flip(folder.checkpoints / f"generation_{generation:06d}.h5", 700)
    resumed = RunFolder.open(folder.path)
    assert load_checkpoint(resumed).generation == 1
    save(resumed, 3)  # a resume with another checkpoint_every
    assert names(resumed) == ["generation_000001.h5", "generation_000003.h5"]
    assert_holds(load_checkpoint(resumed), 3)


def test_an_intact_newer_checkpoint_is_never_removed(folder):
    save(folder, 7, 8, 9)
    save(RunFolder.open(folder.path), 1, 2, 3)
    assert [int(name[11:17]) for name in names(folder)] == [2, 3, 8, 9]


def test_a_checkpoint_that_cannot_be_read_now_is_not_removed(folder, monkeypatch):
    save(folder, 1, 2)
    read_bytes = Path.read_bytes

    def refuse(path):
        if path.name == "generation_000002.h5":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    resumed = RunFolder.open(folder.path)
    checkpoint = load_checkpoint(resumed)
    assert checkpoint.generation == 1 and "cannot be read: Input/output error" in checkpoint.notes[0]
    save(resumed, 3)
    assert [int(name[11:17]) for name in names(folder)] == [1, 2, 3]


# Writing: the order of things, and what happens when it fails.

def test_synced_and_verified_before_renamed(tmp_path, monkeypatch):
    order = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor):
        order.append(f"fsync {os.path.basename(os.readlink(f'/proc/self/fd/{descriptor}'))}")
        real_fsync(descriptor)

    def replace(old, new):
        order.append("rename")
        real_replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_atomically(tmp_path / "file", lambda temp: temp.write_text("new"),
                     lambda temp: order.append(f"verify {temp.name}"))
    assert order == ["fsync file.tmp", "verify file.tmp", "rename", f"fsync {tmp_path.name}"]
    assert (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize("fails", ["write", "verify"])
@pytest.mark.parametrize("with_", [RuntimeError, KeyboardInterrupt])
def test_a_failed_write_leaves_the_old_file(tmp_path, fails, with_):
    path = tmp_path / "file"
    path.write_text("old")

    def write(temp):
        temp.write_text("new")
        if fails == "write":
            raise with_

    def verify(temp):
        raise with_

    with pytest.raises(with_):
        write_atomically(path, write, verify)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_a_checkpoint_that_reads_back_differently_gets_no_name(folder, monkeypatch):
    save(folder, 4, 5)
    real_fsync = files._fsync

    def lose_a_bit(path):
        if path.name.endswith(".tmp"):
            flip(path, 5000)
        real_fsync(path)

    monkeypatch.setattr(files, "_fsync", lose_a_bit)
    with pytest.raises(UserError, match="generation_000006.h5 was not written"):
        save(folder, 6)
    assert names(folder) == ["generation_000004.h5", "generation_000005.h5"]
    assert_holds(load_checkpoint(folder), 5)


@pytest.fixture
def full_disk():
    """A file cannot grow beyond 100 kB: the system refuses as it does when the disk is full."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_full_disk_loses_nothing(folder, full_disk):
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
    save(folder, 4, 5)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    with pytest.raises(UserError, match="generation_000006.h5 cannot be written: File too large"):
        save(folder, 6)
    assert names(folder) == ["generation_000004.h5", "generation_000005.h5"]
    assert_holds(load_checkpoint(folder), 5)


def test_a_full_disk_leaves_whole_lines(tmp_path, full_disk):
    log = JsonLines(tmp_path / "log.jsonl")
    log.append({"generation": 0})
    with pytest.raises(UserError, match="log.jsonl cannot be written: File too large"):
        log.append({"text": "x" * 200_000})
    log.append({"generation": 1})
    assert read_json_lines(log.path) == [{"generation": 0}, {"generation": 1}]


@contextlib.contextmanager
def closed(path, mode):
    """`path` with fewer permissions, and not as root, whom that would not stop."""
    root = os.geteuid() == 0
    path.chmod(mode)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        path.chmod(0o755)


def test_a_read_only_folder_is_named(folder, tmp_path):
    save(folder, 1)
    with closed(folder.checkpoints, 0o555):
        with pytest.raises(UserError, match="checkpoints.* cannot be (written|made): Permission denied"):
            save(folder, 2)
    assert_holds(load_checkpoint(folder), 1)
    with closed(tmp_path, 0o555):
        with pytest.raises(UserError, match="other cannot be made: Permission denied"):
            RunFolder.create("other", "", root=tmp_path)


def test_an_unreadable_folder_is_not_taken_for_an_empty_one(folder):
    save(folder, 1)
    with closed(folder.checkpoints, 0o000):
        with pytest.raises(UserError, match="checkpoints cannot be read: Permission denied"):
            load_checkpoint(folder)


def test_a_root_that_is_no_folder_is_named(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError, match=r"runs/a cannot be made: (Not a directory|File exists)"):
        RunFolder.create("a", "", root=tmp_path / "runs")


# Kill -9.

def evolve(folder, last, report):
    """A run as the generation loop writes it, resumed if it was killed; writes each finished generation to `report`."""
    checkpoint = load_checkpoint(folder)
    schema = history_schema(4)
    history, metrics, samples = History(schema), JsonLines(folder.metrics), JsonLines(folder.samples)
    if checkpoint:
        history = History.from_arrays(schema, checkpoint.groups["history"])
    metrics.truncate(checkpoint.attributes["metrics"] if checkpoint else 0)
    samples.truncate(checkpoint.attributes["samples"] if checkpoint else 0)
    for generation in range(len(history), last):
        rng = np.random.default_rng(generation)
        record = {name: rng.normal(size=shape) if dtype is np.float64 else rng.integers(-2**63, 2**63 - 1)
                  for name, (shape, dtype) in schema.items() if name != "generation"}
        record |= {"validation": np.nan if generation % 2 else 0.5, "times/unix": time.time()}
        history.append(generation, **record)
        metrics.append({"generation": generation, "fitness": record["fitness"], "validation": record["validation"]})
        for _ in range(3):
            samples.append({"generation": generation, "completion": "x" * 3000})
        groups = {"history": history.arrays(), "search": groups_of(generation)["search"]}
        save_checkpoint(folder, generation, groups, {"metrics": metrics.offset, "samples": samples.offset}, keep=2)
        history.write(folder.history, {})
        os.write(report, b"%d\n" % generation)


def start(folder, last):
    """`evolve` in another process: (its id, what it reports)."""
    reader, writer = os.pipe()
    if not (process := os.fork()):
        try:
            evolve(folder, last, writer)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # never back into pytest
    os.close(writer)
    return process, open(reader, "rb")


def test_kill_9_at_random_moments(tmp_path, monkeypatch):
    """Killed ten times, each time going on from where it was: the records are those of a run never killed."""
    # fsync is for power cuts, the system keeps what a killed process wrote; it
    # takes nearly all the time, and the kills should hit the writing.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    killed = RunFolder.create("killed", "", root=tmp_path)
    done, pace = -1, 0.02
    for attempt in range(10):
        began = time.monotonic()
        process, report = start(killed, last=1000)
        reported = [report.readline() for _ in range(attempt % 4)]
        if reported:
            pace = (time.monotonic() - began) / len(reported)
        time.sleep(random.uniform(0, pace))  # anywhere within the next generation, however slow the machine
        os.kill(process, signal.SIGKILL)
        reported += report.readlines()  # a pipe keeps what was written before the kill
        report.close()
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
        done = max([done, *map(int, reported)])

        checkpoint = load_checkpoint(killed)
        assert (checkpoint.generation if checkpoint else -1) >= done
        if checkpoint:
            assert checkpoint.notes == []
            assert same_bits(checkpoint.groups["search"]["mean"], groups_of(checkpoint.generation)["search"]["mean"])
            assert len(checkpoint.groups["history"]["generation"]) == checkpoint.generation + 1
        if done >= 0:
            assert len(read_history(killed.history)[0]["generation"]) > done

    whole = RunFolder.create("whole", "", root=tmp_path)
    last = checkpoint.generation + 3
    for folder in (killed, whole):
        process, report = start(folder, last)
        report.readlines()
        report.close()
        assert os.waitpid(process, 0)[1] == 0
    (ours, _), (theirs, _) = read_history(killed.history), read_history(whole.history)
    assert ours.keys() == theirs.keys() and len(ours["generation"]) == last > 10
    assert all(same_bits(ours[name], theirs[name]) for name in ours if not name.startswith("times/"))
    assert killed.metrics.read_bytes() == whole.metrics.read_bytes()
    assert killed.samples.read_bytes() == whole.samples.read_bytes()
    assert [record["generation"] for record in read_json_lines(killed.metrics)] == list(range(last))
    assert names(killed) == names(whole) and len(names(killed)) == 2


# The run folder.

def test_an_existing_folder_is_renamed_never_overwritten(tmp_path):
    first = RunFolder.create("run", "run = 0\n", root=tmp_path / "runs")
    assert first.note is None and first.config.read_text() == "run = 0\n"
    save(first, 1)
    (tmp_path / "runs/run.2").mkdir()
    (tmp_path / "runs/run.2/kept").write_text("")
    for run, old in ((1, "run.1"), (2, "run.3")):
        again = RunFolder.create("run", f"run = {run}\n", root=tmp_path / "runs")
        assert again.path == tmp_path / "runs/run"
        assert again.note == f"{again.path} was there already: renamed to {again.path.with_name(old)}"
        assert load_checkpoint(again) is None
    texts = {name: (tmp_path / "runs" / name / "config.toml").read_text() for name in ("run.1", "run.3", "run")}
    assert texts == {"run.1": "run = 0\n", "run.3": "run = 1\n", "run": "run = 2\n"}
    assert sorted(os.listdir(tmp_path / "runs")) == ["run", "run.1", "run.2", "run.3"]
    assert os.listdir(tmp_path / "runs/run.2") == ["kept"]
    assert_holds(load_checkpoint(RunFolder.open(tmp_path / "runs/run.1")), 1)


def test_a_failed_creation_does_not_move_the_old_folder(tmp_path, full_disk):
    RunFolder.create("run", "old", root=tmp_path)
    with pytest.raises(UserError, match="config.toml cannot be written: File too large"):
        RunFolder.create("run", "x" * 200_000, root=tmp_path)
    assert RunFolder.open(tmp_path / "run").config.read_text() == "old"
    assert RunFolder.create("run", "new", root=tmp_path).config.read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["run", "run.1"]


def test_the_config_is_stored_byte_by_byte(tmp_path):
    text = "a = 'ü'\r\nb = 1\n"
    assert RunFolder.create("run", text, root=tmp_path).config.read_bytes() == text.encode()


def test_open_says_what_is_missing(tmp_path, folder):
    assert RunFolder.open(str(folder.path)).summary == folder.path / "summary.json"
    with pytest.raises(UserError, match="run folder .*none cannot be opened: No such file"):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(UserError, match="is not a run folder: it has no config.toml"):
        RunFolder.open(tmp_path)


# History.

SCHEMA = {"generation": ((), np.int64), "fitness": ((3,), np.float64), "digest": ((), np.int64),
          "times/seconds": ((), np.float64)}
RECORD = {"fitness": [1.0, np.nan, -0.0], "digest": -2**63, "times/seconds": 1.5}


def test_history_comes_back_bit_by_bit(tmp_path):
    history = History(SCHEMA)
    fitness = np.array(RECORD["fitness"])
    for generation in range(3):
        history.append(generation, **RECORD | {"fitness": fitness})
    fitness[:] = 7  # the history must not see this
    nbytes = history.write(tmp_path / "history.h5", {"seed": 3})
    arrays, attributes = read_history(tmp_path / "history.h5")
    assert (tmp_path / "history.h5").stat().st_size == nbytes
    assert attributes == {"seed": 3, "schema": runfile.SCHEMA}
    assert arrays.keys() == SCHEMA.keys()
    assert same_bits(arrays["fitness"], np.array([RECORD["fitness"]] * 3))
    assert same_bits(arrays["digest"], np.full(3, -2**63))

    resumed = History.from_arrays(SCHEMA, arrays)
    resumed.append(3, **RECORD)
    assert len(resumed) == 4 and len(history) == 3
    assert same_bits(resumed.arrays()["fitness"], np.array([RECORD["fitness"]] * 4))


def test_an_empty_history_comes_back(tmp_path):
    History(history_schema(96)).write(tmp_path / "history.h5", {})
    arrays, _ = read_history(tmp_path / "history.h5")
    assert arrays["fitness"].shape == (0, 96) and arrays["digest"].dtype == np.int64
    assert len(History.from_arrays(history_schema(96), arrays)) == 0


def test_times_are_apart(tmp_path):
    History(history_schema(2)).write(tmp_path / "history.h5", {})
    with h5py.File(tmp_path / "history.h5") as file:
        assert set(file["times"]) == {"unix", "seconds", "generate", "place", "score", "wait", "allgather", "update",
                                      "checkpoint"}


@pytest.mark.parametrize("generation, change, message", [
    (1, {}, "needs generation 0"),
    (0, {"fitness": [1.0, 2.0]}, r"fitness is float64 of shape \(2,\)"),
    (0, {"fitness": np.ones((1, 3))}, "fitness"),
    (0, {"digest": 1.0}, "digest is float64"),
    (0, {"digest": np.uint64(1)}, "digest is uint64"),
    (0, {"digest": 2**63}, "digest is uint64"),
    (0, {"digest": None}, "digest is object"),
    (0, {"other": 1}, r"unknown: \['other'\]"),
])
def test_history_is_strict(generation, change, message):
    history = History(SCHEMA)
    with pytest.raises(ValueError, match=message):
        history.append(generation, **RECORD | change)
    assert all(len(array) == 0 for array in history.arrays().values())
    history.append(0, **RECORD)
    with pytest.raises(ValueError, match="needs generation 1"):
        history.append(0, **RECORD)
    with pytest.raises(ValueError, match="missing"):
        history.append(1, fitness=RECORD["fitness"])


def test_history_from_arrays_is_strict():
    history = History(SCHEMA)
    history.append(0, **RECORD)
    good = history.arrays()
    for change in ({"fitness": np.ones((1, 4))}, {"fitness": np.ones((2, 3))}, {"digest": np.ones(1)},
                   {"generation": np.array([1])}, {"other": np.ones(1)}):
        with pytest.raises(ValueError):
            History.from_arrays(SCHEMA, good | change)
    with pytest.raises(ValueError):
        History.from_arrays(SCHEMA, {"generation": good["generation"]})


def test_a_damaged_history_is_an_error(tmp_path):
    path = tmp_path / "history.h5"
    with pytest.raises(UserError, match="history.h5 cannot be read: No such file"):
        read_history(path)
    History(SCHEMA).write(path, {})
    flip(path, 1000)
    with pytest.raises(UserError, match="history.h5 does not match its checksum"):
        read_history(path)


# Logs.

def test_json_lines(tmp_path):
    log = JsonLines(tmp_path / "log.jsonl")
    log.append({"generation": np.int64(3), "fitness": np.array([0.5, np.nan]), "sigma": np.float64("inf"),
                "flag": np.bool_(True), "text": "two\nlines, ü \ud800 \u2028"})
    assert log.offset == log.path.stat().st_size
    text = log.path.read_text()
    assert len(text.splitlines()) == 1
    assert json.loads(text) == {"generation": 3, "fitness": [0.5, None], "sigma": None, "flag": True,
                                "text": "two\nlines, ü \ud800 \u2028"}


def test_json_lines_truncate(tmp_path):
    log = JsonLines(tmp_path / "log.jsonl")
    offsets = []
    for generation in range(4):
        log.append({"generation": generation})
        offsets.append(log.offset)
    log.close()
    log = JsonLines(log.path)
    log.truncate(offsets[1])
    log.append({"generation": 2, "again": True})
    assert read_json_lines(log.path) == [{"generation": 0}, {"generation": 1}, {"generation": 2, "again": True}]
    for offset in (log.offset + 1, offsets[0] - 1):
        with pytest.raises(UserError, match="log.jsonl does not go with the checkpoint"):
            log.truncate(offset)
    log.truncate(0)
    assert log.offset == 0 and log.path.read_bytes() == b""


@pytest.mark.parametrize("tail", [b'{"generation": 1', b"x" * (3 * 2**20)])
@pytest.mark.parametrize("before", [b"", b'{"generation": 0}\n'])
def test_a_half_written_last_line_is_cut(tmp_path, before, tail):
    path = tmp_path / "log.jsonl"
    path.write_bytes(before + tail)
    assert len(read_json_lines(path)) == len(before.splitlines())
    log = JsonLines(path)
    assert log.offset == len(before)
    log.append({"generation": 1})
    assert path.read_bytes() == before + b'{"generation": 1}\n'


def test_write_json(tmp_path):
    write_json(tmp_path / "summary.json", {"best": np.float64(0.5), "list": (1, float("nan"))})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"best": 0.5, "list": [1, None]}
    with pytest.raises(TypeError):
        write_json(tmp_path / "summary.json", {"best": object()})
    assert json.loads((tmp_path / "summary.json").read_text())["best"] == 0.5
    assert os.listdir(tmp_path) == ["summary.json"]


# Where a file comes from.

def test_provenance(folder, monkeypatch):
    for key in origin._JOB_IDS:
        monkeypatch.delenv(key, raising=False)
    assert "job_id" not in provenance("")
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    monkeypatch.setenv("FLUX_JOB_ID", "f4")
    found = provenance("seed = 1\n", ranks=4, parent_checkpoint=None)
    assert found["config"] == "seed = 1\n" and len(found["config_hash"]) == 64
    assert found["job_id"] == "SLURM_JOB_ID=123 FLUX_JOB_ID=f4"
    assert json.loads(found["libraries"])["numpy"] == np.__version__
    assert found["ranks"] == 4 and "parent_checkpoint" not in found
    save_checkpoint(folder, 1, {}, found, keep=2)
    assert load_checkpoint(folder).attributes.items() >= found.items()


def test_runfile_imports_nothing_heavy():
    code = ("import sys, essa_mpi.runfile, essa_mpi.provenance as p; p.provenance('');"
            "print([name for name in ('mpi4py', 'torch', 'vllm') if name in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=os.path.dirname(os.path.dirname(__file__))).stdout == "[]\n"


def test_hash_model(tmp_path):
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    with pytest.raises(UserError, match="holds no weights"):
        hash_model(tmp_path)
    with pytest.raises(UserError, match="model folder .*none cannot be read"):
        hash_model(tmp_path / "none")
    data = bytearray(5 * 2**20)
    seen = set()

    def different():
        weights.write_bytes(data)
        seen.add(hash_model(tmp_path))
        return len(seen)

    config.write_text("{}")
    assert different() == 1
    (tmp_path / "README.md").write_text("not the model")
    assert different() == 1
    data[5] = 1
    assert different() == 2
    data[-5] = 1
    assert different() == 3
    data.append(0)
    assert different() == 4
    config.write_text("{ }")
    assert different() == 5
    os.rename(weights, tmp_path / "other.safetensors")
    assert different() == 6
    weights.unlink()
    assert hash_model(tmp_path) not in seen
