"""The CUDA half without a GPU: nvcc compiles it, nothing spills, and the library loads and says what it is.

Its arithmetic is checked in test_kernels.py, where g++ compiles the same source (`cuda-on-host`).
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from essa_mpi.kernels import build, cuda_kernels, dispatch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="no nvcc: the CUDA half cannot be compiled here")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """capability -> (library, what ptxas said), each compiled once."""
    done = {}

    def build_for(capability):
        if not build.supported(build.find_nvcc(), [capability]):
            pytest.skip(f"this nvcc does not know sm_{capability}")
        if capability not in done:
            done[capability] = build.build([capability], tmp_path_factory.mktemp("cuda") / "libessa_kernels.so")
        return done[capability]
    return build_for


@needs_nvcc
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow),
                                        pytest.param(100, marks=pytest.mark.slow)])
def test_nvcc_compiles_without_spills(capability, built):
    library, report = built(capability)
    assert len(re.findall(r"Function properties for (\S+)", report)) >= 40, report[-2000:]
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills and all(set(s) == {"0"} for s in spills), report


@needs_nvcc
def test_the_library_loads_without_a_gpu_and_refuses_cpu_tensors(built):
    loaded = cuda_kernels.load(built(90)[0])
    assert loaded.essa_for_gpu() == 1
    with dispatch.forced("cuda"), pytest.raises(RuntimeError, match="built for the GPU but the tensors are on cpu"):
        dispatch.checksum(torch.zeros(8))
    cuda_kernels.unload()


@needs_nvcc
def test_slots_and_weights_are_stored_16_bytes_at_a_time(built):
    triton = pytest.importorskip("triton", reason="no triton, whose wheel holds the cuobjdump to read machine code with")
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not cuobjdump.is_file():
        pytest.skip("triton's wheel has no cuobjdump to read machine code with")
    sass = subprocess.run([cuobjdump, "-sass", built(90)[0]], capture_output=True, text=True, check=True).stdout
    seen = 0
    for function in sass.split("Function : ")[1:]:
        name = function.split()[0]
        if re.search(r"(write_slots|merged|expand)_kernelI", name):
            stores = re.findall(r"\b(STG?\.E[.\w]*)", function)
            vector = "Lb1EEv" in name   # the template's last argument
            assert stores and all(s.startswith("STG.E.128") == vector for s in stores), (name, stores)
            seen += 1
    assert seen >= 30


@needs_nvcc
def test_the_generator_is_never_fused(tmp_path):
    ptx = tmp_path / "normals.ptx"
    capability = build.supported(build.find_nvcc(), build.ARCHITECTURES)[0]
    subprocess.run([build.find_nvcc(), "-O3", "-std=c++17", "-ptx", f"-arch=compute_{capability}",
                    build.SOURCES / "normals.cu", "-o", ptx], check=True)
    text = ptx.read_text()
    assert "fma.rn.f64" not in text
    assert "mul.rn.f64" in text and "add.rn.f64" in text and "div.rn.f64" in text and "sqrt.rn.f64" in text


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_library_of_other_sources_is_refused(tmp_path):
    source, library = tmp_path / "old.cpp", tmp_path / "libessa_kernels.so"
    source.write_text('extern "C" const char* essa_source_digest() { return "old"; }\n'
                      'extern "C" const char* essa_error(int) { return ""; }\n')
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    with pytest.raises(RuntimeError, match="built from other sources; build it again: python -m essa_mpi.kernels.build"):
        cuda_kernels.load(library)
    cuda_kernels.unload()


def test_build_says_in_one_line_that_nvcc_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    assert build.main([]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "kernels not built" in out and "Triton" in out


def test_without_a_library_the_reason_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("ESSA_MPI_KERNELS_BUILD", str(tmp_path))
    cuda_kernels.unload()
    assert not cuda_kernels.available()
    assert "python -m essa_mpi.kernels.build" in cuda_kernels.why_not()
    cuda_kernels.unload()


def test_imports_without_triton_and_without_shadowing_anything():
    """The CPU install has no triton; and from the repository root `kernels` is not this folder's business."""
    code = ("import sys; sys.modules['triton'] = None\n"
            "import torch\n"
            "from essa_mpi.kernels import dispatch, tables, build, cuda_kernels\n"
            "print(int(dispatch.checksum(torch.zeros(3))))\n"
            "import importlib.util\n"
            "spec = importlib.util.find_spec('kernels')\n"
            "assert spec is None or spec.origin is None or 'site-packages' in spec.origin, spec\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
