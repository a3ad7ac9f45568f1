"""ESSA under MPI: CMA-ES over the singular values of LoRA factors (arXiv 2507.04453)."""

__version__ = "0.1.0"
