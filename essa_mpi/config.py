"""One flat TOML table to one frozen dataclass. Knows nothing of MPI or torch.

Every key has a type, a default and, where it has one, the default's source.
Unknown keys, wrong types and values outside their range are refused with one
line that names the key, the value, what is allowed and what to do.
"""

import dataclasses
import difflib
import json
import math
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path


class UserError(Exception):
    """Something the user can mend: printed as one line, exit code 2."""


def _key(default=dataclasses.MISSING, *, one_of=None, low=None, high=None, open_low=False):
    """A config key: its default and the values it may take (bounds inclusive unless `open_low`)."""
    rule = {"one_of": one_of, "low": low, "high": high, "open_low": open_low}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=rule)
    return field(default=default, metadata=rule)


@dataclass(frozen=True)
class Config:
    # What is evolved, on what, judged how.
    name: str = _key()                      # the run folder is runs/<name>
    model: str = _key()                     # a Hugging Face model folder
    adapter: str = _key()                   # a peft LoRA adapter folder: the warm start (`sft` writes it)
    task: str = _key()                      # the rows to evolve on: on the disk, or a reasoning-gym generator
    reward: str = _key("exact")             # see "How completions are judged"
    seed: int = _key(0, low=0, high=2**63 - 1)

    # How completions are judged. reward: exact | boxed | math | format | reasoning_gym | ifeval | code | model |
    # http://... (a server, asked as OpenRLHF asks one) | package.module:function | file.py:function.
    rewards: dict = _key({})                # instead of `reward`: several, name -> weight
    reward_style: str = _key("auto", one_of=("auto", "trl", "verl", "openrlhf"))  # how a function is called; auto: by its parameters
    reward_seconds: float = _key(60.0, low=0.0, high=1e6, open_low=True)  # wall time a row may take; longer: missing, and counted
    math_answer: str = _key("any", one_of=("any", "boxed", "hash", "last"))  # where: as math-verify finds it; boxed; after ####; the last number
    math_lenient: bool = _key(False)        # math-verify's strict = False: variables, sets and tuples compared loosely
    gym_strict: bool = _key(False)          # reasoning_gym: 1 for a full score, else 0
    format_pattern: str = _key("")          # format: a regular expression for the whole completion
    ifeval_score: str = _key("strict", one_of=("strict", "loose", "partial_strict", "partial_loose"))
    ifeval_nltk_data: str = _key("")        # ifeval: a folder with tokenizers/punkt_tab ("" = where NLTK looks)
    allow_code: bool = _key(False)          # code: run what the model writes
    code_seconds: float = _key(10.0, low=0.0, open_low=True)  # code: CPU time of a program's tests; twice that of wall time
    code_gib: float = _key(2.0, low=0.1)    # code: memory of a program
    reward_model: str = _key("")            # model: the folder of a sequence classifier
    reward_device: str = _key("")           # model: where it runs ("" = a GPU if torch sees one)
    reward_trust_code: bool = _key(False)   # model: run code that comes with it

    # The search (paper, Table 7: population 96, batch 100, alpha 1.0 are its defaults).
    generations: int = _key(50, low=0)
    population: int = _key(96, low=2)
    batch: int = _key(100, low=1)           # rows a generation, the same for every candidate
    sigma: float = _key(0.5, low=0.0, open_low=True)  # not in the paper; measured, for relative offsets
    alpha: float = _key(1.0, low=0.0, high=1.0, open_low=True)  # share of singular values searched
    # What x adds to a singular value s: s x; s (e^x - 1); mean(s) x; x (the paper's wording).
    offsets: str = _key("relative", one_of=("relative", "exp", "projection", "absolute"))
    offset_scale: dict = _key({})           # factors on x by projection or factor, e.g. {v_proj = 0.5, B = 2.0}
    search: str = _key("auto", one_of=("auto", "fast", "sep", "limited", "cma"))  # auto: by D; cma: the textbook, slow
    active: bool = _key(False)              # negative weights for the worse half
    step_size: str = _key("csa", one_of=("csa", "tpa"))  # how sigma adapts: cumulative, or by two points
    mean_decay: float = _key(0.0, low=0.0, high=0.5)  # share by which the mean returns to the warm start a generation

    max_seconds: float = _key(0.0, low=0.0)  # evolving ends after the generation in which this passes; 0 = no limit
    hang_seconds: float = _key(3600.0, low=0.0)  # a job of which a rank lets the others wait so long is ended; 0 = never
    walltime_seconds: float = _key(0.0, low=0.0)  # of the job: before it is over, checkpoint and exit 75; 0 = no limit

    # Which rows of the train split a generation is scored on.
    rows: str = _key("fresh", one_of=("fresh", "pool", "growing"))
    pool_rows: int = _key(0, low=0)         # pool: the rows of the pool (0 = batch, one fixed batch)
    pool_turnover: int = _key(0, low=0)     # pool: rows of the batch replaced a generation (0 = all of them)
    batch_growth: float = _key(1.05, low=1.0, high=2.0)  # growing: the batch's factor a generation
    batch_max: int = _key(0, low=0)         # growing: and its limit (0 = half the train split)

    # Noise (off by default; each costs all-gathers beyond the generation's one).
    racing: int = _key(0, low=0, high=64)   # rounds of scoring, the hopeless dropped after each; 0 = off
    reward_low: float = _key(0.0)           # racing: the least and the largest reward there can be; equal = unknown
    reward_high: float = _key(0.0)          # (the built-in ones need neither: 0 and 1)
    reevaluate: int = _key(0, low=0)        # candidates about the selection's edge that are scored on further rows

    # Which of the search's vectors is handed over as the result; all are scored on the held-out rows.
    answer: str = _key("final", one_of=("final", "averaged", "validated", "candidate"))

    # Placing candidates in the engine.
    mode: str = _key("shared", one_of=("shared", "slots", "merged", "auto"))  # auto: the fastest, by a trial at start
    slots: int = _key(16, low=1)            # candidates in one continuous batch (mode = "slots")

    # Ranks of unequal speed: shares by the speed of the last generation. What a candidate scores does not depend on it
    # but for near-ties of greedy decoding, as on another number of ranks.
    balance: bool = _key(False)

    # Rows: own files, or shares cut off `task` by `split_seed`; the four splits are disjoint.
    prompt_key: str = _key("prompt")
    answer_key: str = _key("answer")
    completion_key: str = _key("completion")  # what `sft` learns; a row without it: see sft_template
    system_prompt: str = _key("")           # "" = none given (the chat template may have its own)
    chat: bool = _key(True)                 # apply the tokenizer's chat template
    task_args: dict = _key({})              # passed to the reasoning-gym generator
    task_rows: int = _key(0, low=0)         # rows a generator makes (0 = 1000), or at most from a file (0 = all)
    split_seed: int = _key(0, low=0, high=2**63 - 1)
    sft_data: str = _key("")
    validation_data: str = _key("")
    heldout_data: str = _key("")
    sft_rows: int = _key(0, low=0)          # 0: all of sft_data, or none cut off task; so for the next two
    validation_rows: int = _key(0, low=0)   # 0: all of validation_data (validation_every = 0 validates never), or none of task
    heldout_rows: int = _key(0, low=0)
    validation_every: int = _key(0, low=0)  # generations between validations of the mean; 0 = never

    # Sampling (not stated in the paper: greedy, so that a generation's noise is that of its rows).
    temperature: float = _key(0.0, low=0.0)
    top_p: float = _key(1.0, low=0.0, high=1.0, open_low=True)
    max_tokens: int = _key(512, low=1)
    stop: list = _key([])                   # strings that end a completion
    samples: int = _key(1, low=1)           # completions a row

    # The engine.
    dtype: str = _key("auto", one_of=("auto", "bfloat16", "float16", "float32"))
    max_model_len: int = _key(0, low=0)     # 0 = the model's own
    max_num_seqs: int = _key(256, low=1)
    gpu_memory_utilization: float = _key(0.9, low=0.0, high=1.0, open_low=True)
    kv_cache_gib: float = _key(1.0, low=0.0, open_low=True)  # CPU only: the size of the KV cache a rank
    tensor_parallel: int = _key(1, low=1)
    share_gpus: bool = _key(False)          # let several ranks of a host use one GPU
    vllm: dict = _key({})                   # passed to vllm.LLM as it is

    # The gradient methods: `grpo`. A generation is a step here: `batch` prompts, `group` rollouts of each. The defaults
    # are those of F-GRPO (arXiv 2602.06717, appendix), whose learning rate is for all weights of 3B to 7B models.
    loss: str = _key("grpo", one_of=("grpo", "dapo", "cispo", "dr_grpo"))
    parameters: str = _key("lora", one_of=("lora", "spectrum"))  # the factors, or the singular values that ESSA searches
    group: int = _key(8, low=2)
    lr: float = _key(1e-6, low=0.0, high=1e3, open_low=True)
    warmup_steps: int = _key(15, low=0)     # updates over which lr rises to its value, linearly
    weight_decay: float = _key(0.01, low=0.0, high=1e3)
    clip_norm: float = _key(1.0, low=0.0, high=1e30)   # of the gradient; 0 = not clipped
    clip_low: float = _key(0.0, low=0.0)    # ratios below 1 - clip_low and above 1 + clip_high are clipped;
    clip_high: float = _key(0.0, low=0.0, high=1e6)   # 0 = the loss's own: grpo .2 .2, dapo .2 .28, cispo 1 5, dr_grpo .2 .2
    kl: float = _key(0.0, low=0.0, high=1e6)          # weight of the divergence from the warm start, estimated by k3
    advantages: str = _key("auto", one_of=("auto", "std", "mean"))  # reward - mean, std: over the deviation; auto: mean for dr_grpo
    inner_epochs: int = _key(1, low=1)      # passes over a step's rollouts
    mini_batch: int = _key(0, low=0)        # prompts an update, about: the parts are equal; 0 = all of the step's
    micro_batch: int = _key(16, low=1)      # sequences in memory at once
    focal_gamma: float = _key(0.0, low=0.0)  # F-GRPO: advantages times (1 - share of right rollouts)^gamma; 0 = off
    focal_threshold: float | None = _key(None)  # the reward from which a rollout is right; not needed if they are 0 and 1
    dynamic_sampling: int = _key(0, low=0)  # DAPO: at most so many draws a step, till there are `batch` groups that differ
    train_dtype: str = _key("auto", one_of=("auto", "bfloat16", "float32"))  # of the base model; auto: as `dtype`

    # The run folder.
    checkpoint_every: int = _key(1, low=1)
    keep_checkpoints: int = _key(2, low=2)
    samples_logged: int = _key(4, low=0)    # completions a generation written to samples.jsonl
    trackers: list = _key([], one_of=("tensorboard", "wandb"))  # who gets a copy of metrics.jsonl; wandb offline

    # The warm start: `sft` (paper: batch 16, lr 1e-4, one epoch, rank 8).
    rank: int = _key(8, low=1)
    lora_alpha: float = _key(16.0, low=0.0, open_low=True)
    sft_lr: float = _key(1e-4, low=0.0, open_low=True)
    sft_batch: int = _key(16, low=1)
    sft_micro_batch: int = _key(0, low=0)   # rows of a batch in memory at once; 0 = all of them
    sft_epochs: int = _key(1, low=1)
    sft_steps: int = _key(0, low=0)         # 0 = as many as the epochs hold
    sft_template: str = _key("{answer}")    # completion of a row that has no completion_key
    sft_format_rate: float = _key(0.0, low=0.0, high=1.0)  # stop once this share of answers has the format; 0 = off
    sft_check_rows: int = _key(48, low=1)   # validation rows generated at each check of the format rate
    sft_check_from: int = _key(4, low=1)    # first step at which the format rate is checked


# With --resume these may differ from the stored config; nothing here changes the search's history (micro_batch the last bits of a training).
RESUMABLE = frozenset({
    "generations", "mode", "slots", "gpu_memory_utilization", "kv_cache_gib", "tensor_parallel",
    "max_num_seqs", "checkpoint_every", "keep_checkpoints", "samples_logged", "answer",
    "trackers", "share_gpus", "balance", "max_seconds", "walltime_seconds", "hang_seconds", "micro_batch",
})

_FIELDS = {f.name: f for f in dataclasses.fields(Config)}
_WORDS = {str: "a string", int: "an integer", float: "a number", bool: "true or false",
          list: "a list of strings", dict: "a table"}


def _check(key, value):
    """The value of `key`, converted to its type, or UserError."""
    if key not in _FIELDS:
        near = difflib.get_close_matches(key, _FIELDS, n=1)
        hint = f"did you mean `{near[0]}`?" if near else "see essa_mpi/config.py for the keys there are"
        raise UserError(f"config: unknown key `{key}`; {hint}")
    kind, rule = _FIELDS[key].type, _FIELDS[key].metadata
    if kind == float | None:    # None stands for a key that is not there: TOML has no word for it
        kind = float
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is list and not all(type(v) is str for v in value)):
        several = key in ("reward", "rewards")      # TRL has a list of functions there
        raise UserError(f"config: {key} = {json.dumps(value, default=str)}: needs {_WORDS[kind]}" + (
            '; several with their weights: rewards = {"file.py:f" = 1.0, math = 0.5}' if several else ""))
    if kind is float and not math.isfinite(value):
        raise UserError(f"config: {key} = {value}: needs a finite number")
    if kind is list and rule["one_of"]:
        for item in value:
            if item not in rule["one_of"]:
                raise UserError(f"config: {key} = {json.dumps(value)}: {item!r} must be one of {', '.join(rule['one_of'])}")
            if value.count(item) > 1:
                raise UserError(f"config: {key} = {json.dumps(value)}: {item!r} is there twice; name it once")
    elif rule["one_of"] and value not in rule["one_of"]:
        raise UserError(f"config: {key} = {value!r}: must be one of {', '.join(rule['one_of'])}")
    low, high = rule["low"], rule["high"]
    below = low is not None and (value <= low if rule["open_low"] else value < low)
    if below or (high is not None and value > high):
        least = f"above {low}" if rule["open_low"] else f"at least {low}"
        most = "" if high is None else f" and at most {high}"
        raise UserError(f"config: {key} = {value}: must be {least}{most}")
    if key == "name" and not re.fullmatch(r"\w[\w .,+=@-]*", value):
        raise UserError(f"config: name = {value!r}: names the folder runs/<name>; needs a plain name of letters, "
                        f"digits and . , + = @ - _ that starts with a letter or digit")
    if kind is dict:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise UserError(f"config: {key} = {value}: its values must be strings, finite numbers, booleans, "
                            f"lists or tables") from None
    return value


def make(table: dict) -> Config:
    """A checked Config from a plain table. Raises UserError on the first bad key."""
    table = {key: _check(key, value) for key, value in table.items()}
    for key in ("name", "model", "adapter", "task"):
        if key not in table:
            raise UserError(f"config: key `{key}` is missing; add it to the TOML file or pass --set {key}=...")
    config = Config(**table)
    _check_together(config)
    return config


def _check_together(c: Config) -> None:
    """Raise UserError where keys that are each allowed do not go together."""
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "A", "B")
    for key, value in c.offset_scale.items():
        if key not in parts or type(value) not in (int, float) or not 0 < value < math.inf:
            raise UserError(f"config: offset_scale = {{{key} = {value!r}}}: its keys must be of {', '.join(parts)} and "
                            f"its values numbers above 0")
    for key, value in c.rewards.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise UserError(f"config: rewards = {{{key!r} = {value!r}}}: needs a finite number, the reward's weight")
    if c.rewards and not any(c.rewards.values()):
        raise UserError(f"config: rewards = {json.dumps(c.rewards)}: all weights are 0; give one of them another")
    if c.rewards and c.reward != "exact":
        raise UserError(f"config: reward = {c.reward!r}: rewards is set too; put it in there, with its weight")
    for key in ("pool_rows", "batch_max"):
        value = getattr(c, key)
        if 0 < value < c.batch:
            raise UserError(f"config: {key} = {value}: must be 0 or at least batch = {c.batch}")
    if c.pool_turnover > c.batch:
        raise UserError(f"config: pool_turnover = {c.pool_turnover}: must be at most batch = {c.batch}")
    if c.reward_low > c.reward_high:
        raise UserError(f"config: reward_low = {c.reward_low:g}: must be at most reward_high = {c.reward_high:g}")
    if c.racing == 1:
        raise UserError("config: racing = 1: a race has at least 2 rounds; set 0 for none")
    if c.racing > c.batch:
        raise UserError(f"config: racing = {c.racing}: must be at most batch = {c.batch}, a row a round")
    if c.racing:
        if reward_bounds(c) is None:
            raise UserError(f"config: racing = {c.racing}: needs the least and largest reward {c.reward!r} can give, which "
                            f"decide who cannot win any more: set reward_low and reward_high")
        for key, clashes in (("active", c.active), ("step_size", c.step_size == "tpa"), ("reevaluate", c.reevaluate > 0)):
            if clashes:
                raise UserError(f"config: racing = {c.racing}: not with {key} = {getattr(c, key)!r}, which needs the "
                                f"scores of the candidates a race drops; turn one of them off")
    if c.reevaluate > c.population:
        raise UserError(f"config: reevaluate = {c.reevaluate}: must be at most population = {c.population}")
    if c.answer == "validated" and not c.validation_every:
        raise UserError("config: answer = 'validated': nothing is validated; set validation_every and validation rows")
    if c.step_size == "tpa" and c.population < 4:
        raise UserError(f"config: population = {c.population}: step_size = 'tpa' needs at least 4, two of which try "
                        f"the step size")
    if c.active and c.search == "limited":
        raise UserError("config: active = true: search = 'limited' has no negative weights; set active = false or "
                        "another search")


def reward_bounds(config: Config) -> tuple[float, float] | None:
    """The least and the largest reward there can be, or None if nobody said."""
    if config.reward_low < config.reward_high:
        return config.reward_low, config.reward_high
    known = ("exact", "boxed", "math", "format", "reasoning_gym", "ifeval", "code")
    return (0.0, 1.0) if config.reward in known and not config.rewards else None


def parse_override(text: str):
    """`key=value` to (key, value): the value is TOML, a bare word is a string."""
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"--set {text}: needs key=value")
    try:
        return key, tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return key, raw


def load(path: str | Path, overrides: list[str] = ()) -> Config:
    """The config in `path` with `--set` overrides on top. Raises UserError."""
    try:
        table = tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise UserError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"config file {path} is not TOML: {error}") from None
    table.update(parse_override(text) for text in overrides)
    return make(table)


def _toml(value) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    # A JSON string is a TOML basic string once DEL is escaped too.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def dump(config: Config) -> str:
    """The config as TOML, every key that has a value written out, so that `load` gives it back."""
    return "".join(f"{key} = {_toml(value)}\n" for key in _FIELDS if (value := getattr(config, key)) is not None)


def check_resumable(stored: Config, asked: Config) -> None:
    """Raise UserError if `asked` would continue another search than `stored`."""
    for key in _FIELDS:
        old, new = getattr(stored, key), getattr(asked, key)
        if old != new and key not in RESUMABLE:
            raise UserError(f"--resume: {key} = {new!r} but the run was started with {old!r}; "
                            f"set it back, or start a new run without --resume")
