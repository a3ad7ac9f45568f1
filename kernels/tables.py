"""The two flat tables: everything a launch needs to reach all layers and projections at once.

A table holds the addresses of the tensors it was made for, which is what lets one launch write to
hundreds of them; vLLM's CUDA graphs hold the same addresses. So the tensors must be written in
place for the whole run, never replaced; `write` and `apply` refuse if one has moved. Call them
eagerly, not from inside torch.compile, which may copy what an operator mutates.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import dispatch, layout
from .reference import cores  # noqa: F401  (the core of a candidate, for MergeTable.apply and shared_basis_)


def _float64(value, device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).to(device)


def _same(tensors: Sequence[Tensor], what: str):
    if not tensors:
        raise ValueError(f"{what} is empty")
    dtype, device = tensors[0].dtype, tensors[0].device
    for i, t in enumerate(tensors):
        if t.dtype != dtype or t.device != device:
            raise ValueError(f"{what}[{i}] is {t.dtype} on {t.device}, {what}[0] is {dtype} on {device}: "
                             f"one table holds one dtype and one device")
    if dtype not in dispatch.FLOATS:
        raise ValueError(f"{what} are {dtype}, needs one of {', '.join(map(str, dispatch.FLOATS))}")
    return dtype, device


def _moved(tensors: Sequence[Tensor], addresses: list[int], what: str):
    for i, (t, address) in enumerate(zip(tensors, addresses)):
        if t.data_ptr() != address:
            raise RuntimeError(f"{what}[{i}] has moved since the table was made: make a new table")


class SlotTable:
    """Writes candidates into LoRA slots: slot B[k] = scale U_B diag(s_B + d_B[k]) M diag(s_A + d_A[k]).

    slots: P tensors, vLLM's lora_b_stacked[s]: (max_loras, 1, m_p, max_lora_rank), float32,
        float16 or bfloat16, last dimension contiguous.
    u_b: P arrays (m_p, r_p), the rows that this tensor-parallel shard holds, any strides.
    m: P arrays (r_p, r_p), M = V_B^T U_A; s_a, s_b: P arrays (r_p,).
    scale: peft's alpha / r, one number or P numbers. vLLM expects it folded into B.

    Ranks below the largest are padded with zeros. Everything is kept in float32 on the slots' device.
    Raises ValueError for shapes, dtypes or strides that do not fit.
    """

    def __init__(self, slots: Sequence[Tensor], u_b, m, s_a, s_b, scale=1.0):
        dtype, device = _same(slots, "slots")
        targets = len(slots)
        for name, given in (("u_b", u_b), ("m", m), ("s_a", s_a), ("s_b", s_b)):
            if len(given) != targets:
                raise ValueError(f"{name} has {len(given)} entries, slots has {targets}")
        scales = torch.as_tensor(scale, dtype=torch.float64).expand(targets).tolist()
        ranks = [len(s) for s in s_a]
        self.rank, self.targets, self.slots = max(ranks), targets, list(slots)
        length = slots[0].shape[-1]
        width = layout.slot_width(self.rank, length)
        if self.rank > length or width & (width - 1):
            raise ValueError(f"rank {self.rank} does not fit rows of {length}; they must be as long as vLLM's "
                             f"max_lora_rank (1, 8, 16, 32, ...) and at least the rank")
        self._u_t = torch.zeros(self.rank, sum(s.shape[2] for s in slots), dtype=torch.float32, device=device)
        self._m = torch.zeros(targets, self.rank, width, dtype=torch.float32, device=device)
        self._s_a = torch.zeros(targets, width, dtype=torch.float32, device=device)
        self._s_b = torch.zeros(targets, self.rank, dtype=torch.float32, device=device)
        rows, self._vector, first = [], width >= 8, 0
        for p, (slot, r) in enumerate(zip(slots, ranks)):
            if slot.dim() != 4 or slot.shape[1] != 1 or slot.shape[3] != length or slot.stride(3) != 1:
                raise ValueError(f"slots[{p}] has shape {tuple(slot.shape)} and strides {slot.stride()}, needs "
                                 f"(slots, 1, m, {length}) with a contiguous last dimension")
            if slot.stride(2) < length or (slot.shape[0] > 1 and slot.stride(0) < slot.shape[2] * slot.stride(2)):
                raise ValueError(f"slots[{p}] has strides {slot.stride()}: its rows or slots overlap")
            count = slot.shape[2]
            for name, value, shape in (("u_b", u_b[p], (count, r)), ("m", m[p], (r, r)), ("s_b", s_b[p], (r,))):
                if tuple(value.shape) != shape:
                    raise ValueError(f"{name}[{p}] has shape {tuple(value.shape)}, needs {shape}")
            self._u_t[:r, first:first + count] = _float64(u_b[p], device).t()
            self._m[p, :r, :r] = _float64(m[p], device) * scales[p]
            self._s_a[p, :r] = _float64(s_a[p], device)
            self._s_b[p, :r] = _float64(s_b[p], device)
            rows.append([slot.data_ptr(), slot.stride(0), slot.stride(2), count, first, slot.shape[0]])
            self._vector &= slot.data_ptr() % 16 == 0 and slot.stride(0) % 8 == 0 and slot.stride(2) % 8 == 0
            first += count
        self._addresses = [row[0] for row in rows]
        self._table = torch.tensor(rows, dtype=torch.int64, device=device)
        self._tiles = layout.tiles([row[3] for row in rows], layout.slot_rows(width)).to(device)
        self._ids = {}
        self._slot_count = min(slot.shape[0] for slot in slots)

    def write(self, d_a: Tensor, d_b: Tensor, slot_ids: Sequence[int] | None = None) -> None:
        """Write K candidates, one launch.

        d_a, d_b: (K, P, r), offsets to the singular values; other dtypes and devices are converted
        to float32 there, and views such as x.view(K, P, 2, r)[:, :, 0] are read as they are.
        slot_ids: K different slots (default 0 .. K - 1); -1 skips a candidate. Columns up to the
        rank, rounded up to 8, are written (zeros beyond the rank); other slots are not touched.
        Raises ValueError for shapes or ids that do not fit, RuntimeError if a slot has moved.
        """
        _moved(self.slots, self._addresses, "slots")
        ids = tuple(range(len(d_a)) if slot_ids is None else slot_ids)
        if ids not in self._ids:
            used = [i for i in ids if i != -1]
            if len(set(used)) != len(used) or any(not 0 <= i < self._slot_count for i in used):
                raise ValueError(f"slot_ids = {list(ids)}: needs different numbers 0 .. {self._slot_count - 1}, or -1")
            self._ids[ids] = torch.tensor(ids, dtype=torch.int64, device=self._table.device)
        d_a, d_b = (d.to(self._table.device, torch.float32) for d in (d_a, d_b))
        torch.ops.essa_mpi.write_slots(self.slots, self._table, self._tiles, self._u_t, self._m, self._s_a,
                                       self._s_b, d_a, d_b, self._ids[ids], self._vector)

    @property
    def bytes_a_candidate(self) -> int:
        """Bytes that one candidate's slots take, without padding: the least that must be written."""
        return sum(s.shape[2] for s in self.slots) * self.rank * self.slots[0].element_size()

    @property
    def bytes_read(self) -> int:
        """Bytes of U_B, read once a call."""
        return self._u_t.numel() * 4


class MergeTable:
    """One candidate in the base weights: W = round(W_0 + U_B C V_A^T), always from the pristine W_0.

    weights, pristine: P tensors (m_p, n_p), float32, float16 or bfloat16, last dimension
        contiguous (rows of a fused qkv weight are fine); pristine[p] holds W_0 and is only read.
    u_b: P arrays (m_p, r_p); v_a: P arrays (n_p, r_p); any strides.

    Raises ValueError for shapes, dtypes or strides that do not fit, or weights that are pristine.
    """

    def __init__(self, weights: Sequence[Tensor], pristine: Sequence[Tensor], u_b, v_a):
        dtype, device = _same([*weights, *pristine], "weights and pristine")
        targets = len(weights)
        for name, given in (("pristine", pristine), ("u_b", u_b), ("v_a", v_a)):
            if len(given) != targets:
                raise ValueError(f"{name} has {len(given)} entries, weights has {targets}")
        ranks = [u.shape[1] for u in u_b]
        self.rank, self.targets = max(ranks), targets
        self.weights, self.pristine = list(weights), list(pristine)
        total_columns = sum(w.shape[1] + -w.shape[1] % 8 for w in weights)
        self._u_t = torch.zeros(self.rank, sum(w.shape[0] for w in weights), dtype=torch.float32, device=device)
        self._v_t = torch.zeros(self.rank, total_columns, dtype=torch.float32, device=device)
        rows, self._vector, row, column = [], True, 0, 0
        for p, (w, w_0, r) in enumerate(zip(weights, pristine, ranks)):
            if w.dim() != 2 or w_0.shape != w.shape:
                raise ValueError(f"weights[{p}] has shape {tuple(w.shape)}, pristine[{p}] {tuple(w_0.shape)}: "
                                 f"needs two of (m, n)")
            m, n = w.shape
            for name, t in (("weights", w), ("pristine", w_0)):
                if t.stride(1) != 1 or t.stride(0) < n:
                    raise ValueError(f"{name}[{p}] has strides {t.stride()}; rows must be contiguous and apart")
            if w.untyped_storage().data_ptr() == w_0.untyped_storage().data_ptr():
                raise ValueError(f"weights[{p}] and pristine[{p}] share memory: the pristine weights need their own")
            for name, value, shape in (("u_b", u_b[p], (m, r)), ("v_a", v_a[p], (n, r))):
                if tuple(value.shape) != shape:
                    raise ValueError(f"{name}[{p}] has shape {tuple(value.shape)}, needs {shape}")
            self._u_t[:r, row:row + m] = _float64(u_b[p], device).t()
            self._v_t[:r, column:column + n] = _float64(v_a[p], device).t()
            rows.append([w.data_ptr(), w_0.data_ptr(), w.stride(0), w_0.stride(0), m, n, row, column])
            self._vector &= n % 8 == 0 and all(t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 for t in (w, w_0))
            row, column = row + m, column + n + -n % 8
        self._addresses = [r[:2] for r in rows]
        self._table = torch.tensor(rows, dtype=torch.int64, device=device)
        heights, widths = [r[4] for r in rows], [r[5] for r in rows]
        self._row_tiles = layout.tiles(heights, layout.LEFT_ROWS).to(device)
        self._tiles = layout.tiles(heights, layout.merge_rows(self._vector), widths, layout.MERGE_COLUMNS).to(device)

    def apply(self, cores: Tensor, rounding: str = "nearest", seed: int = 0) -> None:
        """Put the candidate with these cores into the weights.

        cores: (P, r, r), scale * diag(s_B + d_B) M diag(s_A + d_A), zero-padded to the table's rank.
        rounding: "nearest" (to even), or "stochastic" (bfloat16 only): up or down with the
        probability that keeps the mean, a function of (seed, projection, row, column) alone, so
        that a small candidate is not rounded away. seed in [0, 2^64): the same for all candidates
        of a generation, so that they differ by more than their rounding.
        Raises ValueError for arguments that do not fit, RuntimeError if a weight has moved.
        """
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding = {rounding!r}; allowed: 'nearest', 'stochastic'")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed = {seed}; allowed: 0 <= seed < 2**64")
        self._check_addresses()
        torch.ops.essa_mpi.merged_apply(
            self.weights, self.pristine, self._table, self._row_tiles, self._tiles, self._u_t, self._v_t,
            cores.to(self._table.device, torch.float32).contiguous(), rounding == "stochastic",
            seed - (1 << 64) if seed >> 63 else seed, self._vector)

    def restore(self) -> None:
        """Put W_0 back, bit by bit: a copy. (Subtracting the update again would drift.)"""
        self._check_addresses()
        for w, w_0 in zip(self.weights, self.pristine):
            w.copy_(w_0)

    def _check_addresses(self):
        _moved(self.weights, [a[0] for a in self._addresses], "weights")
        _moved(self.pristine, [a[1] for a in self._addresses], "pristine")

    @property
    def bytes_moved(self) -> int:
        """One read and one write of every weight: the least that must be moved."""
        return 2 * sum(w.numel() * w.element_size() for w in self.weights)
