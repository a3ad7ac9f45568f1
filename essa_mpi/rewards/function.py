"""A user's own reward function, called as TRL, verl or OpenRLHF call theirs.

    TRL       f(prompts, completions, completion_ids, **columns) -> a number or None each
    verl      compute_score(data_source, solution_str, ground_truth, extra_info) -> a number, or a dict with "score"
    OpenRLHF  reward_func(queries, prompts, labels) -> rewards, or a dict with "rewards", "scores", "extra_logs"

(The conventions of TRL 1.16, verl 0.9 and OpenRLHF 0.11.) Which of them it is, its parameters tell. It runs in
a process of its own, where what it prints goes to the rank's log; a coroutine is awaited.
"""

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path

from ..config import Config, UserError
from ..tasks import one_line
from .base import finite
from .child import Item, Reply
from .conversation import Conversation
from .judged import Judged

GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")    # beside a row's columns
USUAL = ("compute_score", "reward_func")    # what verl and OpenRLHF look for in a file


class Function(Judged):
    """A user's function. `style` after `open`: "trl", "verl" or "openrlhf"."""

    def __init__(self, name: str, config: Config):
        """Starts its process, so that what is wrong with the function is said before anything else is loaded."""
        super().__init__(name, config, "function:Verifier", {"name": name, "config": config})
        self.child.start()
        self.style = self.child.facts["style"]
        self.needs_answer = self.style == "verl"

    def check(self, rows):
        super().check(rows)
        for row in rows if self.style == "trl" else ():
            has = {*row.fields, *GIVEN, *([self.config.answer_key] if row.answer is not None else [])}
            lacking = [name for name in self.child.facts["needs"] if name not in has]
            if lacking:
                raise UserError(f"reward {self.name} needs {', '.join(lacking)}, which {row.source} does not have; there are "
                                f"{', '.join(sorted(has))}; rename the parameter, give it a default, or set reward_style "
                                f"if it is not written for TRL")

    def digest(self):
        return self.child.facts["digest"]


def split_name(name: str) -> tuple[str, str]:
    """("file.py" or "package.module", "function" or ""). Raises UserError if `name` names no function."""
    module, colon, function = name.rpartition(":")
    if not colon and name.endswith(".py"):
        return name, ""
    if not module or not function:
        raise UserError(f"config: reward = {name!r}: there is no such reward; use one of {NAMES}")
    return module, function


NAMES = ("exact, boxed, math, format, reasoning_gym (with a reasoning-gym task), ifeval, code, model, http://..., "
         "package.module:function or file.py:function")


def load(name: str):
    """The callable of "file.py:function", "file.py" or "package.module:function". Raises UserError."""
    module, function = split_name(name)
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module).stem, module)
            loaded = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(spec.name, loaded)
            sys.path.insert(0, str(Path(module).resolve().parent))  # as for a script: what lies beside it
            spec.loader.exec_module(loaded)
        else:
            if not {"", os.getcwd()} & set(sys.path):
                sys.path.append(os.getcwd())  # last: a file here must not hide an installed package
            loaded = importlib.import_module(module)
    except Exception as error:
        where = "" if module.endswith(".py") else (f"; it must be installed or lie in the current directory "
                                                   f"{os.getcwd()}")
        raise UserError(f"config: reward = {name!r}: importing {module} failed: {one_line(error)}{where}") from error
    candidates = [function] if function else [usual for usual in USUAL if hasattr(loaded, usual)]
    found = getattr(loaded, candidates[0], None) if candidates else None
    if not callable(found):
        near = ", ".join(k for k, v in vars(loaded).items() if inspect.isfunction(v)) or "none"
        what = (f"has no function {function!r}" if function else
                f"has neither {' nor '.join(USUAL)}, which are taken if none is named: write {module}:FUNCTION")
        raise UserError(f"config: reward = {name!r}: {module} {what}; its functions: {near}")
    return found


class Verifier:
    """In the child; see `child.serve`."""

    def __init__(self, name: str, config: Config):
        self._name, self._config, self._function = name, config, load(name)
        try:
            parameters = inspect.signature(self._function).parameters.values()
        except (TypeError, ValueError):  # some callables written in C have none
            parameters = [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._names = {p.name for p in named}
        self._needs = [p.name for p in named if p.default is p.empty]
        style = config.reward_style
        if style == "auto":
            style = ("verl" if "solution_str" in self._names else
                     "openrlhf" if {"queries", "labels"} <= self._names else "trl")
        self._call = {"trl": self._trl, "verl": self._verl, "openrlhf": self._openrlhf}[style]
        self._conversation = Conversation(config) if style == "openrlhf" else None
        self._loop = asyncio.new_event_loop()
        # TRL's get whole lists by convention; coroutines are awaited together, for they mostly wait.
        whole = style == "trl" or inspect.iscoroutinefunction(self._function)
        self.facts = {"style": style, "together": whole, "needs": self._needs, "digest": _digest(self._function)}

    def judge(self, items: list[Item]):
        if not self.facts["together"]:
            for item in items:
                [reply] = self._guarded([item])
                yield reply
        else:
            yield from self._guarded(items)

    def _guarded(self, items) -> list[Reply]:
        """The replies. Raises UserError, naming the row, for what the function does wrong."""
        try:
            return self._call(items)
        except UserError:
            raise
        except Exception as error:
            for item in items:
                try:
                    self._call([item])
                except UserError:
                    raise
                except Exception as alone:
                    raise UserError(f"reward {self._name} raised on {item.row.source}: {one_line(alone)}; completion "
                                    f"{item.text[:60]!r}; mend the function or the row") from alone
            raise UserError(f"reward {self._name} raised on the rows {_where(items)} together, on none of them alone: "
                            f"{one_line(error)}; mend the function") from error

    def _await(self, value):
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value

    # -- TRL ---------------------------------------------------------------------------------------

    def _trl(self, items) -> list[Reply]:
        rows = [item.row for item in items]
        given = {name: [row.fields.get(name) for row in rows] for name in dict.fromkeys(k for row in rows for k in row.fields)}
        if any(row.answer is not None for row in rows):
            given.setdefault(self._config.answer_key, [row.answer for row in rows])
        given |= {"prompts": [row.prompt for row in rows], "completions": [_as_prompted(item) for item in items]}
        if all(item.tokens is not None for item in items):
            given["completion_ids"] = [list(item.tokens) for item in items]
        # TRL's own conveniences; only where asked for by name, and they do nothing here.
        idle = {"trainer_state": None, "log_extra": _nothing, "log_metric": _nothing}
        given |= {name: value for name, value in idle.items() if name in self._names}
        lacking = [name for name in self._needs if name not in given]
        if lacking:
            raise UserError(f"reward {self._name} needs {', '.join(lacking)}, which {rows[0].source} does not have; "
                            f"there are {', '.join(sorted(given))}")
        values = self._await(self._function(**{k: v for k, v in given.items() if self._takes_all or k in self._names}))
        return [self._reply(value, item) for value, item in zip(self._one_each(values, items), items)]

    def _one_each(self, values, items) -> list:
        """`values` as a list with one for each of the items. Raises UserError."""
        try:
            if isinstance(values, (dict, set, str)):    # list() would take their keys or characters
                raise TypeError
            listed = list(values)
        except TypeError:
            raise UserError(f"reward {self._name} returned a {type(values).__name__} for {_where(items)}; "
                            f"needs a list with a number for each completion") from None
        if len(listed) != len(items):
            raise UserError(f"reward {self._name} returned {len(listed)} rewards for {len(items)} completions "
                            f"({_where(items)}); needs one each, in order (None for missing)")
        return listed

    # -- verl --------------------------------------------------------------------------------------

    def _verl(self, items) -> list[Reply]:
        values = [self._function(**self._verl_arguments(item)) for item in items]
        if any(map(inspect.isawaitable, values)):
            async def together():
                return await asyncio.gather(*values)
            values = self._loop.run_until_complete(together())
        return [self._verl_reply(value, item) for value, item in zip(values, items)]

    def _verl_arguments(self, item) -> dict:
        fields = item.row.fields
        given = {"data_source": fields.get("data_source", self._config.task), "solution_str": item.text,
                 "ground_truth": item.row.answer,
                 "extra_info": {**(fields.get("extra_info") or {}), "num_turns": None}}
        return {k: v for k, v in given.items() if self._takes_all or k in self._names or self._config.reward_style == "verl"}

    def _verl_reply(self, value, item) -> Reply:
        if not isinstance(value, dict):
            return self._reply(value, item)
        if "score" not in value:
            raise UserError(f"reward {self._name} returned a dict without \"score\" for {item.row.source}; it has "
                            f"{', '.join(map(repr, value)) or 'nothing'}")
        return self._reply(value["score"], item, {name: part for name, part in value.items() if name != "score"})

    # -- OpenRLHF ----------------------------------------------------------------------------------

    def _openrlhf(self, items) -> list[Reply]:
        """A call a row, as OpenRLHF does, so that what it logs belongs to a row."""
        return [self._openrlhf_reply(self._await(self._function(
            [self._conversation.whole(item)], [self._conversation.prompt(item.row)], [item.row.answer])), item)
            for item in items]

    def _openrlhf_reply(self, value, item) -> Reply:
        logs = {}
        if isinstance(value, dict):
            if "rewards" not in value:
                raise UserError(f"reward {self._name} returned a dict without \"rewards\" for {item.row.source}; it has "
                                f"{', '.join(map(repr, value)) or 'nothing'}")
            logs = {"scores": value["scores"]} if value.get("scores") is not None else {}
            logs |= value.get("extra_logs") or {}
            value = value["rewards"]
        if value is not None and not isinstance(value, (int, float)) and getattr(value, "shape", None) != ():
            [value] = self._one_each(value, [item])
        return self._reply(value, item, logs)

    def _reply(self, value, item, parts: dict | None = None) -> Reply:
        components = {}
        for name, part in (parts or {}).items():    # logs may hold texts besides: those are no components
            try:
                components[str(name)] = finite(part[0] if isinstance(part, (list, tuple)) and len(part) == 1 else part,
                                               item.row.source, f"{self._name}: {name}")
            except UserError:
                continue
        return Reply(finite(value, item.row.source, self._name), components)


def _digest(function) -> str:
    """A hash of the file that the function comes from; "" where there is none to be read."""
    try:
        module = sys.modules.get(getattr(function, "__module__", None)) or inspect.getmodule(function)
        return hashlib.sha256(Path(inspect.getfile(inspect.unwrap(function) if inspect.isfunction(function) else module))
                              .read_bytes()).hexdigest()
    except (TypeError, OSError, AttributeError):
        return ""


def _as_prompted(item):
    """A text, or for a prompt of messages a message, as TRL has it."""
    return item.text if isinstance(item.row.prompt, str) else [{"role": "assistant", "content": item.text}]


def _where(items) -> str:
    first, last = items[0].row.source, items[-1].row.source
    return first if len(items) == 1 else f"{first} to {last}"


def _nothing(*_, **__):
    """In place of TRL's log_extra and log_metric."""
