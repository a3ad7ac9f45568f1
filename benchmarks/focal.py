"""What of F-GRPO can be checked on a processor: its formulas, its categorical simulation, and a small maze.

    python -m benchmarks.focal [--json FILE] [--plot FILE] [--seeds 3] [--maze-seeds 3] [--skip-maze] [--quick]

F-GRPO (arXiv 2602.06717) multiplies the advantages of a prompt by g = (1 - mu_hat)^gamma, mu_hat the share of right
answers among its N rollouts. Four parts:

    tail miss     the closed form of the chance that a group updates the policy without having seen a rare right mode,
                  against sampled groups
    multiplier    what g does to the size of updates, and with which learning rate gamma = 0 has updates as large: the
                  closed form against quadrature
    categorical   128,000 answers, 10,000 right (benchmarks/categorical.py): the mass that right answers retain, over
                  N and gamma; ratio valley_gamma1_over_gamma0 at the N where gamma = 0 retains least
    maze          one right answer (benchmarks/maze.py), far smaller than the paper's: 9 x 9 squares instead of
                  17 x 17, a GRU of 0.1M parameters instead of a decoder of 3M. Beside gamma 0.5 and 1 stands the
                  control for gamma 0.5: gamma 0 at the multiplier's learning rate. gamma 1 has no such control

Some 15 minutes on one core: 5 the simulation, 10 the maze. Standard errors are over seeds, and three seeds make rough
ones; differences are paired by seed. Exit code 1 if a closed form is refuted.
"""

import argparse
import copy
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from essa_mpi.estimates import mean_and_error

from . import categorical, record

REFUTED = 5.0       # standard errors; the chance that one of some 100 right values is so far off is 6e-5
SIZES = tuple(2**i for i in range(1, 18))
VARIANT_SIZES = (2, 256, 8192)
GAMMAS = (0.0, 0.5, 1.0)
MAZE_SIZES, MAZE_KS = (4, 32), (1, 4, 16, 64)


# -- the formulas ----------------------------------------------------------------------------------

def tail_miss(tau, mu, size):
    """Pr(a group of `size` has right and wrong answers, but none of a right mode of mass tau): F-GRPO, section 3.

    mu: mass of all right answers. All of the group outside the mode, less all of it right, less all of it wrong.
    """
    return (1 - tau) ** size - (mu - tau) ** size - (1 - mu) ** size


def active(mu, size):
    """Pr(a group has right and wrong answers)."""
    return 1 - mu**size - (1 - mu) ** size


def check_tail_miss(draws: int, rng) -> list[dict]:
    """Both formulas over a grid, each value against its own `draws` groups; z in standard errors by the closed form."""
    rows = []

    def check(event, mu, tau, size, p, happened):
        error = math.sqrt(max(p * (1 - p), 0.0) / draws)
        # Below 10 expected counts, of the event or its complement, z is not normal.
        z = float((happened.mean() - p) / error) if min(p, 1 - p) * draws >= 10 else None
        rows.append({"part": "tail miss", "event": event, "mu": mu, "tau": tau, "size": size, "closed_form": p,
                     "sampled": float(happened.mean()), "standard_error": error, "z": z})

    for mu in (0.1, 0.5, 0.9):
        for size in (2, 4, 8, 16, 32, 64, 128, 512):
            wrong = rng.binomial(size, 1 - mu, draws)
            check("active", mu, None, size, active(mu, size), (wrong > 0) & (wrong < size))
            for tau in (0.001, 0.01, 0.05):
                tails, others, wrong = rng.multinomial(size, [tau, mu - tau, 1 - mu], draws).T
                check("tail miss", mu, tau, size, tail_miss(tau, mu, size),
                      (tails == 0) & (wrong > 0) & (wrong < size))
    return rows


def multiplier(gamma: float) -> float:
    """The learning rate, as a multiple, at which gamma = 0 has updates as large as gamma has: F-GRPO's control.

    The mean |A| of a group is 2 sqrt(mu (1 - mu)) when advantages are divided by their deviation. Over prompts with
    mu uniform in (0, 1) this is E[(1 - mu)^gamma sqrt(mu (1 - mu))] / E[sqrt(mu (1 - mu))], that is
    B(3/2, gamma + 3/2) / B(3/2, 3/2).
    """
    return 4 / math.sqrt(math.pi) * math.gamma(gamma + 1.5) / math.gamma(gamma + 3)


def multiplier_by_quadrature(gamma: float, nodes: int = 200) -> float:
    """The same from the two expectations, by Gauss-Legendre after mu = sin^2 phi, which has no root left in it."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    mu = np.sin(phi := (x + 1) * math.pi / 4) ** 2
    size = w * np.sqrt(mu * (1 - mu)) * np.sin(2 * phi)
    return float((size * (1 - mu) ** gamma).sum() / size.sum())


def multiplier_of_groups(gamma: float, size: int) -> float:
    """The same for groups of `size`: with mu uniform, 0 to `size` right answers are equally likely."""
    mu = np.arange(size + 1) / size
    return float(((1 - mu) ** gamma * np.sqrt(mu * (1 - mu))).sum() / np.sqrt(mu * (1 - mu)).sum())


# -- means over seeds --------------------------------------------------------------------------------

def summary(values) -> dict:
    """Mean, standard error over the values (None: one has none), the values, and words."""
    mean, error = mean_and_error(np.array(values))
    error = None if math.isnan(error) else error
    return {"mean": mean, "standard_error": error, "values": list(values),
            "text": f"{mean:.3f} +- " + ("?" if error is None else f"{error:.3f}")}


# -- the simulation ----------------------------------------------------------------------------------

def run_categorical(sizes, seeds: int, **setting) -> list[dict]:
    print(f"\ncategorical, {seeds} seeds, {setting or 'full size'}: retained mass | total correct mass\n"
          f"{'variant':22}{'N':>8}  gamma 0                         gamma 1")
    rows = []
    for variant in categorical.VARIANTS:
        whole = variant == categorical.VARIANTS[0]
        for size in sizes if whole else [size for size in VARIANT_SIZES if size in sizes]:
            line = f"{variant:22}{size:8}"
            for gamma in (0.0, 1.0):
                found = [categorical.simulate(size, gamma, seed, variant, **setting)
                         for seed in range(seeds if whole else 1)]
                row = {"part": "categorical", "variant": variant, "size": size, "gamma": gamma,
                       **{key: summary([one[key] for one in found]) for key in found[0]}}
                line += f"  {row['retained']['text']} | {row['correct']['text']}"
                rows.append(row)
            print(line, flush=True)
    return rows


def of(rows, **what) -> dict:
    return next(row for row in rows if all(row.get(key) == value for key, value in what.items()))


def valley(rows) -> tuple[int, dict[int, dict]]:
    """Where gamma 0 retains least: (that N, {N: retained mass of gamma 1 over that of gamma 0, a value a seed}).

    The second over the whole bottom, all N that retain less than 1.1 times the least: where it is flat, which N is
    the lowest is chance.
    """
    base = [row for row in rows if row.get("variant") == categorical.VARIANTS[0] and row["gamma"] == 0]
    least = min(base, key=lambda row: row["retained"]["mean"])
    over = {}
    for row in base:
        if row["retained"]["mean"] < 1.1 * least["retained"]["mean"] or row is least:
            focal = of(rows, variant=row["variant"], size=row["size"], gamma=1.0)
            over[row["size"]] = summary([a / b for a, b in zip(focal["retained"]["values"], row["retained"]["values"])])
    return least["size"], over


# -- the maze ----------------------------------------------------------------------------------------

def run_maze(settings, seeds: int) -> list[dict]:
    """A seed has its own mazes and warm start, from which all arms start; they train on the same mazes in order."""
    from . import maze
    arms = [(size, gamma, 1.0) for size in MAZE_SIZES for gamma in GAMMAS]
    arms += [(size, 0.0, multiplier(0.5)) for size in MAZE_SIZES]      # is gamma .5 more than smaller steps?
    found = {arm: [] for arm in [None, *arms]}
    for seed in range(seeds):
        squares, answers = maze.make_mazes(settings.mazes + settings.heldout, settings.cells,
                                           np.random.default_rng([seed, 0]))
        trained = squares[settings.heldout:], answers[settings.heldout:]
        heldout = squares[:settings.heldout], answers[:settings.heldout]
        warm = maze.warm_start(settings, *trained, seed)
        found[None].append(maze.evaluate(settings, warm, *heldout, MAZE_KS, seed))
        for arm in arms:
            policy = copy.deepcopy(warm)
            maze.train(settings, policy, *trained, *arm[:2], seed, rate_factor=arm[2])
            found[arm].append(maze.evaluate(settings, policy, *heldout, MAZE_KS, seed))
    rows = []
    print(f"\nmaze, {2 * settings.cells + 1} x {2 * settings.cells + 1} squares, {settings.heldout} held-out mazes, "
          f"{settings.samples} answers each, {seeds} seeds; minus: the difference to gamma 0 at the same N\n"
          f"{'':30}" + "".join(f"{f'pass@{k}':17}" for k in MAZE_KS))
    for arm, results in found.items():
        name = "warm start" if arm is None else (
            f"N {arm[0]}, gamma {arm[1]:g}" + (f", rate x {arm[2]:.3f}" if arm[2] != 1 else ""))
        row = {"part": "maze", "arm": name, **(dict(zip(("size", "gamma", "rate_factor"), arm)) if arm else {}),
               **{f"pass@{k}": summary([one[k] for one in results]) for k in MAZE_KS}}
        print(f"{name:30}" + "".join(f"{row[f'pass@{k}']['text']:17}" for k in MAZE_KS))
        if arm and arm[1:] != (0.0, 1.0):
            base = found[(arm[0], 0.0, 1.0)]
            row["minus_gamma_0"] = {f"pass@{k}": summary([a[k] - b[k] for a, b in zip(results, base)]) for k in MAZE_KS}
            print(f"{'  minus':30}" + "".join(f"{row['minus_gamma_0'][f'pass@{k}']['text']:17}" for k in MAZE_KS))
        rows.append(row)
    return rows


# -- the picture -------------------------------------------------------------------------------------

def plot(rows, path) -> None:
    """Retained mass over N; if there are mazes, pass@k over k. Needs matplotlib: the extra `plots`."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    mazes = [row for row in rows if row["part"] == "maze"]
    sizes = list(dict.fromkeys(row["size"] for row in mazes if "size" in row))
    figure, axes = pyplot.subplots(1, 1 + len(sizes), figsize=(4.2 * (1 + len(sizes)), 3.4), squeeze=False,
                                   constrained_layout=True)
    for gamma, colour in ((0.0, "C0"), (1.0, "C1")):
        chosen = [row for row in rows if row.get("variant") == categorical.VARIANTS[0] and row["gamma"] == gamma]
        for key, line in (("retained", "-"), ("correct", ":")):
            axes[0, 0].errorbar([row["size"] for row in chosen], [row[key]["mean"] for row in chosen],
                                [row[key]["standard_error"] or 0 for row in chosen], fmt=line, color=colour,
                                label=f"{'retained mass' if key == 'retained' else 'correct mass'}, gamma {gamma:g}")
    axes[0, 0].set(xscale="log", xlabel="group size N", ylim=(0, 1.03), title="categorical simulation")
    axes[0, 0].legend(fontsize=7)
    for axis, size in zip(axes[0, 1:], sizes):
        for row in mazes:
            if row.get("size", size) == size:
                axis.errorbar(MAZE_KS, [row[f"pass@{k}"]["mean"] for k in MAZE_KS],
                              [row[f"pass@{k}"]["standard_error"] or 0 for k in MAZE_KS],
                              label=row["arm"].removeprefix(f"N {size}, "), fmt="k--" if "size" not in row else "-")
        axis.set(xscale="log", xlabel="k", ylabel="pass@k, held-out mazes", ylim=(0, 1.03), title=f"maze, N = {size}")
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.focal", description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--plot", metavar="FILE", help="the picture (default: beside the JSON, as .png)")
    parser.add_argument("--seeds", type=int, default=3, help="of the categorical simulation (default 3)")
    parser.add_argument("--maze-seeds", type=int, default=3, help="of the maze (default 3)")
    parser.add_argument("--skip-maze", action="store_true")
    parser.add_argument("--quick", action="store_true", help="everything tiny: does it run? The numbers mean nothing")
    options = parser.parse_args(arguments)
    for name, value in (("--seeds", options.seeds), ("--maze-seeds", options.maze_seeds)):
        if value < 1:
            parser.error(f"{name} = {value}; allowed: an integer >= 1")
    import torch
    torch.set_num_threads(1)
    seconds, ratios, started = {}, {}, time.process_time()     # of the processor: other load does not count

    def lap(part):
        nonlocal started
        seconds[part], started = time.process_time() - started, time.process_time()

    draws = 20_000 if options.quick else 200_000
    rows = check_tail_miss(draws, np.random.default_rng(0))
    zs = [abs(row["z"]) for row in rows if row["z"] is not None]
    print(f"tail miss and active groups: {len(zs)} values with 10 or more expected events of {draws}, of {len(rows)}; "
          f"largest |z| {max(zs):.2f}, above 2: {sum(z > 2 for z in zs)} (expected {0.0455 * len(zs):.1f})")
    print("tail miss by N at mu 0.5: " + "; ".join(f"tau {tau}: " + ", ".join(
        f"{row['size']} {row['closed_form']:.2f}" for row in rows
        if (row["event"], row["mu"], row["tau"]) == ("tail miss", 0.5, tau)) for tau in (0.01, 0.05)))
    ratios["tail_miss_largest_z"] = max(zs)
    lap("tail miss")

    print(f"\n{'gamma':>7} {'multiplier':>12} {'quadrature':>12} {'groups of 8':>12}")
    for gamma in (0.0, 0.5, 1.0, 2.0):
        row = {"part": "multiplier", "gamma": gamma, "closed_form": multiplier(gamma),
               "quadrature": multiplier_by_quadrature(gamma), "groups_of_8": multiplier_of_groups(gamma, 8)}
        print(f"{gamma:7g} {row['closed_form']:12.6f} {row['quadrature']:12.6f} {row['groups_of_8']:12.6f}")
        rows.append(row)
        ratios[f"multiplier_gamma_{gamma:g}"] = row["closed_form"]
    refuted = max(zs) > REFUTED or any(abs(row["closed_form"] - row["quadrature"]) > 1e-9
                                       for row in rows if row["part"] == "multiplier")

    setting = {"actions": 2000, "correct": 200, "steps": 60} if options.quick else {}
    lap("multiplier")
    rows += run_categorical((2, 64, 256) if options.quick else SIZES, options.seeds, **setting)
    size, over = valley(rows)
    print(f"gamma 0 retains least at N = {size}; there gamma 1 over gamma 0: {over[size]['text']}. All of the bottom: "
          + ", ".join(f"{other} {ratio['text']}" for other, ratio in over.items()))
    ratios.update(valley_gamma1_over_gamma0=over[size]["mean"], valley_size=float(size),
                  valley_gamma1_over_gamma0_least=min(ratio["mean"] for ratio in over.values()))
    lap("categorical")

    if not options.skip_maze:
        from .maze import Settings
        settings = Settings()
        if options.quick:
            settings = replace(settings, cells=3, mazes=80, heldout=10, hidden=16, warm_steps=5, warm_batch=16, steps=2,
                               prompts=4, samples=64)
        mazes = run_maze(settings, options.maze_seeds)
        for row in mazes:
            if "minus_gamma_0" in row and row["rate_factor"] == 1:
                for k in (MAZE_KS[0], MAZE_KS[-1]):
                    name = f"maze_N{row['size']}_pass{k}_gamma{row['gamma']:g}_minus_gamma0"
                    ratios[name] = row["minus_gamma_0"][f"pass@{k}"]["mean"]
        rows += mazes
        lap("maze")

    print("\nprocessor seconds: " + ", ".join(f"{part} {value:.1f}" for part, value in seconds.items()))
    record.write(options.json, "focal", rows, ratios, versions=record.versions("numpy", "torch"), quick=options.quick,
                 seeds=options.seeds, maze_seeds=options.maze_seeds, processor_seconds=seconds, valley=over)
    picture = options.plot or (options.json and str(Path(options.json).with_suffix(".png")))
    if picture:
        plot(rows, picture)
    if refuted:
        print("benchmarks.focal: a closed form and its check differ by more than chance allows", file=sys.stderr)
    return int(refuted)


if __name__ == "__main__":
    sys.exit(main())
