"""The package as a wheel: the kernels are in it, and work from there."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """A wheel built from a copy of the repository, unpacked into a folder that holds nothing else."""
    pytest.importorskip("setuptools", reason="no setuptools to build a wheel with")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "README.md", "LICENSE", "essa_mpi", "kernels"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("_build", "__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(folder), "."],
                   cwd=source, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    return folder / "unpacked"


def test_a_wheel_has_the_kernels_and_their_sources(unpacked):
    kernels = unpacked / "essa_mpi" / "kernels"
    have = {str(path.relative_to(kernels)) for path in kernels.rglob("*") if path.suffix in (".py", ".c", ".cu", ".h")}
    want = {str(path.relative_to(ROOT / "kernels")) for path in (ROOT / "kernels").rglob("*")
            if path.suffix in (".py", ".c", ".cu", ".h") and "_build" not in path.parts}
    assert have == want and {"cpu/shared_basis.c", "cuda/write_slots.cu"} <= have
    assert not (unpacked / "kernels").exists()      # it would pass for Hugging Face's package of that name


@pytest.mark.parametrize("from_root", [False, True])
def test_they_work_from_there(unpacked, tmp_path, from_root):
    """Also with the repository as the current folder, whose essa_mpi then comes first."""
    code = ("import essa_mpi.kernels.dispatch as d, essa_mpi.kernels.cpu_kernels as c, torch, transformers\n"
            "print(int(d.checksum(torch.ones(3))), c.library() is not None, d.__file__)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT if from_root else tmp_path, capture_output=True, text=True,
                          env={"PYTHONPATH": str(unpacked), "PATH": "/usr/bin:/bin", "ESSA_MPI_KERNELS_BUILD": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert str(ROOT if from_root else unpacked) in done.stdout
