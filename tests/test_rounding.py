"""How much of a candidate 16 bits leave."""

import json

import numpy as np
import pytest
import torch
from adapters import make_adapter
from safetensors.torch import save_file

from essa_mpi.config import make
from essa_mpi.rounding import engine_dtype, rounding_error, warning
from essa_mpi.spectrum import Spectrum

MODULE = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with one weight, and an adapter whose update is about 1 % of it."""
    folder = tmp_path_factory.mktemp("model")
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)) / 512**0.5
    save_file({f"{MODULE}.weight": weight.bfloat16()}, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    adapter = make_adapter(folder / "adapter", {MODULE: (256, 512)}, scale=0.002)
    return folder, Spectrum.load(adapter, 1.0)


def error_of(model, mode, sigma, dtype="bfloat16"):
    folder, spectrum = model
    x = sigma * np.random.default_rng(0).standard_normal(spectrum.dimension)
    return rounding_error(spectrum, mode, dtype, str(folder), x, np.zeros_like(x))


def test_an_update_of_one_percent_in_bfloat16(model):
    """The order of things: slots lose candidates below some 0.3 % of s, merged weights far earlier, shared none."""
    assert error_of(model, "slots", 0.1) < 0.1 < error_of(model, "slots", 0.01) < 0.5 < error_of(model, "slots", 0.001)
    assert error_of(model, "merged", 0.1) > 1 and error_of(model, "merged", 1.0) < error_of(model, "merged", 0.1)
    assert error_of(model, "shared", 1e-6) == 0 == error_of(model, "slots", 1e-6, "float32")


def test_the_number_itself(model):
    folder, spectrum = model
    [p] = spectrum.projections
    x = 0.02 * np.random.default_rng(3).standard_normal(spectrum.dimension)
    first, second = (torch.from_numpy(p.U_B @ spectrum.cores(v)[0]) for v in (x, 0 * x))
    lost = (first.bfloat16().double() - second.bfloat16().double() - (first - second)).norm() / (first - second).norm()
    assert rounding_error(spectrum, "slots", "bfloat16", str(folder), x, 0 * x) == pytest.approx(float(lost), rel=1e-12)


def test_the_warning_has_the_measured_share(model):
    folder, spectrum = model
    config = make({"name": "t", "task": "t", "model": str(folder), "adapter": "a", "mode": "slots"})
    x = np.random.default_rng(0).standard_normal(spectrum.dimension)
    assert warning(spectrum, config, 0.5, 0.5 * x, 0 * x) is None
    said = warning(spectrum, config, 0.001, 0.001 * x, 0 * x)
    assert f"rounding is {rounding_error(spectrum, 'slots', 'bfloat16', str(folder), 0.001 * x, 0 * x):.0%} of" in said
    assert said.startswith("warning: sigma 0.001 ") and "bfloat16" in said and "mode = 'shared'" in said


@pytest.mark.parametrize("stored, asked, found", [("float32", "auto", "bfloat16"), ("float16", "auto", "float16"),
                                                  ("bfloat16", "float32", "float32")])
def test_the_dtype_of_the_engine(tmp_path, stored, asked, found):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": stored}))
    assert engine_dtype(make({"name": "t", "task": "t", "model": str(tmp_path), "adapter": "a", "dtype": asked})) == found
