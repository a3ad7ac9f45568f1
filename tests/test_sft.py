"""The warm start: what it learns, that it repeats, when it stops, what it writes and what it leaves alone."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM,
                          PreTrainedTokenizerFast)

from conftest import refusal
from essa_mpi import config as configuration
from essa_mpi import sft
from essa_mpi.tasks import Row

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<end>", *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A random Llama of two layers with a tokenizer of bytes; prompts are <user>...<assistant>."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    shape = LlamaConfig(vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
                        bos_token_id=None, eos_token_id=0, tie_word_embeddings=False, initializer_range=0.3)
    LlamaForCausalLM(shape).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def settings(tiny, tmp_path):
    """settings(**keys): the tiny model to be warm-started, eight steps on 32 rows, into tmp_path/adapter."""
    table = {
        "name": "t", "model": str(tiny), "adapter": str(tmp_path / "adapter"), "batch": 2, "reward": "boxed",
        "task": lines(tmp_path / "t.jsonl", [{"prompt": f"train {i}", "answer": "7"} for i in range(4)]),
        "sft_data": lines(tmp_path / "s.jsonl", [{"prompt": f"learn {i}", "answer": str(i % 2),
                                                  "completion": f"\\boxed{{{i % 2}}}"} for i in range(32)]),
        "validation_data": lines(tmp_path / "v.jsonl", [{"prompt": f"check {i}", "answer": "7"} for i in range(20)]),
        "rank": 2, "lora_alpha": 4.0, "sft_lr": 3e-2, "sft_batch": 8, "sft_steps": 8, "max_tokens": 4,
    }
    return lambda **keys: configuration.make({**table, **keys})


def quiet(line):
    pass


# -- learning ------------------------------------------------------------------------------------

def test_it_learns_and_writes_a_peft_adapter(settings, tiny):
    said, config = [], settings(sft_steps=40)
    before = torch.get_rng_state()
    done = sft.warm_start(config, log=said.append)
    assert torch.equal(torch.get_rng_state(), before)
    adapter = Path(config.adapter)
    assert sorted(p.name for p in adapter.parent.iterdir() if p.is_dir() or p.name.startswith(".")) == ["adapter"]
    record = json.loads((adapter / "sft.json").read_text())
    assert record.items() >= done.items()
    assert record["steps"] == 40 and record["config"]["sft_lr"] == 3e-2 and record["format_rate"] is None
    assert said[-1].startswith("warm start: 40 steps")

    shapes = {k: tuple(v.shape) for k, v in load_file(adapter / "adapter_model.safetensors").items()}
    assert len(shapes) == 2 * 4 * 2 and {k.split(".")[-3] for k in shapes} == set(sft.PROJECTIONS)
    assert all(shape[0 if "lora_A" in k else 1] == 2 for k, shape in shapes.items())

    # The adapter, loaded as anyone would, has learnt: its loss on the rows is far below the base model's.
    base = AutoModelForCausalLM.from_pretrained(tiny)
    examples = [sft._example(Row(f"learn {i}", "1", {}, "\\boxed{1}", "s"), byte_tokenizer(), config, 128)
                for i in (1, 3, 5)]
    with torch.no_grad():
        untrained = sft._loss(base, examples, "cpu")[0].item()
        trained = sft._loss(PeftModel.from_pretrained(base, adapter), examples, "cpu")[0].item()
    assert trained < untrained - 1.5


def weights(config):
    return load_file(Path(config.adapter) / "adapter_model.safetensors")


def test_the_same_config_gives_the_same_adapter(settings, tmp_path):
    made = [settings(adapter=str(tmp_path / name), seed=seed) for name, seed in (("a", 5), ("b", 5), ("c", 6))]
    for i, config in enumerate(made):
        torch.manual_seed(i)  # nobody else's generator matters
        sft.warm_start(config, log=quiet)
    a, b, c = map(weights, made)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not any(torch.equal(a[k], c[k]) for k in a)


def test_steps_and_epochs(settings):
    done = sft.warm_start(settings(sft_steps=0, sft_epochs=3, sft_batch=10), log=quiet)
    assert done["steps"] == 3 * 4  # 32 rows: three batches of 10 and one of 2
    # <user>learn NN<assistant>\boxed{N}<end>: 24 or 25 bytes of prompt, 9 and the end of completion.
    assert done["completion_tokens"] == 3 * 32 * 10
    assert done["tokens"] == 3 * (32 * 34 + 22)


def test_rows_come_once_an_epoch():
    batches = sft._batches(10, 4, seed=1)
    epochs = [[i for _ in range(3) for i in next(batches).tolist()] for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and epochs[0] != epochs[1]


def test_the_loss_is_that_of_the_completion_alone(tiny):
    """Against transformers' own loss, row by row without padding: left padding changes nothing."""
    model = AutoModelForCausalLM.from_pretrained(tiny)
    examples = [([5] * 30, [1, 2, 3, 0]), ([7, 8], [9, 0]), ([11, 12, 13], [14] * 9 + [0])]
    with torch.no_grad():
        total = sum(model(input_ids=torch.tensor([p + c]), labels=torch.tensor([[-100] * len(p) + c])).loss * len(c)
                    for p, c in examples)
        loss, tokens, learnt = sft._loss(model, examples, "cpu")
    assert learnt == 16 and tokens == 51
    torch.testing.assert_close(loss, total / 16, rtol=1e-5, atol=1e-6)


def test_left_padding_has_finite_gradients(settings):
    config = settings()
    model = sft._model(config, byte_tokenizer(), "cpu")
    sft._loss(model, [([1] * 60, [2, 0]), ([3], [4, 0])], "cpu")[0].backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert len(grads) == 16 and all(torch.isfinite(g).all() for g in grads)
    assert any(g.abs().max() > 0 for g in grads)


def test_micro_batches_give_the_gradient_of_the_whole_batch(settings):
    model = sft._model(settings(), byte_tokenizer(), "cpu").double()
    examples = [([5] * 30, [1, 2, 3, 0]), ([7, 8], [9, 0]), ([11, 12, 13], [14] * 9 + [0])]
    found = []
    for size in (0, 1, 2):
        counts = sft._backward(model, examples, size, "cpu")
        found.append((counts, [p.grad.clone() for p in model.parameters() if p.requires_grad]))
        model.zero_grad()
    (whole, gradients), *parts = found
    assert whole[1:] == (51, 16) and any(g.abs().max() > 0 for g in gradients)
    for counts, others in parts:
        assert counts[0] == pytest.approx(whole[0], rel=1e-6) and counts[1:] == whole[1:]
        for one, other in zip(gradients, others):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


def test_padding_changes_no_completion(settings):
    config = settings(max_tokens=6)
    tokenizer, model = byte_tokenizer(), sft._model(settings(max_tokens=6), byte_tokenizer(), "cpu")
    prompts = [[5] * 30, [7, 8], [11, 12, 13]]
    together = sft._complete(model, tokenizer, prompts, config, "cpu")
    assert together == [sft._complete(model, tokenizer, [p], config, "cpu")[0] for p in prompts]


def test_completions_end_where_the_engine_would_end_them():
    assert sft._cut("one END two STOP", ["STOP", "END"]) == "one "
    assert sft._cut("one", ["STOP"]) == sft._cut("one", []) == "one"


def test_what_is_learnt(settings):
    config, tokenizer = settings(sft_template="It is \\boxed{{{answer}}}."), byte_tokenizer()

    def learnt(row):
        prompt, completion = sft._example(row, tokenizer, config, 128)
        assert tokenizer.decode(prompt) == "<user>p<assistant>"
        return tokenizer.decode(completion)

    assert learnt(Row("p", 5, {}, None, "s")) == "It is \\boxed{5}.<end>"
    assert learnt(Row("p", 5, {}, "own words", "s")) == "own words<end>"
    assert "s.jsonl:3: there is neither" in refusal(learnt, Row("p", None, {}, None, "s.jsonl:3"))
    assert "s.jsonl:4: 148 tokens" in refusal(learnt, Row("p", 5, {}, "w" * 129, "s.jsonl:4"))
    config = settings(sft_template="\\boxed{answer}")
    assert learnt(Row("p", 5, {}, None, "s")) == "\\boxed5<end>"
    config = settings(sft_template="\\boxed{reply}")
    assert "other braces are written double, as in \\boxed{{{answer}}}" in refusal(learnt, Row("p", 5, {}, None, "s"))


# -- stopping ------------------------------------------------------------------------------------

def test_it_stops_once_the_format_is_there(settings, monkeypatch):
    rates = iter([(0.0, 0.0, 16), (0.5, 0.2, 16), (0.95, 0.4, 20), (1.0, 1.0, 20)])
    monkeypatch.setattr(sft, "_check", lambda *args: next(rates))
    said = []
    done = sft.warm_start(settings(sft_format_rate=0.9, sft_check_from=3), log=said.append)
    assert done["steps"] == 5 and done["stopped_by_format"]
    assert (done["format_rate"], done["mean_reward"]) == (0.95, 0.4)
    checks = [line for line in said if "format rate" in line]
    assert len(checks) == 3
    assert checks[2].startswith("warm start: step 5/8  loss ")
    assert checks[2].endswith("format rate 0.950  mean reward 0.400  (20 rows)")
    assert not any("WARNING" in line for line in said)


def test_it_says_so_if_the_format_never_comes(settings):
    said = []
    done = sft.warm_start(settings(sft_format_rate=0.9, sft_steps=5), log=said.append)
    assert done["steps"] == 5 and not done["stopped_by_format"] and done["format_rate"] == 0
    assert any("WARNING: all 5 steps are done and the format rate is 0.000" in line for line in said)
    said.clear()
    sft.warm_start(settings(sft_format_rate=0.9, sft_steps=3), log=said.append)
    assert any("the format rate is never measured" in line for line in said)


@pytest.mark.parametrize("texts, rate, rows", [
    (["\\boxed{7}"] * 20, 1.0, 20),
    (["\\boxed{7}"] * 18 + ["no"] * 2, 0.9, 20),
    (["no"] * 2 + ["\\boxed{7}"] * 18, 0.9, 20),
    (["no"] * 3 + ["\\boxed{7}"] * 17, 13 / 16, 16),  # the last four rows cannot make it 0.9 any more
    (["no"] * 20, 0.0, 16),
])
def test_a_check_ends_when_it_is_decided(settings, monkeypatch, texts, rate, rows):
    from essa_mpi.rewards import load_reward
    config = settings(sft_format_rate=0.9)
    left = list(texts)
    monkeypatch.setattr(sft, "_complete", lambda m, t, prompts, c, d: [left.pop(0) for _ in prompts])
    checked = [Row("p", "7", {}, None, "v")] * 20
    measured = sft._check(None, None, checked, [[1]] * 20, load_reward(config), config, "cpu")
    assert measured == pytest.approx((rate, rate, rows))


# -- writing -------------------------------------------------------------------------------------

def test_an_adapter_is_replaced_only_by_a_whole_one(settings, monkeypatch):
    config = settings(sft_steps=2)
    sft.warm_start(config, log=quiet)
    old = weights(config)

    def fails(self, path, **keys):
        Path(path).mkdir()
        (Path(path) / "adapter_config.json").write_text("half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(PeftModel, "save_pretrained", fails)
        with pytest.raises(OSError, match="disk full"):
            sft.warm_start(settings(sft_steps=3), log=quiet)
    assert all(torch.equal(v, old[k]) for k, v in weights(config).items())
    assert [p.name for p in Path(config.adapter).parent.iterdir() if p.name.startswith(".")] == []
    sft.warm_start(settings(sft_steps=3), log=quiet)
    assert not all(torch.equal(v, old[k]) for k, v in weights(config).items())
    assert json.loads((Path(config.adapter) / "sft.json").read_text())["steps"] == 3


def test_what_others_made_is_left_alone(settings, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "did not write (no sft.json)" in refusal(sft.warm_start, settings())
    assert "is a file; name a folder" in refusal(sft.warm_start, settings(adapter=str(tmp_path / "t.jsonl")))
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    sft.warm_start(settings(sft_steps=1), log=quiet)  # an empty folder is nobody's


# -- what is refused -----------------------------------------------------------------------------

def test_models_that_do_not_fit(settings, tmp_path):
    assert "there is no such folder" in refusal(sft.warm_start, settings(model=str(tmp_path / "none")))
    assert "has no config.json" in refusal(sft.warm_start, settings(model=str(tmp_path)))
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9)).save_pretrained(tmp_path / "gpt2")
    message = refusal(sft.warm_start, settings(model=str(tmp_path / "gpt2")))
    assert "GPT2LMHeadModel has no q_proj, k_proj, v_proj, o_proj" in message
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text('{"model_type": "no such"}')
    assert "transformers cannot build it" in refusal(sft.warm_start, settings(model=str(tmp_path / "broken")))


def test_a_folder_without_weights_or_tokenizer(settings, tiny, tmp_path):
    (tmp_path / "half").mkdir()
    (tmp_path / "half/config.json").write_bytes((tiny / "config.json").read_bytes())
    assert "its tokenizer cannot be loaded" in refusal(sft.warm_start, settings(model=str(tmp_path / "half")))
    byte_tokenizer().save_pretrained(tmp_path / "half")
    assert "cannot be loaded" in refusal(sft.warm_start, settings(model=str(tmp_path / "half")))


def test_rows_and_rewards_that_do_not_fit(settings):
    assert "no rows to warm-start on" in refusal(sft.warm_start, settings(sft_data=""))
    assert "none; set validation_data" in refusal(sft.warm_start, settings(sft_format_rate=0.5, validation_data=""))
    assert "knows no format" in refusal(sft.warm_start, settings(sft_format_rate=0.5, reward="exact"))
    assert "loss is nan" in refusal(sft.warm_start, settings(sft_lr=1e30)).lower()


# -- the real thing ------------------------------------------------------------------------------

@pytest.mark.slow
def test_the_real_model(real_model, tmp_path):
    """A few steps of the quickstart's warm start; that it then comes to the format takes ten more."""
    subprocess.run([sys.executable, ROOT / "jobs/largest_number.py", "--out", tmp_path], check=True,
                   stdout=subprocess.DEVNULL)
    said = []
    config = configuration.make({
        "name": "t", "model": str(real_model), "adapter": str(tmp_path / "adapter"), "reward": "boxed",
        "task": str(tmp_path / "train.jsonl"), "sft_data": str(tmp_path / "sft.jsonl"), "max_tokens": 12,
        "validation_data": str(tmp_path / "validation.jsonl"), "heldout_data": str(tmp_path / "heldout.jsonl"),
        "rank": 2, "lora_alpha": 4.0, "sft_lr": 1e-3, "sft_steps": 4, "sft_format_rate": 0.9, "sft_check_from": 4,
        "sft_check_rows": 8})
    done = sft.warm_start(config, log=said.append)
    losses = [float(line.split("loss ")[1].split()[0]) for line in said if "loss " in line]
    assert done["steps"] == len(losses) == 4 and losses[-1] < losses[0] - 0.2 and math.isfinite(done["loss"])
    assert 0 <= done["format_rate"] <= 1
    assert len(weights(config)) == 30 * 4 * 2
