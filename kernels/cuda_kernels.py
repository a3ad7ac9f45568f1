"""The CUDA half: cuda/*.cu through a C interface (ctypes, data_ptr, the current stream).

`build` makes the library; where it is missing or older than its source, `available()` is False and
`why_not()` says so. Every function takes what `dispatch` has checked already.
"""

import ctypes
from ctypes import c_int32 as i32, c_int64 as i64, c_uint32 as u32, c_uint64 as u64, c_void_p as ptr

import torch

from . import build, layout

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

_SIGNATURES = {
    "essa_write_slots": [ptr, ptr, i32, ptr, i64, ptr, ptr, ptr, ptr, i64, i64, ptr, i64, i64, ptr,
                         i32, i32, i32, i32, i32, i32, i32, ptr],
    "essa_core_step": [ptr, i64, i64, i32, ptr, ptr, i32, ptr, i32, i32, i32, i32, ptr],
    "essa_expand": [ptr, i64, i32, ptr, i64, i64, i32, ptr, ptr, i32, ptr, i32, i32, i32, i32, i32,
                    i32, i32, i32, i32, ptr],
    "essa_merged_apply": [ptr, i32, i32, ptr, i32, i32, i32, ptr, ptr, i64, ptr, i64, ptr, ptr, i32, i32,
                          i32, u64, i32, ptr],
    "essa_checksum": [ptr, i64, ptr, ptr],
    "essa_normals": [ptr, ptr, i64, i64, i64, u32, u32, u64, ptr],
}

_library = None
_why_not = "not looked for yet"


def load(path=None):
    """Load a library (default: the one `build` makes).

    Raises OSError if it cannot be loaded, RuntimeError if it was made from other sources.
    """
    global _library, _why_not
    path = path or build.library_path()
    library = ctypes.CDLL(str(path))
    library.essa_source_digest.restype = library.essa_error.restype = ctypes.c_char_p
    if library.essa_source_digest().decode() != build.source_digest():
        raise RuntimeError(f"{path} was built from other sources; build it again: python -m essa_mpi.kernels.build")
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
        getattr(library, name).restype = ctypes.c_int
    _library, _why_not = library, ""
    return library


def unload():
    """Forget the library, so that the next call looks for it again."""
    global _library, _why_not
    _library, _why_not = None, "not looked for yet"


def available() -> bool:
    """Whether the library is there; looks for it once."""
    global _why_not
    if _library is None and _why_not == "not looked for yet":
        if not build.library_path().is_file():
            _why_not = f"no {build.library_path()}; build it: python -m essa_mpi.kernels.build"
        else:
            try:
                load()
            except (OSError, RuntimeError) as error:
                _why_not = str(error)
    return _library is not None


def why_not() -> str:
    """Why the library is not in use; empty if it is."""
    available()
    return _why_not


def _call(name, device, *arguments):
    if not available():
        raise RuntimeError(f"CUDA kernels: {_why_not}")
    if bool(_library.essa_for_gpu()) != (device.type == "cuda"):
        raise RuntimeError(f"CUDA kernels: this library was built for the {'GPU' if _library.essa_for_gpu() else 'CPU'}"
                           f" but the tensors are on {device}")
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    status = getattr(_library, name)(*arguments, stream)
    if status:
        raise RuntimeError(f"CUDA kernels: {name}: {_library.essa_error(status).decode()}")


def _at(tensor):
    return None if tensor is None else tensor.data_ptr()


def write_slots(slots, table, tiles, u_t, m, s_a, s_b, d_a, d_b, slot_ids, vector):
    candidates, _, rank = d_a.shape
    width = m.shape[2]
    _call("essa_write_slots", u_t.device, _at(table), _at(tiles), len(tiles), _at(u_t), u_t.shape[1], _at(m),
          _at(s_a), _at(s_b), _at(d_a), d_a.stride(0), d_a.stride(1), _at(d_b), d_b.stride(0), d_b.stride(1),
          _at(slot_ids), candidates, rank, width, layout.slot_rows(width), layout.SLOT_GROUP,
          TYPES[slots[0].dtype], vector)


def core_step(h, cores, idx):
    tokens, slices, rank = h.shape
    g = torch.empty(tokens, slices, rank, dtype=torch.float32, device=h.device)
    if tokens:
        _call("essa_core_step", h.device, _at(h), h.stride(0), h.stride(1), TYPES[h.dtype], _at(cores), _at(idx),
              idx.dtype == torch.int64, _at(g), tokens, len(cores), slices, rank)
    return g


def _expand(out, h, cores, idx, u_t, rows):
    tokens, slices, rank = h.shape
    if not tokens:
        return
    vector = (out.data_ptr() % 16 == 0 and u_t.data_ptr() % 16 == 0 and out.stride(0) % 8 == 0
              and all(r % 8 == 0 for r in rows))
    padded = list(rows) + [0] * (3 - len(rows))
    _call("essa_expand", out.device, _at(out), out.stride(0), TYPES[out.dtype], _at(h), h.stride(0), h.stride(1),
          TYPES[h.dtype], _at(cores), _at(idx), idx is not None and idx.dtype == torch.int64, _at(u_t),
          TYPES[u_t.dtype], tokens, 0 if cores is None else len(cores), slices, rank, *padded, vector)


def expand_add_(out, g, u_t, rows):
    _expand(out, g, None, None, u_t, rows)


def shared_basis_(out, h, cores, idx, u_t, rows):
    _expand(out, h, cores, idx, u_t, rows)


def merged_apply(weights, pristine, table, row_tiles, tiles, u_t, v_t, cores, stochastic, seed, vector):
    left = torch.empty_like(u_t)
    _call("essa_merged_apply", u_t.device, _at(row_tiles), len(row_tiles), layout.LEFT_ROWS, _at(tiles), len(tiles),
          layout.merge_rows(vector), layout.MERGE_COLUMNS, _at(table), _at(u_t), u_t.shape[1], _at(v_t), v_t.shape[1],
          _at(cores), _at(left), u_t.shape[0], TYPES[weights[0].dtype], stochastic, seed % (1 << 64), vector)


def checksum(words):
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if words.numel():
        _call("essa_checksum", words.device, _at(words), words.numel(), _at(total))
    return total


def normals_(out, seed, generation, candidates, stream):
    if out.numel():
        _call("essa_normals", out.device, _at(out), _at(candidates), out.shape[0], out.shape[1], out.stride(0),
              generation, stream, seed % (1 << 64))
