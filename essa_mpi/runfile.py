"""The run folder: config, history, checkpoints, logs. Only rank 0 writes.

    runs/<name>/config.toml                          written once, when the folder is made
                history.h5                           one record a generation
                checkpoints/generation_000012.h5     what a resume needs
                metrics.jsonl  samples.jsonl         logs, one JSON object a line
                adapter/  summary.json               results

Every file but the two logs is replaced as a whole (`write_atomically`), so a
kill at any moment leaves the old file or the new one. The logs only grow; a
checkpoint stores their lengths, and a resume cuts them back to these.

HDF5 never touches the file system here. HDF5 images are built and parsed in
memory and go to and from the disk as plain bytes, because h5py cannot live
through a full disk (after a refused write it segfaults at exit, the reason
lost) nor reopen a file whose writer was killed. It also needs no HDF5 file
lock, which Lustre may not offer. The price is one copy of the file in rank 0's
memory.
"""

import contextlib
import fcntl
import hashlib
import io
import itertools
import os
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np

from . import __version__
from .config import UserError
from .files import fsync_folder, refusals, write_atomically

SCHEMA = 1  # of history and checkpoints: raise it when an older program could no longer read them


# The run folder.

class RunFolder:
    """The paths of one run. Make one with `create` (a new run) or `open` (resume, report)."""

    def __init__(self, path, note=None):
        self.path = Path(path)
        self.note = note       # one line for the user, or None
        self._intact = set()   # checkpoints this process has read back; pruning need not read them again

    config = property(lambda self: self.path / "config.toml")
    history = property(lambda self: self.path / "history.h5")
    checkpoints = property(lambda self: self.path / "checkpoints")
    metrics = property(lambda self: self.path / "metrics.jsonl")
    samples = property(lambda self: self.path / "samples.jsonl")
    adapter = property(lambda self: self.path / "adapter")
    summary = property(lambda self: self.path / "summary.json")

    @classmethod
    def create(cls, name: str, config_text: str, root="runs") -> "RunFolder":
        """A new folder <root>/<name> with config.toml and an empty checkpoints/.

        Whatever has that name already is renamed to <name>.1, .2, ..., the first
        that is free, and `note` says so. Raises UserError when the file system refuses.
        """
        path = Path(root) / name
        # Made under another name first: <root>/<name> is whole or absent, and a
        # full disk shows before the old run is moved. No run's name starts with a dot.
        temp = path.with_name(f".{name}.tmp")
        with refusals(path, "made"):
            shutil.rmtree(temp, ignore_errors=True)     # of a start that was killed here
            (temp / "checkpoints").mkdir(parents=True)
            write_atomically(temp / "config.toml", lambda file: file.write_bytes(config_text.encode()))
            note = None
            if os.path.lexists(path):
                old = next(old for n in itertools.count(1)
                           if not os.path.lexists(old := path.with_name(f"{name}.{n}")))
                os.rename(path, old)
                note = f"{path} was there already: renamed to {old}"
            os.rename(temp, path)
            fsync_folder(path.parent)
        return cls(path, note)

    @property
    def command(self) -> str:
        """Which command started it; "run" where config.toml does not say."""
        with refusals(self.config, "read"):
            first = self.config.read_text().partition("\n")[0]
        return first.removeprefix(STARTED) if first.startswith(STARTED) else "run"

    @classmethod
    def open(cls, path) -> "RunFolder":
        """The existing run folder `path`. Raises UserError if it is none."""
        folder = cls(path)
        with refusals(f"run folder {path}", "opened"):
            names = os.listdir(path)
        if "config.toml" not in names:
            raise UserError(f"{path} is not a run folder: it has no config.toml")
        return folder


def lock(name: str, root="runs", patience: float = 20.0):
    """Hold <root>/.<name>.lock for as long as the returned file is open: one live process a run name.

    Raises UserError if another process holds it, on this host or, where the file system knows of
    locks, on any other; for `patience` seconds, since the ranks of a run that was just killed may take
    a moment to go. Without such locks nothing is held.
    """
    path = Path(root) / f".{name}.lock"
    with refusals(path, "made"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a")
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(f"{Path(root) / name} is being written by another run of that name that is still "
                                f"alive; wait for it, end it, or choose another name") from None
            time.sleep(0.2)
        except OSError:
            return file     # a file system without locks


# HDF5 files with a checksum. fletcher32 sees a flipped bit in the data but not in
# HDF5's own structures, so the first 512 bytes, which HDF5 leaves to the user (its
# "user block"), hold a SHA-256 of all the others: one file, one rename, no sidecar.

_BLOCK = 512
_MARK = "essa_mpi sha256 "
STARTED = "# started by: python -m essa_mpi "      # the first line of config.toml


class _Damaged(Exception):
    """Why a file cannot be trusted."""


class _Unreadable(_Damaged):
    """The file system does not hand it out, perhaps only for now."""


def _seal(body) -> bytes:
    return f"{_MARK}{hashlib.sha256(body).hexdigest()}".encode().ljust(_BLOCK, b"\n")


def _h5_image(groups, attributes) -> memoryview:
    image = io.BytesIO()
    with h5py.File(image, "w", userblock_size=_BLOCK) as file:
        for group, arrays in groups.items():
            parent = file.require_group(group)
            for name, array in arrays.items():
                # HDF5 checksums chunks, and a scalar or an empty dataset has none.
                parent.create_dataset(name, data=array, fletcher32=array.ndim > 0 and array.size > 0)
        file.attrs.update(attributes)
    data = image.getbuffer()
    data[:_BLOCK] = _seal(data[_BLOCK:])
    return data


def _arrays(group) -> dict:
    """Every dataset below an h5py group, by its path within the group."""
    arrays = {}
    group.visititems(lambda name, item: arrays.update({name: item[...]}) if isinstance(item, h5py.Dataset) else None)
    return arrays


def _attributes(file) -> dict:
    return {key: value.item() if isinstance(value, np.generic) else value for key, value in file.attrs.items()}


def _open_h5(path) -> h5py.File:
    """A sealed HDF5 file, read into memory. Raises _Damaged or _Unreadable."""
    try:
        data = Path(path).read_bytes()
        if not data.startswith(_MARK.encode()):
            raise _Damaged(f"has no checksum in its first bytes ({len(data)} bytes)")
        if data[:_BLOCK] != _seal(memoryview(data)[_BLOCK:]):
            raise _Damaged(f"does not match its checksum ({len(data)} bytes)")
        return h5py.File(io.BytesIO(data), "r")
    except OSError as error:
        raise _Unreadable(f"cannot be read: {error.strerror or error}") from error


def _refuse_newer(path, file):
    schema = int(file.attrs["schema"])
    if schema > SCHEMA:
        raise UserError(f"{path} has schema {schema}, written by essa_mpi {file.attrs.get('package_version', '?')}; "
                        f"this is essa_mpi {__version__}, which reads up to {SCHEMA}: use that version or a newer one")


def _write_h5(path, groups, attributes) -> int:
    """Write {group: {name: array}} and attributes to a sealed HDF5 file, atomically; its size in bytes."""
    groups = {group: {name: np.asarray(array) for name, array in arrays.items()} for group, arrays in groups.items()}
    data = _h5_image(groups, {**attributes, "schema": SCHEMA})

    def verify(temp):
        if temp.read_bytes() != data:
            raise UserError(f"{path} was not written: read back, it is not what was written; check the disk")

    write_atomically(path, lambda temp: temp.write_bytes(data), verify)
    return len(data)


# Checkpoints.

@dataclass(frozen=True)
class Checkpoint:
    path: Path
    generation: int
    groups: dict       # {group: {name: array}}, bit by bit as saved
    attributes: dict   # str, int, float and bool as Python's own; arrays as numpy's
    notes: list = field(default_factory=list)  # one line for each newer checkpoint that was skipped


def _checkpoint_files(folder) -> dict:
    """{path: generation}, the newest first."""
    with refusals(folder.checkpoints, "read"):
        try:
            names = os.listdir(folder.checkpoints)
        except FileNotFoundError:
            names = []
    found = {folder.checkpoints / name: int(match[1])
             for name in names if (match := re.fullmatch(r"generation_(\d+)\.h5", name))}
    return dict(sorted(found.items(), key=lambda item: item[1], reverse=True))


def _open_checkpoint(path, generation) -> h5py.File:
    """Raises _Damaged, also for a checkpoint that was given another generation's name."""
    file = _open_h5(path)
    if (stored := file.attrs.get("generation")) != generation:
        file.close()
        raise _Damaged(f"holds generation {stored}")
    return file


def save_checkpoint(folder: RunFolder, generation: int, groups: dict, attributes: dict, keep: int):
    """Write checkpoints/generation_<generation>.h5 and remove what it makes superfluous.

    groups: {group: {name: array}}; arrays of any shape, of number, bool or bytes ("S") dtype.
    attributes: {name: str | int | float | bool | array}; `schema` and `generation` are added.
    keep: checkpoints to keep, at least 2; damaged ones do not count.
    Returns (path, size in bytes). Raises UserError when it cannot be written; the
    earlier checkpoints are then untouched.
    """
    if keep < 2:
        raise ValueError(f"keep = {keep}: the newest checkpoint may be damaged, so at least 2")
    if bad := [group for group in groups if "/" in group]:
        raise ValueError(f"group names cannot contain '/': {bad}")
    with refusals(folder.checkpoints, "made"):
        folder.checkpoints.mkdir(exist_ok=True)
    path = folder.checkpoints / f"generation_{generation:06d}.h5"
    nbytes = _write_h5(path, groups, {**attributes, "generation": generation})
    folder._intact.add(path)
    _prune(folder, generation, keep)
    return path, nbytes


def _prune(folder, generation, keep):
    """Keep the newest `keep` intact checkpoints up to `generation`; remove the others and stray temp files.

    Damaged ones do not count and go: a resume has already passed them by. Left
    alone are an intact newer one, whoever wrote it, and one that cannot be read now.
    """
    kept, gone = 0, list(folder.checkpoints.glob("generation_*.h5.tmp"))
    for path, number in _checkpoint_files(folder).items():
        try:
            if (number > generation or kept < keep) and _is_intact(folder, path, number):
                kept += number <= generation
            else:
                gone.append(path)
        except _Unreadable:
            pass
    for path in gone:
        # The checkpoint is safe; a file that cannot be removed now is tried again after the next one.
        with contextlib.suppress(OSError):
            path.unlink()


def _is_intact(folder, path, number):
    if path not in folder._intact:
        try:
            _open_checkpoint(path, number).close()
        except _Unreadable:
            raise
        except _Damaged:
            return False
        folder._intact.add(path)
    return True


def load_checkpoint(folder: RunFolder) -> Checkpoint | None:
    """The newest valid checkpoint, None if there are none; changes nothing on disk.

    Raises UserError if there are checkpoints but none is valid, or the newest
    valid one has a newer schema (an older one would silently repeat work).
    """
    notes = []
    for path, generation in _checkpoint_files(folder).items():
        try:
            with _open_checkpoint(path, generation) as file:
                _refuse_newer(path, file)
                groups = {name: _arrays(group) for name, group in file.items()}
                folder._intact.add(path)
                return Checkpoint(path, generation, groups, _attributes(file), notes)
        except _Damaged as damage:
            notes.append(f"checkpoint {path} skipped: it {damage}")
    if notes:
        raise UserError(f"{folder.path} has no valid checkpoint: {'; '.join(notes)}; start again without --resume")
    return None


# History.

def history_schema(population: int) -> dict:
    """What the generation loop records: {name: (shape, dtype)}.

    Everything that another run of the same search may not repeat bit by bit is under times/.
    """
    integer, real = ((), np.int64), ((), np.float64)
    return {
        "generation": integer,
        "fitness": ((population,), np.float64),
        "mean_fitness": real,
        "best_fitness": real,
        "sigma": real,
        "digest": integer,        # of the search state
        "missing": integer,       # scores that were missing or not finite
        "tokens": integer,        # generated
        "cut": integer,           # completions stopped by max_tokens
        "empty": integer,
        "too_long": integer,      # prompts
        "validation": real,       # NaN when not done
        "validation_n": integer,
        "times/unix": real,       # seconds since 1970, the others are durations in seconds
        "times/seconds": real,    # the whole generation
        "times/generate": real,
        "times/place": real,
        "times/score": real,
        "times/wait": real,
        "times/allgather": real,
        "times/update": real,
        "times/checkpoint": real,
    }


class History:
    """One record a generation, from generation 0 on, without gaps.

    schema: {name: (shape, dtype)}, with "generation". A record is scalars and a
    row of `population` numbers, so the file is small (population 96, 10,000
    generations: 9 MB) and is written whole each time. That is why a SIGKILL can
    never make it unreadable: there is no moment at which it is open for writing.
    """

    def __init__(self, schema: dict):
        self.schema = {name: (tuple(shape), np.dtype(dtype)) for name, (shape, dtype) in schema.items()}
        self._rows = {name: [] for name in schema}

    def __len__(self):
        return len(self._rows["generation"])

    def append(self, generation: int, **values):
        """Add a record: every field of the schema but "generation", each of its shape.

        Values may be converted only where none can change (int32 to int64, int to
        float64). Raises ValueError otherwise, and then adds nothing.
        """
        if generation != len(self):
            raise ValueError(f"history: generation {generation}: needs generation {len(self)}, the next one")
        values["generation"] = generation
        if different := values.keys() ^ self.schema.keys():
            raise ValueError(f"history: fields missing or unknown: {sorted(different)}")
        record = {}
        for name, (shape, dtype) in self.schema.items():
            value = np.asarray(values[name])
            if value.shape != shape or not np.can_cast(value.dtype, dtype, "safe"):
                raise ValueError(f"history: {name} is {value.dtype} of shape {value.shape}, "
                                 f"needs {dtype} of shape {shape}")
            record[name] = value.astype(dtype)  # a copy: the caller may reuse its buffer
        for name, value in record.items():
            self._rows[name].append(value)

    def arrays(self) -> dict:
        """{name: array of shape (generations, *shape)}, new arrays."""
        return {name: np.array(self._rows[name], dtype).reshape(len(self), *shape)
                for name, (shape, dtype) in self.schema.items()}

    @classmethod
    def from_arrays(cls, schema: dict, arrays: dict) -> "History":
        """The history whose `arrays()` these are. Raises ValueError if they do not fit the schema."""
        history = cls(schema)
        if different := arrays.keys() ^ history.schema.keys():
            raise ValueError(f"history: fields missing or unknown: {sorted(different)}")
        length = len(arrays["generation"])
        for name, (shape, dtype) in history.schema.items():
            array = arrays[name]
            if array.dtype != dtype or array.shape != (length, *shape):
                raise ValueError(f"history: {name} is {array.dtype} of shape {array.shape}, "
                                 f"needs {dtype} of shape {(length, *shape)}")
            history._rows[name] = list(array.copy())
        if not np.array_equal(arrays["generation"], np.arange(length)):
            raise ValueError(f"history: generations are not 0 to {length - 1}")
        return history

    def write(self, path, attributes: dict) -> int:
        """Write all records to the HDF5 file `path`, atomically; its size in bytes. Raises UserError."""
        return _write_h5(path, {"/": self.arrays()}, attributes)


def read_history(path):
    """({name: array}, attributes) of a history file. Raises UserError."""
    try:
        with _open_h5(path) as file:
            _refuse_newer(path, file)
            return _arrays(file), _attributes(file)
    except _Damaged as damage:
        raise UserError(f"history {path} {damage}") from damage
