"""A reward whose verifier runs in a process of its own."""

import math

import numpy as np

from ..config import Config
from .base import Judgement, Reward, finite
from .child import Child, Item


class Judged(Reward):
    """Values and components are what the verifier says; what it could not judge in time is missing, and counted."""

    def __init__(self, name: str, config: Config, verifier: str, options: dict, cpu_seconds: int | None = None):
        """verifier, options: see `Child`. A row may take config.reward_seconds unless cpu_seconds is its limit."""
        super().__init__(name, config)
        self.child = Child(f"reward {name}", f"essa_mpi.rewards.{verifier}", options,
                           None if cpu_seconds else config.reward_seconds, cpu_seconds)

    def judge(self, rows, completions, tokens=None):
        if len(rows) != len(completions):
            raise ValueError(f"{len(rows)} rows but {len(completions)} completions")
        tokens = tokens or [None] * len(rows)
        replies = self.child.judge([Item(*item) for item in zip(rows, completions, tokens)])
        values, components = np.full(len(rows), math.nan), []
        skipped = np.zeros(len(rows), bool)
        for i, (row, reply) in enumerate(zip(rows, replies)):
            value = finite(reply.value, row.source, self.name)
            if reply.trouble is not None:
                self._count(reply.trouble, row)
            elif value is None:
                skipped[i] = True
            else:
                values[i] = value
                if math.isnan(value):
                    self._count(f"reward {self.name} gave nan or inf", row)
            components.append({name: finite(part, row.source, f"{self.name}: {name}")
                               for name, part in reply.components.items()})
        return Judgement(values, skipped, components)

    def start(self):
        self.child.close()
        self.child.start()

    def close(self):
        self.child.close()


class Formatted(Judged):
    """One whose verifier can also say whether a completion has its format."""

    def has_format(self, completion):
        [reply] = self.child.judge([Item(None, completion)])
        return bool(reply.value)
