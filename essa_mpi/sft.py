"""The warm start: a few supervised steps that make the LoRA adapter the search begins from.

LoRA on the attention projections q, k, v and o (paper, section 3); AdamW at a constant rate;
loss on completion tokens and the end-of-sequence token. One process, one device. Evolution needs
a reward above zero but room to improve, so the warm start can stop as soon as the
answers have the right format: that window may be a few steps wide.
"""

import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from . import __version__
from .config import Config, UserError
from .files import write_folder
from .rewards import load_reward
from .spectrum import SEARCHED
from .tasks import Row, load_task, one_line, render
from .training import autocast, left_pad, quantised, straighten

PROJECTIONS = SEARCHED      # what is trained is what is searched

# The config keys that decide what the adapter is; written beside it.
KEYS = ("model", "task", "task_args", "task_rows", "sft_data", "sft_rows", "validation_data", "validation_rows",
        "heldout_data", "heldout_rows", "split_seed", "prompt_key", "answer_key", "completion_key", "system_prompt",
        "chat", "reward", "rewards", "reward_style", "math_answer", "math_lenient", "gym_strict", "format_pattern",
        "seed", "rank", "lora_alpha", "sft_lr", "sft_batch", "sft_micro_batch", "sft_epochs", "sft_steps", "sft_template",
        "sft_format_rate", "sft_check_rows", "sft_check_from", "max_tokens", "max_model_len", "stop")


def warm_start(config: Config, log=print) -> dict:
    """Train the adapter and write it, as a peft folder with an sft.json, to config.adapter.

    A function of the config on one machine and number of threads: LoRA's A is drawn and the rows
    are ordered by generators of their own, seeded with config.seed. sft_steps > 0 is the number
    of steps, whatever sft_epochs says. Float32 on a CPU; on a GPU a bfloat16 base, float32
    factors, bfloat16 autocast. Returns what sft.json holds. Raises UserError.
    """
    _check_destination(config)
    check_model(config.model)
    task, reward = load_task(config), load_reward(config)
    for note in task.notes:
        log(note)
    if not task.sft:
        raise UserError("config: there are no rows to warm-start on; set sft_data to a file of rows, or sft_rows "
                        "to cut that many off task")
    checked = task.validation[:config.sft_check_rows]
    if config.sft_format_rate:
        if not checked:
            raise UserError(f"config: sft_format_rate = {config.sft_format_rate}: is measured on validation rows "
                            f"and there are none; set validation_data or validation_rows, or sft_format_rate = 0")
        reward.check(checked)
        if reward.has_format("") is None:
            raise UserError(f"config: sft_format_rate = {config.sft_format_rate}: reward = {config.reward!r} knows "
                            f"no format; use boxed or math, or set sft_format_rate = 0 and sft_steps")

    tokenizer = _tokenizer(config.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _model(config, tokenizer, device)
    limit = config.max_model_len or getattr(model.config, "max_position_embeddings", None) or math.inf
    examples = [_example(row, tokenizer, config, limit) for row in task.sft]
    prompts = [render(row, tokenizer, config) for row in checked] if config.sft_format_rate else []

    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=config.sft_lr, weight_decay=0.0)
    steps = config.sft_steps or config.sft_epochs * math.ceil(len(examples) / config.sft_batch)
    batches = _batches(len(examples), config.sft_batch, config.seed)
    done = {"steps": 0, "tokens": 0, "completion_tokens": 0, "seconds": 0.0, "loss": None,
            "format_rate": None, "mean_reward": None, "stopped_by_format": False}
    start = time.monotonic()
    for step in range(1, steps + 1):
        loss, tokens, learnt = _backward(model, [examples[i] for i in next(batches)], config.sft_micro_batch, device)
        optimizer.step()
        optimizer.zero_grad()
        done["steps"], done["loss"] = step, loss
        done["tokens"] += tokens
        done["completion_tokens"] += learnt
        if not math.isfinite(done["loss"]):
            raise UserError(f"warm start: the loss is {done['loss']} at step {step}; lower sft_lr = {config.sft_lr}")
        line = f"warm start: step {step}/{steps}  loss {done['loss']:.4f}"
        if config.sft_format_rate and step >= config.sft_check_from:
            rate, mean, rows = _check(model, tokenizer, checked, prompts, reward, config, device)
            done["format_rate"], done["mean_reward"] = rate, mean
            log(f"{line}  format rate {rate:.3f}  mean reward {mean:.3f}  ({rows} rows)")
            if done["format_rate"] >= config.sft_format_rate:
                done["stopped_by_format"] = True
                break
        elif step % max(1, steps // 20) == 0 or step == steps:
            log(line)
    done["seconds"] = round(time.monotonic() - start, 2)

    if config.sft_format_rate and not done["stopped_by_format"]:
        rate = "never measured" if done["format_rate"] is None else f"{done['format_rate']:.3f}"
        log(f"warm start: WARNING: all {steps} steps are done and the format rate is {rate}, "
            f"not sft_format_rate = {config.sft_format_rate}; raise sft_steps, sft_epochs or sft_lr")
    _save(model, config, done)
    reward.close()
    log(f"warm start: {done['steps']} steps, {done['tokens']} tokens, {done['seconds']:.1f} s -> {config.adapter}")
    return done


def check_model(path: str) -> None:
    """Raise UserError unless `path` is a model folder with the four attention projections."""
    if not Path(path).is_dir():
        raise UserError(f"config: model = {path!r}: there is no such folder; give a Hugging Face model folder "
                        f"(with config.json, weights and tokenizer): nothing is downloaded, but "
                        f"`hf download NAME --local-dir DIR` makes one")
    if not (Path(path) / "config.json").is_file():
        raise UserError(f"config: model = {path!r}: the folder has no config.json; give a Hugging Face model folder")
    try:
        shape = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):  # names only, no memory
            model = AutoModelForCausalLM.from_config(shape)
    except Exception as error:
        raise UserError(f"config: model = {path!r}: transformers cannot build it: {one_line(error)}") from error
    present = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    missing = [name for name in PROJECTIONS if name not in present]
    if missing:
        raise UserError(f"config: model = {path!r}: its {type(model).__name__} has no {', '.join(missing)}; "
                        f"needs all of {', '.join(PROJECTIONS)}; use a model of the Llama, Qwen2 or Mistral kind")


def _check_destination(config: Config) -> None:
    """Raise UserError if writing the adapter would destroy what this program did not write."""
    target = Path(config.adapter)
    if target.is_dir():
        if any(target.iterdir()) and not (target / "sft.json").is_file():
            raise UserError(f"config: adapter = {config.adapter!r}: the folder holds something that sft did not "
                            f"write (no sft.json); name another folder, or move it away")
    elif target.exists():
        raise UserError(f"config: adapter = {config.adapter!r}: is a file; name a folder")


def _tokenizer(path: str):
    """The model's tokenizer. Raises UserError if there is none or it has no end-of-sequence token."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"config: model = {path!r}: its tokenizer cannot be loaded: {one_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"config: model = {path!r}: its tokenizer has no eos_token, so a completion has no end to "
                        f"learn; set eos_token in tokenizer_config.json")
    return tokenizer


def _model(config: Config, tokenizer, device: str):
    """The base model with fresh LoRA factors: A by peft's rule (Kaiming uniform) from our own generator, B zero."""
    try:
        base = AutoModelForCausalLM.from_pretrained(
            config.model, dtype=torch.bfloat16 if device == "cuda" else torch.float32, local_files_only=True,
            **quantised(config.model))
    except OSError as error:
        raise UserError(f"config: model = {config.model!r}: cannot be loaded: {one_line(error)}") from error
    # A model's own generation defaults may sample or penalise; the engine's greedy does not.
    own = base.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    base.generation_config = GenerationConfig(do_sample=False, max_new_tokens=config.max_tokens,
                                              eos_token_id=sorted(ends), pad_token_id=_pad(tokenizer))
    straighten(base)
    lora = LoraConfig(r=config.rank, lora_alpha=_plain(config.lora_alpha), lora_dropout=0.0, bias="none",
                      target_modules=list(PROJECTIONS), task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):  # peft draws from the global generator; leave it as it was
        model = get_peft_model(base, lora).to(device)
    draw = torch.Generator().manual_seed(config.seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_A." in name:
                fresh = torch.empty(weight.shape)
                torch.nn.init.kaiming_uniform_(fresh, a=math.sqrt(5), generator=draw)
                weight.copy_(fresh)
    return model


def _plain(value: float):
    return int(value) if value == int(value) else value


def _pad(tokenizer) -> int:
    """The id padding is written with; masked everywhere, so any will do."""
    return next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)


def _example(row: Row, tokenizer, config: Config, limit: float) -> tuple[list[int], list[int]]:
    """(prompt ids, completion ids) of a row, the completion with the end-of-sequence token. Raises UserError."""
    text = row.completion
    if text is None:
        if row.answer is None:
            raise UserError(f"{row.source}: there is neither a completion nor an answer to learn; add one to the row")
        try:
            text = config.sft_template.format(answer=row.answer)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise UserError(f"config: sft_template = {config.sft_template!r}: {one_line(error)}; it may hold "
                            f"{{answer}} and other braces are written double, as in \\boxed{{{{{{answer}}}}}}") from None
    prompt = render(row, tokenizer, config)
    # The engine stops at the tokenizer's end token, so that is the one to learn.
    completion = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    if len(prompt) + len(completion) > limit:
        raise UserError(f"{row.source}: {len(prompt) + len(completion)} tokens of prompt and completion, more than "
                        f"the {limit} the model takes (max_model_len, max_position_embeddings); shorten the row")
    return prompt, completion


def _batches(n: int, batch: int, seed: int):
    """Lists of at most `batch` row indices without end: a fresh permutation of the n rows each epoch."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(n, generator=draw).split(batch)


def _backward(model, examples, micro_batch: int, device: str) -> tuple[float, int, int]:
    """`_loss` of the batch and its gradients, `micro_batch` (0: all) examples in memory at once; loss and counts.

    A completion token weighs the same in whichever micro-batch it is: only the order of the sums differs.
    """
    size = micro_batch or len(examples)
    whole = sum(len(completion) for _, completion in examples)
    total, tokens, learnt = 0.0, 0, 0
    for start in range(0, len(examples), size):
        loss, seen, here = _loss(model, examples[start:start + size], device)
        (loss * (here / whole)).backward()
        total, tokens, learnt = total + loss.item() * here / whole, tokens + seen, learnt + here
    return total, tokens, learnt


def _loss(model, examples, device: str) -> tuple[torch.Tensor, int, int]:
    """Mean cross-entropy over the batch's completion tokens; tokens seen; completion tokens."""
    inputs = left_pad([prompt + completion for prompt, completion in examples], device)
    longest = max(len(completion) for _, completion in examples)
    labels = torch.tensor([[-100] * (longest - len(completion)) + completion for _, completion in examples])
    with autocast(device):  # logits where a completion token is predicted, not over the whole prompt
        logits = model(**inputs, use_cache=False, logits_to_keep=longest + 1).logits[:, :-1]
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.to(device).flatten())
    return loss, int(inputs["attention_mask"].sum()), int((labels != -100).sum())


def _check(model, tokenizer, rows, prompts, reward, config: Config, device: str) -> tuple[float, float, int]:
    """Format rate and mean reward (a missing one counts as 0) of greedy completions, and of how many rows.

    Ends early where the rows to come can no longer lift the rate to sft_format_rate, as in most checks.
    """
    formatted, rewards = [], []
    for start in range(0, len(rows), 16):
        texts = _complete(model, tokenizer, prompts[start:start + 16], config, device)
        formatted += map(reward.has_format, texts)
        rewards += reward.score(rows[start:start + 16], texts).tolist()
        if (len(rows) - formatted.count(False)) / len(rows) < config.sft_format_rate:
            break
    return sum(formatted) / len(formatted), sum(r for r in rewards if r == r) / len(rewards), len(formatted)


@torch.no_grad()
def _complete(model, tokenizer, prompts: list[list[int]], config: Config, device: str) -> list[str]:
    """Greedy completions, at most max_tokens long, cut before the first of the `stop` strings."""
    inputs = left_pad(prompts, device)
    del inputs["position_ids"]  # generate makes its own
    with autocast(device):
        tokens = model.generate(**inputs)[:, inputs["input_ids"].shape[1]:]
    return [_cut(text, config.stop) for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]


def _cut(text: str, stop: list[str]) -> str:
    """The text before the first of the `stop` strings in it."""
    return text[:min((text.index(s) for s in stop if s in text), default=len(text))]


def _save(model, config: Config, done: dict) -> None:
    """Write the adapter to its place, whole; one that was there goes only then."""
    def write(fresh):
        # Asking whether the vocabulary grew would look the base model up on the network.
        model.save_pretrained(fresh, save_embedding_layers=False)
        record = {**done, "version": __version__, "config": {key: getattr(config, key) for key in KEYS}}
        (fresh / "sft.json").write_text(json.dumps(record, indent=2) + "\n")
    write_folder(config.adapter, write)
