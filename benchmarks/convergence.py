"""How many evaluations does our search need to a target, against pycma under the same settings?

    python -m benchmarks.convergence [--json FILE] [--seeds 15 5] [--processes N]

Population 4 + floor(3 ln D), start at 0, optimum at 1, sigma 0.5, the same negative weights (none, unless
`active`) and the same step-size rule on both sides (CSA or TPA; pycma by itself takes TPA from D = 300 on):

    D = 40, 15 seeds    sphere, ellipsoid (condition 1e6) and Rosenbrock to 1e-8; noisy sphere to 1e-6
    D = 480, 5 seeds    sphere and noisy sphere to 1e-4

The noisy sphere is f (1 + 4/D N(0, 1)): as strong, beside the distance, wherever the search is. What must reach
the target is the noise-free value of the distribution's mean, looked at after every generation. A run that
misses it within its budget counts as the budget. Printed: the ratio of mean evaluations, ours over pycma's, and
its 95 % interval (bootstrap over the seeds of both). Beside them, our own kinds and rules against `fast` with
CSA.
"""

import argparse
import multiprocessing
import os

import numpy as np

from . import record

SIGMA = 0.5
# name -> (dimension, target, budget in evaluations)
PROBLEMS = {
    "sphere 40": (40, 1e-8, 40_000), "ellipsoid 40": (40, 1e-8, 200_000), "rosenbrock 40": (40, 1e-8, 400_000),
    "noisy sphere 40": (40, 1e-6, 80_000), "sphere 480": (480, 1e-4, 200_000), "noisy sphere 480": (480, 1e-4, 400_000),
}
# (kind, step-size rule, active), each against pycma with the same rule and weights
COMPARED = [("fast", "csa", False), ("fast", "tpa", False)]
ACTIVE = ("fast", "csa", True)      # on the ellipsoid, where it should matter
OWN = [("cma", "csa", False), ("sep", "csa", False), ("limited", "csa", False)]   # against fast, csa


def sphere(X):
    return ((X - 1) ** 2).sum(axis=-1)


def ellipsoid(X):
    return (10.0 ** (6 * np.arange(X.shape[-1]) / (X.shape[-1] - 1)) * (X - 1) ** 2).sum(axis=-1)


def rosenbrock(X):
    return (100 * (X[..., 1:] - X[..., :-1] ** 2) ** 2 + (1 - X[..., :-1]) ** 2).sum(axis=-1)


def evaluations(job) -> int:
    """Evaluations of one run to the target, or the budget. job: (problem, library, kind, rule, active, seed)."""
    problem, library, kind, rule, active, seed = job
    dimension, target, budget = PROBLEMS[problem]
    population = 4 + int(3 * np.log(dimension))
    truth = {"ellipsoid": ellipsoid, "rosenbrock": rosenbrock}.get(problem.split()[0], sphere)
    draw = np.random.default_rng([seed, dimension])

    def values(X):
        true = truth(X)
        return true * (1 + 4 / dimension * draw.standard_normal(len(X))) if "noisy" in problem else true

    step, mean = {"ours": ours, "pycma": pycma}[library](kind, rule, active, dimension, population, seed)
    for used in range(population, budget + 1, population):
        step(values)
        if truth(mean()) <= target:
            return used
    return budget


def ours(kind, rule, active, dimension, population, seed):
    from essa_mpi.search import make_search
    search = make_search(kind, dimension, population, SIGMA, seed, step_size=rule, **({"active": True} if active else {}))
    return (lambda values: search.tell(search.generation, -values(search.ask(search.generation)))), lambda: search.mean


def pycma(kind, rule, active, dimension, population, seed):
    import cma
    adapt = {"csa": cma.sigma_adaptation.CMAAdaptSigmaCSA, "tpa": cma.sigma_adaptation.CMAAdaptSigmaTPA}[rule]
    es = cma.CMAEvolutionStrategy(dimension * [0.0], SIGMA, {
        "popsize": population, "AdaptSigma": adapt, "CMA_active": active, "seed": seed + 1, "verbose": -9, "verb_log": 0,
        "verb_disp": 0})

    def step(values):
        X = es.ask()
        es.tell(X, values(np.array(X)).tolist())
    return step, lambda: es.mean


def compare(a, b, draws=20_000):
    """Ratio of the means of a over b and its 95 % interval, by bootstrap over both."""
    draw = np.random.default_rng(0)
    pick = [np.mean(np.array(x)[draw.integers(0, len(x), (draws, len(x)))], axis=1) for x in (a, b)]
    low, high = np.quantile(pick[0] / pick[1], [0.025, 0.975])
    return {"ratio": float(np.mean(a) / np.mean(b)), "low": float(low), "high": float(high)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), metavar="NAME")
    parser.add_argument("--seeds", nargs=2, type=int, default=(15, 5), help="at D = 40 and at D = 480")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    pairs = []      # (problem, ours, the other)
    for problem in options.problems:
        settings = COMPARED + ([ACTIVE] if "ellipsoid" in problem else [])
        pairs += [(problem, ("ours", *one), ("pycma", "", *one[1:])) for one in settings]
        own = OWN if "ellipsoid" not in problem and "rosenbrock" not in problem else OWN[:1]
        own = own if PROBLEMS[problem][0] == 40 else own[1:]       # the oracle is slow and no other than at D = 40
        pairs += [(problem, ("ours", *one), ("ours", *COMPARED[0])) for one in own + [COMPARED[1]]]
    jobs = list(dict.fromkeys((problem, *arm, seed) for problem, *arms in pairs for arm in arms
                              for seed in range(options.seeds[PROBLEMS[problem][0] > 40])))
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")   # a process a core
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        found = dict(zip(jobs, pool.map(evaluations, jobs, chunksize=1)))
    rows, ratios = [], {}
    for problem, mine, other in pairs:
        seeds = range(options.seeds[PROBLEMS[problem][0] > 40])
        a, b = ([found[(problem, *arm, seed)] for seed in seeds] for arm in (mine, other))
        budget = PROBLEMS[problem][2]
        row = {"problem": problem, "ours": mine, "against": other, "target": PROBLEMS[problem][1], "budget": budget,
               "evaluations": a, "evaluations_against": b, **compare(a, b),
               "misses": [sum(x >= budget for x in a), sum(x >= budget for x in b)]}
        rows.append(row)
        print(f"{problem:<17} {name(mine):<20} {np.mean(a):9.0f}   {name(other):<18} {np.mean(b):9.0f}   ratio "
              f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
              + (f"  misses {row['misses'][0]} and {row['misses'][1]}" if any(row["misses"]) else ""))
        if other[0] == "pycma":
            ratios[f"{problem} {name(mine)} over pycma".replace(" ", "_")] = row["ratio"]
    worst = [row["low"] for row in rows if row["against"][0] == "pycma"]
    if worst:
        ratios["largest_lower_end"] = max(worst)
    record.write(options.json, "convergence", rows, ratios, versions=record.versions("essa_mpi", "numpy", "cma"))


def name(arm) -> str:
    library, kind, rule, active = arm
    return " ".join(filter(None, [kind or library, rule, "active" if active else ""]))


if __name__ == "__main__":
    main()
