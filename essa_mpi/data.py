"""Files to rows: JSON lines, JSON, parquet, folders and globs of these, and what datasets.save_to_disk writes.

Knows nothing of splits, generators or rewards. pyarrow and datasets are imported where they are needed, and
only ever asked for files that are on the disk.
"""

import glob
import gzip
import json
import math
import os
import re
import zlib
from dataclasses import dataclass
from datetime import date, time
from fnmatch import fnmatchcase
from itertools import chain

from .config import Config, UserError

FORMATS = "a .jsonl, .json or .parquet file, a folder of such files, or a glob"
_ENDING = re.compile(r"\.(jsonl|json)(\.gz)?$|\.parquet$")
_SHARD = re.compile(r"\.jsonl(\.gz)?$|\.parquet$")  # what is read of a folder: a .json there is often about the data
# As the hub names them, train-00000-of-00002.parquet, also with a hash behind the numbers.
_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)(-[0-9a-f]+)?\.")
_SPLIT = re.compile(r"(?:^|[^a-z])(train|test|validation|valid|val|dev|eval|heldout)(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """One row of a task, as read."""

    prompt: str | list[dict]  # text, or chat messages {"role", "content"}
    answer: object            # whatever JSON holds; None if the row has none, which the reward may need: `no_answer`
    fields: dict              # all the other columns; the answer's too where it is null
    completion: str | None    # what the warm start learns, if the row says it
    source: str               # "file.jsonl:17" (line); "file.parquet[16]", "folder[16]", "largest_number[16]" (index)


def is_file(task: str) -> bool:
    """Whether `task` names rows on the disk (a file, a folder, a glob) rather than a reasoning-gym generator."""
    if _ENDING.search(task) or os.sep in task or os.path.isfile(task):
        return True
    if os.path.isdir(task):  # an adapter, say, may lie in a folder of a generator's name
        return any(os.path.basename(name) in ("state.json", "dataset_dict.json") or _SHARD.search(name)
                   for name in glob.glob(os.path.join(glob.escape(task), "*")))
    return bool(glob.glob(task))


def read_file(path: str, key: str, config: Config) -> list[Row]:
    """All rows of a file, a folder or a glob, in order; `key` is the config key that names it.

    Files are JSON objects, one a line or (not in a .jsonl) in one array, gzipped or not, or parquet; the files of
    a folder or a glob follow one another by name. A folder may also be a data set of datasets.save_to_disk.
    Raises UserError if there is nothing of the kind or no row, and, with its place, on a row that is not
    right. A row may lack an answer.
    """
    where = f"config: {key} = {path!r}"
    if os.path.isdir(path) and _saved(path):
        records = _saved_records(path, where)
    else:
        files = _files(path, where)
        records = chain.from_iterable(_records(file, where if file == path else file) for file in files)
    rows = [_row(fields, source, config) for fields, source in records]
    if not rows:
        what = "folder" if os.path.isdir(path) else "file" if os.path.exists(path) else "glob"
        raise UserError(f"{where}: the {what} holds no rows; give one that does")
    return rows


def no_answer(row: Row, config: Config, who: str) -> UserError:
    """The refusal of a row without the answer that `who` ("reward = 'exact'") needs."""
    key = config.answer_key
    if not is_file(config.task) and row.source.startswith(f"{config.task}["):
        return UserError(f"{row.source}: the generator gives no answer here, which {who} needs; "
                         f"use reward = 'reasoning_gym'")
    if key in row.fields:
        return UserError(f"{row.source}: {key!r} is null; {who} needs the right answer; fill it in")
    present = [config.prompt_key, *([] if row.completion is None else [config.completion_key]), *row.fields]
    return UserError(f"{row.source}: no key {key!r} (answer_key), which {who} needs; the row has "
                     f"{', '.join(map(repr, present))}; add it or set answer_key")


def one_line(error: BaseException) -> str:
    """An exception as 'Type: message' on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


# Which files.

def _files(path: str, where: str) -> list[str]:
    """The files that `path` names, by name. Raises UserError if it is not clear that they belong together."""
    if os.path.isdir(path):
        return _shards(path, where)
    if os.path.lexists(path) or glob.escape(path) == path:
        return [path]
    files = sorted(glob.glob(path, recursive=True))
    if not files:
        raise UserError(f"{where}: matches no file; mend it: it is relative to the current directory {os.getcwd()}")
    folder = next(filter(os.path.isdir, files), None)
    if folder:
        raise UserError(f"{where}: matches the folder {folder}; give a glob of files, such as {folder}/*.parquet")
    _check_format(files, where, path)
    return files


def _shards(path: str, where: str) -> list[str]:
    """The .jsonl or .parquet files of a folder, which must be all of one split."""
    try:
        names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror}; give {FORMATS}") from None
    if "dataset_dict.json" in names:
        folders = [name for name in names if os.path.isdir(os.path.join(path, name))]
        one = folders[0] if folders and "train" not in folders else "train"
        raise UserError(f"{where}: holds the splits {', '.join(folders)}; give one of them: {os.path.join(path, one)}")
    shards = [name for name in names if _SHARD.search(name)]
    if not shards:
        folders = [os.path.join(path, name) for name in names if os.path.isdir(os.path.join(path, name))]
        raise UserError(f"{where}: the folder holds no .jsonl or .parquet files"
                        + (f" but the folders {', '.join(folders[:8])}; give one of them" if folders else
                           "; give one that does, or name files of another ending with a glob"))
    _check_format(shards, where, path)
    _check_split(path, shards, where)
    _check_complete(shards, where)
    return [os.path.join(path, name) for name in shards]


def _check_format(files: list[str], where: str, path: str) -> None:
    """Raise UserError if files are of several formats: one may be the other again."""
    endings = {}
    for file in files:
        found = _ENDING.search(file)
        endings.setdefault(found.group() if found else os.path.splitext(file)[1] or os.path.basename(file), file)
    if len(endings) > 1:
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        ending = next(filter(_ENDING.search, endings), ".jsonl")
        names = ", ".join(map(os.path.basename, endings.values()))
        raise UserError(f"{where}: names files of several formats, {names}; give those of one, such as "
                        f"{os.path.join(folder, '*' + ending)}")


def _check_split(path: str, shards: list[str], where: str) -> None:
    """Raise UserError if the names say that a folder's files are of several splits."""
    splits = {}
    for name in shards:
        numbered, word = _NUMBERED.match(name), _SPLIT.search(name)
        split = numbered.group(1) if numbered else word.group(1).lower() if word else ""
        splits.setdefault(split, []).append(name)
    if len(splits) > 1:
        globs = [os.path.join(path, _glob(split, names, shards)) for split, names in splits.items()]
        raise UserError(f"{where}: its files are of several splits; give one of them: {', '.join(globs[:8])}")


def _glob(split: str, names: list[str], shards: list[str]) -> str:
    """A pattern that matches these names and no other of the folder's, if there is a simple one."""
    if len(names) == 1:
        return names[0]
    start, end = os.path.commonprefix(names).rstrip("0123456789"), _SHARD.search(names[0]).group()
    for pattern in (f"{start}*{end}", f"*{split}*{end}"):
        if [name for name in shards if fnmatchcase(name, pattern)] == names:
            return pattern
    return names[0]


def _check_complete(shards: list[str], where: str) -> None:
    """Raise UserError if the numbers in the names tell that a shard is missing."""
    numbered = [found for found in map(_NUMBERED.match, shards) if found]
    totals = {int(found.group(3)) for found in numbered}
    have = {int(found.group(2)) for found in numbered}
    missing = sorted(set(range(max(totals, default=0))) - have)
    if missing or len(numbered) > max(totals, default=0):
        what = f"shard {missing[0]} of {max(totals)} is missing" if missing else \
            f"there are {len(numbered)} shards of {max(totals)}"
        raise UserError(f"{where}: by the names of its files {what}; put that right, or name the files you want "
                        f"with a glob")


# What is in them. A record is (JSON value, its place).

def _records(file: str, where: str):
    """The records of a file. Raises UserError, beginning with `where` if the file as a whole is wrong."""
    try:
        with open(file, "rb") as opened:
            data = opened.read(64)
            if data.startswith(b"version https://git-lfs"):
                raise UserError(f"{where}: is a Git LFS pointer, not the data it points to; run git lfs pull")
            if file.endswith(".parquet") or data.startswith(b"PAR1"):
                return _parquet(file, where)
            data += opened.read()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
    except FileNotFoundError:
        raise UserError(f"{where}: there is no such file or folder; give {FORMATS}, "
                        f"relative to the current directory {os.getcwd()}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}; "
                        f"give {FORMATS}") from None
    array = data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[") and not re.search(r"\.jsonl(\.gz)?$", file)
    return _array(data, file) if array else _lines(data, file)


def _lines(data: bytes, file: str):
    for number, line in enumerate(data.split(b"\n"), start=1):  # not splitlines: text may hold U+2028
        if line.strip():
            source = f"{file}:{number}"
            try:
                value = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise UserError(f"{source}: not UTF-8 ({error.reason} at byte {error.start} of the line); "
                                f"save the file as UTF-8") from None
            except (ValueError, RecursionError) as error:
                array = "" if ".jsonl" in file else ", or one array of them"
                raise UserError(f"{source}: not JSON: {error}; needs one JSON object a line{array}") from None
            yield _checked(value, source), source


def _array(data: bytes, file: str):
    try:
        values = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}:{number}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{file}:{error.lineno}: not JSON: {error.msg} at column {error.colno}; "
                        f"needs an array of objects, [{{...}}, {{...}}]") from None
    except RecursionError as error:
        raise UserError(f"{file}: not JSON: {error}; needs an array of objects, [{{...}}, {{...}}]") from None
    for index, value in enumerate(values):
        yield _checked(value, f"{file}[{index}]"), f"{file}[{index}]"


def _checked(value, source: str):
    """What Python's reader lets through though no JSON, or no text, is that way."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise UserError(f"{source}: holds half a surrogate pair (an escape \\udXXX without its other half); "
                        f"mend the text") from None
    except (ValueError, RecursionError):
        raise UserError(f"{source}: not JSON: holds NaN or Infinity; write null, or leave the key out") from None
    return value


def _parquet(file: str, where: str):
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"{where}: parquet files need pyarrow; pip install pyarrow") from None

    def batches():
        yield from ParquetFile(file).iter_batches(use_threads=False)
    return _arrow(batches(), file, where)


def _saved(folder: str) -> bool:
    return all(os.path.isfile(os.path.join(folder, name)) for name in ("state.json", "dataset_info.json"))


def _saved_records(folder: str, where: str):
    """The records of a folder that datasets.save_to_disk wrote."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"{where}: a folder of datasets.save_to_disk needs datasets; "
                        f"pip install 'datasets>=4.4'") from None

    def batches():
        datasets.disable_progress_bars()
        # As Arrow has it: the data set's own format may be tensors, and pictures would be decoded.
        for table in datasets.load_from_disk(folder).with_format("arrow").iter(batch_size=1000):
            yield from table.to_batches()
    return _arrow(batches(), folder.rstrip(os.sep), where)


def _arrow(batches, name: str, where: str):
    """The records of pyarrow's batches."""
    index = 0
    try:
        for batch in batches:
            columns = list(zip(batch.schema.names, batch.schema.types, batch.columns))
            for i in range(batch.num_rows):
                source, fields = f"{name}[{index}]", {}
                for column, kind, values in columns:
                    try:
                        fields[column] = _plain(values[i].as_py(maps_as_pydicts="strict"), kind)
                    except UnicodeDecodeError:
                        raise UserError(f"{source}: {column!r} holds bytes that are not UTF-8, so no text; "
                                        f"leave the column out") from None
                    except Exception as error:
                        raise UserError(f"{source}: {column!r} cannot be read: {one_line(error)}; mend it or leave "
                                        f"the column out") from None
                yield fields, source
                index += 1
    except UserError:
        raise
    except Exception as error:  # pyarrow and datasets raise what they like
        raise UserError(f"{where}: cannot be read: {one_line(error)}; give another copy, or write it anew") from None


def _plain(value, kind):
    """A value of Arrow in JSON's types: bytes are UTF-8 text, dates ISO 8601, decimals and the rest as written."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):  # JSON in a string where datasets found no common type
        return json.loads(value) if getattr(kind, "extension_name", "") == "arrow.json" else value
    if isinstance(value, dict):
        if hasattr(kind, "item_type"):  # a map, else a struct
            return {str(_plain(key, kind.key_type)): _plain(item, kind.item_type) for key, item in value.items()}
        return {key: _plain(item, kind.field(key).type) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, kind.value_type) for item in value]
    if isinstance(value, bytes):
        return value.decode()
    return value.isoformat() if isinstance(value, (date, time)) else str(value)


# What is right with a row.

def _row(fields, source: str, config: Config) -> Row:
    def refuse(what):
        raise UserError(f"{source}: {what}") from None

    if not isinstance(fields, dict):
        refuse(f"is a JSON {type(fields).__name__}; needs an object with {config.prompt_key!r}")
    if config.prompt_key not in fields:
        present = ", ".join(map(repr, fields)) or "nothing"
        refuse(f"no key {config.prompt_key!r} (prompt_key); the row has {present}; add it or set prompt_key")
    prompt = fields.pop(config.prompt_key)
    if isinstance(prompt, list):
        prompt = _without_nulls(prompt)
    wrong = _wrong_prompt(prompt, config)
    if wrong:
        refuse(f"{config.prompt_key!r} {wrong}")
    completion = fields.pop(config.completion_key, None)
    if not (completion is None or isinstance(completion, str)):
        refuse(f"{config.completion_key!r} is {json.dumps(completion)[:60]}; needs a string")
    answer, verl = fields.get(config.answer_key), fields.get("reward_model")
    if answer is not None:
        del fields[config.answer_key]
    elif isinstance(verl, dict):
        answer = verl.get("ground_truth")
    if isinstance(answer, float) and not math.isfinite(answer):
        refuse(f"{config.answer_key!r} is {answer}; needs the right answer, or null")
    return Row(prompt, answer, fields, completion, source)


def _without_nulls(value):
    """Without the keys that are null: in parquet all messages have the keys that any of them has."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _wrong_prompt(prompt, config: Config) -> str | None:
    """What is wrong with a prompt, or None."""
    if isinstance(prompt, str):
        return None if prompt.strip() else "is empty; needs text or chat messages"
    if not isinstance(prompt, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in prompt):
        return ('needs to be a string or a list of messages {"role": ..., "content": ...} with string values, '
                f"not {json.dumps(prompt)[:60]}")
    if not any(m["content"].strip() for m in prompt):
        return "is empty; needs text or chat messages"
    if not config.chat:
        return "is a list of messages, which needs chat = true; give plain text instead or set it"
    if config.system_prompt and prompt[0]["role"] == "system":
        return "begins with a system message and system_prompt is set too; drop one of the two"
    return None
