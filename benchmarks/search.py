"""What does the search cost beside generation: ask + tell of ours, of pycma and of cmaes?

    python -m benchmarks.search [--json FILE] [--dimensions 480 1792 4096 8192] [--populations 24 96 128]

Each measurement is a process of its own, with all cores of this process as threads, the same for all; seconds of
ask + tell a generation, and the peak memory beyond what importing takes.

    fast     ours, full covariance; sep and limited beside it. Every generation does the same work. Of a
             generation the fastest of three runs of the same search: what the machine does beside it drops
             out of the slowest generation, what the search does in it stays
    pycma    decomposes its covariance once in a lazy period of some generations: one whole period is
             timed, and divided by its generations
    cmaes    decomposes every generation, and holds population matrices of D x D twice: where these do
             not fit into the free memory it says so, with their bytes, and nothing is extrapolated

Without negative weights, everything else as each library sets it. `ratios.cmaes_over_ours` is at D = 1792
with population 128 and `cmaes_over_ours_4096` at D = 4096 with population 24, medians over generations;
`pycma_over_ours` at D = 8192 with population 128, amortised. Some quarter of an hour on two cores, most of it
pycma's decompositions at D = 8192.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

from . import record

DIMENSIONS, POPULATIONS = (480, 1792, 4096, 8192), (24, 96, 128)
GENERATIONS = {"fast": 12, "sep": 12, "limited": 12, "cmaes": 3}
REPEATS = {"fast": 3, "sep": 3, "limited": 3, "cmaes": 1}
HEADLINES = {"cmaes_over_ours": ("cmaes", 1792, 128), "cmaes_over_ours_4096": ("cmaes", 4096, 24),
             "pycma_over_ours": ("pycma", 8192, 128)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--dimensions", nargs="+", type=int, default=DIMENSIONS)
    parser.add_argument("--populations", nargs="+", type=int, default=POPULATIONS)
    parser.add_argument("--arms", nargs="+", default=["fast", "sep", "limited", "pycma", "cmaes"])
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)     # arm, dimension, population: the child
    options = parser.parse_args()
    if options.one:
        arm, dimension, population = options.one
        return print(json.dumps(measure(arm, int(dimension), int(population))))
    rows = []
    for dimension in options.dimensions:
        for population in options.populations:
            for arm in options.arms:
                rows.append(row := child(arm, dimension, population))
                print(said(row), flush=True)
    found = {(row["arm"], row["dimension"], row["population"]): row for row in rows if "seconds" in row}
    ratios = {}
    for (arm, dimension, population), row in found.items():
        ours = found.get(("fast", dimension, population))
        if arm in ("pycma", "cmaes") and ours:
            row["over_fast"] = row["seconds"] / ours["seconds"]
    for name, key in HEADLINES.items():
        if "over_fast" in found.get(key, ()):
            ratios[name] = found[key]["over_fast"]
    fast = [row for key, row in found.items() if key[0] == "fast"]
    if fast:
        ratios["slowest_generation_over_median"] = max(row["slowest"] / row["seconds"] for row in fast)
        ratios["most_gib"] = max(row["peak_bytes"] for row in fast) / 2**30
    for row in found.values():
        if "over_fast" in row:
            print(f"D = {row['dimension']:<5} population {row['population']:<4} {row['arm']} over ours {row['over_fast']:.1f}")
    record.write(options.json, "search", rows, ratios, threads=len(os.sched_getaffinity(0)),
                 versions=record.versions("essa_mpi", "numpy", "cma", "cmaes"))


def child(arm, dimension, population) -> dict:
    """One measurement in a process of its own, or why there is none."""
    row = {"arm": arm, "dimension": dimension, "population": population}
    if arm == "cmaes":
        needs, free = 2 * population * dimension**2 * 8, available()
        if needs > 0.85 * free:
            return {**row, "does_not_fit": {"needs_bytes": needs, "free_bytes": free}}
    threads = str(len(os.sched_getaffinity(0)))
    done = subprocess.run([sys.executable, "-m", "benchmarks.search", "--one", arm, str(dimension), str(population)],
                          env={**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)},
                          stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"benchmarks.search: {arm} at D = {dimension}, population {population} ended with "
                         f"{done.returncode}; what it said is above")
    return {**row, **json.loads(done.stdout.splitlines()[-1])}


def available() -> int:
    """Free memory in bytes, by the kernel's estimate."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def said(row) -> str:
    head = f"D = {row['dimension']:<5} population {row['population']:<4} {row['arm']:<8}"
    if "does_not_fit" in row:
        return head + "does not fit: its matrices take {needs_bytes:,} bytes, {free_bytes:,} are free".format(
            **row["does_not_fit"])
    over = f" over {row['generations']} generations, one decomposition" if row["arm"] == "pycma" else ""
    return (head + f"{row['seconds']:9.4f} s a generation{over}, slowest {row['slowest']:.4f} s, "
            f"{row['peak_bytes'] / 2**20:.0f} MiB" + (f", digest {row['digest']:.4f} s" if "digest" in row else ""))


def measure(arm, dimension, population) -> dict:
    """Seconds a generation (median; pycma: mean over a lazy period), the slowest, peak bytes."""
    step, more = {"pycma": _pycma, "cmaes": _cmaes}.get(arm, _ours)(arm, dimension, population)
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - more.pop("held", 0)
    if arm == "pycma":
        step()      # its first generation; the period begins with the second
        times, count = [], more["decompositions"]
        while count() == 0:
            times.append(timed(step))
        seconds = sum(times) / len(times)
        more = {}
    else:
        times = [timed(step) for _ in range(GENERATIONS[arm])]
        for _ in range(REPEATS[arm] - 1):
            step = more = None      # its memory goes before the next search takes its own
            step, more = _ours(arm, dimension, population)
            times = [min(before, timed(step)) for before in times]
            more.pop("held")
        seconds = statistics.median(times)
    if "digest" in more:
        more["digest"] = statistics.median(timed(more["digest"]) for _ in range(3))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - began
    return {"seconds": seconds, "slowest": max(times), "generations": len(times), "peak_bytes": peak, **more}


def timed(step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _ours(kind, dimension, population):
    from essa_mpi.search import make_search
    warm = make_search(kind, min(dimension, 1024), population, 0.5, 1)   # so that the libraries' first calls are nobody's
    warm.tell(0, -warm.ask(0)[:, 0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    search = make_search(kind, dimension, population, 0.5, 1)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before

    def step():
        X = search.ask(search.generation)
        search.tell(search.generation, -((X - 1) ** 2).sum(axis=1))
    return step, {"digest": search.digest, "held": held}


def _pycma(_, dimension, population):
    import cma
    es = cma.CMAEvolutionStrategy(dimension * [0.0], 0.5, {
        "popsize": population, "CMA_active": False, "verbose": -9, "verb_log": 0, "verb_disp": 0, "seed": 1})

    def step():
        X = es.ask()
        es.tell(X, [float((x - 1) @ (x - 1)) for x in X])
    return step, {"decompositions": lambda: es.sm.count_eigen}


def _cmaes(_, dimension, population):
    import numpy as np
    from cmaes import CMA
    es = CMA(mean=np.zeros(dimension), sigma=0.5, population_size=population, seed=1)

    def step():
        X = [es.ask() for _ in range(population)]
        es.tell([(x, float((x - 1) @ (x - 1))) for x in X])
    return step, {}


if __name__ == "__main__":
    main()
