"""Mathematical answers, through math-verify.

math-verify's own timeouts use signals and fail off the main thread, and none of its kind interrupts 9^{9^{9^9}}:
so it runs in a process that the kernel ends after SECONDS of CPU time.
"""

import importlib.util

from ..config import Config, UserError
from ..tasks import one_line
from .child import Reply
from .judged import Formatted
from .text import after_hashes, boxed, last_number

SECONDS = 10   # CPU time; a completion that takes math-verify longer counts as missing

# Where `math_answer` has the answer looked for; "any" leaves that to math-verify.
_FOUND = {"boxed": boxed, "hash": after_hashes, "last": last_number}


class Math(Formatted):
    """1 if math-verify finds the answer in the completion.

    The right answer may be plain ("3/4", "1,234"), boxed, between dollars, or a GSM8K solution that ends
    in "#### 42". Raises UserError if math-verify can make nothing of it.
    """

    needs_answer = True

    def __init__(self, name: str, config: Config):
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("config: reward = 'math': needs math-verify; pip install math-verify")
        super().__init__(name, config, "maths:Verifier",
                         {"answer": config.math_answer, "lenient": config.math_lenient}, cpu_seconds=SECONDS)

    def check(self, rows):
        super().check(rows)
        for row in rows:
            self._answer(row)

    def judge(self, rows, completions, tokens=None):
        for row in rows:
            self._answer(row)
        return super().judge(rows, completions)

    def has_format(self, completion):
        found = _FOUND.get(self.config.math_answer, boxed)(completion) is not None
        return found or (self.config.math_answer == "any" and super().has_format(completion))


def _gold(answer: str) -> str:
    """The right answer in a form math-verify recognises: what follows GSM8K's ####, boxed unless marked up."""
    answer = answer.rsplit("####", 1)[-1].strip()
    return answer if "\\boxed" in answer or "$" in answer.replace("\\$", "") else f"\\boxed{{{answer}}}"


class Verifier:
    """In the child; see `child.serve`."""

    facts: dict = {}

    def __init__(self, answer: str, lenient: bool):
        import logging
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its timeouts are off
        from math_verify import parse, verify
        self._parse, self._verify, self._strict = parse, verify, not lenient
        self._find = _FOUND.get(answer)

    def judge(self, items):
        for item in items:
            yield self._one(item)

    def _one(self, item) -> Reply:
        target = self._target(item.text)    # [] where it fails: an answer that is no maths is wrong
        if item.row is None:
            return Reply(float(bool(target)))
        gold = self._parse(_gold(str(item.row.answer).strip()), parsing_timeout=None)
        if not gold:
            raise UserError(f"{item.row.source}: math-verify can make nothing of the answer "
                            f"{str(item.row.answer)[:60]!r}; mend the row or use reward = \"exact\" or \"boxed\"")
        try:
            return Reply(float(bool(target) and bool(
                self._verify(gold, target, strict=self._strict, timeout_seconds=None, raise_on_error=True))))
        except Exception as error:
            return Reply(trouble=one_line(error))

    def _target(self, text: str) -> list:
        if self._find is not None:
            found = self._find(text)
            if found is None:
                return []
            text = f"\\boxed{{{found}}}"
        return self._parse(text, parsing_timeout=None)
