"""Arms x rows to scores: the one path by which training and evaluation score anything."""

import time
from dataclasses import dataclass

import numpy as np

from . import trace
from .config import Config, UserError, reward_bounds
from .engine import Completion, Request
from .perturbation import sampling_seed
from .spectrum import Spectrum
from .tasks import Row, render
from .world import Busy, Tile, TileScore


@dataclass(frozen=True)
class Arm:
    """What is scored: a search vector (None: the base model) on rows `indices` of `split`."""

    name: str                    # "candidate 3", "mean", "base", ...
    vector: object               # (D,), None, or a Spectrum: what `Engine.place` takes
    split: list[Row]
    indices: np.ndarray          # (rows,) int64
    candidate: int | None = None  # its number, if it is one of the population


@dataclass(frozen=True)
class Rollout:
    """One completion, with what a gradient method learns from it."""

    place: int                   # of its row in the arm's indices
    prompt: list[int]
    completion: Completion
    reward: float                # nan: none


class Scorer:
    """Scores tiles of arms with one engine and one reward."""

    def __init__(self, engine, reward, config: Config):
        self.engine, self._reward, self._config = engine, reward, config
        self.warn, self._told = None, set()     # warn(line): where the first trouble of a kind is told besides
        self._prompts = {}       # row source -> token ids: rows come back every epoch

    def like(self, config: Config, reward) -> "Scorer":
        """One with the same engine for another task, or other sampling."""
        other = Scorer(self.engine, reward, config)
        other.warn = self.warn
        return other

    def score(self, arms: list[Arm], tiles: list[Tile], generation: int, keep: list | None = None,
              rollouts: list | None = None):
        """Score this rank's tiles. Returns (a TileScore a tile, Busy, samples).

        samples: dicts of the first `samples_logged` completions. Sampling seeds depend on (seed,
        generation, row, sample) alone, so all arms of a generation draw the same. A row whose reward
        is missing for one of its samples is missing. keep: gets an array (rows, samples) of rewards a tile,
        nan where there is none. rollouts: gets a Rollout a completion, those of a row one after the other. Raises
        UserError from the reward.
        """
        busy = Busy(counters=dict.fromkeys(("completions", "tokens", "cut", "empty", "too_long"), 0),
                    components=[TileScore() for _ in self._reward.names])
        self.engine.reset_clock()
        scores, samples, width = [], [], self._config.samples
        for chunk in self._chunks(arms, tiles):
            with trace.span("place"):
                self.engine.place([arms[tile.arm].vector for tile in chunk])
            requests, rows = [], []
            for place, tile in enumerate(chunk):
                arm = arms[tile.arm]
                for index in map(int, arm.indices[tile.start:tile.stop]):
                    for sample in range(width):
                        seed = sampling_seed(self._config.seed, generation, index, sample)
                        requests.append(Request(place, self._prompt(arm.split[index]), seed))
                        rows.append(arm.split[index])
            with trace.span("generate"):
                completions = self.engine.generate(requests, self._config, rollouts is not None)
            began = time.perf_counter()
            with trace.span("score"):
                rewards, components = self._judge(rows, completions)
            busy.score += time.perf_counter() - began
            if rollouts is not None:
                places = [p for tile in chunk for p in range(tile.start, tile.stop) for _ in range(width)]
                rollouts += [Rollout(place, request.prompt, completion, reward)
                             for place, request, completion, reward in zip(places, requests, completions, rewards)]
            at = 0
            for tile in chunk:
                score, block = TileScore(), rewards[at:at + (tile.stop - tile.start) * width].reshape(-1, width)
                for place, row in zip(range(tile.start, tile.stop), block):
                    score.add(_mean(row), odd=place % 2 == 1)
                scores.append(score)
                if keep is not None:
                    keep.append(block)
                at += block.size
            for i, completion in enumerate(completions):
                arm = arms[chunk[requests[i].candidate].arm]
                if arm.candidate is not None:
                    for name, total in zip(self._reward.names, busy.components):
                        total.add(_number(components[i].get(name)))
                if len(samples) < self._config.samples_logged:
                    samples.append({"generation": generation, "candidate": arm.candidate, "arm": arm.name,
                                    "source": rows[i].source, "prompt": rows[i].prompt,
                                    "completion": completion.text, "answer": rows[i].answer, "reward": rewards[i],
                                    "components": components[i]})
            _count(busy.counters, completions)
        self._tell_trouble(generation)
        busy.place, busy.generate = self.engine.seconds["place"], self.engine.seconds["generate"]
        return scores, busy, samples

    def _judge(self, rows, completions) -> tuple[np.ndarray, list[dict]]:
        """Rewards (n,), nan where there is none, and components; a completion that was not made is not judged."""
        rewards, components = np.full(len(rows), np.nan), [{} for _ in rows]
        made = [i for i, c in enumerate(completions) if not c.too_long]
        if made:
            found = self._reward.judge([rows[i] for i in made], [completions[i].text for i in made],
                                       [completions[i].tokens for i in made])
            rewards[made] = found.values
            for i, parts in zip(made, found.components):
                components[i] = parts
            self._check_bounds(rewards, rows)
        return rewards, components

    def _tell_trouble(self, generation: int) -> None:
        """Why scores are missing: all of it into this rank's log, the first of a kind to the screen too."""
        for kind, count in self._reward.trouble.items():
            line = (f"generation {generation}: {count} completions could not be judged: {kind} (first: "
                    f"{self._reward.where.get(kind, 'unknown')})")
            print(line, flush=True)
            if self.warn is not None and kind not in self._told:
                self.warn(f"warning: {line}")
            self._told.add(kind)
        self._reward.trouble.clear()
        self._reward.where.clear()

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
        alone = lambda tile: isinstance(arms[tile.arm].vector, Spectrum)
        for tile in tiles:
            if chunk and (len(chunk) == self.engine.capacity or alone(tile) or alone(chunk[-1])):
                yield chunk
                chunk = []
            chunk.append(tile)
        if chunk:
            yield chunk

    def _prompt(self, row: Row) -> list[int]:
        ids = self._prompts.get(row.source)
        if ids is None:
            ids = self._prompts[row.source] = render(row, self.engine.tokenizer, self._config)
        return ids


def _number(value: float | None) -> float:
    return np.nan if value is None else value


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
