"""The rank's own vLLM engine: place candidates, generate. Knows nothing of search or MPI.

Candidates are placed by writing their numbers into tensors the engine already holds:
`shared` (their r x r cores alone, all candidates in one continuous batch), `slots` (vLLM's
LoRA slots, several candidates in a batch) or `merged` (one at a time in the base weights, from a pristine copy).
"""

import time
from dataclasses import dataclass

import numpy as np

from .config import Config, UserError
from .spectrum import MAX_RANKS, Spectrum


@dataclass(frozen=True)
class Request:
    """One completion to make: which placed candidate (None: the base model), prompt tokens, sampling seed."""

    candidate: int | None
    prompt: list[int]
    seed: int


@dataclass(frozen=True)
class Completion:
    text: str
    tokens: tuple[int, ...]
    cut: bool         # stopped by max_tokens
    too_long: bool    # the prompt did not fit max_model_len; nothing was generated
    logprobs: tuple[float, ...] = ()    # of `tokens`, in nats, where asked for


def on_cpu() -> bool:
    """True if this vLLM has no GPU to run on."""
    from vllm.platforms import current_platform
    return current_platform.is_cpu()


class Engine:
    """One vLLM engine. `seconds` holds the time spent in {"place", "generate"} since `reset_clock`.

    Attributes: spectrum (what search vectors are of); tokenizer; capacity (candidates placed at once); max_model_len.
    """

    def __init__(self, config: Config, spectrum: Spectrum):
        """Start vLLM (seconds). Raises UserError for what the user can mend."""
        from vllm import LLM
        from vllm.lora.request import LoRARequest
        self._config, self.spectrum, self._placed = config, spectrum, spectrum
        self._merged = config.mode == "merged"
        if self._merged and config.tensor_parallel > 1:
            raise UserError("config: mode = 'merged' needs tensor_parallel = 1; use mode = 'shared'")
        # A candidate in `shared` is some kilobytes: as many as can be in flight at once.
        self.capacity = {"merged": 1, "shared": config.max_num_seqs,
                         "slots": min(config.slots, config.max_num_seqs)}[config.mode]
        settings = {"mode": config.mode, "adapter": str(config.adapter), "alpha": config.alpha, "slots": self.capacity}
        options = dict(
            model=config.model, dtype=config.dtype, tensor_parallel_size=config.tensor_parallel,
            max_num_seqs=config.max_num_seqs, worker_cls="essa_mpi.worker.Worker", seed=0, disable_log_stats=True)
        if config.max_model_len:
            options["max_model_len"] = config.max_model_len
        if on_cpu():
            # vLLM takes a seeded draw of a prompt that is not whole yet back by an offset, which CPU generators lack:
            # prompts are not cut into pieces.
            options.update(enforce_eager=True, kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30),
                           enable_chunked_prefill=False)
        else:
            options["gpu_memory_utilization"] = config.gpu_memory_utilization
        if config.mode == "shared":
            # vLLM's note of which request has which adapter is all that is used of its LoRA support.
            options.update(enable_lora=True, max_loras=self.capacity, max_lora_rank=1)
        elif config.mode == "slots":
            layers = {"qkv_proj", "o_proj"}
            if any(p.searched == 0 for p in spectrum.projections):
                layers |= {"gate_up_proj", "down_proj"}
            options.update(
                enable_lora=True, max_loras=self.capacity + 1, max_cpu_loras=self.capacity + 1,
                max_lora_rank=next(r for r in MAX_RANKS if r >= spectrum.max_rank),
                lora_target_modules=sorted(layers))
        options.update(config.vllm)
        options["additional_config"] = {**options.get("additional_config", {}), "essa_mpi": settings}
        try:
            self._llm = LLM(**options)
        except (TypeError, ValueError) as error:
            if config.vllm and isinstance(error, TypeError):
                raise UserError(f"config: vllm = {config.vllm}: vLLM does not take it: {error}") from error
            raise UserError(f"vLLM could not start on {config.model}: {error}") from error
        self.tokenizer = self._llm.get_tokenizer()
        self.max_model_len = self._llm.llm_engine.model_config.max_model_len
        self._llm.collective_rpc("essa_setup", kwargs=settings)
        # Candidate k answers to adapter id k + 1; the base model to the last, in `shared` to none. The path is
        # never read: in `slots` the id is registered, in `shared` nothing is loaded.
        self._adapters = [LoRARequest(f"slot{k}", k + 1, "in-memory") for k in range(self.capacity + 1)]
        if config.mode == "shared":
            self._adapters[-1] = None
        self.reset_clock()

    def reset_clock(self) -> None:
        self.seconds = {"place": 0.0, "generate": 0.0}

    def place(self, vectors: list) -> None:
        """Make `vectors` (search vectors (D,), or None for the base model) the placed candidates 0, 1, ...

        At most `capacity` that are not None; in merged mode one in all. A Spectrum, the only one then, is another
        adapter of the same shapes, as its x = 0 is; mode shared alone can hold it.
        """
        began = time.perf_counter()
        if any(isinstance(v, Spectrum) for v in vectors):
            [other] = vectors
            self._rebase(other)
            vectors = [np.zeros(self.spectrum.dimension)]
        elif any(v is not None for v in vectors):
            self._rebase(self.spectrum)
        placed = [v for v in vectors if v is not None]
        if len(placed) > self.capacity:
            raise ValueError(f"{len(placed)} candidates for {self.capacity} places")
        if self._merged:
            [vector] = vectors
            cores = None if vector is None else self.spectrum.cores(vector)
            self._llm.collective_rpc("essa_place_merged", args=(cores,))
        elif placed:
            self._llm.collective_rpc(f"essa_place_{self._config.mode}", args=(self.spectrum.offsets(np.stack(placed)),))
        self._slot_of = dict(zip([i for i, v in enumerate(vectors) if v is not None], range(self.capacity)))
        # KV blocks are keyed by tokens and adapter name, not by weights: without this a candidate
        # would be scored on its predecessor's keys and values, silently.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests of an earlier batch are unfinished")
        self.seconds["place"] += time.perf_counter() - began

    def _rebase(self, spectrum: Spectrum) -> None:
        """Candidates are from now on of this spectrum: V_A and U_B are written anew, if they are others."""
        if spectrum is self._placed:
            return
        if self._config.mode != "shared":
            raise UserError(f"config: mode = {self._config.mode!r}: another adapter is placed in mode = 'shared' only")
        self._llm.collective_rpc("essa_rebase", args=(spectrum,))
        self._placed = spectrum

    def generate(self, requests: list[Request], sampling: Config | None = None,
                 logprobs: bool = False) -> list[Completion]:
        """Complete all requests in one continuous batch; the order of `requests` is kept.

        sampling: the config whose temperature, top_p, max_tokens and stop hold; the engine's own if absent.
        logprobs: note the log-probability with which each token was drawn.
        """
        from vllm import SamplingParams
        began = time.perf_counter()
        config = sampling or self._config
        fits = [len(r.prompt) < self.max_model_len for r in requests]
        batch = [r for r, ok in zip(requests, fits) if ok]
        params = [SamplingParams(
            temperature=config.temperature, top_p=config.top_p, max_tokens=config.max_tokens,
            stop=config.stop or None, seed=r.seed if config.temperature > 0 else None,
            logprobs=0 if logprobs else None) for r in batch]
        adapters = None if self._merged else [self._adapters[self._slot_of.get(r.candidate, -1)] for r in batch]
        outputs = iter(self._llm.generate(
            [{"prompt_token_ids": r.prompt} for r in batch], params, use_tqdm=False,
            lora_request=adapters) if batch else ())
        completions = []
        for ok in fits:
            if not ok:
                completions.append(Completion("", (), cut=False, too_long=True))
                continue
            out = next(outputs).outputs[0]
            drawn = tuple(at[t].logprob for at, t in zip(out.logprobs, out.token_ids)) if logprobs else ()
            completions.append(Completion(out.text, tuple(out.token_ids), out.finish_reason == "length", False, drawn))
        self.seconds["generate"] += time.perf_counter() - began
        return completions

    def logprobs(self, pairs: list[tuple[list[int], list[int]]]) -> list[np.ndarray]:
        """Log-probabilities (tokens,) float64 of each pair's second tokens after its first, by the placed candidate.

        In nats, at temperature 1, of one continuous batch. What does not fit max_model_len is left off.
        """
        from vllm import SamplingParams
        whole = [(prompt + rest)[:self.max_model_len - 1] for prompt, rest in pairs]
        # A token has to be made; it is not looked at.
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        adapter = None if self._merged else self._adapters[self._slot_of.get(0, -1)]
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in whole], params, use_tqdm=False,
                                     lora_request=adapter and [adapter] * len(whole)) if whole else ()
        return [np.array([out.prompt_logprobs[i][ids[i]].logprob for i in range(min(len(prompt), len(ids)), len(ids))])
                for out, ids, (prompt, _) in zip(outputs, whole, pairs)]
