"""Copies of metrics.jsonl for TensorBoard and Weights & Biases. Rank 0 alone.

metrics.jsonl is the record: a tracker that fails is told of once and left out, and the run goes on.
A run that is resumed gives each tracker the generations so far once more, from metrics.jsonl, in
place of what an earlier start gave it: whatever a kill took, and whichever trackers there were
before, each generation is shown once.
"""

import importlib.metadata
import math
import numbers
import os
import sys
import threading
import traceback
from dataclasses import asdict
from pathlib import Path

from .config import Config, UserError
from .files import read_json_lines
from .tasks import one_line


def check(names: list[str]) -> None:
    """Raise UserError if the package of a tracker is not installed. Imports none."""
    missing = []
    for name in names:      # not find_spec: a folder wandb/ in the current directory would pass for the package
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        raise UserError(f"config: trackers = {names}: not installed: {', '.join(missing)}; "
                        f"python -m pip install {' '.join(missing)}, or leave out what is missing")


def scalars(record: dict, prefix: str = "") -> dict[str, float]:
    """The finite numbers in a record, those of a dict within it under "name/name"; all else is left out."""
    found = {}
    for key, value in record.items():
        if isinstance(value, dict):
            found.update(scalars(value, f"{prefix}{key}/"))
        elif isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value):
            found[prefix + key] = float(value)
    return found


class TensorBoard:
    """Event files in <folder>/tensorboard."""

    def __init__(self, config: Config, folder: Path):
        from torch.utils.tensorboard import SummaryWriter
        # purge_step: TensorBoard drops what files of an earlier start hold from this step on.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=0)

    def write(self, step: int, values: dict[str, float], unix: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, unix)
        self._writer.flush()    # shown at once, and not lost with the process

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A W&B run in <folder>/wandb: offline, for `wandb sync`, unless WANDB_MODE=online. Each start makes a new one."""

    def __init__(self, config: Config, folder: Path):
        mode = "online" if os.environ.get("WANDB_MODE") == "online" else "offline"
        if mode == "offline":
            os.environ["WANDB_ERROR_REPORTING"] = "false"   # else its service looks up its makers' host even so
        hooks = sys.exit, sys.excepthook
        try:
            import wandb
            self._wandb = wandb
            # The scalars and the config alone: console, machine and code are the run folder's business. Its
            # own run even if a reward has one open.
            self._run = wandb.init(
                mode=mode, dir=str(folder), project="essa_mpi", name=config.name, config=asdict(config),
                reinit="create_new", settings=wandb.Settings(
                    silent=True, console="off", disable_git=True, x_disable_stats=True, x_disable_machine_info=True,
                    x_disable_meta=True, x_save_requirements=False))
        finally:
            sys.exit, sys.excepthook = hooks    # it puts its own there; ours end the job (World.install_hooks)

    def write(self, step: int, values: dict[str, float], unix: float) -> None:
        self._run.log({**values, "_timestamp": unix}, step=step)

    def close(self) -> None:
        try:
            self._run.finish()
        finally:
            self._wandb.teardown()  # the service process too, here rather than at exit, where nobody would catch it


MAKERS = {"tensorboard": TensorBoard, "wandb": Wandb}


class Trackers:
    """Those that `trackers` names. say: prints a line."""

    def __init__(self, config: Config, folder: Path, say):
        self._config, self._folder, self._say = config, Path(folder), say
        self._made, self._failed = {}, set()

    def start(self, times) -> None:
        """Open them and hand over the generations so far. times: their ends, (generations,) seconds since 1970."""
        if self._config.trackers:
            self._take_threads()
        for name in self._config.trackers:
            self._try(name, lambda: self._begin(name, times))

    def write(self, step: int, record: dict, unix: float) -> None:
        """Hand over the scalars of a record."""
        values = scalars(record)
        for name, tracker in self._made.items():
            if name not in self._failed:
                self._try(name, lambda: tracker.write(step, values, unix))

    def close(self) -> None:
        """The failed ones too: they may have left a process or a thread."""
        for name, tracker in self._made.items():
            self._try(name, tracker.close)

    def _begin(self, name, times):
        tracker = self._made[name] = MAKERS[name](self._config, self._folder)
        for record, unix in zip(read_json_lines(self._folder / "metrics.jsonl"), times):
            tracker.write(record["generation"], scalars(record), float(unix))

    def _try(self, name, work):
        try:
            work()
        except Exception as error:
            self._drop(name, error)

    def _drop(self, name, error):
        if name not in self._failed:
            self._failed.add(name)
            self._say(f"warning: tracker {name} failed and is left out from here on; metrics.jsonl has it all: "
                      f"{one_line(error)}")

    def _take_threads(self):
        """What a tracker's own thread raises is the tracker's failure: the job must not end as it does for others'."""
        others = threading.excepthook

        def hook(args):
            packages = {frame.f_globals.get("__name__", "").partition(".")[0]
                        for frame, _ in traceback.walk_tb(args.exc_traceback)}
            whose = [name for name in self._config.trackers if name in packages]
            if whose:
                self._drop(whose[0], args.exc_value)
            else:
                others(args)
        threading.excepthook = hook
