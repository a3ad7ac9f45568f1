"""How far does a generation scale? Simulated to 100,000 ranks, under two models of what an engine costs.

    python -m benchmarks.scaling [--json FILE] [--quick] [--generations 10]

The paper's Fig. 3 (arXiv 2507.04453): Qwen2.5-32B, population 128, batch 256, efficiency relative to 16 GPUs.

    (a) constant   appendix B: every sample costs the same seconds, wherever and beside whatever it is generated
    (b) engine     continuous batching: a decode step costs max(weights read, tokens x arithmetic), slots are
                   limited, answers are long-tailed; so small tiles do not fill a step and the longest answer rules

each with tiles of candidates x rows as the program cuts them and without (a candidate stays on one rank), and with
stragglers, the one all-gather, what a rank spends on reading it (measured here) and the search's update. Under (b) also
the best split into candidates, rows and tensor parallelism, what larger populations cost, how the results change with
the assumptions, and weak scaling: a candidate a rank. Collectives by the alpha-beta model: the all-gather by recursive
doubling, Bruck and a ring, beside GRPO's all-reduce, of adapters (float32) and of full weights (bfloat16). And the
models against the paper's numbers.

What is assumed is printed and in the file. The update's seconds are those of benchmarks/results/search.json. A plot is
written beside FILE. Two minutes on one core; --quick in seconds, coarser.

Measured over real ranks with a scorer that sleeps: `benchmarks.sleeping`, under mpirun or in a job.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from essa_mpi.config import UserError
from essa_mpi.latency import allgather_seconds, allreduce_seconds, boundaries, exchange_bytes, tiles_of
from essa_mpi.search import choose
from essa_mpi.world import Busy, TileScore, World

from . import figure3, record
from .generation import GPU, TERMS, Setting, Way, assumed, qwen, scaled, simulate
from .scaling_tables import plot, told

BASE = 16                               # GPUs that efficiency is relative to, as in Fig. 3
STRONG = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 100_000)
WEAK = (16, 128, 512, 4096, 32768, 100_000)
SPLITS = (1, 2, 4, 8)                   # GPUs an engine, within a node of 8
RANKS = (128, 512, 1024, 4096, 16384, 65536, 100_000)


def update_seconds(setting: Setting) -> float | None:
    """Of ask + tell of the search that `auto` takes, as benchmarks.search measured it; None: not for this D."""
    kind = choose(dimension := qwen(setting.size).dimension(setting.rank))[0]
    file = Path(__file__).parent / "results/search.json"
    try:
        rows = json.loads(file.read_text())["rows"]
        return next(row["seconds"] for row in rows
                    if (row["arm"], row["dimension"], row["population"]) == (kind, dimension, setting.population))
    except (OSError, ValueError, LookupError, StopIteration):
        return None


def described(setting: Setting, way: Way, found: dict, scaling: str, **more) -> dict:
    ranks, cells = way.ranks, setting.population * setting.batch
    return {"scaling": scaling, **asdict(way), "ranks": ranks, "population": setting.population,
            "answers_a_rank": cells / ranks, "ranks_a_candidate": ranks / setting.population, **found, **more}


def strong(setting: Setting, gpus, generations: int, seed: int) -> list[dict]:
    """The same population on more GPUs: both costs, with and without tiles."""
    rows = []
    for cost in ("constant", "engine"):
        for tiles in (True, False):
            first = None
            for count in gpus:
                found = simulate(setting, way := Way(count, cost, tiles), generations, seed)
                first = first or found["seconds"] * count
                rows.append(described(setting, way, found, "strong", efficiency=first / (found["seconds"] * count)))
    return rows


def best_splits(setting: Setting, gpus, generations: int, seed: int) -> list[dict]:
    """Under (b): of tensor parallelism 1 to 8, and rows or candidates first, what is fastest on so many GPUs.

    The efficiency is against the best split of the fewest GPUs, so it is harder than that of a poor beginning.
    """
    rows, first = [], None
    for count in gpus:
        tried = []
        for parallel in SPLITS:
            for rows_first in (False, True):
                way = Way(count, "engine", True, parallel, rows_first)
                if way.ranks:
                    tried.append(described(setting, way, simulate(setting, way, generations, seed), "split"))
        best = min(tried, key=lambda row: row["seconds"])
        first = first or best["seconds"] * count
        rows.append({**best, "scaling": "best split", "efficiency": first / (best["seconds"] * count),
                     "tried": [{key: row[key] for key in ("tensor_parallel", "rows_first", "seconds", "limit")}
                               for row in tried]})
    return rows


def weak(setting: Setting, ranks, generations: int, seed: int) -> list[dict]:
    """A candidate a rank, as many as ranks; the search's update is left as it is for the paper's population."""
    rows = []
    for cost in ("constant", "engine"):
        first = None
        for count in ranks:
            grown = scaled(setting, count)
            repeats = generations if count < 10_000 else min(generations, 2)
            found = simulate(grown, way := Way(count, cost), repeats, seed)
            first = first or found["seconds"]
            rows.append(described(grown, way, found, "weak", efficiency=first / found["seconds"]))
    return rows


def populations(setting: Setting, gpus, generations: int, seed: int) -> list[dict]:
    """Under (b), on the same GPUs: what 2, 4 and 8 times the candidates cost, against the paper's population."""
    rows = []
    for count in gpus:
        for factor in (1, 2, 4, 8):
            grown = scaled(setting, factor * setting.population)
            found = simulate(grown, way := Way(count, "engine"), generations, seed)
            base = found["seconds"] if factor == 1 else base
            rows.append(described(grown, way, found, "population", longer=found["seconds"] / base))
    return rows


def sensitivity(setting: Setting, generations: int, seed: int) -> list[dict]:
    """Efficiencies at 128 and 512 GPUs under other assumptions; they are what the headline rests on."""
    h100 = GPU(memory=80e9, bandwidth=3.35e12)
    cases = {
        "as assumed": {}, "no stragglers": {"straggling": 0.0},
        "stragglers twice as large": {"straggling": 2 * setting.straggling},
        "answers of one length": {"deviation": 1e-9}, "deviation of the logarithm 0.3": {"deviation": 0.3},
        "deviation 0.9": {"deviation": 0.9}, "max_tokens 1024": {"longest": 1024}, "max_tokens 8192": {"longest": 8192},
        "all of the length is the row's": {"row_share": 1.0}, "none of it": {"row_share": 0.0},
        "512 slots": {"max_num_seqs": 512}, "64 slots": {"max_num_seqs": 64}, "no update": {"update": 0.0},
        "the cache is read too": {"with_cache": True}, "two GPUs an engine": {"tensor_parallel": 2},
        "two H100 (80 GB, 3.35 TB/s) an engine": {"tensor_parallel": 2, "gpu": h100}}
    rows = []
    for name, changed in cases.items():
        ways = {key: value for key, value in changed.items() if key in ("with_cache", "tensor_parallel")}
        other = replace(setting, **{key: value for key, value in changed.items() if key not in ways})
        row = {"case": name}
        for cost in ("constant", "engine"):
            found = {count: simulate(other, Way(count, cost, **ways), generations, seed)["seconds"]
                     for count in (BASE, 128, 512)}
            row[f"{cost}_seconds_{BASE}"] = found[BASE]
            for count in (128, 512):
                row[f"{cost}_{count}"] = BASE * found[BASE] / (count * found[count])
        rows.append(row)
    return rows


def collectives(setting: Setting, ranks) -> list[dict]:
    """Seconds by the alpha-beta model. all-gather: of the paper's 8 bytes a candidate and of what the program sends."""
    rows, network = [], setting.network
    for count in ranks:
        sent = exchange_bytes(count, setting.population, setting.batch)
        paper = 8 * -(-setting.population // count)
        row = {"ranks": count, "bytes_a_rank": sent, "paper_bytes_a_rank": paper, "bytes_received": sent * (count - 1)}
        for algorithm in ("doubling", "bruck", "ring"):
            seconds = allgather_seconds(count, sent, network, algorithm)
            row[f"allgather_{algorithm}"] = None if seconds == float("inf") else seconds
        row["allgather_paper_bruck"] = allgather_seconds(count, paper, network)
        for size in ("7B", "32B", "72B"):
            model = qwen(size)
            adapter = 4 * model.adapter_parameters(setting.rank)
            for kind, nbytes in (("adapter", adapter), ("full", 2 * model.parameters)):
                row[f"allreduce_{size}_{kind}"] = allreduce_seconds(count, nbytes, network)
                row[f"bytes_{size}_{kind}"] = nbytes
        rows.append(row)
    return rows


class Stub:
    """An MPI of one process in which all ranks send what this one does, at once."""

    Wtime, INT64_T = time.perf_counter, None

    def __init__(self, ranks: int):
        self.COMM_WORLD, self.ranks, self.mpi = self, ranks, self
        self.hosts = self.cpus = [""] * ranks
        self.crowded = False

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return self.ranks

    def Allgather(self, send, received) -> None:
        received[0][:] = send[0]


def exchange_seconds(ranks: int, population: int, batch: int) -> float:
    """Measured here: CPU seconds that rank 0 spends in `World.exchange`, its messages costing nothing."""
    world, tiles = World(Stub(ranks)), int(tiles_of(boundaries(ranks, population, batch), batch)[0])
    began = time.process_time()
    world.exchange([batch] * population, [TileScore() for _ in range(tiles)], 0, Busy())
    return time.process_time() - began


def bookkeeping(setting: Setting) -> tuple[float, float]:
    """Measured here, (seconds a rank, seconds an arm): what `World.exchange` costs each rank but the messages."""
    def least(ranks, population):
        return min(exchange_seconds(ranks, population, setting.batch) for _ in range(5))
    few, ranks, arms = least(256, 256), least(4096, 256), least(256, 4096)
    return max(0.0, (ranks - few) / 3840), max(0.0, (arms - few) / 3840)


def study(setting: Setting, quick: bool, generations: int, seed: int) -> dict:
    """Everything simulated, as plain data: "rows" and the tables beside them."""
    gpus, splits = ((16, 128, 512), (16, 128, 512)) if quick else (STRONG, STRONG[:8])
    rows = strong(setting, gpus, generations, seed)
    rows += best_splits(setting, splits, generations, seed)
    rows += weak(setting, (16, 128) if quick else WEAK, generations, seed)
    rows += populations(setting, (512,) if quick else (128, 512, 2048), generations, seed)
    return {"rows": rows, "sensitivity": [] if quick else sensitivity(setting, generations, seed),
            "collectives": collectives(setting, RANKS),
            "paper": figure3.against_paper(setting, rows, SPLITS, generations, seed)}


def ratios_of(rows: list[dict]) -> dict:
    """The efficiencies that the benchmark is for."""
    found = {}
    for row in rows:
        if row["gpus"] in (128, 512) and row["scaling"] in ("strong", "best split"):
            name = (f"efficiency_{row['gpus']}" + "_engine" * (row["cost"] == "engine")
                    + "_without_tiles" * (not row["tiles"]) + "_best_split" * (row["scaling"] == "best split"))
            found[name] = row["efficiency"]
    return found


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the results there, and a plot beside it")
    parser.add_argument("--quick", action="store_true", help="three GPU counts and two generations: for tests")
    parser.add_argument("--generations", type=int, help="simulated for each number (default 10, with --quick 2)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    generations = options.generations if options.generations is not None else 2 if options.quick else 10
    if generations < 1:
        parser.error(f"--generations = {generations}; allowed: an integer >= 1")
    try:
        if options.json and not Path(options.json).absolute().parent.is_dir():
            raise UserError(f"benchmarks.scaling: --json {options.json}: its folder does not exist; make it first")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    setting, known = Setting(), update_seconds(Setting())
    setting = replace(setting, bookkeeping=bookkeeping(setting), **({} if known is None else {"update": known}))
    print(f"assumed, none of it in the paper:\n{assumed(setting)}")
    found = study(setting, options.quick, generations, options.seed)
    told(found, setting)
    if options.json:
        picture = Path(options.json).with_suffix(".png")
        try:
            plot(picture, found["rows"], found["collectives"], setting, BASE)
            print(f"\nplot in {picture}")
        except ImportError:
            print("\nno plot: matplotlib is not installed (pip install essa_mpi[plots])")
    rows = found.pop("rows")
    record.write(options.json, "scaling", rows, ratios_of(rows), versions=record.versions("essa_mpi", "numpy"),
                 setting=asdict(setting), assumed=assumed(setting).splitlines(), terms=TERMS, generations=generations,
                 seed=options.seed, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
