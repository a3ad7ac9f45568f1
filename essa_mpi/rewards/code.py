"""Python that has to pass its tests, as in HumanEval (arXiv 2107.03374) and MBPP.

A row has `test` (defines check(candidate)) and `entry_point`, or `test_list` (assertions). The program is run
in a process of its own, with limits on time, memory and the size of files, in an empty folder. That is no sandbox:
what a model writes is executed with this user's rights, so it needs `allow_code = true`.
"""

import os
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from ..config import Config, UserError
from ..tasks import one_line
from .child import Reply, adopt_orphans, end_descendants
from .judged import Judged

FILE_BYTES = 2**24      # a file that the program writes


class Code(Judged):
    """1 if the program passes all its tests. One that runs out of time or memory has failed: that is no fault of ours."""

    names = ("timeout",)

    def __init__(self, name: str, config: Config):
        if not config.allow_code:
            raise UserError("config: reward = 'code': runs what the model writes, with your rights and under limits that are "
                            "no sandbox; set allow_code = true if that is what you want")
        if config.reward_seconds <= 2 * config.code_seconds:
            raise UserError(f"config: reward_seconds = {config.reward_seconds:g}: must be above 2 x code_seconds = "
                            f"{2 * config.code_seconds:g}, the wall time of a program's tests")
        super().__init__(name, config, "code:Verifier", {"seconds": config.code_seconds, "gib": config.code_gib})

    def check(self, rows):
        for row in rows:
            tests = row.fields.get("test_list")
            if not (isinstance(row.fields.get("test"), str) and isinstance(row.fields.get("entry_point"), str)) and not (
                    isinstance(tests, list) and tests and all(isinstance(each, str) for each in tests)):
                raise UserError(f"{row.source}: reward = 'code' needs test and entry_point, or test_list; the row has "
                                f"{', '.join(map(repr, row.fields)) or 'no other columns'}")


def blocks_of(text: str) -> list[str]:
    """The fenced blocks that are Python or do not say what they are; an unclosed one goes to the end."""
    found, block, python = [], None, False
    for line in text.splitlines():
        fence = re.match(r"[ \t]*(?:```+|~~~+)[ \t]*([^`\s]*)", line)
        if block is None:
            if fence:
                block, python = [], re.fullmatch(r"(?i)(py|python)[\d.]*|", fence[1]) is not None
        elif fence and not fence[1]:
            found += ["\n".join(block)] * python
            block = None
        elif line.rstrip().endswith("```"):     # closed behind the last line of code
            found += ["\n".join([*block, line.rstrip().rstrip("`")])] * python
            block = None
        else:
            block.append(line)
    return found + (["\n".join(block)] if block and python else [])


def program(row, completion: str) -> str:
    """What is run: the completion's code, the row's prompt before it if it continues that, and the tests."""
    blocks, entry, tests = blocks_of(completion), row.fields.get("entry_point"), row.fields.get("test_list")
    prompt = row.prompt if isinstance(row.prompt, str) else row.prompt[-1]["content"]
    asked = [entry] if entry else re.findall(r"\b(\w+)\s*\(", " ".join(tests or []))
    defines = re.compile(rf"^\s*(?:(?:async\s+)?def|class)\s+(?:{'|'.join(map(re.escape, asked)) or '(?!)'})\b", re.MULTILINE)
    code = next((block for block in blocks if defines.search(block)), blocks[0] if blocks else completion)
    if entry:
        if not defines.search(code):
            code = prompt + code                            # a continuation of the function's head
        elif defines.search(prompt):
            code = prompt[:defines.search(prompt).start()] + "\n" + code      # a whole function; the prompt's imports
    if isinstance(row.fields.get("test"), str) and entry:
        return f"{code}\n\n{row.fields['test']}\n\ncheck({entry})\n"
    return code + "\n\n" + "\n".join([row.fields.get("test_setup_code") or "", *tests]) + "\n"


# A module of its own, which dataclasses and pickle look their names up in.
RUNNER = """
import os, sys, types
word, _, source = sys.stdin.read().partition("\\n")
module = sys.modules["program"] = types.ModuleType("program")
exec(compile(source, "program", "exec"), module.__dict__)
os.write(int(sys.argv[1]), word.encode())
"""


def _remove(folder: str) -> None:
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):       # a program may have nested folders deeper than Python can go
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL)


class Verifier:
    """In the child; see `child.serve`."""

    facts: dict = {}

    def __init__(self, seconds: float, gib: float):
        self._seconds, self._bytes = seconds, int(gib * 2**30)
        adopt_orphans()

    def judge(self, items):
        for item in items:
            folder = tempfile.mkdtemp()
            try:
                yield self._run(program(item.row, item.text), Path(folder))
            except Exception as error:      # of ours: whatever a program does is no reason to end the job
                yield Reply(trouble=f"code: {one_line(error)}")
            finally:
                _remove(folder)

    def _run(self, text: str, folder: Path) -> Reply:
        """1 if the program reaches its end. It says so with a word it does not know beforehand, as exiting is easy."""
        word = secrets.token_hex(16)
        source, work = folder / "program", folder / "work"
        work.mkdir()
        source.write_text(f"{word}\n{text}", encoding="utf-8", errors="replace")
        told, tell = os.pipe()
        try:
            # Nothing of it is read but the word, so that it may print as much as it likes.
            with open(source) as stdin:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-c", RUNNER, str(tell)], stdin=stdin, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, cwd=work, pass_fds=[tell], start_new_session=True, preexec_fn=self._limit,
                    env={"PATH": os.defpath, "HOME": str(work), "OMP_NUM_THREADS": "1"})
            try:
                code = process.wait(2 * self._seconds)
            except subprocess.TimeoutExpired:
                code = None
            process.kill()
            process.wait()
            end_descendants()       # and what it started
            os.set_blocking(told, False)
            try:
                said = os.read(told, 1000)
            except BlockingIOError:
                said = b""
        finally:
            os.close(told)
            os.close(tell)
        late = code is None or code in (-signal.SIGXCPU, -signal.SIGKILL)
        return Reply(float(said == word.encode()), {"timeout": float(late)})

    def _limit(self):
        seconds = max(1, int(self._seconds))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_AS, (self._bytes, self._bytes))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPROF):
            signal.signal(each, signal.SIG_DFL)
