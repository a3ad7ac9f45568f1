"""A generation on any number of ranks, simulated: tiles, answers of many lengths, stragglers, all-gather, optimiser.

The cells candidates x rows are cut into tiles as `essa_mpi.world.share` cuts them; each rank's engine is simulated
answer by answer; the slowest rank ends the generation, then come the all-gather and the update that all ranks make
alike. Every number below that is not the paper's is an assumption, said in `ASSUMED` and printed with the results.
"""

from dataclasses import dataclass, replace

import numpy as np

from essa_mpi.latency import Engine, Network, allgather_seconds, boundaries, decode_seconds, exchange_bytes, tiles_of
from essa_mpi.sizes import Model

QWEN = {    # config.json of Qwen2.5
    "7B": dict(hidden_size=3584, num_hidden_layers=28, intermediate_size=18944, num_attention_heads=28),
    "32B": dict(hidden_size=5120, num_hidden_layers=64, intermediate_size=27648, num_attention_heads=40),
    "72B": dict(hidden_size=8192, num_hidden_layers=80, intermediate_size=29568, num_attention_heads=64),
}


def qwen(size: str) -> Model:
    """Qwen2.5 of 7B, 32B or 72B, in bfloat16."""
    return Model.of({**QWEN[size], "num_key_value_heads": 4 if size == "7B" else 8, "vocab_size": 152064,
                     "model_type": "qwen2", "tie_word_embeddings": False})


@dataclass(frozen=True)
class GPU:
    """Bytes of memory, bytes/s of it, operations/s in bfloat16, and the share of both rates that is reached.

    link: seconds and bytes/s of an all-reduce within a node. The defaults are an H200's, which holds 32B in
    bfloat16 and a cache. The share cancels in every ratio but for the terms that are not the GPU's.
    """

    memory: float = 141e9
    bandwidth: float = 4.8e12
    operations: float = 989e12
    reached: float = 0.6
    link: Network = Network(10e-6, 450e9)


@dataclass(frozen=True)
class Setting:
    """The paper's Fig. 3 (32B, population 128, batch 256, rank 16), and what it leaves open."""

    population: int = 128
    batch: int = 256
    rank: int = 16
    size: str = "32B"
    gpu: GPU = GPU()
    network: Network = Network()
    max_num_seqs: int = 256         # the slots of an engine; fewer where the cache has no room
    prompt: int = 200               # tokens
    median: float = 450.0           # tokens of an answer: log-normal
    deviation: float = 0.6          # of the logarithm of the length
    row_share: float = 0.5          # of its variance is the row's: all candidates write long answers to hard rows
    longest: int = 2048             # max_tokens
    straggling: float = 0.04        # deviation of the logarithm of a rank's slowness, drawn anew each generation
    place: float = 1e-3             # seconds to place a candidate in the engine
    update: float = 0.5             # seconds of the search's update
    bookkeeping: tuple = (0.0, 0.0)  # seconds a rank spends on the all-gather's words: for each rank, each candidate

    def lengths(self, rng, rows: np.ndarray, candidates: int) -> np.ndarray:
        """(candidates, batch) tokens. rows: (batch,) standard normal, how long the row's answers are."""
        z = self.row_share ** 0.5 * rows + (1 - self.row_share) ** 0.5 * rng.standard_normal((candidates, len(rows)))
        return np.clip(np.exp(np.log(self.median) + self.deviation * z), 1, self.longest).astype(np.int64)

    @property
    def mean_length(self) -> float:
        """Tokens of an answer, by 200,000 draws."""
        rng = np.random.default_rng(0)
        return float(self.lengths(rng, rng.standard_normal(200_000), 1).mean())

    def engine(self, tensor_parallel: int = 1, with_cache: bool = False) -> Engine:
        """Of the roofline: weights and cache at the memory's rate, 2 operations a parameter and token.

        with_cache: each sequence's keys and values are read too, of the prompt and half an answer on average.
        Tensor parallelism divides all of it and adds two all-reduces a layer of hidden x 2 bytes a token.
        """
        model, gpu, t = qwen(self.size), self.gpu, tensor_parallel
        context = self.prompt + self.mean_length
        room = 0.9 * gpu.memory * t - model.weight_bytes
        slots = int(room // (model.cache_bytes_a_token * context))
        if slots < 1:
            raise ValueError(f"{self.size} does not fit on {t} GPUs of {gpu.memory / 1e9:.0f} GB")
        exchanges = 2 * model.layers if t > 1 else 0
        cache = model.cache_bytes_a_token * (self.prompt + self.mean_length / 2) if with_cache else 0
        return Engine(
            read=model.weight_bytes / (t * gpu.bandwidth * gpu.reached),
            token=2 * model.parameters / (t * gpu.operations * gpu.reached),
            slots=min(self.max_num_seqs, slots),
            kv=cache / (t * gpu.bandwidth * gpu.reached),
            transfer=exchanges * 2 * (t - 1) / t * model.hidden * 2 / gpu.link.bandwidth,
            overhead=exchanges * gpu.link.latency)


ASSUMED = """\
- hardware: {memory:.0f} GB, {read:g} TB/s, {operations:g} TFLOP/s, {reached:.0%} of both reached; between ranks
  a link of {bandwidth:.0f} GB/s and {latency:.1f} us a message
- answers: tokens log-normal, median {median:.0f}, deviation of the logarithm {deviation}, cut at {longest}:
  mean {mean:.0f}. {row_share:.0%} of the variance is the row's, the same for all candidates
- prompts: {prompt} tokens, computed for every candidate
- an engine has {slots} slots, its cache holds as many; a decode step takes max(weights read, tokens x arithmetic)
- stragglers: the logarithm of a rank's slowness is normal with deviation {straggling}, new each generation. Sinha et
  al. (arXiv 2208.11035) found GPUs of one kind to vary by 8 % on average, which is read as two such deviations
- {place:.3g} s to place a candidate; {update:.3f} s for the search's update; to read the all-gather {a_rank:.1f} us
  for each rank and {an_arm:.1f} us for each candidate"""


def assumed(setting: Setting) -> str:
    """What the results rest on, in words."""
    gpu, network, (a_rank, an_arm) = setting.gpu, setting.network, setting.bookkeeping
    return ASSUMED.format(
        **vars(setting), memory=gpu.memory / 1e9, read=gpu.bandwidth / 1e12, operations=gpu.operations / 1e12,
        reached=gpu.reached, bandwidth=network.bandwidth / 1e9, latency=network.latency * 1e6, mean=setting.mean_length,
        slots=setting.engine().slots, an_arm=an_arm * 1e6, a_rank=a_rank * 1e6)


@dataclass(frozen=True)
class Way:
    """How a generation is spread: G GPUs in ranks of `tensor_parallel`, candidates split into tiles or not.

    cost: "constant" (appendix B: each sample costs the same) or "engine". rows_first: a rank takes some rows of
    many candidates rather than many rows of some, which `world.share` does.
    """

    gpus: int
    cost: str = "constant"
    tiles: bool = True
    tensor_parallel: int = 1
    rows_first: bool = False
    with_cache: bool = False

    @property
    def ranks(self) -> int:
        return self.gpus // self.tensor_parallel


TERMS = {
    "work": "the arithmetic of the mean rank's tokens: what shrinks with the ranks",
    "unfilled steps": "the mean rank's decode steps beyond that: the weights are read for few tokens, in the end for "
                      "the longest answer alone (and what tensor parallelism adds)",
    "tiles and lengths": "the rank with the longest answers or most tiles beyond the mean rank",
    "stragglers": "what slow ranks add",
    "place": "candidates are placed one after another",
    "all-gather": "its messages, by Bruck",
    "bookkeeping": "what every rank spends on reading the words of all the others",
    "update": "of the search, on every rank alike",
}
CHUNK = 2_000_000    # cells simulated at once


def simulate(setting: Setting, way: Way, generations: int, seed: int = 0) -> dict:
    """Mean seconds of a generation, their standard error, and what they are made of: TERMS, which add up to them."""
    found = np.zeros((generations, len(TERMS)))
    for g in range(generations):
        busy, work, cells = _busy(setting, way, np.random.default_rng([seed, g]))
        slow = np.exp(setting.straggling * np.random.default_rng([seed, g, 1]).standard_normal(way.ranks))
        candidates = tiles_of(cells, setting.batch)
        if way.rows_first:
            candidates = np.minimum(np.diff(cells), setting.population)
        nbytes = exchange_bytes(way.ranks, setting.population, setting.batch)
        a_rank, an_arm = setting.bookkeeping
        found[g] = (work.mean(), busy.mean() - work.mean(), busy.max() - busy.mean(), (busy * slow).max() - busy.max(),
                    setting.place * candidates.max(), allgather_seconds(way.ranks, nbytes, setting.network),
                    way.ranks * a_rank + setting.population * an_arm, setting.update)
    terms = dict(zip(TERMS, found.mean(axis=0).tolist()))
    seconds = found.sum(axis=1)
    error = float(seconds.std(ddof=1) / generations ** 0.5) if generations > 1 else None
    return {"seconds": float(seconds.mean()), "standard_error": error, "terms": terms, "limit": limit(terms)}


def limit(terms: dict) -> str:
    """The largest term but the work, which is what shrinks with the ranks."""
    return max((name for name in terms if name != "work"), key=lambda name: terms[name])


def _busy(setting: Setting, way: Way, rng) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(seconds each rank takes, of these the arithmetic, the ranks' boundaries), stragglers aside."""
    population, batch = setting.population, setting.batch
    cells = boundaries(way.ranks, population, batch, way.tiles)
    counts = np.diff(cells)
    if way.cost == "constant":
        sample = sample_seconds(setting, way.tensor_parallel)
        return counts * sample, np.full(way.ranks, population * batch * sample / way.ranks), cells
    engine, rows = setting.engine(way.tensor_parallel, way.with_cache), rng.standard_normal(batch)
    if way.rows_first:
        flat = setting.lengths(rng, rows, population).T.ravel()
        return *_engines(setting, engine, flat, cells), cells
    busy, work = np.zeros(way.ranks), np.zeros(way.ranks)
    # In chunks that end where a rank's share does, each with the candidates it touches; the one that two chunks
    # share is drawn anew, so its answers on both are independent but for their rows.
    starts = np.searchsorted(cells, np.arange(0, cells[-1] + CHUNK, CHUNK)).clip(0, way.ranks)
    for a, b in zip(starts[:-1], starts[1:]):
        if a < b and cells[a] < cells[b]:
            first, last = cells[a] // batch, -(-cells[b] // batch)
            flat = setting.lengths(rng, rows, int(last - first)).ravel()
            busy[a:b], work[a:b] = _engines(setting, engine, flat, cells[a:b + 1] - first * batch)
    return busy, work, cells


def _engines(setting, engine: Engine, flat: np.ndarray, cells: np.ndarray):
    """(busy, arithmetic) seconds of the ranks whose answers are flat[cells[r]:cells[r + 1]]."""
    counts = np.diff(cells)
    if not counts.all():            # ranks with nothing to do
        has = np.flatnonzero(counts)
        busy, work = np.zeros(len(counts)), np.zeros(len(counts))
        busy[has], work[has] = _engines(setting, engine, flat, np.append(cells[has], cells[-1]))
        return busy, work
    width = int(counts.max(initial=1))
    at = cells[:-1, None] + np.arange(width)
    lengths = np.where(np.arange(width) < counts[:, None], flat[np.minimum(at, len(flat) - 1)], 0)
    reading = counts * setting.prompt * (engine.token + engine.transfer)      # prompts: arithmetic, in large pieces
    return decode_seconds(lengths, engine) + reading, (lengths.sum(axis=1) + counts * setting.prompt) * engine.token


def sample_seconds(setting: Setting, tensor_parallel: int = 1) -> float:
    """Appendix B's eta: the seconds a sample of an engine whose slots are all taken."""
    engine = setting.engine(tensor_parallel)
    return setting.prompt * (engine.token + engine.transfer) + setting.mean_length * float(engine.step(engine.slots)) / engine.slots


def scaled(setting: Setting, population: int) -> Setting:
    """The same with another population: weak scaling."""
    return replace(setting, population=population)
