"""What the warm start and the gradient methods share of torch + transformers."""

import json
from pathlib import Path

import torch


def quantised(path: str) -> dict:
    """What a compressed-tensors model is loaded with: gradients, and peft, need its weights as floats."""
    stored = json.loads((Path(path) / "config.json").read_text()).get("quantization_config") or {}
    if stored.get("quant_method") != "compressed-tensors":
        return {}
    from transformers import CompressedTensorsConfig
    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def left_pad(rows: list[list[int]], device: str) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask, position_ids, int64 (n, longest): ends aligned, padding masked."""
    width = max(map(len, rows))
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "position_ids": positions.to(device)}


def autocast(device: str, dtype: str = "auto"):
    """On a GPU bfloat16, unless float32 was asked for."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda" and dtype != "float32")


def straighten(model) -> None:
    """Before the output matrix: of a slice of positions torch (2.13, on CPUs) would copy the matrix once a row."""
    model.get_output_embeddings().register_forward_pre_hook(lambda layer, inputs: (inputs[0].contiguous(),))
