"""What all rewards share, and what they return."""

import math
import numbers
import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np

from ..config import Config, UserError
from ..data import Row, no_answer

LIMIT = 2.0**20     # |reward| at most: what world.py's exact sums of squares are made for


@dataclass
class Judgement:
    """Rewards of n completions.

    values: float64 (n,), nan where there is none. skipped: bool (n,), those of the nan for which the reward
    said None: it does not apply, which is no fault. components: n dicts, name -> float (nan: none).
    """

    values: np.ndarray
    skipped: np.ndarray
    components: list[dict[str, float]]


class Reward:
    """A function of rows and completions. `trouble` counts, by kind, the completions that could not be judged."""

    needs_answer = False
    names: tuple[str, ...] = ()     # the components that every completion has, in order

    def __init__(self, name: str, config: Config):
        self.name, self.config = name, config
        self.trouble: Counter[str] = Counter()
        self.where: dict[str, str] = {}      # kind -> the first row it happened on

    def check(self, rows: list[Row]) -> None:
        """Raise UserError, naming the row, if there is one that this reward cannot judge."""
        for row in rows:
            if self.needs_answer and row.answer is None:
                raise no_answer(row, self.config, f"reward = {self.name!r}")

    def digest(self) -> str:
        """A hash of what it is beyond the config, the user's own file; "" if nothing."""
        return ""

    def judge(self, rows: list[Row], completions: list[str], tokens: list | None = None) -> Judgement:
        """Judge completions of rows; tokens: their ids, where known. Raises UserError, naming the row."""
        values = [self._score(row, text) for row, text in zip(rows, completions, strict=True)]
        return Judgement(np.array(values, np.float64), np.zeros(len(values), bool), [{} for _ in values])

    def score(self, rows: list[Row], completions: list[str]) -> np.ndarray:
        """`judge`'s values, float64 (n,)."""
        return self.judge(rows, completions).values

    def _score(self, row: Row, completion: str) -> float:
        raise NotImplementedError

    def has_format(self, completion: str) -> bool | None:
        """Whether the completion has the form in which this reward looks for an answer; None: any will do."""
        return None

    def start(self) -> None:
        """Start the processes it needs, or start them again: what they print goes where this process's output now goes.

        Raises UserError.
        """

    def close(self) -> None:
        """End what it started."""

    def _count(self, kind: str, row: Row) -> None:
        """Note a completion that could not be judged; of messages that are all different only the first are kept."""
        kind = kind if kind in self.trouble or len(self.trouble) < 20 else "others"
        self.trouble[kind] += 1
        self.where.setdefault(kind, row.source)

    def _answer(self, row: Row) -> str:
        """The right answer as text. Raises UserError if it is neither a string nor a number."""
        if isinstance(row.answer, bool) or not isinstance(row.answer, (str, int, float)):
            raise UserError(f"{row.source}: the answer is {str(row.answer)[:60]!r}; reward = {self.name!r} "
                            f"needs a string or a number; mend the row or use another reward")
        return str(row.answer).strip()


def finite(value, source: str, name: str) -> float | None:
    """A reward as a float; None stays None, nan is what is not finite. Raises UserError on anything else."""
    if value is None:
        return None
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) in ((), (1,)):
        value = value.item()  # a tensor or array that holds a single number
    if not isinstance(value, numbers.Real):
        raise UserError(f"reward {name} gave {str(value)[:60]!r} ({type(value).__name__}) for {source}; "
                        f"needs a number, or None for missing")
    try:
        reward = float(value)
    except OverflowError:  # an integer, finite but beyond any float
        reward = sys.float_info.max
    if not math.isfinite(reward):
        return math.nan
    if abs(reward) > LIMIT:
        raise UserError(f"reward {name} gave {reward:g} for {source}; needs a magnitude of at most 2^20; scale it")
    return reward
