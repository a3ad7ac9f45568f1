"""The CPU half: one kernel, the shared basis, for engines that decode on CPUs.

cpu/shared_basis.c, compiled by the machine's C compiler when it is first wanted (build.py). It is
called directly and not through a torch operator, whose call would cost as much as the kernel.
"""

import ctypes
import functools

import torch
from torch import Tensor

from . import build
from .layout import MAX_RANK

TYPES = {torch.float32: 0, torch.bfloat16: 1}
LANES = 16      # each slice of U_B is padded to a multiple of these


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled library, built first if it is not there. Raises FileNotFoundError without a C compiler, RuntimeError if it fails."""
    path = build.cpu_library_path()
    if not path.exists():
        build.build_cpu(path)
    # Undefined on purpose: the OpenMP runtime. It is the one that torch has loaded already, so that
    # there are not two teams of threads.
    found = ctypes.CDLL(str(path))
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    found.essa_shared_basis.argtypes = [pointer, i64, pointer, i64, pointer, i64, pointer, pointer, i64, i64, i32, i32,
                                        pointer, i32]
    found.essa_shared_basis.restype = None
    return found


class SharedBasis:
    """out[t] += (h[t] core[idx[t]]^T) U_B^T in place for one layer, its constants bound.

    cores_t: float32 (K, S, r, r) contiguous, each core transposed; u_t: (r, m), U_B of all S slices
    transposed; rows: output columns of each slice. The tensors are read at each call, where they are.
    Raises ValueError for what does not fit, and what `library` raises.
    """

    def __init__(self, cores_t: Tensor, u_t: Tensor, rows: list[int]):
        _, slices, rank, width = cores_t.shape
        if rank > MAX_RANK or rank != width or u_t.shape != (rank, sum(rows)) or len(rows) != slices:
            raise ValueError(f"cores_t {tuple(cores_t.shape)}, u_t {tuple(u_t.shape)} and rows {rows} do not fit, or rank > {MAX_RANK}")
        if cores_t.dtype != torch.float32 or not cores_t.is_contiguous() or cores_t.is_cuda:
            raise ValueError(f"cores_t is {cores_t.dtype} on {cores_t.device} with strides {cores_t.stride()}: needs contiguous float32 on the CPU")
        pieces = [torch.nn.functional.pad(piece, (0, -piece.shape[1] % LANES)) for piece in u_t.float().split(rows, 1)]
        self._u, self._cores = torch.cat(pieces, 1).contiguous(), cores_t
        self._rows = (ctypes.c_int64 * slices)(*rows)
        self._call = library().essa_shared_basis
        self._before = (cores_t.data_ptr(), slices * rank * rank)
        self._after = (slices, rank, self._rows)

    def __call__(self, out: Tensor, h: Tensor, idx: Tensor) -> Tensor:
        """out: (T, m) float32 or bfloat16; h: (T, >= S r), of out's type; idx: int64 (>= T,) contiguous, negative: no
        candidate, else below K (not checked). Both with contiguous rows. Returns out."""
        tokens = out.shape[0]
        if tokens > 1 and (out.stride(1) != 1 or h.stride(1) != 1) or h.dtype != out.dtype or h.shape[0] != tokens:
            raise ValueError(f"out {tuple(out.shape)} {out.stride()} {out.dtype}, h {tuple(h.shape)} {h.stride()} {h.dtype}: do not fit")
        self._call(out.data_ptr(), out.stride(0), h.data_ptr(), h.stride(0), *self._before, idx.data_ptr(),
                   self._u.data_ptr(), self._u.shape[1], tokens, *self._after, TYPES[out.dtype])
        return out
