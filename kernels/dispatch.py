"""One door to the three implementations: CUDA, then Triton, then the reference.

Each operation is a torch custom operator `essa_mpi::name` (so it may sit in a compiled graph and
be checked by torch.library.opcheck) that checks its arguments and hands them to the backend of
its tensors. `auto` takes, on a GPU, the CUDA library if it is built, else Triton; on a CPU, or
for ranks above layout.MAX_RANK, the reference. The environment variable ESSA_MPI_KERNELS, or
`forced(name)` in a with statement, names one: auto, cuda, triton or reference.

write_slots and merged_apply take prepared tables: use tables.SlotTable and tables.MergeTable.
"""

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from . import layout, reference

NAMES = ("auto", "cuda", "triton", "reference")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_forced = None


@contextlib.contextmanager
def forced(name: str):
    """Within the with statement every operation runs on this backend."""
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def backend_name(device: torch.device, rank: int = 1) -> str:
    """cuda, triton or reference: what an operation on this device with this LoRA rank runs on.

    Raises ValueError for an unknown name in ESSA_MPI_KERNELS, or a rank that the named one lacks.
    """
    name = _forced or os.environ.get("ESSA_MPI_KERNELS") or "auto"
    if name not in NAMES:
        raise ValueError(f"ESSA_MPI_KERNELS = {name}; allowed: {', '.join(NAMES)}")
    if name in ("cuda", "triton") and rank > layout.MAX_RANK:
        raise ValueError(f"rank = {rank}: the {name} kernels take ranks up to {layout.MAX_RANK}; use auto or reference")
    if name != "auto":
        return name
    if device.type != "cuda" or rank > layout.MAX_RANK:
        return "reference"
    from . import cuda_kernels
    if cuda_kernels.available() and torch.cuda.get_device_capability(device) >= (8, 0):
        return "cuda"
    return "triton" if importlib.util.find_spec("triton") else "reference"


def _run(operation: str, tensor: Tensor, rank: int, *arguments):
    """Calls the backend's function on the tensor's device."""
    name = backend_name(tensor.device, rank)
    module = importlib.import_module(f".{name}_kernels" if name != "reference" else ".reference", __package__)
    on_device = torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
    with on_device:
        return getattr(module, operation)(*arguments)


def _need(condition: bool, message: str):
    if not condition:
        raise ValueError(message)


def _check(name: str, tensor: Tensor, shape: tuple, dtypes: tuple, like: Tensor, contiguous: bool = True):
    """shape: an int must match, None may be anything. Raises ValueError naming what is allowed."""
    fits = tensor.dim() == len(shape) and all(want in (None, have) for want, have in zip(shape, tensor.shape))
    wanted = "(" + ", ".join("any" if s is None else str(s) for s in shape) + ")"
    _need(fits, f"{name} has shape {tuple(tensor.shape)}, needs {wanted}")
    _need(tensor.dtype in dtypes, f"{name} is {tensor.dtype}, needs {' or '.join(map(str, dtypes))}")
    _need(tensor.device == like.device, f"{name} is on {tensor.device}, needs {like.device}")
    if contiguous:
        _need(tensor.is_contiguous(), f"{name} has strides {tensor.stride()} and must be contiguous; "
                                      f"torch.linalg.qr and .t() give column-major tensors: call .contiguous()")
    else:
        _need(tensor.shape[-1] <= 1 or tensor.stride(-1) == 1,
              f"{name} has strides {tensor.stride()}; its last dimension must be contiguous: call .contiguous()")


# -------------------------------------------------------------------------------- write_slots

@torch.library.custom_op("essa_mpi::write_slots", mutates_args=("slots",), device_types=("cpu", "cuda"))
def _write_slots(slots: Sequence[Tensor], table: Tensor, tiles: Tensor, u_t: Tensor, m: Tensor, s_a: Tensor,
                 s_b: Tensor, d_a: Tensor, d_b: Tensor, slot_ids: Tensor, vector: bool) -> None:
    """slot B[slot_ids[k]] = U_B diag(s_B + d_B[k]) M diag(s_A + d_A[k]), all targets in one launch.

    slots: P tensors (slots, 1, m_p, row length); d_a, d_b: float32 (K, P, r), last dimension
    contiguous; slot_ids: int64 (K,), ids outside the stack are skipped; the rest is SlotTable's.
    """
    targets, rank, width = m.shape
    f32 = (torch.float32,)
    _check("d_a", d_a, (None, targets, rank), f32, u_t, contiguous=False)
    _check("d_b", d_b, (d_a.shape[0], targets, rank), f32, u_t, contiguous=False)
    _check("slot_ids", slot_ids, (d_a.shape[0],), (torch.int64,), u_t)
    _check("s_a", s_a, (targets, width), f32, u_t)
    _check("s_b", s_b, (targets, rank), f32, u_t)
    _check("u_t", u_t, (rank, None), f32, u_t)
    _check("m", m, (targets, rank, width), f32, u_t)
    if d_a.shape[0]:
        _run("write_slots", u_t, rank, list(slots), table, tiles, u_t, m, s_a, s_b, d_a, d_b, slot_ids, vector)


@_write_slots.register_fake
def _(slots, table, tiles, u_t, m, s_a, s_b, d_a, d_b, slot_ids, vector):
    return None


# ------------------------------------------------------------------------------- shared basis

@torch.library.custom_op("essa_mpi::core_step", mutates_args=(), device_types=("cpu", "cuda"))
def _core_step(h: Tensor, cores: Tensor, idx: Tensor) -> Tensor:
    _check_basis(h, cores, idx, h)
    return _run("core_step", h, h.shape[2], h, cores, idx)


@_core_step.register_fake
def _(h, cores, idx):
    return h.new_empty(h.shape, dtype=torch.float32)


@torch.library.custom_op("essa_mpi::expand_add_", mutates_args=("out",), device_types=("cpu", "cuda"))
def _expand_add_(out: Tensor, g: Tensor, u_t: Tensor, rows: Sequence[int]) -> None:
    _check_expand(out, g, u_t, rows)
    _run("expand_add_", out, g.shape[2], out, g, u_t, list(rows))


@_expand_add_.register_fake
def _(out, g, u_t, rows):
    return None


@torch.library.custom_op("essa_mpi::shared_basis_", mutates_args=("out",), device_types=("cpu", "cuda"))
def _shared_basis_(out: Tensor, h: Tensor, cores: Tensor, idx: Tensor, u_t: Tensor, rows: Sequence[int]) -> None:
    _check_basis(h, cores, idx, out)
    _check_expand(out, h, u_t, rows)
    _run("shared_basis_", out, h.shape[2], out, h, cores, idx, u_t, list(rows))


@_shared_basis_.register_fake
def _(out, h, cores, idx, u_t, rows):
    return None


def _check_basis(h, cores, idx, like):
    _check("h", h, (None, None, None), FLOATS, like, contiguous=False)
    tokens, slices, rank = h.shape
    _check("cores", cores, (None, slices, rank, rank), (torch.float32,), like)
    _need(cores.shape[0] > 0, "cores holds no candidate")
    _check("idx", idx, (tokens,), (torch.int32, torch.int64), like)


def _check_expand(out, h, u_t, rows):
    _check("out", out, (None, None), FLOATS, out, contiguous=False)
    _check("h", h, (out.shape[0], None, None), FLOATS, out, contiguous=False)
    _need(1 <= len(rows) <= 3 and len(rows) == h.shape[1],
          f"rows = {list(rows)}: one number a slice, 1 to 3 slices, and h has {h.shape[1]}")
    _need(all(r > 0 for r in rows) and sum(rows) == out.shape[1],
          f"rows = {list(rows)} must be positive and add up to the {out.shape[1]} columns of out")
    _check("u_t", u_t, (h.shape[2], out.shape[1]), FLOATS, out)
    _need(out.shape[0] <= 1 or out.stride(0) >= out.shape[1], f"out has strides {out.stride()}: its rows overlap")


def core_step(h: Tensor, cores: Tensor, idx: Tensor) -> Tensor:
    """g[t] = h[t] C^T with C = cores[idx[t]], the core of delta W = U_B C V_A^T.

    y = delta W x, so a token's row h = x V_A meets the core transposed; the same cores serve
    shared_basis_, MergeTable.apply and the slots.

    h: (T, r) or (T, S, r) with S packed slices, float32, float16 or bfloat16, last dimension
    contiguous; cores: float32 (K, r, r) or (K, S, r, r), contiguous; idx: int32 or int64 (T,),
    anything outside 0 .. K - 1 (-1, say) means no candidate. Returns float32 of h's shape, zero
    for tokens without a candidate. Raises ValueError for what does not fit.
    """
    if h.dim() == 2:
        return torch.ops.essa_mpi.core_step(h[:, None], cores[:, None], idx)[:, 0]
    return torch.ops.essa_mpi.core_step(h, cores, idx)


def expand_add_(out: Tensor, g: Tensor, u_t: Tensor, rows: Sequence[int] | None = None) -> Tensor:
    """out[t, slice s] += g[t, s] U_B^T of slice s, in place; float32 inside, rounded once.

    out: (T, m) float32, float16 or bfloat16, rows contiguous (a row stride is fine); g: (T, r) or
    (T, S, r); u_t: (r, m), U_B of all slices transposed, contiguous; rows: output columns of each
    slice (default: one slice). Returns out. Raises ValueError for what does not fit.
    """
    torch.ops.essa_mpi.expand_add_(out, g[:, None] if g.dim() == 2 else g, u_t, rows or [out.shape[1]])
    return out


def shared_basis_(out: Tensor, h: Tensor, cores: Tensor, idx: Tensor, u_t: Tensor,
                  rows: Sequence[int] | None = None) -> Tensor:
    """out[t] += (h[t] cores[idx[t]]^T) U_B^T in place, in one launch; h = x V_A is the caller's product.

    Arguments as in core_step and expand_add_. Tokens without a candidate keep every bit. A token's
    result does not depend on the rest of the batch. Captures into CUDA graphs: nothing is
    allocated and nothing waits.
    """
    if h.dim() == 2:
        h, cores = h[:, None], cores[:, None]
    torch.ops.essa_mpi.shared_basis_(out, h, cores, idx, u_t, rows or [out.shape[1]])
    return out


# ------------------------------------------------------------------------------- merged apply

@torch.library.custom_op("essa_mpi::merged_apply", mutates_args=("weights",), device_types=("cpu", "cuda"))
def _merged_apply(weights: Sequence[Tensor], pristine: Sequence[Tensor], table: Tensor, row_tiles: Tensor,
                  tiles: Tensor, u_t: Tensor, v_t: Tensor, cores: Tensor, stochastic: bool, seed: int,
                  vector: bool) -> None:
    """W = round(W_0 + U_B C V_A^T) for all targets. cores: float32 (P, r, r); the rest is MergeTable's."""
    rank = u_t.shape[0]
    _check("cores", cores, (len(weights), rank, rank), (torch.float32,), u_t)
    _check("v_t", v_t, (rank, None), (torch.float32,), u_t)
    _need(not stochastic or weights[0].dtype == torch.bfloat16,
          f"stochastic rounding is for bfloat16 weights, these are {weights[0].dtype}")
    _run("merged_apply", u_t, rank, list(weights), list(pristine), table, row_tiles, tiles, u_t, v_t, cores,
         stochastic, seed, vector)


@_merged_apply.register_fake
def _(weights, pristine, table, row_tiles, tiles, u_t, v_t, cores, stochastic, seed, vector):
    return None


# ----------------------------------------------------------------------------------- checksum

@torch.library.custom_op("essa_mpi::checksum", mutates_args=(), device_types=("cpu", "cuda"))
def _checksum(words: Tensor) -> Tensor:
    _check("words", words, (None,), (torch.int64,), words)
    return _run("checksum", words, 1, words)


@_checksum.register_fake
def _(words):
    return words.new_empty(())


def checksum(tensor: Tensor) -> Tensor:
    """A 64-bit checksum of a tensor's bits, as an int64 tensor () on its device: no waiting.

    The bits are read in logical order as 8-byte little-endian words, the last one padded with
    zeros: sum over i of mix(word_i + (i + 1) golden) mod 2^64, mix being SplitMix64's finaliser.
    Same bits, same sum, on every device and backend. It tells a changed tensor from an unchanged
    one of the same size; it is no cryptographic hash.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    padding = -flat.numel() % 8
    if padding or flat.data_ptr() % 8:   # 8-byte loads need 8-byte alignment
        flat = torch.cat([flat, flat.new_zeros(padding)])
    return torch.ops.essa_mpi.checksum(flat.view(torch.int64))


# ------------------------------------------------------------------------------ Philox normals

@torch.library.custom_op("essa_mpi::normals_", mutates_args=("out",), device_types=("cpu", "cuda"))
def _normals_(out: Tensor, seed: int, generation: int, candidates: Tensor, stream: int) -> None:
    _check("out", out, (None, None), (torch.float64,), out, contiguous=False)
    _check("candidates", candidates, (out.shape[0],), (torch.int64,), out)
    _run("normals_", out, 1, out, seed, generation, candidates, stream)


@_normals_.register_fake
def _(out, seed, generation, candidates, stream):
    return None


def normals_(out: Tensor, seed: int, generation: int, candidates: Sequence[int] | Tensor, stream: int = 0) -> Tensor:
    """Fill out with perturbation.population_normals(seed, generation, candidates, size), bit for bit.

    out: float64 (K, size), rows contiguous; seed in [0, 2^64); generation, candidates and stream
    in [0, 2^32). Returns out. Raises ValueError for a number out of its range.
    """
    for name, value, bits in (("seed", seed, 64), ("generation", generation, 32), ("stream", stream, 32)):
        _need(0 <= value < 1 << bits, f"{name} = {value}; allowed: 0 <= {name} < 2**{bits}")
    if not isinstance(candidates, Tensor):
        _need(all(0 <= c < 1 << 32 for c in candidates), f"candidates = {list(candidates)}; allowed: 0 <= c < 2**32")
        candidates = torch.tensor(list(candidates), dtype=torch.int64, device=out.device)
    signed = seed - (1 << 64) if seed >> 63 else seed   # an operator's int has 64 bits and a sign
    torch.ops.essa_mpi.normals_(out, signed, generation, candidates, stream)
    return out
