"""Several rewards at once, weighted."""

import math

import numpy as np

from ..config import Config
from .base import Judgement, Reward, finite


class Several(Reward):
    """The weighted sum of rewards, each also a component of its own.

    One that skips a row (None) adds nothing to it; a row that all skip, or that one could not judge, is missing.
    """

    def __init__(self, rewards: dict[Reward, float], config: Config):
        super().__init__(" + ".join(f"{weight:g} {reward.name}" for reward, weight in rewards.items()), config)
        self._rewards = rewards
        self.names = tuple(reward.name for reward in rewards)

    def check(self, rows):
        for reward in self._rewards:
            reward.check(rows)

    def judge(self, rows, completions, tokens=None):
        total, skipped = np.zeros(len(rows)), np.ones(len(rows), bool)
        components = [{} for _ in rows]
        for reward, weight in self._rewards.items():
            found = reward.judge(rows, completions, tokens)
            if weight:      # else it is only noted: a row it has no value for misses nothing
                total += np.where(found.skipped, 0.0, weight * found.values)
            skipped &= found.skipped
            for mine, value, theirs in zip(components, found.values.tolist(), found.components):
                mine[reward.name] = value
                mine.update({f"{reward.name}/{name}": part for name, part in theirs.items()})
            for kind, count in reward.trouble.items():
                self.trouble[kind] += count
            self.where = {**reward.where, **self.where}
            reward.trouble.clear()
            reward.where.clear()
        for row, value in zip(rows, total.tolist()):
            finite(value, row.source, self.name)    # refuses what is too large
        total[skipped] = math.nan
        return Judgement(total, skipped, components)

    def digest(self):
        return " ".join(reward.digest() for reward in self._rewards).strip()

    def has_format(self, completion):
        return next((has for has in (reward.has_format(completion) for reward in self._rewards) if has is not None), None)

    def start(self):
        for reward in self._rewards:
            reward.start()

    def close(self):
        for reward in self._rewards:
            reward.close()
