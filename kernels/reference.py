"""Every operation in plain torch, float64 inside: the oracle, and what runs on a CPU.

The functions take the same arguments as their Triton and CUDA twins (`dispatch` has checked
them) and work on any device. Each result is computed in float64 and rounded once.
"""

import numpy as np
import torch

from .. import perturbation

GOLDEN = 0x9E3779B97F4A7C15   # SplitMix64 (Steele, Lea, Flood 2014): increment and finaliser
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
ROUNDING_STREAM = 0x5EED      # fourth counter word; perturbation's streams are 0, 1, 2


def cores(m, s_a, s_b, d_a, d_b, scale=1.0):
    """scale * diag(s_B + d_B) M diag(s_A + d_A) for K candidates and P projections.

    m: (P, r, r); s_a, s_b: (P, r); d_a, d_b: (K, P, r); scale: a number or (P,). Returns float64
    (K, P, r, r), computed in float64 whatever the inputs.
    """
    scale = torch.as_tensor(scale, dtype=torch.float64, device=m.device).reshape(-1, 1, 1)
    b = (s_b.double() + d_b.double())[..., :, None]
    a = (s_a.double() + d_a.double())[..., None, :]
    return (scale * b * m.double() * a).contiguous()


# ----------------------------------------------------------------------------------- rounding

def _round_to_odd(x):
    """float64 -> float32 towards zero, with the last bit set if anything was lost.

    Rounding the result again to a type of 22 bits or fewer gives what one rounding of x gives;
    torch's own double -> bfloat16 goes through float32 and rounds twice.
    """
    nearest = x.float()
    bits = nearest.view(torch.int32)
    finite = torch.isfinite(x) & torch.isfinite(nearest)
    away = finite & (nearest.double().abs() > x.abs())
    inexact = finite & (nearest.double() != x)
    bits = bits - away.int()                       # sign-magnitude: one less is one step to zero
    return (bits | inexact.int()).view(torch.float32)


def round_to(x, dtype):
    """float64 x rounded once, to nearest even, to float32, float16 or bfloat16."""
    return x.to(dtype) if dtype in (torch.float32, torch.float64) else _round_to_odd(x).to(dtype)


def round_stochastically(x, noise):
    """float64 x -> bfloat16, up with the probability of the discarded part.

    x is rounded to float32, noise (integers in [0, 2^16)) is added below bfloat16's last bit, and
    the rest is cut off.
    """
    x = x.float()
    bits = x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    up = (bits + noise.to(torch.int64)) >> 16
    up = torch.where(x.isnan(), torch.full_like(up, 0x7FC0), up)
    return (up - ((up >> 15) << 16)).to(torch.int16).view(torch.bfloat16)


def rounding_noise(seed, target, rows, columns, device="cpu"):
    """The 16 random bits of every weight of one target, int64 (rows, columns).

    Counter (column // 8, row, target, ROUNDING_STREAM), key the seed; weight column % 8 takes
    halfword column % 8 of the block, low half of a word first.
    """
    blocks = -(-columns // 8)
    counter = np.empty((rows, blocks, 4), np.uint32)
    counter[..., 0] = np.arange(blocks)
    counter[..., 1] = np.arange(rows)[:, None]
    counter[..., 2] = target
    counter[..., 3] = ROUNDING_STREAM
    words = perturbation.philox4x32(counter, [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])
    halves = np.stack([words & 0xFFFF, words >> 16], axis=-1).reshape(rows, blocks * 8)[:, :columns]
    return torch.from_numpy(halves.astype(np.int64)).to(device)


# --------------------------------------------------------------------------------- operations

def write_slots(slots, table, tiles, u_t, m, s_a, s_b, d_a, d_b, slot_ids, vector):
    """slot B[slot_ids[k]] = U_B diag(s_B + d_B[k]) M diag(s_A + d_A[k]); the scale is in M."""
    rank, width = d_a.shape[2], m.shape[2]
    core = cores(m[:, :, :rank], s_a[:, :rank], s_b, d_a, d_b)
    u = u_t.double().t()
    first = 0
    for p, slot in enumerate(slots):
        rows = slot.shape[2]
        keep = (slot_ids >= 0) & (slot_ids < slot.shape[0])
        value = u.new_zeros(int(keep.sum()), rows, width)
        value[:, :, :rank] = u[first:first + rows] @ core[keep, p]
        slot[slot_ids[keep], 0, :, :width] = round_to(value, slot.dtype)
        first += rows


def core_step(h, cores, idx):
    """g[t] = h[t] cores[idx[t]]^T, float32; zero where idx[t] names no candidate."""
    known = (idx >= 0) & (idx < len(cores))
    chosen = cores.double()[torch.where(known, idx, 0).long()]
    g = torch.einsum("tsi,tsji->tsj", h.double(), chosen)
    return torch.where(known[:, None, None], g, 0.0).float()


def _expand_add(out, g, known, u_t, rows):
    first = 0
    for piece, count in enumerate(rows):
        part = out[:, first:first + count]
        update = g[:, piece] @ u_t[:, first:first + count].double()
        part[known] = round_to(part[known].double() + update[known], out.dtype)
        first += count


def expand_add_(out, g, u_t, rows):
    """out[t] += g[t] U_B^T, slice by slice."""
    _expand_add(out, g.double(), torch.ones(len(g), dtype=torch.bool, device=g.device), u_t, rows)


def shared_basis_(out, h, cores, idx, u_t, rows):
    """out[t] += (h[t] cores[idx[t]]^T) U_B^T; tokens without a candidate are not touched."""
    known = (idx >= 0) & (idx < len(cores))
    _expand_add(out, core_step(h, cores, idx).double(), known, u_t, rows)


def merged_apply(weights, pristine, table, row_tiles, tiles, u_t, v_t, cores, stochastic, seed, vector):
    """W = round(W_0 + U_B C V_A^T) for every target."""
    row = column = 0
    for p, (w, w_0) in enumerate(zip(weights, pristine)):
        m, n = w.shape
        u, v = u_t[:, row:row + m].double().t(), v_t[:, column:column + n].double()
        value = w_0.double() + u @ cores[p].double() @ v
        if stochastic:
            w.copy_(round_stochastically(value, rounding_noise(seed, p, m, n, w.device)))
        else:
            w.copy_(round_to(value, w.dtype))
        row, column = row + m, column + n + -n % 8


def _signed(value):
    return value - (1 << 64) if value >> 63 else value


def _shift(x, count):
    """Logical right shift of int64."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def checksum(words):
    """Sum over i of mix(word_i + (i + 1) GOLDEN) mod 2^64 of int64 words; torch's int64 wraps."""
    index = torch.arange(1, words.numel() + 1, device=words.device)
    x = words + index * _signed(GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(MIX_2)
    return (x ^ _shift(x, 31)).sum()


def normals_(out, seed, generation, candidates, stream):
    """out[k] = perturbation.normals of candidates[k]: the authority itself."""
    z = perturbation.population_normals(seed % (1 << 64), generation, candidates.tolist(), out.shape[1], stream=stream)
    out.copy_(torch.from_numpy(z))
