"""Rewards through libraries and processes: where an answer is looked for, formats, IFEval, code, reward models."""

import http.server
import json
import math
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from conftest import refusal
from essa_mpi import config as configuration
from essa_mpi.rewards import load_reward
from essa_mpi.rewards.code import program
from essa_mpi.rewards.text import after_hashes, last_number
from essa_mpi.tasks import Row


def settings(reward, **keys):
    return configuration.make({"name": "t", "model": "m", "adapter": "a", "task": "t.jsonl", "batch": 2,
                               "reward": reward, **keys})


def row(answer=None, prompt="p", n=1, **fields):
    return Row(prompt, answer, fields, None, f"t.jsonl:{n}")


@pytest.fixture
def load():
    made = []

    def make(reward, **keys):
        made.append(load_reward(settings(reward, **keys)))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


# -- mathematics -----------------------------------------------------------------------------------

@pytest.mark.parametrize("text, found", [
    ("a 1 b 2.", "2"), ("1,234.5 apples", "1,234.5"), ("-3", "-3"), ("none", None), ("v.5", ".5"), ("12,34", "34"),
])
def test_last_number(text, found):
    assert last_number(text) == found


@pytest.mark.parametrize("text, found", [
    ("a\n#### 18", "18"), ("#### 1\n#### 2\nmore", "2"), ("####", ""), ("18", None),
])
def test_after_hashes(text, found):
    assert after_hashes(text) == found


@pytest.mark.parametrize("where, right, wrong", [
    ("boxed", [r"\boxed{18}", r"no 19 but \boxed{18.0}"], ["18", "#### 18", r"\boxed{19}"]),
    ("hash", ["so\n#### 18", "#### 18.0"], [r"\boxed{18}", "18", "#### 19"]),
    ("last", ["it is 18", "12 then 18.", "#### 18", r"\boxed{18}"], ["18 of 20", "eighteen"]),
    ("any", ["it is 18", r"\boxed{18}"], ["eighteen", "19"]),
])
def test_where_the_answer_is_looked_for(load, where, right, wrong):
    reward = load("math", math_answer=where)
    assert reward.score([row("18")] * len(right), right).tolist() == [1] * len(right)
    assert reward.score([row("18")] * len(wrong), wrong).tolist() == [0] * len(wrong)
    assert all(map(reward.has_format, right))


def test_lenient_mathematics(load):
    assert load("math").score([row("x+1")], [r"\boxed{y+1}"]).tolist() == [0]
    assert load("math", math_lenient=True).score([row("x+1")], [r"\boxed{y+1}"]).tolist() == [1]


def test_gym_strict(load):
    keys = {"task": "countdown", "task_rows": 4}
    from essa_mpi.tasks import load_task
    rows = load_task(settings("reasoning_gym", **keys)).train[:1]
    assert 0 < load("reasoning_gym", **keys).score(rows, ["1 + 1"])[0] < 1
    assert load("reasoning_gym", **keys, gym_strict=True).score(rows, ["1 + 1"]).tolist() == [0]


# -- format ----------------------------------------------------------------------------------------

def test_format(load):
    reward = load("format", format_pattern=r"<think>.*</think>\s*<answer>.*</answer>")
    texts = ["<think>a\nb</think>\n<answer>7</answer>\n", "<answer>7</answer>", "x <think></think><answer></answer>"]
    assert reward.score([row()] * 3, texts).tolist() == [1, 0, 0]
    assert [reward.has_format(text) for text in texts] == [True, False, False]


def test_a_pattern_that_backtracks_for_ever(load):
    reward = load("format", format_pattern="(a|a)*b", reward_seconds=1.0)
    out = reward.score([row(), row(n=2)], ["a" * 60, "ab"])
    assert np.isnan(out).tolist() == [True, False] and sum(reward.trouble.values()) == 1


@pytest.mark.parametrize("pattern, says", [("", "needs format_pattern"), ("(", "no regular expression")])
def test_patterns_that_are_none(pattern, says):
    assert says in refusal(load_reward, settings("format", format_pattern=pattern))


# -- IFEval ----------------------------------------------------------------------------------------

INSTRUCTIONS = {"instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
                "kwargs": [{}, {"relation": "at least", "num_words": 4}]}


@pytest.fixture
def nltk_data(public_data, monkeypatch):
    monkeypatch.delenv("NLTK_DATA", raising=False)
    return {"ifeval_nltk_data": str(public_data / "nltk_data")}


@pytest.mark.parametrize("score, rewards", [
    ("strict", [1, 0, 0, 0]), ("loose", [1, 0, 0, 1]), ("partial_strict", [1, .5, 0, .5]), ("partial_loose", [1, .5, 0, 1]),
])
def test_ifeval(load, nltk_data, score, rewards):
    reward = load("ifeval", ifeval_score=score, **nltk_data)
    texts = ["one two three four", "one two three, four", "one, two", "Well, sure\none two three four"]
    found = reward.judge([row(**INSTRUCTIONS)] * 4, texts)
    assert found.values.tolist() == rewards
    assert set(found.components[0]) == set(reward.names) == {"strict", "loose", "partial_strict", "partial_loose"}


def test_ifeval_kwargs_in_a_string_or_with_nulls(load, nltk_data):
    reward = load("ifeval", **nltk_data)
    nulls = [{"num_words": None, "relation": None}, {**INSTRUCTIONS["kwargs"][1], "num_highlights": None}]
    rows = [row(**{**INSTRUCTIONS, "kwargs": kwargs}) for kwargs in (json.dumps(nulls), nulls)]
    reward.check(rows)
    assert reward.score(rows, ["one two three four", "one two, three four"]).tolist() == [1, 0]
    assert "needs instruction_id_list and kwargs" in refusal(reward.check, [row(**{**INSTRUCTIONS, "kwargs": "{"})])


def test_ifeval_without_its_tokenizer(monkeypatch, tmp_path):
    monkeypatch.delenv("NLTK_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "punkt_tab is not found; set ifeval_nltk_data" in refusal(load_reward, settings("ifeval"))


@pytest.mark.parametrize("fields, says", [
    ({}, "needs instruction_id_list and kwargs"), ({**INSTRUCTIONS, "kwargs": [{}]}, "two lists of the same length"),
    ({"instruction_id_list": ["no:such"], "kwargs": [{}]}, "there is no instruction 'no:such'"),
])
def test_rows_that_ifeval_cannot_judge(load, nltk_data, fields, says):
    assert says in refusal(load("ifeval", **nltk_data).check, [row(n=5, **fields)])


def test_all_of_ifeval(load, nltk_data, public_data):
    """All 541 prompts, twice: nothing fetched, nothing failed, the same verdicts whatever came before."""
    lines = (public_data / "ifeval/input_data.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row(prompt=fields.pop("prompt"), n=n, **fields) for n, fields in enumerate(map(json.loads, lines), 1)]
    assert len(rows) == 541
    texts = [f"{r.prompt}\n\nHere is *my answer*, with a bit of text. It goes on. " * 3 for r in rows]
    reward = load("ifeval", ifeval_score="partial_loose", **nltk_data)
    reward.check(rows)
    once = reward.score(rows, texts)
    assert np.isfinite(once).all() and 0.05 < once.mean() < 0.95 and not reward.trouble
    again = reward.score(rows[::-1], texts[::-1])[::-1]
    assert once.tolist() == again.tolist()


# -- code ------------------------------------------------------------------------------------------

ADD = {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"}
HEAD = "import math\n\ndef add(a, b):\n    '''Adds.'''\n"


@pytest.mark.parametrize("completion, reward", [
    ("    return a + b", 1), ("    return a - b", 0), ("    return int(math.fsum([a, b]))", 1),
    ("Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", 1),
    ("```\ndef add(a, b):\n    return int(math.fsum([a, b]))\n```", 1),
    ("```python\nx = 1\n```\n```python\ndef add(a, b):\n    return a + b\n```", 1),
    ("    return a +", 0), ("", 0), ("    exit(0)", 0), ("    import os; os._exit(0)", 0),
    ("    raise SystemExit", 0), ("    print('x' * 10**6)\n    return a + b", 1),
    ("```python3\ndef add(a, b):\n    return a + b\n```", 1), ("``` python\r\ndef add(a, b):\r\n    return a + b\r\n```", 1),
    ("```bash\npip install x\n```\nThen:\n```python\ndef add(a, b):\n    return a + b\n```", 1),
    ("```python\ndef add(a, b):\n    return a + b```", 1), ("```python\ndef add(a, b):\n    return a + b", 1),
    ("```python\nfrom dataclasses import dataclass\n@dataclass\nclass N:\n    left: 'N' = None\n"
     "def add(a, b):\n    import pickle\n    return pickle.loads(pickle.dumps(N(a))).left + b\n```", 1),
    ("    import os\n    os.write(1, os.urandom(9)); os._exit(0)", 0),
])
def test_code(load, completion, reward):
    assert load("code", allow_code=True).score([row(prompt=HEAD, **ADD)], [completion]).tolist() == [reward]


def test_code_with_a_list_of_tests(load):
    tests = {"test_list": ["assert f(2) == 4", "assert f(3) == 9"], "test_setup_code": "import math"}
    texts = ["def f(x):\n    return x * x", "def f(x):\n    return x + x",
             "```python\nprint(f(2))\n```\nwith\n```python\ndef f(x):\n    return x * x\n```"]
    assert load("code", allow_code=True).score([row(**tests)] * 3, texts).tolist() == [1, 0, 1]


@pytest.mark.parametrize("body", [
    "    while True: pass", "    import time; time.sleep(1000)", "    return [0] * 10**9",
    "    import subprocess, sys\n"
    "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)', 'left-by-code'])\n    import time; time.sleep(99)",
    "    open('big', 'wb').write(bytes(2**25))",
    "    import sys\n    while True: sys.stdout.write('x' * 10**6)",
    "    import os\n    for _ in range(1500):\n        os.mkdir('a'); os.chdir('a')\n    return 4",
    "    import subprocess, sys\n    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)', 'left-by-code'],\n"
    "                     start_new_session=True)\n    return 4",
])
def test_code_that_wants_too_much(load, body):
    reward = load("code", allow_code=True, code_seconds=1.0, code_gib=1.0)
    began = time.monotonic()
    assert reward.score([row(prompt=HEAD, **ADD)] * 2, [body, "    return a + b"]).tolist() == [0, 1]
    assert time.monotonic() - began < 20 and not reward.trouble
    assert not [p for p in psutil.process_iter(["cmdline"]) if "left-by-code" in (p.info["cmdline"] or [])]


def test_code_is_off_unless_asked_for():
    assert "set allow_code = true" in refusal(load_reward, settings("code"))
    assert "reward_seconds = 15" in refusal(load_reward, settings("code", allow_code=True, reward_seconds=15))


def test_rows_without_tests(load):
    assert "needs test and entry_point, or test_list" in refusal(load("code", allow_code=True).check, [row(n=3)])


def test_humaneval(load, public_data):
    """The canonical solutions pass, as a continuation and as a whole; a wrong one does not."""
    import gzip
    with gzip.open(public_data / "humaneval/HumanEval.jsonl.gz", "rt") as file:
        problems = [json.loads(line) for line in file][:40]
    rows = [row(prompt=p["prompt"], n=n, test=p["test"], entry_point=p["entry_point"]) for n, p in enumerate(problems)]
    reward = load("code", allow_code=True)
    assert reward.score(rows, [p["canonical_solution"] for p in problems]).sum() == 40
    assert reward.score(rows[:10], [f"```python\n{p['prompt']}{p['canonical_solution']}```" for p in problems[:10]]).sum() == 10
    assert reward.score(rows[:10], ["    return None"] * 10).sum() == 0
    assert program(rows[0], "    pass").startswith(problems[0]["prompt"])


# -- reward models ---------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def classifier(real_model, tmp_path_factory):
    """The folder of a tiny classifier with one label and the quickstart model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("classifier")
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    LlamaForSequenceClassification(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=tokenizer.pad_token_id)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_classifier(load, classifier):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    reward = load("model", reward_model=str(classifier), reward_device="cpu")
    rows = [row(), row(prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": "q"}])]
    out = reward.score(rows, ["yes", "a longer answer"])
    model, tokenizer = (kind.from_pretrained(classifier) for kind in (AutoModelForSequenceClassification, AutoTokenizer))
    chats = [[{"role": "user", "content": "p"}, {"role": "assistant", "content": "yes"}],
             [*rows[1].prompt, {"role": "assistant", "content": "a longer answer"}]]
    for value, chat in zip(out, chats):
        ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            assert value == pytest.approx(model(**ids).logits.item(), abs=1e-5)
    assert out[0] == reward.score(rows[:1], ["yes"])[0]      # whatever is beside it


@pytest.mark.parametrize("keys, says", [
    ({}, "needs reward_model"), ({"reward_model": "nowhere"}, "there is no such folder"),
])
def test_classifiers_that_are_none(keys, says):
    assert says in refusal(load_reward, settings("model", **keys))


@pytest.fixture
def server():
    """server(answers) -> URL: a server that gives each request the next of `answers` (status, function of the body)."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = answers.pop(0) if len(answers) > 1 else answers[0]
            said = json.dumps(answer(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_):
            pass

    answers = []
    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=site.serve_forever, daemon=True).start()

    def make(*given):
        answers[:] = given
        return f"http://127.0.0.1:{site.server_port}/reward"

    yield make
    site.shutdown()


def lengths(body):
    assert set(body) == {"query", "prompts", "labels"}
    assert all(q.startswith(p) for q, p in zip(body["query"], body["prompts"]))
    return {"rewards": [len(q) - len(p) for q, p in zip(body["query"], body["prompts"])]}


def test_a_server(load, server, real_model):
    reward = load(server((200, lengths)), model=str(real_model))
    assert reward.score([row("7"), row("8")], ["abc", ""]).tolist() == [3, 0]


def test_a_server_that_is_away_for_a_moment(load, server, real_model):
    reward = load(server((503, lengths), (200, lengths)), model=str(real_model))
    assert reward.score([row("7")], ["abc"]).tolist() == [3]


@pytest.mark.parametrize("status, answer, says", [
    (404, lengths, "404"), (200, lambda body: {"rewards": []}, "needs {\"rewards\": [...]}"),
    (200, lambda body: {"rewards": ["x"]}, "needs a number"),
])
def test_a_server_that_gives_none(load, server, real_model, status, answer, says):
    reward = load(server((status, answer)), model=str(real_model))
    assert says in refusal(reward.score, [row("7")], ["abc"])
