"""A quantised copy of a model folder: int8 or int4 weights in the compressed-tensors format, which vLLM reads.

Each group of weights is scaled by its largest and rounded to nearest; nothing is calibrated, so any model is done in
seconds and without data. w8a8: int8 weights, a scale an output channel, activations rounded to int8 token by token.
w4a16: int4 weights, a scale for each `group_size` inputs of an output channel. Embeddings and lm_head stay as they are.
"""

import json
import shutil
from pathlib import Path

from .config import UserError
from .files import write_folder
from .spectrum import SEARCHED, STATIC, check_model, model_shapes

SCHEMES = ("w8a8", "w4a16")
GROUP_SIZES = (128, 64, 32)      # what is tried where none is asked for, the largest first

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def quantise(model: str, out: str, scheme: str, group_size: int | None = None) -> str:
    """Write the model in the folder `model` to a new folder `out`. Returns a line that says so. Raises UserError.

    group_size: of w4a16; None: the largest of GROUP_SIZES that divides the input size of every layer.
    """
    source, target = Path(model), Path(out)
    if scheme not in SCHEMES:
        raise UserError(f"--scheme {scheme}: is not known; use {' or '.join(SCHEMES)}")
    if group_size is not None and scheme != "w4a16":
        raise UserError(f"--group-size {group_size}: is of --scheme w4a16 alone; leave it out")
    if target.exists():
        raise UserError(f"{out}: is there already; name a folder that does not exist")
    config = check_model(source)
    if "quantization_config" in config:
        raise UserError(f"model {model} is quantised already; give the model it was made from")
    layers = _linear_layers(source)
    group_size = _group_size(model, layers, group_size) if scheme == "w4a16" else None
    try:
        write_folder(target, lambda fresh: _write(source, fresh, config, layers, scheme, group_size))
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from error
    numbers = f"int4, in groups of {group_size}" if group_size else "int8"
    return f"{scheme} model written to {out}: {len(layers)} linear layers in {numbers}"


def _linear_layers(source: Path) -> dict[str, tuple[int, int]]:
    """Module name -> (m, n) of what is to be quantised."""
    shapes = model_shapes(source)
    if not shapes:
        raise UserError(f"model {source}: no safetensors files there; save it again with transformers "
                        f"(save_pretrained)")
    inner = {name: shape for name, shape in shapes.items() if ".layers." in name and shape}
    # The format quantises all linear layers or names the exceptions; a mixture's router must not be rounded.
    other = sorted(name for name in inner if name.rpartition(".")[2] not in SEARCHED + STATIC)
    if other:
        raise UserError(f"model {source}: {other[0]} is not an attention or MLP projection "
                        f"({', '.join(SEARCHED + STATIC)}); only plain Llama- and Qwen-style models can be quantised")
    return inner


def _group_size(model: str, layers: dict[str, tuple[int, int]], wanted: int | None) -> int:
    if wanted is not None and (wanted < 2 or wanted % 2):
        raise UserError(f"--group-size {wanted}: must be even and positive")
    for size in GROUP_SIZES if wanted is None else (wanted,):
        misfit = next((name for name, (_, n) in layers.items() if n % size), None)
        if misfit is None:
            return size
    raise UserError(f"model {model}: {misfit} has {layers[misfit][1]} inputs, which groups of {size} do not divide; "
                    f"use another --group-size, or --scheme w8a8")


def _write(source: Path, folder: Path, config: dict, layers: dict, scheme: str, group_size: int | None) -> None:
    """The whole of the new model folder."""
    from compressed_tensors import __version__
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from safetensors.torch import load_file, save_file
    plan = preset_name_to_scheme(scheme.upper(), ["Linear"])
    plan.weights.group_size = group_size
    form = "int-quantized" if scheme == "w8a8" else "pack-quantized"
    described = QuantizationConfig(config_groups={"group_0": plan}, format=form, quantization_status="compressed",
                                   ignore=["lm_head"])
    folder.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.suffix not in WEIGHTS and not path.name.endswith(".index.json"):
            shutil.copy(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(
        {**config, "quantization_config": {**json.loads(described.model_dump_json()), "version": __version__}},
        indent=2) + "\n")
    where, size = {}, 0
    for path in sorted(source.glob("*.safetensors")):
        if path.name.startswith("consolidated"):    # the same weights once more, under other names
            continue
        tensors = {}
        for name, tensor in load_file(path).items():
            module, _, leaf = name.rpartition(".")
            if module in layers and leaf == "weight":
                parts = _compress(module, tensor, plan, form)
                tensors.update({f"{module}.{part}": value for part, value in parts.items()})
            else:
                tensors[name] = tensor
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, path.name))
        size += sum(tensor.nbytes for tensor in tensors.values())
    if len(set(where.values())) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps(
            {"metadata": {"total_size": size}, "weight_map": where}, indent=2) + "\n")


def _compress(module: str, weight, plan, form: str) -> dict:
    """What stands for a weight (m, n) in the file, under the format's names: its integers, their scales (m, groups)."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams
    exact = weight.float()
    groups = exact.unflatten(1, (-1, plan.weights.group_size or exact.shape[1]))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), plan.weights)
    if not scale.isfinite().all():
        raise UserError(f"{module} holds weights that are not finite; copy the model again")
    if plan.input_activations is None:
        # vLLM multiplies in the model's own type; rounded before the integers are chosen, the scale costs nothing.
        scale = scale.to(weight.dtype)
    return BaseCompressor.get_value_from_registry(form).compress({"weight": exact, "weight_scale": scale}, plan)
