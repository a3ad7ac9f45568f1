"""Reward functions as users of TRL, verl and OpenRLHF have them, called as they are; and those that misbehave."""

import math
import os
import time

import numpy as np
import psutil
import pytest

from conftest import refusal
from essa_mpi import config as configuration
from essa_mpi.rewards import load_reward
from essa_mpi.tasks import Row

# Written as TRL's documentation has its users write them.
TRL = '''
import re

def accuracy_reward(completions, solution, **kwargs):
    contents = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    found = [re.search(r"\\\\boxed\\{(.*?)\\}", c) for c in contents]
    return [float(f.group(1) == s) if f else 0.0 for f, s in zip(found, solution)]

def length_reward(prompts, completions, completion_ids, trainer_state, log_extra=None, log_metric=None, **kwargs):
    assert len(prompts) == len(completions) == len(completion_ids)
    log_extra("length", [len(ids) for ids in completion_ids])
    log_metric("mean", 1.0)
    return [-len(ids) / 100 for ids in completion_ids]

def only_maths(completions, kind, **kwargs):
    return [1.0 if k == "maths" else None for k in kind]

async def slow_reward(completions, **kwargs):
    import asyncio
    await asyncio.gather(*(asyncio.sleep(0.01) for _ in completions))
    return [0.25] * len(completions)

class Judge:
    __name__ = "judge"
    def __call__(self, completions, **kwargs):
        return [0.5] * len(completions)

judge = Judge()
'''

# As verl's users write a custom_reward_function.
VERL = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info["index"] in (0, 1)
    right = solution_str.split("####")[-1].strip() == ground_truth
    return {"score": 1.0 if right else 0.1, "acc": right, "pred": solution_str, "index": extra_info["index"]}

async def waits(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    import asyncio
    await asyncio.sleep(0.2)
    return float(solution_str == ground_truth)

def bare(solution_str, ground_truth, method="strict"):
    return solution_str == ground_truth

def no_score(solution_str, ground_truth):
    return {"acc": 1.0}
'''

# As OpenRLHF's users write the file given to --remote_rm_url.
OPENRLHF = '''
import torch

def reward_func(queries, prompts, labels, **kwargs):
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels):
        assert query.startswith(prompt) and prompt.endswith("<|im_start|>assistant\\n")
        rewards.append(float(query[len(prompt):].removesuffix("<|im_end|>") == label))
    rewards = torch.tensor(rewards)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"accuracy": rewards.mean(), "note": ["text"]}}

def plain(queries, prompts, labels):
    return torch.tensor([float(len(q) > len(p)) for q, p in zip(queries, prompts)])
'''


def settings(**keys):
    return configuration.make({"name": "t", "model": "m", "adapter": "a", "task": "t.jsonl", "batch": 2, **keys})


@pytest.fixture
def load(tmp_path):
    """load(source, "function", **config): the reward of a file with that source."""
    made = []

    def make(source, function="", **keys):
        file = tmp_path / "rewards_of_mine.py"
        file.write_text(source)
        made.append(load_reward(settings(reward=f"{file}:{function}" if function else str(file), **keys)))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


def row(n, answer="7", prompt="p", **fields):
    return Row(prompt, answer, fields, None, f"t.jsonl:{n}")


# -- TRL -----------------------------------------------------------------------------------------

def test_trl(load):
    chat = [{"role": "user", "content": "p"}]
    rows = [row(1, "7", solution="7"), row(2, "8", solution="8"), row(3, None, chat, solution="9")]
    reward = load(TRL, "accuracy_reward")
    assert reward.style == "trl" and not reward.needs_answer
    assert reward.score(rows, [r"\boxed{7}", "8", r"\boxed{9}"]).tolist() == [1, 0, 1]


def test_trl_ids_and_conveniences(load):
    reward = load(TRL, "length_reward")
    found = reward.judge([row(1), row(2)], ["a", "b"], [(1, 2, 3), (4,)])
    assert found.values.tolist() == [-.03, -.01]


def test_trl_none_skips(load):
    reward = load(TRL, "only_maths")
    found = reward.judge([row(1, kind="maths"), row(2, kind="prose")], ["", ""])
    assert found.values[0] == 1 and math.isnan(found.values[1])
    assert found.skipped.tolist() == [False, True] and not reward.trouble


@pytest.mark.parametrize("function, value", [("slow_reward", .25), ("judge", .5)])
def test_trl_coroutines_and_objects(load, function, value):
    assert load(TRL, function).score([row(1), row(2)], ["", ""]).tolist() == [value] * 2


# -- verl ----------------------------------------------------------------------------------------

def verl_row(n, answer):
    return row(n, answer, [{"role": "user", "content": "q"}], data_source="openai/gsm8k", ability="math",
               reward_model={"style": "rule", "ground_truth": answer}, extra_info={"index": n - 1, "split": "train"})


def test_verl(load):
    reward = load(VERL)     # compute_score, the name verl looks for
    assert reward.style == "verl" and reward.needs_answer
    found = reward.judge([verl_row(1, "7"), verl_row(2, "8")], ["so\n#### 7", "so\n#### 7"])
    assert found.values.tolist() == [1.0, 0.1]
    assert found.components == [{"acc": 1.0, "index": 0.0}, {"acc": 0.0, "index": 1.0}]


def test_verl_coroutines_wait_together(load):
    reward = load(VERL, "waits", reward_seconds=5.0)
    reward.score([verl_row(1, "7")], ["7"])
    began = time.monotonic()
    assert reward.score([verl_row(n, "7") for n in range(1, 41)], ["7"] * 40).tolist() == [1] * 40
    assert time.monotonic() - began < 5      # 8 seconds one after the other


def test_verl_with_fewer_parameters(load):
    assert load(VERL, "bare").score([verl_row(1, "7")], ["7"]).tolist() == [1]


def test_verl_without_a_score(load):
    assert 'without "score" for t.jsonl:1; it has \'acc\'' in refusal(load(VERL, "no_score").score, [verl_row(1, "7")], ["7"])


def test_verl_needs_an_answer(load):
    assert refusal(load(VERL).check, [row(4, None)]).startswith("t.jsonl:4: ")


# -- OpenRLHF ------------------------------------------------------------------------------------

def test_openrlhf(load, real_model):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    reward = load(OPENRLHF, model=str(real_model), system_prompt="Be brief.")
    assert reward.style == "openrlhf"
    ids = tuple(tokenizer("7<|im_end|>")["input_ids"])
    found = reward.judge([row(1, "7"), row(2, "8")], ["7", "7"], [ids, ids])
    assert found.values.tolist() == [1, 0]
    assert found.components == [{"scores": 1, "accuracy": 1}, {"scores": 0, "accuracy": 0}]
    assert reward.score([row(1, "7")], ["7"]).tolist() == [1]       # ids unknown: without the end token
    assert load(OPENRLHF, "plain", model=str(real_model)).score([row(1), row(2)], ["7", ""]).tolist() == [1, 0]


# -- which it is ---------------------------------------------------------------------------------

def test_the_style_can_be_named(load):
    source = "def f(a, b, c): return [1.0]\ndef g(**kwargs): return float(kwargs['solution_str'] == kwargs['ground_truth'])"
    assert "needs a, b, c" in refusal(load(source, "f").score, [row(1)], [""])
    assert load(source, "g", reward_style="verl").score([row(1, "7")], ["7"]).tolist() == [1]


@pytest.mark.parametrize("source, function, says", [
    ("def f(): pass", "", "has neither compute_score nor reward_func, which are taken if none is named: write "),
    ("def f(): pass", "g", "has no function 'g'; its functions: f"),
    ("import no_such", "f", "No module named 'no_such'"), ("1 +", "f", "SyntaxError"),
    ("import sys; sys.exit(3)", "f", "its process ended with exit code 3"),
])
def test_files_without_the_function(load, source, function, says):
    assert says in refusal(load, source, function)


def test_a_file_that_is_not_there():
    assert "No such file" in refusal(load_reward, settings(reward="nowhere.py:f"))


def test_what_lies_beside_the_file_can_be_imported(load, tmp_path):
    (tmp_path / "beside_it.py").write_text("VALUE = 3.0")
    assert load("import beside_it\ndef f(completions): return [beside_it.VALUE]", "f").score([row(1)], [""]).tolist() == [3]


# -- those that misbehave ------------------------------------------------------------------------

HANGS = '''
import subprocess, sys, time
def f(completions):
    if "hang" in completions:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "left-behind"])
        time.sleep(1000)
    return [float(len(c)) for c in completions]
def each(solution_str, ground_truth):
    return f([solution_str])[0]
def spins(completions):
    while "hang" in completions:
        pass
    return [1.0] * len(completions)
'''


@pytest.mark.parametrize("function", ["f", "each", "spins"])
def test_one_that_hangs_costs_its_row(load, function):
    reward = load(HANGS, function, reward_seconds=1.0)
    out = reward.score([row(n) for n in range(1, 5)], ["a", "hang", "bb", "hang"])
    assert np.isnan(out).tolist() == [False, True, False, True]
    assert list(reward.trouble.values()) == [2] and list(reward.where.values()) == ["t.jsonl:2"]
    assert "took over 1 s" in next(iter(reward.trouble))
    left = [p for p in psutil.process_iter(["cmdline"]) if "left-behind" in (p.info["cmdline"] or [])]
    assert not left
    assert reward.score([row(1)], ["a"]).tolist() == [1]     # and goes on


def test_one_that_is_slow_but_ends_gives_the_same(load):
    source = "import time\ndef f(completions):\n    time.sleep(.3 * len(completions))\n    return [1.0] * len(completions)"
    reward = load(source, "f", reward_seconds=1.0)
    assert reward.score([row(n) for n in range(6)], [""] * 6).tolist() == [1] * 6 and not reward.trouble
    began = time.monotonic()
    assert reward.score([row(n) for n in range(6)], [""] * 6).tolist() == [1] * 6      # now with more patience
    assert time.monotonic() - began < 2.8


def test_one_that_dies_costs_its_row(load):
    source = "import os, signal\ndef f(solution_str, ground_truth):\n    if solution_str == 'x':\n" \
             "        os.kill(os.getpid(), signal.SIGSEGV)\n    return 1.0"
    reward = load(source, "f")
    out = reward.score([row(1), row(2), row(3)], ["", "x", ""])
    assert np.isnan(out).tolist() == [False, True, False] and "SIGSEGV" in next(iter(reward.trouble))


def test_one_that_gives_nan_is_counted_with_its_row(load):
    reward = load("def f(completions): return [1.0, float('nan'), float('inf')]", "f")
    assert np.isnan(reward.score([row(1), row(2), row(3)], [""] * 3)).tolist() == [False, True, True]
    [(kind, count)] = reward.trouble.items()
    assert kind.endswith("gave nan or inf") and count == 2 and reward.where[kind] == "t.jsonl:2"


@pytest.mark.parametrize("hang", ["time.sleep(1000)", "re.match('(a+)+$', 'a' * 60 + 'b')"])
def test_no_verifier_outlives_its_rank(tmp_path, hang):
    """A rank that is killed takes its verifier with it, even one that hangs, and holds the GIL; and what that started."""
    import subprocess
    import sys
    (tmp_path / "r.py").write_text(
        "import os, re, subprocess, sys, time\ndef f(completions):\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)', 'left-by-a-rank'], start_new_session=True)\n"
        f"    open('pid', 'w').write(str(os.getpid()))\n    {hang}")
    code = ("from essa_mpi import config\nfrom essa_mpi.rewards import load_reward\nfrom essa_mpi.tasks import Row\n"
            "c = config.make(dict(name='t', model='m', adapter='a', task='t.jsonl', reward='r.py:f'))\n"
            "load_reward(c).score([Row('p', '1', {}, None, 's')], [''])")
    rank = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    rank.kill()
    rank.wait()
    psutil.wait_procs([child], timeout=20)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert gone("left-by-a-rank")


def gone(word, seconds=10.0) -> bool:
    """Whether no process has this word on its command line, now or soon."""
    deadline = time.monotonic() + seconds
    while [p for p in psutil.process_iter(["cmdline"]) if word in (p.info["cmdline"] or [])]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_what_a_reward_started_ends_with_it(load):
    """In a session of its own, and orphaned."""
    source = ("import subprocess, sys\ndef f(completions):\n"
              "    subprocess.run(['sh', '-c', f'{sys.executable} -c \"import time; time.sleep(1000)\" left-by-a-reward &'],\n"
              "                   start_new_session=True)\n    return [1.0] * len(completions)")
    reward = load(source, "f")
    assert reward.score([row(1)], [""]).tolist() == [1]
    deadline = time.monotonic() + 20
    while gone("left-by-a-reward", 0):      # its shell may not have started it yet
        assert time.monotonic() < deadline
    reward.close()
    assert gone("left-by-a-reward", 0)


def test_what_a_reward_starts_can_be_terminated(load):
    """As verifiers limit their time: SIGTERM to a process, forked or executed."""
    source = ("import multiprocessing, subprocess, time\n"
              "def f(completions):\n"
              "    p = multiprocessing.get_context('fork').Process(target=time.sleep, args=(1000,))\n"
              "    p.start(); p.join(.1); p.terminate(); p.join()\n"
              "    q = subprocess.Popen(['sleep', '1000']); q.terminate(); q.wait()\n"
              "    return [float(p.exitcode + q.returncode)] * len(completions)")
    assert load(source, "f", reward_seconds=20).score([row(1)], [""]).tolist() == [-30]


def test_arguments_changed_in_place_are_one_items_own(load):
    source = ("def f(completions, tags):\n    return [float(len(t) + len(t.pop())) for t in tags]\n"
              "def g(solution_str, ground_truth, extra_info):\n"
              "    extra_info['seen'].append(1)\n    return float(len(extra_info['seen']))")
    same = row(1, tags=["a", "b"], extra_info={"seen": []})
    for function, value in (("f", 3), ("g", 1)):
        reward = load(source, function)
        assert reward.score([same] * 3, [""] * 3).tolist() == [value] * 3
        assert reward.score([same], [""]).tolist() == [value]


def test_a_fork_that_comes_back_answers_nothing(load):
    source = "import os\ndef f(solution_str, ground_truth):\n    os.fork()\n    return float(len(solution_str))"
    assert load(source, "f").score([row(n) for n in range(3)], ["aaa", "bbbb", "ccccc"]).tolist() == [3, 4, 5]


def test_what_is_written_to_low_files_is_no_answer(load):
    source = ("import os\ndef f(completions):\n    for fd in range(3, 30):\n        try:\n            os.write(fd, b'noise' * 9)\n"
              "        except OSError:\n            pass\n    return [1.0] * len(completions)")
    assert load(source, "f", reward_seconds=5).score([row(1)], [""]).tolist() == [1]


def test_columns_that_a_function_needs_are_looked_for_before_anything_runs(load):
    reward = load("def f(completions, solution, hint=None): return [1.0] * len(completions)", "f")
    reward.check([row(1, solution="x")])
    assert "needs solution, which t.jsonl:2 does not have" in refusal(reward.check, [row(1, solution="x"), row(2, other=1)])


def test_the_file_is_part_of_what_a_run_is(load):
    first = load("def f(completions): return [1.0]", "f").digest()
    assert first and load("def f(completions): return [1.0]", "f").digest() == first
    assert load("def f(completions): return [2.0]", "f").digest() != first
    assert load_reward(settings(reward="boxed")).digest() == ""


# -- several -------------------------------------------------------------------------------------

def test_several_weighted(load, tmp_path):
    load(TRL, "only_maths")
    file = tmp_path / "rewards_of_mine.py"
    names = {"boxed": 1, f"{file}:only_maths": 0.5}
    reward = load_reward(settings(rewards=names))
    found = reward.judge([row(1, kind="maths"), row(2, kind="prose")], [r"\boxed{7}", r"\boxed{7}"])
    assert found.values.tolist() == [1.5, 1.0] and not found.skipped.any()
    assert reward.names == tuple(names)
    assert found.components[0] == {"boxed": 1.0, f"{file}:only_maths": 1.0}
    assert math.isnan(found.components[1][f"{file}:only_maths"])
    assert reward.has_format("x") is False
    reward.close()


def test_a_part_of_no_weight_is_only_noted(load, tmp_path):
    load("def f(completions): return [float('nan')] * len(completions)", "f")
    reward = load_reward(settings(rewards={"boxed": 1.0, f"{tmp_path}/rewards_of_mine.py:f": 0.0}))
    assert reward.judge([row(1)], [r"\boxed{7}"]).values.tolist() == [1.0]
    reward.close()


def test_trouble_is_told_with_its_own_row(load, tmp_path):
    load("def f(completions, bad): return [float('nan') if b else 1.0 for b in bad]", "f")
    reward = load_reward(settings(rewards={"boxed": 1.0, f"{tmp_path}/rewards_of_mine.py:f": 1.0}))
    for bad in (1, 2):
        reward.trouble.clear(), reward.where.clear()    # as the scorer does
        reward.judge([row(n, bad=n == bad) for n in range(3)], [""] * 3)
        assert list(reward.where.values()) == [f"t.jsonl:{bad}"]
    reward.close()


def test_several_of_which_one_fails(load, tmp_path):
    load("def f(completions): return [float('nan')] * len(completions)", "f")
    reward = load_reward(settings(rewards={"boxed": 1.0, f"{tmp_path}/rewards_of_mine.py:f": 1.0}))
    found = reward.judge([row(1)], [r"\boxed{7}"])
    assert math.isnan(found.values[0]) and not found.skipped[0] and sum(reward.trouble.values()) == 1
    reward.close()


@pytest.mark.parametrize("keys, says", [
    ({"rewards": {"boxed": "1"}}, "rewards = {'boxed' = '1'}: needs a finite number"),
    ({"rewards": {"boxed": 1}, "reward": "math"}, "reward = 'math': rewards is set too"),
    ({"rewards": {"bxed": 1}}, "there is no such reward"),
    ({"rewards": {"boxed": 0}}, "all weights are 0"),
])
def test_weights_that_are_none(keys, says):
    assert says in refusal(lambda: load_reward(settings(**keys)))
