"""Adapter <-> singular values <-> search vector. peft in, peft out; knows nothing of MPI or vLLM.

Paper, section 3: the two LoRA factors of a projection, A (r x n) and B (m x r), are
decomposed each on its own, A = U_A S_A V_A^T and B = U_B S_B V_B^T. U and V stay
fixed; the search vector holds the top floor(alpha r) singular values of A and of B
of every adapted attention projection, as offsets: 0 is the adapter as it was.

M = V_B^T U_A is r x r, orthogonal and fixed, so a candidate differs from the others
only in an r x r core a projection:

    delta W = U_B core V_A^T,   core = scale * diag(s_B + d_B) M diag(s_A + d_A)
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from .config import UserError

SEARCHED = ("q_proj", "k_proj", "v_proj", "o_proj")
STATIC = ("gate_proj", "up_proj", "down_proj")   # kept as the warm start left them
OFFSETS = ("relative", "exp", "projection", "absolute")   # see `Spectrum.offsets`
MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)   # vLLM's LoRAConfig
PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")   # vLLM's PEFTHelper: the base stays as it was

_TENSOR = re.compile(r"^base_model\.model\.(?P<module>.+\.layers\.(?P<layer>\d+)\.\w+\.(?P<projection>\w+))"
                     r"\.lora_(?P<factor>[AB])(?:\.default)?\.weight$")


def searched_values(alpha: float, rank: int) -> int:
    """floor(alpha r): singular values of one factor that are searched.

    Guarded against 0.29 * 100 = 28.999...; see paper, section 3 and its Table 7.
    """
    return math.floor(alpha * rank + 1e-9)


@dataclass(frozen=True)
class Projection:
    """One adapted linear layer, decomposed. All arrays float64."""

    module: str        # e.g. model.layers.0.self_attn.q_proj
    name: str          # q_proj
    scale: float       # peft's lora_alpha / r
    U_B: np.ndarray    # (m, r)
    s_B: np.ndarray    # (r,)
    V_B: np.ndarray    # (r, r), columns are right singular vectors
    U_A: np.ndarray    # (r, r)
    s_A: np.ndarray    # (r,)
    V_A: np.ndarray    # (n, r)
    searched: int      # singular values of each factor in the search vector: 0 for a static layer

    @property
    def rank(self) -> int:
        return len(self.s_A)

    @cached_property
    def mixing(self) -> np.ndarray:
        """M = V_B^T U_A, (r, r) orthogonal."""
        return self.V_B.T @ self.U_A


class Spectrum:
    """The searched singular values of one adapter.

    projections: in layer order, q, k, v, o within a layer. The search vector is the
    concatenation, projection by projection, of A's offsets, then B's.
    """

    def __init__(self, projections: list[Projection], kind: str, scales: dict, tensors: dict, peft_config: dict):
        self.projections, self.kind, self.scales = projections, kind, scales
        self.dimension = sum(2 * p.searched for p in projections)   # D
        self.max_rank = max(p.rank for p in projections)
        self.tensors, self.peft_config = tensors, peft_config
        self.source = _hash_tensors(tensors)      # of the adapter as it was read, on any machine

    @classmethod
    def load(cls, folder: str | Path, alpha: float, kind: str = "relative", scales: dict | None = None) -> "Spectrum":
        """Decompose the peft adapter in `folder`. Raises UserError if it cannot be searched.

        kind: what a search coordinate means, one of OFFSETS. scales: by how much the offsets of a
        projection ("q_proj") or of a factor ("A", "B") are larger than the others'; see `offsets`.
        """
        if kind not in OFFSETS:
            raise ValueError(f"kind = {kind!r}; allowed: {', '.join(OFFSETS)}")
        peft_config, tensors = read_adapter(folder)
        factors = {}
        for name, tensor in tensors.items():
            match = _TENSOR.match(name)
            if match is None or match["projection"] not in SEARCHED + STATIC:
                raise UserError(f"adapter {folder}: `{name}` is not a LoRA factor of an attention or MLP "
                                f"projection ({', '.join(SEARCHED + STATIC)}); train the adapter on those only")
            factors.setdefault(match["module"], {"layer": int(match["layer"]), "name": match["projection"]})
            factors[match["module"]][match["factor"]] = tensor
        order = SEARCHED + STATIC
        projections = []
        for module, f in sorted(factors.items(), key=lambda kv: (kv[1]["layer"], order.index(kv[1]["name"]))):
            if "A" not in f or "B" not in f:
                raise UserError(f"adapter {folder}: {module} has lora_{'A' if 'A' in f else 'B'} but not its pair; "
                                f"save it again with peft")
            if f["A"].shape[0] != f["B"].shape[1]:
                raise UserError(f"adapter {folder}: {module} has A {f['A'].shape} and B {f['B'].shape}: ranks differ; "
                                f"save it again with peft")
            projections.append(_decompose(folder, module, f, peft_config, alpha))
        if not any(p.name in SEARCHED for p in projections):
            raise UserError(f"adapter {folder}: adapts no attention projection; it needs one of {', '.join(SEARCHED)}")
        if all((p.s_B == 0).all() or (p.s_A == 0).all() for p in projections if p.searched):
            raise UserError(f"adapter {folder}: its update is zero (an untrained adapter), so no singular value of it "
                            f"does anything; warm-start it first: python -m essa_mpi sft CONFIG")
        return cls(projections, kind, scales or {}, tensors, peft_config)

    def spectra(self, x: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """(s_A + d_A, s_B + d_B) of every projection for the search vector x (D,)."""
        x = np.asarray(x, np.float64)
        if x.shape != (self.dimension,):
            raise ValueError(f"search vector has shape {x.shape}, needs ({self.dimension},)")
        d_A, d_B = self.offsets(x)
        return [(p.s_A + a[:p.rank], p.s_B + b[:p.rank]) for p, a, b in zip(self.projections, d_A, d_B)]

    def offsets(self, x: np.ndarray) -> np.ndarray:
        """What x adds to s_A (0) and s_B (1), zero where nothing: x (..., D) to float64 (..., 2, projections, largest rank).

        With c the coordinate's scale and s its singular value: "relative", d = s c x, one sigma for
        values of all sizes; "exp", d = s (e^(c x) - 1), which never changes sign; "projection",
        d = c x times the factor's mean singular value, so that small values move as far as large
        ones; "absolute", d = c x, the paper's wording.
        """
        x = np.asarray(x, np.float64)
        flat = np.zeros((*x.shape[:-1], 2 * len(self.projections) * self.max_rank))
        at, size, scale = self._places
        flat[..., at] = size * (np.expm1(scale * x) if self.kind == "exp" else scale * x)
        return flat.reshape(*x.shape[:-1], 2, len(self.projections), self.max_rank)

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each search coordinate: where it lies in the flat `offsets`, the size of its unit, its scale."""
        at, size, scale, r = [], [], [], self.max_rank
        for i, p in enumerate(self.projections):
            for factor, s in enumerate((p.s_A, p.s_B)):
                at.extend((factor * len(self.projections) + i) * r + np.arange(p.searched))
                unit = {"absolute": np.ones_like(s), "projection": np.full_like(s, s.mean())}.get(self.kind, s)
                size.extend(unit[:p.searched])
                scale.extend([self.scales.get(p.name, 1.0) * self.scales.get("AB"[factor], 1.0)] * p.searched)
        return np.array(at, int), np.array(size), np.array(scale)

    def stacked_cores(self, offsets: np.ndarray) -> np.ndarray:
        """The cores of all projections at once: offsets (K, 2, P, r) to float64 (K, P, r, r), zero beyond a smaller rank."""
        mixing, s_A, s_B = self._stacked
        return (s_B + offsets[:, 1])[..., :, None] * mixing * (s_A + offsets[:, 0])[..., None, :]

    @cached_property
    def _stacked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(scale M, s_A, s_B) of all projections, zero beyond a smaller rank."""
        count, r = len(self.projections), self.max_rank
        mixing, s_A, s_B = np.zeros((count, r, r)), np.zeros((count, r)), np.zeros((count, r))
        for i, p in enumerate(self.projections):
            mixing[i, :p.rank, :p.rank] = p.scale * p.mixing
            s_A[i, :p.rank], s_B[i, :p.rank] = p.s_A, p.s_B
        return mixing, s_A, s_B

    def cores(self, x: np.ndarray) -> list[np.ndarray]:
        """scale * diag(s_B + d_B) M diag(s_A + d_A), (r, r) float64, one a projection."""
        return [p.scale * s_B[:, None] * p.mixing * s_A[None, :]
                for p, (s_A, s_B) in zip(self.projections, self.spectra(x))]

    def factors(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """The adapter's tensors for x under their peft names: A' = U_A diag V_A^T, B' = U_B diag V_B^T."""
        by_module = {p.module: pair for p, pair in zip(self.projections, self.spectra(x))}
        projections = {p.module: p for p in self.projections}
        result = {}
        for name, tensor in self.tensors.items():
            match = _TENSOR.match(name)
            p, (s_A, s_B) = projections[match["module"]], by_module[match["module"]]
            left, s, right = (p.U_A, s_A, p.V_A) if match["factor"] == "A" else (p.U_B, s_B, p.V_B)
            result[name] = ((left * s) @ right.T).astype(np.float32)
        return result

    def gradient(self, x: np.ndarray, factors: dict[str, np.ndarray]) -> np.ndarray:
        """With respect to x, (D,) float64, from the gradients with respect to `factors(x)`, by the chain rule.

        A' = U diag(s + d) V^T is linear in d: its derivative along singular value k is u_k v_k^T.
        """
        projections = {p.module: (i, p) for i, p in enumerate(self.projections)}
        along = np.zeros((2, len(self.projections), self.max_rank))
        for name, G in factors.items():
            match = _TENSOR.match(name)
            i, p = projections[match["module"]]
            left, right = (p.U_A, p.V_A) if match["factor"] == "A" else (p.U_B, p.V_B)
            along["AB".index(match["factor"]), i, :p.rank] = np.einsum("mk,mn,nk->k", left, G, right, optimize=True)
        at, size, scale = self._places
        slope = size * scale * (np.exp(scale * np.asarray(x, np.float64)) if self.kind == "exp" else 1.0)
        return along.ravel()[at] * slope

    def with_factors(self, factors: dict[str, np.ndarray]) -> "Spectrum":
        """Another adapter of the same shapes, factors A and B as they are: its x = 0 is that adapter, and it has no other.

        Not decomposed: diag(s) = 1, so that B A is B I A.
        """
        pairs = {}
        for name, tensor in factors.items():
            match = _TENSOR.match(name)
            pairs.setdefault(match["module"], {})[match["factor"]] = np.asarray(tensor, np.float64)
        plain = []
        for p in self.projections:
            A, B, one = pairs[p.module]["A"], pairs[p.module]["B"], np.ones(p.rank)
            plain.append(Projection(p.module, p.name, p.scale, B, one, np.eye(p.rank), np.eye(p.rank), one, A.T.copy(),
                                    p.searched))
        return Spectrum(plain, "absolute", {}, factors, self.peft_config)

    def save(self, folder: str | Path, x: np.ndarray) -> None:
        """Write the adapter for x as an ordinary peft folder (float32)."""
        import torch
        from safetensors.torch import save_file
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: torch.from_numpy(np.ascontiguousarray(t)) for name, t in self.factors(x).items()}
        save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(self.peft_config, indent=2) + "\n")

    def digest(self) -> str:
        """A hash of all that makes a candidate out of a search vector; compared between ranks at start."""
        h = hashlib.blake2b(f"{self.kind} {sorted(self.scales.items())}".encode(), digest_size=8)
        for p in self.projections:
            h.update(f"{p.module} {p.scale!r} {p.searched}\n".encode())
            for array in (p.U_B, p.s_B, p.V_B, p.U_A, p.s_A, p.V_A):
                h.update(np.ascontiguousarray(array).tobytes())
        return h.hexdigest()


def read_adapter(folder: str | Path) -> tuple[dict, dict[str, np.ndarray]]:
    """(adapter_config, name -> float64 array) of a peft LoRA folder. Raises UserError."""
    folder = Path(folder)
    if not (folder / "adapter_config.json").is_file():
        raise UserError(f"adapter {folder}: no adapter_config.json there; give a peft LoRA folder, "
                        f"or make one with: python -m essa_mpi sft CONFIG")
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"adapter {folder}: adapter_config.json cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"adapter {folder}: adapter_config.json is not a JSON object; save the adapter again with peft")
    for key in ("r", "lora_alpha"):
        if type(config.get(key)) not in (int, float):
            raise UserError(f"adapter {folder}: adapter_config.json has {key} = {config.get(key)!r}; needs a number: "
                            f"save the adapter again with peft")
    if config.get("peft_type") != "LORA":
        raise UserError(f"adapter {folder}: peft_type is {config.get('peft_type')}; only LORA is supported: train a plain LoRA")
    for key in ("use_dora", "lora_bias", "alora_invocation_tokens", "use_qalora", "use_bdlora", "layer_replication"):
        if config.get(key):
            raise UserError(f"adapter {folder}: {key} is set; it changes what a singular value means and "
                            f"is not supported: train a plain LoRA")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in PLAIN_INITS:
        raise UserError(f"adapter {folder}: init_lora_weights = {init!r}: loading it moves the base model's weights, "
                        f"which is not supported; convert it to a plain LoRA (peft: save_pretrained with "
                        f"path_initial_model_for_weight_conversion)")
    if config.get("bias", "none") != "none" or config.get("modules_to_save"):
        raise UserError(f"adapter {folder}: it trains biases or whole modules (bias, modules_to_save), which a "
                        f"candidate cannot carry; train with bias='none' and no modules_to_save")
    try:
        if (folder / "adapter_model.safetensors").is_file():
            from safetensors.torch import load_file
            tensors = load_file(str(folder / "adapter_model.safetensors"))
        elif (folder / "adapter_model.bin").is_file():
            import torch
            tensors = torch.load(folder / "adapter_model.bin", map_location="cpu", weights_only=True)
        else:
            raise UserError(f"adapter {folder}: no adapter_model.safetensors or adapter_model.bin there")
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"adapter {folder}: its weights cannot be read: {error}; copy or save it again") from None
    return config, {name: tensor.double().numpy() for name, tensor in tensors.items()}


def _hash_tensors(tensors: dict[str, np.ndarray]) -> str:
    h = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        h.update(f"{name} {tensors[name].shape}\n".encode() + np.ascontiguousarray(tensors[name]).tobytes())
    return h.hexdigest()


def _pattern(patterns: dict, module: str, default):
    """peft's rank_pattern / alpha_pattern: the first key that names the module or ends its name."""
    for key, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _decompose(folder, module: str, f: dict, peft_config: dict, alpha: float) -> Projection:
    rank = f["A"].shape[0]
    lora_alpha = _pattern(peft_config.get("alpha_pattern"), module, peft_config["lora_alpha"])
    nominal = _pattern(peft_config.get("rank_pattern"), module, peft_config["r"])
    if nominal != rank:
        raise UserError(f"adapter {folder}: {module} has rank {rank} but its adapter_config says {nominal}; "
                        f"save it again with peft")
    if rank > MAX_RANKS[-1]:
        raise UserError(f"adapter {folder}: rank {rank} is not supported by vLLM (at most {MAX_RANKS[-1]}); "
                        f"train with a lower rank")
    if rank > min(f["A"].shape[1], f["B"].shape[0]):
        raise UserError(f"adapter {folder}: {module} has rank {rank} but is {f['B'].shape[0]} x {f['A'].shape[1]}; "
                        f"a factor has no more singular values than that: train with a lower rank")
    searched = searched_values(alpha, rank) if f["name"] in SEARCHED else 0
    if f["name"] in SEARCHED and searched == 0:
        raise UserError(f"config: alpha = {alpha}: floor(alpha x rank) is 0 for rank {rank}, so nothing would be "
                        f"searched; use alpha >= {math.ceil(1e4 / rank) / 1e4:g}")
    if not (np.isfinite(f["A"]).all() and np.isfinite(f["B"]).all()):
        raise UserError(f"adapter {folder}: {module} holds values that are not finite; train it again with a lower rate")
    # A (r x n) with r <= n; B (m x r) with r <= m: thin SVDs.
    U_A, s_A, V_At = np.linalg.svd(f["A"], full_matrices=False)
    U_B, s_B, V_Bt = np.linalg.svd(f["B"], full_matrices=False)
    scale = lora_alpha / math.sqrt(rank) if peft_config.get("use_rslora") else lora_alpha / rank
    return Projection(module, f["name"], scale, U_B, s_B, V_Bt.T.copy(), U_A, s_A, V_At.T.copy(), searched)


def check_fits(spectrum: Spectrum, model_folder: str | Path, shapes: dict[str, tuple[int, int] | None]) -> None:
    """Raise UserError if a projection of the adapter does not fit the model, naming both shapes.

    shapes: module name -> (m, n) of the model's linear layers, None where it is not known.
    """
    for p in spectrum.projections:
        if p.module not in shapes:
            raise UserError(f"the adapter adapts {p.module}, which the model {model_folder} does not have; "
                            f"it belongs to another model: set model or adapter to the other's own")
        have, need = shapes[p.module], (p.U_B.shape[0], p.V_A.shape[0])
        if have not in (None, need):
            raise UserError(f"the adapter belongs to another model: {p.module} is {need[0]} x {need[1]} in the "
                            f"adapter and {have[0]} x {have[1]} in {model_folder}; set model or adapter to the other's own")


def model_shapes(model_folder: str | Path) -> dict[str, tuple[int, int] | None]:
    """Module name -> (m, n) of a Hugging Face folder's linear layers, from the safetensors headers almost alone.

    None for modules without such a weight, and where a quantised format does not tell. Empty for a
    folder without safetensors, UserError for a damaged one.
    """
    import struct
    modules = {}
    for path in sorted(Path(model_folder).glob("*.safetensors")):
        try:
            with open(path, "rb") as f:
                length = struct.unpack("<Q", f.read(8))[0]
                header = json.loads(f.read(length))
                for name, entry in header.items():
                    module, _, leaf = name.rpartition(".")
                    shape = entry.get("shape")
                    if leaf == "weight_shape":      # compressed-tensors: the tensor holds the shape
                        f.seek(8 + length + entry["data_offsets"][0])
                        shape = struct.unpack("<2q", f.read(16))
                    if shape is not None:
                        modules.setdefault(module, {})[leaf] = None if entry["dtype"] == "U8" else tuple(shape)
        except (OSError, ValueError, LookupError, AttributeError, TypeError, OverflowError, MemoryError,
                struct.error) as error:
            raise UserError(f"model {model_folder}: {path.name} is not a safetensors file: {error}; "
                            f"copy the model again") from None
    return {name: _linear_shape(tensors) for name, tensors in modules.items()}


def _linear_shape(tensors: dict[str, tuple | None]) -> tuple[int, int] | None:
    """(m, n) of a layer from its tensors' shapes (None: bytes that hold several numbers each)."""
    if "weight_shape" in tensors:
        return tensors["weight_shape"]
    if "qweight" in tensors and len(tensors.get("scales") or ()) == 2:
        m = tensors["scales"][1]
        if tensors["qweight"][1] != m:      # AWQ packs the outputs: (n, m / 8)
            return m, tensors["qweight"][0]
        n, = tensors.get("g_idx") or (None,)     # GPTQ the inputs: (n / 8, m)
        return n and (m, n)
    weight = tensors.get("weight")
    return weight if weight and len(weight) == 2 else None


def check_model(model_folder: str | Path) -> dict:
    """The model's config.json. Raises UserError for a folder that is no usable model."""
    folder = Path(model_folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"model {folder}: no config.json there; give a Hugging Face model folder: nothing is downloaded, "
                        f"but `hf download NAME --local-dir DIR` makes one")
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise UserError(f"model {folder}: config.json is not JSON: {error}") from None
    shapes = model_shapes(folder)
    if shapes:
        missing = [p for p in SEARCHED if not any(name.endswith(f".self_attn.{p}") for name in shapes)]
        if missing:
            raise UserError(f"model {folder} ({', '.join(config.get('architectures') or ['?'])}) has no "
                            f"{', '.join(missing)}: only Llama- and Qwen-style attention (q_proj, k_proj, v_proj, "
                            f"o_proj) can be evolved")
    return config
