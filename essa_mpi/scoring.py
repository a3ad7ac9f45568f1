"""Arms x rows to scores: the one path by which training and evaluation score anything."""

import time
from dataclasses import dataclass

import numpy as np

from .config import Config, UserError, reward_bounds
from .engine import Request
from .perturbation import sampling_seed
from .tasks import Row, render
from .world import Busy, Tile, TileScore


@dataclass(frozen=True)
class Arm:
    """What is scored: a search vector (None: the base model) on rows `indices` of `split`."""

    name: str                    # "candidate 3", "mean", "base", ...
    vector: np.ndarray | None    # (D,)
    split: list[Row]
    indices: np.ndarray          # (rows,) int64


class Scorer:
    """Scores tiles of arms with one engine and one reward."""

    def __init__(self, engine, reward, config: Config):
        self._engine, self._reward, self._config = engine, reward, config
        self._prompts = {}       # row source -> token ids: rows come back every epoch

    def score(self, arms: list[Arm], tiles: list[Tile], generation: int):
        """Score this rank's tiles. Returns (a TileScore a tile, Busy, samples).

        samples: dicts of the first `samples_logged` completions. Sampling seeds depend on (seed,
        generation, row, sample) alone, so all arms of a generation draw the same. A row whose reward
        is missing for one of its samples is missing. Raises UserError from the reward.
        """
        busy = Busy(counters=dict.fromkeys(("completions", "tokens", "cut", "empty", "too_long"), 0))
        self._engine.reset_clock()
        scores, samples = [], []
        for chunk in self._chunks(arms, tiles):
            self._engine.place([arms[tile.arm].vector for tile in chunk])
            requests, rows = [], []
            for place, tile in enumerate(chunk):
                arm = arms[tile.arm]
                for index in map(int, arm.indices[tile.start:tile.stop]):
                    for sample in range(self._config.samples):
                        seed = sampling_seed(self._config.seed, generation, index, sample)
                        requests.append(Request(place, self._prompt(arm.split[index]), seed))
                        rows.append(arm.split[index])
            completions = self._engine.generate(requests)
            began = time.perf_counter()
            rewards = np.full(len(rows), np.nan)
            made = [i for i, c in enumerate(completions) if not c.too_long]
            if made:
                rewards[made] = self._reward.score([rows[i] for i in made], [completions[i].text for i in made])
                self._check_bounds(rewards, rows)
            busy.score += time.perf_counter() - began
            at = 0
            for tile in chunk:
                score = TileScore()
                for place in range(tile.start, tile.stop):
                    score.add(_mean(rewards[at:at + self._config.samples]), odd=place % 2 == 1)
                    at += self._config.samples
                scores.append(score)
            for i, completion in enumerate(completions):
                if len(samples) < self._config.samples_logged:
                    samples.append({"generation": generation, "arm": arms[chunk[requests[i].candidate].arm].name,
                                    "source": rows[i].source, "prompt": rows[i].prompt,
                                    "completion": completion.text, "answer": rows[i].answer, "reward": rewards[i]})
            _count(busy.counters, completions)
        for kind, count in self._reward.trouble.items():    # why scores are missing; into this rank's log
            print(f"generation {generation}: {count} completions could not be judged: {kind}", flush=True)
        self._reward.trouble.clear()
        busy.place, busy.generate = self._engine.seconds["place"], self._engine.seconds["generate"]
        return scores, busy, samples

    def _check_bounds(self, rewards, rows):
        """A race drops candidates by these bounds, so they must hold."""
        if self._config.racing < 2:
            return
        low, high = reward_bounds(self._config)
        for i in np.flatnonzero(np.isfinite(rewards) & ((rewards < low) | (rewards > high))):
            raise UserError(f"reward {rewards[i]:g} on {rows[i].source}: outside reward_low = {low:g} and reward_high = "
                            f"{high:g}, by which racing drops candidates; set them to what the reward can give")

    def _chunks(self, arms, tiles):
        """Tiles in runs that the engine can hold placed at once; a rank has at most one tile an arm."""
        chunk = []
        for tile in tiles:
            if len(chunk) == self._engine.capacity:
                yield chunk
                chunk = []
            chunk.append(tile)
        if chunk:
            yield chunk

    def _prompt(self, row: Row) -> list[int]:
        ids = self._prompts.get(row.source)
        if ids is None:
            ids = self._prompts[row.source] = render(row, self._engine.tokenizer, self._config)
        return ids


def _mean(rewards: np.ndarray) -> float:
    """The mean, nan if one is; never outside what it is the mean of, where rounding may put it (three times 0.1)."""
    return float(np.clip(np.mean(rewards), rewards.min(), rewards.max()))


def _count(counters, completions):
    for c in completions:
        counters["too_long"] += c.too_long
        counters["completions"] += not c.too_long
        counters["tokens"] += len(c.tokens)
        counters["cut"] += c.cut
        counters["empty"] += not c.too_long and not c.text.strip()
