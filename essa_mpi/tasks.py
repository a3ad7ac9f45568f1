"""Rows to prompts: those of files or of a reasoning-gym generator, four disjoint splits, token ids.

Knows nothing of MPI, engines or rewards. Everything here is a function of the config
alone, so every rank builds the same task; `Task.digest` lets them check that.
"""

import difflib
import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
from dataclasses import dataclass, field

from .config import Config, UserError
from .data import Row, is_file, one_line, read_file
from .perturbation import row_order

GENERATOR_ROWS = 1000  # task_rows = 0 with a generator
SPLITS = ("heldout", "validation", "train", "sft")  # a prompt that occurs twice stays in the first of these


@dataclass(frozen=True)
class Task:
    """The rows of a run. `notes` says in words what was left out of them."""

    sft: list[Row]
    train: list[Row]
    validation: list[Row]
    heldout: list[Row]
    notes: list[str] = field(default_factory=list)

    def digest(self) -> int:
        """64 bits of all that a reward may see and the warm start learns: differs where rows do."""
        sha = hashlib.sha256()
        for split in SPLITS:
            for row in getattr(self, split):
                content = [split, row.prompt, row.answer, row.completion, *([row.fields] if row.fields else [])]
                sha.update(json.dumps(content, sort_keys=True, default=str).encode())
        return int.from_bytes(sha.digest()[:8], "little")


def load_task(config: Config) -> Task:
    """The four splits. Raises UserError on the first thing that is wrong with the rows.

    A split with its own file takes its first `*_rows` rows (0 = all). The others are cut off
    `task` in the order of a permutation seeded with `split_seed`; what is left is `train`.
    """
    files = {"heldout": config.heldout_data, "validation": config.validation_data, "sft": config.sft_data}
    sizes = {"heldout": config.heldout_rows, "validation": config.validation_rows, "sft": config.sft_rows}
    cuts = {split: size for split, size in sizes.items() if size and not files[split]}
    notes = []

    pool = read_file(config.task, "task", config) if is_file(config.task) else _generate(config)
    if is_file(config.task) and config.task_rows:
        pool = pool[:config.task_rows]
    splits = {split: read_file(path, f"{split}_data", config)[:sizes[split] or None]
              for split, path in files.items() if path}

    if not is_file(config.task):
        # Nobody can edit the rows of a generator, so the files win over it.
        taken = {_identity(row) for rows in splits.values() for row in rows}
        pool = _drop(pool, lambda row: _identity(row) in taken, notes, config,
                     "that occur in the files of other splits")
    if cuts or not is_file(config.task):
        first = {}
        for row in pool:
            first.setdefault(_identity(row), row)
        pool = _drop(pool, lambda row: first[_identity(row)] is not row, notes, config, "whose prompt occurred before")
    if cuts:
        if sum(cuts.values()) >= len(pool):
            wanted = " + ".join(f"{split}_rows {size}" for split, size in cuts.items())
            raise UserError(f"config: {wanted} leaves none of the {len(pool)} rows of task = {config.task!r} to "
                            f"evolve on; lower them, give the splits files of their own, or raise task_rows")
        order = row_order(config.split_seed, 0, len(pool)).tolist()
        pool = [pool[i] for i in order]
        for split, size in cuts.items():
            splits[split], pool = pool[:size], pool[size:]
    splits["train"] = pool
    splits = {split: splits.get(split, []) for split in SPLITS}

    _check_disjoint(splits)
    return Task(notes=notes, **splits)


def _messages(prompt: str | list[dict]) -> list[dict]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _identity(row: Row) -> str:
    """What makes two prompts the same: text equals a single user message of that text."""
    return json.dumps(_messages(row.prompt), sort_keys=True)


def _drop(rows, unwanted, notes, config, why):
    kept = [row for row in rows if not unwanted(row)]
    if len(kept) < len(rows):
        notes.append(f"{config.task}: dropped {len(rows) - len(kept)} of {len(rows)} rows {why}")
    return kept


def _check_disjoint(splits: dict[str, list[Row]]) -> None:
    """Raise UserError if a prompt occurs in two splits."""
    seen, shared = {}, []
    for split, rows in splits.items():
        for row in rows:
            other, source = seen.setdefault(_identity(row), (split, row.source))
            if other != split:
                shared.append(f"{source} ({other}) and {row.source} ({split})")
    if shared:
        raise UserError(f"{len(shared)} prompts occur in two splits, first {shared[0]}; "
                        f"remove them from one of the files: scores on rows that were trained on mean nothing")


def _generate(config: Config) -> list[Row]:
    """The rows of a reasoning-gym generator; raises UserError.

    Several generators (word_ladder, ransom_note, ...) walk through sets of strings, whose order
    changes with every start of Python unless its hash seed is fixed, and that can only be done
    from outside; list_functions draws from the global generator besides. So a child process with
    both fixed makes the rows: the same on every rank and after a resume.
    """
    generator(config)  # refuses what is wrong with the config in better words than the child could
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import _serve_rows; _serve_rows()"
    child = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(config), capture_output=True,
                           env={**os.environ, "PYTHONHASHSEED": "0"}, start_new_session=True)    # a signal to the job is not its
    if child.returncode:
        said = child.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {child.returncode}"]
        raise UserError(f"config: task = {config.task!r}: the generator failed: {said[-1]}; "
                        f"change task_args = {config.task_args} or task_rows = {config.task_rows}")
    return [Row(entry.pop("question"), entry.pop("answer"), entry, None, f"{config.task}[{index}]")
            for index, entry in enumerate(pickle.loads(child.stdout))]


def _serve_rows() -> None:
    """The child: a pickled config on stdin, the generator's entries, pickled, on stdout."""
    out, sys.stdout = sys.stdout, sys.stderr  # a generator that prints must not print in between
    config = pickle.load(sys.stdin.buffer)
    random.seed(config.split_seed)
    dataset = generator(config)
    pickle.dump([dict(dataset[index]) for index in range(len(dataset))], out.buffer)


def generator(config: Config):
    """The reasoning-gym dataset `task` names, seeded with split_seed. Raises UserError."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        raise UserError(f"config: task = {config.task!r}: no such file, and generators need reasoning-gym; "
                        f"pip install reasoning-gym, or give a file of rows") from None
    if config.task not in DATASETS:
        near = difflib.get_close_matches(config.task, DATASETS, n=3, cutoff=0.5)
        hint = f"nearest generators: {', '.join(near)}" if near else (
            "name a file of rows, as in README.md under Rows, or one of reasoning-gym's generators")
        raise UserError(f"config: task = {config.task!r}: neither a file of rows nor a reasoning-gym "
                        f"generator; {hint}")
    for name, instead in (("size", "task_rows"), ("seed", "split_seed")):
        if name in config.task_args:
            raise UserError(f"config: task_args: {name} is set by {instead}; remove it and set {instead}")
    try:
        return create_dataset(config.task, size=config.task_rows or GENERATOR_ROWS, seed=config.split_seed,
                              **config.task_args)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"config: task_args = {config.task_args}: {config.task} refuses: {one_line(error)}") from None


def render(row: Row, tokenizer, config: Config) -> list[int]:
    """Prompt token ids of a row: the chat template with system_prompt first, or with chat = false
    system_prompt and prompt as plain text, one straight after the other.

    Raises UserError if chat = true and the tokenizer has no template, or the template refuses the row.
    """
    if not config.chat:
        return list(tokenizer(config.system_prompt + row.prompt)["input_ids"])
    return list(_templated(row, tokenizer, config, tokenize=True, return_dict=False))


def render_text(row: Row, tokenizer, config: Config) -> str:
    """The same as text, the template's marks included. Raises UserError."""
    if not config.chat:
        return config.system_prompt + row.prompt
    return _templated(row, tokenizer, config, tokenize=False)


def _templated(row: Row, tokenizer, config: Config, **options):
    if not tokenizer.chat_template:
        raise UserError(f"config: chat = true: the tokenizer of model = {config.model!r} has no chat template; "
                        f"set chat = false")
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    try:
        return tokenizer.apply_chat_template(system + _messages(row.prompt), add_generation_prompt=True, **options)
    except Exception as error:  # templates raise what they like
        raise UserError(f"{row.source}: the chat template of model = {config.model!r} refuses the prompt: "
                        f"{one_line(error)}") from None
