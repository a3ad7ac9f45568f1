"""The engines and candidates that the benchmarks of scoring and placing compare.

Call `prepare` before anything imports torch or vLLM.
"""

import os
import tempfile
from pathlib import Path

MODEL = ".cache/models/SmolLM2-135M-Instruct"    # jobs/prepare_model.py
RANK = 8


def prepare() -> None:
    """One thread, and vLLM's environment as in a run."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from essa_mpi.engine_environment import set_environment
    set_environment(0)


def random_adapter(model: str, folder: str, rank: int = RANK) -> str:
    """A peft LoRA folder on q, k, v and o of all layers, with fixed random factors."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    peft_model = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
                                LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:    # peft starts it at zero
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    peft_model.save_pretrained(folder)
    return folder


def candidates(spectrum, count: int):
    """Search vectors (count, D), as the first generation of a run with sigma 0.5 would draw them."""
    from essa_mpi import perturbation
    return 0.5 * perturbation.population_normals(0, 0, range(count), spectrum.dimension)


def save_candidates(spectrum, vectors, folder: Path) -> list[str]:
    """Each vector as a peft folder below `folder`."""
    for k, vector in enumerate(vectors):
        spectrum.save(folder / f"candidate{k}", vector)
    return [str(folder / f"candidate{k}") for k in range(len(vectors))]


def scratch() -> tempfile.TemporaryDirectory:
    """A folder on the RAM disk where there is one."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


OPTIONS = dict(max_model_len=256, max_num_seqs=64)


def our_engine(model: str, adapter: str, mode: str, dtype: str, slots: int):
    """An engine as `run` starts it, but for the prefix cache, which is off."""
    from essa_mpi.config import make
    from essa_mpi.engine import Engine
    from essa_mpi.spectrum import Spectrum
    config = make({"name": "benchmark", "task": "none", "model": model, "adapter": adapter, "mode": mode, "dtype": dtype,
                   "slots": slots, "kv_cache_gib": 0.5, "vllm": {"enable_prefix_caching": False}, **OPTIONS})
    return Engine(config, Spectrum.load(adapter, config.alpha))


def vllm_engine(model: str, dtype: str, **lora):
    """vLLM alone, with the same options; `lora`: its own LoRA options, or none."""
    from vllm import LLM
    return LLM(model=model, dtype=dtype, seed=0, disable_log_stats=True, enforce_eager=True, enable_prefix_caching=False,
               kv_cache_memory_bytes=2**29, **OPTIONS, **lora)


def chat_prompts(llm, count: int) -> list[list[int]]:
    """Token ids of `count` short questions in the model's chat format."""
    tokenizer = llm.get_tokenizer()
    questions = [f"Which is the largest: {10 + i}, {97 - i} or {(37 * i) % 90 + 10}? Answer as \\boxed{{number}}." for i in range(count)]
    return [tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)
            for q in questions]


def generate(llm, prompts, adapters, tokens: int) -> list[tuple[int, ...]]:
    """Exactly `tokens` greedy tokens for each prompt, in one continuous batch."""
    from vllm import SamplingParams
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False, lora_request=adapters)
    return [tuple(output.outputs[0].token_ids) for output in outputs]
