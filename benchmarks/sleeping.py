"""Scaling measured: the program's own generations on real ranks, whose scorer sleeps as long as an engine would decode.

    mpirun -n 16 python -m benchmarks.sleeping [--json FILE]        # or srun, in a job

Everything but the engine and the reward is the real thing: perturbations, tiles, the all-gather, the search's update,
checkpoints. How many tokens an answer has is drawn from lengths that a real engine wrote down
(benchmarks/results/answers.json), the same for a cell of candidate and row on however many ranks; the seconds of a
decode step are that engine's too, made shorter by one factor. A sleeping rank needs no core, so there may be more ranks
than cores; what the ranks compute then shares the cores, and the rows are marked oversubscribed: the seconds in the
all-gather are then the scheduler's, no network's.
"""

import argparse
import collections
import csv
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")       # before numpy is there: the ranks share cores
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from essa_mpi import seat
from essa_mpi.answers import Answers
from essa_mpi.config import Config
from essa_mpi.evolve import evolve, new_search
from essa_mpi.latency import Engine, decode_seconds
from essa_mpi.perturbation import sampling_seed
from essa_mpi.plan import Measured, Plan, generation
from essa_mpi.runfile import RunFolder, save_checkpoint
from essa_mpi.world import Busy, TileScore, World

from . import record
from .generation import qwen

ANSWERS = Path(__file__).parent / "results/answers.json"
DIMENSION, POPULATION, BATCH = 480, 32, 32      # strong scaling; weak: two candidates a rank
STRAGGLING = 0.04       # deviation of the logarithm of a rank's slowness, drawn anew each generation
COLUMNS = ("scaling", "ranks", "nodes", "population", "generation", "t_total", "t_compute_mean", "t_compute_max", "t_wait",
           "t_allgather", "t_update", "t_checkpoint", "speedup", "efficiency", "oversubscribed")


class Sleeper:
    """A scorer that sleeps as an engine would decode."""

    def __init__(self, rank: int, lengths: np.ndarray, engine: Engine):
        self._rank, self._lengths, self._engine = rank, lengths, engine

    def score(self, arms, tiles, generation: int):
        """As `Scorer.score`: a reward by the cell, and the seconds slept as those of generating."""
        scores, tokens = [], []
        for tile in tiles:
            score = TileScore()
            for place in range(tile.start, tile.stop):
                draw = sampling_seed(1, generation, int(arms[tile.arm].indices[place]), tile.arm)
                tokens.append(self._lengths[draw % len(self._lengths)])
                score.add(float(draw % 2), odd=place % 2 == 1)
            scores.append(score)
        slow = np.exp(STRAGGLING * np.random.default_rng([generation, self._rank]).standard_normal())
        began = time.perf_counter()
        if tokens:
            time.sleep(slow * float(decode_seconds(np.array(tokens), self._engine)[0]))
        slept = time.perf_counter() - began
        return scores, Busy(generate=slept, counters={"completions": len(tokens), "tokens": int(sum(tokens))}), []


def recorded(population: int, batch: int, seconds: float) -> tuple[np.ndarray, Engine, dict]:
    """(tokens of each recorded answer, the engine, where they are from).

    The engine's seconds are scaled so that `population` x `batch` answers, in its slots, take one rank `seconds`.
    """
    found = json.loads(ANSWERS.read_text())
    lengths = np.array(found["lengths"])
    drawn = lengths[np.random.default_rng(0).integers(len(lengths), size=population * batch)]
    engine = Engine(found["step"], found["token"], found["slots"])
    factor = seconds / float(decode_seconds(drawn, engine)[0])
    return lengths, Engine(factor * engine.read, factor * engine.token, engine.slots), {**found, "factor": factor}


def measure(world: World, scaling: str, population: int, lengths, engine: Engine, repeats: int) -> list[dict]:
    """A warm-up generation, dropped, and `repeats` generations; the CSV's columns, on rank 0."""
    config = Config(name="sleeping", model="", adapter="", task="", reward="exact", population=population, batch=BATCH,
                    generations=1 + repeats, seed=1, sigma=0.1, validation_every=0)
    search, rows, ends = new_search(config, DIMENSION), [], [time.perf_counter()]
    hosts = collections.Counter(world.hosts[:world.size])

    class Task:
        train, validation, heldout = [None] * (BATCH * (1 + repeats)), [], []

    with tempfile.TemporaryDirectory() as scratch:
        def note(g) -> None:
            began = time.perf_counter()
            save_checkpoint(RunFolder(scratch), g.number, {"search": search.state()}, {}, 2)
            busy, now = g.exchanged.header["busy_ns"] / 1e9, time.perf_counter()
            rows.append(dict(zip(COLUMNS, (
                scaling, world.size, len(hosts), population, g.number, now - ends[-1], float(busy.mean()), float(busy.max()),
                g.exchanged.wait_mean, g.seconds["allgather"], g.seconds["update"], now - began))))
            ends.append(now)
            rows[-1]["oversubscribed"] = max(hosts.values()) > os.cpu_count()
        evolve(config, world, Task, Sleeper(world.rank, lengths, engine), search, Answers(DIMENSION), 0,
               note if world.rank == 0 else lambda g: None)
    return rows[1:]


def planned(ranks: int, population: int, lengths, engine: Engine, update: float) -> float:
    """Seconds of a generation by `plan`, given what it would read from a run on one rank."""
    token = engine.step(engine.slots) / engine.slots
    config = Config(name="plan", model="", adapter="", task="", reward="exact", population=population, batch=BATCH,
                    max_tokens=int(lengths.max()))
    known = Measured(float(token), float(lengths.mean()), step=engine.read, update=update, straggling=STRAGGLING)
    return generation(Plan(config, qwen("7B"), 2, known), ranks)["seconds"]


def counts(size: int) -> list[int]:
    """1, 2, 4, ... and all."""
    return sorted({*(2**k for k in range(size.bit_length()) if 2**k <= size), size})


def study(world: World, place: seat.Seat, seconds: float, repeats: int) -> tuple[list[dict], list[dict], dict]:
    """(rows of the CSV, a line a number of ranks, what was recorded); the first two are rank 0's.

    Of so many ranks the first take part; the others look in now and then whether it is over.
    """
    lengths, engine, about = recorded(POPULATION, BATCH, seconds)
    rows = []
    for scaling in ("strong", "weak"):
        for count in counts(world.size):
            part = world.comm.Split(0 if world.rank < count else 1, world.rank)
            if world.rank < count:
                rows += measure(World(place, part), scaling, POPULATION if scaling == "strong" else 2 * count, lengths, engine,
                                repeats)
            over = world.comm.Ibarrier()
            while not over.Test():
                time.sleep(0.05)
            part.Free()
    lines = []
    for scaling, count in dict.fromkeys((row["scaling"], row["ranks"]) for row in rows):
        mine = [row for row in rows if (row["scaling"], row["ranks"]) == (scaling, count)]
        first = [row for row in rows if (row["scaling"], row["ranks"]) == (scaling, 1)]
        base, seconds = (float(np.mean([row["t_total"] for row in some])) for some in (first, mine))
        for row in mine:
            row["speedup"] = base / row["t_total"] * (count if scaling == "weak" else 1)
            row["efficiency"] = row["speedup"] / count
        mean, most = (float(np.mean([row[f"t_compute_{name}"] for row in mine])) for name in ("mean", "max"))
        update = float(np.mean([row["t_update"] for row in first]))
        plan = planned(count, mine[0]["population"], lengths, engine, update)
        lines.append({"scaling": scaling, "ranks": count, "seconds": seconds, "efficiency": float(np.mean([row["efficiency"] for row in mine])),
                      "load_balance": mean / most, "communication_efficiency": most / seconds,
                      "parallel_efficiency": mean / seconds, "plan_seconds": plan, "measured_over_plan": seconds / plan,
                      "oversubscribed": mine[0]["oversubscribed"]})
    return rows, lines, about


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sleeping", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the results there, every generation into a .csv and a plot beside it")
    parser.add_argument("--seconds", type=float, default=16.0, help="of a generation of strong scaling on one rank (default 16)")
    parser.add_argument("--repeats", type=int, default=5, help="generations measured after a first (default 5)")
    options = parser.parse_args()
    if options.repeats < 1 or not 0 < options.seconds < float("inf"):
        parser.error("--repeats and --seconds must be above 0")
    if options.json and not Path(options.json).absolute().parent.is_dir():
        parser.error(f"--json {options.json}: its folder does not exist; make it first")
    place = seat.take()
    world = World(place)
    world.install_hooks()
    rows, lines, about = study(world, place, options.seconds, options.repeats)
    if world.rank:
        return
    told(lines)
    if options.json:
        with open(Path(options.json).with_suffix(".csv"), "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        try:
            plot(Path(options.json).with_suffix(".png"), lines)
        except ImportError:
            print("no plot: matplotlib is not installed (pip install essa_mpi[plots])")
    ratios = {f"measured_over_plan_{line['scaling']}_{line['ranks']}": line["measured_over_plan"] for line in lines}
    record.write(options.json, "sleeping", lines, ratios, versions=record.versions("essa_mpi", "numpy", "mpi4py"),
                 answers={key: value for key, value in about.items() if key != "lengths"})


def told(lines: list[dict]) -> None:
    """A table. POP: parallel efficiency = load balance x communication efficiency (pop-coe.eu)."""
    print("           ranks  seconds  efficiency  load balance  communication  parallel   by plan  measured / plan")
    for line in lines:
        print(f"  {line['scaling']:<7} {line['ranks']:6d} {line['seconds']:8.3f} {line['efficiency']:11.3f} {line['load_balance']:13.3f} "
              f"{line['communication_efficiency']:14.3f} {line['parallel_efficiency']:9.3f} {line['plan_seconds']:9.3f} "
              f"{line['measured_over_plan']:16.3f}{'  oversubscribed' * line['oversubscribed']}")


def plot(path: Path, lines: list[dict]) -> None:
    """Efficiency over ranks, as measured and by `plan`, as a PNG. Raises ImportError without matplotlib."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot
    figure, axes = pyplot.subplots(figsize=(6, 3.4))
    for scaling, color in (("strong", "C0"), ("weak", "C1")):
        mine = [line for line in lines if line["scaling"] == scaling]
        ranks = [line["ranks"] for line in mine]
        axes.plot(ranks, [line["efficiency"] for line in mine], "-o", color=color, label=f"{scaling}, measured")
        planned = [mine[0]["plan_seconds"] / line["plan_seconds"] / (1 if scaling == "weak" else line["ranks"]) for line in mine]
        axes.plot(ranks, planned, "--", color=color, label=f"{scaling}, by plan")
    axes.set(xscale="log", xlabel="ranks", ylabel="efficiency", ylim=(0, 1.1),
             title="sleeping engines" + ", more ranks than cores" * any(line["oversubscribed"] for line in lines))
    axes.set_xticks(ranks, [str(count) for count in ranks])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
