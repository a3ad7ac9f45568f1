"""Mode `shared`: K candidates decode in one batch, on dense products they share. Runs inside the vLLM worker.

All candidates share V_A and U_B of a projection and differ in an r x r core, so for the tokens X of
a whole batch (rows) and each token's candidate k(t):

    H = X V_A                       one dense product
    Y[t] += (H[t] core[k(t)]^T) U_B^T    in place, by our kernels

No layer is wrapped and vLLM's LoRA kernels never run: of its LoRA machinery only the note which
request belongs to which adapter is used. So any base will do, quantised or not.
"""

import itertools
import sys
import weakref
from contextlib import nullcontext

import numpy as np
import torch

from .kernels import cpu_kernels, dispatch
from .spectrum import Spectrum

NOBODY = -1     # a token of the base model

_layers = weakref.WeakValueDictionary()     # for compiled graphs, which know a layer by its name alone
_number = itertools.count()                 # no name comes twice, though engines end and others start


class SharedBasis:
    """The cores of all candidates, whose token is whose, and the layers that bring the two together.

    index: int64 (most tokens a step,), each token's candidate or NOBODY. Like the layers' cores it
    is written in place and never replaced, so CUDA graphs may hold its address.
    """

    def __init__(self, modules: dict, layers: dict[str, list], spectrum: Spectrum, candidates: int, most_tokens: int,
                 dtype: torch.dtype, device: torch.device):
        """layers: fused layer name -> [(slice, index of the projection)], of what is adapted."""
        self._spectrum = spectrum
        self.index = torch.full((most_tokens,), NOBODY, dtype=torch.int64, device=device)
        self._tokens = 0        # of the last step: what of `index` is not NOBODY
        self.layers, self._order = [], []
        for name, parts in layers.items():
            layer = _Layer(modules[name], parts, spectrum, candidates, self.index, dtype, device)
            layer.name = f"{next(_number)}.{name}"
            _layers[layer.name] = layer
            self.layers.append(layer)
            self._order += layer.projections

    def place(self, offsets: np.ndarray) -> None:
        """Write candidate k's cores at k. offsets: (K, 2, projections, r) float64, as Spectrum.offsets gives them."""
        cores = self._spectrum.stacked_cores(offsets)
        if self.index.device.type == "cpu":
            cores = cores.swapaxes(2, 3)
        # A last one of zeros stands for slices that are not adapted.
        cores = np.concatenate([cores, np.zeros_like(cores[:, :1])], 1).astype(np.float32)[:, self._order]
        cores = torch.from_numpy(cores).to(self.index.device)
        at = 0
        for layer in self.layers:
            slices = len(layer.projections)
            layer.cores[:len(cores)] = cores[:, at:at + slices]
            at += slices

    def rebase(self, spectrum: Spectrum) -> None:
        """Write another adapter's V_A and U_B; it has the shapes of the first. Cores placed before mean nothing any more."""
        self._spectrum = spectrum
        for layer in self.layers:
            layer.rebase(spectrum)

    def follow(self, adapters) -> None:
        """The next step's tokens belong to these adapters: ids from 1 (candidate 0), 0 for none."""
        index = np.asarray(adapters, np.int64) - 1
        self.index[:len(index)].copy_(torch.from_numpy(index), non_blocking=True)
        if len(index) < self._tokens:       # a graph is padded to the sizes it was captured for
            self.index[len(index):self._tokens] = NOBODY
        self._tokens = len(index)


class _Layer:
    """One fused linear layer with the candidates' updates: stands as its `quant_method`.

    cores: float32 (candidates, slices, r, r), on a CPU each transposed.
    """

    def __init__(self, base, parts, spectrum, candidates, index, dtype, device):
        self._method, self._index, self._base, self._parts = base.quant_method, index, base, parts
        self._rows = list(base.output_partition_sizes)      # of this worker's shard
        slices, r = len(self._rows), spectrum.max_rank
        self.projections = [-1] * slices
        for part, i in parts:
            self.projections[part] = i
        self._slices, self._rank, self._dtype, self._device = slices, r, dtype, device
        self.cores = torch.zeros(candidates, slices, r, r, dtype=torch.float32, device=device)
        if device.type == "cpu":
            self.rebase(spectrum)
        else:
            v_a, u_t = self._bases(spectrum)
            self._v_a, self._u_t = v_a.T.contiguous().to(device, dtype), u_t.to(device, dtype)
            self._project = lambda x: torch.mm(x, self._v_a)
            self._add = lambda out, h: dispatch.shared_basis_(out, h.view(-1, slices, r), self.cores, index[:len(out)],
                                                              self._u_t, self._rows)
        base.quant_method = self

    def rebase(self, spectrum: Spectrum) -> None:
        """Take V_A and U_B of this spectrum; on a GPU in place, since graphs hold their addresses."""
        v_a, u_t = self._bases(spectrum)
        if self._device.type == "cpu":
            self._project, width = _packed_product(v_a.to(self._dtype))
            self._add = self._cpu_add(u_t, width, self._dtype)
        else:
            self._v_a.copy_(v_a.T)
            self._u_t.copy_(u_t)

    def _bases(self, spectrum: Spectrum) -> tuple[torch.Tensor, torch.Tensor]:
        """(V_A^T (slices r, n), U_B^T (r, m)) float32 of this worker's shard, zero beyond a smaller rank."""
        r, v_a = self._rank, None
        u_t = torch.zeros(r, sum(self._rows))
        for part, i in self._parts:
            p = spectrum.projections[i]
            a = shard_of_v(self._base, torch.from_numpy(p.V_A).float())
            b = shard_of_u(self._base, part, torch.from_numpy(p.U_B).float())
            if v_a is None:
                v_a = torch.zeros(self._slices * r, len(a))
            v_a[part * r:part * r + p.rank] = a.T
            first = sum(self._rows[:part])
            u_t[:p.rank, first:first + self._rows[part]] = b.T
        return v_a, u_t

    def __getattr__(self, name):
        """All else is as the layer's own method has it."""
        return getattr(self._method, name)

    def apply(self, layer, x, bias=None):
        """What vLLM's linear layer calls: the base's output plus the candidates' updates."""
        out = self._method.apply(layer, x, bias)
        if torch.compiler.is_compiling():
            torch.ops.essa_mpi.add_candidates_(out, x, self.name)
            return out
        return self.add(out, x)

    def add(self, out, x):
        return self._add(out, self._project(x))

    def _cpu_add(self, u_t, width, dtype):
        """Our kernel, or without a C compiler dense products."""
        index, slices, rank = self._index, self._slices, self._rank
        if dtype in cpu_kernels.TYPES and rank <= cpu_kernels.MAX_RANK:
            try:
                return cpu_kernels.SharedBasis(self.cores, index, u_t, self._rows, width, dtype)
            except (FileNotFoundError, RuntimeError) as error:
                _say_once(f"mode = 'shared' runs on plain dense products, slower: {error}")
        blocks = torch.block_diag(*u_t.split(self._rows, 1)).to(dtype)

        def add(out, h):
            to = index[:len(out)]
            # Nobody's tokens get a zero in front of whichever core stands first.
            h = h[:, :slices * rank].float() * (to >= 0)[:, None]
            g = (h.view(-1, slices, rank, 1) * self.cores[to.clamp(min=0)]).sum(2)
            return out.addmm_(g.view(-1, slices * rank).to(dtype), blocks)
        return add


@torch.library.custom_op("essa_mpi::add_candidates_", mutates_args=("out",))
def _add_candidates_(out: torch.Tensor, x: torch.Tensor, layer: str) -> None:
    _layers[layer].add(out, x)


@_add_candidates_.register_fake
def _(out, x, layer):
    return None


def shard_of_v(base, v_a: torch.Tensor) -> torch.Tensor:
    """Of V_A (n, r) the rows for the inputs that this worker's shard of the layer reads."""
    n = getattr(base, "input_size_per_partition", base.input_size)
    return v_a if n == len(v_a) else v_a[base.tp_rank * n:(base.tp_rank + 1) * n]


def shard_of_u(base, part: int, u_b: torch.Tensor) -> torch.Tensor:
    """Of U_B (m, r) the rows for the outputs that this worker's shard of the slice makes."""
    m = base.output_partition_sizes[part]
    if m == len(u_b):
        return u_b
    # Where there are more workers than key-value heads, several hold the same one.
    at = base.tp_rank // (base.num_kv_head_replicas if part and hasattr(base, "num_kv_head_replicas") else 1)
    return u_b[at * m:(at + 1) * m]


def _packed_product(weight: torch.Tensor):
    """(x -> x weight^T, its columns: some more, zeros). vLLM's own CPU product is faster than torch's on few columns."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    module = torch.nn.Module()
    weight = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % 16))
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(module, remove_weight=True)
    product, kept = module.cpu_linear, module.weight
    return lambda x: product(x, kept, None), len(weight)


_said = set()


def _say_once(line):
    if line not in _said:
        _said.add(line)
        print(line, file=sys.stderr, flush=True)


class AdapterNotes:
    """Stands where vLLM's model runner keeps its LoRA manager, and loads nothing: adapter k + 1 is candidate k."""

    def __init__(self, basis: SharedBasis):
        self._basis = basis

    def set_active_adapters(self, requests, mapping) -> None:
        """vLLM, before each step: mapping.index_mapping is each token's adapter id."""
        self._basis.follow(mapping.index_mapping)

    def add_adapter(self, request) -> bool:
        return True

    def add_dummy_lora(self, request, rank) -> bool:
        return True

    def remove_adapter(self, adapter_id) -> bool:
        return True

    def pin_adapter(self, adapter_id) -> bool:
        return True

    def remove_all_adapters(self) -> None:
        pass

    def list_adapters(self) -> set[int]:
        return set()

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        return 1

    def supports_tower_connector_lora(self) -> bool:
        return False

    def dummy_lora_cache(self):
        return nullcontext()
