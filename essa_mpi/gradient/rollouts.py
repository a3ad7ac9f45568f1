"""A step's rollouts: groups of completions of the same prompt, drawn with the current policy, and their advantages.

Prompts are shared over the ranks as an evaluation's rows are; a group stays on its rank. Every rank learns all
rewards, so which groups count, and what their advantages are, is decided alike everywhere.
"""

import time
from dataclasses import dataclass, field

import numpy as np
import torch

from ..config import Config, UserError
from ..departure import bits
from ..evolve import Stopwatch
from ..rounds import together
from ..rows import Rows
from ..scoring import Arm, Rollout
from ..world import Exchanged, World
from .losses import advantages, flat, focal_weight


@dataclass
class Step:
    """What one step drew; all but `mine`, `samples` and `seconds` is the same on every rank."""

    rewards: np.ndarray                  # (groups, N) of the groups that count, nan where there is none
    advantages: np.ndarray               # (groups, N) float64, the focal weight in them
    weights: np.ndarray                  # (groups,) the focal weights
    mine: dict[int, list[Rollout]]       # group -> its rollouts, of those this rank drew
    exchanged: Exchanged
    drawn: np.ndarray                    # (groups drawn, N) rewards of all that was drawn
    draws: int
    flat_groups: int                     # of those drawn, the groups whose rewards are all the same
    stop: int                            # what any rank wants after it
    samples: list[dict]
    seconds: dict[str, float] = field(default_factory=dict)     # place, generate, score, wait, allgather


def draw(config: Config, world: World, scorer, task, rows: Rows, placed, cursor: int, digest: int, clock: Stopwatch,
         stop) -> Step:
    """Draw batches of the train split, number `cursor` and on, until the step has its groups.

    One batch and one all-gather of scores (with the digest of the policy), then one of the rewards; with
    dynamic_sampling up to that many of them. placed: what the engine places. stop() -> what this rank wants after this
    step (see `departure`); if anything, nothing more is drawn. Raises DigestError, and UserError from the reward or if
    the policy has no probabilities.
    """
    dynamic = config.dynamic_sampling > 0
    kept, mine, drawn, samples, found, stopping = [], {}, [], [], None, 0
    seconds = dict.fromkeys(("place", "generate", "score", "wait", "allgather"), 0.0)
    while True:
        batch = rows.batch(cursor + len(drawn))
        local = []
        scores, busy, some = scorer.score([Arm("policy", placed, task.train, batch, 0)], world.share([len(batch)]),
                                          cursor + len(drawn), rollouts=local)
        if not all(np.isfinite(r.completion.logprobs).all() for r in local):
            raise UserError(f"draw {cursor + len(drawn)}: the policy gives no probabilities any more (nan); lower lr = "
                            f"{config.lr:g}")
        busy.total = clock()
        more = world.exchange([len(batch)], scores, digest, busy, stop())
        began = time.perf_counter()
        rewards = world.collect(np.array([r.reward for r in local]).reshape(-1, config.group), [len(batch)])
        clock()
        seconds["allgather"] += more.seconds + time.perf_counter() - began
        seconds["wait"] += more.wait
        for name in ("place", "generate", "score"):
            seconds[name] += getattr(busy, name)
        samples = samples or some
        stopping |= bits(more.header["stop"])
        found = more if found is None else together(found, more)
        flats = flat(torch.from_numpy(rewards)).numpy()
        for place in range(len(batch)):
            if not (dynamic and flats[place]) and len(kept) < config.batch:
                kept.append(rewards[place])
                of_it = [r for r in local if r.place == place]
                if of_it:
                    mine[len(kept) - 1] = of_it
        drawn.append(rewards)
        if len(kept) == config.batch or len(drawn) >= max(1, config.dynamic_sampling) or stopping:
            break
    values = torch.from_numpy(np.array(kept).reshape(-1, config.group))
    scale = config.advantages == "std" or (config.advantages == "auto" and config.loss != "dr_grpo")
    A = advantages(values, scale)
    weights = torch.ones(len(values), dtype=torch.float64)
    if config.focal_gamma:      # gamma = 0 is the base method, to the bit
        weights = focal_weight(values, config.focal_gamma, config.focal_threshold)
        A = A * weights[:, None]
    everything = np.concatenate(drawn)
    return Step(values.numpy(), A.numpy(), weights.numpy(), mine, found, everything, len(drawn),
                int(flat(torch.from_numpy(everything)).sum()), stopping, samples, seconds)
