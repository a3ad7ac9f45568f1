"""Whatever a user gets wrong: one line that says what and how to mend it, once, and exit code 2.

Every case is a process of its own that runs `python -m essa_mpi`: with ranks = 1 or 2 started as a user
would, alone or under mpirun; with ranks = 0 forked by this file run as a script, which has the slow
libraries imported already.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from deterministic_run import SHAPES, write_adapter, write_config, write_model, write_rows, write_run
from essa_mpi.runfile import RunFolder, save_checkpoint
from essa_mpi.search import make_search
from essa_mpi.spectrum import Spectrum

PATIENCE = 240


# -- the server: one imports, each case forks ------------------------------------------------------------

def serve() -> None:
    """Cases in, one JSON object a line: {"words", "cwd", "env", "out", "err"}; exit codes out."""
    import h5py, mpi4py, numpy, safetensors.torch, torch  # noqa: F401, E401
    import essa_mpi.evolve, essa_mpi.rewards, essa_mpi.run, essa_mpi.spectrum, essa_mpi.tasks  # noqa: F401, E401
    for line in sys.stdin:
        case = json.loads(line)
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(os.open(case["out"], os.O_CREAT | os.O_WRONLY), 1)
            os.dup2(os.open(case["err"], os.O_CREAT | os.O_WRONLY), 2)
            os.chdir(case["cwd"])
            sys.path.insert(0, case["cwd"])
            os.environ.update(case["env"])
            sys.argv = ["essa_mpi", *case["words"]]
            runpy.run_module("essa_mpi", run_name="__main__", alter_sys=True)
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


@pytest.fixture(scope="module")
def server():
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "SLURM_"))}
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    yield process
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


def forked(server, folder, words, env):
    case = {"words": words, "cwd": str(folder), "env": env, "out": str(folder / "out.txt"), "err": str(folder / "err.txt")}
    server.stdin.write(json.dumps(case) + "\n")
    server.stdin.flush()
    rc = int(server.stdout.readline())      # a case that hung would meet the suite's faulthandler_timeout
    return rc, (folder / "out.txt").read_text(), (folder / "err.txt").read_text()


def started(mpirun, ranks, folder, words, env):
    env = {"PYTHONPATH": ROOT, "CUDA_VISIBLE_DEVICES": "", **env}
    if ranks == 1:
        done = subprocess.run([sys.executable, "-m", "essa_mpi", *words], cwd=folder, text=True, capture_output=True,
                              env={**os.environ, **{k: str(v) for k, v in env.items()}}, timeout=PATIENCE)
        return done.returncode, done.stdout, done.stderr
    done = mpirun(ranks, *words, cwd=folder, env=env, timeout=PATIENCE)
    return done.rc, done.stdout, done.stderr


# -- what is wrong: functions that change the small run in `folder` that nothing is wrong with -----------

def keys(*drop, **changed):
    """Other keys in the config."""
    def change(folder):
        write_run(folder, **changed)
        path = folder / "config.toml"
        path.write_text("".join(line for line in path.read_text().splitlines(keepends=True)
                                if line.split(" =")[0] not in drop))
    return change


def text(content):
    """Other text in the config."""
    def change(folder):
        (folder / "config.toml").write_text(content)
    return change


def rows(*lines):
    def change(folder):
        write_run(folder)
        (folder / "rows.jsonl").write_text("\n".join(lines))
    return change


def model(**how):
    def change(folder):
        write_run(folder, model=str(folder / "other"))
        write_model(folder / "other", **how)
    return change


def adapter(peft=None, **how):
    def change(folder):
        write_run(folder, adapter=str(folder / "other"))
        path = write_adapter(folder / "other", **how) / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **(peft or {})}))
    return change


def removed(path):
    def change(folder):
        write_run(folder)
        (folder / path).unlink()
    return change


def stored(**changed):
    """A run that was started with another config."""
    def change(folder):
        write_run(folder)
        table = dict(line.split(" = ", 1) for line in (folder / "config.toml").read_text().splitlines())
        (folder / "runs/run").mkdir(parents=True)
        write_config(folder / "runs/run/config.toml", {k: json.loads(v) for k, v in table.items()} | changed)
    return change


EVAL = ["eval", "runs/run", "--tasks"]


def evaluated(more="", data='heldout_data = "other.jsonl"'):
    """A run that has a checkpoint, and tasks to evaluate it on besides."""
    def change(folder):
        stored(heldout_data=str(folder / "other.jsonl"), validation_data="")(folder)
        spectrum = Spectrum.load(folder / "adapter", 1.0)
        save_checkpoint(RunFolder(folder / "runs/run"), 1, {"search": make_search("sep", spectrum.dimension, 7, 0.3, 1).state()},
                        {}, keep=2)
        for name in "ab":
            (folder / name).mkdir()
            (folder / name / "more.toml").write_text(f"{data}\n{more}\n")
    return change


def heldout(row, name="exact"):
    """Held-out rows that the reward cannot judge: said before anything else is done."""
    def change(folder):
        (folder / "heldout.jsonl").write_text(json.dumps(row))
        write_run(folder, reward=name, heldout_data=str(folder / "heldout.jsonl"))
        (folder / "my_rewards.py").write_text("def f(completions, tag): return [1.0] * len(completions)")
        rows = [json.loads(line) | {"tag": 1} for line in (folder / "rows.jsonl").read_text().splitlines()]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "other.jsonl").write_text("".join(json.dumps(r | {"prompt": r["prompt"] + "!"}) + "\n" for r in rows[:3]))
    return change


def reward(name, code=""):
    def change(folder):
        write_run(folder, reward=name)
        (folder / "my_rewards.py").write_text(code)
    return change


ROW = '{"prompt": "1 + 1?", "answer": "2"}'
WIDE = {name: (2 * m, 2 * n) for name, (m, n) in SHAPES.items()}
GPT2 = {"shapes": {"attn.c_attn": (8, 24), "attn.c_proj": (8, 8)}, "architecture": "GPT2LMHeadModel", "name": "h.{}.{}"}
RUN = ["run", "config.toml"]
REBUILD = r"mpi4py sees 1: it loaded another MPI than mpirun's \(.*MPICC='mpicc -shared'.*--no-binary=mpi4py"


def case(name, change, says, words=RUN, ranks=0, env=None):
    return pytest.param(change, says, words, ranks, env or {}, id=name)


@pytest.mark.parametrize("change, says, words, ranks, env", [
    # the config
    case("no-config", keys(), r"config file nowhere.toml does not exist", ["run", "nowhere.toml"]),
    case("config-is-a-folder", keys(), r"config file . cannot be read", ["run", "."]),
    case("not-toml", text("population = = 8\n"), r"config file config.toml is not TOML: .*line 1"),
    case("not-text", lambda folder: (folder / "config.toml").write_bytes(b"\xff\xfe"), r"config file config.toml cannot be read"),
    case("unknown-key", keys(populaton=8), r"unknown key `populaton`; did you mean `population`\?"),
    case("unknown-key-on-2-ranks", keys(populaton=8), r"unknown key `populaton`; did you mean `population`\?", ranks=2),
    case("missing-key", keys("task"), r"key `task` is missing"),
    case("wrong-type", keys(population="8"), r"population = \"8\": needs an integer"),
    case("no-number", keys(), r"sigma = nan: needs a finite number", [*RUN, "--set", "sigma=nan"]),
    case("out-of-range", keys(sigma=0), r"sigma = 0.0: must be above 0"),
    case("population-of-1", keys(population=1), r"population = 1: must be at least 2"),
    case("no-such-search", keys(search="cmaes"), r"search = 'cmaes': must be one of auto, fast, sep, limited, cma"),
    case("name-of-another-folder", keys(name="../x"), r"name = '../x'.*plain name"),
    case("set-without-equals", keys(), r"--set population: needs key=value", [*RUN, "--set", "population"]),
    # the model and the adapter
    case("no-model", keys(model="nowhere"), r"model nowhere: no config.json there"),
    case("no-weights", removed("model/model.safetensors"), r"model folder \S+model holds no weights"),
    case("no-projections", model(**GPT2), r"GPT2LMHeadModel\) has no q_proj, k_proj, v_proj, o_proj: only"),
    case("no-adapter", keys(adapter="nowhere"), r"adapter nowhere: no adapter_config.json there.*essa_mpi sft", ranks=1),
    case("no-adapter-weights", removed("adapter/adapter_model.safetensors"), r"adapter \S+: no adapter_model.safetensors"),
    case("adapter-of-another-model", adapter(shapes=WIDE),
         r"layers.0.self_attn.q_proj is 16 x 16 in the adapter and 8 x 8 in \S+model"),
    case("adapter-of-a-deeper-model", adapter(layers=3), r"adapts model.layers.2.self_attn.q_proj, which .* does not have"),
    case("rank-vllm-lacks", adapter(shapes={"q_proj": (600, 600)}, layers=1, rank=513), r"rank 513 is not supported by vLLM"),
    case("no-lora", adapter(peft={"peft_type": "IA3"}), r"peft_type is IA3; only LORA"),
    case("alpha-of-nothing", keys(alpha=0.4), r"alpha = 0.4: floor\(alpha x rank\) is 0 for rank 2.*use alpha >= 0.5"),
    # the rows
    case("no-rows-file", keys(task="nowhere.jsonl"), r"task = 'nowhere.jsonl': there is no such file"),
    case("no-rows", rows(""), r"rows.jsonl': the file holds no rows"),
    case("row-without-answer", rows(ROW, "", '{"prompt": "x"}'), r"rows.jsonl:3: no key 'answer'"),
    case("row-without-prompt", rows('{"question": "x", "answer": "y"}'), r"rows.jsonl:1: no key 'prompt'.*'question'"),
    case("row-not-json", rows(ROW, '{"prompt": "x", '), r"rows.jsonl:2: not JSON"),
    case("row-not-an-object", rows(ROW, "[1]"), r"rows.jsonl:2: is a JSON list; needs an object"),
    case("batch-too-large", keys(batch=18), r"batch = 18: the train split .* has only 17 rows; lower batch"),
    case("row-in-two-splits", keys(validation_data="rows.jsonl"), r"17 prompts occur in two splits"),
    # the reward
    case("no-such-reward", reward("exactt"), r"reward = 'exactt': there is no such reward; use one of exact, boxed"),
    case("no-such-reward-on-2-ranks", reward("exactt"), r"reward = 'exactt': there is no such reward", ranks=2),
    case("no-reward-module", reward("nowhere:f"), r"importing nowhere failed: ModuleNotFoundError"),
    case("no-reward-function", reward("my_rewards:f", "def g(): pass"), r"my_rewards has no function 'f'; its functions: g"),
    case("reward-module-fails", reward("my_rewards:f", "1 / 0"), r"importing my_rewards failed: ZeroDivisionError"),
    # GPUs
    case("no-gpu", keys(tensor_parallel=2), r"tensor_parallel = 2: no GPU is visible"),
    case("too-few-gpus", keys(tensor_parallel=4), r"ask for 4 GPUs but 2 are visible", env={"CUDA_VISIBLE_DEVICES": "0,1"}),
    case("gpus-that-do-not-divide", keys(), r"2 ranks on this host x tensor_parallel = 1 ask for 2 GPUs but 3 are visible: "
         r"start 3 ranks a host", ranks=2, env={"CUDA_VISIBLE_DEVICES": "0,1,2"}),
    # --resume
    case("resume-of-another-search", stored(population=9), r"--resume: population = 7 but the run was started with 9",
         [*RUN, "--resume"]),
    case("resume-of-another-search-on-2-ranks", stored(seed=4), r"--resume: seed = 3 but the run was started with 4",
         [*RUN, "--resume"], ranks=2),
    case("resume-of-no-run", lambda folder: (write_run(folder), (folder / "runs/run").mkdir(parents=True)),
         r"runs/run is not a run folder", [*RUN, "--resume"]),
    # the launcher
    *(case(f"mpi-of-another-launcher-{next(iter(env))}", keys(), "started 4 processes .*" + REBUILD, env=env, ranks=ranks)
      for env, ranks in (({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, 1), ({"PMI_SIZE": "4"}, 0),
                         ({"PMIX_SIZE": "4"}, 0), ({"MV2_COMM_WORLD_SIZE": "4"}, 0),
                         ({"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, 0))),
    # SLURM_NTASKS in a batch script, outside of any step, says nothing: the run goes on, up to the next mistake
    case("slurm-allocation", keys(population=1), r"population = 1: must be", env={"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}),
    # other commands
    case("eval-of-no-run", keys(), r"runs/nowhere is not a run folder", ["eval", "runs/nowhere"]),
    case("show-of-no-run", keys(), r"run folder runs/nowhere cannot be opened", ["show", "runs/nowhere"]),
    case("eval-into-no-folder", evaluated(), r"--json nowhere/x.json: cannot be written", [*EVAL[:2], "--json", "nowhere/x.json"]),
    case("eval-into-a-folder", evaluated(), r"--json model: cannot be written", [*EVAL[:2], "--json", "model"]),
    case("two-tasks-of-one-name", evaluated(), r"--tasks b/more.toml: its name is 'more'", [*EVAL, "a/more.toml", "b/more.toml"]),
    case("a-task-named-as-the-run", evaluated('name = "run"'), r"--tasks a/more.toml: its name is 'run'", [*EVAL, "a/more.toml"]),
    case("a-task-without-rows", evaluated(data=""), r"--tasks a/more.toml: there are no held-out rows", [*EVAL, "a/more.toml"]),
    case("a-task-of-unknown-key", evaluated("hue = 3"), r"--tasks a/more.toml: config: unknown key `hue`", [*EVAL, "a/more.toml"]),
    case("a-task-that-is-not-there", evaluated(), r"--tasks no.toml: .*No such file", [*EVAL, "no.toml"]),
    case("a-heldout-answer-that-is-none", heldout({"prompt": "p", "answer": True}), r"the answer is 'True'"),
    case("a-heldout-row-without-a-column", heldout({"prompt": "p"}, 'my_rewards:f'),
         r"reward my_rewards:f needs tag, which .*heldout.jsonl:1 does not have; there are"),
    case("export-to-a-folder-that-is-there", stored(), r"--out model: is there already",
         ["export", "runs/run", "--out", "model"]),
])
def test_one_line_and_exit_code_2(server, mpirun, tmp_path, change, says, words, ranks, env):
    change(tmp_path)
    had_runs = (tmp_path / "runs").exists()
    rc, out, err = started(mpirun, ranks, tmp_path, words, env) if ranks else forked(server, tmp_path, words, env)
    assert rc == 2, (out, err)
    lines = [line for line in (out + err).splitlines() if line.startswith("essa_mpi:")]
    assert len(lines) == 1 and lines[0] in err, (out, err)
    assert re.search(says, lines[0]), lines[0]
    assert "Traceback" not in out + err
    if ranks < 2:           # mpirun adds words of its own
        assert err.splitlines() == lines
    if not had_runs and "reward" not in says and "importing" not in says and "my_rewards" not in says:
        assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_reward_that_raises_in_a_real_run(real_model, mpirun, tmp_path):
    """The rows' fault is found in the first generation of a real engine."""
    shapes = {"q_proj": (576, 576), "k_proj": (192, 576), "v_proj": (192, 576), "o_proj": (576, 576)}
    write_adapter(tmp_path / "adapter", layers=30, shapes=shapes, rank=8)
    write_rows(tmp_path / "rows.jsonl", 3)
    write_config(tmp_path / "config.toml", {
        "name": "run", "model": str(real_model), "adapter": str(tmp_path / "adapter"), "task": "rows.jsonl",
        "reward": "my_rewards:f", "generations": 1, "population": 2, "batch": 3, "max_tokens": 4, "max_model_len": 256,
        "max_num_seqs": 8, "slots": 2, "kv_cache_gib": 0.25})
    (tmp_path / "my_rewards.py").write_text(
        "def f(completions, answer):\n    return [1 / 3 if a != '2' else 1 / 0 for a in answer]\n")
    done = mpirun(1, "run", "config.toml", cwd=tmp_path, env={"PYTHONPATH": ROOT}, timeout=600)
    assert done.rc == 2, (done.stdout, done.stderr)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("essa_mpi:")]
    assert len(lines) == 1 and re.search(
        r"^essa_mpi: rank 0 on \S+: reward my_rewards:f raised on rows.jsonl:2: ZeroDivisionError", lines[0]), lines
    assert "Traceback" not in done.stderr


if __name__ == "__main__":
    serve()
