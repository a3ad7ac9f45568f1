"""vLLM's worker with `Placement`'s methods, and with mode `shared` in its layers. Imports no MPI."""

from vllm.platforms import current_platform

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
        if settings["mode"] == "shared":
            self.model_runner.load_lora_model = lambda model, *_: self.essa_load_shared(model, settings)
        super().load_model(*args, **kwargs)
