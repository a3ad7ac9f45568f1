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


def library() -> ctypes.CDLL:
    """The compiled library, built first if it is not there.

    Raises FileNotFoundError without a C compiler, RuntimeError if it fails or what it made cannot
    be loaded; each time, having tried once.
    """
    found = _library()
    if isinstance(found, Exception):
        raise found
    return found


@functools.cache
def _library() -> ctypes.CDLL | Exception:
    path = build.cpu_library_path()
    fresh = not path.exists()
    try:
        if fresh:
            build.build_cpu(path)
        # Undefined on purpose: the OpenMP runtime. It is the one that torch has loaded already, so that
        # there are not two teams of threads.
        found = ctypes.CDLL(str(path))
    except (FileNotFoundError, RuntimeError) as error:
        return error
    except OSError as error:    # a folder mounted noexec; a compiler with an OpenMP of its own
        if fresh:
            path.unlink(missing_ok=True)
        return RuntimeError(f"{path} cannot be loaded: {error}; name gcc with CC, or another folder with ESSA_MPI_KERNELS_BUILD")
    found.essa_shared_basis.argtypes = [ctypes.POINTER(_Layer), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    found.essa_shared_basis.restype = None
    return found


class _Layer(ctypes.Structure):
    """struct layer of cpu/shared_basis.c."""

    _fields_ = ([(name, ctypes.c_void_p) for name in ("cores", "index", "u", "rows")]
                + [(name, ctypes.c_int64) for name in ("ldu", "ldh", "ldo")]
                + [(name, ctypes.c_int32) for name in ("slices", "rank", "type")])


class SharedBasis:
    """out[t] += (h[t] core[index[t]]^T) U_B^T in place for one layer, all else bound.

    cores_t: float32 (K, S, r, r), each core transposed; index: int64, as many as a step may have
    tokens, each below K (not checked), negative for no candidate; u_t: (r, m), U_B of all S slices
    transposed; rows: output columns of each slice; width: columns of h; dtype: of out and h, float32
    or bfloat16. cores_t and index are read at each call, where they are now. Raises ValueError for
    what does not fit, and what `library` raises.
    """

    def __init__(self, cores_t: Tensor, index: Tensor, u_t: Tensor, rows: list[int], width: int, dtype: torch.dtype):
        _, slices, rank, _ = cores_t.shape
        if rank > MAX_RANK or cores_t.shape[3] != rank or u_t.shape != (rank, sum(rows)) or len(rows) != slices or width < slices * rank:
            raise ValueError(f"cores_t {tuple(cores_t.shape)}, u_t {tuple(u_t.shape)}, rows {rows} and width {width} do not fit, "
                             f"or the rank is above {MAX_RANK}")
        for name, tensor, needs in (("cores_t", cores_t, torch.float32), ("index", index, torch.int64)):
            if tensor.dtype != needs or not tensor.is_contiguous() or tensor.is_cuda:
                raise ValueError(f"{name} is {tensor.dtype} on {tensor.device} with strides {tensor.stride()}: needs "
                                 f"contiguous {needs} on the CPU")
        pieces = [torch.nn.functional.pad(piece, (0, -piece.shape[1] % LANES)) for piece in u_t.float().split(rows, 1)]
        u, counts = torch.cat(pieces, 1).contiguous(), (ctypes.c_int64 * slices)(*rows)
        self._held = cores_t, index, u, counts     # the structure holds their addresses
        self._layer = _Layer(cores_t.data_ptr(), index.data_ptr(), u.data_ptr(), ctypes.addressof(counts), u.shape[1],
                             width, sum(rows), slices, rank, TYPES[dtype])
        self._columns, self._width, self._dtype, self._most = sum(rows), width, dtype, len(index)
        self._call, self._pointer = library().essa_shared_basis, ctypes.pointer(self._layer)

    def __call__(self, out: Tensor, h: Tensor) -> Tensor:
        """out: (T, m); h: (T, width), S r values a token in front; both contiguous. Returns out."""
        tokens, columns = out.shape
        if not (columns == self._columns and h.shape == (tokens, self._width) and tokens <= self._most
                and out.dtype == h.dtype == self._dtype and out.is_contiguous() and h.is_contiguous()):
            raise ValueError(f"out {tuple(out.shape)} {out.stride()} {out.dtype}, h {tuple(h.shape)} {h.stride()} {h.dtype}: "
                             f"needs contiguous {self._dtype} (T, {self._columns}) and (T, {self._width}), T <= {self._most}")
        self._call(self._pointer, out.data_ptr(), h.data_ptr(), tokens)
        return out
