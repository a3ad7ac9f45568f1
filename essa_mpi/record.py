"""What rank 0 writes down of any run: history, metrics, samples, checkpoints, and copies for trackers."""

import os
import time
from collections import deque

import numpy as np

from . import trace, trackers
from .config import Config, UserError
from .files import JsonLines
from .runfile import History, RunFolder, save_checkpoint
from .world import World


class Record:
    """Rank 0's files. Attributes: history; last_checkpoint (seconds)."""

    def __init__(self, world: World, config: Config, folder: RunFolder, schema: dict, checkpoint: dict | None,
                 provenance: dict):
        """schema: of the history. checkpoint: what is resumed from, its groups with "attributes" and "path", or None."""
        self._world, self._config, self._folder, self._provenance = world, config, folder, provenance
        self.history = History.from_arrays(schema, checkpoint["history"]) if checkpoint else History(schema)
        self._metrics, self._samples = JsonLines(folder.metrics), JsonLines(folder.samples)
        attributes = checkpoint["attributes"] if checkpoint else {"metrics_bytes": 0, "samples_bytes": 0}
        self._metrics.truncate(int(attributes["metrics_bytes"]))
        self._samples.truncate(int(attributes["samples_bytes"]))
        self._parent = checkpoint["path"] if checkpoint else None
        self._trackers = trackers.Trackers(config, folder.path, world.say)
        self._inode = os.stat(folder.path).st_ino
        self._recent = deque(self.history.arrays()["times/seconds"][-5:], maxlen=5)
        self.last_checkpoint = 0.0
        self._warned = set()        # kinds of warnings that were said: each is said once

    def start_trackers(self) -> None:
        """Once the engine is up: a start that fails leaves nothing of theirs, and they may start processes."""
        self._trackers.start(self.history.arrays()["times/unix"])

    def close_trackers(self, step: int, heldout) -> None:
        """The last they get. heldout: an Evaluation or None."""
        if heldout is not None:     # at the step after the last: a run that goes on from there drops them again
            scores = {arm: score["accuracy"] for arm, score in heldout.scores.items()}
            self._trackers.write(step, {"heldout": scores}, time.time())
        self._trackers.close()

    def log(self, number: int, line: dict, samples: list[dict], now: float) -> None:
        """A line of metrics.jsonl, and some of samples.jsonl. now: seconds since 1970."""
        self._metrics.append(line)
        self._trackers.write(number, line, now)
        for sample in samples:
            self._samples.append(sample)

    def elapsed(self) -> float:
        """Seconds of all generations so far."""
        return float(self.history.arrays()["times/seconds"].sum())

    def is_due(self, number: int, last: bool) -> bool:
        """Whether generation `number` ends with a checkpoint. last: it is the last, whatever its number."""
        return last or (number + 1) % self._config.checkpoint_every == 0 or number + 1 == self._config.generations

    def timed(self, checkpoint) -> None:
        began = time.perf_counter()
        with trace.span("checkpoint"):
            checkpoint()
        self.last_checkpoint = time.perf_counter() - began

    def save(self, generation: int, groups: dict) -> None:
        """A checkpoint of these groups and the history so far, then history.h5; both whole or not at all."""
        self.check_owned()
        attributes = {**self._provenance, "metrics_bytes": self._metrics.offset, "samples_bytes": self._samples.offset}
        if self._parent:
            attributes["parent_checkpoint"] = self._parent
        path, _ = save_checkpoint(self._folder, generation, {**groups, "history": self.history.arrays()}, attributes,
                                  self._config.keep_checkpoints)
        self._parent = str(path)
        self.write_history()

    def check_owned(self) -> None:
        """Raise UserError if the folder under this run's name is not the one it began in."""
        if not self._folder.path.exists() or os.stat(self._folder.path).st_ino != self._inode:
            raise UserError(f"{self._folder.path} was moved away while this run was writing to it: another run of the "
                            f"same name was started; nothing was written into that one's folder")

    def write_history(self) -> None:
        self.history.write(self._folder.history, self._provenance)

    def warn_of(self, counts: dict) -> None:
        """Say it, once a kind, if more than a tenth of the completions were cut, empty or not made."""
        made = counts["completions"] + counts["too_long"]
        for name, what in (("cut", "cut at max_tokens"), ("empty", "empty"), ("too_long", "not made: prompt too long")):
            if counts[name] > 0.1 * made and name not in self._warned:
                self._warned.add(name)
                self._world.say(f"warning: {counts[name] / made:.0%} of the completions were {what}")

    def usual_seconds(self) -> float:
        """Of one of the last five generations; 0 if there was none in this process."""
        return float(np.median(self._recent)) if self._recent else 0.0

    def seconds_left(self, number: int, seconds: float) -> float:
        """What the generations after this one will take, if they take what the last five took."""
        self._recent.append(seconds)
        left = self.usual_seconds() * (self._config.generations - number - 1)
        return max(0.0, min(left, self._config.max_seconds - self.elapsed())) if self._config.max_seconds else left


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
