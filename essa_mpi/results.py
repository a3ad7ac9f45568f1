"""`eval` and `export`: what a run, or any adapter of its model, is worth, and taking it away."""

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np

from . import card
from . import config as configuration
from .answers import Answers
from .config import Config, UserError
from .files import write_folder, write_json
from .quantise import WEIGHTS
from .runfile import Checkpoint, RunFolder, load_checkpoint, read_history
from .spectrum import Spectrum, check_fits
from .world import World


def _result(config: Config, run: Path) -> tuple[Spectrum, np.ndarray]:
    """The warm start's spectrum and the run's answer at the newest checkpoint. Raises UserError."""
    spectrum, vector, _, _ = _answer(config, run)
    return spectrum, vector


def _answer(config: Config, run: Path) -> tuple[Spectrum, np.ndarray, str, Checkpoint]:
    """`_result`, which of the run's answers that is, and the checkpoint."""
    checkpoint = load_checkpoint(RunFolder.open(run))
    if checkpoint is None:
        raise UserError(f"{run} has no checkpoint yet; it must finish a generation first")
    spectrum = Spectrum.load(config.adapter, config.alpha, config.offsets, config.offset_scale)
    if checkpoint.attributes.get("adapter_hash", spectrum.source) != spectrum.source:
        raise UserError(f"the adapter {config.adapter} is not the one {run} started from any more (its tensors "
                        f"differ): put it back, or pass --adapter {run}/adapter for the run's own result")
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


def _asked(config: Config, folder: RunFolder) -> str:
    """`answer` as --set has it, else as the run was last resumed with: its config.toml is what it was started with."""
    if not folder.history.exists() or config.answer != configuration.load(folder.config).answer:
        return config.answer
    return configuration.make(tomllib.loads(read_history(folder.history)[1]["config"])).answer


def evaluate_run(world: World, config: Config, run: str, adapter: str | None, json_path: str | None) -> None:
    """Score base, warm start and result (or, with `adapter`, base and that adapter) on the held-out rows."""
    from .run import Prepared, _start_scorer
    from .report import scores_table
    prepared = vectors = error = folder = None
    try:
        folder = RunFolder.open(run)
        if config.mode == "auto":      # what the run chose; nothing is tried for one evaluation
            checkpoint = load_checkpoint(folder)
            config = replace(config, mode=checkpoint.attributes.get("mode", "shared") if checkpoint else "shared")
        if adapter is not None:
            config = replace(config, adapter=adapter, alpha=1.0)
        prepared = Prepared(config)
        if not prepared.task.heldout:
            raise UserError("there are no held-out rows; set heldout_data or heldout_rows with --set")
        zero = np.zeros(prepared.spectrum.dimension)
        vectors = {"base": None, "adapter": zero} if adapter is not None else {
            "base": None, "warm_start": zero, "evolved": _result(config, Path(run))[1]}
        failure = folder.path / "logs" / "eval_failed.txt"
        if world.rank == 0:
            failure.parent.mkdir(exist_ok=True)
            failure.unlink(missing_ok=True)
    except Exception as e:
        error = e
    world.agree(error)
    world.failure_file = str(failure)
    world.install_hooks()
    scorer = _start_scorer(world, config, prepared, folder, None)
    from .evaluate import evaluate
    found = evaluate(config, world, scorer, vectors, prepared.task.heldout)
    if world.rank == 0:
        world.say(scores_table(found.n, found.scores))
        if json_path:
            write_json(json_path, {"n": found.n, **found.scores, "counters": found.counters, "ranks": world.size})


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
        spectrum, vector, answer, checkpoint = _answer(config, Path(run))
        text = card.of_run(config, RunFolder.open(run), checkpoint, answer, spectrum, target.name, merged)

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
