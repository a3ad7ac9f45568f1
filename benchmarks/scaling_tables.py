"""What `benchmarks.scaling` found, as tables and a plot."""

from pathlib import Path

from essa_mpi.plan import aligned

from . import figure3
from .generation import TERMS, Setting


def told(found: dict, setting: Setting) -> None:
    """All of it, printed."""
    _print("what a generation is made of", [[name.ljust(17), text] for name, text in TERMS.items()])
    rows = found["rows"]
    _strong("(a) constant seconds a sample", [row for row in rows if row["cost"] == "constant"])
    _strong("(b) an engine with continuous batching", [row for row in rows if row["cost"] == "engine"])
    table = [["GPUs", "seconds", "efficiency", "GPUs an engine", "ranks", "a rank takes", "most beyond the work"]]
    table += [[str(row["gpus"]), f"{row['seconds']:.2f}", f"{row['efficiency']:.3f}", str(row["tensor_parallel"]),
               str(row["ranks"]), shape(row, setting), _limit(row)] for row in rows if row["scaling"] == "best split"]
    _print("(b) best split, of tensor parallelism within a node and rows or candidates first", table)
    weak = {(row["cost"], row["ranks"]): row for row in rows if row["scaling"] == "weak"}
    table = [["ranks", "efficiency (a)", "(b)", "most beyond the work (b)"]]
    table += [[str(ranks), f"{weak['constant', ranks]['efficiency']:.3f}", f"{row['efficiency']:.3f}", _limit(row)]
              for (cost, ranks), row in weak.items() if cost == "engine"]
    _print("weak scaling, a candidate a rank", table)
    table = [["GPUs", "population", "times as long"]]
    table += [[str(row["gpus"]), str(row["population"]), f"{row['longer']:.2f}"]
              for row in rows if row["scaling"] == "population"]
    _print("(b) larger populations on the same GPUs", table)
    if found["sensitivity"]:
        names = [name for name in found["sensitivity"][0] if name != "case"]
        words = [name.replace("constant_", "(a) ").replace("engine_", "(b) ").replace("_", " on ") for name in names]
        table = [["", *words, ""]]
        for row in found["sensitivity"]:
            numbers = [f"{row[name]:.1f}" if "seconds" in name else f"{row[name]:.3f}" for name in names]
            table.append([row["case"].ljust(40), *numbers, ""])
        _print("seconds, and efficiencies on so many GPUs, under other assumptions", table)
    names = [f"{size}_{kind}" for size in ("7B", "32B", "72B") for kind in ("adapter", "full")]
    table = [["ranks", "bytes a rank", "all-gather: Bruck", "ring", "all-reduce: " + names[0].replace("_", " "),
              *(name.replace("_", " ") for name in names[1:])]]
    for row in found["collectives"]:
        gathers = [f"{row[f'allgather_{name}']:.1e}" for name in ("bruck", "ring")]
        table.append([str(row["ranks"]), str(row["bytes_a_rank"]), *gathers,
                      *(f"{row[f'allreduce_{name}']:.3g}" for name in names)])
    latency, bandwidth = setting.network.latency * 1e6, setting.network.bandwidth / 1e9
    _print(f"seconds by the alpha-beta model, {latency:g} us and {bandwidth:g} GB/s; adapters of rank {setting.rank}", table)
    figure3.told(found["paper"])


def _print(title: str, table: list[list[str]]) -> None:
    print(f"\n{title}", *aligned(table), sep="\n")


def _limit(row: dict) -> str:
    return f"{row['limit']}, {row['terms'][row['limit']] / row['seconds']:.0%} of all"


def _strong(title: str, rows: list[dict]) -> None:
    """rows: of one cost."""
    found = {(row["tiles"], row["gpus"]): row for row in rows if row["scaling"] == "strong"}
    table = [["GPUs", "answers a rank", "seconds", "efficiency", "with whole candidates", "most beyond the work"]]
    table += [[str(gpus), f"{row['answers_a_rank']:.1f}", f"{row['seconds']:.2f}", f"{row['efficiency']:.3f}",
               f"{found[False, gpus]['efficiency']:.3f}", _limit(row)] for (tiles, gpus), row in found.items() if tiles]
    _print(title, table)


def shape(row: dict, setting: Setting) -> str:
    """Candidates x rows of a rank, on average."""
    answers, population, batch = row["answers_a_rank"], row["population"], setting.batch
    wide = population if row["rows_first"] else batch
    full, other = (answers / wide, wide) if answers >= wide else (1, answers)
    candidates, rows = (other, full) if row["rows_first"] else (full, other)
    return f"{candidates:.4g} candidates x {rows:.4g} rows"


def plot(path: Path, rows: list[dict], gathers: list[dict], setting: Setting, base: int) -> None:
    """Efficiencies and collectives as a PNG. Raises ImportError without matplotlib."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.6))
    for cost, name in (("constant", "(a) constant seconds a sample"), ("engine", "(b) engine")):
        for tiles, style in ((True, "-o"), (False, ":")):
            line = [row for row in rows if (row["scaling"], row["cost"], row["tiles"]) == ("strong", cost, tiles)]
            left.plot([row["gpus"] for row in line], [row["efficiency"] for row in line], style, ms=3,
                      color={"constant": "C0", "engine": "C1"}[cost], label=name + ", candidates whole" * (not tiles))
    line = [row for row in rows if row["scaling"] == "best split"]
    left.plot([row["gpus"] for row in line], [row["efficiency"] for row in line], "-s", ms=3, color="C2",
              label="(b) best split")
    left.set(xscale="log", xlabel="GPUs", ylabel=f"efficiency relative to {base} GPUs", ylim=(0, 1.05),
             title=f"{setting.size}, population {setting.population} x batch {setting.batch}, simulated")
    x = [row["ranks"] for row in gathers]
    right.plot(x, [row["allgather_bruck"] for row in gathers], "-o", ms=3, label="all-gather, ESSA")
    for size, color in (("7B", "C1"), ("32B", "C2"), ("72B", "C3")):
        for kind, style in (("adapter", "--"), ("full", "-")):
            right.plot(x, [row[f"allreduce_{size}_{kind}"] for row in gathers], style, color=color,
                       label=f"all-reduce, {size} {kind}")
    right.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds", title="collectives, alpha-beta model")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.set_xticks([16, 128, 1024, 8192, 65536], ["16", "128", "1024", "8192", "65536"])
    left.minorticks_off()
    for axes in (left, right):
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
