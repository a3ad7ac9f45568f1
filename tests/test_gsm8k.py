"""The road of a user's own JSONL file and keys, on GSM8K: a real model, real engines, two ranks."""

import json

import pytest


@pytest.mark.slow
def test_one_generation_on_gsm8k(mpirun, real_model, warm_start, public_data, tmp_path):
    """Accuracy of so small a model is near zero: what is shown is that rows, reward and counts go through."""
    config = tmp_path / "gsm8k.toml"
    config.write_text(f"""
name = "gsm8k"
model = "{real_model}"
adapter = "{warm_start}"
task = "{public_data}/gsm8k/train.jsonl"
heldout_data = "{public_data}/gsm8k/test.jsonl"
heldout_rows = 6
prompt_key = "question"
answer_key = "answer"
reward = "math"
system_prompt = "Please reason step by step and place your final answer in \\\\boxed{{}}."
population = 3
batch = 4
generations = 1
mode = "merged"
max_tokens = 48
max_model_len = 512
""")
    outcome = mpirun(2, "run", config, cwd=tmp_path, timeout=400)
    assert outcome.rc == 0, outcome.stderr
    [metrics] = map(json.loads, (tmp_path / "runs/gsm8k/metrics.jsonl").read_text().splitlines())
    # The first generation scores the start beside the population of three.
    assert metrics["completions"] == (3 + 1) * 4 and metrics["missing"] == 0
    assert metrics["cut"] > 6 and "were cut at max_tokens" in outcome.stdout     # 48 tokens are few: it must say so
    heldout = json.loads((tmp_path / "runs/gsm8k/summary.json").read_text())["heldout"]
    assert heldout["n"] == 6 and 0 <= heldout["evolved"]["accuracy"] <= 1
    [sample, *_] = map(json.loads, (tmp_path / "runs/gsm8k/samples.jsonl").read_text().splitlines())
    assert "####" in sample["answer"] and sample["reward"] in (0.0, 1.0)
