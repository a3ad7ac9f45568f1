"""Which search in thousands of dimensions? Full covariance, diagonal and LM-MA-ES over some hundreds of generations.

    python -m benchmarks.highdimension [--json FILE] [--dimensions 2048 4096] [--population 128] [--generations 400]

A run of ESSA has hundreds of generations, not the thousands that an optimum takes: so what counts is how far each search
is after some. Loss of the mean, as a share of the start's, on a sphere and on an ellipsoid with axes' weights from 1 to
1e4 in random order. Ten minutes on a core.
"""

import argparse

import numpy as np

from essa_mpi.search import make_search

from . import record

KINDS = ("fast", "sep", "limited")


def functions(dimension: int) -> dict[str, np.ndarray]:
    """Weights of the squared distances."""
    return {"sphere": np.ones(dimension),
            "ellipsoid 1e4": np.random.default_rng(1).permutation(np.geomspace(1, 1e4, dimension))}


def losses(kind: str, weights: np.ndarray, population: int, generations: int, marks: list[int]) -> list[float]:
    """Of the mean after each number of generations in `marks`, over the start's."""
    target = np.random.default_rng(0).standard_normal(len(weights))
    search, found = make_search(kind, len(weights), population, 0.3, 5), []
    for generation in range(generations):
        search.tell(generation, -((search.ask(generation) - target) ** 2 @ weights))
        if generation + 1 in marks:
            found.append(float((search.mean - target) ** 2 @ weights / (target**2 @ weights)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.highdimension", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--dimensions", nargs="+", type=int, default=(2048, 4096))
    parser.add_argument("--population", type=int, default=128)
    parser.add_argument("--generations", type=int, default=400)
    options = parser.parse_args()
    marks = [options.generations * part // 8 for part in (1, 2, 4, 8)]
    rows, ratios = [], {}
    for dimension in options.dimensions:
        for name, weights in functions(dimension).items():
            for kind in KINDS:
                found = losses(kind, weights, options.population, options.generations, marks)
                rows.append({"dimension": dimension, "function": name, "search": kind, "generations": marks, "loss": found})
                print(f"D = {dimension}  {name:14} {kind:8} " + "  ".join(f"{g}: {x:.4f}" for g, x in zip(marks, found)), flush=True)
            fast, _, limited = (row["loss"][-1] for row in rows[-3:])
            ratios[f"limited_over_fast_{dimension}_{name.replace(' ', '_')}"] = limited / fast
    record.write(options.json, "highdimension", rows, ratios, population=options.population,
                 versions=record.versions("essa_mpi", "numpy"))


if __name__ == "__main__":
    main()
