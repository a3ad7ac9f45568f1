"""Rewards that look at the text alone: the answer itself, or the answer in a box."""

import re
from decimal import Decimal

from .base import Reward


class Answered(Reward):
    """One that compares with the row's answer, a string or a number."""

    needs_answer = True

    def check(self, rows):
        super().check(rows)
        for row in rows:
            self._answer(row)


class Exact(Answered):
    """1 if the completion is the answer, as stripped strings."""

    def _score(self, row, completion):
        return float(completion.strip() == self._answer(row))


class Boxed(Answered):
    """1 if the first \\boxed{...} holds the answer: the same stripped string, or the same number."""

    def _score(self, row, completion):
        answer, found = self._answer(row), boxed(completion)
        return float(found is not None and (found == answer or number(found) == number(answer) is not None))

    def has_format(self, completion):
        return boxed(completion) is not None


_BOXED = re.compile(r"\\boxed\s*\{")
_NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?([eE][-+]?\d{1,4})?", re.ASCII)
_NUMBERS = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+", re.ASCII)


def boxed(text: str) -> str | None:
    """What the first \\boxed{...} whose braces balance holds, stripped; None if there is none."""
    for start in _BOXED.finditer(text):
        depth, i = 1, start.end()
        while i < len(text) and depth:
            if text[i] == "\\":
                i += 1  # an escaped brace is text
            else:
                depth += {"{": 1, "}": -1}.get(text[i], 0)
            i += 1
        if not depth:
            return text[start.end():i - 1].strip()
    return None


def after_hashes(text: str) -> str | None:
    """What follows the last #### on its line, as in GSM8K's solutions; None if there is none."""
    before, hashes, after = text.rpartition("####")
    return (after.strip().splitlines() or [""])[0].strip() if hashes else None


def last_number(text: str) -> str | None:
    """The last number in the text; None if there is none."""
    return next(reversed(_NUMBERS.findall(text)), None)


def number(text: str) -> Decimal | None:
    """The number a text is, thousands separators allowed, else None."""
    if not re.match(r"[-+]?\.?\d", text) or not _NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", ""))
