"""Adapter <-> singular values <-> search vector, checked against peft. No vLLM."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from adapters import ATTENTION, MLP, make_adapter, make_model, shapes_of
from safetensors.torch import load_file, save_file

from essa_mpi.config import UserError
from essa_mpi.spectrum import OFFSETS, Spectrum, check_fits, check_model, model_shapes, read_adapter, searched_values

LAYERS = 3
SIZES = SimpleNamespace(hidden_size=24, intermediate_size=40, num_hidden_layers=LAYERS, num_attention_heads=4,
                        num_key_value_heads=2, head_dim=6)


def adapter_in(folder, projections=ATTENTION, rank=8, **settings):
    return make_adapter(folder, shapes_of(SIZES, projections), rank, **settings)


def products(spectrum, x):
    """Module -> U_B core V_A^T: what a candidate adds to each weight, float64."""
    return {p.module: p.U_B @ core @ p.V_A.T for p, core in zip(spectrum.projections, spectrum.cores(x))}


def random_vector(spectrum, seed=0, size=0.5):
    return size * np.random.default_rng(seed).standard_normal(spectrum.dimension)


def change_tensors(folder, change):
    path = str(folder / "adapter_model.safetensors")
    save_file(change(load_file(path)), path)
    return folder


def change_config(folder, **settings):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


def relative_error(found, wanted):
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def offset(kind, x, s):
    """What coordinates of the value(s) x add to the singular values s of one factor."""
    match kind:
        case "relative": return s * x
        case "exp": return s * np.expm1(x)
        case "projection": return np.full_like(s, s.mean()) * x
        case "absolute": return np.ones_like(s) * x


# -- the size of the search vector ----------------------------------------------------------------

@pytest.mark.parametrize("rank, alpha, searched", [(8, 1.0, 8), (8, 0.5, 4), (8, 0.3, 2), (10, 0.1, 1), (10, 0.7, 7)])
def test_dimension_is_layers_x_4_x_2_x_floor_alpha_r(tmp_path, rank, alpha, searched):
    spectrum = Spectrum.load(adapter_in(tmp_path, rank=rank), alpha)
    assert spectrum.dimension == LAYERS * 4 * 2 * searched
    assert {p.searched for p in spectrum.projections} == {searched}


def test_dimension_of_the_papers_qwen_7b(tmp_path):
    """28 layers, rank 8, alpha 1: 1792 values whatever the width."""
    sizes = SimpleNamespace(**{**vars(SIZES), "num_hidden_layers": 28})
    assert Spectrum.load(make_adapter(tmp_path, shapes_of(sizes), 8), 1.0).dimension == 1792


def test_floor_is_of_the_decimal_alpha():
    """In float64 0.1 x 10 is 1 but 0.29 x 100 is 28.999...: no alpha may lose a value to that."""
    assert math.floor(0.29 * 100) == 28
    for percent in range(1, 101):
        for rank in range(1, 513):
            assert searched_values(percent / 100, rank) == percent * rank // 100, (percent, rank)


@pytest.mark.parametrize("rank", [3, 7, 8])
def test_alpha_that_searches_nothing_is_refused(tmp_path, rank):
    folder = adapter_in(tmp_path, rank=rank)
    with pytest.raises(UserError, match=rf"alpha = 0\.1: .* rank {rank}.* use alpha >= ([0-9.]+)$") as refused:
        Spectrum.load(folder, 0.1)
    # What it recommends must do.
    assert Spectrum.load(folder, float(str(refused.value).rpartition(" ")[2])).dimension == LAYERS * 4 * 2


# -- offsets --------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_offset_zero_is_the_adapter_as_it_was(tmp_path, dtype):
    folder = adapter_in(tmp_path, ATTENTION + MLP, dtype=dtype)
    spectrum = Spectrum.load(folder, 1.0)
    _, tensors = read_adapter(folder)
    factors = spectrum.factors(np.zeros(spectrum.dimension))
    assert factors.keys() == tensors.keys()
    for name, factor in factors.items():
        assert factor.dtype == np.float32
        assert relative_error(factor, tensors[name]) < 1e-6, name


@pytest.mark.parametrize("kind", OFFSETS)
def test_offsets_move_the_largest_values_of_a_then_b_projection_by_projection(tmp_path, kind):
    spectrum = Spectrum.load(adapter_in(tmp_path), 0.5, kind)
    order = [f"model.layers.{layer}.self_attn.{name}" for layer in range(LAYERS) for name in ATTENTION]
    assert [p.module for p in spectrum.projections] == order
    at_rest = spectrum.spectra(np.zeros(spectrum.dimension))
    flat = [s for pair in at_rest for s in pair]
    assert all((np.diff(s) <= 0).all() for s in flat)       # so that the first are the top ones
    for i in (0, 3, 4, 8, spectrum.dimension - 1):
        x = np.zeros(spectrum.dimension)
        x[i] = 0.25
        moved = [s for pair in spectrum.spectra(x) for s in pair]
        factor, value = divmod(i, 4)                        # floor(0.5 x 8) = 4 values a factor
        for j, (s, s0) in enumerate(zip(moved, flat)):
            wanted = s0.copy()
            if j == factor:
                wanted[value] += offset(kind, 0.25, s0)[value]
            np.testing.assert_array_equal(s, wanted)


def test_layers_are_in_order_of_their_number(tmp_path):
    """Layer 10 comes after layer 9, not after layer 1: the search vector's order is part of a run."""
    sizes = SimpleNamespace(**{**vars(SIZES), "num_hidden_layers": 11})
    modules = [p.module for p in Spectrum.load(make_adapter(tmp_path, shapes_of(sizes), 2), 1.0).projections]
    assert modules == list(shapes_of(sizes))


def test_a_vector_of_another_size_is_refused(tmp_path):
    spectrum = Spectrum.load(adapter_in(tmp_path), 1.0)
    with pytest.raises(ValueError, match=rf"\({spectrum.dimension - 1},\), needs \({spectrum.dimension},\)"):
        spectrum.cores(np.zeros(spectrum.dimension - 1))


@pytest.mark.parametrize("kind", OFFSETS)
def test_cores_are_the_scaled_product_of_the_moved_factors(tmp_path, kind):
    """U_B core V_A^T = scale B' A', with B' and A' put together by the paper's definition."""
    folder = adapter_in(tmp_path, ATTENTION + MLP, lora_alpha=12)
    spectrum = Spectrum.load(folder, 1.0, kind)
    _, tensors = read_adapter(folder)
    x = random_vector(spectrum)
    found, at = products(spectrum, x), 0
    for module in shapes_of(SIZES):
        moved = []
        for factor in "AB":
            U, s, Vt = np.linalg.svd(tensors[f"base_model.model.{module}.lora_{factor}.weight"], full_matrices=False)
            d = x[at:at + 8]
            at += 8
            moved.append(U @ np.diag(s + offset(kind, d, s)) @ Vt)
        A, B = moved
        assert relative_error(found[module], 12 / 8 * B @ A) < 1e-12, module
    assert at == spectrum.dimension


def test_offsets_of_every_kind_are_their_formulas_times_the_scales(tmp_path):
    """c is the projection's scale times the factor's; "exp" keeps the sign of every value, however far x goes."""
    folder = adapter_in(tmp_path, ranks={"k_proj": 3}, rank_pattern={"k_proj": 3})
    scales = {"v_proj": 0.5, "k_proj": 3, "B": 2.0, "A": 0.25}
    for kind in OFFSETS:
        for given in ({}, {"B": 2.0}, scales):
            spectrum = Spectrum.load(folder, 0.5, kind, given)
            x, at = random_vector(spectrum, size=2.0), 0
            found = spectrum.offsets(np.stack([x, -x]))      # of several vectors at once
            for i, p in enumerate(spectrum.projections):
                for j, s in enumerate((p.s_A, p.s_B)):
                    c, d = given.get(p.name, 1) * given.get("AB"[j], 1), x[at:at + p.searched]
                    wanted = offset(kind, c * np.append(d, np.zeros(p.rank - p.searched)), s)
                    np.testing.assert_allclose(found[0, j, i, :p.rank], wanted, rtol=1e-14, atol=0, err_msg=kind)
                    assert (found[:, j, i, p.searched:] == 0).all()
                    np.testing.assert_allclose(spectrum.spectra(x)[i][j], s + wanted, rtol=1e-14, atol=1e-16)
                    at += p.searched
            assert at == spectrum.dimension
            at_rest, moved = spectrum.spectra(0 * x), spectrum.spectra(x)
            same_sign = all((np.sign(a) == np.sign(b)).all() for pair, still in zip(moved, at_rest) for a, b in zip(pair, still))
            assert same_sign == (kind == "exp")


def test_a_scale_moves_no_other_projection_or_factor(tmp_path):
    folder = adapter_in(tmp_path)
    plain, x = Spectrum.load(folder, 1.0), random_vector(Spectrum.load(folder, 1.0))
    for part in ("o_proj", "A"):
        scaled = Spectrum.load(folder, 1.0, "relative", {part: 4.0})
        for p, before, after in zip(plain.projections, plain.offsets(x).swapaxes(0, 1), scaled.offsets(x).swapaxes(0, 1)):
            for factor in (0, 1):
                times = 4.0 if part in (p.name, "AB"[factor]) else 1.0
                np.testing.assert_array_equal(after[factor], times * before[factor])


def test_no_such_kind_of_offsets(tmp_path):
    with pytest.raises(ValueError, match="kind = False; allowed: relative, exp, projection, absolute"):
        Spectrum.load(adapter_in(tmp_path), 1.0, False)


def test_mlp_factors_stay_as_the_warm_start_left_them(tmp_path):
    folder = adapter_in(tmp_path, ATTENTION + MLP)
    spectrum = Spectrum.load(folder, 1.0)
    assert spectrum.dimension == LAYERS * 4 * 2 * 8
    x = random_vector(spectrum)
    _, tensors = read_adapter(folder)
    still, found = products(spectrum, np.zeros(spectrum.dimension)), products(spectrum, x)
    for name, factor in spectrum.factors(x).items():
        error = relative_error(factor, tensors[name])
        assert error < 1e-6 if ".mlp." in name else error > 0.05, name
    for module in found:
        assert np.array_equal(found[module], still[module]) == (".mlp." in module), module


# -- peft in, peft out ----------------------------------------------------------------------------

@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tiny"), "llama", vocab_size=40, **vars(SIZES))


def peft_products(model, adapter):
    """Module -> what peft adds to its weight."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    loaded = PeftModel.from_pretrained(base, adapter)
    for name, tensor in base.state_dict().items():
        if "lora_" not in name:
            torch.testing.assert_close(tensor, before[name.replace(".base_layer", "")], rtol=0, atol=0)
    return {name.removeprefix("base_model.model."): module.get_delta_weight("default").double().numpy()
            for name, module in loaded.named_modules() if hasattr(module, "get_delta_weight")}


ADAPTERS = {
    "plain": dict(),
    "alpha": dict(lora_alpha=5.5),
    "rslora": dict(use_rslora=True),
    "q_v": dict(projections=("q_proj", "v_proj")),
    "o": dict(projections=("o_proj",)),
    "mlp": dict(projections=ATTENTION + MLP),
    "patterns": dict(projections=ATTENTION + MLP, ranks={"k_proj": 3, "down_proj": 5},
                     rank_pattern={"k_proj": 3, "mlp.down_proj": 5},
                     alpha_pattern={r"layers\.[12]\.self_attn\.v_proj": 20, "model.layers.0.self_attn.q_proj": 2,
                                    "q_proj": 7}),
    "patterns and rslora": dict(ranks={"k_proj": 3}, rank_pattern={"k_proj": 3}, alpha_pattern={"k_proj": 9},
                                use_rslora=True),
    "rank 1": dict(rank=1),
    "regular expression": dict(target_modules=r".*self_attn\.(q|k|v|o)_proj"),
    "gaussian": dict(init_lora_weights="gaussian"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_candidate_is_what_peft_makes_of_it(tmp_path, tiny_model, name):
    """Of the adapter as it was, and of what `save` writes for a candidate; the base untouched by both."""
    folder = adapter_in(tmp_path / "adapter", **ADAPTERS[name])
    for kind in ("relative", "absolute"):
        spectrum = Spectrum.load(folder, 1.0, kind)
        wanted = peft_products(tiny_model, folder)
        assert wanted.keys() == {p.module for p in spectrum.projections}
        for module, product in products(spectrum, np.zeros(spectrum.dimension)).items():
            assert relative_error(product, wanted[module]) < 1e-6, module
        x = random_vector(spectrum, size=0.5 if kind == "relative" else 0.05)
        spectrum.save(tmp_path / f"saved-{kind}", x)
        saved = peft_products(tiny_model, tmp_path / f"saved-{kind}")
        assert saved.keys() == wanted.keys()
        for module, product in products(spectrum, x).items():
            assert relative_error(product, saved[module]) < 1e-6, module
            assert relative_error(product, wanted[module]) > 1e-3 or ".mlp." in module, module


def test_adapters_that_peft_wrote(tmp_path, tiny_model):
    """safetensors as peft names them, and the older adapter_model.bin."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), LoraConfig(
        r=4, lora_alpha=9, target_modules=list(ATTENTION), init_lora_weights=False, task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "written")
    tensors = load_file(str(tmp_path / "written/adapter_model.safetensors"))
    for kind in ("bin", "named default"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "adapter_config.json").write_text((tmp_path / "written/adapter_config.json").read_text())
    torch.save(tensors, tmp_path / "bin/adapter_model.bin")
    save_file({name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()},
              str(tmp_path / "named default/adapter_model.safetensors"))
    wanted = peft_products(tiny_model, tmp_path / "written")
    for kind in ("written", "bin", "named default"):
        spectrum = Spectrum.load(tmp_path / kind, 1.0)
        assert spectrum.dimension == LAYERS * 4 * 2 * 4
        spectrum.save(tmp_path / kind / "saved", np.zeros(spectrum.dimension))
        saved = peft_products(tiny_model, tmp_path / kind / "saved")
        for module, product in products(spectrum, np.zeros(spectrum.dimension)).items():
            assert relative_error(product, wanted[module]) < 1e-6, (kind, module)
            assert relative_error(saved[module], wanted[module]) < 1e-6, (kind, module)


def test_saving_again_changes_nothing_and_keeps_the_config(tmp_path):
    folder = adapter_in(tmp_path / "adapter", lora_alpha=5.5, base_model_name_or_path="some/model")
    spectrum = Spectrum.load(folder, 1.0)
    spectrum.save(tmp_path / "saved", random_vector(spectrum))
    again = Spectrum.load(tmp_path / "saved", 1.0)
    again.save(tmp_path / "again", np.zeros(again.dimension))
    (config, first), (same, second) = read_adapter(tmp_path / "saved"), read_adapter(tmp_path / "again")
    assert config == same == read_adapter(folder)[0]
    for name in first:
        assert relative_error(second[name], first[name]) < 1e-6


# -- what is refused, in words --------------------------------------------------------------------

@pytest.mark.parametrize("key, value", [("use_dora", True), ("lora_bias", True), ("use_qalora", True),
                                        ("alora_invocation_tokens", [1, 2]), ("use_bdlora", {"nblocks": 2}),
                                        ("layer_replication", [[0, 2], [1, 3]])])
def test_kinds_of_lora_that_are_more_than_two_factors_are_refused(tmp_path, key, value):
    with pytest.raises(UserError, match=f"{key} is set"):
        Spectrum.load(adapter_in(tmp_path, **{key: value}), 1.0)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_that_moves_the_base_is_refused(tmp_path, tiny_model, init):
    """peft changes the base's weights when it loads one: shown here, so that the refusal is not superstition."""
    folder = adapter_in(tmp_path, init_lora_weights=init)
    with pytest.raises(AssertionError, match="not equal"):
        peft_products(tiny_model, folder)
    with pytest.raises(UserError, match=f"init_lora_weights = '{init}'"):
        Spectrum.load(folder, 1.0)


@pytest.mark.parametrize("settings, message", [
    (dict(peft_type="IA3"), "peft_type is IA3"),
    (dict(bias="all"), "biases or whole modules"),
    (dict(modules_to_save=["lm_head"]), "biases or whole modules"),
    (dict(r=4), "q_proj has rank 8 but its adapter_config says 4"),
    (dict(rank_pattern={"v_proj": 2}), "v_proj has rank 8 but its adapter_config says 2"),
])
def test_configs_that_are_refused(tmp_path, settings, message):
    folder = change_config(adapter_in(tmp_path), **settings)
    with pytest.raises(UserError, match=message):
        Spectrum.load(folder, 1.0)


@pytest.mark.parametrize("factor", "AB")
def test_an_untrained_adapter_is_refused(tmp_path, factor):
    """peft starts B at zero: no singular value of such an adapter does anything."""
    folder = change_tensors(adapter_in(tmp_path, ATTENTION + MLP), lambda tensors: {
        name: tensor * 0 if f"lora_{factor}" in name and ".self_attn." in name else tensor
        for name, tensor in tensors.items()})
    for kind in OFFSETS:
        with pytest.raises(UserError, match="update is zero .*python -m essa_mpi sft"):
            Spectrum.load(folder, 1.0, kind)


def test_an_adapter_that_is_zero_in_places_is_taken(tmp_path):
    folder = change_tensors(adapter_in(tmp_path), lambda tensors: {
        name: tensor * 0 if "k_proj.lora_B" in name else tensor for name, tensor in tensors.items()})
    spectrum = Spectrum.load(folder, 1.0)
    found = products(spectrum, random_vector(spectrum))
    assert all((product == 0).all() == ("k_proj" in module) for module, product in found.items())


def test_ranks_that_do_not_work_are_refused(tmp_path):
    wide = {"model.layers.0.self_attn.q_proj": (600, 600), "model.layers.0.self_attn.v_proj": (600, 600)}
    with pytest.raises(UserError, match=r"rank 513 is not supported by vLLM \(at most 512\)"):
        Spectrum.load(make_adapter(tmp_path / "513", wide, 513), 1.0)
    assert Spectrum.load(make_adapter(tmp_path / "512", wide, 512), 1.0).max_rank == 512
    with pytest.raises(UserError, match="k_proj has rank 13 but is 12 x 24"):
        Spectrum.load(adapter_in(tmp_path / "13", ("k_proj",), rank=13), 1.0)
    assert Spectrum.load(adapter_in(tmp_path / "12", ("k_proj",), rank=12), 1.0).max_rank == 12


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize("change, message", [
    (lambda t: {k: v for k, v in t.items() if k != f"{FIRST}B.weight"}, r"layers\.0\.self_attn\.q_proj has lora_A but"),
    (lambda t: {**t, f"{FIRST}A.weight": t[f"{FIRST}A.weight"][:5]}, r"A \(5, 24\) and B \(24, 8\): ranks differ"),
    (lambda t: {**t, f"{FIRST}A.weight": t[f"{FIRST}A.weight"] * float("nan")}, "not finite"),
    (lambda t: {**t, "base_model.model.lm_head.lora_A.weight": torch.ones(8, 24)}, r"`base_model\.model\.lm_head"),
    (lambda t: {k.replace("q_proj", "qkv_proj"): v for k, v in t.items()}, "qkv_proj"),
    (lambda t: {**t, f"{FIRST}magnitude_vector.weight": torch.ones(24)}, "magnitude_vector"),
    (lambda t: {k.replace("self_attn.q_proj", "mlp.up_proj"): v for k, v in t.items() if "q_proj" in k},
     "adapts no attention projection"),
])
def test_tensors_that_are_refused(tmp_path, change, message):
    folder = change_tensors(adapter_in(tmp_path), change)
    with pytest.raises(UserError, match=message):
        Spectrum.load(folder, 1.0)


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere: no adapter_config\.json .*python -m essa_mpi sft"):
        Spectrum.load(tmp_path / "nowhere", 1.0)
    folder = adapter_in(tmp_path / "adapter")
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:len(content) // 2])
    with pytest.raises(UserError, match="its weights cannot be read"):
        Spectrum.load(folder, 1.0)
    weights.unlink()
    with pytest.raises(UserError, match=r"no adapter_model\.safetensors or adapter_model\.bin"):
        Spectrum.load(folder, 1.0)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match=r"adapter_config\.json cannot be read"):
        Spectrum.load(folder, 1.0)


def test_an_adapter_of_another_model_is_refused_with_both_shapes(tmp_path, tiny_model):
    shapes = model_shapes(tiny_model)
    assert {name: shapes[name] for name in shapes_of(SIZES, ATTENTION + MLP)} == shapes_of(SIZES, ATTENTION + MLP)
    check_fits(Spectrum.load(adapter_in(tmp_path / "same", ATTENTION + MLP), 1.0), tiny_model, shapes)
    other = SimpleNamespace(**{**vars(SIZES), "num_key_value_heads": 4})
    with pytest.raises(UserError, match=r"another model: model\.layers\.0\.self_attn\.k_proj is 24 x 24 in the "
                                        r"adapter and 12 x 24 in"):
        check_fits(Spectrum.load(make_adapter(tmp_path / "wide", shapes_of(other), 8), 1.0), tiny_model, shapes)
    deeper = SimpleNamespace(**{**vars(SIZES), "num_hidden_layers": LAYERS + 1})
    with pytest.raises(UserError, match=rf"adapts model\.layers\.{LAYERS}\.self_attn\.q_proj, which the model"):
        check_fits(Spectrum.load(make_adapter(tmp_path / "deep", shapes_of(deeper), 8), 1.0), tiny_model, shapes)


def test_a_folder_that_is_no_usable_model_is_refused(tmp_path, tiny_model):
    assert check_model(tiny_model)["architectures"] == ["LlamaForCausalLM"]
    with pytest.raises(UserError, match=r"nowhere: no config\.json there"):
        check_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        check_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    save_file({"h.0.attn.c_attn.weight": torch.ones(4, 4)}, str(tmp_path / "model.safetensors"))
    with pytest.raises(UserError, match=r"GPT2LMHeadModel\) has no q_proj, k_proj, v_proj, o_proj"):
        check_model(tmp_path)


# -- the digest that ranks compare ----------------------------------------------------------------

def test_the_digest_sees_all_that_makes_a_candidate(tmp_path):
    folder = adapter_in(tmp_path / "one")
    digest = Spectrum.load(folder, 1.0).digest()
    assert Spectrum.load(adapter_in(tmp_path / "same"), 1.0).digest() == digest
    others = {
        "another adapter": Spectrum.load(adapter_in(tmp_path / "a", seed=1), 1.0),
        "one number": Spectrum.load(change_tensors(adapter_in(tmp_path / "b"), _nudge), 1.0),
        "lora_alpha": Spectrum.load(adapter_in(tmp_path / "c", lora_alpha=15), 1.0),
        "alpha": Spectrum.load(folder, 0.5),
        **{kind: Spectrum.load(folder, 1.0, kind) for kind in OFFSETS if kind != "relative"},
        **{f"scale of {part}": Spectrum.load(folder, 1.0, "relative", {part: 2.0}) for part in ("q_proj", "v_proj", "A", "B")},
        "another scale": Spectrum.load(folder, 1.0, "relative", {"B": 3.0}),
        "two scales": Spectrum.load(folder, 1.0, "relative", {"A": 2.0, "B": 3.0}),
        "module": Spectrum.load(change_tensors(adapter_in(tmp_path / "d"), lambda tensors: {
            name.replace("layers.2", "layers.3"): tensor for name, tensor in tensors.items()}), 1.0),
    }
    digests = {name: spectrum.digest() for name, spectrum in others.items()}
    assert digest not in digests.values(), digests
    one, other = ({"A": 2.0, "B": 3.0}, {"B": 3.0, "A": 2.0})
    assert Spectrum.load(folder, 1.0, "exp", one).digest() == Spectrum.load(folder, 1.0, "exp", other).digest()
    assert len(set(digests.values())) == len(digests)


def _nudge(tensors):
    name = sorted(tensors)[-1]
    tensors[name][0, 0] += 1e-3
    return tensors


# -- damaged files ----------------------------------------------------------------------------------

@pytest.mark.parametrize("key", ["r", "lora_alpha"])
def test_an_adapter_config_without_its_numbers_is_refused(tmp_path, key):
    folder = adapter_in(tmp_path / "one")
    config = json.loads((folder / "adapter_config.json").read_text())
    del config[key]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"has {key} = None; needs a number: save the adapter again"):
        Spectrum.load(folder, 1.0)


@pytest.mark.parametrize("content", [b"", b"\x00", b"\xff" * 64, b"\x02" + bytes(7) + b"xx"])
def test_damaged_weights_of_a_model_are_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors is not a safetensors file: .*; copy the model again"):
        model_shapes(tmp_path)
