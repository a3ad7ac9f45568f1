"""How long a real engine's answers are, and its decode steps: what `benchmarks.sleeping` draws from.

    python -m benchmarks.answers CONFIG FILE [--rows 128]

Answers rows of the config's training split with its warm start, one sample each at the config's temperature, all at
once; then one answer alone. FILE: {"lengths": tokens of each answer, "token": seconds a token with all slots taken,
"step": seconds of a decode step with one sequence, "slots", "source"}.
"""

import argparse
import json
import time
from pathlib import Path

from essa_mpi import cli
from essa_mpi import config as configuration

from . import record


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.answers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("file")
    parser.add_argument("--rows", type=int, default=128)
    options = parser.parse_args()
    world, config = cli.start_world(lambda: configuration.load(options.config))
    cli.guarded(world, lambda: answer(config, options))


def answer(config, options) -> None:
    from essa_mpi.engine import Engine, Request
    from essa_mpi.spectrum import Spectrum
    from essa_mpi.tasks import load_task, render
    spectrum = Spectrum.load(config.adapter, config.alpha)
    engine = Engine(config, spectrum)
    engine.place([[0.0] * spectrum.dimension])
    rows = load_task(config).train[:options.rows]
    requests = [Request(0, render(row, engine.tokenizer, config), seed) for seed, row in enumerate(rows)]

    def timed(some) -> tuple[list[int], float]:
        began = time.perf_counter()
        lengths = [len(completion.tokens) for completion in engine.generate(some, config)]
        return lengths, time.perf_counter() - began

    timed(requests[:2])     # warm-up
    lengths, together = timed(requests)
    alone, seconds = timed(requests[:1])
    found = {"lengths": lengths, "token": together / sum(lengths), "step": seconds / alone[0], "slots": min(len(rows), config.max_num_seqs),
             "source": f"{Path(config.model).name} on {len(rows)} rows of {'/'.join(Path(config.task).parts[-2:])}, temperature {config.temperature:g}, "
                       f"max_tokens {config.max_tokens}; {record.processor()}"}
    Path(options.file).write_text(json.dumps(found) + "\n")
    print({key: value for key, value in found.items() if key != "lengths"})
    print(f"tokens: least {min(lengths)}, mean {sum(lengths) / len(lengths):.0f}, greatest {max(lengths)}")


if __name__ == "__main__":
    main()
