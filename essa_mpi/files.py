"""Files and folders that are the old ones or the new ones, never half of one; logs of whole lines. No HDF5, no MPI."""

import contextlib
import errno
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np

from .config import UserError

_MIB = 2**20


@contextlib.contextmanager
def refusals(path, doing):
    """Turn an OSError into one line that names the path and the file system's reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be {doing}: {error.strerror or error}") from error


def _fsync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(path):
    """Make the names in a folder durable, where the file system knows how to."""
    try:
        _fsync(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def write_atomically(path, write, verify=None):
    """Replace the file `path` by what `write(temp)` writes, or leave it untouched.

    `write` gets a path in the same folder (<path>.tmp, overwritten if a killed
    process left one). `verify(temp)`, if given, reads it again and raises if it
    is wrong. Only then does the file get its name.
    Raises UserError when the file system refuses, and whatever the two raise.
    """
    path = Path(path)
    temp = path.with_name(path.name + ".tmp")
    with refusals(path, "written"):
        try:
            write(temp)
            _fsync(temp)
            if verify:
                verify(temp)
            os.replace(temp, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temp.unlink()
            raise
        fsync_folder(path.parent)


def check_writable(option: str, path: str) -> None:
    """Raise UserError if no file can be written at the `path` that a command's option names."""
    folder = Path(path).parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{option} {path}: cannot be written: needs the name of a file in a folder that is there and may be "
                        f"written to")


def write_json(path, obj):
    """Write `obj` as JSON, atomically. A number that is not finite becomes null. Raises UserError."""
    text = json.dumps(_plain(obj), indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda temp: temp.write_text(text))


def _plain(value):
    """`value` in JSON's own types: numpy unpacked, NaN and infinities (which JSON lacks) as None."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_folder(target, write):
    """Replace the folder `target` by the one that `write(fresh)` makes beside it, or leave it untouched.

    `fresh` is <target's name> with a dot before and this process's number behind; nothing else is
    ever removed. Raises OSError when the file system refuses, and whatever `write` raises.
    """
    target = Path(target)
    fresh, old = (target.with_name(f".{target.name}.{kind}-{os.getpid()}") for kind in ("new", "old"))
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(fresh):
        raise FileExistsError(errno.EEXIST, "a folder of that name is in the way; move it", str(fresh))
    try:
        write(fresh)
        if target.exists():
            target.rename(old)
        try:
            fresh.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


# Logs: whole lines, whatever happens.

class JsonLines:
    """A log of one JSON object a line, which survives kills and full disks as whole lines.

    Opening cuts off a last line that a kill left unfinished. Raises UserError
    when the file system refuses.
    """

    def __init__(self, path):
        self.path = Path(path)
        with refusals(self.path, "opened"):
            # Unbuffered: a line is with the system once `append` returns, and a
            # failed write leaves nothing behind to be written later.
            self._file = open(self.path, "ab+", buffering=0)
            self._size = _end_of_lines(self._file)
            self._file.truncate(self._size)
            fsync_folder(self.path.parent)  # or a power cut could take a new log's name, but not its checkpoint's

    def append(self, record: dict):
        """Add a line. numpy values are unpacked; a number that is not finite becomes null."""
        line = memoryview(json.dumps(_plain(record), allow_nan=False).encode() + b"\n")
        with refusals(self.path, "written"):
            try:
                rest = line
                while rest:
                    rest = rest[self._file.write(rest):]
            except BaseException:
                with contextlib.suppress(OSError):  # if this fails too, the next opening cuts
                    self._file.truncate(self._size)
                raise
        self._size += len(line)

    @property
    def offset(self) -> int:
        """The length in bytes, all of it on the disk: store this in the checkpoint, read before saving it."""
        with refusals(self.path, "written"):
            os.fsync(self._file.fileno())
        return self._size

    def truncate(self, offset: int):
        """Cut the log back to the `offset` a checkpoint stored. Raises UserError if that is not its own."""
        with refusals(self.path, "cut"):
            ended = offset == 0 or os.pread(self._file.fileno(), 1, offset - 1) == b"\n"
            if not ended:
                raise UserError(f"{self.path} does not go with the checkpoint: it has {self._size} bytes, and no line "
                                f"ends at byte {offset}; put the file back or start again without --resume")
            self._file.truncate(offset)
            os.fsync(self._file.fileno())
        self._size = offset

    def close(self):
        self._file.close()


def _end_of_lines(file) -> int:
    """The length of `file` up to its last newline."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _MIB)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def read_json_lines(path) -> list:
    """The records of a log, a last unfinished line left out. Raises UserError."""
    with refusals(path, "read"):
        lines = Path(path).read_bytes().split(b"\n")[:-1]  # what follows the last newline is no line
    return [json.loads(line) for line in lines]
