"""A user's own task, from files as TRL, verl and OpenRLHF have them: a real model, real engines, two ranks.

So small a model is right about nothing here; what is shown is that rows, rewards, parts and counts go through.
"""

import json

import pytest

from test_reward_functions import OPENRLHF, TRL, VERL

pytestmark = pytest.mark.slow

COMMON = '''
population = 3
batch = 4
generations = 2
heldout_rows = 4
max_tokens = 8
max_model_len = 256
max_num_seqs = 32
kv_cache_gib = 0.25
dtype = "bfloat16"
samples_logged = 30
validation_every = 1
validation_rows = 2
'''


@pytest.fixture
def ran(mpirun, real_model, warm_start, tmp_path):
    """ran(name, lines) -> (metrics, samples, summary, outcome) of a run of two generations on two ranks."""
    def start(name, lines):
        (tmp_path / "config.toml").write_text(
            f'name = "{name}"\nmodel = "{real_model}"\nadapter = "{warm_start}"\n{lines}\n{COMMON}')
        outcome = mpirun(2, "run", "config.toml", cwd=tmp_path, timeout=400)
        assert outcome.rc == 0, outcome.stderr + outcome.stdout
        folder = tmp_path / "runs" / name
        metrics, samples = ([json.loads(line) for line in (folder / f"{file}.jsonl").read_text().splitlines()]
                            for file in ("metrics", "samples"))
        assert [m["generation"] for m in metrics] == [0, 1]
        assert [m["completions"] for m in metrics] == [4 * 4 + 2, 3 * 4 + 2]     # the first scores the start too
        assert {s["candidate"] for s in samples if s["arm"].startswith("candidate")} <= {0, 1, 2}
        return metrics, samples, json.loads((folder / "summary.json").read_text()), outcome
    return start


def test_as_with_trl(ran, tmp_path):
    """Chat messages and further columns in JSONL; two functions of one file, weighted."""
    (tmp_path / "my_rewards.py").write_text(TRL)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(
        {"prompt": [{"role": "user", "content": f"Which is larger, {i} or {i + 30}?"}], "solution": str(i + 30)}) + "\n"
        for i in range(30)))
    metrics, samples, _, _ = ran("trl", '''
task = "rows.jsonl"
rewards = {"my_rewards.py:accuracy_reward" = 1.0, "my_rewards.py:length_reward" = 0.5}
''')
    accuracy, length = "my_rewards.py:accuracy_reward", "my_rewards.py:length_reward"
    for m in metrics:
        assert m["missing"] == 0 and set(m["components"]) == {accuracy, length}
        assert m["components"][accuracy] + 0.5 * m["components"][length] == pytest.approx(m["mean_fitness"])
    for s in samples:
        assert s["reward"] == pytest.approx(s["components"][accuracy] + 0.5 * s["components"][length])
        assert -0.08 <= s["components"][length] < 0 and s["prompt"][0]["role"] == "user"


def test_as_with_verl(ran, tmp_path):
    """verl's parquet, nested columns and all, with a compute_score that returns a dict."""
    import pyarrow
    import pyarrow.parquet
    (tmp_path / "my_score.py").write_text(VERL.replace("extra_info[\"index\"] in (0, 1)", "extra_info[\"index\"] >= 0"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([
        {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": f"What is {i} + 1?"}], "ability": "math",
         "reward_model": {"style": "rule", "ground_truth": str(i + 1)}, "extra_info": {"split": "train", "index": i}}
        for i in range(30)]), tmp_path / "train.parquet")
    metrics, samples, summary, _ = ran("verl", 'task = "train.parquet"\nreward = "my_score.py"')
    assert all(m["missing"] == 0 and 0.1 <= m["mean_fitness"] <= 1 for m in metrics)
    for s in samples:
        assert s["source"].startswith("train.parquet[") and s["components"]["index"] == int(s["answer"]) - 1
    assert summary["heldout"]["n"] == 4


def test_as_with_openrlhf(ran, tmp_path):
    """OpenRLHF's input and label keys, and the file given to --remote_rm_url. Then all that `eval` can do, on it."""
    (tmp_path / "reward_func.py").write_text(OPENRLHF)
    (tmp_path / "prompts.jsonl").write_text("".join(
        json.dumps({"input": f"Say the number {i}.", "label": str(i)}) + "\n" for i in range(30)))
    metrics, samples, _, _ = ran("openrlhf", '''
task = "prompts.jsonl"
prompt_key = "input"
answer_key = "label"
reward = "reward_func.py"
''')
    assert all(m["missing"] == 0 for m in metrics)
    assert all(s["components"] == {"scores": s["reward"], "accuracy": s["reward"]} for s in samples)


def test_all_that_eval_can_do(ran, mpirun, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(
        json.dumps({"prompt": f"Say \\boxed{{{i}}}.", "answer": str(i)}) + "\n" for i in range(30)))
    (tmp_path / "other.jsonl").write_text("".join(
        json.dumps({"q": f"Say the number {i}.", "a": str(i)}) + "\n" for i in range(5)))
    (tmp_path / "other.toml").write_text('heldout_data = "other.jsonl"\nprompt_key = "q"\nanswer_key = "a"\nreward = "exact"')
    (tmp_path / "texts.txt").write_text("Once upon a time there was a king who had three sons.\n\nThe sea is deep and blue.")
    _, _, summary, _ = ran("own", 'task = "rows.jsonl"\nreward = "boxed"')
    outcome = mpirun(3, "eval", "runs/own", "--tasks", "other.toml", "--samples", "4", "--drift", "3", "--drift-texts",
                     "texts.txt", "--json", "found.json", cwd=tmp_path, timeout=400)
    assert outcome.rc == 0, outcome.stderr + outcome.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["n"] == 4 and found["evolved"]["accuracy"] == summary["heldout"]["evolved"]["accuracy"]
    assert [p["arm"] for p in found["paired"]] == ["warm_start", "evolved", "evolved"]
    arms = found["sampled"]["arms"]
    assert set(arms) == {"base", "warm_start", "evolved"} and list(arms["base"]) == ["avg@4", "pass@1", "pass@2", "pass@4"]
    assert all(a["pass@1"][0] <= a["pass@2"][0] <= a["pass@4"][0] <= 1 for a in arms.values())
    assert found["tasks"]["other"]["n"] == 5
    for where in ("task", "texts"):
        for arm in ("warm_start", "evolved"):
            assert found["drift"][where][arm]["kl"][0] > 0 and found["drift"][where][arm]["tokens"] > 0
    assert "nll_growth" in found["drift"]["texts"]["evolved"]
    assert "pass@4" in outcome.stdout and "paired, 4 rows" in outcome.stdout and "KL" in outcome.stdout
