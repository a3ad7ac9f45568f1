"""Completions to rewards: what each built-in gives, how a user's function is called, what is refused and how."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import refusal
from essa_mpi import config as configuration
from essa_mpi.rewards import boxed, load_reward
from essa_mpi.rewards import maths as maths_module
from essa_mpi.tasks import Row, load_task

ROOT = Path(__file__).resolve().parent.parent


def settings(reward, **keys):
    return configuration.make({"name": "t", "model": "m", "adapter": "a", "task": "t.jsonl", "batch": 2,
                               "reward": reward, **keys})


def row(answer, prompt="p", n=1, **fields):
    return Row(prompt, answer, fields, None, f"t.jsonl:{n}")


def score(reward, answer, completion):
    reward = load_reward(settings(reward))
    try:
        out = reward.score([row(answer)], [completion])
    finally:
        getattr(reward, "close", lambda: None)()
    assert out.shape == (1,) and out.dtype == np.float64
    return out[0]


# -- exact and boxed -----------------------------------------------------------------------------

@pytest.mark.parametrize("answer, completion, reward", [
    ("70", " 70\n", 1), (" 70", "70", 1), (70, "70", 1), (0.5, "0.5", 1),
    ("70", "70.", 0), ("70", "\\boxed{70}", 0), ("70", "", 0), ("Paris", "paris", 0),
])
def test_exact(answer, completion, reward):
    assert score("exact", answer, completion) == reward
    assert load_reward(settings("exact")).has_format(completion) is None


@pytest.mark.parametrize("text, content", [
    (r"\boxed{70}", "70"), (r"so \boxed { 7 } and \boxed{8}", "7"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."), (r"\boxed{}", ""),
    (r"\boxed{{a}{b}}", "{a}{b}"), (r"\boxed{7", None), ("boxed{7}", None), ("7", None), ("", None),
    (r"\boxed{unfinished \boxed{5}", "5"), ("\\boxed{7\\", None), (r"\boxed{", None),
])
def test_boxed_content(text, content):
    assert boxed(text) == content
    assert load_reward(settings("boxed")).has_format(text) is (content is not None)


@pytest.mark.parametrize("answer, completion, reward", [
    ("70", r"\boxed{70}", 1), (70, r"the answer is \boxed{ 70.0 }, that is \boxed{1}", 1),
    ("1234", r"\boxed{1,234}", 1), ("1,234.50", r"\boxed{1234.5}", 1), ("-3", r"\boxed{-3.}", 0),
    ("0.1", r"\boxed{.1}", 1),
    ("1e3", r"\boxed{1000}", 1), (1e-07, r"\boxed{0.0000001}", 1), ("x+1", r"\boxed{x+1}", 1),
    ("70", r"\boxed{71} \boxed{70}", 0), ("70", "70", 0), ("70", r"\boxed{}", 0), ("70", r"\boxed{7 0}", 0),
    ("1234", r"\boxed{12,34}", 0), ("70", r"\boxed{7_0}", 0), ("nan", r"\boxed{inf}", 0), ("a", r"\boxed{b}", 0),
    ("70", r"\boxed{70", 0), ("1", r"\boxed{1e99999}", 0), ("70", r"\boxed{٧٠}", 0),
])
def test_boxed(answer, completion, reward):
    assert score("boxed", answer, completion) == reward


@pytest.mark.parametrize("name", ["exact", "boxed", "math"])
@pytest.mark.parametrize("answer", [None, True, [1], {"a": 1}])
def test_an_answer_that_is_no_text(name, answer):
    assert refusal(score, name, answer, "x").startswith("t.jsonl:1: the answer is ")


def test_rows_and_completions_belong_together():
    with pytest.raises(ValueError):
        load_reward(settings("exact")).score([row("a")], ["a", "b"])


# -- math ----------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def maths():
    reward = load_reward(settings("math"))
    yield reward
    reward.close()


@pytest.mark.parametrize("answer, completion, reward", [
    ("18", r"\boxed{18}", 1), ("18", "The answer is 18.", 1), (18, r"\boxed{18.0}", 1),
    ("1/2", r"\boxed{\frac{1}{2}}", 1),
    (r"\frac{1}{2}", r"\boxed{0.5}", 1), (r"$\frac12$", "so it is 1/2", 1), (r"\boxed{x+1}", r"\boxed{1+x}", 1),
    ("She makes 9 * 2 = 18 dollars.\n#### 18", r"\boxed{18}", 1), ("a\n#### 1,234", r"\boxed{1234}", 1),
    (r"\$18", r"\boxed{18}", 1), ("18", r"\boxed{19}", 0), ("18", "", 0), ("18", "no idea", 0), ("18", r"\boxed{", 0),
    ("18", "two\nlines \u2028 and \\boxed{18}", 1),
])
def test_math(maths, answer, completion, reward):
    assert maths.score([row(answer)], [completion]).tolist() == [reward]
    assert not maths.trouble


def test_math_format(maths):
    texts = [r"\boxed{five}", "it is 5", "no idea", "", r"\boxed{"]
    assert [maths.has_format(text) for text in texts] == [True, True, False, False, False]


def test_math_off_the_main_thread(maths):
    import threading
    out = []
    thread = threading.Thread(target=lambda: out.append(maths.score([row("5")], [r"\boxed{5}"])))
    thread.start()
    thread.join()
    assert out[0].tolist() == [1]


def test_math_refuses_a_gold_answer_it_cannot_read(maths):
    assert "can make nothing of the answer '####'" in refusal(maths.score, [row("####")], ["5"])


def test_a_completion_that_hangs_math_verify_is_missing(monkeypatch):
    monkeypatch.setattr(maths_module, "SECONDS", 2)
    reward = load_reward(settings("math"))
    try:
        out = reward.score([row("5"), row("5")], [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{5}"])
    finally:
        reward.close()
    assert math.isnan(out[0]) and out[1] == 1
    assert reward.trouble == {"reward math: took over 2 s": 1}
    assert reward.where == {"reward math: took over 2 s": "t.jsonl:1"}


def test_math_on_gsm8k(maths, public_data):
    lines = (public_data / "gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()
    gold = [json.loads(line)["answer"] for line in lines]
    assert len(gold) == 1319
    completions = [f"\\boxed{{{answer.rsplit('#### ', 1)[1]}}}" for answer in gold]
    assert maths.score([row(answer) for answer in gold], completions).sum() == 1319


# -- reasoning_gym -------------------------------------------------------------------------------

def test_reasoning_gym():
    keys = dict(task="chain_sum", task_rows=8, task_args={"max_terms": 2})
    reward, task = load_reward(settings("reasoning_gym", **keys)), load_task(settings("reasoning_gym", **keys))
    first = task.train[0]
    texts = [first.answer, f"thus\n\\boxed{{{first.answer}}}\ndone", f"it is\n{first.answer}\n", "no", ""]
    out = reward.score([first] * len(texts), texts)
    assert out[:3].tolist() == [1, 1, 1] and (out[3:] < 0.1).all() and np.isfinite(out).all()
    assert [reward.has_format(t) for t in texts] == [False, True, False, False, False]


def test_reasoning_gym_counts_a_check_that_trips():
    reward = load_reward(settings("reasoning_gym", task="chain_sum", task_rows=8))
    reward._dataset.score_answer = lambda answer, entry: 1 / 0
    assert math.isnan(reward.score([row("1", metadata={})], ["1"])[0])
    assert reward.trouble == {"ZeroDivisionError: division by zero": 1}


def test_reasoning_gym_needs_its_generator():
    assert "is a file" in refusal(load_reward, settings("reasoning_gym"))
    assert "set heldout_rows instead" in refusal(
        load_reward, settings("reasoning_gym", task="chain_sum", heldout_data="h.jsonl"))


# -- a user's function ---------------------------------------------------------------------------

@pytest.fixture
def mine(tmp_path, monkeypatch):
    """mine(source, **config): the reward `f` of a module with that source in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(source, function="f", **keys):
        name = f"mine_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return load_reward(settings(f"{name}:{function}", **keys))

    return make


ROWS = [row("a", n=1, level=1), row("b", n=2, level=2), row("c", [{"role": "user", "content": "q"}], n=3)]


def test_a_function_is_called_in_trls_manner(mine):
    reward = mine("def f(prompts, completions, label, level):\n"
                  "    assert prompts == ['p', 'p', [{'role': 'user', 'content': 'q'}]]\n"
                  "    assert label == ['a', 'b', 'c'] and level == [1, 2, None]\n"
                  "    assert completions[2] == [{'role': 'assistant', 'content': 'xx'}]\n"
                  "    return [float(len(c)) for c in completions]\n", answer_key="label")
    assert reward.score(ROWS, ["", "x", "xx"]).tolist() == [0, 1, 1]
    assert reward.has_format("x") is None
    assert reward.score([], []).shape == (0,)


def test_a_function_gets_what_its_signature_names(mine):
    assert mine("def f(completions): return [1] * len(completions)").score(ROWS, ["", "", ""]).tolist() == [1, 1, 1]
    everything = mine("def f(**given):\n"
                      "    assert sorted(given) == ['answer', 'completions', 'level', 'prompts']\n"
                      "    return [True] * 3")
    assert everything.score(ROWS, ["", "", ""]).tolist() == [1, 1, 1]
    optional = mine("def f(completions, *, mood='calm', **_):\n    assert mood == 'calm'\n    return [0, 0, 0]")
    assert optional.score(ROWS, ["", "", ""]).tolist() == [0, 0, 0]


def test_missing_and_not_finite(mine):
    reward = mine("import numpy as np\n"
                  "def f(completions): return [None, float('nan'), float('inf'), -np.inf, np.float32(.5), np.array(2), "
                  "np.True_, 3, -2**20]")
    out = reward.score([row("a", n=i) for i in range(9)], [""] * 9)
    assert np.isnan(out[:4]).all() and out[4:].tolist() == [.5, 2, 1, 3, -2**20]


def test_an_array_is_a_list_of_rewards(mine):
    assert mine("import numpy as np\ndef f(completions): return np.ones(3)").score(ROWS, [""] * 3).tolist() == [1, 1, 1]
    assert mine("import torch\ndef f(completions): return torch.ones(3)").score(ROWS, [""] * 3).tolist() == [1, 1, 1]


@pytest.mark.parametrize("body, says", [
    ("return [1, 2]", ["returned 2 rewards for 3 completions", "t.jsonl:1 to t.jsonl:3"]),
    ("return [1, 2, 3, 4]", ["returned 4 rewards for 3 completions"]),
    ("return 1.0", ["returned a float for t.jsonl:1 to t.jsonl:3"]),
    ("return None", ["returned a NoneType"]),
    ("return {'rewards': [1, 2, 3]}", ["returned a dict for t.jsonl:1 to t.jsonl:3"]),
    ("return [1, '1', 1]", ["gave '1' (str) for t.jsonl:2"]),
    ("return [1, 1, [1]]", ["gave '[1]' (list) for t.jsonl:3"]),
    ("return [1, 1, 1j]", ["(complex) for t.jsonl:3"]),
    ("return [0, 2**20 + 1, 0]", ["gave 1.04858e+06 for t.jsonl:2", "at most 2^20"]),
    ("return [0, -10**400, 0]", ["for t.jsonl:2", "at most 2^20"]),
    ("return [1 / (c != 'bad\\nword') for c in completions]",
     ["raised on t.jsonl:2: ZeroDivisionError: division by zero", "completion 'bad\\nword'"]),
    ("if len(completions) == 3: raise ValueError('all\\nof it')\n    return [1]",
     ["t.jsonl:1 to t.jsonl:3 together, on none of them alone: ValueError: all of it"]),
])
def test_what_a_function_may_not_do(mine, body, says):
    reward = mine(f"def f(completions):\n    {body}")
    message = refusal(reward.score, ROWS, ["good", "bad\nword", "good"])
    assert all(word in message for word in [reward.name, *says]), message


def test_a_function_that_needs_a_column_nobody_has(mine):
    reward = mine("def f(completions, completion_ids): return [1] * 3")
    message = refusal(reward.score, ROWS, [""] * 3)
    assert "needs completion_ids" in message and "there are answer, completions, level, prompts" in message


def test_functions_that_are_not_there(mine):
    assert "its functions: f" in refusal(mine, "def f(): pass", "g")
    assert "has no function 'f'" in refusal(mine, "f = 3")
    assert "No module named 'no_such_module'" in refusal(mine, "import no_such_module")
    assert "SyntaxError" in refusal(mine, "def f(:")
    assert "No module named 'nowhere'" in refusal(load_reward, settings("nowhere.at_all:f"))


@pytest.mark.parametrize("name", ["", "boxes", "maths", "f", ":f", "module:", "module.f"])
def test_names_that_are_no_rewards(name):
    message = refusal(load_reward, settings(name))
    assert all(word in message for word in ("exact", "boxed", "math", "reasoning_gym", "package.module:function"))


def test_nothing_heavy_at_import():
    code = ("import sys, essa_mpi.rewards, essa_mpi.tasks; "
            "print(*{'torch', 'mpi4py', 'vllm', 'transformers', 'reasoning_gym', 'sympy'} & set(sys.modules))")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True).stdout.strip() == b""
