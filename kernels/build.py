"""Builds the CUDA half: `python -m essa_mpi.kernels.build`.

One shared library with a plain C interface, made by nvcc from cuda/*.cu into _build/ beside this
file (or the folder that ESSA_MPI_KERNELS_BUILD names). It links nothing of torch, so it fits any
torch, and it loads on a machine without a GPU. Without nvcc there is nothing to do: the Triton
half runs instead.

`python -m essa_mpi.kernels.build --host` compiles the same sources with the C++ compiler, as loops
over threads; the tests check the arithmetic with it.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "cuda"
ARCHITECTURES = (80, 90, 100, 120)   # an sm_80 binary serves 8.6 and 8.9 too


def build_folder() -> Path:
    """Where the library is built and looked for."""
    return Path(os.environ.get("ESSA_MPI_KERNELS_BUILD") or Path(__file__).resolve().parent / "_build")


def library_path(host: bool = False) -> Path:
    return build_folder() / ("libessa_host.so" if host else "libessa_kernels.so")


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


def _compile(command: list[str], output: Path, verbose: bool) -> tuple[Path, str]:
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.parent.name == "_build":
        (output.parent / ".gitignore").write_text("*\n")
    partial = output.with_name(f"{output.name}.{os.getpid()}")   # another rank never loads half a file
    command = command + [f'-DESSA_SOURCE_DIGEST="{source_digest()}"', *map(str, sorted(SOURCES.glob("*.cu"))),
                         "-o", str(partial)]
    if verbose:
        print(" ".join(command))
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout}{done.stderr}")
    partial.replace(output)
    return output, done.stdout + done.stderr


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m essa_mpi.kernels.build", description="Build the CUDA kernels.")
    parser.add_argument("--arch", type=int, action="append", metavar="NN",
                        help=f"compute capability without the dot; may repeat (default: {ARCHITECTURES})")
    parser.add_argument("--host", action="store_true", help="compile for the CPU instead, for tests")
    parser.add_argument("--verbose", action="store_true", help="print the compiler's command and ptxas's report")
    options = parser.parse_args(arguments)
    try:
        if options.host:
            print(f"built {build_host(verbose=options.verbose)}")
            return 0
        library, report = build(options.arch or ARCHITECTURES, verbose=options.verbose)
    except FileNotFoundError as error:
        print(f"CUDA kernels not built: {error}. Nothing is lost: the Triton kernels do the same work.")
        return 0
    except RuntimeError as error:
        print(f"CUDA kernels not built: {error}", file=sys.stderr)
        return 1
    if options.verbose:
        print(report)
    print(f"built {library}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
