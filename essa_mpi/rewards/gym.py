"""The checks that come with reasoning-gym's generators."""

import math

from ..config import Config
from ..tasks import generator, one_line
from .base import Reward, finite
from .text import boxed


class ReasoningGym(Reward):
    """The generator's own `score_answer` of what is boxed, else of the last line that is not blank.

    Some give a part of the reward for a part of the answer; with `gym_strict` all but a full score is 0.
    """

    needs_answer = False     # some generators have none: their check is all

    def __init__(self, name: str, config: Config):
        super().__init__(name, config)
        self._dataset = generator(config)

    def _score(self, row, completion):
        answer = boxed(completion)
        if answer is None:
            answer = ([""] + completion.strip().splitlines())[-1].strip()
        entry = {"question": row.prompt, "answer": row.answer, **row.fields}
        try:
            value = self._dataset.score_answer(answer, entry)
        except Exception as error:  # some checks trip over odd answers; the user can do nothing about it
            self._count(one_line(error), row)
            return math.nan
        value = finite(value, row.source, self.name)
        if value is None:
            return math.nan
        return float(value == 1.0) if self.config.gym_strict else value

    def has_format(self, completion):
        return boxed(completion) is not None
