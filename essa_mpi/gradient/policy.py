"""The model as torch + peft have it: log-probabilities of completions and the adapter's gradient.

What is trained is one flat vector, float32, of which the adapter's factors are a function: the factors
themselves (`lora`), or the offsets of their singular values that ESSA searches (`spectrum`, the ESSA
paper's SVD-GRPO: the gradient goes to x by the chain rule, A = U diag(s) V^T).
"""

from dataclasses import dataclass

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, DynamicCache

from ..config import Config, UserError
from ..spectrum import Spectrum
from ..tasks import one_line
from ..training import autocast, left_pad, quantised, straighten
from .losses import Objective, k3, token_losses, total_loss


@dataclass
class Sequence:
    """One completion to learn from."""

    prompt: list[int]
    completion: list[int]
    drawn: np.ndarray        # (tokens,) float64: the engine's log-probabilities of the completion's tokens
    advantage: float
    old: np.ndarray | None = None        # (tokens,): the trainer's, before the first update; None: as they are now
    reference: np.ndarray | None = None  # (tokens,): the warm start's


class Lora:
    """The flat vector is all factors of the adapter, in the order of their names."""

    def __init__(self, spectrum: Spectrum):
        tensors = spectrum.tensors
        self.names = sorted(tensors)
        self._shapes = [tensors[name].shape for name in self.names]
        self.start = np.concatenate([tensors[name].ravel() for name in self.names]).astype(np.float32)
        self._spectrum = spectrum

    def factors(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """name -> float32 array."""
        parts = np.split(flat, np.cumsum([np.prod(shape) for shape in self._shapes])[:-1])
        return {name: part.reshape(shape) for name, part, shape in zip(self.names, parts, self._shapes)}

    def gradient(self, flat: np.ndarray, factors: dict[str, np.ndarray]) -> np.ndarray:
        """With respect to the flat vector, from those with respect to the factors."""
        return np.concatenate([factors[name].ravel() for name in self.names])

    def placed(self, flat: np.ndarray) -> Spectrum:
        """What `Engine.place` takes."""
        return self._spectrum.with_factors(self.factors(flat))


class Singular:
    """The flat vector is the search vector x: the warm start is 0."""

    def __init__(self, spectrum: Spectrum):
        self.names = sorted(spectrum.tensors)
        self.start = np.zeros(spectrum.dimension, np.float32)
        self._spectrum = spectrum

    def factors(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        return self._spectrum.factors(flat)

    def gradient(self, flat: np.ndarray, factors: dict[str, np.ndarray]) -> np.ndarray:
        return self._spectrum.gradient(flat, factors).astype(np.float32)

    def placed(self, flat: np.ndarray) -> np.ndarray:
        return flat.astype(np.float64)


PARAMETERS = {"lora": Lora, "spectrum": Singular}


class Policy:
    """The base model with the adapter, on this rank's device. Attributes: parameters (Lora or Singular)."""

    def __init__(self, config: Config, spectrum: Spectrum):
        """Loads the base model a second time, beside the engine's. Raises UserError."""
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._temperature, self._micro_batch, self._dtype = config.temperature, config.micro_batch, config.train_dtype
        self.parameters = PARAMETERS[config.parameters](spectrum)
        dtype = config.train_dtype if config.train_dtype != "auto" else config.dtype
        try:
            base = AutoModelForCausalLM.from_pretrained(
                config.model, dtype=dtype if dtype == "auto" else getattr(torch, dtype), local_files_only=True,
                # On a CPU the backward pass of torch's fused attention takes longer than that of the plain one.
                **({"attn_implementation": "eager"} if self.device == "cpu" else {}), **quantised(config.model))
        except (OSError, ValueError) as error:
            raise UserError(f"config: model = {config.model!r}: cannot be loaded: {one_line(error)}") from error
        straighten(base)
        # peft keeps the factors in float32 and multiplies with them in it.
        self.model = PeftModel.from_pretrained(base, config.adapter, is_trainable=True).to(self.device).eval()
        weights = dict(self.model.named_parameters())
        self._weights = {name: weights[name.replace(".weight", ".default.weight")] for name in self.parameters.names}
        self._flat = None
        self.place(self.parameters.start)

    def place(self, flat: np.ndarray) -> None:
        """Make the factors those of the flat vector."""
        self._flat = flat
        with torch.no_grad():
            for name, value in self.parameters.factors(flat).items():
                self._weights[name].copy_(torch.from_numpy(np.ascontiguousarray(value)))

    @torch.no_grad()
    def log_probabilities(self, sequences: list[Sequence]) -> list[np.ndarray]:
        """Of each completion's tokens, (tokens,) float32, in nats, at config.temperature."""
        found = []
        for part in self._parts(sequences):
            logp, mask = self._forward(part)
            found += [row[keep].cpu().numpy() for row, keep in zip(logp, mask.bool())]
        return found

    def gradient(self, objective: Objective, sequences: list[Sequence]) -> tuple[np.ndarray, dict[str, float]]:
        """The gradient (parameters,) float32 of the sum `total_loss` over the sequences, and sums about them."""
        sums = dict.fromkeys(("loss", "tokens", "clipped", "kl", "mismatch", "mismatch_kl", "mismatch_most"), 0.0)
        for part in self._parts(sequences):
            logp, mask = self._forward(part)
            old = self._padded([s.old for s in part], logp)
            old = logp.detach() if old is None else old
            reference = self._padded([s.reference for s in part], logp)
            advantage = torch.tensor([s.advantage for s in part], dtype=torch.float32, device=self.device)
            losses, clipped = token_losses(objective, logp, old, advantage, reference)
            loss = total_loss(objective, losses, mask)
            loss.backward()
            with torch.no_grad():
                sums["loss"] += loss.item()
                sums["tokens"] += mask.sum().item()
                sums["clipped"] += (clipped * mask).sum().item()
                if reference is not None:
                    sums["kl"] += (k3(logp, reference) * mask).sum().item()
                # How far trainer and sampler are apart, before any update: the policy is the same, the arithmetic is not.
                apart = (old - self._padded([s.drawn for s in part], logp)) * mask
                sums["mismatch"] += apart.abs().sum().item()
                sums["mismatch_kl"] += (apart.exp() - 1 - apart).sum().item()
                sums["mismatch_most"] = max(sums["mismatch_most"], apart.abs().max().item())
        factors = {name: np.zeros(w.shape, np.float32) if w.grad is None else w.grad.cpu().numpy()
                   for name, w in self._weights.items()}
        found = self.parameters.gradient(self._flat, factors)
        self.model.zero_grad(set_to_none=True)
        return found, sums

    def _parts(self, sequences):
        return (sequences[i:i + self._micro_batch] for i in range(0, len(sequences), self._micro_batch))

    def _forward(self, part: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probabilities, mask), (sequences, longest completion) float32; completions begin at 0.

        Rollouts of a prompt stand together: it is run once for them, and their gradients meet in its keys and values.
        """
        prompts, of = [], []        # each prompt once; which of them is a sequence's
        for s in part:
            if not prompts or prompts[-1] != s.prompt:
                prompts.append(s.prompt)
            of.append(len(prompts) - 1)
        first = left_pad(prompts, self.device)
        of = torch.tensor(of, device=self.device)
        longest = max(len(s.completion) for s in part)
        tokens = torch.tensor([s.completion + [0] * (longest - len(s.completion)) for s in part], device=self.device)
        mask = torch.tensor([[1.0] * len(s.completion) + [0.0] * (longest - len(s.completion)) for s in part],
                            device=self.device)
        with autocast(self.device, self._dtype):
            out = self.model(**first, use_cache=True, past_key_values=DynamicCache(), logits_to_keep=1)
            logits = out.logits[of]
            if longest > 1:
                cache = out.past_key_values
                cache.batch_select_indices(of)
                seen = torch.cat([first["attention_mask"][of], torch.ones_like(tokens[:, 1:])], 1)
                places = first["position_ids"][of, -1:] + 1 + torch.arange(longest - 1, device=self.device)
                more = self.model(input_ids=tokens[:, :-1], attention_mask=seen, position_ids=places, use_cache=True,
                                  past_key_values=cache).logits
                logits = torch.cat([logits, more], 1)
        logits = logits.float() / self._temperature
        return logits.gather(2, tokens[:, :, None]).squeeze(2) - logits.logsumexp(2), mask

    def _padded(self, rows: list, like: torch.Tensor) -> torch.Tensor | None:
        """Values a token, placed as `_forward` has them; None if there are none."""
        if rows[0] is None:
            return None
        out = np.zeros(like.shape, np.float32)
        for place, row in zip(out, rows):
            place[:len(row)] = row
        return torch.from_numpy(out).to(self.device)
