"""A run without vLLM: `essa_mpi.run.run` with a scorer whose rewards are a function of search vector and row.

    mpirun -n 3 python tests/deterministic_run.py CONFIG [--resume] [--set KEY=VALUE] [--sleep SECONDS]
           [--fault JSON]... [--preload LIBRARY] [--count FILE] [--user-reward] [--eval RUN]

--sleep: pause up to so long before each generation's score, a random time on each rank.
--preload: start again with LIBRARY in LD_PRELOAD. --count: rank 0's communicator counts calls, bytes and
names of its methods into FILE (JSON). --user-reward: the config's own reward and the real Scorer, on an
engine that answers with the row's answer; else rewards come from `reward` below. --eval: `eval RUN`, with
its scores in eval.json, instead of `run`.

Where the config says reward_low and reward_high a row is worth one or the other.

A fault is {"kind": ..., "rank": r or absent for all, "generation": g, ...}:
    raise, raise_user, exit, interrupt   in the scorer: RuntimeError, UserError, SystemExit, KeyboardInterrupt
    thread                               RuntimeError in another thread, while the scorer sleeps
    thread_exit                          SystemExit in another thread: harmless
    hang                                 the scorer sleeps for an hour
    nan                                  rows whose index is in "rows" have no score (all rows if absent),
                                         for the "candidates" named (all if absent); "value": nan, inf or -inf
    flip                                 one bit of the search state flips after generation g's update
    setup                                RuntimeError while the scorer is made (no generation)
    prepare, prepare_user                RuntimeError, UserError while a rank reads its model (no generation)
    kill                                 SIGKILL on rank 0 at the moment "at": see KILLS
"""

import argparse
import hashlib
import json
import math
import os
import random
import signal
import struct
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Where rank 0 can be killed in generation g: before, or just after, what this function of essa_mpi.run does.
KILLS = ("before metrics", "after metrics", "before checkpoint", "after checkpoint", "after history",
         "before adapter", "after adapter", "before summary")


def reward(vector, row, index: int) -> float:
    """A fraction that float64 cannot hold, of every size and both signs; deterministic on any rank."""
    word = int.from_bytes(hashlib.blake2b(row.prompt.encode(), digest_size=4).digest(), "little")
    target = (word % 1000) / 3000
    x = [0.0] if vector is None else [float(v) for v in vector]
    distance = math.fsum((v - target) * (v - target) for v in x) / len(x)
    return (1 / 3 - distance) / 7 * 10.0 ** (word % 5 - 2) + index / 11


def right_or_wrong(vector, row, low: float, high: float) -> float:
    """One of two rewards: candidates differ so much in them that a race has somebody to drop."""
    word = int.from_bytes(hashlib.blake2b(row.prompt.encode(), digest_size=4).digest(), "little")
    return high if vector is not None and vector[0] > (word % 5 - 2) / 10 else low


class Faults:
    def __init__(self, rank: int, faults: list[dict]):
        self.faults = [f for f in faults if f.get("rank", rank) == rank]

    def of(self, generation, *kinds):
        return [f for f in self.faults if f["kind"] in kinds and f.get("generation") in (generation, None)]

    def strike(self, generation: int) -> None:
        from essa_mpi.config import UserError
        for fault in self.of(generation, "raise", "raise_user", "exit", "interrupt", "thread", "thread_exit", "hang"):
            kind = fault["kind"]
            if kind == "raise":
                raise RuntimeError("a fault\nover two lines")
            if kind == "raise_user":
                raise UserError("reward x raised on rows.jsonl:7")
            if kind == "exit":
                sys.exit(0)
            if kind == "interrupt":
                raise KeyboardInterrupt
            if kind.startswith("thread"):
                thread = threading.Thread(target=_raise if kind == "thread" else sys.exit)
                thread.start()
                thread.join()
            if kind == "hang":
                time.sleep(3600)


def _raise():
    raise RuntimeError("a fault in a thread")


class DeterministicScorer:
    """Has essa_mpi.scoring.Scorer's `score` and `like`."""

    def __init__(self, config, faults: Faults, sleep: float):
        self._config, self._faults, self._sleep = config, faults, sleep

    def like(self, config, reward):
        return self

    def score(self, arms, tiles, generation, keep=None):
        from essa_mpi.world import Busy, TileScore
        import numpy as np
        began = time.perf_counter()
        if self._sleep:
            time.sleep(random.random() * self._sleep)
        self._faults.strike(generation)
        nan = self._faults.of(generation, "nan")
        scores, samples, completions = [], [], 0
        for tile in tiles:
            arm, score, values = arms[tile.arm], TileScore(), []
            for place in range(tile.start, tile.stop):
                index = int(arm.indices[place])
                row = arm.split[index]
                value = reward(arm.vector, row, index)
                if self._config.reward_low < self._config.reward_high:
                    value = right_or_wrong(arm.vector, row, self._config.reward_low, self._config.reward_high)
                for fault in nan:
                    if index in fault.get("rows", [index]) and tile.arm in fault.get("candidates", [tile.arm]):
                        value = float(fault.get("value", "nan"))
                score.add(value, odd=place % 2 == 1)
                values.append([value])
                completions += 1
                if len(samples) < self._config.samples_logged:
                    samples.append({"generation": generation, "arm": arm.name, "source": row.source,
                                    "prompt": row.prompt, "completion": "", "answer": row.answer, "reward": value})
            scores.append(score)
            if keep is not None:
                keep.append(np.array(values))
        busy = Busy(generate=time.perf_counter() - began, counters={"completions": completions, "tokens": 3 * completions})
        return scores, busy, samples


class Parrot:
    """An engine that answers every prompt with its last word; has what essa_mpi.scoring.Scorer asks of one."""

    capacity = 3
    max_model_len = 10_000

    def __init__(self):
        self.tokenizer = lambda text: {"input_ids": list(text.encode())}
        self.reset_clock()

    def reset_clock(self):
        self.seconds = {"place": 0.0, "generate": 0.0}

    def place(self, vectors):
        assert len(vectors) <= self.capacity

    def generate(self, requests, sampling=None, logprobs=False):
        from essa_mpi.engine import Completion
        return [Completion(bytes(r.prompt).decode().split()[-1], (1, 2), False, False) for r in requests]


class Counting:
    """A communicator that notes every method called on it and passes the call on."""

    def __init__(self, comm):
        self.comm, self.calls, self.sent = comm, {}, []

    def __getattr__(self, name):
        found = getattr(self.comm, name)
        if not callable(found) or name in ("Get_rank", "Get_size"):
            return found

        def call(*arguments, **named):
            self.calls[name] = self.calls.get(name, 0) + 1
            if name in ("Allgather", "Iallgather"):
                self.sent.append(arguments[0][0].nbytes)
            return found(*arguments, **named)
        return call


# -- a run's files, as small as they can be: no engine could load this model --------------------------

SHAPES = {"q_proj": (8, 8), "k_proj": (4, 8), "v_proj": (4, 8), "o_proj": (8, 8)}


def write_model(folder: Path, layers=2, shapes=SHAPES, architecture="LlamaForCausalLM",
                name="model.layers.{}.self_attn.{}") -> Path:
    """A model folder: config.json and weights of the right names and shapes."""
    import numpy as np
    from safetensors.numpy import save_file
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    save_file({f"{name.format(layer, p)}.weight": np.zeros(shape, np.float32)
               for layer in range(layers) for p, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def write_adapter(folder: Path, layers=2, shapes=SHAPES, rank=2) -> Path:
    """A random peft adapter."""
    import numpy as np
    from safetensors.numpy import save_file
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(shapes), "bias": "none"}))
    draw = np.random.default_rng(0).normal
    save_file({f"base_model.model.model.layers.{layer}.self_attn.{p}.lora_{factor}.weight":
               draw(size=(rank, n) if factor == "A" else (m, rank)).astype(np.float32)
               for layer in range(layers) for p, (m, n) in shapes.items() for factor in "AB"},
              folder / "adapter_model.safetensors")
    return folder


def write_rows(path: Path, n: int, first=0) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"What is {i} + 1? {i + 1}", "answer": str(i + 1)}) + "\n"
                            for i in range(first, first + n)))
    return path


def write_run(folder: Path, **keys) -> Path:
    """Model, adapter, rows and the config of a small run, D = 32, in `folder`. Returns the config's path."""
    write_model(folder / "model")
    write_adapter(folder / "adapter")
    write_rows(folder / "rows.jsonl", 17)
    write_rows(folder / "other.jsonl", 5, first=100)
    table = {"name": "run", "model": str(folder / "model"), "adapter": str(folder / "adapter"),
             "task": str(folder / "rows.jsonl"), "validation_data": str(folder / "other.jsonl"),
             "validation_every": 2, "generations": 6, "population": 7, "batch": 5, "seed": 3, "sigma": 0.3,
             "chat": False, "samples_logged": 3, **keys}
    return write_config(folder / "config.toml", table)


def write_config(path: Path, table: dict) -> Path:
    def toml(value):
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}"
        return json.dumps(value)
    path.write_text("".join(f"{k} = {toml(v)}\n" for k, v in table.items()))
    return path


def spare_torch() -> None:
    """Stand-ins for what spectrum.py wants of torch: reading and writing float32 files. Importing it takes seconds."""
    import types
    from safetensors import numpy as files

    class Tensor:
        def __init__(self, array):
            self.array = array

        def double(self):
            return Tensor(self.array.astype("float64"))

        def numpy(self):
            return self.array

    torch, safetensors_torch = types.ModuleType("torch"), types.ModuleType("safetensors.torch")
    torch.from_numpy = lambda array: array
    safetensors_torch.load_file = lambda path: {k: Tensor(v) for k, v in files.load_file(path).items()}
    safetensors_torch.save_file = files.save_file
    sys.modules.update({"torch": torch, "safetensors.torch": safetensors_torch})


# -- faults outside the scorer -------------------------------------------------------------------

def flip(search) -> None:
    """The lowest bit of one entry of the mean."""
    word, = struct.unpack("<q", struct.pack("<d", search._mean[-1]))
    search._mean[-1], = struct.unpack("<d", struct.pack("<q", word ^ 1))


def _plant(run, faults: Faults, rank: int) -> None:
    """Faults outside the scorer, by wrapping what essa_mpi.run calls."""
    from essa_mpi import record
    new_search = run.new_search

    def faulty_search(*arguments, **named):
        search = new_search(*arguments, **named)
        tell = search.tell

        def told(generation, fitness):
            tell(generation, fitness)
            if faults.of(generation, "flip"):
                flip(search)
        search.tell = told
        return search

    run.new_search = faulty_search
    for fault in faults.of(None, "prepare", "prepare_user"):
        def refuse(model, kind=fault["kind"]):
            from essa_mpi.config import UserError
            raise (UserError if kind == "prepare_user" else RuntimeError)("a fault in set-up")
        run.hash_model = refuse
    kills = [f for f in faults.faults if f["kind"] == "kill"] if rank == 0 else []
    for kill in kills:
        assert kill["at"] in KILLS, kill
        when, what = kill["at"].split()
        owner, name = {"metrics": (record.JsonLines, "append"), "checkpoint": (record, "save_checkpoint"),
                       "history": (run.Recorder, "write_history"), "adapter": (run, "save_adapter"),
                       "summary": (run, "write_json")}[what]
        setattr(owner, name, _killing(getattr(owner, name), what, when == "before", kill.get("generation")))


def _killing(function, what, before, generation):
    def due(arguments):
        if generation is None:
            return True
        if what == "metrics":
            return "ranks" in arguments[1] and arguments[1]["generation"] == generation
        if what == "checkpoint":
            return arguments[1] == generation + 1
        return len(arguments[0].history) == generation + 1      # history

    def killing(*arguments, **named):
        if before and due(arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **named)
        if due(arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return killing


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("config")
    p.add_argument("--resume", action="store_true")
    p.add_argument("--set", action="append", default=[], dest="overrides")
    p.add_argument("--sleep", type=float, default=0.0)
    p.add_argument("--fault", action="append", default=[], type=json.loads)
    p.add_argument("--preload")
    p.add_argument("--count")
    p.add_argument("--user-reward", action="store_true")
    p.add_argument("--eval", metavar="RUN")
    p.add_argument("--trace", metavar="FILE")
    args = p.parse_args()
    if args.preload and os.environ.get("LD_PRELOAD") != args.preload:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": args.preload})

    from essa_mpi import cli, config, departure      # the path of `python -m essa_mpi run`
    departure.listen()
    world, settings = cli.start_world(lambda: config.load(args.config, args.overrides))
    if not settings.trackers:       # which need the real one
        spare_torch()
    faults = Faults(world.rank, args.fault)
    counting = None
    if args.count:
        world.comm = counting = Counting(world.comm)
    from essa_mpi import run
    _plant(run, faults, world.rank)

    def factory(settings, spectrum, task):
        if faults.of(None, "setup"):
            raise RuntimeError("a fault in set-up")
        if args.user_reward:
            from essa_mpi.rewards import load_reward
            from essa_mpi.scoring import Scorer
            return Scorer(Parrot(), load_reward(settings), settings)
        return DeterministicScorer(settings, faults, args.sleep)

    if args.eval:
        from essa_mpi import results
        run.start_scorer = lambda world, config, prepared, folder, _: factory(config, prepared.spectrum, prepared.task)
        cli.guarded(world, lambda: results.evaluate_run(world, settings, args.eval,
                                                        results.Asked(json_path="eval.json")))
    else:
        cli.guarded(world, lambda: run.run(world, settings, args.resume, factory, args.trace))
    if counting and world.rank == 0:
        Path(args.count).write_text(json.dumps({"calls": counting.calls, "sent": counting.sent}))


if __name__ == "__main__":
    main()
