"""Small models and adapters, made with a fixed seed, for the tests that need some."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def shapes_of(config, projections=ATTENTION) -> dict[str, tuple[int, int]]:
    """Module name -> (m, n) of a Llama- or Qwen-style model's linear layers, from its transformers config."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = head * config.num_attention_heads, head * config.num_key_value_heads
    shapes = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden),
              "o_proj": (hidden, queries), "gate_proj": (wide, hidden), "up_proj": (wide, hidden),
              "down_proj": (hidden, wide)}
    return {f"model.layers.{layer}.{'mlp' if name in MLP else 'self_attn'}.{name}": shapes[name]
            for layer in range(config.num_hidden_layers) for name in projections}


def make_adapter(folder, shapes: dict, rank=8, ranks: dict | None = None, scale=0.05, seed=0, dtype=torch.float32,
                 **settings) -> Path:
    """A random peft LoRA folder. ranks: projection -> rank where it is not `rank` (and goes to no
    rank_pattern: that is up to `settings`). scale: the size of B's entries; A's make |A x| about |x|.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (m, n) in shapes.items():
        r = (ranks or {}).get(module.rpartition(".")[2], rank)
        name = f"base_model.model.{module}.lora_"
        tensors[f"{name}A.weight"] = (torch.randn(r, n, generator=generator) / n**0.5).to(dtype)
        tensors[f"{name}B.weight"] = (torch.randn(m, r, generator=generator) * scale).to(dtype)
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    projections = sorted({module.rpartition(".")[2] for module in shapes})
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "none", "r": rank,
        "lora_alpha": 2 * rank, "bias": "none", "target_modules": projections, **settings}))
    return folder


def make_model(folder, family: str, tokenizer: Path | None = None, seed=0, **settings) -> Path:
    """A random model of a few layers in float32. family: "llama", "qwen2" or "qwen3".

    tokenizer: a model folder whose tokenizer it gets. All weights come from `seed` alone, those that
    start at zero or one included (Qwen2's biases, norms), and are large enough for logits to differ.
    """
    import transformers
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    shape = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
                 bos_token_id=1, eos_token_id=2, pad_token_id=2)
    if tokenizer is not None:
        shape["vocab_size"] = json.loads((Path(tokenizer) / "config.json").read_text())["vocab_size"]
    config = getattr(transformers, f"{names[family]}Config")(**{**shape, **settings})
    model = getattr(transformers, f"{names[family]}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            scale, around = (0.1, 1) if "norm" in name else (0.5, 0) if name.endswith("bias") else (0.15, 0)
            parameter.copy_(around + scale * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja") if tokenizer else ():
        shutil.copy(Path(tokenizer) / name, Path(folder) / name)
    return Path(folder)
