"""vLLM's worker with `Placement`'s methods, and with mode `shared` in its layers. Imports no MPI."""

import torch
from vllm.platforms import current_platform

from .config import UserError
from .placement import Placement

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker


class Worker(Placement, _Worker):
    """Named to vLLM by `worker_cls`. additional_config["essa_mpi"] holds the arguments of `essa_setup`."""

    def load_model(self, *args, **kwargs):
        # Before vLLM profiles memory, compiles and captures CUDA graphs: all of it must see the layers as they will be.
        settings = self.vllm_config.additional_config["essa_mpi"]
        quantised = self.vllm_config.quant_config is not None
        if quantised and current_platform.is_cpu() and self.model_config.dtype == torch.float32:
            raise UserError("config: dtype = 'float32': vLLM's CPU kernels for quantised models do not take it; "
                            "set dtype = 'bfloat16'")
        if settings["mode"] == "shared":
            self.model_runner.load_lora_model = lambda model, *_: self.essa_load_shared(model, settings)
        elif settings["mode"] == "slots" and quantised:
            self.model_runner.load_lora_model = _lora_or_refuse(self.model_runner.load_lora_model)
        super().load_model(*args, **kwargs)
        from vllm.model_executor.layers.attention import Attention
        for module in self.model_runner.model.modules():
            if isinstance(module, Attention):
                module.register_forward_pre_hook(_keep_finite)


def _keep_finite(attention, inputs):
    """Keys and values that go into the cache are finite, whatever a candidate does to the model.

    vLLM's CPU kernel reads whole blocks of the cache and masks what is not a sequence's: times zero, which a nan outlives.
    One candidate that overflowed would spoil all that come after it. Other values keep their bits.
    """
    query, key, value, *rest = inputs
    most = min(1e6, torch.finfo(key.dtype).max / 2)     # so that no product with them overflows either
    return (query, *(torch.nan_to_num(x, nan=0.0).clamp(-most, most) for x in (key, value)), *rest)


def _lora_or_refuse(load_lora_model):
    """vLLM's LoRA layers ask a layer for its weight's device, and not every quantised layer has kept a weight."""
    def load(*args):
        try:
            return load_lora_model(*args)
        except (AttributeError, ValueError) as error:
            said = str(error).partition("\n")[0]
            raise UserError(f"config: mode = 'slots': vLLM has no LoRA layers for this quantised model here ({said}); "
                            f"use mode = 'shared'") from error
    return load
