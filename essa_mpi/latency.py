"""What a generation costs: the paper's latency model, collectives, and an engine whose decode step has a floor.

Pure functions of numbers: seconds, bytes, bytes/s. Knows nothing of files or MPI. Appendix B is that of ESSA
(arXiv 2507.04453): B rows, eta seconds a sample on one engine, m GPUs an engine, G GPUs, M bytes, bw bytes/s.
"""

import heapq
import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from .world import HEADER, TILE_WORDS

WORD = 8    # bytes


# -- appendix B --------------------------------------------------------------------------------------

def best_theta(m_fb: float, eta_fb: float, m_gen: float, eta_gen: float) -> float:
    """The share of the GPUs that trains, so that training and generation take equally long (appendix B)."""
    return m_fb * eta_fb / (m_fb * eta_fb + m_gen * eta_gen)


def gradient_seconds(batch, gpus, m_fb, eta_fb, m_gen, eta_gen, nbytes, bandwidth, theta=None) -> float:
    """A step of a gradient method: max of training and generation, and an all-reduce of nbytes (appendix B).

    theta: share of the GPUs that trains; None: the best one, with which both take B (m_fb eta_fb + m_gen eta_gen) / G.
    """
    theta = best_theta(m_fb, eta_fb, m_gen, eta_gen) if theta is None else theta
    training = batch * m_fb * eta_fb / (theta * gpus) if eta_fb else 0.0
    generating = batch * m_gen * eta_gen / ((1 - theta) * gpus) if eta_gen else 0.0
    return max(training, generating) + allreduce_paper(gpus, nbytes, bandwidth)


def essa_seconds(population, batch, gpus, m_gen, eta_gen, bandwidth) -> float:
    """A generation of ESSA: N B m eta / G, and 8 bytes a candidate (appendix B): without tiles, rounding or a floor."""
    return population * batch * m_gen * eta_gen / gpus + WORD * population / bandwidth


def allreduce_paper(gpus, nbytes, bandwidth) -> float:
    """2 M (G - 1) / (G bw): a ring without its latencies (appendix B)."""
    return 2 * nbytes * (gpus - 1) / (gpus * bandwidth)


def break_even(batch, gpus, m_fb, eta_fb, m_gen, eta_gen, nbytes, bandwidth) -> tuple[float, float]:
    """(by the two formulas, as printed): the N B of ESSA below which a generation is shorter than a gradient step.

    Theorem B.2 as printed takes m_gen = G, m_fb = 1 and loses a factor 2 of the all-reduce.
    """
    ours = batch * (m_fb * eta_fb / (m_gen * eta_gen) + 1) + 2 * (gpus - 1) * nbytes / (bandwidth * m_gen * eta_gen)
    printed = batch * (eta_fb / (gpus * eta_gen) + 1) + (gpus - 1) * nbytes / (bandwidth * gpus * eta_gen)
    return ours, printed


# -- collectives -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Network:
    """latency: seconds a message, L + 2 o; bandwidth: bytes/s of a rank.

    Defaults: L 1.7 us, o 0.4 us; 25 GB/s is one link of 200 Gbit/s. An 8-byte all-gather of 16 ranks on 4 nodes
    was measured at 10.62 us (a user guide of OLCF); Bruck with these numbers says 10.0.
    """

    latency: float = 2.5e-6
    bandwidth: float = 25e9


def allgather_seconds(ranks: int, nbytes: float, network: Network, algorithm: str = "bruck") -> float:
    """Seconds of an all-gather of `nbytes` from each rank, by the alpha-beta model (Thakur et al., IJHPCA 19, 2005).

    "doubling" (recursive doubling): log2 P messages, for powers of two; elsewhere inf. "bruck": ceil(log2 P)
    messages, for any P. "ring": P - 1 messages. All three receive (P - 1) nbytes.
    """
    steps = math.ceil(math.log2(ranks)) if ranks > 1 else 0
    steps = {"bruck": steps, "ring": ranks - 1, "doubling": steps if ranks & (ranks - 1) == 0 else math.inf}[algorithm]
    return steps * network.latency + (ranks - 1) * nbytes / network.bandwidth


def allreduce_seconds(gpus: int, nbytes: float, network: Network, algorithm: str = "best") -> float:
    """Seconds of an all-reduce of `nbytes`. "ring": 2 (G - 1) messages; "tree": 2 log2 G, pipelined; "best": of both.

    Both move 2 nbytes (G - 1) / G a GPU: the tree is NCCL's double binary one, at its asymptotic bandwidth.
    """
    moving = allreduce_paper(gpus, nbytes, network.bandwidth)
    ring = 2 * (gpus - 1) * network.latency + moving
    tree = 2 * (math.ceil(math.log2(gpus)) if gpus > 1 else 0) * network.latency + moving
    return {"ring": ring, "tree": tree, "best": min(ring, tree)}[algorithm]


# -- tiles -------------------------------------------------------------------------------------------

def boundaries(ranks: int, population: int, batch: int, tiles: bool = True) -> np.ndarray:
    """(ranks + 1,) int64: rank r scores the cells [b[r], b[r + 1]) of population x batch, candidates in order.

    As `world.share` cuts them. tiles False: candidates stay whole, so ranks beyond the population have nothing.
    """
    rank = np.arange(ranks + 1, dtype=np.int64)
    return rank * (population * batch) // ranks if tiles else rank * population // ranks * batch


def tiles_of(cells: np.ndarray, batch: int) -> np.ndarray:
    """(ranks,): how many tiles each rank has, from `boundaries`."""
    first, last = cells[:-1], cells[1:]
    return np.where(last > first, (last - 1) // batch - first // batch + 1, 0)


def exchange_bytes(ranks: int, population: int, batch: int) -> int:
    """What a rank sends in the one all-gather of a generation (`World.exchange`): a header and its tiles, padded."""
    return WORD * (len(HEADER) + TILE_WORDS * int(tiles_of(boundaries(ranks, population, batch), batch).max()))


def greatest_of(count: int) -> float:
    """The expected greatest of `count` standard normal numbers (Blom, 1958: within 0.03); about sqrt(2 ln count)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


# -- an engine with continuous batching --------------------------------------------------------------

@dataclass(frozen=True)
class Engine:
    """A decode step with n sequences takes max(read + n kv, n token) + n transfer + overhead seconds.

    read: the weights from memory, once a step whatever n is. token: arithmetic of one token. kv: a sequence's
    cache from memory. transfer, overhead: tensor parallelism's, of one token and of a step. slots: sequences at most.
    """

    read: float
    token: float
    slots: int
    kv: float = 0.0
    transfer: float = 0.0
    overhead: float = 0.0

    def step(self, n):
        """Seconds of a step with n >= 1 sequences; n may be an array."""
        return np.maximum(self.read + n * self.kv, n * self.token) + n * self.transfer + self.overhead

    @property
    def full(self) -> float:
        """Sequences from which a step is no longer the reading of the weights: more of them cost more. inf: never."""
        return self.read / (self.token - self.kv) if self.token > self.kv else math.inf


def decode_seconds(lengths: np.ndarray, engine: Engine) -> np.ndarray:
    """Seconds to decode each row of `lengths`: (ranks, n) tokens, 0 = no sequence; to (ranks,).

    The sequences of a rank enter in order whenever one of the `slots` is free (continuous batching).
    """
    lengths = np.atleast_2d(lengths)
    if lengths.shape[1] > engine.slots:
        return np.array([_queued(row[row > 0], engine) for row in lengths])
    # All are in from the first step: between one answer's end and the next the number in flight is constant.
    falling = -np.sort(-lengths, axis=1)
    spans = falling - np.pad(falling[:, 1:], ((0, 0), (0, 1)))
    return spans @ engine.step(np.arange(1, lengths.shape[1] + 1))


def _queued(lengths: np.ndarray, engine: Engine) -> float:
    """Event by event: in steps, a slot that falls free takes the next sequence; then every step is priced."""
    free, starts = [0] * min(engine.slots, len(lengths)), np.empty(len(lengths), np.int64)
    for i, length in enumerate(lengths.tolist()):
        starts[i] = free[0]
        heapq.heapreplace(free, free[0] + length)
    ends = starts + lengths
    changes = np.bincount(starts, minlength=int(ends.max(initial=0)) + 1) - np.bincount(ends)
    in_flight = np.cumsum(changes)[:-1]
    return float(engine.step(in_flight).sum())
