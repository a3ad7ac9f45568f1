"""How much of a candidate is rounded away where its numbers are kept in 16 bits.

`merged` rounds W_0 + U_B core V_A^T, `slots` rounds U_B core. Where candidates lie closer together
than a unit in the last place, they become one, or differ by chance. `shared` keeps the cores in
float32, and what it rounds is the same for all candidates.
"""

import json
from pathlib import Path

import numpy as np

from .spectrum import Spectrum

MOSTLY = 0.5
LAYERS = 4      # `merged`: weights of so many projections are read and tried


def engine_dtype(config) -> str:
    """The engine's dtype by name: config.dtype, or the model's own."""
    if config.dtype != "auto":
        return config.dtype
    model = json.loads((Path(config.model) / "config.json").read_text())
    dtype = str(model.get("dtype") or model.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return "bfloat16" if dtype == "float32" else dtype      # vLLM's `auto` takes float32 models in 16 bits


def rounding_error(spectrum: Spectrum, mode: str, dtype: str, model: str, x: np.ndarray, other: np.ndarray) -> float:
    """|| round(delta) - round(delta') - (delta - delta') || / || delta - delta' || of two search vectors (D,).

    0 is exact; 1 and more: the difference is nothing but rounding. Frobenius norms over the
    projections, for `merged` over LAYERS of them. 0 where nothing of a candidate is rounded or its
    weights cannot be read.
    """
    if mode == "shared" or dtype == "float32" or np.array_equal(x, other):
        return 0.0
    import torch
    to = getattr(torch, dtype)
    searched = [i for i, p in enumerate(spectrum.projections) if p.searched]
    weights = None
    if mode == "merged":
        searched = [searched[i] for i in np.linspace(0, len(searched) - 1, LAYERS).astype(int)]
        weights = _weights(model, {spectrum.projections[i].module for i in searched})
    error = size = 0.0
    first, second = spectrum.cores(x), spectrum.cores(other)
    for i in searched:
        p = spectrum.projections[i]
        pair = [torch.from_numpy(p.U_B @ cores[i]) for cores in (first, second)]
        if mode == "merged":
            if p.module not in weights:
                continue
            right = torch.from_numpy(p.V_A.T.copy())
            pair = [weights[p.module].double() + left @ right for left in pair]
        exact = pair[0] - pair[1]
        rounded = pair[0].to(to).double() - pair[1].to(to).double()
        error += float((rounded - exact).square().sum())
        size += float(exact.square().sum())
    return (error / size) ** 0.5 if size else 0.0


def _weights(model: str, modules: set[str]) -> dict:
    """Module -> its weight, of those that the model's safetensors hold unquantised."""
    from safetensors import safe_open
    found = {}
    for path in sorted(Path(model).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                module = name.removesuffix(".weight")
                if module in modules and file.get_slice(name).get_dtype() in ("BF16", "F16", "F32"):
                    found[module] = file.get_tensor(name)
    return found


def warning(spectrum: Spectrum, config, sigma: float, x: np.ndarray, mean: np.ndarray) -> str | None:
    """A line if most of the difference between a candidate and the mean is rounding, else None."""
    dtype = engine_dtype(config)
    error = rounding_error(spectrum, config.mode, dtype, config.model, x, mean)
    if error <= MOSTLY:
        return None
    return (f"warning: sigma {sigma:.3g} is so small that {dtype} rounds candidates away in mode {config.mode}: measured, the "
            f"rounding is {error:.0%} of the difference between a candidate and the mean; use mode = 'shared', "
            f"dtype = 'float32' or a larger sigma")
