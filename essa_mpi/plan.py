"""`python -m essa_mpi plan`: how long a generation takes on how many GPUs, where that ends, and why.

The formulas are in `latency`; here are the user's model, what was measured, the terms of a generation, and the
table. What plan does not know it leaves out and says so; nothing is guessed from the name of a model or GPU.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from . import config as configuration
from .config import Config, UserError
from .files import write_json
from .latency import (WORD, Network, allgather_seconds, allreduce_paper, best_theta, boundaries, essa_seconds,
                      exchange_bytes, gradient_seconds, greatest_of, break_even, tiles_of)
from .sizes import Model

STOPPED = 0.5           # efficiency below which it has stopped scaling
CHEAP = 1.1             # by how much a larger population may lengthen a generation to count as nearly free
STRAGGLING = 0.04       # if no run of two ranks says: GPUs of one kind vary by 8 %, two deviations (arXiv 2208.11035)


# -- what is known of the model and the machine ------------------------------------------------------

@dataclass(frozen=True)
class Measured:
    """What a run or the user says; seconds. None: not known, and left out."""

    token: float                    # of one engine, a generated token, prompts and scoring included, under its load
    tokens: float                   # of an answer, on average
    step: float | None = None       # the shortest decode step, with one sequence
    train: float | None = None      # of one trainer, a rollout's token, forward and backward
    update: float | None = None     # of the search
    place: float = 0.0              # a candidate
    straggling: float | None = None  # deviation of a rank's time for the same work, as a share of it
    load: float | None = None       # answers a rank had at once, at most
    source: str = "options"
    notes: tuple[str, ...] = ()


def read_run(path) -> Measured:
    """From the history of runs/<name>: an evolution's or a gradient method's; its first generation is warm-up.

    Raises UserError if there is none or it generated nothing.
    """
    from .runfile import RunFolder, read_history
    folder = RunFolder.open(path)
    if not folder.history.exists():
        raise UserError(f"{path}: no generation finished yet; give a run with a history.h5")
    history, attributes = read_history(folder.history)
    run = configuration.load(folder.config)
    gradient = "method" in attributes
    skip = 1 if len(history["generation"]) > 1 else 0
    part = {name: values[skip:] for name, values in history.items()}
    samples, ranks = _logged(folder.metrics, skip, len(part["tokens"]), int(attributes.get("ranks", 1)))
    tokens = float(part["tokens"].sum())
    busy = float(((part["times/generate"] + part["times/score"]) * ranks).sum())    # of all ranks
    if tokens <= 0 or busy <= 0:
        raise UserError(f"{path}: no tokens were generated in it; give a run with an engine")
    notes = [] if skip else ["one generation only: its warm-up is in the times"]
    if not samples:
        rows = run.batch * (run.group if gradient else run.population * run.samples)
        samples = rows * len(part["tokens"])
        notes.append("metrics.jsonl does not say how many completions: taken from the config")
    load = samples / ranks.sum()
    notes.append(f"measured with {load:.0f} answers a rank, at most {run.max_num_seqs} at once")
    wait = float(part["times/wait"].sum())
    working = part["times/seconds"] - part["times/wait"] - part["times/allgather"]      # of rank 0
    spread = float(sum(seconds * greatest_of(int(n)) for seconds, n in zip(working, ranks)))
    return Measured(
        token=busy / tokens, tokens=tokens / samples,
        train=float((part["times/train"] * ranks).sum()) / tokens if gradient else None,
        update=None if gradient else float(part["times/update"].mean()),
        place=0.0 if gradient else float((part["times/place"] * ranks).mean()) / run.population,
        straggling=wait / spread if spread > 0 else None,
        load=min(load, run.max_num_seqs), notes=tuple(notes),
        source=f"{path} ({run.model}; {_ranks(ranks)}, {_count(run.tensor_parallel, 'GPU')} or cores each)")


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def _ranks(ranks: np.ndarray) -> str:
    if ranks.min() == ranks.max():
        return _count(int(ranks[0]), "rank")
    return f"{ranks.min()} to {ranks.max()} ranks"


def _logged(metrics: Path, skip: int, count: int, ranks: int) -> tuple[int, np.ndarray]:
    """(completions, ranks of each generation) of the `count` in metrics.jsonl behind the first `skip`.

    0 completions, and `ranks` everywhere, if it does not say. A resume may have had other ranks.
    """
    try:
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        lines = [line for line in lines if line["generation"] >= skip]
        found = np.array([int(line.get("ranks", ranks)) for line in lines])
        if len(found) == count and (found > 0).all():
            return sum(line["completions"] for line in lines), found
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    return 0, np.full(count, ranks)


# -- a generation ------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Plan:
    """Everything the table is made of. GPUs an engine: config.tensor_parallel."""

    config: Config
    model: Model
    rank: int               # of the adapter
    measured: Measured
    network: Network = Network()
    train_gpus: int = 1     # GPUs a trainer, m_fb
    train_assumed: bool = False

    @property
    def dimension(self) -> int:
        return self.model.dimension(self.rank, self.config.alpha)


WHY = {     # a term of a generation but the work, and what it means that it is the largest
    "rounding": "a rank's share is a whole number of answers",
    "longest answer": "the weights are read once a token of the longest answer, for however few answers a rank has; more "
                      "GPUs an engine (tensor_parallel) read them faster",
    "stragglers": "the slowest of the ranks ends the generation",
    "place": "candidates are placed one after another",
    "all-gather": "messages between the ranks",
    "update": "every rank makes the whole update of the search",
}


def generation(plan: Plan, gpus: int, population: int | None = None) -> dict:
    """Seconds of a generation on `gpus` GPUs, as terms that add up to "seconds"; ranks, and bytes a rank sends.

    work: N B m eta / G of appendix B. longest answer: what is missing to max_tokens decode steps, 0 where a step's
    least time is not known. The others: see WHY. population None: the config's.
    """
    config, measured = plan.config, plan.measured
    population = config.population if population is None else population
    ranks = gpus // config.tensor_parallel
    batch = config.batch * config.samples
    cells = population * batch / ranks
    answer = measured.tokens * measured.token
    busy = math.ceil(cells) * answer
    decoding = max(busy, config.max_tokens * (measured.step or 0.0))
    candidates = int(tiles_of(boundaries(ranks, population, batch), batch).max())
    straggling = STRAGGLING if measured.straggling is None else measured.straggling
    nbytes = exchange_bytes(ranks, population, batch)
    terms = {"work": cells * answer, "rounding": busy - cells * answer, "longest answer": decoding - busy,
             "stragglers": decoding * straggling * greatest_of(ranks), "place": candidates * measured.place,
             "all-gather": allgather_seconds(ranks, nbytes, plan.network), "update": measured.update or 0.0}
    return {"gpus": gpus, "ranks": ranks, "seconds": sum(terms.values()), "terms": terms, "bytes_sent_a_rank": nbytes,
            "appendix_b_seconds": essa_seconds(population, batch, gpus, config.tensor_parallel, answer,
                                               plan.network.bandwidth),
            "appendix_b_bytes_a_candidate": WORD, "limit": max(WHY, key=terms.get),
            "answers_a_rank": cells, "candidates_a_rank": candidates, "ranks_a_candidate": ranks / population}


def step(plan: Plan, gpus: int, nbytes: float) -> dict:
    """Seconds of a step of `grpo` on `gpus` GPUs with an all-reduce of nbytes (appendix B, best theta), as terms."""
    config, measured = plan.config, plan.measured
    rollouts = config.batch * config.group
    eta_gen, eta_fb = measured.tokens * measured.token, measured.tokens * measured.train
    bare = gradient_seconds(rollouts, gpus, plan.train_gpus, eta_fb, config.tensor_parallel, eta_gen, 0,
                            plan.network.bandwidth)
    floor = max(0.0, config.max_tokens * (measured.step or 0.0) - bare)
    terms = {"work": bare, "longest answer": floor, "all-reduce": allreduce_paper(gpus, nbytes, plan.network.bandwidth)}
    return {"seconds": sum(terms.values()), "terms": terms, "bytes": nbytes,
            "bytes_sent_a_gpu": 2 * nbytes * (gpus - 1) / gpus,
            "theta": best_theta(plan.train_gpus, eta_fb, config.tensor_parallel, eta_gen)}


def efficiency(first: dict, other: dict) -> float:
    """Of `other` against `first`: (T G of the first) / (T G)."""
    return first["seconds"] * first["gpus"] / (other["seconds"] * other["gpus"])


def stops(plan: Plan, first: int) -> dict:
    """The first GPU count, doubling from `first`, with an efficiency below STOPPED, and the term then largest."""
    begin = generation(plan, first)
    gpus = 2 * first
    while efficiency(begin, now := generation(plan, gpus)) >= STOPPED:
        gpus *= 2       # ends: the work halves, and a rank with less than one answer has to round
    return {"gpus": gpus, "last_good": gpus // 2, "efficiency": efficiency(begin, now), "limit": now["limit"],
            "why": WHY[now["limit"]]}


def what_pays(plan: Plan, gpus: int) -> dict:
    """Twice the ranks for the same population, or twice the population on the same ranks?

    faster: by which factor twice the ranks shorten a generation. dearer: by which factor twice the population
    lengthens one. cheap_population: the largest, doubling, that makes it at most a tenth longer.
    """
    now, population = generation(plan, gpus), plan.config.population
    faster = now["seconds"] / generation(plan, 2 * gpus)["seconds"]
    dearer = generation(plan, gpus, 2 * population)["seconds"] / now["seconds"]
    while population < 10**6 and generation(plan, gpus, 2 * population)["seconds"] <= CHEAP * now["seconds"]:
        population *= 2
    pays = "more ranks" if faster >= 1.5 else "more candidates" if dearer <= 1.25 else "neither"
    return {"pays": pays, "faster_with_twice_the_ranks": faster, "dearer_with_twice_the_population": dearer,
            "cheap_population": population}


def study(plan: Plan, gpus: list[int]) -> dict:
    """All that `plan` says, as plain data."""
    config, measured = plan.config, plan.measured
    adapter, full = 4 * plan.model.adapter_parameters(plan.rank), 2 * plan.model.parameters
    rows = []
    for count in gpus:
        row = generation(plan, count)
        row["efficiency"] = efficiency(rows[0], row) if rows else 1.0
        row.update(what_pays(plan, count))
        if measured.train is not None:
            row["grpo"] = {"adapter": step(plan, count, adapter), "full": step(plan, count, full)}
            for kind, found in row["grpo"].items():
                start = rows[0]["grpo"][kind]["seconds"] * gpus[0] if rows else found["seconds"] * count
                found["efficiency"] = start / (found["seconds"] * count)
            eta = measured.tokens * measured.train, config.tensor_parallel, measured.tokens * measured.token
            row["theorem_b2"] = dict(zip(("samples", "as_printed"), break_even(
                config.batch * config.group, count, plan.train_gpus, *eta, full, plan.network.bandwidth)))
        rows.append(row)
    return {"model": {**vars(plan.model), "adapter_rank": plan.rank, "dimension": plan.dimension,
                      "adapter_parameters": plan.model.adapter_parameters(plan.rank)},
            "population": config.population, "batch": config.batch, "rollouts": config.batch * config.group,
            "gpus_an_engine": config.tensor_parallel, "measured": {**vars(measured), "notes": list(measured.notes)},
            "network": vars(plan.network), "said": unknown(plan), "rows": rows, "stops": stops(plan, gpus[0])}


def unknown(plan: Plan) -> list[str]:
    """What was left out or assumed, a line each."""
    measured, found = plan.measured, list(plan.measured.notes)
    if measured.step is None:
        found.append("a decode step's least time is not known, so small shares look better than they are: give "
                     "--step-seconds or --memory-bandwidth")
    else:
        full = measured.step / measured.token
        found.append(f"a decode step of {measured.step * 1e3:.3g} ms is full from {full:.0f} answers at once")
        if measured.load and full > measured.load:
            found[-1] += f", which the run never had: a rank with more than its {measured.load:.0f} is faster"
    if measured.straggling is None:
        found.append(f"stragglers: a rank's time is taken to vary by {STRAGGLING:.0%} (GPUs of one kind vary by 8 %: "
                     f"arXiv 2208.11035); give --straggling")
    elif measured.source != "options":
        found.append(f"stragglers: from the run's waits, uneven answers among them: {measured.straggling:.1%} of a "
                     f"rank's time, taken to grow with the ranks as the greatest of so many normal numbers does")
    if plan.config.validation_every:
        found.append("the mean's validation rows, held-out rows and checkpoints are not in it")
    if measured.update is None:
        found.append("the search's update is left out: give --update-seconds or --run")
    if plan.train_assumed:
        found.append("grpo's training was not measured: a token is taken to cost 3 times a generated one (6 operations "
                     "a parameter against 2); give --train-token-seconds, or --run of a grpo run")
    return found


# -- the command ---------------------------------------------------------------------------------------

def make_plan(config: Config, options) -> Plan:
    """The plan for a config and the command's options (see `cli`). Raises UserError."""
    model, rank = Model.read(config.model), adapter_rank(config)
    if options.run:
        measured = read_run(options.run)
    elif options.token_seconds is None:
        raise UserError("plan: nothing is measured; give --run runs/<name>, or --token-seconds and --tokens")
    elif options.tokens is None:
        raise UserError("plan: --tokens is missing: the tokens of an answer, on average")
    else:
        measured = Measured(options.token_seconds, options.tokens)
    if options.run and (ran := configuration.load(Path(options.run) / "config.toml")).model != config.model:
        measured = replace(measured, notes=measured.notes + (
            f"measured with {ran.model}, planned for {config.model}: the times are another model's",))
    given = {"token": options.token_seconds, "tokens": options.tokens, "step": options.step_seconds,
             "train": options.train_token_seconds, "update": options.update_seconds, "straggling": options.straggling}
    measured = replace(measured, **{key: value for key, value in given.items() if value is not None})
    if measured.step is None and options.memory_bandwidth:
        rate = config.tensor_parallel * options.memory_bandwidth * 1e9
        measured = replace(measured, step=model.weight_bytes / rate)
    if measured.tokens > config.max_tokens:
        raise UserError(f"plan: an answer of {measured.tokens:.0f} tokens on average, but the config has max_tokens = "
                        f"{config.max_tokens}: raise it, or give --tokens")
    assumed = measured.train is None
    if assumed:
        measured = replace(measured, train=3 * measured.token)
    return Plan(config, model, rank, measured, Network(options.latency * 1e-6, options.bandwidth * 1e9),
                options.train_gpus or config.tensor_parallel, assumed)


def adapter_rank(config: Config) -> int:
    """Of the adapter on the disk, or else the one that `sft` would make."""
    try:
        return int(json.loads((Path(config.adapter) / "adapter_config.json").read_text())["r"])
    except (OSError, ValueError, LookupError, TypeError):
        return config.rank


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows of as many cells as lines of text, each column as wide as it must be, to the right; the last to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  " + "  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths)), row[-1]]).rstrip()
            for row in rows]


def table(found: dict) -> str:
    """The study in words and numbers."""
    model, measured, end = found["model"], found["measured"], found["stops"]
    rows = [["GPUs", "ranks", "minutes", "efficiency", "answers/rank", "candidates/rank", "ranks/candidate",
             "bytes/rank", "most beyond work", "of all", "what pays"]]
    for row in found["rows"]:
        more = f" (up to {row['cheap_population']})" if row["cheap_population"] > found["population"] else ""
        rows.append([str(row["gpus"]), str(row["ranks"]), f"{row['seconds'] / 60:.3g}", f"{row['efficiency']:.2f}",
                     f"{row['answers_a_rank']:.1f}", str(row["candidates_a_rank"]), f"{row['ranks_a_candidate']:.2f}",
                     str(row["bytes_sent_a_rank"]), row["limit"], f"{row['terms'][row['limit']] / row['seconds']:.0%}",
                     row["pays"] + more])
    billions, gigabytes, millions = (f"{model[name] / unit:.3g}" for name, unit in (
        ("parameters", 1e9), ("weight_bytes", 1e9), ("adapter_parameters", 1e6)))
    lines = [f"{billions} G parameters, {gigabytes} GB, {model['layers']} layers; adapter of rank "
             f"{model['adapter_rank']}: {millions} M parameters, D = {model['dimension']}",
             f"{measured['token'] * 1e3:.3g} ms a token of an engine ({_count(found['gpus_an_engine'], 'GPU')}), "
             f"{measured['tokens']:.0f} tokens an answer, from {measured['source']}", "",
             f"ESSA, a generation of population {found['population']} x batch {found['batch']}", *aligned(rows), "",
             f"it scales to {_count(end['last_good'], 'GPU')}; on {end['gpus']} the efficiency is "
             f"{end['efficiency']:.2f}, for the {end['limit']}: {end['why']}"]
    if "grpo" in found["rows"][0]:
        lines += ["", f"GRPO, a step of {found['rollouts']} rollouts, by appendix B with the best theta and no shorter than the "
                  f"longest answer; a generation of ESSA is shorter below so many answers as in the last columns", *aligned(_grpo(found))]
    return "\n".join(lines + [""] + [f"- {line}" for line in found["said"]])


def _grpo(found: dict) -> list[list[str]]:
    columns = ["minutes", "efficiency", "all-reduce"]
    rows = [["GPUs", "adapter: " + columns[0], *columns[1:], "full weights: " + columns[0], *columns[1:],
             "by its formulas", "theorem B.2 as printed", ""]]
    for row in found["rows"]:
        cells = [str(row["gpus"])]
        for found_step in row["grpo"].values():
            seconds = found_step["seconds"]
            cells += [f"{seconds / 60:.3g}", f"{found_step['efficiency']:.2f}",
                      f"{found_step['terms']['all-reduce'] / seconds:.1%}"]
        rows.append(cells + [f"{row['theorem_b2'][name]:.0f}" for name in ("samples", "as_printed")] + [""])
    return rows


def plan(options) -> None:
    """The command. Raises UserError."""
    config = configuration.load(options.config, options.overrides)
    few = [gpus for gpus in options.gpus if gpus % config.tensor_parallel]
    if few:
        raise UserError(f"plan: --gpus {few[0]}: an engine takes tensor_parallel = {config.tensor_parallel} GPUs; give "
                        f"multiples of it")
    found = study(make_plan(config, options), options.gpus)
    if options.json:
        write_json(options.json, found)
    print(table(found))
