"""How far could the quickstart's evolution get with the numbers it searches? Adam on the same numbers, with gradients.

    python -m benchmarks.ceiling [--json F] [--epochs 3] [--rates 0.03 0.1 0.3] [--threads N] [--absolute] [--save X]

The same 480 offsets of the warm start's singular values and the rows that evolution draws from, but the supervised
loss of `sft`: a lower bound of what these numbers can give, and in practice a ceiling for a search by the reward
alone. Learning rate and epoch are chosen on the validation rows; the held-out rows only measure. A row is right if
at every token of its answer, up to the closing brace, the likeliest token is the wanted one: greedy decoding
then writes just that, and is run on some rows to see that it does. On busy cores --threads 1 is the faster.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from essa_mpi import config as configuration
from essa_mpi.config import UserError
from essa_mpi.rewards import load_reward
from essa_mpi.sft import _example, _tokenizer      # the very tokens that `sft` learns
from essa_mpi.spectrum import Spectrum
from essa_mpi.tasks import load_task

from . import record

CONFIG = "jobs/quickstart.toml"
BATCH = 32                              # as a generation of the quickstart
TRIAL_STEPS = 40                        # of each learning rate
ALONG = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
GENERATED = 100                         # rows decoded for comparison


class Rows:
    """Rows as one block of tokens (n, prompt + completion)."""

    def __init__(self, rows, tokenizer, config):
        examples = [_example(row, tokenizer, config, float("inf")) for row in rows]
        if len({(len(prompt), len(completion)) for prompt, completion in examples}) != 1:
            raise UserError(f"ceiling: rows from {rows[0].source} on differ in length; needs the quickstart's own")
        self.rows, self.completion = rows, len(examples[0][1])
        self.tokens = torch.tensor([prompt + completion for prompt, completion in examples])
        self.prefix = int((self.tokens != self.tokens[0]).any(0).nonzero()[0])      # tokens that all begin with


class Adapted(torch.nn.Module):
    """A linear layer with a `core` (r, r) to be set: the low-rank path in float32, as in mode shared."""

    def __init__(self, linear, p):
        super().__init__()
        self.linear, self.core = linear, None
        self.U, self.V = (torch.from_numpy(np.float32(each)) for each in (p.U_B, p.V_A))

    def forward(self, h):
        delta = (h.float() @ self.V) @ (self.U @ self.core).T
        return (self.linear(h) + delta).to(h.dtype)     # the sum is float32, rounded once


class Candidate:
    """The model as a differentiable function of the search vector."""

    def __init__(self, config, spectrum, absolute: bool):
        # Plain attention: on rows this short the backward pass of torch's fused one takes longer.
        self.model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.bfloat16, local_files_only=True,
                                                          attn_implementation="eager").requires_grad_(False).eval()
        end = self.model.config.eos_token_id
        self._greedy = GenerationConfig(max_new_tokens=config.max_tokens, eos_token_id=end, pad_token_id=end)
        if any(p.searched != p.rank for p in spectrum.projections):
            raise UserError(f"ceiling: {CONFIG} searches some of the singular values; needs all: alpha = 1")
        self._layers = []
        for p in spectrum.projections:
            parent, _, name = p.module.rpartition(".")
            parent = self.model.get_submodule(parent)
            self._layers.append(Adapted(getattr(parent, name), p))
            setattr(parent, name, self._layers[-1])
        # x is, projection by projection, A's offsets and then B's.
        self._s = torch.from_numpy(np.float32([[p.s_A, p.s_B] for p in spectrum.projections]))
        self._mixing = torch.from_numpy(np.float32([p.scale * p.mixing for p in spectrum.projections]))
        self.dimension, self._unit = spectrum.dimension, torch.ones_like(self._s) if absolute else self._s

    def place(self, x):
        s = self._s + self._unit * x.view(self._s.shape)
        for layer, core in zip(self._layers, s[:, 1, :, None] * self._mixing * s[:, 0, None, :]):
            layer.core = core

    def losses(self, rows: Rows, index):
        """Mean cross-entropy of the completion tokens, end token included, and which rows are right."""
        # What all prompts begin with is computed once for the batch, gradients and all.
        cache = self.model.model(rows.tokens[:1, :rows.prefix], use_cache=True).past_key_values
        for layer in cache.layers:
            layer.keys, layer.values = (t.expand(len(index), -1, -1, -1) for t in (layer.keys, layer.values))
        inputs, wanted = rows.tokens[index, rows.prefix:-1], rows.tokens[index, -rows.completion:]
        h = self.model.model(inputs, past_key_values=cache, use_cache=True).last_hidden_state[:, -rows.completion:]
        # Flat: for a slice in three dimensions torch would copy the whole output matrix once a row.
        logits = self.model.lm_head(h.flatten(0, 1)).float()
        loss = torch.nn.functional.cross_entropy(logits, wanted.flatten())
        # What follows the closing brace makes no difference to the reward, so the end token is not asked for.
        return loss, (logits.argmax(-1).view_as(wanted) == wanted)[:, :-1].all(1)

    @torch.no_grad()
    def measure(self, what: str, x, rows: Rows) -> dict:
        self.place(x)
        parts = [(self.losses(rows, index), len(index)) for index in torch.arange(len(rows.tokens)).split(100)]
        right = torch.cat([right for (_, right), _ in parts]).double()
        found = {"accuracy": right.mean().item(), "error": (right.var() / len(right)).sqrt().item(),
                 "loss": sum(loss.item() * n for (loss, _), n in parts) / len(right)}
        print(f"{what}: {found['accuracy']:.3f} +- {found['error']:.3f}, loss {found['loss']:.4f}", flush=True)
        return found

    @torch.no_grad()
    def agreement(self, x, rows: Rows, tokenizer, reward) -> int:
        """On how many of the first rows greedy decoding has reward 1 just where `losses` says right."""
        self.place(x)
        right = self.losses(rows, torch.arange(GENERATED))[1].numpy()
        prompts = rows.tokens[:GENERATED, :-rows.completion]
        written = self.model.generate(prompts, attention_mask=prompts * 0 + 1, generation_config=self._greedy)
        texts = tokenizer.batch_decode(written[:, prompts.shape[1]:], skip_special_tokens=True)
        return int(((reward.score(rows.rows[:GENERATED], texts) == 1) == right).sum())


def climb(candidate, rows: Rows, rate: float, steps: int, seed: int, each=None):
    """x after `steps` of Adam from x = 0, the warm start, the rate falling to nothing; each(x) after an epoch."""
    x = torch.zeros(candidate.dimension, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=rate)
    draw, order = torch.Generator().manual_seed(seed), []
    for step in range(steps):
        order = order or list(torch.randperm(len(rows.tokens), generator=draw).split(BATCH))[::-1]
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        candidate.place(x)
        optimizer.zero_grad()
        candidate.losses(rows, order.pop())[0].backward()
        optimizer.step()
        if each and not order:
            each(x.detach().clone())
    return x.detach()


def measured(options) -> dict:
    """All that the benchmark finds out, but for the machine."""
    config = configuration.load(CONFIG, ["validation_rows=0"])      # all there are: they decide between near ones
    for path in (config.model, config.adapter, config.task, config.validation_data, config.heldout_data):
        if not Path(path).exists():
            raise UserError(f"ceiling: {path} is missing; make it: bash jobs/quickstart.sh --prepare")
    tokenizer, task = _tokenizer(config.model), load_task(config)
    train, validation, heldout = (Rows(rows, tokenizer, config) for rows in (task.train, task.validation, task.heldout))
    candidate = Candidate(config, Spectrum.load(config.adapter, config.alpha), options.absolute)
    better = lambda found: (found["accuracy"], -found["loss"])
    print(f"{len(task.train)} rows to learn, {len(task.validation)} for validation, {len(task.heldout)} held out")
    start = candidate.measure("warm start, held out", torch.zeros(candidate.dimension), heldout)
    trials = {rate: candidate.measure(f"{TRIAL_STEPS} steps at {rate:g}, validation",
                                      climb(candidate, train, rate, TRIAL_STEPS, config.seed), validation)
              for rate in options.rates if len(options.rates) > 1}
    rate = max(trials, key=lambda rate: better(trials[rate]), default=options.rates[0])
    epochs, vectors = [], []

    def each(x):
        vectors.append(x)
        what = f"epoch {len(vectors)} at {rate:g}"
        epochs.append({"rms": x.square().mean().sqrt().item(), "max": x.abs().max().item(),
                       "validation": candidate.measure(f"{what}, validation", x, validation),
                       "heldout": candidate.measure(f"{what}, held out", x, heldout)})

    climb(candidate, train, rate, options.epochs * -(-len(task.train) // BATCH), config.seed, each)
    best, x = max(zip(epochs, vectors), key=lambda pair: better(pair[0]["validation"]))
    print(f"kept: epoch {epochs.index(best) + 1}; x has rms {best['rms']:.3f}, at most {best['max']:.3f}", flush=True)
    if options.save:
        np.save(options.save, x.numpy())
    along = [{"t": t, **candidate.measure(f"{t:g} x, held out", t * x, heldout)} for t in ALONG]
    agree = [candidate.agreement(v, heldout, tokenizer, load_reward(config)) for v in (0 * x, x)]
    print(f"greedy decoding agrees on {agree[0]} (warm start) and {agree[1]} (kept) of {GENERATED} rows")
    return {"rows": epochs, "ratios": {"warm_start": start["accuracy"], "ceiling": best["heldout"]["accuracy"]},
            "start": start, "trials": trials, "rate": rate, "kept": best, "along": along, "agree": agree,
            "absolute": options.absolute, "dimension": candidate.dimension}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ceiling", description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write everything to this file")
    parser.add_argument("--epochs", type=int, default=3, help="of the best rate")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.03, 0.1, 0.3], help="Adam's, to choose from")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's")
    parser.add_argument("--absolute", action="store_true", help="offsets s + x instead of s (1 + x)")
    parser.add_argument("--save", help="write the search vector that is kept to this .npy")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        found = measured(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    record.write(options.json, "ceiling", found.pop("rows"), found.pop("ratios"),
                 versions=record.versions("torch", "transformers"), **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
