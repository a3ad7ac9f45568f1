"""The Triton half without a GPU: run in Triton's interpreter, and compiled for three GPUs to be read.

Compiling needs no GPU. What is read off the result: nothing spills, slots and weights are stored 16
bytes at a time, and the generator's float64 is never fused.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: kernels are interpreted in this process, not compiled", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from essa_mpi.kernels import layout, triton_kernels as kernels  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


def test_in_the_interpreter():
    """test_kernels.py with the Triton kernels on CPU tensors: the flag must be set before triton is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/test_kernels.py"], cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout


# -------------------------------------------------------------------------------- compile only

P32 = ("u_t", "m", "s_a", "s_b", "d_a", "d_b", "h", "cores", "g", "left", "v_t")
TYPES = {**dict.fromkeys(P32, "*fp32"), "table": "*i64", "tiles": "*i32", "slot_ids": "*i64", "idx": "*i32",
         "out": "*u16", "words": "*i64", "total": "*i64", "candidates": "i32"}   # everything else: i32


def write_slots(rank, width, vector=True, dtype=tl.bfloat16):
    return kernels.write_slots_kernel, dict(RANK=rank, WIDTH=width, ROWS=layout.slot_rows(width),
                                            GROUP=layout.SLOT_GROUP, DTYPE=dtype, VECTOR=vector), {}


def core_step(rank):
    return kernels.core_step_kernel, dict(SLICES=3, RANK=rank, RANK_BLOCK=rank, BLOCK=32), {}


def expand(rank, unit=8, core=True):
    return kernels.expand_kernel, dict(SLICES=3, RANK=rank, RANK_BLOCK=rank, CORE=core, TOKENS=16, COLUMNS=64,
                                       DTYPE=tl.bfloat16, U_DTYPE=tl.float32, UNIT=unit), {}


def left(rank):
    return kernels.left_kernel, dict(RANK=rank, COLUMNS=rank, ROWS=layout.LEFT_ROWS), {}


def merged(rank, stochastic=False, vector=True):
    return kernels.merged_kernel, dict(RANK=rank, ROWS=layout.merge_rows(vector), COLUMNS=layout.MERGE_COLUMNS,
                                       DTYPE=tl.bfloat16, VECTOR=vector, STOCHASTIC=stochastic), dict(num_warps=8)


def normals():
    return kernels.normals_kernel, dict(BLOCK=128), dict(enable_fp_fusion=False,
                                                         types={"out": "*fp64", "candidates": "*i64"})


def checksum():
    return kernels.checksum_kernel, dict(BLOCK=4096), {}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    yield
    if before is None:
        del os.environ["TRITON_CACHE_DIR"]
    else:
        os.environ["TRITON_CACHE_DIR"] = before


def compile_for(capability, kernel, constants, options):
    """The compiled kernel, with pointers 16-byte aligned as torch allocates them."""
    options = {"num_warps": 4, "enable_fp_fusion": True, **options}
    types = {**TYPES, **options.pop("types", {})}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*"}
    try:
        return triton.compile(ASTSource(kernel, signature, constants, aligned),
                              target=GPUTarget("cuda", capability, 32), options=options)
    except Exception as error:
        if re.search(rf"sm_{capability}\w* is not|not defined for option 'gpu-name'", str(error)):
            pytest.skip(f"this triton's ptxas cannot compile for sm_{capability}")
        raise


def machine_code(compiled, tmp_path):
    """(SASS text, resource usage text), by the cuobjdump in triton's wheel."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not cuobjdump.is_file():
        pytest.skip("triton's wheel has no cuobjdump to read the machine code with")
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    return [subprocess.run([cuobjdump, flag, cubin], capture_output=True, text=True, check=True).stdout
            for flag in ("-sass", "--dump-resource-usage")]


ALL = (80, 90, 100)
COMPILED = [  # what, its kernel, the GPUs, 16-byte stores of (16-bit) results?
    *[(f"write_slots r{r} {dtype}", write_slots(r, max(r, 8), dtype=dtype), gpus, True)
      for r, dtype, gpus in [(8, tl.bfloat16, ALL), (2, tl.bfloat16, (90,)), (16, tl.bfloat16, (90,)),
                             (32, tl.bfloat16, (90,)), (8, tl.float16, (90,)), (8, tl.float32, (90,))]],
    ("write_slots r1, rows of 1", write_slots(1, 1, vector=False), (90,), False),
    ("core_step r8", core_step(8), (90,), False),
    ("expand r8", expand(8), ALL, True),
    ("expand r32", expand(32), (90,), True),
    ("expand r8, odd sizes", expand(8, unit=1), (90,), False),
    ("expand r8, no core", expand(8, core=False), (90,), True),
    ("left r32", left(32), (90,), False),
    ("merged r8", merged(8), ALL, True),
    ("merged r8 stochastic", merged(8, stochastic=True), (90,), True),
    ("merged r32 stochastic", merged(32, stochastic=True), (90,), True),
    ("merged r8, odd sizes", merged(8, vector=False), (90,), False),
    ("checksum", checksum(), (90,), False),
    ("normals", normals(), ALL, False)]


@pytest.mark.parametrize("kernel, capability, wide_stores",
                         [pytest.param(kernel, gpu, wide, id=f"{name}-sm_{gpu}")
                          for name, kernel, gpus, wide in COMPILED for gpu in gpus])
def test_compiles(kernel, capability, wide_stores, tmp_path):
    compiled = compile_for(capability, *kernel)
    assert len(compiled.asm["ptx"]) and len(compiled.asm["cubin"])
    sass, usage = machine_code(compiled, tmp_path)
    assert re.search(r"STACK:0\b", usage) and re.search(r"LOCAL:0\b", usage), usage
    assert not re.search(r"\b(STL|LDL)\b", sass), "registers spill to local memory"
    if wide_stores:
        stores = re.findall(r"\bSTG\.E[.\w]*", sass)
        assert stores and all(s.startswith("STG.E.128") for s in stores), stores
    if kernel[0] is kernels.normals_kernel:
        ptx = compiled.asm["ptx"]
        assert "fma.rn.f64" not in ptx and "div.full" not in ptx and "approx" not in ptx
        assert "mul.rn.f64" in ptx and "add.rn.f64" in ptx and "div.rn.f64" in ptx and "sqrt.rn.f64" in ptx


@pytest.mark.parametrize("kernel", [pytest.param(k, id=name) for name, k in [
    ("write_slots", write_slots(1, 8)), ("core_step", core_step(1)), ("expand", expand(1)), ("left", left(1)),
    ("merged", merged(1)), ("checksum", checksum()), ("normals", normals())]])
def test_compiles_with_every_integer_1(kernel):
    """Triton turns an argument of 1 into a constant, which has no .to(): one token, one candidate must compile."""
    function, constants, options = kernel
    types = {**TYPES, **options.get("types", {})}
    integers = [p.name for p in function.params if p.name not in constants and not p.do_not_specialize
                and types.get(p.name, "i32") == "i32"]
    assert compile_for(90, function, {**constants, **dict.fromkeys(integers, 1)}, options).asm["cubin"]
