"""How large a model and its adapter are, from config.json alone."""

import json
from dataclasses import dataclass
from pathlib import Path

from .config import UserError
from .files import refusals
from .spectrum import searched_values

KEYS = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Model:
    """A dense Llama- or Qwen-style decoder. Sizes in elements; weight_bytes as the engine reads them."""

    parameters: int
    weight_bytes: int
    layers: int
    hidden: int
    attention: int      # heads x head size: what o_proj reads
    key_values: int     # key-value heads x head size
    vocabulary: int = 0

    @classmethod
    def of(cls, table: dict, weight_bytes: int = 0) -> "Model":
        """From a config.json; weight_bytes 0: two bytes a parameter, float32 four. UserError if it is another kind."""
        if missing := [key for key in KEYS if not isinstance(table.get(key), int)]:
            raise UserError(f"config.json: {missing[0]} is missing; plan knows dense Llama- and Qwen-style models")
        if any(table.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
            raise UserError(f"config.json: model_type = {table.get('model_type')!r} has experts; plan knows dense "
                            f"Llama- and Qwen-style models")
        h, layers, inner, heads, vocabulary = (table[key] for key in KEYS)
        size = table.get("head_dim") or h // heads
        q, kv = heads * size, (table.get("num_key_value_heads") or heads) * size
        kind = table.get("model_type")
        bias = q + 2 * kv if kind == "qwen2" or table.get("attention_bias") else 0
        norms = 2 * h + (2 * size if kind == "qwen3" else 0)
        parameters = (layers * (h * (q + 2 * kv) + q * h + 3 * h * inner + bias + norms) + h
                      + h * vocabulary * (1 if table.get("tie_word_embeddings") else 2))
        each = 4 if "float32" in (table.get("dtype"), table.get("torch_dtype")) else 2
        return cls(parameters, weight_bytes or each * parameters, layers, h, q, kv, vocabulary)

    @classmethod
    def read(cls, folder) -> "Model":
        """From a Hugging Face model folder; the weights' size from its files. Raises UserError."""
        path = Path(folder) / "config.json"
        with refusals(path, "read"):
            text = path.read_text()
            size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        try:
            table = json.loads(text)
            if not isinstance(table, dict):
                raise ValueError
            return cls.of(table, size)
        except ValueError:
            raise UserError(f"{path} is not a JSON object; needs the config.json of a Hugging Face model") from None
        except UserError as error:
            raise UserError(f"model {folder}: {error}") from None

    def adapter_parameters(self, rank: int) -> int:
        """Of LoRA factors A (r x n) and B (m x r) on q, k, v and o of all layers."""
        return self.layers * rank * (2 * (self.hidden + self.attention) + 2 * (self.hidden + self.key_values))

    def dimension(self, rank: int, alpha: float = 1.0) -> int:
        """D: layers x 4 projections x 2 factors x floor(alpha r) (paper, section 3)."""
        return self.layers * 8 * searched_values(alpha, rank)

    @property
    def cache_bytes_a_token(self) -> int:
        """Keys and values of one token, two bytes each."""
        return 2 * 2 * self.layers * self.key_values
