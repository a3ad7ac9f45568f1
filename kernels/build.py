"""Builds the compiled halves: `python -m essa_mpi.kernels.build` for GPUs, `--cpu` for CPUs.

One shared library with a plain C interface, made by nvcc from cuda/*.cu into _build/ beside this
file (or the folder that ESSA_MPI_KERNELS_BUILD names). It links nothing of torch, so it fits any
torch, and it loads on a machine without a GPU. Without nvcc there is nothing to do: the Triton
half runs instead.

The CPU half is one C file, cpu/shared_basis.c. An engine on a CPU builds it in a second when it is
first wanted; `--cpu` does so beforehand, for compute nodes without a compiler.

`python -m essa_mpi.kernels.build --host` compiles the same sources with the C++ compiler, as loops
over threads; the tests check the arithmetic with it.
"""

import argparse
import contextlib
import hashlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "cuda"
CPU_SOURCE = Path(__file__).resolve().parent / "cpu" / "shared_basis.c"
ARCHITECTURES = (80, 90, 100, 120)   # an sm_80 binary serves 8.6 and 8.9 too


def build_folder() -> Path:
    """Where the library is built and looked for."""
    return Path(os.environ.get("ESSA_MPI_KERNELS_BUILD") or Path(__file__).resolve().parent / "_build")


def library_path(host: bool = False) -> Path:
    return build_folder() / ("libessa_host.so" if host else "libessa_kernels.so")


def cpu_library_path() -> Path:
    """Named after its source, so that a library older than that is never loaded."""
    digest = hashlib.blake2b(CPU_SOURCE.read_bytes(), digest_size=8).hexdigest()
    return build_folder() / f"libessa_cpu_{platform.machine()}_{digest}.so"


def source_digest() -> str:
    """A hash of cuda/*; it is compiled in, so that a library older than its source is recognised."""
    h = hashlib.blake2b(digest_size=8)
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cu", ".h"):
            h.update(path.name.encode() + b"\0" + path.read_bytes())
    return h.hexdigest()


def find_nvcc() -> str | None:
    """nvcc on PATH, or in CUDA_HOME, or in /usr/local/cuda."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [shutil.which("nvcc")] + [shutil.which("nvcc", path=f"{home}/bin") for home in homes if home]
    return next((c for c in candidates if c), None)


def supported(nvcc: str, architectures) -> list[int]:
    """Those of the architectures that this nvcc knows."""
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    return [a for a in architectures if f"compute_{a}\n" in known + "\n"]


def build(architectures=ARCHITECTURES, output: Path | None = None, verbose: bool = False) -> tuple[Path, str]:
    """Compile for GPUs. Returns (library, what ptxas said).

    Raises FileNotFoundError without nvcc, RuntimeError with the compiler's words if it fails or
    knows none of the architectures.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise FileNotFoundError("nvcc is not on PATH, in CUDA_HOME or in /usr/local/cuda")
    usable = supported(nvcc, architectures)
    if not usable:
        raise RuntimeError(f"{nvcc} knows none of the architectures {', '.join(f'sm_{a}' for a in architectures)}")
    flags = ["-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas", "-v"]
    for a in usable:
        flags += ["-gencode", f"arch=compute_{a},code=sm_{a}"]
    # PTX of the oldest: a GPU newer than all of these compiles it when the library is first used.
    flags += ["-gencode", f"arch=compute_{usable[0]},code=compute_{usable[0]}"]
    return _compile([nvcc, *flags], output or library_path(), verbose)


def build_host(output: Path | None = None, verbose: bool = False) -> Path:
    """Compile with the C++ compiler (CXX, else g++). Raises as `build` does."""
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler: g++ is not on PATH and CXX names none")
    # Contraction would fuse a*b + c and change the generator's bits.
    flags = ["-x", "c++", "-O2", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-fvisibility=hidden",
             "-Wall", "-Wextra", "-Werror"]
    return _compile([compiler, *flags], output or library_path(host=True), verbose)[0]


def build_cpu(output: Path | None = None, verbose: bool = False) -> Path:
    """Compile the CPU kernel with the C compiler (CC if set, else gcc, else cc). Raises as `build` does.

    Not linked to an OpenMP runtime: the one that torch has loaded serves it.
    """
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "cc"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise FileNotFoundError(f"no C compiler: {' and '.join(names)} not on PATH")
    output = output or cpu_library_path()
    try:
        with _partial(output) as partial, tempfile.TemporaryDirectory() as scratch:
            middle = f"{scratch}/shared_basis.o"
            _run([compiler, "-O3", "-std=gnu11", "-fopenmp", "-fPIC", "-Wno-psabi", "-c", str(CPU_SOURCE), "-o", middle], verbose)
            _run([compiler, "-shared", middle, "-o", str(partial)], verbose)
    except OSError as error:
        raise RuntimeError(f"{output} cannot be written: {error}; name another folder with ESSA_MPI_KERNELS_BUILD") from None
    return output


@contextlib.contextmanager
def _partial(output: Path):
    """A name to write under; it becomes `output` at the end, so that another rank never loads half a file."""
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.parent.name == "_build":
        (output.parent / ".gitignore").write_text("*\n")
    partial = output.with_name(f"{output.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        yield partial
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)


def _run(command: list[str], verbose: bool) -> str:
    """What the command says. Raises RuntimeError with that if it fails."""
    if verbose:
        print(" ".join(command))
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed with code {done.returncode}: {done.stdout}{done.stderr}".rstrip(": "))
    return done.stdout + done.stderr


def _compile(command: list[str], output: Path, verbose: bool) -> tuple[Path, str]:
    with _partial(output) as partial:
        said = _run(command + [f'-DESSA_SOURCE_DIGEST="{source_digest()}"', *map(str, sorted(SOURCES.glob("*.cu"))),
                               "-o", str(partial)], verbose)
    return output, said


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m essa_mpi.kernels.build", description="Build the compiled kernels.")
    parser.add_argument("--arch", type=int, action="append", metavar="NN",
                        help=f"compute capability without the dot; may repeat (default: {ARCHITECTURES})")
    parser.add_argument("--host", action="store_true", help="compile for the CPU instead, for tests")
    parser.add_argument("--cpu", action="store_true", help="build the CPU half")
    parser.add_argument("--verbose", action="store_true", help="print the compiler's command and ptxas's report")
    options = parser.parse_args(arguments)
    try:
        if options.host:
            print(f"built {build_host(verbose=options.verbose)}")
            return 0
        if options.cpu:
            print(f"built {build_cpu(verbose=options.verbose)}")
            return 0
        library, report = build(options.arch or ARCHITECTURES, verbose=options.verbose)
    except FileNotFoundError as error:
        print(f"kernels not built: {error}. Nothing is lost: "
              + ("plain dense products do the same work, slower." if options.cpu else "the Triton kernels do the same work."))
        return 0
    except RuntimeError as error:
        print(f"kernels not built: {error}", file=sys.stderr)
        return 1
    if options.verbose:
        print(report)
    print(f"built {library}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
