"""Candidates into the engine's tensors, in place. Runs inside the vLLM worker; imports no MPI.

`worker.Worker` is vLLM's worker with these methods; the engine calls them by name, so the
same code serves an engine in the rank's own process and one with tensor-parallel workers. Written against vLLM 0.32.0: the private parts it touches are
listed in `PRIVATE_PARTS` and checked by a test, so that an upgrade is a decision.
"""

import numpy as np
import torch

from .config import UserError
from .kernels.tables import MergeTable, SlotTable
from .spectrum import Spectrum

# Where a projection lives in vLLM's fused layers: (layer name, slice of it).
_FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2), "o_proj": ("o_proj", 0),
          "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)}

PRIVATE_PARTS = (
    "vllm.lora.model_manager.LRUCacheLoRAModelManager.activate_adapter",
    "vllm.lora.model_manager.LRUCacheLoRAModelManager.add_adapter",
    "vllm.lora.model_manager.LRUCacheLoRAModelManager.pin_adapter",
    "vllm.lora.lora_model.LoRAModel.from_lora_tensors",
    "vllm.lora.peft_helper.PEFTHelper.from_dict",
    "vllm.lora.layers.column_parallel_linear.MergedQKVParallelLinearWithLoRA.slice_lora_b",
    "vllm.v1.worker.lora_model_runner_mixin.LoRAModelRunnerMixin.load_lora_model",
    "vllm.v1.worker.lora_model_runner_mixin.LoRAModelRunnerMixin._set_active_loras",
    "vllm.model_executor.layers.linear.LinearBase",
    "vllm.model_executor.layers.linear.QKVParallelLinear",
    "vllm.v1.worker.gpu_worker.Worker.load_model",
    "vllm.lora.layers.row_parallel_linear.RowParallelLinearWithLoRA.slice_lora_a",
    "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm",
)


def fused_name(module: str, projection: str) -> tuple[str, int]:
    """model.layers.0.self_attn.q_proj -> (model.layers.0.self_attn.qkv_proj, 0)."""
    layer, part = _FUSED[projection]
    return module.rpartition(".")[0] + "." + layer, part


class Placement:
    """Worker methods, all prefixed essa_. `self` is the vLLM worker."""

    def essa_setup(self, mode: str, adapter: str, alpha: float, slots: int) -> None:
        """Prepare the tensors candidates are written into.

        mode: "slots", "shared" or "merged". adapter: the peft folder. slots: candidates at once.
        """
        if mode == "shared":    # done when the model was loaded
            return
        self._essa = Spectrum.load(adapter, alpha)
        modules = dict(self.model_runner.get_model().named_modules())
        layers = self._essa_layers(modules)
        if mode == "slots":
            self._essa_setup_slots(slots)
        else:
            self._essa_setup_merged(modules, layers)

    def _essa_layers(self, modules: dict) -> dict[str, list]:
        """Fused layer name -> [(slice of it, index of the projection)]."""
        layers = {}
        for i, p in enumerate(self._essa.projections):
            layer_name, part = fused_name(p.module, p.name)
            layers.setdefault(layer_name, []).append((part, i))
        missing = sorted(name for name in layers if name not in modules)
        if missing:
            raise ValueError(f"the engine's model has no layer {missing[0]}")
        return layers

    # -- slots: vLLM's own LoRA tensors ----------------------------------------------------------

    def _essa_setup_slots(self, slots: int) -> None:
        """Register `slots` + 1 pinned adapters from memory; afterwards only slot B is ever written.

        Slot A = V_A^T in all slots, slot B[k] = U_B core[k]. The fewest bytes, and the most accurate.
        The last adapter is the base model: its B stays zero. (vLLM's CPU kernels read the index -1 of
        rows without an adapter as the last slot's, whatever is in it.)
        """
        manager = self.model_runner.lora_manager._adapter_manager
        tensors = {}
        for p in self._essa.projections:
            name = f"base_model.model.{p.module}"
            tensors[f"{name}.lora_A.weight"] = torch.from_numpy(np.ascontiguousarray(p.V_A.T)).float()
            tensors[f"{name}.lora_B.weight"] = torch.zeros(p.U_B.shape, dtype=torch.float32)
        self._essa_register(manager, tensors, self._essa.max_rank, slots + 1)
        stacked, bases = [], []
        for p in self._essa.projections:
            layer_name, part = fused_name(p.module, p.name)
            layer = manager.modules[layer_name]
            basis = torch.from_numpy(p.U_B)
            if layer.tp_size > 1:   # the rows of U_B this worker's shard of the output has
                parts = [None] * layer.n_slices
                parts[part] = basis
                basis = layer.slice_lora_b(parts)[part] if layer.n_slices > 1 else layer.slice_lora_b(basis)
            stacked.append(layer.lora_b_stacked[part])
            bases.append(basis)
        ps = self._essa.projections
        self._essa_table = SlotTable(stacked, bases, [p.mixing for p in ps], [p.s_A for p in ps],
                                     [p.s_B for p in ps], [p.scale for p in ps])

    def essa_place_slots(self, offsets: np.ndarray) -> None:
        """Write candidate k into slot k. offsets: (K, 2, projections, r) float64, added to s_A and to s_B.

        All layers and candidates in one launch of our kernel, in place: pointers baked into CUDA
        graphs and punica's tables stay good.
        """
        offsets = torch.from_numpy(offsets)
        self._essa_table.write(offsets[:, 0], offsets[:, 1], self._essa_slot[:len(offsets)])

    def _essa_register(self, manager, tensors: dict, rank: int, count: int) -> None:
        """Pin `count` adapters of these tensors, ids 1, 2, ..., and find the slot each one got."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper
        # lora_alpha = r: the scale is in the core already.
        helper = PEFTHelper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": sorted(_FUSED)})
        for adapter_id in range(1, count + 1):
            lora = LoRAModel.from_lora_tensors(adapter_id, tensors, helper, device="cpu",
                                               dtype=manager.lora_config.lora_dtype)
            manager.add_adapter(lora)
            manager.activate_adapter(adapter_id)
            manager.pin_adapter(adapter_id)
        # Slots are not handed out in order of adapter id: look them up.
        self._essa_slot = [manager.lora_index_to_id.index(adapter_id) for adapter_id in range(1, count + 1)]

    # -- shared: V_A and U_B once for all candidates ---------------------------------------------

    def essa_load_shared(self, model, settings: dict):
        """The loaded model with the candidates in its layers; called in place of vLLM's LoRA set-up."""
        from .shared_basis import AdapterNotes, SharedBasis
        self._essa = Spectrum.load(settings["adapter"], settings["alpha"])
        modules = dict(model.named_modules())
        config = self.vllm_config
        sizes = config.compilation_config.cudagraph_capture_sizes or [0]
        self._essa_shared = SharedBasis(
            modules, self._essa_layers(modules), self._essa, settings["slots"],
            max(config.scheduler_config.max_num_batched_tokens, *sizes), config.model_config.dtype, self.device)
        self.model_runner.lora_manager = AdapterNotes(self._essa_shared)
        return model

    def essa_place_shared(self, offsets: np.ndarray) -> None:
        """Candidate k for the tokens of adapter k + 1. offsets: (K, 2, projections, r) float64, added to s_A and to s_B."""
        self._essa_shared.place(offsets)

    def essa_rebase(self, spectrum: Spectrum) -> None:
        """Candidates are of this spectrum from now on: another adapter of the same shapes."""
        self._essa = spectrum
        self._essa_shared.rebase(spectrum)

    # -- merged: one candidate in the base weights -----------------------------------------------

    def _essa_setup_merged(self, modules: dict, layers: dict) -> None:
        """Keep a pristine copy of every adapted layer's weight, as vLLM laid it out.

        On CPU vLLM packs the weight and drops the original. Pushing the identity through the layer
        gives it back exactly: every output is one weight times one, plus zeros.
        """
        self._essa_packed, self._essa_merge, targets = [], None, []
        for name, parts in layers.items():
            layer = modules[name]
            if type(layer.quant_method).__name__ != "UnquantizedLinearMethod":
                raise UserError(f"config: mode = 'merged' needs an unquantised base, but {name} is quantised; "
                                f"use mode = 'shared'")
            pristine = _recover_weight(layer)
            sizes = getattr(layer, "output_sizes", None) or [pristine.shape[0]]
            rows = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
            spans = [(slice(int(rows[part]), int(rows[part + 1])), i) for part, i in sorted(parts)]
            if layer.weight.numel():
                targets += [(layer.weight.data[span], pristine[span], i) for span, i in spans]
            else:
                self._essa_packed.append((layer, pristine, [(span, i, *_float_bases(self._essa.projections[i]))
                                                            for span, i in spans]))
        if targets:
            ps = [self._essa.projections[i] for _, _, i in targets]
            self._essa_order = [i for _, _, i in targets]
            self._essa_merge = MergeTable([w for w, _, _ in targets], [w_0 for _, w_0, _ in targets],
                                          [p.U_B for p in ps], [p.V_A for p in ps])

    def essa_place_merged(self, cores: list[np.ndarray] | None) -> None:
        """W = round(W_0 + U_B core V_A^T) from the pristine W_0; None restores W_0 bit by bit.

        By our kernel, in place, where the engine holds plain weights; where vLLM packed them
        (CPUs), by dense products into a copy that is packed anew.
        """
        if self._essa_merge is not None:
            self._essa_merge_in_place(cores)
        for layer, pristine, spans in self._essa_packed:
            weight = pristine
            if cores is not None:
                weight = pristine.clone()
                for span, i, basis_b, basis_a in spans:
                    update = (basis_b @ torch.from_numpy(cores[i]).float()) @ basis_a
                    weight[span] = (pristine[span].float() + update).to(pristine.dtype)
            _pack_weight(layer, weight)

    def _essa_merge_in_place(self, cores):
        if cores is None:
            self._essa_merge.restore()
            return
        rank = self._essa_merge.rank
        padded = np.zeros((len(self._essa_order), rank, rank))
        for at, i in enumerate(self._essa_order):
            padded[at, :len(cores[i]), :len(cores[i])] = cores[i]
        self._essa_merge.apply(torch.from_numpy(padded))


def _float_bases(p) -> tuple[torch.Tensor, torch.Tensor]:
    """(U_B, V_A^T) float32 (m, r) and (r, n)."""
    return torch.from_numpy(p.U_B).float(), torch.from_numpy(np.ascontiguousarray(p.V_A.T)).float()


def _recover_weight(layer) -> torch.Tensor:
    """The layer's (m, n) weight, from the layer itself or, where it was packed away, through it."""
    if layer.weight.numel():
        return layer.weight.detach().clone()
    n, dtype = layer.input_size_per_partition, layer.weight.dtype
    identity = torch.eye(n, dtype=dtype)
    chunks = [layer.quant_method.apply(layer, identity[i:i + 512], None) for i in range(0, n, 512)]
    return torch.cat(chunks).t().contiguous()


def _pack_weight(layer, weight: torch.Tensor) -> None:
    """Give a CPU layer a new weight, packed as vLLM packed the first."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
