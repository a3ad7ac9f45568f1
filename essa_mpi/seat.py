"""Where a rank sits: its launcher, host, cores, threads and GPUs. Standard library and mpi4py only.

Called before numpy or torch are imported, since both read the thread counts, and CUDA
the visible devices, when they load.
"""

import glob
import itertools
import os
import platform
import re
import socket
import subprocess
import warnings
from dataclasses import dataclass

from .config import UserError

# Environment variables by which launchers announce their size and rank.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("PMIX_SIZE", "PMIX_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
)
# What launchers call a process's number on its host: Hydra and Intel, MVAPICH, Open MPI, PMI, Cray PALS, Flux, jsrun, Slurm.
# Slurm's last: below another launcher it is the batch script's own.
_LOCAL_RANKS = ("MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_LOCAL_RANK",
                "PALS_LOCAL_RANKID", "FLUX_TASK_LOCAL_ID", "JSM_NAMESPACE_LOCAL_RANK", "SLURM_LOCALID")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass
class Seat:
    """This rank's place. hosts, cpus: host and CPU model of every rank, (size,) each."""

    mpi: object           # the module mpi4py.MPI
    library: str          # which MPI mpi4py loaded
    hosts: list[str]
    cpus: list[str]
    local_rank: int       # among the ranks of this host
    local_size: int
    cores: list[int]      # this rank may run on
    gpus: list[str]       # of this rank's engine, as CUDA_VISIBLE_DEVICES names them; empty without GPUs
    crowded: bool = False # ranks of some host share cores


def check_launcher(size: int, library: str, environment=os.environ) -> None:
    """Raise UserError if the launcher announces more processes than COMM_WORLD has.

    That is mpi4py linked to another MPI than mpirun: every process believes it is alone.
    """
    announced = [(name, environment[name]) for name, _ in _LAUNCHERS if name in environment]
    if not announced and "SLURM_STEP_ID" in environment:   # outside a step SLURM_NTASKS is only what was asked for
        announced = [(n, environment[n]) for n in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if n in environment][:1]
    for name, value in announced:
        if value.isdigit() and int(value) > size:
            raise UserError(
                f"the launcher started {value} processes ({name}) but mpi4py sees {size}: it loaded another MPI "
                f"than mpirun's ({library}). Rebuild it with the MPI you run with: MPICC='mpicc -shared' "
                f"python -m pip install --force-reinstall --no-cache-dir --no-binary=mpi4py mpi4py")


def launcher_rank(environment=os.environ) -> int:
    """The rank the launcher gave this process, 0 if it gave none: who prints while MPI is not up."""
    for name in [rank for _, rank in _LAUNCHERS] + ["SLURM_PROCID"]:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return 0


def announced_local_rank(environment=os.environ) -> int | None:
    """The number the launcher gave this process on its host, None if it gave none."""
    return next((int(environment[name]) for name in _LOCAL_RANKS if environment.get(name, "").isdigit()), None)


def local_rank_of(rank: int, neighbours: list[int], announced: list[int | None]) -> int:
    """This rank's number on its host: the launcher's where its numbers are 0, 1, ... there, else by the order of ranks.

    neighbours: the ranks of the host. announced: (size,), by `announced_local_rank`.
    """
    theirs = [announced[r] for r in neighbours]
    if sorted(-1 if number is None else number for number in theirs) == list(range(len(neighbours))):
        return announced[rank]
    return neighbours.index(rank)


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def visible_gpus(environment=os.environ) -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES) names them, without touching CUDA."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if name in environment:
            return _named(environment[name])
    if "ROCR_VISIBLE_DEVICES" in environment:       # HIP counts from 0 those that it leaves
        return [str(i) for i in range(len(_named(environment["ROCR_VISIBLE_DEVICES"])))]
    found = [str(index) for index, _ in _listed()]
    if not found:
        count = len(glob.glob("/dev/nvidia[0-9]*")) or len(glob.glob("/dev/dri/renderD*")) * os.path.exists("/dev/kfd")
        found = [str(i) for i in range(count)]
    return found


def _named(text: str) -> list[str]:
    """What is listed before the first negative number: CUDA looks no further."""
    return list(itertools.takewhile(lambda g: not g.startswith("-"), filter(None, text.replace(" ", "").split(","))))


def _listed() -> list[tuple[int, str]]:
    """(index, UUID) of the NVIDIA GPUs of this host that this process's cgroup lets it see."""
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [(int(index), uuid) for index, uuid in re.findall(r"^GPU (\d+): .*\(UUID: (\S+)\)", said, re.M)]


def uuids(gpus: list[str]) -> list[str]:
    """Who these GPUs are, whatever this process calls them; "" where it cannot be told (AMD's, MIG slices)."""
    known = {str(index): uuid for index, uuid in _listed()} if gpus else {}
    return [gpu if gpu.startswith("GPU-") else known.get(gpu, "") for gpu in gpus]


def check_apart(hosts: list[str], engines: list[list[str]]) -> None:
    """Raise UserError if two ranks would put their engines on one GPU. engines: each rank's `uuids`."""
    seen = {}
    for rank, (host, gpus) in enumerate(zip(hosts, engines)):
        for gpu in filter(None, gpus):
            if (host, gpu) in seen:
                raise UserError(f"ranks {seen[host, gpu]} and {rank} on {host} are both bound to {gpu}: start a rank a GPU (Slurm: "
                                f"--gpus-per-task=1, or --gpu-bind=none so that each rank takes its own); or set share_gpus = "
                                f"true, with a gpu_memory_utilization that leaves the others room")
            seen[host, gpu] = rank


def choose_gpus(visible: list[str], local_rank: int, local_size: int, tensor_parallel: int) -> list[str]:
    """The GPUs of one rank's engine. Raises UserError if the split is not plain.

    Visible == tensor_parallel: the launcher gave this rank its own. Visible == local ranks x
    tensor_parallel: a slice of them. Anything else would put two engines on one GPU or leave some idle.
    """
    need = local_size * tensor_parallel
    if len(set(visible)) < len(visible):
        raise UserError(f"CUDA_VISIBLE_DEVICES names a GPU twice: {','.join(visible)}")
    if not visible:
        if tensor_parallel > 1:
            raise UserError(f"config: tensor_parallel = {tensor_parallel}: no GPU is visible; use 1 on a CPU")
        return []
    if len(visible) == tensor_parallel:
        return visible
    if len(visible) == need:
        return visible[local_rank * tensor_parallel:(local_rank + 1) * tensor_parallel]
    raise UserError(f"{local_size} ranks on this host x tensor_parallel = {tensor_parallel} ask for {need} GPUs but "
                    f"{len(visible)} are visible: start {max(1, len(visible) // tensor_parallel)} ranks a host, or let "
                    f"the launcher give each rank {tensor_parallel} (Slurm: --gpus-per-task={tensor_parallel})")


def take() -> Seat:
    """Start MPI, find this rank's seat and bind it to its cores and threads; GPUs come with `take_gpus`.

    Collective. Raises UserError if the launcher started more processes than MPI sees.
    """
    import mpi4py
    mpi4py.rc.thread_level = "funneled"   # only the main thread speaks MPI
    warnings.filterwarnings("ignore", "suspicious MPI execution environment")   # `check_launcher` says it in full
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    library = " ".join(MPI.Get_library_version().splitlines()[0].rstrip("\x00").split())
    check_launcher(comm.Get_size(), library)
    seats = comm.allgather((socket.gethostname(), cpu_model(), sorted(os.sched_getaffinity(0)), announced_local_rank()))
    hosts, cpus = [s[0] for s in seats], [s[1] for s in seats]
    neighbours = [r for r, host in enumerate(hosts) if host == hosts[comm.Get_rank()]]
    local_rank, local_size = local_rank_of(comm.Get_rank(), neighbours, [s[3] for s in seats]), len(neighbours)
    affinities = {local_rank_of(r, neighbours, [s[3] for s in seats]): seats[r][2] for r in neighbours}
    cores = _bind([affinities[number] for number in range(local_size)], local_rank)
    # One engine thread a core of ours, unless the user chose. Ranks that share a core take one each:
    # two OpenMP teams that spin on the same cores were seen to run ten times slower than two threads.
    # As many on every rank, or BLAS would round the search differently on hosts with more cores a rank.
    everybodys = comm.allgather(cores)
    for name in _THREADS:
        os.environ.setdefault(name, str(thread_count(hosts, everybodys)))
    return Seat(MPI, library, hosts, cpus, local_rank, local_size, cores, [], share_cores(hosts, everybodys))


def take_gpus(seat: Seat, tensor_parallel: int) -> None:
    """Let this process see its engine's GPUs and no others. Before torch is imported. Raises UserError."""
    seat.gpus = _numbers(choose_gpus(visible_gpus(), seat.local_rank, seat.local_size, tensor_parallel))
    if seat.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seat.gpus)
        if {"HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"} & set(os.environ) or os.path.exists("/dev/kfd"):
            os.environ["HIP_VISIBLE_DEVICES"] = ",".join(seat.gpus)     # or vLLM finds two that differ


def _numbers(gpus: list[str]) -> list[str]:
    """UUIDs as numbers, where nvidia-smi knows them: vLLM cannot read UUIDs."""
    known = {uuid: str(index) for index, uuid in _listed()} if any(g.startswith("GPU-") for g in gpus) else {}
    return [known.get(gpu, gpu) for gpu in gpus]


def spread(affinities: list[list[int]], local_rank: int, machine: list[int]) -> list[int]:
    """The cores of one rank, given what the launcher allowed each rank of this host.

    Left alone where the ranks are apart already. Some launchers bind several ranks to one
    core; and unbound engines on a small machine chase each other over its cores.
    """
    cores = sorted(set().union(*affinities))
    if sum(map(len, affinities)) == len(cores):
        return affinities[local_rank]
    if len(cores) < len(affinities):      # all were bound to too few: take the machine
        cores = machine
    each = len(cores) // len(affinities)
    return cores[local_rank * each:(local_rank + 1) * each] if each else cores


def thread_count(hosts: list[str], cores: list[list[int]]) -> int:
    """Threads of every rank: the fewest cores any has, or 1 if ranks of a host share cores. (size,) each."""
    return 1 if share_cores(hosts, cores) else min(map(len, cores))


def share_cores(hosts: list[str], cores: list[list[int]]) -> bool:
    """Whether any two ranks of a host may run on the same core. (size,) each."""
    taken = {}
    for host, some in zip(hosts, cores):
        taken.setdefault(host, []).extend(some)
    return any(len(set(all_cores)) < len(all_cores) for all_cores in taken.values())


def _bind(affinities, local_rank):
    try:
        os.sched_setaffinity(0, spread(affinities, local_rank, list(range(os.cpu_count()))))
    except OSError:                       # a container may forbid it; then the system schedules
        pass
    return sorted(os.sched_getaffinity(0))
