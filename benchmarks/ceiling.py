"""How far could the quickstart's evolution get with the numbers it searches? Adam on the same numbers, with gradients.

    python -m benchmarks.ceiling [--json FILE] [--epochs 3] [--rates 0.01 0.03 0.1] [--absolute] [--save x.npy]

The same 480 offsets of the warm start's singular values, the same rows that evolution draws from, but the
supervised loss of `sft` on their completions: what is reached is a ceiling in practice for a search that has the
reward alone. Learning rate and epoch are chosen on the validation rows; the held-out rows only measure.
A row is right if at every token of its answer, up to the closing brace, the likeliest token is the wanted one:
greedy decoding then writes just that. The rows on which real greedy decoding agrees are counted.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from essa_mpi import config as configuration
from essa_mpi.config import UserError

from . import record

CONFIG = "jobs/quickstart.toml"
BATCH = 32                              # as a generation of the quickstart
TRIAL_STEPS = 40                        # of each learning rate
ALONG = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
GENERATED = 100                         # rows decoded for comparison


def adapted(linear, p):
    """The layer with `core` (r, r) to be set: its own weights as they are, the low-rank path in float32 as in `shared`."""
    import torch

    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.core = linear, None
            self.U, self.V = (torch.from_numpy(np.float32(each)) for each in (p.U_B, p.V_A))

        def forward(self, h):
            delta = (h.float() @ self.V) @ (self.U @ self.core).T
            return (self.linear(h) + delta).to(h.dtype)     # the sum is float32, rounded once

    return Adapted()


class Candidate:
    """The model as a differentiable function of the search vector."""

    def __init__(self, config, spectrum, dtype):
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        self.config, self.relative = config, spectrum.relative
        self.model = AutoModelForCausalLM.from_pretrained(config.model, dtype=dtype, local_files_only=True)
        self.model.requires_grad_(False).eval()
        self._generation = GenerationConfig(do_sample=False, max_new_tokens=config.max_tokens,
                                            eos_token_id=self.model.config.eos_token_id,
                                            pad_token_id=self.model.config.eos_token_id)
        self._layers = []
        for p in spectrum.projections:
            if p.searched != p.rank:
                raise UserError(f"ceiling: {p.searched} of {p.rank} singular values of {p.module} are searched; needs all")
            parent, _, name = p.module.rpartition(".")
            layer = adapted(getattr(self.model.get_submodule(parent), name), p)
            setattr(self.model.get_submodule(parent), name, layer)
            self._layers.append(layer)
        # x is, projection by projection, A's offsets and then B's.
        self._s = torch.tensor(np.array([[p.s_A, p.s_B] for p in spectrum.projections]), dtype=torch.float32)
        self._M = torch.tensor(np.array([p.scale * p.mixing for p in spectrum.projections]), dtype=torch.float32)

    def place(self, x):
        offset = x.view(self._s.shape)
        s = self._s * (1 + offset) if self.relative else self._s + offset
        for layer, core in zip(self._layers, s[:, 1, :, None] * self._M * s[:, 0, None, :]):
            layer.core = core

    def logits(self, rows: "Rows", index):
        """float32 (len(index), completion tokens, vocabulary): what predicts the completions."""
        # All prompts begin alike: that part is computed once for the batch, gradients and all.
        cache = self.model(rows.prefix, use_cache=True, logits_to_keep=1).past_key_values
        for layer in cache.layers:
            layer.keys, layer.values = (t.expand(len(index), -1, -1, -1) for t in (layer.keys, layer.values))
        inputs = rows.tokens[index, rows.prefix.shape[1]:-1]
        return self.model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=rows.completion).logits.float()

    def losses(self, rows, index):
        """Mean cross-entropy of the completion tokens, end token included, and which rows are right."""
        import torch
        wanted = rows.tokens[index, -rows.completion:]
        logits = self.logits(rows, index)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        # What follows the closing brace makes no difference to the reward, so the end token is not asked for.
        return loss, (logits.argmax(-1) == wanted)[:, :-1].all(1)

    def measure(self, x, rows) -> dict:
        import torch
        with torch.inference_mode():
            self.place(x)
            parts = [self.losses(rows, index) for index in torch.arange(len(rows.tokens)).split(125)]
        right = torch.cat([part[1] for part in parts]).double()
        loss = sum(part[0].item() * len(part[1]) for part in parts) / len(right)
        return {"accuracy": right.mean().item(), "error": (right.var() / len(right)).sqrt().item(), "loss": loss}

    def agreement(self, x, rows, tokenizer, reward) -> int:
        """On how many of the first rows the reward of greedy decoding is 1 just where `losses` says right."""
        import torch
        n = min(GENERATED, len(rows.tokens))
        with torch.inference_mode():
            self.place(x)
            right = self.losses(rows, torch.arange(n))[1].numpy()
            prompts = rows.tokens[:n, :-rows.completion]
            written = self.model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=self._generation)
        texts = tokenizer.batch_decode(written[:, prompts.shape[1]:], skip_special_tokens=True)
        return int(((reward.score(rows.rows[:n], texts) == 1) == right).sum())


class Rows:
    """Rows as one block of tokens (n, prompt + completion), just as `sft` would learn them."""

    def __init__(self, rows, tokenizer, config):
        import torch
        from essa_mpi.sft import _example
        examples = [_example(row, tokenizer, config, float("inf")) for row in rows]
        lengths = {(len(prompt), len(completion)) for prompt, completion in examples}
        if len(lengths) > 1:
            raise UserError(f"ceiling: {rows[0].source} and on: rows of {len(lengths)} different lengths; needs one")
        self.rows, self.completion = rows, len(examples[0][1])
        self.tokens = torch.tensor([prompt + completion for prompt, completion in examples])
        differ = (self.tokens != self.tokens[0]).any(0)
        self.prefix = self.tokens[:1, :int(differ.nonzero()[0])]


def climb(candidate, rows, rate: float, steps: int, seed: int, each, decay: bool):
    """Adam from the warm start, x = 0; `each(step, x, mean training loss since the last epoch)` after an epoch and at the end."""
    import torch
    x = torch.zeros(candidate._s.numel(), requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=rate)
    draw, order, losses = torch.Generator().manual_seed(seed), [], []
    for step in range(1, steps + 1):
        if not order:
            order = list(torch.randperm(len(rows.tokens), generator=draw).split(BATCH))
        if decay:
            optimizer.param_groups[0]["lr"] = rate * (1 - (step - 1) / steps)
        candidate.place(x)
        loss, _ = candidate.losses(rows, order.pop(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not order or step == steps:
            each(step, x.detach().clone(), sum(losses) / len(losses))
            losses = []
