"""Completions to rewards, the same for training, validation and the warm start. Knows nothing of engines or MPI.

`exact`, `boxed`, `math` (math-verify), `reasoning_gym` (a generator's own check), or
`package.module:function`, called in TRL's manner. A reward that is missing or not finite
comes back as NaN, for the caller to count; nothing becomes a silent zero.
"""

import importlib.util
import inspect
import json
import math
import numbers
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from decimal import Decimal

import numpy as np

from .config import Config, UserError
from .tasks import Row, generator, is_file, one_line

LIMIT = 2.0**20     # |reward| at most: what world.py's exact sums of squares are made for
MATH_SECONDS = 10   # CPU time; a completion that takes math-verify longer counts as missing

NAMES = "exact, boxed, math, reasoning_gym (with a reasoning-gym task) or package.module:function"


class Reward:
    """What all rewards share. `trouble` counts, by kind, the completions that could not be judged."""

    def __init__(self, name: str):
        self.name = name
        self.trouble: Counter[str] = Counter()

    def score(self, rows: list[Row], completions: list[str]) -> np.ndarray:
        """Rewards, float64 (n,), NaN where one is missing or not finite. Raises UserError, naming the row."""
        return np.array([self._score(row, text) for row, text in zip(rows, completions, strict=True)], np.float64)

    def _score(self, row: Row, completion: str) -> float:
        raise NotImplementedError

    def has_format(self, completion: str) -> bool | None:
        """Whether the completion has the form in which this reward looks for an answer; None: any will do."""
        return None

    def _count(self, kind: str) -> None:
        """Note a completion that could not be judged; of messages that are all different only the first are kept."""
        self.trouble[kind if kind in self.trouble or len(self.trouble) < 20 else "others"] += 1

    def _answer(self, row: Row) -> str:
        """The right answer as text. Raises UserError if it is neither a string nor a number."""
        if isinstance(row.answer, bool) or not isinstance(row.answer, (str, int, float)):
            raise UserError(f"{row.source}: the answer is {str(row.answer)[:60]!r}; reward = {self.name!r} "
                            f"needs a string or a number; mend the row or use another reward")
        return str(row.answer).strip()


class Exact(Reward):
    """1 if the completion is the answer, as stripped strings."""

    def _score(self, row, completion):
        return float(completion.strip() == self._answer(row))


class Boxed(Reward):
    """1 if the first \\boxed{...} holds the answer: the same stripped string, or the same number."""

    def _score(self, row, completion):
        answer, found = self._answer(row), boxed(completion)
        return float(found is not None and (found == answer or _number(found) == _number(answer) is not None))

    def has_format(self, completion):
        return boxed(completion) is not None


class Math(Reward):
    """1 if math-verify finds the answer in the completion.

    The answer may be plain ("3/4", "1,234"), boxed, between dollars, or a GSM8K solution that ends
    in "#### 42". Raises UserError if math-verify can make nothing of it. math-verify's own timeouts use
    signals and fail off the main thread, and none of its kind interrupts 9^{9^{9^9}}; so it runs in a
    child process which the kernel ends after MATH_SECONDS: such a completion is missing, and counted.
    """

    def __init__(self, name):
        super().__init__(name)
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("config: reward = 'math': needs math-verify; pip install math-verify")
        self._child = None

    def _score(self, row, completion):
        reply = self._ask(_gold(self._answer(row)), completion)
        if reply is None:
            return math.nan
        if not reply["gold"]:
            raise UserError(f"{row.source}: math-verify can make nothing of the answer {str(row.answer)[:60]!r}; "
                            f"mend the row or use reward = \"exact\" or \"boxed\"")
        if reply["error"]:
            self._count(reply["error"])
            return math.nan
        return float(reply["right"])

    def has_format(self, completion):
        if boxed(completion) is not None:
            return True
        reply = self._ask(None, completion)
        return reply is not None and reply["found"]

    def _ask(self, gold: str | None, completion: str) -> dict | None:
        """What the child says (see `_serve_math`), or None if it ran out of time or died."""
        if self._child is None:
            code = (f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import _serve_math; "
                    f"_serve_math({MATH_SECONDS})")
            self._child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                                           stdout=subprocess.PIPE, text=True, encoding="utf-8")
        try:
            self._child.stdin.write(json.dumps([gold, completion]) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        status = self.close()
        if status >= 0:
            raise UserError(f"reward math: the process that runs math-verify failed with exit code {status}, and said "
                            f"why above; does `{sys.executable} -c 'import math_verify'` work?")
        self._count(f"math-verify took over {MATH_SECONDS} s" if status == -signal.SIGPROF
                    else f"math-verify's process was ended by {signal.Signals(-status).name}")
        return None

    def close(self) -> int | None:
        """End the child; it starts again when needed. Returns its exit status."""
        child, self._child = self._child, None
        if child is None:
            return None
        child.stdout.close()
        try:
            child.stdin.close()
        except BrokenPipeError:
            pass
        return child.wait()


def _gold(answer: str) -> str:
    """The right answer in a form math-verify recognises: what follows GSM8K's ####, boxed unless marked up."""
    answer = answer.rsplit("####", 1)[-1].strip()
    return answer if "\\boxed" in answer or "$" in answer.replace("\\$", "") else f"\\boxed{{{answer}}}"


def _serve_math(seconds: int) -> None:
    """The child: a line [gold, completion] in, a line of answers out, until stdin ends.

    A line that takes more than `seconds` of CPU time ends the process instead.

    gold, found: whether there is an answer in either; right: whether they agree; error: a comparison that failed.
    """
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(stop, signal.SIG_IGN)  # sent to the whole group; the rank still wants its generation scored
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel's default: end the process, whatever it computes
    import logging
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its timeouts are off
    from math_verify import parse, verify

    for line in sys.stdin:
        gold, completion = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU time: a busy machine changes no verdict
        reply = {"gold": False, "right": False, "error": ""}
        target = parse(completion, parsing_timeout=None)  # [] where it fails: an answer that is no maths is wrong
        reply["found"] = bool(target)
        if gold is not None:
            expected = parse(gold, parsing_timeout=None)
            reply["gold"] = bool(expected)
            try:
                reply["right"] = bool(target and expected) and bool(
                    verify(expected, target, timeout_seconds=None, raise_on_error=True))
            except Exception as error:
                reply["error"] = one_line(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)


class ReasoningGym(Reward):
    """The generator's own `score_answer` of what is boxed, else of the last line that is not blank."""

    def __init__(self, name, dataset):
        super().__init__(name)
        self._dataset = dataset

    def _score(self, row, completion):
        answer = boxed(completion)
        if answer is None:
            answer = ([""] + completion.strip().splitlines())[-1].strip()
        entry = {"question": row.prompt, "answer": row.answer, **row.fields}
        try:
            return _finite(self._dataset.score_answer(answer, entry), row, self.name)
        except UserError:
            raise
        except Exception as error:  # some checks trip over odd answers; the user can do nothing about it
            self._count(one_line(error))
            return math.nan

    def has_format(self, completion):
        return boxed(completion) is not None


class Function(Reward):
    """A user's function, called as function(prompts=, completions=, **columns) with lists of n.

    prompts: strings or messages, as in the data; completions: strings; columns: the rows' other
    columns under their own names, the answer under answer_key (None where a row lacks one). Of
    these it gets those its signature names, or all if it takes **kwargs. It returns n numbers;
    None means missing.
    """

    def __init__(self, name, function, answer_key):
        super().__init__(name)
        self._function, self._answer_key = function, answer_key
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # some callables written in C have none
            parameters = [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._names = {p.name for p in named}
        self._needs = [p.name for p in named if p.default is p.empty]

    def score(self, rows, completions):
        if len(rows) != len(completions):
            raise ValueError(f"{len(rows)} rows but {len(completions)} completions")
        if not rows:
            return np.empty(0)
        try:
            values = self._call(rows, completions)
        except UserError:
            raise
        except Exception as error:
            raise self._blame(rows, completions, error) from error
        where = rows[0].source if len(rows) == 1 else f"{rows[0].source} to {rows[-1].source}"
        try:
            if isinstance(values, (dict, set, str)):    # list() would take their keys or characters
                raise TypeError
            values = list(values)
        except TypeError:
            raise UserError(f"reward {self.name} returned a {type(values).__name__} for {where}; "
                            f"needs a list with a number for each completion") from None
        if len(values) != len(rows):
            raise UserError(f"reward {self.name} returned {len(values)} rewards for {len(rows)} completions "
                            f"({where}); needs one each, in order (None for missing)")
        return np.array([_finite(value, row, self.name) for value, row in zip(values, rows)], np.float64)

    def _call(self, rows, completions):
        columns = {name: [row.fields.get(name) for row in rows] for name in {k for row in rows for k in row.fields}}
        columns |= {self._answer_key: [row.answer for row in rows],
                    "prompts": [row.prompt for row in rows], "completions": list(completions)}
        lacking = [name for name in self._needs if name not in columns]
        if lacking:
            raise UserError(f"reward {self.name} needs {', '.join(lacking)}, which {rows[0].source} does not have; "
                            f"there are {', '.join(sorted(columns))}")
        return self._function(**{k: v for k, v in columns.items() if self._takes_all or k in self._names})

    def _blame(self, rows, completions, error):
        """The UserError for a call that raised: the first row that raises alone, else all of them."""
        for row, completion in zip(rows, completions):
            try:
                self._call([row], [completion])
            except Exception as alone:
                return UserError(f"reward {self.name} raised on {row.source}: {one_line(alone)}; "
                                 f"completion {completion[:60]!r}; mend the function or the row")
        return UserError(f"reward {self.name} raised on the rows {rows[0].source} to {rows[-1].source} together, "
                         f"on none of them alone: {one_line(error)}; mend the function")


def _finite(value, row: Row, name: str) -> float:
    """A reward as a float, NaN for None and for what is not finite. Raises UserError on anything else."""
    if value is None:
        return math.nan
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        value = value.item()  # a tensor or array that holds a single number
    if not isinstance(value, numbers.Real):
        raise UserError(f"reward {name} gave {str(value)[:60]!r} ({type(value).__name__}) for {row.source}; "
                        f"needs a number, or None for missing")
    try:
        reward = float(value)
    except OverflowError:  # an integer, finite but beyond any float
        reward = sys.float_info.max
    if not math.isfinite(reward):
        return math.nan
    if abs(reward) > LIMIT:
        raise UserError(f"reward {name} gave {reward:g} for {row.source}; needs a magnitude of at most 2^20; scale it")
    return reward


_BOXED = re.compile(r"\\boxed\s*\{")
_NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?([eE][-+]?\d{1,4})?", re.ASCII)


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


def _number(text: str) -> Decimal | None:
    """The number a text is, thousands separators allowed, else None."""
    if not re.match(r"[-+]?\.?\d", text) or not _NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", ""))


def load_reward(config: Config) -> Reward:
    """The reward the config names. Raises UserError if there is none of that name."""
    name = config.reward
    if name in ("exact", "boxed", "math"):
        return {"exact": Exact, "boxed": Boxed, "math": Math}[name](name)
    if name == "reasoning_gym":
        if is_file(config.task):
            raise UserError(f"config: reward = 'reasoning_gym': needs a reasoning-gym generator, but "
                            f"task = {config.task!r} is a file; use exact, boxed, math or package.module:function")
        for key in ("validation_data", "heldout_data"):
            if getattr(config, key):
                raise UserError(f"config: reward = 'reasoning_gym': can only judge rows of its generator, but "
                                f"{key} = {getattr(config, key)!r}; set {key.replace('data', 'rows')} instead")
        return ReasoningGym(name, generator(config))
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        raise UserError(f"config: reward = {name!r}: there is no such reward; use {NAMES}")
    return Function(name, _import(name, module, function), config.answer_key)


def _import(name: str, module: str, function: str):
    """The callable `module:function`, also from the current directory. Raises UserError."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # last: a file here must not hide an installed package
    try:
        loaded = importlib.import_module(module)
    except Exception as error:
        raise UserError(f"config: reward = {name!r}: importing {module} failed: {one_line(error)}; it must be "
                        f"installed or lie in the current directory {os.getcwd()}") from error
    found = getattr(loaded, function, None)
    if not callable(found):
        near = ", ".join(k for k, v in vars(loaded).items() if inspect.isfunction(v)) or "none"
        raise UserError(f"config: reward = {name!r}: {module} has no function {function!r}; its functions: {near}")
    return found
