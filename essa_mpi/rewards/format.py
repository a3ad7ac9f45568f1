"""1 if a completion has the wanted form, by a regular expression; a pattern that backtracks for ever costs its row."""

import re

from ..config import Config, UserError
from .child import Reply
from .judged import Formatted


class Format(Formatted):
    """1 if the whole completion, stripped, matches `format_pattern`; its . matches newlines too."""

    def __init__(self, name: str, config: Config):
        if not config.format_pattern:
            raise UserError("config: reward = 'format': needs format_pattern, a regular expression that the whole "
                            r"completion must match, e.g. '<think>.*</think>\s*<answer>.*</answer>'")
        try:
            re.compile(config.format_pattern)
        except re.error as error:
            raise UserError(f"config: format_pattern = {config.format_pattern!r}: no regular expression: {error}") from None
        super().__init__(name, config, "format:Verifier", {"pattern": config.format_pattern})


class Verifier:
    """In the child; see `child.serve`."""

    facts: dict = {}

    def __init__(self, pattern: str):
        self._pattern = re.compile(pattern, re.DOTALL)

    def judge(self, items):
        for item in items:
            yield Reply(float(self._pattern.fullmatch(item.text.strip()) is not None))
