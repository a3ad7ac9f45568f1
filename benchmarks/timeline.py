"""A picture of a trace: a row a rank, a colour a kind of work.

    mpirun -n 4 python -m essa_mpi run jobs/quickstart.toml --set generations=2 --trace trace.json
    python -m benchmarks.timeline trace.json trace.png

Prints the seconds of each kind, summed over the ranks, of each generation. The picture ends with the last generation.
"""

import argparse
import collections

from essa_mpi import trace

COLOURS = dict(zip(trace.NAMES, ("tab:olive", "tab:purple", "tab:blue", "tab:cyan", "lightgrey", "tab:red", "tab:orange",
                                 "tab:green", "tab:brown", "tab:pink")))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="what --trace wrote")
    parser.add_argument("picture", help="a .png or .svg")
    options = parser.parse_args()
    try:
        events = trace.read(options.trace)
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.error(f"{options.trace}: not what --trace writes: {error}")
    table = collections.defaultdict(collections.Counter)
    for event in events:
        table[event["args"]["generation"]][event["name"]] += event["dur"] / 1e6
    for generation, seconds in table.items():
        of = "after them" if generation == trace.AFTER else f"generation {generation}"
        print(f"{of}: " + ", ".join(f"{name} {seconds[name]:.3f} s" for name in trace.NAMES if name in seconds))
    events = [event for event in events if event["args"]["generation"] != trace.AFTER]
    if not events:
        parser.error(f"{options.trace}: there is no generation in it")
    draw(events, options.picture)


def draw(events: list[dict], path: str) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot
    ranks = sorted({event["pid"] for event in events})
    figure, axes = pyplot.subplots(figsize=(9, 0.9 + 0.35 * len(ranks)), dpi=100)
    for name in (name for name in trace.NAMES if any(event["name"] == name for event in events)):
        for rank in ranks:
            spans = [(event["ts"] / 1e6, event["dur"] / 1e6) for event in events if (event["name"], event["pid"]) == (name, rank)]
            axes.broken_barh(spans, (ranks.index(rank) - 0.4, 0.8), facecolor=COLOURS[name], edgecolor=COLOURS[name], linewidth=0.8,
                             label=name if rank == ranks[0] else None)
    axes.set(xlabel="seconds", yticks=range(len(ranks)), yticklabels=[f"rank {rank}" for rank in ranks], xlim=(0, None))
    axes.invert_yaxis()
    axes.legend(fontsize=7, ncol=len(trace.NAMES), loc="upper center", bbox_to_anchor=(0.5, -0.35), frameon=False)
    figure.savefig(path, bbox_inches="tight")


if __name__ == "__main__":
    main()
