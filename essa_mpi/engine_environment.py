"""What vLLM reads from the environment when it is imported. Standard library only."""

import os


def set_environment(rank: int) -> None:
    """What vLLM reads from the environment at import; call before anything imports it.

    In-process engine: no child to orphan when the rank is killed, a deterministic scheduler.
    Values the user has set win, except for that.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    defaults = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
                "TOKENIZERS_PARALLELISM": "false", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                # Or vLLM rounds the activations of w4a16 models to int8 too, on CPUs with AMX.
                "VLLM_CPU_INT4_W4A8": "0",
                # OpenMP threads that spin while they wait take a shared core from whoever has work to do.
                "OMP_WAIT_POLICY": "PASSIVE",
                # Engines on one node race for ports and compile caches: a wide stride, a folder a rank.
                "VLLM_PORT": str(20000 + 97 * (rank % 400))}
    for name, folder in (("VLLM_CACHE_ROOT", "vllm"), ("TRITON_CACHE_DIR", "triton"),
                         ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        root = os.environ.get("TMPDIR", "/tmp")
        defaults[name] = f"{root}/essa_mpi-{os.getuid()}/rank{rank}/{folder}"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
