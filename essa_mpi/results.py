"""`eval` and `export`: what a run, or any adapter of its model, is worth, and taking it away."""

import json
import shutil
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from . import card
from . import config as configuration
from .answers import Answers
from .config import Config, UserError
from .files import check_writable, write_folder, write_json
from .quantise import WEIGHTS
from .rewards import load_reward
from .runfile import Checkpoint, RunFolder, load_checkpoint, read_history
from .spectrum import Spectrum, check_fits
from .tasks import Row, load_task, one_line, read_file
from .world import World


def answer_of(config: Config, run: Path) -> tuple[Spectrum, object, str, Checkpoint]:
    """(the warm start's spectrum, the run's result as `Engine.place` takes it, which that is, the newest checkpoint).

    Raises UserError.
    """
    checkpoint = load_checkpoint(RunFolder.open(run))
    if checkpoint is None:
        raise UserError(f"{run} has no checkpoint yet; it must finish a generation first")
    spectrum = Spectrum.load(config.adapter, config.alpha, config.offsets, config.offset_scale)
    if checkpoint.attributes.get("adapter_hash", spectrum.source) != spectrum.source:
        raise UserError(f"the adapter {config.adapter} is not the one {run} started from any more (its tensors "
                        f"differ): put it back, or pass --adapter {run}/adapter for the run's own result")
    if "policy" in checkpoint.groups:
        return spectrum, _trained(config, spectrum, checkpoint.groups["policy"]["flat"], run), "trained", checkpoint
    mean = checkpoint.groups["search"]["mean"]
    if mean.shape != (spectrum.dimension,):
        raise UserError(f"the adapter {config.adapter} has {spectrum.dimension} searched singular values but {run} "
                        f"evolved {mean.size}: it is not the warm start of this run")
    answers = Answers(spectrum.dimension)
    known = checkpoint.groups.get("ended", checkpoint.groups.get("answers"))
    if known:
        answers.load_state(known)
    vectors, answer = answers.vectors(mean), _asked(config, RunFolder.open(run))
    if answer not in vectors:
        raise UserError(f"config: answer = {answer!r}: {run} has none yet; there are {', '.join(vectors)}")
    return spectrum, vectors[answer], answer, checkpoint


def _trained(config: Config, spectrum: Spectrum, flat: np.ndarray, run: Path):
    """The policy of a gradient method's run."""
    from .gradient.policy import PARAMETERS
    parameters = PARAMETERS[config.parameters](spectrum)
    if flat.shape != parameters.start.shape:
        raise UserError(f"the adapter {config.adapter} has {parameters.start.size} parameters but {run} trained {flat.size}: "
                        f"it is not the warm start of this run")
    return parameters.placed(flat)


def _asked(config: Config, folder: RunFolder) -> str:
    """`answer` as --set has it, else as the run was last resumed with: its config.toml is what it was started with."""
    if not folder.history.exists() or config.answer != configuration.load(folder.config).answer:
        return config.answer
    return configuration.make(tomllib.loads(read_history(folder.history)[1]["config"])).answer


@dataclass(frozen=True)
class Asked:
    """What `eval` was asked for beyond the held-out rows of the run."""

    adapter: str | None = None      # this peft adapter instead of the run's result
    tasks: tuple[str, ...] = ()     # TOML files of further tasks
    samples: int = 0                # completions a row for avg@n and pass@k; 0: greedy alone
    temperature: float | None = None
    right_at: float = 1.0           # reward from which a completion counts as right
    drift: int = 0                  # rows on which the drift from the base model is measured
    drift_texts: str | None = None  # a file of other texts, too
    json_path: str | None = None


# What a further task is; all else is the run's.
TASK_KEYS = ("task", "task_args", "task_rows", "split_seed", "prompt_key", "answer_key", "system_prompt", "chat",
             "validation_data", "validation_rows", "sft_data", "sft_rows", "heldout_data", "heldout_rows", "max_tokens",
             "stop", "reward", "rewards", "reward_style", "reward_seconds", "math_answer", "math_lenient", "gym_strict",
             "format_pattern", "ifeval_score", "ifeval_nltk_data", "allow_code", "code_seconds", "code_gib", "reward_model",
             "reward_device", "reward_trust_code")

# Of these a further task has the run's where it says nothing: how the model is asked is no matter of the rows.
OF_THE_RUN = ("system_prompt", "chat", "max_tokens", "stop")


def evaluate_run(world: World, config: Config, run: str, asked: Asked) -> None:
    """Score base, warm start and result (or base and `asked.adapter`) on held-out rows, and what else is asked for."""
    from .run import Prepared, start_scorer
    prepared = vectors = error = folder = texts = None
    tasks = []
    try:
        folder = RunFolder.open(run)
        if config.mode == "auto":      # what the run chose; nothing is tried for one evaluation
            checkpoint = load_checkpoint(folder)
            config = replace(config, mode=checkpoint.attributes.get("mode", "shared") if checkpoint else "shared")
        if asked.adapter is not None:
            config = replace(config, adapter=asked.adapter, alpha=1.0)
        config = replace(config, racing=0)      # here everything is scored on all rows
        if folder.command == "grpo" and config.samples == 1:
            config = replace(config, samples=0)     # temperature is its rollouts': nothing is sampled unless asked for
        if world.rank == 0:
            if asked.json_path is not None:
                check_writable("--json", asked.json_path)      # said before hours of scoring
        prepared = Prepared(config)
        if not prepared.task.heldout:
            raise UserError("there are no held-out rows; set heldout_data or heldout_rows with --set")
        vectors = {"base": None}
        if asked.adapter is not None:
            vectors["adapter"] = np.zeros(prepared.spectrum.dimension)
        else:
            if folder.command == "grpo":
                from .gradient.run import check_mode
                check_mode(config)      # said before an engine is loaded
            _, result, answer, _ = answer_of(config, Path(run))
            vectors["warm_start"] = np.zeros(prepared.spectrum.dimension)
            vectors["trained" if answer == "trained" else "evolved"] = result
        tasks = [(config.name, config, prepared.task.heldout, prepared.reward)] + [
            _further(config, file) for file in asked.tasks]
        names = [name for name, *_ in tasks]
        for i, (name, file) in enumerate(zip(names[1:], asked.tasks)):
            if name in names[:i + 1]:
                raise UserError(f"--tasks {file}: its name is {name!r}, as that of the run or of another task; give it a "
                                f"`name` of its own")
        texts = read_texts(asked.drift_texts)[:asked.drift] if asked.drift_texts else []
        failure = folder.path / "logs" / "eval_failed.txt"
        if world.rank == 0:
            failure.parent.mkdir(exist_ok=True)
            failure.unlink(missing_ok=True)
    except Exception as e:
        error = e
    world.agree(error)
    world.failure_file = str(failure)
    world.install_hooks()
    scorer = start_scorer(world, config, prepared, folder, None)
    for _, _, _, reward in tasks[1:]:
        reward.close()      # what was started before has the terminal for its output; it starts again when needed
    found = {}

    def write():
        if world.rank == 0 and asked.json_path:
            write_json(asked.json_path, {**found, "ranks": world.size})

    for name, settings, rows, reward in tasks:      # what is scored is kept, whatever a later task does
        one = _score(world, settings, scorer, vectors, rows, reward, asked, name)
        if name == config.name:
            found = one
        else:
            found.setdefault("tasks", {})[name] = one
        write()
        reward.close()
    if asked.drift:
        found["drift"] = _drift(world, config, scorer.engine, vectors, prepared.task.heldout[:asked.drift], texts)
        write()


def _further(config: Config, file: str) -> tuple:
    """(name, config, held-out rows, reward) of a task in a TOML file. Raises UserError."""
    try:
        table = tomllib.loads(Path(file).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"--tasks {file}: {one_line(error)}") from None
    given = {"name": Path(file).stem, "model": config.model, "adapter": config.adapter,
             "task": table.get("heldout_data", ""), **{key: getattr(config, key) for key in OF_THE_RUN}, **table}
    try:
        theirs = configuration.make(given)
    except UserError as error:
        raise UserError(f"--tasks {file}: {error}") from None
    settings = replace(config, **{key: getattr(theirs, key) for key in TASK_KEYS})
    if "task" not in table and "heldout_data" not in table:
        raise UserError(f"--tasks {file}: there are no held-out rows; set heldout_data, or task with heldout_rows")
    try:
        if "task" in table:
            rows = load_task(settings).heldout
        else:
            rows = read_file(settings.heldout_data, "heldout_data", settings)[:settings.heldout_rows or None]
        if not rows:
            raise UserError("there are no held-out rows; set heldout_data or heldout_rows")
        reward = load_reward(settings)
        reward.check(rows)
    except UserError as error:
        raise UserError(f"--tasks {file}: {error}") from None
    return theirs.name, settings, rows, reward


def _score(world, config, scorer, vectors, rows, reward, asked: Asked, name: str) -> dict:
    """A task's table, said and returned: greedy, and of several samples if asked for."""
    from .evaluate import evaluate, paired, rates, sample
    from .report import paired_lines, rates_table, scores_table
    greedy = replace(config, temperature=0.0, samples=1)
    found = evaluate(greedy, world, scorer.like(greedy, reward), vectors, rows)
    differences = paired(found)
    world.say("\n".join([f"{name}:", scores_table(found.n, found.scores), *paired_lines(differences)]))
    out = {"n": found.n, **found.scores, "paired": differences, "counters": found.counters}
    samples = asked.samples or (config.samples if config.temperature else 0)
    if samples:
        temperature = asked.temperature if asked.temperature is not None else config.temperature or 1.0
        drawing = replace(config, temperature=temperature)
        drawn = sample(drawing, world, lambda part: scorer.like(part, reward), vectors, rows, samples)
        table, differences = rates(drawn, asked.right_at), paired(drawn)
        world.say("\n".join([rates_table(samples, temperature, table), *paired_lines(differences)]))
        out["sampled"] = {"samples": samples, "temperature": temperature, "right_at": asked.right_at, "arms": table,
                          "paired": differences, "counters": drawn.counters}
    return out


def _drift(world, config, engine, vectors, rows, texts) -> dict:
    from .drift import drift
    from .report import drift_lines
    moved = {name: vector for name, vector in vectors.items() if vector is not None}
    found = {"task": drift(config, world, engine, moved, rows)}
    if texts:
        found["texts"] = drift(config, world, engine, moved, texts, texts=True)
    world.say("\n".join(drift_lines(found)))
    return found


def read_texts(path: str) -> list[Row]:
    """Plain texts: the lines of a JSONL file's `text`, or the blank-line-separated paragraphs of any other. Raises UserError."""
    try:
        content = Path(path).read_text(encoding="utf-8")
        texts = ([json.loads(line)["text"] for line in content.splitlines() if line.strip()] if path.endswith(".jsonl")
                 else [part.strip() for part in content.split("\n\n")])
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--drift-texts {path}: {one_line(error)}; needs a text file, or JSONL with `text`") from None
    rows = [Row(text, None, {}, None, f"{path}[{i}]") for i, text in enumerate(texts) if isinstance(text, str) and text.strip()]
    if not rows:
        raise UserError(f"--drift-texts {path}: holds no text")
    return rows


def export(config: Config, run: str, adapter: str | None, out: str, merged: bool) -> str:
    """Write a peft folder, or the merged model, with its card to `out`. Returns a line that says so. Raises UserError."""
    target = Path(out)
    if target.exists():
        raise UserError(f"--out {out}: is there already; name a folder that does not exist")
    if adapter is not None:
        spectrum = Spectrum.load(adapter, 1.0)
        vector = np.zeros(spectrum.dimension)
        text = card.of_adapter(config, adapter, spectrum, target.name, merged)
    else:
        spectrum, vector, answer, checkpoint = answer_of(config, Path(run))
        text = card.of_run(config, RunFolder.open(run), checkpoint, answer, spectrum, target.name, merged)
        if isinstance(vector, Spectrum):
            spectrum, vector = vector, np.zeros(vector.dimension)

    def write(fresh):
        (_merge if merged else _adapter)(config, spectrum, vector, fresh)
        (fresh / "README.md").write_text(text)
        for path in fresh.iterdir():    # safetensors writes for the owner alone
            path.chmod((fresh / "README.md").stat().st_mode)
    try:
        write_folder(target, write)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from error
    return f"{'merged model' if merged else 'adapter'} written to {out}"


def _adapter(config: Config, spectrum: Spectrum, vector: np.ndarray, folder: Path) -> None:
    """A peft folder that names its model, which the warm start's own may not do."""
    spectrum.save(folder, vector)
    path = folder / "adapter_config.json"
    stored = json.loads(path.read_text())
    for key, value in (("base_model_name_or_path", config.model), ("task_type", "CAUSAL_LM"), ("inference_mode", True)):
        stored[key] = stored.get(key) or value
    path.write_text(json.dumps(stored, indent=2) + "\n")


def _merge(config: Config, spectrum: Spectrum, vector: np.ndarray, folder: Path) -> None:
    """The model's own weights with U_B core V_A^T added in float64 and rounded once; its other files as they are."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype="auto", local_files_only=True)
    if getattr(model.config, "quantization_config", None):
        raise UserError(f"model {config.model} is quantised; export the adapter without --merged")
    modules = dict(model.named_modules())
    check_fits(spectrum, config.model, {name: tuple(module.weight.shape) for name, module in modules.items()
                                        if isinstance(module, torch.nn.Linear)})
    with torch.no_grad():
        for p, core in zip(spectrum.projections, spectrum.cores(vector)):
            weight = modules[p.module].weight
            update = torch.from_numpy(p.U_B @ core @ p.V_A.T)
            weight.copy_((weight.double() + update).to(weight.dtype))
    source = Path(config.model)
    if (source / "generation_config.json").is_file():   # copied below; transformers refuses to save some that it loads
        model.generation_config = GenerationConfig()
    model.save_pretrained(folder)
    # Copies: a tokenizer that is saved anew is one for this release of transformers.
    for path in source.iterdir():
        ours = path.name == "config.json" or path.suffix in WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not ours:
            shutil.copyfile(path, folder / path.name)
