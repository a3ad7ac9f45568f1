"""The Triton half: the same operations as `reference`, for any GPU that Triton compiles for.

Every function takes what `dispatch` has checked already and launches on the current stream.
With TRITON_INTERPRET=1 in the environment (set before the first import of triton) the kernels
run on CPU tensors, which is how the tests exercise them without a GPU.

Three habits, each for a reason:
- fp32 -> bf16 is done with integers (`_bf16_bits`): the interpreter's own cast truncates.
- float64 literals meet a float64 tensor in + - x / at once: assigned to a name, or compared with
  (before Triton 3.9), a literal becomes float32. So `x - 0.425 > 0`, not `x > 0.425`; the sign of a
  difference is exact.
- `enable_fp_fusion` is given at every launch, because its default changes between Triton versions.
"""

import torch
import triton
import triton.language as tl

from .. import perturbation
from . import layout

# The generator's constants come from its authority, so that there is one copy of them.
CENTRE_NUMERATOR = tl.constexpr(perturbation._CENTRE_NUMERATOR)
CENTRE_DENOMINATOR = tl.constexpr(perturbation._CENTRE_DENOMINATOR)
TAIL_NUMERATOR = tl.constexpr(perturbation._TAIL_NUMERATOR)
TAIL_DENOMINATOR = tl.constexpr(perturbation._TAIL_DENOMINATOR)
FAR_NUMERATOR = tl.constexpr(perturbation._FAR_NUMERATOR)
FAR_DENOMINATOR = tl.constexpr(perturbation._FAR_DENOMINATOR)
ATANH = tl.constexpr(perturbation._ATANH)
LN2_HIGH = tl.constexpr(perturbation._LN2_HIGH)
LN2_LOW = tl.constexpr(perturbation._LN2_LOW)
SQRT2 = tl.constexpr(perturbation._SQRT2)

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


# --------------------------------------------------------------------------------- rounding

@triton.jit
def _bf16_bits(x):
    """float32 -> the 16 bits of bfloat16, round to nearest even; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def _bf16_bits_stochastic(x, noise):
    """float32 -> bfloat16 bits: up with the probability of the discarded part. noise: 16 bits."""
    rounded = (x.to(tl.uint32, bitcast=True) + noise) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def _store(pointers, x, mask, DTYPE: tl.constexpr):
    """Stores float32 x as DTYPE; bfloat16 pointers arrive as uint16 pointers."""
    if DTYPE == tl.bfloat16:
        tl.store(pointers, _bf16_bits(x), mask=mask)
    else:
        tl.store(pointers, x.to(DTYPE), mask=mask)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """An int64 address as a pointer; VECTOR promises 16-byte alignment."""
    if DTYPE == tl.bfloat16:
        pointer = address.to(tl.pointer_type(tl.uint16))
    else:
        pointer = address.to(tl.pointer_type(DTYPE))
    if VECTOR:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load(pointers, mask, DTYPE: tl.constexpr):
    """Loads DTYPE as float32; bfloat16 pointers arrive as uint16 pointers."""
    x = tl.load(pointers, mask=mask, other=0)
    if DTYPE == tl.bfloat16:
        return (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


# ------------------------------------------------------------------------------- write_slots

@triton.jit
def write_slots_kernel(table, tiles, u_t, m, s_a, s_b, d_a, d_b, slot_ids,
                       candidates, total_rows, a_stride_k, a_stride_p, b_stride_k, b_stride_p,
                       RANK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                       GROUP: tl.constexpr, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """One program: a tile of rows of one target for GROUP candidates, so U_B is read once for all of them."""
    tile = tl.program_id(0)
    target = tl.load(tiles + 2 * tile)
    entry = table + target * 6
    slot_stride = tl.load(entry + 1)
    row_stride = tl.load(entry + 2)
    if VECTOR:
        slot_stride = tl.multiple_of(slot_stride, 8)
        row_stride = tl.multiple_of(row_stride, 8)
    base = _pointer(tl.load(entry), DTYPE, VECTOR)
    rows = (tl.load(tiles + 2 * tile + 1) + tl.arange(0, ROWS))[:, None]
    row_count = tl.load(entry + 3)
    inside = rows < row_count
    first_row = tl.load(entry + 4)
    slots = tl.load(entry + 5)
    columns = tl.arange(0, WIDTH)
    at = rows * row_stride + columns[None, :]

    u = ()
    for i in tl.static_range(RANK):
        u = u + (tl.load(u_t + i * total_rows + first_row + rows, mask=inside, other=0.0),)
    a_0 = tl.load(s_a + target * WIDTH + columns)

    first = tl.program_id(1) * GROUP
    for k in range(first, tl.minimum(first + GROUP, candidates)):
        slot = tl.load(slot_ids + k)
        a = a_0 + tl.load(d_a + k * a_stride_k + target * a_stride_p + columns, mask=columns < RANK, other=0.0)
        b_k = d_b + k * b_stride_k + target * b_stride_p
        value = tl.zeros((ROWS, WIDTH), tl.float32)
        for i in tl.static_range(RANK):
            b = tl.load(s_b + target * RANK + i) + tl.load(b_k + i)
            m_i = tl.load(m + (target * RANK + i) * WIDTH + columns)
            value += (u[i] * b) * m_i[None, :]
        # A slot id outside the stack means "skip this candidate", never a stray write.
        keep = rows < tl.where((slot >= 0) & (slot < slots), row_count, 0)
        _store(base + slot * slot_stride + at, value * a[None, :], keep, DTYPE)


def write_slots(slots, table, tiles, u_t, m, s_a, s_b, d_a, d_b, slot_ids, vector):
    candidates, _, rank = d_a.shape
    width = m.shape[2]
    grid = (tiles.shape[0], triton.cdiv(candidates, layout.SLOT_GROUP))
    write_slots_kernel[grid](
        table, tiles, u_t, m, s_a, s_b, d_a, d_b, slot_ids,
        candidates, u_t.shape[1], d_a.stride(0), d_a.stride(1), d_b.stride(0), d_b.stride(1),
        RANK=rank, WIDTH=width, ROWS=layout.slot_rows(width), GROUP=layout.SLOT_GROUP,
        DTYPE=DTYPES[slots[0].dtype], VECTOR=vector, num_warps=4, enable_fp_fusion=True)


# ------------------------------------------------------------------------------- shared basis

@triton.jit
def _core_step(h, cores, token, piece, candidate, chosen, h_stride_t, h_stride_s,
               SLICES: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr):
    """h[token, piece] cores[candidate, piece]^T, (tokens, RANK_BLOCK) float32, zero where not chosen."""
    j = tl.arange(0, RANK_BLOCK)[None, :]
    core = cores + (candidate * SLICES + piece)[:, None] * (RANK * RANK) + j * RANK
    known = chosen[:, None] & (j < RANK)
    total = tl.zeros((token.shape[0], RANK_BLOCK), tl.float32)
    for i in tl.static_range(RANK):
        h_i = tl.load(h + token * h_stride_t + piece * h_stride_s + i, mask=chosen, other=0.0)
        total += h_i.to(tl.float32)[:, None] * tl.load(core + i, mask=known, other=0.0)
    return total


@triton.jit
def core_step_kernel(h, cores, idx, g, tokens, candidates, h_stride_t, h_stride_s,
                     SLICES: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """g[t, s] = h[t, s] cores[idx[t], s]^T: one program is BLOCK tokens of one slice."""
    piece = tl.program_id(1)
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = token < tokens
    candidate = tl.load(idx + token, mask=inside, other=-1).to(tl.int64)
    chosen = inside & (candidate >= 0) & (candidate < candidates)
    total = _core_step(h, cores, token, piece, candidate, chosen, h_stride_t, h_stride_s, SLICES, RANK, RANK_BLOCK)
    j = tl.arange(0, RANK_BLOCK)[None, :]
    at = g + (token * SLICES + piece)[:, None] * RANK + j
    tl.store(at, total, mask=inside[:, None] & (j < RANK))


def core_step(h, cores, idx):
    tokens, slices, rank = h.shape
    g = torch.empty(tokens, slices, rank, dtype=torch.float32, device=h.device)
    if tokens:
        core_step_kernel[(triton.cdiv(tokens, 32), slices)](
            h, cores, idx, g, tokens, cores.shape[0], h.stride(0), h.stride(1),
            SLICES=slices, RANK=rank, RANK_BLOCK=triton.next_power_of_2(rank), BLOCK=32,
            num_warps=4, enable_fp_fusion=True)
    return g


@triton.jit
def expand_kernel(out, h, cores, idx, u_t, tokens, candidates, out_stride, h_stride_t, h_stride_s,
                  rows_0, rows_1, rows_2,
                  SLICES: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, CORE: tl.constexpr,
                  TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr, U_DTYPE: tl.constexpr,
                  UNIT: tl.constexpr):
    """out[t, slice s] += (h[t, s] core^T) U_B^T. CORE 0: core = 1, h is g already.

    One program: TOKENS tokens x COLUMNS outputs of one slice. A token's sum runs over the rank in
    one fixed order, so its bits do not depend on what else is in the batch.
    """
    # Tiles never straddle slices: q's tiles first, then k's, then v's.
    tile = tl.program_id(1)
    tiles_0 = tl.cdiv(rows_0 * UNIT, COLUMNS)
    tiles_1 = tl.cdiv(rows_1 * UNIT, COLUMNS)
    piece = (tile >= tiles_0).to(tl.int32) + (tile >= tiles_0 + tiles_1).to(tl.int32)
    start = tl.where(piece == 0, 0, tl.where(piece == 1, rows_0, rows_0 + rows_1))
    length = tl.where(piece == 0, rows_0, tl.where(piece == 1, rows_1, rows_2))
    local = tile - tl.where(piece == 0, 0, tl.where(piece == 1, tiles_0, tiles_0 + tiles_1))
    # Multiplying by UNIT (8, or 1 where the sizes are odd) tells the compiler what it may vectorise.
    start *= UNIT
    length *= UNIT
    m = (rows_0 + rows_1 + rows_2) * UNIT
    column = local * COLUMNS + tl.arange(0, COLUMNS)
    column_inside = column < length

    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    token = token.to(tl.int64)
    if CORE:
        candidate = tl.load(idx + token, mask=inside, other=-1).to(tl.int64)
        inside = inside & (candidate >= 0) & (candidate < candidates)
        g = _core_step(h, cores, token, piece, candidate, inside, h_stride_t, h_stride_s, SLICES, RANK, RANK_BLOCK)
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for j in tl.static_range(RANK):
        if CORE:
            # Column j of g: a sum with zeros, which is exact.
            g_j = tl.sum(tl.where(tl.arange(0, RANK_BLOCK)[None, :] == j, g, 0.0), axis=1)
        else:
            g_j = tl.load(h + token * h_stride_t + piece * h_stride_s + j, mask=inside, other=0.0).to(tl.float32)
        u_j = _load(u_t + j * m + start + column, column_inside, U_DTYPE)
        total += g_j[:, None] * u_j[None, :]
    at = out + token[:, None] * (out_stride * UNIT) + (start + column)[None, :]
    keep = inside[:, None] & column_inside[None, :]
    _store(at, _load(at, keep, DTYPE) + total, keep, DTYPE)


def _expand(out, h, cores, idx, u_t, rows):
    tokens, slices, rank = h.shape
    if not tokens:
        return
    unit = 8 if out.stride(0) % 8 == 0 and all(r % 8 == 0 for r in rows) else 1
    block_tokens, block_columns = 16, 64
    padded = [r // unit for r in rows] + [0] * (3 - len(rows))
    grid = (triton.cdiv(tokens, block_tokens), sum(triton.cdiv(r, block_columns) for r in rows))
    expand_kernel[grid](
        _raw(out), h, h if cores is None else cores, h if idx is None else idx, _raw(u_t), tokens,
        0 if cores is None else cores.shape[0], out.stride(0) // unit, h.stride(0), h.stride(1), *padded,
        SLICES=slices, RANK=rank, RANK_BLOCK=triton.next_power_of_2(rank), CORE=cores is not None,
        TOKENS=block_tokens, COLUMNS=block_columns, DTYPE=DTYPES[out.dtype], U_DTYPE=DTYPES[u_t.dtype],
        UNIT=unit, num_warps=4, enable_fp_fusion=True)


def _raw(tensor):
    """bfloat16 as 16-bit integers, which is how the kernels read and write it."""
    return tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor


def expand_add_(out, g, u_t, rows):
    _expand(out, g, None, None, u_t, rows)


def shared_basis_(out, h, cores, idx, u_t, rows):
    _expand(out, h, cores, idx, u_t, rows)


# ------------------------------------------------------------------------------- merged apply

@triton.jit
def left_kernel(tiles, table, u_t, cores, left, total_rows,
                RANK: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """left = U_B C, kept transposed (rank, rows), for every target."""
    tile = tl.program_id(0)
    target = tl.load(tiles + 2 * tile)
    local = tl.load(tiles + 2 * tile + 1) + tl.arange(0, ROWS)
    inside = local < tl.load(table + target * 8 + 4)
    row = tl.load(table + target * 8 + 6) + local
    j = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for i in range(RANK):
        u_i = tl.load(u_t + i * total_rows + row, mask=inside, other=0.0)
        c_i = tl.load(cores + (target * RANK + i) * RANK + j, mask=j < RANK, other=0.0)
        total += c_i[:, None] * u_i[None, :]
    tl.store(left + j[:, None] * total_rows + row[None, :], total, mask=(j < RANK)[:, None] & inside[None, :])


@triton.jit
def _noise(row, column_block, target, seed_low, seed_high):
    """16 random bits a weight, (rows, 8 * blocks): eight weights share one Philox block.

    Counter (column // 8, row, target, 0x5EED), key the seed; weight column % 8 takes halfword
    column % 8, low half of a word first.
    """
    zero = (row * 0 + column_block * 0).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(
        zero + column_block.to(tl.uint32), zero + row.to(tl.uint32), zero + target.to(tl.uint32),
        zero + 0x5EED, zero + seed_low.to(tl.uint32), zero + seed_high.to(tl.uint32))
    pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))          # [..., word // 2, word % 2]
    halves = tl.join(pairs & 0xFFFF, pairs >> 16)
    return tl.reshape(halves, (row.shape[0], column_block.shape[1] * 8))


@triton.jit(do_not_specialize=["seed_low", "seed_high"])   # a seed of 1 must not become a constant
def merged_kernel(tiles, table, left, v_t, total_rows, column_chunks, seed_low, seed_high,
                  RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr,
                  VECTOR: tl.constexpr, STOCHASTIC: tl.constexpr):
    """W = round(W_0 + left V_A^T), one tile of one target."""
    tile = tl.program_id(0)
    target = tl.load(tiles + 3 * tile)
    entry = table + target * 8
    column_0 = tl.load(tiles + 3 * tile + 2)
    stride = tl.load(entry + 2)
    pristine_stride = tl.load(entry + 3)
    columns = tl.load(entry + 5)
    first_column = tl.load(entry + 7)
    if VECTOR:
        column_0 = tl.multiple_of(column_0, 8)
        stride = tl.multiple_of(stride, 8)
        pristine_stride = tl.multiple_of(pristine_stride, 8)
        columns = tl.multiple_of(columns, 8)
        first_column = tl.multiple_of(first_column, 8)
    row = (tl.load(tiles + 3 * tile + 1) + tl.arange(0, ROWS))[:, None]
    column = (column_0 + tl.arange(0, COLUMNS))[None, :]
    row_inside = row < tl.load(entry + 4)
    column_inside = column < columns
    inside = row_inside & column_inside
    weight = _pointer(tl.load(entry), DTYPE, VECTOR) + row * stride + column
    pristine = _pointer(tl.load(entry + 1), DTYPE, VECTOR) + row * pristine_stride + column

    w = _load(pristine, inside, DTYPE)
    first_row = tl.load(entry + 6)
    update = tl.zeros((ROWS, COLUMNS), tl.float32)
    for j in tl.static_range(RANK):
        left_j = tl.load(left + j * total_rows + first_row + row, mask=row_inside, other=0.0)
        v_j = tl.load(v_t + j * column_chunks * 8 + first_column + column, mask=column_inside, other=0.0)
        update += left_j * v_j
    w += update
    if STOCHASTIC:
        block = (column_0 // 8 + tl.arange(0, COLUMNS // 8))[None, :]
        noise = _noise(row, block, target, seed_low, seed_high)
        tl.store(weight, _bf16_bits_stochastic(w, noise), mask=inside)
    else:
        _store(weight, w, inside, DTYPE)


def merged_apply(weights, pristine, table, row_tiles, tiles, u_t, v_t, cores, stochastic, seed, vector):
    rank = u_t.shape[0]
    left = torch.empty_like(u_t)
    left_kernel[(row_tiles.shape[0],)](
        row_tiles, table, u_t, cores, left, u_t.shape[1],
        RANK=rank, COLUMNS=triton.next_power_of_2(rank), ROWS=layout.LEFT_ROWS,
        num_warps=4, enable_fp_fusion=True)
    merged_kernel[(tiles.shape[0],)](
        tiles, table, left, v_t, u_t.shape[1], v_t.shape[1] // 8, _word(seed), _word(seed >> 32),
        RANK=rank, ROWS=layout.merge_rows(vector), COLUMNS=layout.MERGE_COLUMNS, DTYPE=DTYPES[weights[0].dtype],
        VECTOR=vector, STOCHASTIC=stochastic, num_warps=8, enable_fp_fusion=True)


def _word(value):
    """The low 32 bits as a signed int: triton types a Python int by its size, and this keeps it int32."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


# ----------------------------------------------------------------------------------- checksum

@triton.jit
def checksum_kernel(words, total, count, BLOCK: tl.constexpr):
    """Adds sum of mix(word + (index + 1) * golden) mod 2^64 of one block to total."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    x = tl.load(words + index, mask=inside, other=0).to(tl.uint64, bitcast=True)
    x = tl.add(x, tl.mul((index + 1).to(tl.uint64), 0x9E3779B97F4A7C15, sanitize_overflow=False),
               sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 30), 0xBF58476D1CE4E5B9, sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 27), 0x94D049BB133111EB, sanitize_overflow=False)
    x = x ^ (x >> 31)
    part = tl.sum(tl.where(inside, x, tl.zeros_like(x)).to(tl.int64, bitcast=True), axis=0)
    # Integer addition commutes, so the order of the programs does not matter.
    tl.atomic_add(total, part)


def checksum(words):
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if words.numel():
        checksum_kernel[(triton.cdiv(words.numel(), 4096),)](
            words, total, words.numel(), BLOCK=4096, num_warps=4, enable_fp_fusion=True)
    return total


# ------------------------------------------------------------------------------ Philox normals

@triton.jit
def _horner(x, COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr = 8):
    """Polynomial in float64 x, highest power first; a product and a sum a step, never fused."""
    value = x * 0.0 + COEFFICIENTS[0]
    for i in tl.static_range(1, COUNT):
        value = value * x + COEFFICIENTS[i]
    return value


@triton.jit
def _log(x):
    """perturbation._log, operation by operation."""
    bits = x.to(tl.int64, bitcast=True)
    m = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)   # 1 <= m < 2
    e = (bits >> 52) - 1023
    large = m - SQRT2 > 0.0
    m = tl.where(large, m * 0.5, m)
    e = tl.where(large, e + 1, e).to(tl.float64)
    s = (m - 1.0) / (m + 1.0)
    return e * LN2_HIGH + (e * LN2_LOW + (s + s) * _horner(s * s, ATANH, 12))


@triton.jit
def _inverse_normal(u):
    """perturbation._inverse_normal, operation by operation, all three branches for every number."""
    q = u - 0.5
    r = 0.180625 - q * q
    centre = q * (_horner(r, CENTRE_NUMERATOR) / _horner(r, CENTRE_DENOMINATOR))
    r = tl.sqrt(0.0 - _log(tl.where(q < 0.0, u, 1.0 - u)))
    near, far = r - 1.6, r - 5.0
    tail = tl.where(r > 5.0, _horner(far, FAR_NUMERATOR) / _horner(far, FAR_DENOMINATOR),
                    _horner(near, TAIL_NUMERATOR) / _horner(near, TAIL_DENOMINATOR))
    return tl.where(tl.abs(q) - 0.425 > 0.0, tl.where(q < 0.0, 0.0 - tail, tail), centre)


@triton.jit
def _uniform(low, high):
    """Two 32-bit words -> ((top 52 of the 64 bits) + 1/2) 2^-52, exact in float64."""
    word = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    return ((word >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit(do_not_specialize=["generation", "stream", "seed_low", "seed_high"])
def normals_kernel(out, candidates, size, out_stride, generation, stream, seed_low, seed_high,
                   BLOCK: tl.constexpr):
    """out[k, index]: one program makes BLOCK pairs of one candidate."""
    row = tl.program_id(1)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    zero = (pair * 0).to(tl.uint32)
    candidate = tl.load(candidates + row).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(pair.to(tl.uint32), zero + candidate, zero + generation.to(tl.uint32),
                                    zero + stream.to(tl.uint32), zero + seed_low.to(tl.uint32),
                                    zero + seed_high.to(tl.uint32))
    at = out + row.to(tl.int64) * out_stride + 2 * pair
    tl.store(at, _inverse_normal(_uniform(w0, w1)), mask=2 * pair < size)
    tl.store(at + 1, _inverse_normal(_uniform(w2, w3)), mask=2 * pair + 1 < size)


def normals_(out, seed, generation, candidates, stream):
    rows, size = out.shape
    if rows and size:
        normals_kernel[(triton.cdiv((size + 1) // 2, 128), rows)](
            out, candidates, size, out.stride(0), _word(generation), _word(stream), _word(seed), _word(seed >> 32),
            BLOCK=128, num_warps=4, enable_fp_fusion=False)
