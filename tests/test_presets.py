"""jobs/*.toml load, and those of the paper have the paper's values, their commented variants too."""

import re
from pathlib import Path

import pytest

from essa_mpi import config as configuration

JOBS = Path(__file__).resolve().parent.parent / "jobs"

# Paper, tables 7 and 8 and appendix: rank, population, batch, alpha; sft_batch, sft_lr, sft_epochs.
PAPER = {
    ("gsm8k", "Qwen2.5-7B"): (2, 96, 100, 1.0, 16, 1e-4, 1),
    ("gsm8k", "Qwen2.5-Math-7B"): (32, 96, 100, 0.1, 16, 1e-4, 1),
    ("math", "Qwen2.5-7B"): (2, 48, 300, 1.0, 16, 5e-4, 1),
    ("math", "Qwen2.5-Math-7B"): (2, 24, 300, 1.0, 16, 5e-4, 1),
    ("math", "Qwen2.5-32B"): (8, 48, 256, 1.0, 128, 1e-6, 3),
    ("math", "Qwen2.5-72B-w4a16"): (4, 64, 256, 1.0, 128, 1e-6, 3),
    ("ifeval", "Llama-3.1-8B"): (8, 24, 500, 1.0, 16, 5e-4, 1),
    ("helpsteer2", "Llama-3.1-8B"): (8, 36, 100, 1.0, 128, 1e-6, 3),
}
MATHS = "Please reason step by step and place your final answer in \\boxed{}."
INSTRUCTIONS = "You are a helpful, honest, and concise assistant."


def variants(path):
    """The config, and the config with each block of commented keys in place of its own."""
    blocks = [[]]
    for line in path.read_text().splitlines():
        key = re.match(r"#   (\w+ = [^#]*)", line)
        if key:
            blocks[-1].append(key.group(1).replace(" = ", "=", 1))
        elif blocks[-1]:
            blocks.append([])
    return [configuration.load(path), *(configuration.load(path, block) for block in blocks if block)]


@pytest.mark.parametrize("name", ["gsm8k", "math", "ifeval", "helpsteer2"])
def test_the_papers_experiments(name):
    path = JOBS / f"{name}.toml"
    found = {}
    for c in variants(path):
        model = Path(c.model).name
        found[name, model] = (c.rank, c.population, c.batch, c.alpha, c.sft_batch, c.sft_lr, c.sft_epochs)
        assert c.lora_alpha == 2 * c.rank and int(c.alpha * c.rank) >= 1
        assert c.system_prompt == (MATHS if name in ("gsm8k", "math") else INSTRUCTIONS)
        assert c.name == name and all(file.startswith(f"data/{name}/") for file in (c.task, c.heldout_data))
    assert found == {key: values for key, values in PAPER.items() if key[0] == name}
    text = path.read_text()
    for command in (f"python -m essa_mpi sft jobs/{name}.toml", f"srun python -m essa_mpi run jobs/{name}.toml"):
        assert command in text
    assert len({c.adapter for c in variants(path)}) == len(variants(path))


def test_the_quickstarts_config_loads():
    assert configuration.load(JOBS / "quickstart.toml").name == "quickstart"
