"""Python that has to pass its tests, as in HumanEval (arXiv 2107.03374) and MBPP.

A row has `test` (defines check(candidate)) and `entry_point`, or `test_list` (assertions). The program is run
in a process of its own, with limits on time, memory and the size of files, in an empty folder. That is no sandbox:
what a model writes is executed with this user's rights, so it needs `allow_code = true`.
"""

import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile

from ..config import Config, UserError
from .child import Reply
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


_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def program(row, completion: str) -> str:
    """What is run: the completion's code, the row's prompt before it if it continues that, and the tests."""
    blocks = _BLOCK.findall(completion)
    entry = row.fields.get("entry_point")
    prompt = row.prompt if isinstance(row.prompt, str) else row.prompt[-1]["content"]
    defines = re.compile(rf"^\s*(?:async\s+)?def\s+{re.escape(entry)}\b", re.MULTILINE) if entry else None
    code = next((block for block in blocks if defines is None or defines.search(block)), blocks[0] if blocks else completion)
    if defines is not None:
        if not defines.search(code):
            code = prompt + code                            # a continuation of the function's head
        elif defines.search(prompt):
            code = prompt[:defines.search(prompt).start()] + "\n" + code      # a whole function; the prompt's imports
    tests = row.fields.get("test_list")
    if isinstance(row.fields.get("test"), str) and entry:
        return f"{code}\n\n{row.fields['test']}\n\ncheck({entry})\n"
    return code + "\n\n" + "\n".join([row.fields.get("test_setup_code") or "", *tests]) + "\n"


class Verifier:
    """In the child; see `child.serve`."""

    facts: dict = {}

    def __init__(self, seconds: float, gib: float):
        self._seconds, self._bytes = seconds, int(gib * 2**30)

    def judge(self, items):
        for item in items:
            yield self._run(program(item.row, item.text))

    def _run(self, text: str) -> Reply:
        """1 if the program reaches its end. It says so with a word it cannot know beforehand, as exiting is easy."""
        word = secrets.token_hex(16)
        with tempfile.TemporaryDirectory() as folder:
            text += f"\n__import__('os').write(1, b'\\n{word}\\n')\n"
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", "import sys; exec(compile(sys.stdin.read(), 'program', 'exec'), {'__name__': 'program'})"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder, text=True,
                encoding="utf-8", errors="replace", env={"PATH": os.defpath, "HOME": folder, "OMP_NUM_THREADS": "1"},
                start_new_session=True, preexec_fn=self._limit)
            try:
                said, _ = process.communicate(text, timeout=2 * self._seconds)
            except subprocess.TimeoutExpired:
                said = None
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)      # and what it started
                except ProcessLookupError:
                    pass
                process.communicate()
        late = said is None or process.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
        return Reply(float(bool(said) and word in said.splitlines()), {"timeout": float(late)})

    def _limit(self):
        seconds = max(1, int(self._seconds))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_AS, (self._bytes, self._bytes))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPROF):
            signal.signal(each, signal.SIG_DFL)
