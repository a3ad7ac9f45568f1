"""A run in words and numbers: summary.json, the closing table, `show`."""

import json
import tomllib

import numpy as np

from . import config as configuration
from .provenance import WARM_START
from .runfile import RunFolder, load_checkpoint, read_history

PHASES = ("generate", "place", "score", "wait", "allgather", "train", "allreduce", "update", "checkpoint")


def summarise(config, ranks: int, dimension: int, history: dict, heldout, warm_start: dict | None = None) -> dict:
    """What summary.json holds of an evolution. history: `History.arrays()`; heldout: an Evaluation or None; warm_start: sft.json."""
    return {"name": config.name, "dimension": dimension, "population": config.population, "search": config.search,
            "answer": config.answer, **basics(config, ranks, history, heldout, warm_start)}


def basics(config, ranks: int, history: dict, heldout, warm_start: dict | None = None) -> dict:
    """What is in the summary of any run.

    Seconds are sums over the generations; generate, place, score, train and wait are means over the ranks.
    """
    seconds = {phase: float(history[f"times/{phase}"].sum()) for phase in PHASES if f"times/{phase}" in history}
    total = history["times/seconds"]
    summary = {
        "name": config.name, "model": config.model, "ranks": ranks, "batch": config.batch, "generations": len(total),
        "seed": config.seed, "mode": config.mode,
        "seconds": {**seconds, "evolving": float(total.sum()),
                    "per_generation": float(np.median(total)) if len(total) else None},
        "tokens": int(history["tokens"].sum()), "missing": int(history["missing"].sum()),
        "warm_start": warm_start and {key: warm_start[key] for key in WARM_START},
        "heldout": None,
    }
    if heldout is not None:
        summary["heldout"] = {"n": heldout.n, **heldout.scores}
        summary["seconds"]["heldout"] = heldout.seconds
    return summary


def closing(summary: dict, folder: RunFolder) -> str:
    """The table a run ends with."""
    lines = [""]
    if summary["heldout"]:
        scores = {arm: score for arm, score in summary["heldout"].items() if arm != "n"}
        lines.append(scores_table(summary["heldout"]["n"], scores, summary.get("answer", "final")))
    seconds = summary["seconds"]
    if summary["generations"]:
        steps = "steps" if "method" in summary else "generations"
        lines.append(f"{summary['generations']} {steps} of {seconds['per_generation']:.1f} s (median) on "
                     f"{summary['ranks']} rank{'s' * (summary['ranks'] > 1)}; where the time went:")
        lines.append("  " + "  ".join(f"{phase} {seconds[phase]:.2f} s" for phase in PHASES if phase in seconds))
        if "bytes_reduced" in summary:
            lines.append(f"a rank sent {_bytes(summary['bytes_reduced'])} of gradients and "
                         f"{_bytes(summary['bytes_gathered'])} of scores; a rank took {summary['peak_gib']:.1f} GiB at most")
        spent = summary.get("warm_start")       # not in summaries of release 0.1
        if spent:
            lines.append(f"warm start: {spent['steps']} steps, {_count(spent['tokens'])} tokens, {spent['seconds']:.0f} s "
                         f"of supervised training, not in the times above")
    lines.append(f"run file  {folder.history}")
    lines.append(f"adapter   {folder.adapter}")
    return "\n".join(lines)


NAMES = {"final": "final mean", "averaged": "averaged mean", "validated": "best validated mean",
         "candidate": "best candidate"}


def scores_table(n: int, scores: dict[str, dict], answer: str = "") -> str:
    """Arms and their held-out scores, a line each; answer: which of the run's answers "evolved" is."""
    lines = [f"held-out accuracy on {n} rows (mean reward, +- its standard error)"]
    width = 30 if answer else 11
    for arm, score in scores.items():
        missing = f"   ({score['missing']} rows without a score)" if score["missing"] else ""
        name = NAMES.get(arm, arm.replace("_", " "))
        if arm == "evolved" and answer:
            name += f" ({NAMES[answer]})"
        lines.append(f"  {name:<{width}} {number(score['accuracy'])} +- {number(score['stderr'])}{missing}")
    return "\n".join(lines)


def paired_lines(differences: list[dict]) -> list[str]:
    """Arms against one another on the same rows."""
    return [f"  {d['arm'].replace('_', ' ')} minus {d['minus'].replace('_', ' ')}: {d['difference']:+.3f} +- "
            f"{number(d['stderr'])} (paired, {d['rows']} rows)" for d in differences]


def rates_table(samples: int, temperature: float, arms: dict[str, dict]) -> str:
    """avg@n and pass@k, a line an arm."""
    names = list(next(iter(arms.values())))
    lines = [f"{samples} samples a row at temperature {temperature:g} (+- standard error over rows)",
             f"  {'':<11} " + "  ".join(f"{name:<14}" for name in names)]
    for arm, found in arms.items():
        lines.append(f"  {arm.replace('_', ' '):<11} " + "  ".join(
            f"{number(value)} +- {number(error)}" for value, error in found.values()))
    return "\n".join(lines)


def drift_lines(found: dict[str, dict]) -> list[str]:
    """How far the adapters moved the model, a line an arm and kind of text."""
    lines = ["drift from the base model, nats a token (+- standard error over rows)"]
    for where, arms in found.items():
        for arm, d in arms.items():
            growth = (f", the texts' own negative log-likelihood {d['nll_growth'][0]:+.4f} +- {_four(d['nll_growth'][1])}"
                      if "nll_growth" in d else "")
            lines.append(f"  {where:<6} {arm.replace('_', ' '):<11} KL {d['kl'][0]:.4f} +- {_four(d['kl'][1])}{growth}")
    return lines


def _bytes(n: int) -> str:
    """512 B, 14 kB, 3.2 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n} B"


def _four(value) -> str:
    return "none" if value is None or not np.isfinite(value) else f"{value:.4f}"


def _count(n: int) -> str:
    """640, 11 k, 1.3 M."""
    return f"{n}" if n < 1000 else f"{n / 1e3:.0f} k" if n < 999_500 else f"{n / 1e6:.1f} M"


def number(value) -> str:
    """Three decimals; JSON has no NaN, so a score that is none is null there."""
    return "none" if value is None or not np.isfinite(value) else f"{value:.3f}"


def show(path) -> str:
    """A run in words, finished or not. Raises UserError if `path` is no run folder."""
    folder = RunFolder.open(path)
    config = configuration.load(folder.config)
    reward = " + ".join(f"{weight:g} {name}" for name, weight in config.rewards.items()) or config.reward
    lines = [f"{folder.path}: {config.model} with adapter {config.adapter}, task {config.task}, reward {reward}"]
    failed = folder.path / "failed.txt"
    if failed.exists():
        lines.append(f"  it failed: {(failed.read_text().splitlines() or ['for a reason it could not write'])[0]}")
    if not folder.history.exists():
        lines.append("  no generation finished yet")
        return "\n".join(lines)
    history, attributes = read_history(folder.history)
    config = configuration.make(tomllib.loads(attributes["config"]))   # a resume may have asked for more generations
    done, method = len(history["generation"]), attributes.get("method")
    lines.insert(1, f"  {method}: batch {config.batch} x {config.group} rollouts, lr {config.lr:g}, seed {config.seed}"
                 if method else
                 f"  {config.search} search, population {config.population}, batch {config.batch}, sigma {config.sigma}, "
                 f"alpha {config.alpha}, {config.offsets} offsets, seed {config.seed}, mode {config.mode}")
    lines.append(f"  {done} of {config.generations} generations, essa_mpi {attributes.get('package_version')}, "
                 f"{attributes.get('ranks')} ranks on {attributes.get('hosts')}")
    for i in range(done):
        validation = history["validation"][i]
        lines.append(f"  {i + 1:4d}  fitness {history['mean_fitness'][i]:.3f}  best {history['best_fitness'][i]:.3f}  "
                     + (f"norm {history['gradient_norm'][i]:.3g}" if method else f"sigma {history['sigma'][i]:.3g}")
                     + f"  {history['times/seconds'][i]:.1f} s"
                     + (f"  validation {validation:.3f}" if np.isfinite(validation) else "")
                     + (f"  {history['missing'][i]} missing" if history["missing"][i] else ""))
    checkpoint = load_checkpoint(folder)
    if checkpoint:
        lines.extend("  " + note for note in checkpoint.notes)
        if checkpoint.generation < config.generations and _ended(folder) != checkpoint.generation:
            lines.append(f"  not finished: continue with `{'grpo' if method else 'run'} CONFIG --resume` (checkpoint {checkpoint.path})")
    if folder.summary.exists():
        try:
            summary = json.loads(folder.summary.read_text())
        except ValueError:
            return "\n".join(lines + [f"  {folder.summary} is damaged: not shown"])
        if summary["generations"] != done:
            lines.append(f"  the results below, and adapter/, are those of generation {summary['generations']}")
        lines.append(closing(summary, folder))
    return "\n".join(lines)


def _ended(folder: RunFolder) -> int | None:
    """The generation after which the run came to its end, be it by max_seconds."""
    try:
        return json.loads(folder.summary.read_text()).get("generations")
    except (OSError, ValueError, AttributeError):
        return None
