"""An Engine in a process of its own, for tests: vLLM cannot free an engine within its process.

`EngineSession` is the tests' end; run as a script this file is the other, which starts the
engine it is told to and answers calls until the tests' end goes away.
"""

import dataclasses
import hashlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class EngineSession:
    """Looks like essa_mpi.engine.Engine, plus `call(name, ...)` of the methods of `Served` below.

    table: keys of essa_mpi.config.Config; None: no engine yet. slot_order: adapter k is registered
    in LoRA slot slot_order[k], instead of in the first that is free. Use as a context manager.
    """

    def __init__(self, table: dict | None, slot_order: list[int] | None = None, timeout: float = 600):
        self._timeout = timeout
        self._log = tempfile.TemporaryFile()
        self._connection, theirs = multiprocessing.Pipe()
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "PMIX_", "OMPI_"))}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, cwd=ROOT,
            env={**environment, "OMP_NUM_THREADS": "1"})
        theirs.close()
        self.seconds = {"place": 0.0, "generate": 0.0}
        if table is not None:
            self.mode = table["mode"]
            try:
                vars(self).update(self.call("start", table, slot_order))
            except BaseException:
                self.close()
                raise

    def call(self, name: str, *args):
        """Served.<name>(*args) over there: its result, or its exception."""
        try:
            self._connection.send((name, args))
            if not self._connection.poll(self._timeout):
                raise RuntimeError(f"no answer to {name} in {self._timeout} s")
            outcome, value = self._connection.recv()
        except (EOFError, OSError, RuntimeError) as error:
            log = os.pread(self._log.fileno(), 2**20, 0).decode(errors="replace")
            raise RuntimeError(f"the engine's process failed in {name}: {error!r}\n{log[-6000:]}") from error
        if outcome == "error":
            raise value
        return value

    def place(self, vectors):
        self.call("place", vectors)

    def generate(self, requests, sampling=None, logprobs=False):
        return self.call("generate", requests, sampling, logprobs)

    def logprobs(self, pairs):
        return self.call("logprobs_of_pairs", pairs)

    def reset_clock(self):
        pass

    def close(self):
        self._connection.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)
        self._log.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


class Served:
    """What can be called over there."""

    def missing_parts(self, parts):
        """{dotted path: what of it is not there}, of those in `parts` that do not resolve."""
        import importlib
        missing = {}
        for part in parts:
            names, found = part.split("."), None
            for i in range(1, len(names) + 1):
                path = ".".join(names[:i])
                try:
                    found = getattr(found, names[i - 1]) if found else importlib.import_module(path)
                except AttributeError:
                    try:
                        found = importlib.import_module(path)
                    except ImportError:
                        missing[part] = path
                        break
                except ImportError:
                    missing[part] = path
                    break
        return missing

    def start(self, table, slot_order):
        """Start the engine as `run` would. Returns the attributes of the tests' end."""
        from essa_mpi.config import make
        from essa_mpi.engine import Engine
        from essa_mpi.spectrum import Spectrum
        if slot_order:
            _register_in(slot_order)
        config = make({"name": "test", "task": "none", **table})
        self.engine = Engine(config, Spectrum.load(config.adapter, config.alpha, config.offsets, config.offset_scale))
        self.llm = self.engine._llm
        cache = self.llm.llm_engine.vllm_config.cache_config
        return {"capacity": self.engine.capacity, "max_model_len": self.engine.max_model_len,
                "block_size": cache.block_size, "prefix_caching": bool(cache.enable_prefix_caching)}

    def place(self, vectors):
        self.engine.place(vectors)

    def generate(self, requests, sampling=None, logprobs=False):
        return self.engine.generate(requests, sampling, logprobs)

    def logprobs_of_pairs(self, pairs):
        return self.engine.logprobs(pairs)

    def logprobs(self, numbered):
        """Of each (candidate, prompt): the log-probabilities of its tokens but the first, in one batch."""
        from vllm import SamplingParams
        engine = self.engine
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for _, prompt in numbered], SamplingParams(max_tokens=1, prompt_logprobs=0),
            use_tqdm=False, lora_request=None if engine._config.mode == "merged" else
            [engine._adapters[engine._slot_of.get(k, -1)] for k, _ in numbered])
        return [[at[token].logprob for at, token in zip(out.prompt_logprobs[1:], prompt[1:])]
                for out, (_, prompt) in zip(outputs, numbered)]

    def through_layer(self, name, x, adapters):
        """The output of a fused layer for the rows of x, row t being adapter adapters[t]'s, 0 nobody's (shared).

        float32 numpy (T, n) to (T, m); computed in the model's own type.
        """
        import torch
        worker = self._worker()
        layer = dict(worker.model_runner.get_model().named_modules())[name]
        worker._essa_shared.follow(adapters)
        with torch.inference_mode():
            x = torch.from_numpy(x).to(worker.model_config.dtype)
            return layer.quant_method.apply(layer, x, None).float().numpy()

    def without_amx(self):
        """vLLM multiplies int8 as on a CPU without AMX; call before `start`."""
        from vllm.model_executor.kernels.linear.scaled_mm import cpu
        cpu.check_cpu_sgl_kernel = lambda *args: False

    def configure(self, changes):
        """Change keys that `generate` reads, such as max_tokens. Returns what they were."""
        before = {key: getattr(self.engine._config, key) for key in changes}
        self.engine._config = dataclasses.replace(self.engine._config, **changes)
        return before

    def prefix_cache(self, what):
        """What `reset_prefix_cache` does from now on: it "resets", or is "kept", or "refuses"."""
        vars(self.llm).pop("reset_prefix_cache", None)
        if what != "resets":
            self.llm.reset_prefix_cache = lambda *args, **kwargs: what == "kept"

    def slot_table(self):
        """The adapter id in each of vLLM's LoRA slots."""
        return list(self._lora().lora_index_to_id)

    def slot_bits(self):
        """A digest of all that is in each of vLLM's LoRA slots, A and B of all layers."""
        manager = self._lora()
        digests = [hashlib.blake2b(digest_size=8) for _ in manager.lora_index_to_id]
        for _, layer in sorted(manager.modules.items()):
            for stacked in (*layer.lora_a_stacked, *layer.lora_b_stacked):
                for digest, tensor in zip(digests, stacked):
                    digest.update(_bytes(tensor))
        return [digest.hexdigest() for digest in digests]

    def core_bits(self):
        """A digest of the cores of each place (shared), of all layers."""
        layers = self._worker()._essa_shared.layers
        return [hashlib.blake2b(b"".join(_bytes(layer.cores[k]) for layer in layers), digest_size=8).hexdigest()
                for k in range(self.engine.capacity)]

    def slot(self, layer, part, index):
        """(A, B) of one slice of a layer in slot `index`: float32 numpy (r, n) and (m, r), padding and all."""
        layer = self._lora().modules[layer]
        return tuple(stacked[part][index, 0].float().numpy() for stacked in (layer.lora_a_stacked, layer.lora_b_stacked))

    def weight_bits(self, names):
        """Layer name -> digest of its weight as the layer applies it (merged). None: all layers."""
        return {name: hashlib.blake2b(_bytes(weight), digest_size=8).hexdigest()
                for name, weight in self._weights(names).items()}

    def weight(self, name):
        """The weight of a fused layer as it applies it: float32 numpy (m, n)."""
        return self._weights([name])[name].float().numpy()

    def _weights(self, names):
        from essa_mpi.placement import _recover_weight
        modules = dict(self._worker().model_runner.get_model().named_modules())
        return {name: _recover_weight(modules[name])
                for name in names or sorted(name for name in modules if name.endswith("_proj"))}

    def _lora(self):
        return self._worker().model_runner.lora_manager._adapter_manager

    def _worker(self):
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def _bytes(tensor) -> bytes:
    import torch
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _register_in(order):
    """Make vLLM put adapter k + 1 into slot order[k]: it takes the first that is free."""
    from vllm.lora.model_manager import LoRAModelManager
    original = LoRAModelManager.activate_adapter

    def activate(self, lora_id):
        taken = [i for i, there in enumerate(self.lora_index_to_id) if there is None and i != order[lora_id - 1]]
        for i in taken:
            self.lora_index_to_id[i] = -1
        try:
            return original(self, lora_id)
        finally:
            for i in taken:
                self.lora_index_to_id[i] = None
    LoRAModelManager.activate_adapter = activate


def _serve(connection):
    sys.path.insert(0, str(ROOT))
    from essa_mpi.engine_environment import set_environment
    set_environment(0)
    served = Served()
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            os._exit(0)     # vLLM's own ending takes seconds
        try:
            answer = ("value", getattr(served, name)(*args))
        except Exception as error:
            import traceback
            traceback.print_exc()
            answer = ("error", error)
        try:
            connection.send(answer)
        except Exception as error:      # an answer that does not pickle
            connection.send(("error", RuntimeError(f"{name}: {answer[1]!r}: {error}")))


if __name__ == "__main__":
    from multiprocessing.connection import Connection
    _serve(Connection(int(sys.argv[1])))
