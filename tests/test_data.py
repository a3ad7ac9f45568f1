"""Files of every format to the same rows; what is refused and how; what a digest of rows covers."""

import datetime
import decimal
import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import refusal
from essa_mpi.data import Row, is_file, no_answer, read_file
from essa_mpi.tasks import load_task
from test_tasks import ROOT, settings

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet  # noqa: E402

ROWS = [{"prompt": f"question {i}", "answer": str(i), "level": i, "score": i / 2, "right": i % 2 == 0,
         "tags": ["ä", None, f"{i}"], "extra": {"n": i, "none": None, "deep": [{"x": 1.5}]}} for i in range(6)]
VERL = [{"data_source": "openai/gsm8k",
         "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"q{i}"}],
         "ability": "math", "reward_model": {"style": "rule", "ground_truth": str(i)},
         "extra_info": {"split": "train", "index": i}} for i in range(3)]


def read(path, **keys):
    return read_file(str(path), "task", settings(**keys))


def says(path, **keys):
    return refusal(read_file, str(path), "task", settings(**keys))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def save(path, rows):
    """Write rows in the format that the path's ending names. Returns the path."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if path.endswith(".parquet"):
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.endswith(".gz"):
        plain = Path(save(f"plain{Path(path[:-3]).suffix}", rows))
        Path(path).write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    elif path.endswith(".json"):
        Path(path).write_text(json.dumps(rows, indent=2))
    elif path.endswith(".jsonl"):
        Path(path).write_text(lines(rows))
    else:
        import datasets
        datasets.disable_progress_bars()
        datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


def shards(folder, ending, rows):
    """Rows in three files of a folder. Returns their places."""
    places = []
    for n in range(3):
        path = save(f"{folder}/train-{n:05}-of-00003.{ending}", rows[2 * n:2 * n + 2])
        places += [f"{path}:{i + 1}" if ending.startswith("jsonl") else f"{path}[{i}]" for i in range(2)]
    return places


# -- formats -------------------------------------------------------------------------------------

FORMATS = {
    "rows.jsonl": "rows.jsonl:{line}", "rows.jsonl.gz": "rows.jsonl.gz:{line}",
    "rows.json": "rows.json[{index}]", "rows.json.gz": "rows.json.gz[{index}]",
    "rows.parquet": "rows.parquet[{index}]", "saved": "saved[{index}]",
}


def expected(sources):
    others = [{k: v for k, v in row.items() if k not in ("prompt", "answer")} for row in ROWS]
    return [Row(row["prompt"], row["answer"], fields, None, source)
            for row, fields, source in zip(ROWS, others, sources, strict=True)]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(name):
    save(name, ROWS)
    assert is_file(name)
    assert read(name) == expected(FORMATS[name].format(line=i + 1, index=i) for i in range(6))
    kinds = [[type(v) for v in row.fields.values()] for row in read(name)]
    assert kinds == [[int, float, bool, list, dict]] * 6


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet"])
def test_a_folder_of_shards_and_a_glob(ending):
    places = shards("data", ending, ROWS)
    Path("data/README.md").write_text("not rows")
    Path("data/.hidden.jsonl").write_text("not rows")
    assert read("data") == read("data/") == read(f"data/train-*.{ending}") == expected(places)
    assert read("data/train-0000[12]*") == expected(places)[2:]
    assert is_file("data") and is_file("data/train-*")


def test_a_json_file_may_hold_one_object_a_line():
    Path("rows.json").write_text("\n" + lines(ROWS))
    assert read("rows.json") == expected(f"rows.json:{i + 2}" for i in range(6))


def test_what_a_file_is_is_seen_in_it():
    """The files a hub's cache links to have no endings."""
    for name in ("rows.parquet", "rows.jsonl.gz", "rows.json"):
        Path(save(name, ROWS)).rename("blob")
        assert [replace(row, source="") for row in read("./blob")] == expected([""] * 6)


def test_a_generator_is_not_taken_for_a_folder():
    for name in ("chain_sum", "letter_counting", "gcd"):
        Path(name).mkdir()
    Path("chain_sum/adapter_config.json").write_text("{}")
    save("letter_counting/a.jsonl", ROWS)
    assert [is_file(name) for name in ("chain_sum", "letter_counting", "gcd", "???")] == [False, True, False, True]
    assert not is_file("????")


def test_a_name_with_brackets_is_a_file_before_it_is_a_glob():
    assert read(save("rows[1].jsonl", ROWS)) == expected(f"rows[1].jsonl:{i + 1}" for i in range(6))


def test_nothing_is_imported_before_it_is_needed_and_nothing_is_asked_of_the_network():
    save("rows.jsonl", ROWS), save("rows.parquet", ROWS), save("saved", ROWS)
    code = """
import socket, sys
def refuse(*args): raise SystemExit(f"asked for {args}")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from essa_mpi import config, data
config = config.make(dict(name="t", model="m", adapter="a", task="t.jsonl"))
for name, new in (("rows.jsonl", None), ("rows.parquet", "pyarrow"), ("saved", "datasets")):
    assert new not in sys.modules
    assert len(data.read_file(name, "task", config)) == 6
    print(*(module for module in ("pyarrow", "datasets") if module in sys.modules))
"""
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_OFFLINE")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**environment, "PYTHONPATH": str(ROOT), "HF_HOME": "/nowhere"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "\npyarrow\npyarrow datasets\n", "")


@pytest.mark.parametrize("name, module, says_", [("rows.parquet", "pyarrow.parquet", "pip install pyarrow"),
                                                 ("saved", "datasets", "pip install 'datasets>=4.4'")])
def test_a_package_that_is_missing(monkeypatch, name, module, says_):
    save(name, ROWS)
    monkeypatch.setitem(sys.modules, module, None)
    assert says_ in says(name) and says(name).startswith(f"config: task = '{name}': ")


# -- what is in the rows -------------------------------------------------------------------------

@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad, text", [({"prompt": " "}, "'prompt' is empty"), ({"completion": 7}, "'completion' is 7"),
                                       ({"prompt": None}, "not null")], ids=["empty", "type", "null"])
def test_a_bad_row_is_refused_with_its_place(name, bad, text):
    rows = [{**row, "completion": None} for row in ROWS]
    rows[4].update(bad)
    message = says(save(name, rows))
    assert message.startswith(FORMATS[name].format(line=5, index=4) + ": ") and text in message


def test_a_bad_row_in_a_shard():
    shards("data", "parquet", [*ROWS[:3], {**ROWS[3], "prompt": ""}, *ROWS[4:]])
    assert says("data").startswith("data/train-00001-of-00003.parquet[1]: ")


@pytest.mark.parametrize("name", ["verl.jsonl", "verl.parquet"])
def test_verls_rows_are_read_as_they_are(name):
    for i, row in enumerate(read(save(name, VERL))):
        assert row.prompt == VERL[i]["prompt"] and row.answer == str(i)
        assert row.fields == {k: v for k, v in VERL[i].items() if k != "prompt"}
    answered = [{**row, "answer": "own" if i else None} for i, row in enumerate(VERL)]
    assert [row.answer for row in read(save(name, answered))] == ["0", "own", "own"]
    assert read(save(name, VERL), answer_key="ability")[0].answer == "math"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_keys_that_are_null_are_left_out_of_messages(name):
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": None}}, "id": None}
    chat = [{"role": "user", "content": "q", "name": None, "tool_calls": None},
            {"role": "assistant", "content": "r", "name": "x", "tool_calls": [call]}]
    [row] = read(save(name, [{"prompt": chat, "answer": "a", "extra": {"none": None}}]))
    assert row.prompt == [{"role": "user", "content": "q"},
                          {"role": "assistant", "content": "r", "name": "x",
                           "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}]
    assert row.fields == {"extra": {"none": None}}


def test_values_that_json_lacks_become_text():
    table = {"prompt": ["p"], "answer": pa.array([b"42"]), "day": [datetime.date(2026, 11, 30)],
             "at": pa.array([datetime.datetime(2026, 11, 30, 1, 2, 3)], pa.timestamp("us")),
             "price": [decimal.Decimal("3.50")], "word": pa.array(["w"]).dictionary_encode(), "nan": [float("nan")],
             "map": pa.array([[("k", b"v")]], pa.map_(pa.string(), pa.binary())),
             "any": pa.array(['{"a": [1, null]}'], pa.json_()), "nested": [{"days": [datetime.date(2026, 1, 2)]}]}
    pa.parquet.write_table(pa.table(table), "rows.parquet")
    [row] = read("rows.parquet")
    assert row.answer == "42"
    assert row.fields.pop("nan") != 0
    assert json.loads(json.dumps(row.fields)) == row.fields == {
        "day": "2026-11-30", "at": "2026-11-30T01:02:03", "price": "3.50", "word": "w", "map": {"k": "v"},
        "any": {"a": [1, None]}, "nested": {"days": ["2026-01-02"]}}


def test_json_that_datasets_keeps_in_strings_is_read():
    import datasets
    datasets.disable_progress_bars()
    features = datasets.Features({"prompt": datasets.Value("string"), "kwargs": datasets.List(datasets.Json())})
    made = datasets.Dataset.from_dict({"prompt": ["p"], "kwargs": [[{"n": 1}, {"word": "w"}]]}, features=features)
    made.with_format("numpy").save_to_disk("saved")
    made.to_parquet("rows.parquet")
    for name in ("saved", "rows.parquet"):
        assert read(name)[0].fields == {"kwargs": [{"n": 1}, {"word": "w"}]}


@pytest.mark.parametrize("column", [pa.array([b"ok", b"\xff\xd8"]), pa.array([b"ok", b"\xff\xd8"]).view(pa.string())],
                         ids=["bytes", "text"])
def test_bytes_that_are_no_text_are_refused(column):
    pa.parquet.write_table(pa.table({"prompt": ["p", "q"], "image": column}), "rows.parquet")
    assert says("rows.parquet") == ("rows.parquet[1]: 'image' holds bytes that are not UTF-8, so no text; "
                                    "leave the column out")


def test_an_answer_that_is_no_number():
    pa.parquet.write_table(pa.table({"prompt": ["p", "q"], "answer": [1.5, float("nan")]}), "rows.parquet")
    assert says("rows.parquet").startswith("rows.parquet[1]: 'answer' is nan; ")


# -- answers -------------------------------------------------------------------------------------

@pytest.mark.parametrize("fields, text", [
    ({"x": 1}, "no key 'answer' (answer_key), which reward = 'exact' needs; the row has 'prompt', 'x'; "
               "add it or set answer_key"),
    ({}, "no key 'answer' (answer_key), which reward = 'exact' needs; the row has 'prompt'; add it or set answer_key"),
    ({"completion": "c"}, "the row has 'prompt', 'completion'; add it"),
    ({"x": 1, "answer": None}, "'answer' is null; reward = 'exact' needs the right answer; fill it in"),
])
@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
def test_a_row_without_an_answer(name, fields, text):
    save(name, [{"prompt": "p", **fields}])
    [row] = load_task(settings(task=name)).train
    assert row.answer is None and row.fields == {k: v for k, v in fields.items() if k != "completion"}
    message = str(no_answer(row, settings(task=name), "reward = 'exact'"))
    assert message.startswith(row.source + ": ") and text in message


def test_a_generator_without_an_answer():
    config = settings(task="rush_hour", task_rows=2)
    row = load_task(config).train[0]
    assert row.answer is None
    assert str(no_answer(row, config, "reward = 'exact'")).startswith("rush_hour[0]: the generator gives no answer")


# -- what is refused -----------------------------------------------------------------------------

def test_folders_that_hold_several_splits():
    import datasets
    datasets.disable_progress_bars()
    part = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk("dict")
    assert says("dict") == "config: task = 'dict': holds the splits test, train; give one of them: dict/train"
    assert read("dict/train")[1].source == "dict/train[1]" and is_file("dict")

    shards("data", "parquet", ROWS)
    save("data/test-00000-of-00001.parquet", ROWS)
    assert says("data").endswith("its files are of several splits; give one of them: "
                                 "data/test-00000-of-00001.parquet, data/train-*.parquet")
    assert len(read("data/train-*.parquet")) == 6
    for name in ("a_train.jsonl", "b-Train.jsonl", "latest.jsonl", "validation.jsonl"):
        save(f"words/{name}", ROWS)
    assert says("words").endswith("give one of them: words/a_train.jsonl, words/latest.jsonl, words/validation.jsonl")
    for name in ("algebra.jsonl", "latest.jsonl"):
        save(f"subjects/{name}", ROWS)
    assert len(read("subjects")) == 12


def test_folders_of_several_formats():
    save("data/a.jsonl", ROWS), save("data/b.parquet", ROWS)
    assert says("data") == ("config: task = 'data': names files of several formats, a.jsonl, b.parquet; "
                            "give those of one, such as data/*.jsonl")
    Path("data/a.jsonl").rename("data/README.md")
    assert read("data") and "README.md, b.parquet; give those of one, such as data/*.parquet" in says("data/*")
    save("zipped/a.jsonl", ROWS), save("zipped/a.jsonl.gz", ROWS)
    assert "several formats, a.jsonl" in says("zipped")


def test_shards_that_are_missing_or_there_twice():
    shards("data", "parquet", ROWS)
    Path("data/train-00002-of-00003.parquet").rename("data/train-00000-of-00003-0a1b.parquet")
    assert "shard 2 of 3 is missing" in says("data")
    assert len(read("data/train-*")) == 6
    save("data/train-00002-of-00003.parquet", ROWS)
    assert "there are 4 shards of 3" in says("data")


def test_what_holds_no_rows():
    Path("empty").mkdir()
    save("root/data/a.jsonl", ROWS), save("meta/dataset_infos.json", ROWS)
    assert "'empty': the folder holds no .jsonl or .parquet files; give one that does" in says("empty")
    assert "'root': the folder holds no .jsonl or .parquet files but the folders root/data; give one" in says("root")
    assert "'meta': the folder holds no .jsonl or .parquet files" in says("meta")
    assert "'no/*.parquet': matches no file; mend it" in says("no/*.parquet")
    assert "'ro*': matches the folder root; give a glob of files, such as root/*.parquet" in says("ro*")
    assert "'no.parquet': there is no such file or folder" in says("no.parquet")
    pa.parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), "none.parquet")
    Path("none.json").write_text("[]")
    save("folder/none.jsonl", [])
    for name, what in (("none.parquet", "file"), ("none.json", "file"), ("folder", "folder"), ("fold*/*", "glob")):
        assert f"'{name}': the {what} holds no rows" in says(name)


@pytest.mark.parametrize("name, data, text", [
    ("a.json", b'[\n{"prompt": "p"},\n{"prompt" 5}]', "a.json:3: not JSON: Expecting ':' delimiter at column 11; "),
    ("a.json", b'[{"prompt": "p"},\n{"prompt": "\xff"}]', "a.json:2: not UTF-8 ("),
    ("a.json", b'[{"prompt": "p"}, {"prompt": "q", "x": NaN}]', "a.json[1]: not JSON: holds NaN or Infinity"),
    ("a.json", b'[{"prompt": "p"}, [1]]', "a.json[1]: is a JSON list; needs an object with 'prompt'"),
    ("a.json", b'[{"prompt": "p"}, {"prompt": "\\ud800"}]', "a.json[1]: holds half a surrogate pair"),
    ("a.json", b'{\n"rows": []}', "a.json:1: not JSON: "),
    ("a.json", b"[" * 100_000, "a.json: not JSON: "),
    ("a.jsonl", b'{"prompt": "p", "x": 1e999}', "a.jsonl:1: not JSON: holds NaN or Infinity"),
    ("a.jsonl", b'[{"prompt": "p"}]', "a.jsonl:1: is a JSON list"),
    ("a.jsonl.gz", gzip.compress(b'{"prompt": "p"}')[:-9], "config: task = 'a.jsonl.gz': cannot be read: "),
    ("a.jsonl.gz", b"\x1f\x8b no", "config: task = 'a.jsonl.gz': cannot be read: "),
    ("a.parquet", b"", "config: task = 'a.parquet': cannot be read: ArrowInvalid"),
    ("a.parquet", b"PAR1 no PAR1", "config: task = 'a.parquet': cannot be read: "),
    ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid",
     "config: task = 'a.parquet': is a Git LFS pointer"),
    ("data/a.parquet", b"no", "data/a.parquet: cannot be read: "),
])
def test_files_that_are_not_right(name, data, text):
    Path("data").mkdir()
    Path(name).write_bytes(data)
    assert says("data" if name.startswith("data") else name).startswith(text)


def test_a_saved_data_set_that_lost_a_file():
    save("saved", ROWS)
    [part] = Path("saved").glob("*.arrow")
    part.unlink()
    assert says("saved").startswith("config: task = 'saved': cannot be read: FileNotFoundError")


# -- splits and the digest -----------------------------------------------------------------------

@pytest.mark.parametrize("name", [name for name in FORMATS if name != "rows.jsonl"])
def test_a_prompt_in_two_files_is_refused_across_formats(name):
    save("rows.jsonl", ROWS[:4])
    save(name, [{**row, "prompt": [{"role": "user", "content": row["prompt"], "name": None}]} for row in ROWS[3:]])
    message = refusal(load_task, settings(task="rows.jsonl", heldout_data=name))
    assert message.startswith(f"1 prompts occur in two splits, first {FORMATS[name].format(line=1, index=0)} (heldout) "
                              f"and rows.jsonl:4 (train)")


@pytest.mark.parametrize("name", FORMATS)
def test_splits_cut_by_the_seed_are_the_same_rows_in_every_format(name):
    keys = dict(sft_rows=1, heldout_rows=2, split_seed=3)
    save("rows.jsonl", [*ROWS, ROWS[2]])
    save(name, [*ROWS, ROWS[2]])
    task, other = load_task(settings(task=name, **keys)), load_task(settings(task="rows.jsonl", **keys))
    assert [row.prompt for row in task.heldout + task.sft + task.train] == [
        row.prompt for row in other.heldout + other.sft + other.train]
    assert task.digest() == other.digest()
    assert task.notes == [f"{name}: dropped 1 of 7 rows whose prompt occurred before"]


@pytest.mark.parametrize("change", [{"level": 9}, {"tags": ["ä", None]}, {"extra": None}, {"new": 1}], ids=str)
def test_the_digest_covers_every_column(change):
    def digest(rows):
        return load_task(settings(task=save("rows.jsonl", rows))).digest()
    assert digest([*ROWS[:5], {**ROWS[5], **change}]) != digest(ROWS)
    assert digest([dict(reversed(row.items())) for row in ROWS]) == digest(ROWS)


def test_rows_without_other_columns_have_the_digest_they_had():
    """Runs that were started before it covered the columns can be resumed."""
    save("t.jsonl", [{"prompt": "a", "answer": 1},
                     {"prompt": [{"role": "user", "content": "b"}], "answer": "x", "completion": "c"}])
    assert load_task(settings()).digest() == 15525642674338266541
