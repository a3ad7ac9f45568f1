"""Rows to prompts: what is read, what is refused and how, splits, token ids."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import refusal
from essa_mpi import config as configuration
from essa_mpi.tasks import Row, load_task, render

ROOT = Path(__file__).resolve().parent.parent


def settings(**keys):
    return configuration.make({"name": "t", "model": "m", "adapter": "a", "task": "t.jsonl", "batch": 2, **keys})


def rows(n, start=0):
    return [{"prompt": f"question {i}", "answer": str(i)} for i in range(start, start + n)]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(name, rows or lines): a JSONL file in the current directory, a fresh one."""
    monkeypatch.chdir(tmp_path)

    def write(name, lines):
        text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        Path(name).write_text("\n".join(text) + "\n", encoding="utf-8")
        return name

    return write


# -- files ---------------------------------------------------------------------------------------

def test_a_file_is_read_in_order(write):
    write("t.jsonl", [{"prompt": "a", "answer": 1, "completion": "c", "level": [5]}, "",
                      {"prompt": "b", "answer": "x"}])
    task = load_task(settings())
    assert task.train == [Row("a", 1, {"level": [5]}, "c", "t.jsonl:1"), Row("b", "x", {}, None, "t.jsonl:3")]
    assert task.sft == task.validation == task.heldout == task.notes == []


def test_keys_and_messages(write):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    write("t.jsonl", [{"question": chat, "label": {"any": 1}}, {"question": "r", "label": [0], "prompt": "a column"}])
    task = load_task(settings(prompt_key="question", answer_key="label"))
    assert task.train[0] == Row(chat, {"any": 1}, {}, None, "t.jsonl:1")
    assert task.train[1].fields == {"prompt": "a column"}


def test_lines_end_at_newlines_only(write):
    """U+2028 and a carriage return inside a string are text; a CRLF file is one, and a byte order mark is none."""
    line = json.dumps({"prompt": "one\u2028two", "answer": "a"}, ensure_ascii=False)
    Path("t.jsonl").write_bytes(("\ufeff" + line + "\r\n" + line.replace("one", "1") + "\r\n").encode())
    assert [row.prompt for row in load_task(settings()).train] == ["one\u2028two", "1\u2028two"]


@pytest.mark.parametrize("line, says", [
    ('{"prompt": "p", "answer": ', "not JSON"),
    ('{"prompt": "p", "answer": NaN}', "NaN"),
    ("[1, 2]", "is a JSON list"),
    ("3", "is a JSON int"),
    ("[" * 100_000, "not JSON"),
    ({"answer": "a"}, "no key 'prompt' (prompt_key)"),
    ({"reply": "a"}, "no key 'prompt' (prompt_key); the row has 'reply'; add it or set prompt_key"),
    ({}, "the row has nothing"),
    ({"prompt": "", "answer": "a"}, "is empty"),
    ({"prompt": " \n", "answer": "a"}, "is empty"),
    ({"prompt": 5, "answer": "a"}, "needs to be a string or a list of messages"),
    ({"prompt": [{"role": "user"}], "answer": "a"}, "needs to be a string or a list of messages"),
    ({"prompt": [{"role": "user", "content": ""}], "answer": "a"}, "is empty"),
    ({"prompt": [], "answer": "a"}, "is empty"),
    ({"prompt": "p", "answer": "a", "completion": 7}, "'completion' is 7; needs a string"),
    ('{"prompt": "\\ud800", "answer": "a"}', "surrogate"),
])
def test_a_bad_row_is_refused_with_its_line(write, line, says):
    write("t.jsonl", [*rows(2), "", line, *rows(1, 9)])
    message = refusal(load_task, settings())
    assert message.startswith("t.jsonl:4: ") and says in message


def test_bytes_that_are_not_utf8(write):
    Path("t.jsonl").write_bytes(b'{"prompt": "p", "answer": "a"}\n{"prompt": "\xff", "answer": "a"}\n')
    assert refusal(load_task, settings()).startswith("t.jsonl:2: not UTF-8")


def test_messages_that_do_not_fit_the_config(write):
    write("t.jsonl", [{"prompt": [{"role": "system", "content": "s"}], "answer": "a"}] * 2)
    assert "needs chat = true" in refusal(load_task, settings(chat=False))
    assert "system_prompt is set too" in refusal(load_task, settings(system_prompt="s"))


@pytest.mark.parametrize("key", ["task", "sft_data", "validation_data", "heldout_data"])
def test_a_missing_or_empty_file(write, key):
    write("t.jsonl", rows(4))
    write("empty.jsonl", ["", " "])
    assert f"{key} = 'no.jsonl': there is no such file" in refusal(load_task, settings(**{key: "no.jsonl"}))
    assert f"{key} = 'empty.jsonl': the file holds no rows" in refusal(load_task, settings(**{key: "empty.jsonl"}))
    assert "cannot be read: File name too long" in refusal(load_task, settings(**{key: "x" * 300 + ".jsonl"}))


# -- splits --------------------------------------------------------------------------------------

def test_cut_splits_are_disjoint_and_seeded(write):
    write("t.jsonl", rows(50))
    cut = dict(sft_rows=10, validation_rows=5, heldout_rows=15)
    task = load_task(settings(**cut))
    sizes = [len(split) for split in (task.sft, task.train, task.validation, task.heldout)]
    assert sizes == [10, 20, 5, 15]
    everything = task.sft + task.train + task.validation + task.heldout
    assert sorted(row.source for row in everything) == sorted(f"t.jsonl:{i}" for i in range(1, 51))
    assert load_task(settings(**cut)) == task
    other = load_task(settings(split_seed=1, **cut))
    assert {row.source for row in other.heldout} != {row.source for row in task.heldout}
    assert other.digest() != task.digest() == load_task(settings(**cut)).digest()


def test_the_held_out_rows_do_not_depend_on_the_other_splits(write):
    write("t.jsonl", rows(50))
    assert load_task(settings(heldout_rows=9)).heldout == load_task(settings(heldout_rows=9, sft_rows=20)).heldout


def test_equal_prompts_are_dropped_before_cutting(write):
    as_messages = {"prompt": [{"role": "user", "content": "question 3"}], "answer": "3"}
    write("t.jsonl", [*rows(20), *rows(5), as_messages])
    task = load_task(settings(heldout_rows=8))
    assert len(task.heldout) == 8 and len(task.train) == 12
    assert task.notes == ["t.jsonl: dropped 6 of 26 rows whose prompt occurred before"]
    assert len(load_task(settings()).train) == 26  # nothing is cut: nothing can leak


def test_cutting_more_than_there_is(write):
    write("t.jsonl", rows(10))
    message = refusal(load_task, settings(heldout_rows=6, sft_rows=4))
    assert "heldout_rows 6 + sft_rows 4 leaves none of the 10 rows" in message


def test_own_files_and_their_limits(write):
    write("t.jsonl", rows(10))
    write("h.jsonl", rows(10, 100))
    write("s.jsonl", [{"prompt": "s", "completion": "learnt"}])
    task = load_task(settings(heldout_data="h.jsonl", heldout_rows=3, sft_data="s.jsonl", task_rows=4))
    assert [row.source for row in task.heldout] == ["h.jsonl:1", "h.jsonl:2", "h.jsonl:3"]
    assert task.sft == [Row("s", None, {}, "learnt", "s.jsonl:1")]  # learnt, not scored: no answer needed
    assert len(task.train) == 4 and task.train[0].source == "t.jsonl:1"
    assert load_task(settings(validation_data="s.jsonl")).validation[0].answer is None  # the reward may need none


@pytest.mark.parametrize("key", ["sft_data", "validation_data", "heldout_data"])
def test_a_prompt_in_two_files_is_refused(write, key):
    write("t.jsonl", rows(10))
    write("o.jsonl", rows(3, 8))
    message = refusal(load_task, settings(**{key: "o.jsonl"}))
    assert message.startswith("2 prompts occur in two splits") and "t.jsonl:9" in message and "o.jsonl:1" in message


# -- generators ----------------------------------------------------------------------------------

def test_a_generator_by_name(write):
    keys = dict(task="chain_sum", task_rows=30, task_args={"max_terms": 2}, heldout_rows=10)
    task = load_task(settings(**keys))
    row = task.train[0]
    assert row.source.startswith("chain_sum[") and row.answer.lstrip("-").isdigit()
    assert row.fields["metadata"]["source_dataset"] == "chain_sum"
    assert len(task.heldout) == 10 and len(task.train) <= 20
    assert load_task(settings(**keys)).digest() == task.digest()
    assert load_task(settings(split_seed=1, **keys)).digest() != task.digest()


def test_a_generators_rows_give_way_to_files(write):
    made = load_task(settings(task="chain_sum", task_rows=30)).train
    write("h.jsonl", [{"prompt": row.prompt, "answer": row.answer} for row in made[:4]])
    task = load_task(settings(task="chain_sum", task_rows=30, heldout_data="h.jsonl"))
    assert task.train == made[4:]
    assert task.notes == ["chain_sum: dropped 4 of 30 rows that occur in the files of other splits"]


def test_generators_that_are_refused():
    assert "nearest generators: chain_sum" in refusal(load_task, settings(task="chain_sums"))
    assert "neither a file of rows nor a reasoning-gym generator" in refusal(load_task, settings(task="???"))
    assert "no_such" in refusal(load_task, settings(task="chain_sum", task_args={"no_such": 1}))
    assert "chain_sum refuses" in refusal(load_task, settings(task="chain_sum", task_args={"min_terms": -1}))
    assert "set split_seed" in refusal(load_task, settings(task="chain_sum", task_args={"seed": 1}))
    assert "set task_rows" in refusal(load_task, settings(task="chain_sum", task_args={"size": 1}))


@pytest.mark.parametrize("name", ["ransom_note", "list_functions"])
def test_a_generators_rows_are_the_same_in_every_process(name):
    """Left to itself ransom_note depends on Python's hash seed, list_functions on the global generator."""
    code = ("from essa_mpi import config, tasks; print(tasks.load_task(config.make(dict(name='t', model='m', "
            f"adapter='a', batch=2, task_rows=8, task={name!r}))).digest())")
    said = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True,
                           env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    assert len(said) == 1


def test_a_signal_to_the_job_spares_the_generator():
    """Launchers signal whole process groups: SIGUSR1 asks the ranks to leave, and is nothing to what works for them."""
    code = ("import signal; signal.signal(signal.SIGUSR1, lambda *_: None); print('up', flush=True)\n"
            "from essa_mpi import config, tasks; print(len(tasks.load_task(config.make(dict(name='t', model='m', "
            "adapter='a', batch=2, task_rows=8, task='ransom_note'))).train), flush=True); import os; os._exit(0)")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                          start_new_session=True) as process:
        assert process.stdout.readline() == "up\n"
        while process.poll() is None:
            os.killpg(process.pid, signal.SIGUSR1)
            time.sleep(0.05)
        assert process.stdout.read() == "8\n" and process.returncode == 0


# -- prompts -------------------------------------------------------------------------------------

class Characters:
    """A tokenizer of characters, with a template that refuses tools."""

    chat_template = "a template"

    def __call__(self, text):
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, return_dict):
        assert add_generation_prompt and tokenize and not return_dict
        if any(m["role"] == "tool" for m in messages):
            raise ValueError("no\ntools")
        return [ord(c) for c in "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"]


def rendered(prompt, **keys):
    row = Row(prompt, "a", {}, None, "t.jsonl:5")
    return "".join(map(chr, render(row, Characters(), settings(**keys))))


def test_render():
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}, {"role": "user", "content": "s"}]
    assert rendered("hello") == "<user>hello<assistant>"
    assert rendered("hello", system_prompt="be brief") == "<system>be brief<user>hello<assistant>"
    assert rendered(chat, system_prompt="x") == "<system>x<user>q<assistant>r<user>s<assistant>"
    assert rendered("hello", chat=False) == "hello"
    assert rendered("hello", chat=False, system_prompt="Q: ") == "Q: hello"


def test_render_refuses(monkeypatch):
    message = refusal(rendered, [{"role": "tool", "content": "x"}])
    assert message.startswith("t.jsonl:5: ") and "ValueError: no tools" in message
    monkeypatch.setattr(Characters, "chat_template", None)
    assert "no chat template; set chat = false" in refusal(rendered, "hello")
    assert rendered("hello", chat=False) == "hello"


def test_render_with_the_real_tokenizer(real_model):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(real_model, local_files_only=True)
    ids = render(Row("hi", "a", {}, None, "t"), tokenizer, settings(system_prompt="s"))
    assert all(type(i) is int for i in ids)
    assert tokenizer.decode(ids) == ("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
                                     "<|im_start|>assistant\n")


# -- the quickstart's data -----------------------------------------------------------------------

def test_largest_number(tmp_path):
    for folder in ("a", "b"):
        subprocess.run([sys.executable, ROOT / "jobs/largest_number.py", "--out", tmp_path / folder], check=True,
                       stdout=subprocess.DEVNULL)
    seen = set()
    for split, size in (("sft", 3000), ("train", 3000), ("validation", 500), ("heldout", 3000)):
        text = (tmp_path / "a" / f"{split}.jsonl").read_text()
        assert text == (tmp_path / "b" / f"{split}.jsonl").read_text()
        made = [json.loads(line) for line in text.splitlines()]
        assert len(made) == size
        places = []
        for row in made:
            a, b, c = re.fullmatch(r"Which is the largest: (\d+), (\d+) or (\d+)\?", row["prompt"]).groups()
            triple = frozenset(map(int, (a, b, c)))
            assert len(triple) == 3 and min(triple) >= 10 and max(triple) <= 99 and triple not in seen
            seen.add(triple)
            assert row["answer"] == str(max(triple)) and row["completion"] == f"\\boxed{{{max(triple)}}}"
            places.append([a, b, c].index(row["answer"]))
        assert all(abs(places.count(i) / size - 1 / 3) < 0.08 for i in range(3))  # the order tells nothing
    load_task(settings(task=str(tmp_path / "a/train.jsonl"), sft_data=str(tmp_path / "a/sft.jsonl"),
                       validation_data=str(tmp_path / "a/validation.jsonl"),
                       heldout_data=str(tmp_path / "a/heldout.jsonl")))
