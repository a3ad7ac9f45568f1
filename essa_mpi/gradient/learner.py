"""The trained vector and its optimiser: equal on every rank, because every rank applies the same summed gradient."""

import hashlib

import numpy as np
import torch

from ..config import Config, UserError


class Learner:
    """A flat vector (P,) float32 under AdamW, with a linear warm-up and a clipped norm.

    Attributes: flat; updates (done so far); rate (learning rate of the last update, nan before the first).
    (F-GRPO's appendix: betas .9 and .999, weight decay .01, norm 1.)
    """

    def __init__(self, start: np.ndarray, config: Config):
        self._config, self.updates, self.rate = config, 0, float("nan")
        self._weights = torch.nn.Parameter(torch.from_numpy(start.copy()))
        self._optimiser = torch.optim.AdamW([self._weights], lr=config.lr, betas=(0.9, 0.999), eps=1e-8,
                                            weight_decay=config.weight_decay)

    @property
    def flat(self) -> np.ndarray:
        return self._weights.detach().numpy().copy()

    def _next_rate(self) -> float:
        warm = self._config.warmup_steps
        return self._config.lr * min(1.0, (self.updates + 1) / warm) if warm else self._config.lr

    def update(self, gradient: np.ndarray) -> float:
        """One step against `gradient` (P,) float32; its norm before clipping.

        Raises UserError if the gradient is not finite, or what comes of it.
        """
        gradient = torch.from_numpy(gradient)
        norm = gradient.double().norm().item()
        if not np.isfinite(norm):
            raise UserError(f"update {self.updates + 1}: the gradient is {norm}; lower lr = {self._config.lr:g}")
        limit = self._config.clip_norm
        self._weights.grad = gradient * min(1.0, limit / (norm + 1e-6)) if limit else gradient
        self._optimiser.param_groups[0]["lr"] = self.rate = self._next_rate()
        self._optimiser.step()
        self.updates += 1
        if not torch.isfinite(self._weights).all():
            raise UserError(f"update {self.updates}: the trained values are not finite any more; lower lr = "
                            f"{self._config.lr:g} or weight_decay = {self._config.weight_decay:g}")
        return norm

    def digest(self) -> int:
        """int64 of everything the next update depends on."""
        h = hashlib.blake2b(digest_size=8)
        for name, value in sorted(self.state().items()):
            h.update(name.encode() + np.ascontiguousarray(value).tobytes())
        return int.from_bytes(h.digest(), "little", signed=True)

    def state(self) -> dict[str, np.ndarray]:
        """Arrays for a checkpoint: `load_state` goes on from them bit by bit."""
        moments = self._optimiser.state.get(self._weights, {})
        zero = np.zeros_like(self.flat)
        return {"flat": self.flat, "updates": np.int64(self.updates),
                "first": moments["exp_avg"].numpy().copy() if moments else zero,
                "second": moments["exp_avg_sq"].numpy().copy() if moments else zero}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        with torch.no_grad():
            self._weights.copy_(torch.from_numpy(state["flat"]))
        self.updates = int(state["updates"])
        if self.updates:
            self._optimiser.state[self._weights] = {
                "step": torch.tensor(float(self.updates)), "exp_avg": torch.from_numpy(state["first"].copy()),
                "exp_avg_sq": torch.from_numpy(state["second"].copy())}
