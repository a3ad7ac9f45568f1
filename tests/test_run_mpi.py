"""Whole runs under mpirun, the engine replaced (deterministic_run.py): what they send, how they end, kill and resume."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from conftest import ROOT, Mpirun
from deterministic_run import write_adapter, write_run
from essa_mpi.files import read_json_lines
from essa_mpi.runfile import read_history
from essa_mpi.world import HEADER, TILE_WORDS, share

SCRIPT = ROOT / "tests/deterministic_run.py"
PATIENCE = 240      # seconds, for a crowded machine; what hangs takes longer
GENERATIONS = 6
# Some rows without a score, as in life: two of candidate 1, and one of all candidates.
GAPS = ("--fault", json.dumps({"kind": "nan", "candidates": [1], "rows": [0, 1, 2, 3, 4, 5, 6]}),
        "--fault", json.dumps({"kind": "nan", "rows": [9], "value": "inf"}))


def fault(kind, **more):
    return ("--fault", json.dumps({"kind": kind, **more}))


def sets(**keys):
    return [word for key, value in keys.items() for word in ("--set", f"{key}={json.dumps(value)}")]


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path, generations=GENERATIONS)
    return tmp_path


def start(mpirun, n, folder, *arguments):
    return mpirun.start(n, SCRIPT, "config.toml", *arguments, cwd=folder)


def run(mpirun, n, folder, *arguments, rc=0):
    outcome = start(mpirun, n, folder, *arguments).wait(PATIENCE)
    assert outcome.rc == rc, f"exit code {outcome.rc}\n{outcome.stdout[-3000:]}\n{outcome.stderr[-3000:]}"
    return outcome


def told(outcome) -> str:
    """The one line an error is told in."""
    line, = [line for line in (outcome.stdout + outcome.stderr).splitlines() if "essa_mpi:" in line]
    assert line.startswith("essa_mpi:") and line in outcome.stderr
    return line


def history(folder, name="run") -> dict:
    """Every dataset outside times/, as bits."""
    arrays, _ = read_history(folder / f"runs/{name}/history.h5")
    return {key: (array.dtype.str, array.shape, array.tobytes()) for key, array in arrays.items()
            if not key.startswith("times/")}


def logs(folder, name="run"):
    """(metrics, samples) without what depends on time or the number of ranks."""
    metrics = read_json_lines(folder / f"runs/{name}/metrics.jsonl")
    for line in metrics:
        del line["seconds"], line["ranks"], line["bytes_sent_per_rank"]
    return metrics, read_json_lines(folder / f"runs/{name}/samples.jsonl")


def assert_same_run(folder, expected, racing=False):
    assert history(folder) == history(expected)
    metrics, samples = logs(folder)
    assert [line["generation"] for line in metrics] == list(range(GENERATIONS))
    assert metrics == logs(expected)[0]
    if not racing:      # then one rank may have fewer of a round's first completions to log
        assert [line["generation"] for line in samples] == [g for g in range(GENERATIONS) for _ in range(3)]
        assert samples == logs(expected)[1]
    for file in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (folder / "runs/run" / file).read_bytes() == (expected / "runs/run" / file).read_bytes()
    summary = json.loads((folder / "runs/run/summary.json").read_text())
    assert summary["generations"] == GENERATIONS
    return summary


@pytest.fixture(scope="module")
def uninterrupted(request, tmp_path_factory):
    """A run of one rank that nothing happens to, with the search or keys that `of` names: (folder, keys of the config)."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    keys = {**({"search": request.param} if isinstance(request.param, str) else request.param), "heldout_rows": 3}
    write_run(folder, generations=GENERATIONS, **keys)
    runs = Mpirun()
    try:
        run(runs, 1, folder, *GAPS)
    finally:
        runs.close()
    return folder, keys


def again(uninterrupted, folder):
    """The same run's files in `folder`; paths are part of the config, so they stay."""
    shutil.copy(uninterrupted[0] / "config.toml", folder / "config.toml")


# -- the same history on any number of ranks ------------------------------------------------------

def of(*searches):
    return pytest.mark.parametrize("uninterrupted", searches, indirect=True, ids=str)


@pytest.mark.parametrize("uninterrupted, n", [("cma", 2), ("cma", 3), ("cma", 4), ("sep", 3)], indirect=["uninterrupted"])
def test_the_history_is_the_same_on_any_number_of_ranks(mpirun, uninterrupted, tmp_path, n):
    again(uninterrupted, tmp_path)
    run(mpirun, n, tmp_path, *GAPS)
    summary = assert_same_run(tmp_path, uninterrupted[0])
    assert summary["ranks"] == n
    assert summary["heldout"] == json.loads((uninterrupted[0] / "runs/run/summary.json").read_text())["heldout"]


def test_more_ranks_than_candidates(mpirun, tmp_path):
    """3 candidates x 2 rows on 4 ranks, and a mean that is validated on 5."""
    write_run(tmp_path, population=3, batch=2, generations=3)
    run(mpirun, 4, tmp_path)
    run(mpirun, 1, tmp_path)
    assert history(tmp_path, "run") == history(tmp_path, "run.1")


# -- what is sent ------------------------------------------------------------------------------------

# Local by the MPI standard: they move no data and wait for nobody.
LOCAL = re.compile(r"MPI_(Comm_(size|rank|test_inter|get_\w+|set_\w+|free_keyval|create_keyval|remote_size|call_errhandler)"
                   r"|Type_\w+|Get_(count|elements|version|library_version|processor_name|address)\w*|Initialized"
                   r"|Finalized|Is_thread_main|Query_thread|Op_\w+|Error_\w+|Group_\w+|Errhandler_\w+|Info_\w+|Attr_\w+"
                   r"|Win_(create|free)_keyval|Add_error_\w+|Status_\w+)$")


@pytest.fixture(scope="module")
def interposer(tmp_path_factory):
    """A library that counts the calls of every MPI function (through PMPI) and writes them down at MPI_Finalize."""
    if not (shutil.which("mpicc") or (Path(sys.prefix) / "bin/mpicc").exists()):
        pytest.skip("needs mpicc and a C compiler; the communicator is counted all the same, see below")
    mpicc = shutil.which("mpicc") or str(Path(sys.prefix) / "bin/mpicc")
    folder = tmp_path_factory.mktemp("pmpi")
    (folder / "empty.c").write_text("#include <mpi.h>\n")
    header = subprocess.run([mpicc, "-E", "-P", folder / "empty.c"], capture_output=True, text=True)
    if header.returncode:
        pytest.skip(f"mpicc does not work: {header.stderr[-300:]}")
    seen, code = set(), []
    for name, parameters in re.findall(r"\bint\s+(MPI_\w+)\s*\(([^()]*)\)", header.stdout):
        parameters = " ".join(parameters.split())
        if name in seen or "..." in parameters or name == "MPI_Finalize":
            continue
        words = [] if parameters in ("", "void") else [
            re.sub(r"\[[^\]]*\]", "", p).strip() for p in parameters.split(",")]
        arguments = [re.search(r"(\w+)$", word)[1] for word in words]
        seen.add(name)
        code.append(f"int {name}({parameters}) {{ static long essa_calls; essa_count(\"{name}\", &essa_calls); "
                    f"return P{name}({', '.join(arguments)}); }}")
    assert {"MPI_Allgather", "MPI_Send", "MPI_Isend", "MPI_Barrier", "MPI_Bcast", "MPI_Allgatherv", "MPI_Allreduce",
            "MPI_Comm_split", "MPI_Put", "MPI_Iprobe"} <= seen
    (folder / "count.c").write_text("""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
static struct { const char *name; long *n; } seen[4096];
static int functions;
static void essa_count(const char *name, long *n) {
    if (*n == 0) { seen[functions].name = name; seen[functions++].n = n; }
    ++*n;
}
int MPI_Finalize(void) {
    int rank; char path[4096];
    PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
    snprintf(path, sizeof path, "%s.%d", getenv("ESSA_COUNTS"), rank);
    FILE *f = fopen(path, "w");
    for (int i = 0; i < functions; i++) fprintf(f, "%s %ld\\n", seen[i].name, *seen[i].n);
    fclose(f);
    return PMPI_Finalize();
}
""" + "\n".join(code))
    built = subprocess.run([mpicc, "-shared", "-fPIC", "-O1", "-w", "-o", folder / "count.so", folder / "count.c"],
                           capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]
    return folder / "count.so"


def pmpi_counts(mpirun, n, folder, interposer, generations, *arguments):
    """name -> calls of each rank, local functions left out; MPI_X_c (large counts) is MPI_X."""
    files = folder / f"counts{generations}"
    job = mpirun.start(n, SCRIPT, "config.toml", "--preload", interposer, *sets(generations=generations), *arguments,
                       cwd=folder, env={"ESSA_COUNTS": files})
    outcome = job.wait(PATIENCE)
    assert outcome.rc == 0, outcome.stderr[-3000:]
    counts = []
    for rank in range(n):
        counts.append({})
        for line in (folder / f"counts{generations}.{rank}").read_text().splitlines():
            name, calls = line.split()
            if not LOCAL.match(name):
                name = name.removesuffix("_c")
                counts[-1][name] = counts[-1].get(name, 0) + int(calls)
    return counts


def allgather_of(ranks: int) -> str:
    """Where ranks share cores it is the form in which they can sleep."""
    return "Iallgather" if ranks > len(os.sched_getaffinity(0)) else "Allgather"


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_allgather_a_generation_and_no_other_communication(mpirun, folder, interposer, ranks):
    """Counted below mpi4py, at the MPI library, for all MPI functions there are. MPI_Test communicates nothing of its own."""
    name = f"MPI_{allgather_of(ranks)}"
    short = pmpi_counts(mpirun, ranks, folder, interposer, 4)
    long = pmpi_counts(mpirun, ranks, folder, interposer, 9)
    for few, many in zip(short, long):
        assert few[name] >= 5, "the library was not asked: mpi4py did not call through it"
        more = {name: many.get(name, 0) - few.get(name, 0) for name in many.keys() | few.keys()}
        assert {name: calls for name, calls in more.items() if calls and name != "MPI_Test"} == {name: 5}


def test_one_allgather_a_generation_of_one_size(mpirun, tmp_path):
    """Counted at the communicator, with the bytes; also where there is no compiler."""
    n, counted = 3, {}
    for name, keys in {"short": {"generations": 4}, "long": {"generations": 9},
                       "many values": {"generations": 4, "adapter": "big"}, "other rewards": {"generations": 4, "seed": 8}}.items():
        folder = tmp_path / name.replace(" ", "-")
        write_run(folder, validation_every=0, **{**keys, "adapter": str(folder / "adapter")})
        if name == "many values":
            shutil.rmtree(folder / "adapter")
            write_adapter(folder / "adapter", rank=4)
        out = run(mpirun, n, folder, "--count", folder / "count.json").stdout
        assert ("64 singular values" if name == "many values" else "32 singular values") in out
        counted[name] = json.loads((folder / "count.json").read_text())
        # Beside the first generation's seven candidates the warm start is scored on the same rows.
        sizes = [8 * (len(HEADER) + TILE_WORDS * max(len(share([5] * arms, r, n)) for r in range(n)))
                 for arms in (8, *[7] * (keys["generations"] - 1))]
        sent = counted[name]["sent"]
        set_up = len(sent) - len(sizes) - 1         # a word each: whether this rank failed
        assert sent == [8] * set_up + [*sizes, 8 * len(HEADER)]
        assert [line["bytes_sent_per_rank"] for line in read_json_lines(folder / "runs/run/metrics.jsonl")] == sizes
    few, many, name = counted["short"]["calls"], counted["long"]["calls"], allgather_of(n)
    set_up = few[name] - 5
    assert many == {**few, name: set_up + 10}
    assert set(few) <= {"allgather", "bcast", name}          # the first two in set-up


# -- states that differ --------------------------------------------------------------------------------

@pytest.mark.parametrize("after, told_by", [(2, "the next all-gather"), (GENERATIONS - 1, "the closing check")])
def test_a_flipped_bit_stops_the_run(mpirun, folder, after, told_by):
    outcome = run(mpirun, 3, folder, *fault("flip", rank=1, generation=after), rc=1)
    line = told(outcome)
    assert re.search(r"[0-9a-f]{16} on ranks 0,2 \([^;]+; [^)]+\)", line) and re.search(r"[0-9a-f]{16} on ranks 1 \(", line)
    host = os.uname().nodename
    assert host in line and "OPENBLAS_CORETYPE" in line and "OMP_NUM_THREADS" in line
    done = [m["generation"] for m in read_json_lines(folder / "runs/run/metrics.jsonl")]
    assert done == list(range(after + 1)), "the scores that came with the other digest were used"
    assert not (folder / "runs/run/summary.json").exists() and not (folder / "runs/run/adapter").exists()


# -- errors --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n, faults, rc, says", [
    (3, fault("raise", rank=1, generation=2), 1, r"rank 1 on \S+: RuntimeError: a fault over two lines \(traceback in"),
    (3, fault("raise", rank=0, generation=0), 1, r"rank 0 on \S+: RuntimeError: a fault"),
    (3, fault("raise", generation=2), 1, r"rank \d on \S+: RuntimeError: a fault"),
    (2, fault("raise_user", generation=1), 2, r"rank \d on \S+: reward x raised on rows.jsonl:7$"),
    (2, fault("raise_user", rank=1, generation=1), 2, r"rank 1 on \S+: reward x raised on rows.jsonl:7$"),
    (2, fault("thread", rank=1, generation=1) + fault("hang", rank=1, generation=1), 1,
     r"rank 1 on \S+: RuntimeError: a fault in a thread"),
    (2, fault("exit", rank=1, generation=1), 1, r"rank 1 on \S+: SystemExit"),
    (2, fault("exit"), 1, r"rank \d on \S+: SystemExit"),
    (2, fault("interrupt", rank=1, generation=1), 1, r"rank 1 on \S+: KeyboardInterrupt"),
    (3, fault("setup", rank=2), 1, r"rank 2 on \S+: RuntimeError: a fault in set-up"),
    (3, fault("prepare", rank=1), 1, r"RuntimeError: a fault in set-up \(rank 1 on \S+\)$"),
    (3, fault("prepare"), 1, r"RuntimeError: a fault in set-up$"),
    (3, fault("prepare_user", rank=1), 2, r"a fault in set-up \(rank 1 on \S+\)$"),
    (3, fault("prepare_user"), 2, r"a fault in set-up$"),
    (3, fault("nan", generation=3), 2, r"rank \d on \S+: generation 3: no candidate has a score: 0 prompts"),
], ids=lambda x: " ".join(x[1::2]) if isinstance(x, tuple) else None)
def test_an_error_on_any_rank_ends_the_job_with_one_line(mpirun, folder, n, faults, rc, says):
    outcome = run(mpirun, n, folder, *faults, rc=rc)
    line = told(outcome)
    assert re.search(r"^essa_mpi: " + says, line), line
    tracebacks = outcome.stderr.count("Traceback (most recent call last)")
    if "traceback in" in line:
        failed = Path(folder / re.search(r"traceback in (\S+)\)", line)[1]).read_text()
        assert failed.startswith(line.partition(" (traceback")[0]) and "Traceback" in failed
        assert tracebacks == 0
    else:               # no run folder yet to put it in
        assert tracebacks == (0 if rc == 2 else 1)


def test_a_thread_that_exits_does_not_end_the_run(mpirun, folder):
    run(mpirun, 2, folder, *fault("thread_exit", generation=1))
    assert (folder / "runs/run/summary.json").exists()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_the_job(mpirun, folder, victim):
    """kill -9 of one rank while it computes and the others wait for it."""
    job = start(mpirun, 3, folder, *fault("hang", rank=victim, generation=2))
    wait_for(job, "generation 2/6")
    ranks = job.ranks()
    assert len(ranks) == 3
    time.sleep(0.5)
    ranks[victim].send_signal(signal.SIGKILL)
    assert job.wait(PATIENCE).rc != 0
    gone, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive
    outcome = run(mpirun, 2, folder, "--resume")
    assert "resuming runs/run at generation 2 of 6" in outcome.stdout
    assert (folder / "runs/run/summary.json").exists()


def wait_for(job, pattern, or_end=False):
    """Return once the job has said so, or with `or_end` once it is over."""
    patience = time.monotonic() + PATIENCE
    while not re.search(pattern, job.output()[0]):
        if job.process.poll() is not None and or_end:
            return
        assert job.process.poll() is None and time.monotonic() < patience, job.output()
        time.sleep(0.005)


REWARDS = '''
def short(completions, answer):
    return [1.0] * (len(completions) - 1)

def raises(completions, answer):
    for text, right in zip(completions, answer):
        if right == "4":
            raise KeyError("no")
    return [1 / 3] * len(completions)

def right(completions, answer):
    return [float(text == a) for text, a in zip(completions, answer)]
'''


@pytest.mark.parametrize("n, reward, rc, says", [
    (2, "short", 2, r"reward rewards:short returned \d+ rewards for \d+ completions \(\S+rows.jsonl:\d+ to "),
    (2, "raises", 2, r"reward rewards:raises raised on \S+rows.jsonl:4: KeyError: 'no'"),
    (1, "raises", 2, r"reward rewards:raises raised on \S+rows.jsonl:4: KeyError: 'no'"),
])
def test_a_reward_that_fails_is_the_users_to_mend(mpirun, folder, n, reward, rc, says):
    (folder / "rewards.py").write_text(REWARDS)
    outcome = run(mpirun, n, folder, "--user-reward", *sets(reward=f"rewards:{reward}", batch=17), rc=rc)
    assert re.search(r"^essa_mpi: rank \d on \S+: " + says, told(outcome)), told(outcome)


def test_missing_scores_are_counted_and_shown(mpirun, folder):
    """Row 9 for all, everything of candidate 1: the run goes on."""
    outcome = run(mpirun, 2, folder, *fault("nan", candidates=[1]), *sets(generations=2))
    shown = re.findall(r"^generation (\d)/2 .*fitness (\S+) .* 5 rows without a score", outcome.stdout, re.M)
    assert [g for g, _ in shown] == ["1", "2"] and "inf" not in outcome.stdout
    arrays, _ = read_history(folder / "runs/run/history.h5")
    assert arrays["missing"].tolist() == [5, 5] and (arrays["fitness"][:, 1] == float("-inf")).all()
    assert [m["missing"] for m in logs(folder)[0]] == [5, 5]
    assert json.loads((folder / "runs/run/summary.json").read_text())["missing"] == 10
    show = subprocess.run([sys.executable, "-m", "essa_mpi", "show", "runs/run"], cwd=folder, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=PATIENCE)
    assert show.stdout.count("5 missing") == 2, show.stderr


@of("cma")
def test_evaluation_scores_the_same_on_any_number_of_ranks(mpirun, uninterrupted):
    """The rows, the sums and the bits of the held-out scores that the run ended with."""
    folder = uninterrupted[0]
    run(mpirun, 3, folder, "--eval", "runs/run", *GAPS)
    found = json.loads((folder / "eval.json").read_text())
    expected = json.loads((folder / "runs/run/summary.json").read_text())["heldout"]
    assert set(expected) - set(found) == {"averaged", "validated", "candidate"}     # a run scores its other answers too
    assert all(found[key] == expected[key] for key in ("n", "base", "warm_start", "evolved"))
    assert expected["base"] != expected["evolved"]


@of("cma")
def test_an_error_in_evaluation_is_told_once(mpirun, uninterrupted):
    folder = uninterrupted[0]
    for _ in range(2):      # the second is told too
        outcome = run(mpirun, 3, folder, "--eval", "runs/run", *fault("raise"), rc=1)
        assert re.search(r"rank \d on \S+: RuntimeError: a fault .*logs/eval_failed.txt", told(outcome))
    assert not (folder / "runs/run/failed.txt").exists()


# -- kill and resume ---------------------------------------------------------------------------------------

def kill_all(job):
    """kill -9 of mpirun and everything below it."""
    everyone = psutil.Process(job.pid).children(recursive=True)
    os.killpg(job.pid, signal.SIGKILL)
    for process in everyone:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    _, alive = psutil.wait_procs(everyone, timeout=30)
    assert not alive
    job.process.wait(30)


@pytest.mark.parametrize("uninterrupted, checkpoint_every, ranks", [("cma", 1, (2, 3, 1, 4, 2)), ("sep", 3, (3, 2, 4, 1, 3))],
                         indirect=["uninterrupted"])
def test_kill_9_at_random_moments_and_resume_on_other_ranks(mpirun, uninterrupted, tmp_path, checkpoint_every, ranks):
    again(uninterrupted, tmp_path)
    rng = random.Random(f"{uninterrupted[1]} {checkpoint_every}")
    more = [*GAPS, "--sleep", 0.8, *sets(checkpoint_every=checkpoint_every)]
    moments = []
    for n in ranks[:-1]:
        job = start(mpirun, n, tmp_path, "--resume", *more)
        wait_for(job, "generation .* left" if rng.random() < 0.7 else "singular values", or_end=True)
        time.sleep(rng.random())
        if job.process.poll() is not None:      # a resume that had little left to do
            assert job.wait().rc == 0 and moments
            break
        kill_all(job)
        metrics = (tmp_path / "runs/run/metrics.jsonl").read_bytes()
        moments.append((n, metrics.count(b"\n"), [p.name for p in (tmp_path / "runs/run").rglob("*.tmp")]))
    run(mpirun, ranks[-1], tmp_path, "--resume", *more)
    print("killed at (ranks, generations in metrics.jsonl, half-written files):", moments)
    assert_same_run(tmp_path, uninterrupted[0])


@of("cma")
def test_sigusr1_checkpoints_and_leaves_and_another_job_goes_on(mpirun, uninterrupted, tmp_path):
    """The signal reaches one rank; all leave with 75 after the same generation, though no checkpoint was due."""
    again(uninterrupted, tmp_path)
    left = []
    for n, victim in ((3, 1), (2, 0), (4, 3)):
        job = start(mpirun, n, tmp_path, "--resume", *GAPS, "--sleep", 0.8, *sets(checkpoint_every=100))
        wait_for(job, "generation .* left")
        os.kill(job.ranks()[victim].pid, signal.SIGUSR1)
        outcome = job.wait(PATIENCE)
        assert outcome.rc == 75 and "essa_mpi:" not in outcome.stderr, outcome
        assert outcome.stdout.count("leaving as asked, checkpointed: continue runs/run with --resume") == 1
        assert not (tmp_path / "runs/run/summary.json").exists()
        left.append(len(logs(tmp_path)[0]))
    assert left == sorted(set(left)) and left[-1] <= GENERATIONS
    run(mpirun, 1, tmp_path, "--resume", *GAPS)
    assert_same_run(tmp_path, uninterrupted[0])


def test_a_trace_has_every_ranks_time_on_one_clock(mpirun, folder):
    """The deterministic scorer has no engine, so nothing is placed or generated; the wait of the fast is seen."""
    run(mpirun, 3, folder, "--sleep", 0.3, "--trace", "trace.json", *sets(generations=3, heldout_rows=0))
    assert json.loads((folder / "trace.json").read_text())["traceEvents"][0]["args"]["name"].startswith("rank 0 on ")
    from essa_mpi import trace
    events = trace.read(folder / "trace.json")
    assert {e["name"] for e in events} == {"perturb", "wait", "allgather", "update", "checkpoint"}
    assert {e["pid"] for e in events} == {0, 1, 2} and {e["pid"] for e in events if e["name"] == "checkpoint"} == {0}
    assert {e["args"]["generation"] for e in events} == {0, 1, 2, trace.AFTER}        # the closing check
    for g in range(3):
        of_g = {name: [e for e in events if e["name"] == name and e["args"]["generation"] == g] for name in ("wait", "allgather")}
        # In microseconds: nobody leaves an all-gather before the last has come; on a crowded machine some leave late.
        last = max(e["ts"] for e in of_g["wait"])
        assert all(e["ts"] + e["dur"] > last for e in of_g["allgather"]) and len(of_g["allgather"]) == 3
        assert min(e["dur"] for e in of_g["wait"]) == 0 < max(e["dur"] for e in of_g["wait"])
    for rank in range(3):
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["pid"] == rank)
        assert all(end <= begin + 1 for (_, end), (begin, _) in zip(mine, mine[1:]))      # one after the other


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_hangs_ends_the_job_with_its_name(mpirun, folder, victim):
    job = start(mpirun, 3, folder, *sets(hang_seconds=3), *fault("hang", rank=victim, generation=2))
    outcome = job.wait(PATIENCE)
    assert outcome.rc != 0
    [line] = [line for line in outcome.stderr.splitlines() if line.startswith("essa_mpi:")]
    assert re.search(rf"others have waited \d+ s for rank {victim} on \S+ \(generation 2: perturb since \d+ s", line), line
    assert "hang_seconds = 3; continue with --resume" in line
    run(mpirun, 2, folder, "--resume")


def test_verdicts_of_the_watchdog():
    from essa_mpi.watchdog import verdict
    hosts = ["a", "b", "c"]

    def heard(*states):
        return {rank: ({"round": number, "waits": waits, "doing": "x"}, at) for rank, number, waits, at in states}
    busy = (1, 4, None, 100.0)
    assert verdict(heard((0, 4, None, 100.0), busy), 100.0, 10, hosts) is None      # nobody waits
    assert verdict(heard((0, 4, 5.0, 100.0), busy), 100.0, 10, hosts) is None       # not long enough
    assert "for rank 1 on b" in verdict(heard((0, 4, 5.0, 100.0), busy), 106.0, 10, hosts)
    assert verdict(heard((0, 4, 50.0, 100.0), (1, 4, 1.0, 100.0)), 100.0, 10, hosts) is None    # all are there: the network
    assert verdict(heard((0, 4, 50.0, 100.0)), 100.0, 10, hosts) is None            # never heard of: not accused
    said = verdict(heard((0, 4, 50.0, 100.0), (1, 4, 50.0, 100.0), (2, 3, 90.0, 60.0)), 100.0, 10, hosts)
    assert "for rank 2 on c" in said and "40 s ago" in said     # it stopped in an all-gather it never told the end of


@of("cma")
def test_a_job_leaves_before_its_walltime_is_over(mpirun, uninterrupted, tmp_path):
    again(uninterrupted, tmp_path)
    jobs = 0
    while True:
        outcome = start(mpirun, 2, tmp_path, "--resume", *GAPS, "--sleep", 1.0, *sets(walltime_seconds=4.0)).wait(PATIENCE)
        jobs += 1
        if outcome.rc == 0:
            break
        assert outcome.rc == 75 and jobs < 10
    assert jobs > 1
    assert_same_run(tmp_path, uninterrupted[0])


def test_a_walltime_is_kept_though_a_generation_has_several_rounds(monkeypatch):
    """Racing and re-evaluation ask in each round; what counts is how long a generation is."""
    from essa_mpi import departure
    now = [0.0]
    monkeypatch.setattr(departure.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(departure, "_began", 0.0)
    leaves = departure.Departure(walltime_seconds=10.0)
    for generation in range(9):
        leaves.begin()
        for _ in range(4):
            now[0] += 0.5
            asked = leaves.asked()
        if asked:
            break
    assert asked == departure.LEAVE and now[0] == 8.0      # of 2 s each; a fifth might have taken 2.4


@of("cma")
def test_sigusr1_while_the_heldout_rows_are_scored(mpirun, uninterrupted, tmp_path):
    """Everything is on the disk, so the job leaves at once, whatever the ranks are at; the next one scores."""
    again(uninterrupted, tmp_path)
    job = start(mpirun, 3, tmp_path, "--resume", *GAPS, *fault("hang", rank=1, generation=2**32 - 1))
    wait_for(job, "generation 6/6")
    time.sleep(1.0)
    os.kill(job.ranks()[1].pid, signal.SIGUSR1)
    outcome = job.wait(PATIENCE)
    assert outcome.rc == 75 and "continue runs/run with --resume" in outcome.stdout, outcome
    assert not (tmp_path / "runs/run/summary.json").exists()
    run(mpirun, 2, tmp_path, "--resume", *GAPS)
    assert_same_run(tmp_path, uninterrupted[0])


def test_a_trace_that_cannot_be_written(mpirun, folder):
    """Refused before the run; and if the disk refuses later, the run is none the worse."""
    outcome = start(mpirun, 2, folder, "--trace", "nowhere/trace.json").wait(PATIENCE)
    assert outcome.rc == 2 and "--trace nowhere/trace.json: cannot be written" in outcome.stderr
    assert not (folder / "runs").exists()
    from essa_mpi import trace
    said = []
    trace._events = []
    trace.write(SimpleNamespace(comm=SimpleNamespace(gather=lambda mine: [mine]), hosts=["a"], say=said.append),
                str(folder / "nowhere/trace.json"))
    assert len(said) == 1 and said[0].startswith("warning: no trace: ")


def test_one_vector_under_two_names_has_one_score():
    from essa_mpi.evaluate import _first_names
    a, b = np.zeros(3), np.ones(3)
    assert _first_names({"base": None, "warm_start": a, "evolved": b, "final": b.copy(), "averaged": a + 0.0}) == {
        "base": "base", "warm_start": "warm_start", "evolved": "evolved", "final": "evolved", "averaged": "warm_start"}


def test_max_seconds_ends_a_run_as_one_that_is_done(mpirun, folder):
    outcome = run(mpirun, 2, folder, "--sleep", 0.3, *sets(max_seconds=0.01, generations=50))
    assert (folder / "runs/run/summary.json").exists() and len(logs(folder)[0]) < 4, outcome.stdout


@of("cma")
@pytest.mark.parametrize("checkpoint_every, kills", [
    (1, [("before metrics", 0), ("after metrics", 1), ("before checkpoint", 2), ("after checkpoint", 5)]),
    (3, [("after metrics", 1), ("after history", 2), ("before metrics", 4), ("before adapter", None),
         ("after adapter", None), ("before summary", None)]),
])
def test_kill_9_at_the_worst_moments(mpirun, uninterrupted, tmp_path, checkpoint_every, kills):
    """Between any two files of a generation, and of the end. Every resume is on another number of ranks."""
    again(uninterrupted, tmp_path)
    more = [*GAPS, *sets(checkpoint_every=checkpoint_every)]
    for i, (moment, generation) in enumerate(kills):
        job = start(mpirun, 1 + i % 3, tmp_path, "--resume", *more,
                    *fault("kill", at=moment, **({} if generation is None else {"generation": generation})))
        outcome = job.wait(PATIENCE)
        assert outcome.rc != 0 and "essa_mpi:" not in outcome.stderr, outcome
        assert not (tmp_path / "runs/run/summary.json").exists()
    run(mpirun, 2, tmp_path, "--resume", *more)
    assert_same_run(tmp_path, uninterrupted[0])


@of("cma")
def test_resume_may_go_further_and_place_otherwise(mpirun, uninterrupted, tmp_path):
    again(uninterrupted, tmp_path)
    run(mpirun, 2, tmp_path, *GAPS, *sets(generations=2))
    outcome = run(mpirun, 3, tmp_path, "--resume", *GAPS, *sets(generations=GENERATIONS, mode="merged", slots=3,
                                                                checkpoint_every=4, keep_checkpoints=3))
    assert f"resuming runs/run at generation 2 of {GENERATIONS}" in outcome.stdout
    assert_same_run(tmp_path, uninterrupted[0])
    # Once more, though there is nothing left to do.
    outcome = run(mpirun, 1, tmp_path, "--resume", *GAPS)
    assert f"resuming runs/run at generation {GENERATIONS} of {GENERATIONS}" in outcome.stdout
    assert_same_run(tmp_path, uninterrupted[0])
    show = subprocess.run([sys.executable, "-m", "essa_mpi", "show", "runs/run"], cwd=tmp_path, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=PATIENCE)
    assert f"{GENERATIONS} of {GENERATIONS} generations" in show.stdout, show


@of("cma")
@pytest.mark.parametrize("key, value", [("population", 8), ("seed", 9), ("sigma", 0.31), ("batch", 6),
                                        ("generations", GENERATIONS - 1)])
def test_resume_refuses_another_search(mpirun, uninterrupted, key, value):
    folder = uninterrupted[0]
    before = {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file()}
    line = told(run(mpirun, 2 if key == "seed" else 1, folder, "--resume", *sets(**{key: value}), rc=2))
    assert f"--resume: {key} = {value}" in line
    assert {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file()} == before


def test_resume_with_nothing_there_starts(mpirun, folder):
    outcome = run(mpirun, 2, folder, "--resume", *sets(generations=1))
    assert outcome.stdout.count("nothing to resume: there is no runs/run; starting it\n") == 1
    assert (folder / "runs/run/summary.json").exists()


def test_an_old_run_is_renamed_and_one_line_says_so(mpirun, folder):
    for i in range(3):
        outcome = run(mpirun, 2, folder, *sets(generations=1, seed=i))
        said = [line for line in outcome.stdout.splitlines() if "renamed" in line]
        assert said == ([f"runs/run was there already: renamed to runs/run.{i}"] if i else [])
    assert sorted(p.name for p in (folder / "runs").glob("run*")) == ["run", "run.1", "run.2"]
    for name, seed in (("run.1", 0), ("run.2", 1), ("run", 2)):
        assert f"\nseed = {seed}\n" in (folder / "runs" / name / "config.toml").read_text()


# -- policies, races, answers ------------------------------------------------------------------------------

BOUNDED = {"reward_low": 0.0, "reward_high": 0.3}
WAYS = [
    {"racing": 5, **BOUNDED}, {"racing": 2, "search": "fast", "rows": "growing", "batch_growth": 1.1, **BOUNDED},
    {"reevaluate": 3, "answer": "averaged"}, {"reevaluate": 7, "rows": "pool", "pool_rows": 8, "pool_turnover": 2},
    {"rows": "pool", "answer": "validated"}, {"rows": "growing", "batch_growth": 1.3, "answer": "candidate"},
    {"search": "auto", "active": True, "mean_decay": 0.05}, {"search": "fast", "step_size": "tpa", "offsets": "exp"},
    {"search": "limited", "offsets": "projection", "offset_scale": {"B": 2.0}},
]


@of(*WAYS)
def test_killed_and_resumed_on_other_ranks_it_is_the_same_run(mpirun, uninterrupted, tmp_path):
    again(uninterrupted, tmp_path)
    racing = "racing" in uninterrupted[1]
    for n, generation in ((2, 1), (3, 3)):
        job = start(mpirun, n, tmp_path, "--resume", *GAPS, *fault("kill", at="after metrics", generation=generation))
        assert job.wait(PATIENCE).rc != 0
    run(mpirun, 4, tmp_path, "--resume", *GAPS)
    summary = assert_same_run(tmp_path, uninterrupted[0], racing)
    assert summary["heldout"] == json.loads((uninterrupted[0] / "runs/run/summary.json").read_text())["heldout"]
    if racing:
        assert sum(line["rows_saved"] for line in logs(tmp_path)[0]) > 0


def test_a_race_evolves_what_the_run_without_it_evolves(mpirun, tmp_path):
    """To the last bit of the search and of the adapter."""
    found = []
    for name, keys in (("plain", {}), ("raced", {"racing": 5})):
        write_run(tmp_path / name, generations=GENERATIONS, adapter=str(tmp_path / "plain/adapter"), **BOUNDED, **keys)
        run(mpirun, 2, tmp_path / name)
        arrays, _ = read_history(tmp_path / name / "runs/run/history.h5")
        found.append((arrays["digest"].tolist(), (tmp_path / name / "runs/run/adapter/adapter_model.safetensors").read_bytes()))
        saved = [line.get("rows_saved") for line in logs(tmp_path / name)[0]]
    assert found[0] == found[1] and sum(saved) > 0


def test_metrics_say_what_noise_and_rounds_did(mpirun, tmp_path):
    """Batch, all-gathers, signal and noise always; what racing and re-evaluation saved and changed, with them."""
    always = {"batch", "allgathers", "signal", "noise", "signal_to_noise"}
    for name, keys, more, gathers in (("plain", {}, set(), 1),
                                      ("racing", {"racing": 2, **BOUNDED}, {"rows_saved", "tokens_saved"}, 2),
                                      ("reevaluate", {"reevaluate": 3}, {"changed_ranks"}, 2)):
        write_run(tmp_path / name, generations=3, rows="growing", batch_growth=1.3, **keys)
        run(mpirun, 2, tmp_path / name)
        for line in read_json_lines(tmp_path / name / "runs/run/metrics.jsonl"):
            assert always | more <= line.keys()
            assert not line.keys() & ({"rows_saved", "tokens_saved", "changed_ranks"} - more)
            assert line["allgathers"] == gathers
            assert line["batch"] == [5, 6, 8][line["generation"]]
            assert line["noise"] >= 0 and line["signal"] >= 0
            assert line["signal_to_noise"] == ((line["signal"] / line["noise"]) ** 2 if line["noise"] else None)
            beside = (line["batch"] if line["generation"] == 0 else 0) + line["validation_rows"]
            if name == "racing":
                assert line["completions"] == 7 * line["batch"] - line["rows_saved"] + beside
                assert line["tokens_saved"] == 3 * line["rows_saved"]       # three tokens a completion here
            if name == "reevaluate":
                assert line["completions"] == (7 + 3) * line["batch"] + beside - 3 * max(0, 2 * line["batch"] - 17)
                assert 0 <= line["changed_ranks"] <= 2.25


@pytest.mark.parametrize("keys, said", [
    ({"sigma": 1e-30}, r"^warning: generation 0 is flat: every candidate scored \d+\.\d+, as the warm start; .* sigma = 2e-30 or more"),
    ({"sigma": 1000.0}, r"^warning: generation 0 is dead: the best candidate scored -\d+.*Narrow it: sigma = 500 or less"),
    ({"sigma": 0.01}, None),
])
def test_the_first_generation_says_whether_sigma_fits(mpirun, tmp_path, keys, said):
    write_run(tmp_path, generations=2, **keys)
    outcome = run(mpirun, 2, tmp_path)
    found = [line for line in outcome.stdout.splitlines() if line.startswith("warning: generation ")]
    assert len(found) == (said is not None)
    assert said is None or re.search(said, found[0]), outcome.stdout
    run(mpirun, 1, tmp_path, "--resume", *sets(generations=3))      # once, not again by a resumed one


def test_auto_says_which_search_it_took(mpirun, folder):
    outcome = run(mpirun, 2, folder, *sets(search="auto", generations=2))
    assert "population 7 x 5 rows, search auto: fast (a full covariance of 0 MiB), mode shared" in outcome.stdout
    automatic = history(folder)
    outcome = run(mpirun, 2, folder, *sets(search="fast", generations=2))
    assert "population 7 x 5 rows, fast search, mode shared" in outcome.stdout
    assert history(folder) == automatic


# -- places ------------------------------------------------------------------------------------------------

@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("binding", [["-bind-to", "user:0,0"], []], ids=["both on core 0", "by the launcher"])
def test_two_ranks_have_different_cores(tmp_path, binding):
    """Also where the launcher bound both to the same one."""
    mpiexec = shutil.which("mpirun") or str(Path(sys.prefix) / "bin/mpirun")
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
    if binding and "HYDRA" not in version:
        pytest.skip("MPICH's option")
    code = ("import os; before = sorted(os.sched_getaffinity(0)); from essa_mpi.seat import take; s = take(); "
            "after = sorted(os.sched_getaffinity(0)); "
            "import json; json.dump([s.local_rank, before, after, os.environ['OMP_NUM_THREADS']], "
            "open(f'seat{s.local_rank}', 'w'))")     # two ranks' lines can mix on the way through mpirun
    # Under its own session and with a time limit; the fixture mpirun takes no options of mpirun's.
    environment = {k: v for k, v in os.environ.items() if k not in
                   ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS") and not k.startswith("PMI_")}
    done = subprocess.run(["timeout", "-k", "5", str(PATIENCE), mpiexec, "-n", "2", *binding, sys.executable, "-c", code],
                          capture_output=True, text=True, env={**environment, "PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seats = [json.loads((tmp_path / f"seat{rank}").read_text()) for rank in range(2)]
    assert [rank for rank, *_ in seats] == [0, 1]
    if binding:
        assert [before for _, before, *_ in seats] == [[0], [0]]
    assert seats[0][2] and seats[1][2] and not set(seats[0][2]) & set(seats[1][2])
    assert seats[0][3] == seats[1][3] == str(min(len(seats[0][2]), len(seats[1][2])))
