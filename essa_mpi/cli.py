"""Words on the command line to calls. Imports nothing heavy before a command is known: --help is instant."""

import argparse
import os
import sys

from . import __version__
from .config import UserError


class Parser(argparse.ArgumentParser):
    """Under N ranks a wrong command line is told once."""

    def error(self, message):
        from .seat import launcher_rank
        if launcher_rank() == 0:
            super().error(message)
        raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m essa_mpi", description="Evolve a LoRA adapter's singular values with CMA-ES and vLLM under MPI.",
        epilog="Under MPI: mpirun -n 4 python -m essa_mpi run config.toml")
    p.add_argument("--version", action="version", version=f"essa_mpi {__version__}")
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name, text, *, config=False):
        sub = commands.add_parser(name, help=text, description=text)
        if config:
            sub.add_argument("config", metavar="CONFIG", help="a TOML file")
            overridable(sub, "override a key; VALUE is TOML, a bare word is a string; repeatable")
        return sub

    def overridable(sub, text):
        sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=text)

    command("sft", "the supervised warm start: trains the adapter the config names", config=True)
    for name, text in (("run", "evolve the adapter; under mpirun, on all ranks"),
                       ("grpo", "train the adapter with GRPO, DAPO, CISPO or a focal form of them; under mpirun, on all ranks")):
        sub = command(name, text, config=True)
        sub.add_argument("--resume", action="store_true", help="continue runs/<name> from its newest checkpoint")
        sub.add_argument("--trace", metavar="FILE", help="where the time went, for Perfetto or Chrome; a few messages more at the start")
    for name, text in (("eval", "score base, warm start and a run's result on the held-out rows"),
                       ("export", "write a run's result as a peft adapter, or merged into the model"),
                       ("show", "a run in words")):
        sub = command(name, text)
        sub.add_argument("run", metavar="RUN", help="a run folder, runs/<name>")
        if name != "show":
            sub.add_argument("--adapter", metavar="DIR", help="this peft adapter instead of the run's result")
        if name == "eval":
            overridable(sub, "override a key of the run's config for this evaluation; repeatable")
            sub.add_argument("--tasks", nargs="+", default=[], metavar="FILE",
                             help="TOML files of further tasks: heldout_data, reward, prompt_key, ...")
            sub.add_argument("--samples", type=_count, default=0, metavar="N",
                             help="also draw N completions a row: avg@N and the unbiased pass@k, k = 1, 2, 4, ... N")
            sub.add_argument("--temperature", type=_temperature, metavar="T", help="of those; default the run's, or 1")
            sub.add_argument("--right-at", type=_finite, default=1.0, metavar="R", help="the reward of a right completion; default 1")
            sub.add_argument("--drift", type=_count, nargs="?", const=64, default=0, metavar="ROWS",
                             help="also the KL divergence to the base model on so many rows; default 64")
            sub.add_argument("--drift-texts", metavar="FILE", help="and on other texts: a text file, or JSONL with `text`")
            sub.add_argument("--json", metavar="FILE", help="write the scores here too")
        if name == "export":
            sub.add_argument("--out", metavar="DIR", required=True, help="the folder to write; must not exist")
            sub.add_argument("--merged", action="store_true", help="the whole model, adapter merged in")
    quantise = command("quantise", "make a w8a8 or w4a16 copy of a model, to evolve on with mode = 'shared'")
    quantise.add_argument("model", metavar="MODEL", help="a Hugging Face model folder")
    quantise.add_argument("out", metavar="OUT", help="the folder to write; must not exist")
    quantise.add_argument("--scheme", required=True, metavar="SCHEME",
                          help="w8a8: int8 weights and activations; w4a16: int4 weights")
    quantise.add_argument("--group-size", type=int, metavar="N",
                          help="w4a16: inputs that share a scale; the largest of 128, 64, 32 that fits")
    plan = command("plan", "how long a generation takes on how many GPUs, and where that stops scaling", config=True)
    plan.add_argument("--gpus", type=_counts, required=True, metavar="N,N,...",
                      help="e.g. 16,32,64,128: efficiency is against the first")
    plan.add_argument("--run", metavar="RUN", help="a run folder whose measured times and tokens are taken")
    for name, unit, text in (
            ("token-seconds", "S", "instead: seconds of an engine a generated token, with all its slots taken"),
            ("tokens", "N", "instead: tokens of an answer, on average"),
            ("step-seconds", "S", "the shortest decode step, with one sequence"),
            ("memory-bandwidth", "GB/S", "of a GPU, as reached: a decode step takes as long as reading the weights, or longer"),
            ("train-token-seconds", "S", "of a trainer, a token of a rollout, both passes; default 3 x token-seconds"),
            ("update-seconds", "S", "of the search's update"),
            ("straggling", "SHARE", "deviation of a rank's time for the same work, as a share of it")):
        plan.add_argument(f"--{name}", type=_share if name == "straggling" else _above_zero, metavar=unit, help=text)
    plan.add_argument("--train-gpus", type=_count, metavar="N", help="GPUs a trainer; default tensor_parallel")
    for name, default, unit, text in (("bandwidth", 25.0, "GB/S", "of the network, a rank; default 25"),
                                      ("latency", 2.5, "US", "microseconds a message; default 2.5")):
        plan.add_argument(f"--{name}", type=_above_zero, default=default, metavar=unit, help=text)
    plan.add_argument("--json", metavar="FILE", help="write everything here too")
    doctor = command("doctor", "what is installed, which MPI and GPUs, what would be bound where")
    doctor.add_argument("config", nargs="?", metavar="CONFIG", help="check this config's run too")
    overridable(doctor, "override a key of the config; repeatable")
    return p


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"{text}: needs a whole number from 1 to 4096")
    return int(text)


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not -1e30 < value < 1e30:
        raise argparse.ArgumentTypeError(f"{text}: needs a finite number")
    return value


def _above_zero(text: str) -> float:
    value = _finite(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text}: needs a number above 0")
    return value


def _share(text: str) -> float:
    value = _finite(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text}: needs a number from 0 to below 1")
    return value


def _counts(text: str) -> list[int]:
    """16,32,64: whole numbers, each larger than the one before."""
    parts = text.split(",")
    if not all(part.isdigit() and 1 <= int(part) <= 10**6 for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: needs whole numbers from 1 to 1000000 with commas between: 16,32,64")
    counts = [int(part) for part in parts]
    if any(a >= b for a, b in zip(counts, counts[1:])):
        raise argparse.ArgumentTypeError(f"{text}: needs the numbers in rising order")
    return counts


def _temperature(text: str) -> float:
    value = _finite(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text}: needs a number above 0, or all samples of a row would be the same")
    return value


def main(arguments: list[str] | None = None) -> None:
    """Run a command. Exits 2 with one line for what the user can mend, 1 for a failure."""
    args = parser().parse_args(arguments)
    # Relative imports of rewards and tasks are from where the user stands, also under a console script.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        {"sft": _sft, "run": _run, "grpo": _grpo, "eval": _eval, "export": _export, "show": _show, "quantise": _quantise,
         "plan": _plan, "doctor": _doctor}[args.command](args)
    except UserError as error:
        from .seat import launcher_rank
        if launcher_rank() == 0:     # before MPI is up every process fails alike: one speaks
            print(f"essa_mpi: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:          # `show RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(0) from None


def start_world(load_settings):
    """(World, Config): the ranks seated, the config read on each. Before numpy and torch are imported.

    Collective: a rank whose config cannot be read, or whose GPUs do not add up, takes the others with it.
    """
    from . import seat
    place = seat.take()
    from .engine_environment import set_environment
    set_environment(place.mpi.COMM_WORLD.Get_rank())
    settings = error = None
    try:
        settings = load_settings()
        seat.take_gpus(place, settings.tensor_parallel)
    except Exception as e:
        error = e
    from .world import World
    world = World(place)
    world.agree(error)
    engines = world.comm.allgather(seat.uuids(place.gpus))
    try:
        if not settings.share_gpus:
            seat.check_apart(place.hosts, engines)
    except UserError as e:
        error = e
    world.agree(error)
    return world, settings


def guarded(world, work) -> None:
    """Do `work`; whatever it raises ends the job on all ranks."""
    from .world import Agreed
    try:
        work()
    except Agreed:
        raise
    except BaseException as error:
        world.fail(error)


def _run(args) -> None:
    from . import config, departure
    departure.listen()
    world, settings = start_world(lambda: config.load(args.config, args.overrides))
    from .run import run
    guarded(world, lambda: run(world, settings, args.resume, trace_file=args.trace))


def _grpo(args) -> None:
    from . import config, departure
    departure.listen()
    world, settings = start_world(lambda: config.load(args.config, args.overrides))
    from .gradient.run import run
    guarded(world, lambda: run(world, settings, args.resume, trace_file=args.trace))


def _sft(args) -> None:
    from . import config
    settings = config.load(args.config, args.overrides)
    from .engine_environment import set_environment
    set_environment(0)
    from .sft import warm_start
    warm_start(settings)


def _eval(args) -> None:
    from . import config
    world, settings = start_world(lambda: config.load(_run_config(args.run), args.overrides))
    from .results import Asked, evaluate_run
    asked = Asked(args.adapter, tuple(args.tasks), args.samples, args.temperature, args.right_at,
                  args.drift or (64 if args.drift_texts else 0), args.drift_texts, args.json)
    guarded(world, lambda: evaluate_run(world, settings, args.run, asked))


def _export(args) -> None:
    from . import config
    settings = config.load(_run_config(args.run))
    from .results import export
    print(export(settings, args.run, args.adapter, args.out, args.merged))


def _show(args) -> None:
    from .report import show
    print(show(args.run))


def _quantise(args) -> None:
    from .quantise import quantise
    print(quantise(args.model, args.out, args.scheme, args.group_size))


def _plan(args) -> None:
    from .plan import plan
    from .seat import launcher_rank
    if launcher_rank() == 0:        # under mpirun once, too
        plan(args)


def _doctor(args) -> None:
    from .doctor import doctor
    raise SystemExit(doctor(args.config, args.overrides))


def _run_config(run: str) -> str:
    from pathlib import Path
    path = Path(run) / "config.toml"
    if not path.is_file():
        raise UserError(f"{run} is not a run folder: it has no config.toml; give runs/<name>")
    return str(path)
