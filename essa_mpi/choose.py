"""`mode = "auto"`: every way of placing candidates is tried on the first generation's work, and the fastest taken.

Each try is a process of its own (`python -m essa_mpi.choose`), so that nothing of it stays behind on a
GPU: it starts an engine as the run would, and times this rank's share of generation 0, with at most
TOKENS tokens an answer. A generation is as slow as its slowest rank, so that one's time counts.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from .config import Config, UserError, dump
from .config import load as load_config
from .process import die_with

MODES = ("shared", "slots", "merged")
TOKENS = 32
LIMIT = 3600    # seconds of one try, its engine's start included
SHORT = 30.0    # seconds; what took less is timed twice, and the better time counts
# `merged` rounds candidates far more than the others do (see rounding.py): to be taken it must be this much faster.
MERGED_MUST_GAIN = 1.1


def settle_mode(world, config: Config, folder, checkpoint: dict | None) -> Config:
    """The config with its `auto` replaced, on all ranks alike. Raises UserError if no mode works.

    A resumed run keeps the mode it was started with: another might round differently.
    """
    if config.mode != "auto":
        return config
    if checkpoint and "mode" in checkpoint["attributes"]:
        mode = checkpoint["attributes"]["mode"]
        world.say(f"mode auto: {mode}, as when the run was started")
        return replace(config, mode=mode)
    world.say(f"mode auto: trying {', '.join(MODES)} on the first generation's work; an engine is started for each")
    mine = {mode: _try(replace(config, mode=mode), folder, world.rank, world.size) for mode in MODES}
    mode, why, error = None, "", None
    try:
        mode, why = fastest(world.comm.allgather(mine))
    except UserError as e:
        error = e
    world.agree(error)
    world.say(f"mode auto: {mode} ({why})")
    return replace(config, mode=mode)


def fastest(tries: list[dict[str, float | str]]) -> tuple[str, str]:
    """(mode, why) from each rank's {mode: seconds, or why it does not work}. Raises UserError if none works."""
    seconds, said = {}, []
    for mode in MODES:
        reasons = [t[mode] for t in tries if isinstance(t[mode], str)]
        if reasons:
            said.append(f"{mode} does not work here: {reasons[0]}")
        else:
            seconds[mode] = max(t[mode] for t in tries)
            said.append(f"{mode} {seconds[mode]:.2f} s")
    if not seconds:
        raise UserError(f"config: mode = 'auto': no mode works: {'; '.join(said)}")
    needed = {mode: s * (MERGED_MUST_GAIN if mode == "merged" else 1) for mode, s in seconds.items()}
    best = min(seconds, key=needed.get)
    if len(seconds) > 1 and best != min(seconds, key=seconds.get):
        said.append(f"merged rounds candidates, so it must be {MERGED_MUST_GAIN - 1:.0%} faster to be taken")
    return best, "; ".join(said)


def _try(config: Config, folder, rank: int, size: int) -> float | str:
    """Seconds of this rank's share in config.mode, or why it does not work."""
    log = folder.path / "logs" / f"auto_{config.mode}_rank{rank:04d}.log"
    asked, answer = log.with_suffix(".toml"), log.with_suffix(".json")
    answer.unlink(missing_ok=True)
    asked.write_text(dump(config))      # not the run's: what may change with --resume may have
    # It must not take itself for a rank of this job.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "PMIX_", "OMPI_"))}
    code = None
    command = [sys.executable, "-m", "essa_mpi.choose", str(asked), str(rank), str(size), str(answer), str(os.getpid())]
    try:
        with open(log, "w") as out:
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, timeout=LIMIT,
                                  start_new_session=True).returncode      # a signal to the job is not for it
        return json.loads(answer.read_text())
    except subprocess.TimeoutExpired:
        return f"it took longer than {LIMIT} s, see {log}"
    except (OSError, ValueError):
        return f"it ended with code {code}, see {log}"
    finally:
        answer.unlink(missing_ok=True)
        asked.unlink(missing_ok=True)


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(prog="python -m essa_mpi.choose", description="Time one mode. Called by run.")
    for name, kind in (("config", str), ("rank", int), ("size", int), ("answer", str), ("parent", int)):
        parser.add_argument(name, type=kind)
    options = parser.parse_args(arguments)
    die_with(options.parent)     # an engine left behind would keep the GPU's memory
    from .engine_environment import set_environment
    set_environment(options.rank)
    try:
        found = share_seconds(load_config(options.config), options.rank, options.size)
    except UserError as error:
        found = str(error)
    Path(options.answer).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)     # vLLM's own ending takes seconds


def share_seconds(config: Config, rank: int, size: int) -> float:
    """Seconds of placing and generating a rank's share of generation 0. Raises UserError."""
    from .engine import Engine
    from .evolve import new_search
    from .rows import Rows
    from .scoring import Arm, Scorer
    from .spectrum import Spectrum
    from .tasks import load_task
    from .world import share
    config = replace(config, max_tokens=min(config.max_tokens, TOKENS), samples_logged=0)
    spectrum, task = Spectrum.load(config.adapter, config.alpha, config.offsets, config.offset_scale), load_task(config)
    search = new_search(config, spectrum.dimension)
    batch = Rows(config, len(task.train)).batch(0)
    arms = [Arm(f"candidate {k}", x, task.train, batch) for k, x in enumerate(search.ask(0))]
    tiles = share([len(batch)] * len(arms), rank, size)
    scorer = Scorer(Engine(config, spectrum), _unjudged(config), config)
    scorer.score(arms, tiles[:1], 0)      # warms up
    seconds = _timed(scorer, arms, tiles)
    return min(seconds, _timed(scorer, arms, tiles)) if seconds < SHORT else seconds


def _timed(scorer, arms, tiles) -> float:
    began = time.perf_counter()
    scorer.score(arms, tiles, 0)
    return time.perf_counter() - began


def _unjudged(config: Config):
    """A reward that costs no time."""
    from .rewards.base import Reward

    class Unjudged(Reward):
        def _score(self, row, completion):
            return 0.0
    return Unjudged("none", config)


if __name__ == "__main__":
    main()
