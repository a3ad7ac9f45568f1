"""How far an adapter has moved the model, on the task and beside it.

The Kullback-Leibler divergence a token, KL(adapter || base), on completions that the adapted model draws at
temperature 1: with r = p_base(token) / p_adapter(token), the mean of (r - 1) - ln r has it as its expectation, is never
negative, and varies less than the mean of -ln r (J. Schulman, "Approximating KL divergence", 2020). Of plain text
that is given, also by how much its negative log-likelihood a token has grown.
"""

from dataclasses import replace

import numpy as np

from .config import Config
from .engine import Request
from .estimates import ratio_and_error
from .evaluate import EVALUATION
from .perturbation import sampling_seed
from .tasks import render
from .world import World


def drift(config: Config, world: World, engine, vectors: dict, rows: list, texts: bool = False) -> dict[str, dict]:
    """arm -> {"kl": [nats a token, standard error], "tokens": ...}, of vectors (name -> (D,)); equal on every rank.

    rows: prompts to complete (in at most config.max_tokens tokens). texts: the prompts are plain texts, of which the
    first half is continued; then also {"nll_growth": [nats a token, standard error]} on the texts themselves.
    """
    names, lengths = list(vectors), [len(rows)] * len(vectors)
    drawing = replace(config, temperature=1.0, top_p=1.0, stop=[])
    mine = [_tile(drawing, engine, vectors[names[tile.arm]], rows, range(tile.start, tile.stop), texts)
            for tile in world.share(lengths)]
    cells = world.collect(np.concatenate([*mine, np.empty((0, 4))]), lengths).reshape(len(names), len(rows), 4)
    found = {}
    for name, (kl, tokens, growth, length) in zip(names, cells.transpose(0, 2, 1)):
        found[name] = {"kl": ratio_and_error(kl, tokens), "tokens": int(tokens.sum())}
        if texts:
            found[name]["nll_growth"] = ratio_and_error(growth, length)
    return found


def _tile(config, engine, vector, rows, indices, texts: bool) -> np.ndarray:
    """(rows, 4): summed KL estimates, tokens drawn, growth of the texts' nll, their tokens."""
    out = np.zeros((len(indices), 4))
    whole = [_tokens(rows[i], engine, config, texts) for i in indices]
    prompts = [ids[:max(1, len(ids) // 2)] if texts else ids for ids in whole]
    engine.place([vector])
    drawn = [c.tokens for c in engine.generate(
        [Request(0, p, sampling_seed(config.seed, EVALUATION, i, 0)) for p, i in zip(prompts, indices)], config)]
    pairs = [(p, list(d)) for p, d in zip(prompts, drawn)] + [(ids[:1], ids[1:]) for ids in whole if texts]
    adapted = engine.logprobs(pairs)
    engine.place([None])
    for n, (ours, base) in enumerate(zip(adapted, engine.logprobs(pairs))):
        log_ratio = base - ours
        if n < len(indices):
            out[n, :2] = np.sum(np.expm1(log_ratio) - log_ratio), len(log_ratio)
        else:
            out[n - len(indices), 2:] = np.sum(log_ratio), len(log_ratio)
    return out


def _tokens(row, engine, config, texts: bool) -> list[int]:
    ids = list(engine.tokenizer(row.prompt)["input_ids"]) if texts else render(row, engine.tokenizer, config)
    return ids[:engine.max_model_len - 1]
