"""The trained policy, against transformers + peft and autograd, and its optimiser, against torch's."""

import numpy as np
import pytest
import torch
from adapters import ATTENTION, make_adapter, make_model, shapes_of
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import refusal
from essa_mpi import config as configuration
from essa_mpi.gradient.learner import Learner
from essa_mpi.gradient.losses import CLIPS, Objective
from essa_mpi.gradient.policy import Policy, Sequence, Singular
from essa_mpi.spectrum import OFFSETS, Spectrum
from test_spectrum import SIZES, products, random_vector, relative_error

SCALES = {"q_proj": 3.0, "A": 0.5}
WIDE = Objective("grpo", 1.0, 1e9, 0.1, 12)      # nothing is clipped: the loss is smooth


def files_in(path, family):
    """A random model of two layers, with an adapter that has static MLP factors too."""
    make_model(path / "model", family, vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
               head_dim=8)
    shapes = shapes_of(AutoConfig.from_pretrained(path / "model"), (*ATTENTION, "up_proj"))
    make_adapter(path / "adapter", shapes, rank=4, scale=0.2)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return files_in(tmp_path_factory.mktemp("policy"), "llama")


@pytest.fixture
def settings(folder):
    return lambda **keys: configuration.make({
        "name": "t", "model": str(folder / "model"), "adapter": str(folder / "adapter"), "task": "none",
        "temperature": 1.0, "train_dtype": "float32", **keys})


@pytest.fixture
def policy(settings, monkeypatch):
    """policy(alpha, **keys), on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def make(alpha=1.0, **keys):
        config = settings(**keys)
        return Policy(config, spectrum_of(config, alpha))
    return make


def spectrum_of(config, alpha) -> Spectrum:
    return Spectrum.load(config.adapter, alpha, config.offsets, config.offset_scale)


def sequences(old=False) -> list[Sequence]:
    """Of all lengths, with both signs of advantage; some share a prompt. old: with those of other policies."""
    draw = np.random.default_rng(0)
    prompts = {length: draw.integers(3, 97, length).tolist() for length in (9, 1, 30, 2)}
    made = []
    for prompt, completion, advantage in ((9, 4, 1.0), (1, 1, -0.5), (1, 12, 0.7), (30, 2, -1.2), (30, 3, 0.4),
                                          (2, 7, 0.3), (9, 1, -0.8)):
        made.append(Sequence(prompts[prompt], draw.integers(3, 97, completion).tolist(), np.full(completion, -4.0),
                             advantage))
        if old:
            made[-1].old, made[-1].reference = draw.normal(-5, 1, completion), draw.normal(-5, 1, completion)
    return made


# -- log-probabilities ---------------------------------------------------------------------------

@pytest.mark.parametrize("family, temperature, size", [("llama", 1.0, 3), ("llama", 0.6, 1), ("qwen2", 0.6, 7),
                                                       ("qwen3", 1.0, 4)])
def test_log_probabilities_are_pefts(policy, tmp_path, family, temperature, size):
    """Row by row, without padding."""
    files_in(tmp_path, family)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    found = policy(model=str(tmp_path / "model"), adapter=str(tmp_path / "adapter"), temperature=temperature,
                   micro_batch=size).log_probabilities(sequences())
    for s, ours in zip(sequences(), found, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([s.prompt + s.completion])).logits[0, len(s.prompt) - 1:-1]
        logp = (logits / temperature).log_softmax(-1)
        np.testing.assert_allclose(ours, logp[range(len(s.completion)), s.completion], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parameters", ["lora", "spectrum"])
def test_the_policy_is_what_is_placed(policy, settings, tmp_path, parameters):
    """What a vector's adapter gives, saved and loaded as anyone would, is what the policy computes with it."""
    ours = policy(parameters=parameters, alpha=0.5)
    flat = ours.parameters.start
    flat = flat + 0.1 * np.random.default_rng(1).standard_normal(len(flat)).astype(np.float32)
    ours.place(flat)
    placed = ours.parameters.placed(flat)
    if parameters == "lora":
        placed.save(tmp_path / "placed", np.zeros(placed.dimension))
    else:
        spectrum_of(settings(), 0.5).save(tmp_path / "placed", placed)
    other = policy(adapter=str(tmp_path / "placed"))
    moved = ours.log_probabilities(sequences())
    np.testing.assert_allclose(np.concatenate(moved), np.concatenate(other.log_probabilities(sequences())), atol=1e-5)
    ours.place(ours.parameters.start)
    assert np.abs(np.concatenate(moved) - np.concatenate(ours.log_probabilities(sequences()))).max() > 0.01


# -- gradients -----------------------------------------------------------------------------------

def torch_loss(factors: dict) -> torch.Tensor:
    """A nonlinear function of all factors, each entry with a weight of its own."""
    draw = torch.Generator().manual_seed(0)
    return sum((torch.randn(factors[name].shape, generator=draw, dtype=torch.float64) * factors[name]).sin().sum()
               for name in sorted(factors))


def name_of(p, factor):
    return f"base_model.model.{p.module}.lora_{factor}.weight"


@pytest.mark.parametrize("kind", OFFSETS)
def test_the_spectrums_gradient_is_autograds(tmp_path, kind):
    """Through A = U diag(s + d) V^T as the definitions read, of the top half of each searched factor, in float64."""
    make_adapter(tmp_path / "a", shapes_of(SIZES, (*ATTENTION, "up_proj")), rank=4, scale=0.3)
    spectrum = Spectrum.load(tmp_path / "a", 0.5, kind, SCALES)
    start = random_vector(spectrum)
    x, done, factors = torch.tensor(start, requires_grad=True), 0, {}
    for p in spectrum.projections:
        for factor, U, s, V in (("A", p.U_A, p.s_A, p.V_A), ("B", p.U_B, p.s_B, p.V_B)):
            values = torch.tensor(s, requires_grad=True)
            if p.name != "up_proj":
                c = SCALES.get(p.name, 1.0) * SCALES.get(factor, 1.0) * x[done:done + 2]
                top = values[:2]
                d = {"relative": top * c, "exp": top * (c.exp() - 1), "projection": s.mean() * c, "absolute": c}[kind]
                values, done = torch.cat([top + d, values[2:]]), done + 2
            factors[name_of(p, factor)] = torch.tensor(U) @ values.diag() @ torch.tensor(V).T
    assert done == spectrum.dimension
    for name, tensor in spectrum.factors(start).items():
        np.testing.assert_allclose(factors[name].detach(), tensor, atol=1e-6)
        factors[name].retain_grad()
    torch_loss(factors).backward()
    grads = {name: tensor.grad.numpy() for name, tensor in factors.items()}
    found = spectrum.gradient(start, grads)
    assert relative_error(found, x.grad.numpy()) < 1e-13
    single = Singular(spectrum).gradient(start.astype(np.float32), {k: g.astype(np.float32) for k, g in grads.items()})
    assert single.dtype == np.float32 and relative_error(single, found) < 1e-6


@pytest.mark.parametrize("kind", OFFSETS)
def test_the_spectrums_gradient_is_the_slope(tmp_path, kind):
    """Finite differences through `spectra`, coordinate by coordinate."""
    make_adapter(tmp_path / "a", shapes_of(SIZES), rank=4, scale=0.3)
    spectrum, h = Spectrum.load(tmp_path / "a", 0.5, kind, SCALES), 1e-5

    def factors(x):
        return {name_of(p, factor): torch.tensor(left * s @ right.T, requires_grad=True)
                for p, (s_A, s_B) in zip(spectrum.projections, spectrum.spectra(x))
                for factor, left, s, right in (("A", p.U_A, s_A, p.V_A), ("B", p.U_B, s_B, p.V_B))}
    x = random_vector(spectrum)
    here = factors(x)
    torch_loss(here).backward()
    found = spectrum.gradient(x, {name: tensor.grad.numpy() for name, tensor in here.items()})
    slopes = [(torch_loss(factors(x + e)) - torch_loss(factors(x - e))).item() / (2 * h) for e in h * np.eye(len(x))]
    assert relative_error(found, slopes) < 1e-8


@pytest.mark.parametrize("parameters", ["lora", "spectrum"])
def test_the_policys_gradient_is_the_slope_of_its_loss(policy, parameters):
    """Along itself, by a central difference in float32."""
    ours = policy(parameters=parameters, alpha=0.5, offset_scale={"A": 0.5})
    flat = ours.parameters.start + np.float32(0.05)

    def loss_at(flat):
        ours.place(flat)
        gradient, sums = ours.gradient(WIDE, sequences(old=True))
        return sums["loss"], gradient
    gradient = loss_at(flat)[1]
    size = np.linalg.norm(gradient)
    h = np.float32(3e-3) * gradient / size
    assert (loss_at(flat + h)[0] - loss_at(flat - h)[0]) / (2 * np.linalg.norm(h)) == pytest.approx(size, rel=3e-3)


@pytest.mark.parametrize("kind", OFFSETS)
def test_the_gradient_of_singular_values_is_of_the_factors(policy, settings, kind):
    """And the next gradient is not the sum of both."""
    keys = {"offsets": kind, "offset_scale": SCALES}
    values, factors = policy(0.5, parameters="spectrum", **keys), policy(0.5, **keys)
    x = 0.1 * np.random.default_rng(0).standard_normal(len(values.parameters.start)).astype(np.float32)
    values.place(x)
    moved = values.parameters.factors(x)
    factors.place(np.concatenate([moved[name].ravel() for name in sorted(moved)]))
    by_factor, _ = factors.gradient(WIDE, sequences(old=True))
    wanted = spectrum_of(settings(**keys), 0.5).gradient(x, factors.parameters.factors(by_factor))
    for _ in range(2):
        found, _ = values.gradient(WIDE, sequences(old=True))
        assert found.dtype == np.float32 and relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("loss", CLIPS)
def test_micro_batches_add_up(policy, loss, old):
    objective, found = Objective(loss, *CLIPS[loss], 0.1, 12), []
    for size in (7, 1, 3):
        found.append(policy(micro_batch=size).gradient(objective, sequences(old)))
    (whole, sums), *parts = found
    assert np.linalg.norm(whole) > 0.1 and sums["tokens"] == 30 and (sums["clipped"] > 0) == (sums["kl"] > 0) == old
    for gradient, other in parts:
        assert relative_error(gradient, whole) < 1e-5
        assert other == pytest.approx(sums, rel=1e-5, abs=1e-6)


def test_a_prompt_is_run_once_for_the_rollouts_beside_each_other(policy):
    ours, shapes = policy(micro_batch=7), []
    ours.model.get_input_embeddings().register_forward_hook(lambda _, inputs, out: shapes.append((*inputs[0].shape,)))
    ours.gradient(WIDE, sequences())
    assert shapes == [(5, 30), (7, 12 - 1)]


def test_how_far_trainer_and_engine_are_apart(policy):
    """Sums over the tokens of |log p - log q|, of its k3, and its largest value; of the old policy, if there is one."""
    ours, rows = policy(micro_batch=2), sequences()
    apart = np.concatenate([logp - s.drawn for logp, s in zip(ours.log_probabilities(rows), rows)])
    _, sums = ours.gradient(WIDE, rows)
    assert sums["mismatch"] == pytest.approx(np.abs(apart).sum(), rel=1e-5)
    assert sums["mismatch_kl"] == pytest.approx((np.exp(apart) - 1 - apart).sum(), rel=1e-5)
    assert sums["mismatch_most"] == pytest.approx(np.abs(apart).max(), rel=1e-5)
    for s in rows:
        s.old = s.drawn + 0.25
    assert ours.gradient(WIDE, rows)[1]["mismatch"] == pytest.approx(30 / 4)


def test_no_sequences_have_no_gradient(policy):
    gradient, sums = policy().gradient(WIDE, [])
    assert not gradient.any() and gradient.dtype == np.float32 and not any(sums.values())


# -- other factors -------------------------------------------------------------------------------

@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_with_factors_gives_the_adapter_back(tmp_path, alpha):
    """Some projections have another rank, one is static."""
    shapes = shapes_of(SIZES, (*ATTENTION, "up_proj"))
    make_adapter(tmp_path / "a", shapes, rank=8, ranks={"k_proj": 4}, rank_pattern={"k_proj": 4})
    draw = np.random.default_rng(0)
    spectrum = Spectrum.load(tmp_path / "a", alpha, "relative", SCALES)
    factors = {name: draw.standard_normal(tensor.shape).astype(np.float32) for name, tensor in spectrum.tensors.items()}
    other = spectrum.with_factors(factors)
    zero = np.zeros(other.dimension)
    assert other.dimension == spectrum.dimension and other.source != spectrum.source
    other.save(tmp_path / "b", zero)
    saved = load_file(tmp_path / "b" / "adapter_model.safetensors")
    assert saved.keys() == factors.keys()
    for name, tensor in factors.items():
        np.testing.assert_allclose(saved[name], tensor, rtol=1e-7)
    Spectrum.load(tmp_path / "b", alpha)
    stacked = other.stacked_cores(other.offsets(zero[None]))[0]
    for p, core in zip(other.projections, stacked):
        update = p.scale * factors[name_of(p, "B")].astype(float) @ factors[name_of(p, "A")].astype(float)
        assert p.scale == (4 if p.name == "k_proj" else 2)
        np.testing.assert_allclose(products(other, zero)[p.module], update, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(p.U_B @ core[:p.rank, :p.rank] @ p.V_A.T, update, rtol=1e-12, atol=1e-12)


# -- the optimiser -------------------------------------------------------------------------------

SHAPES = ((3, 4), (5,), (2, 2, 2))
SIZE = 25


def learner(settings, seed=0, **keys) -> Learner:
    start = np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)
    return Learner(start, settings(**{"lr": 0.01, "warmup_steps": 3, "weight_decay": 0.1, "clip_norm": 1.0, **keys}))


def gradients(n, seed=1):
    """Some longer than 1, some shorter."""
    draw = np.random.default_rng(seed)
    return [(10.0 ** (1 - i % 3) * draw.standard_normal(SIZE) / SIZE**0.5).astype(np.float32) for i in range(n)]


def bits(state) -> dict:
    return {name: np.asarray(value).tobytes() for name, value in state.items()}


@pytest.mark.parametrize("keys", [{}, {"clip_norm": 0.0, "warmup_steps": 0, "weight_decay": 0.0}])
def test_the_learner_is_torchs_adamw(settings, keys):
    """On several tensors, with torch's clipping and schedule."""
    ours = learner(settings, **keys)
    warm, limit = keys.get("warmup_steps", 3), keys.get("clip_norm", 1.0)
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    tensors = [torch.nn.Parameter(part.reshape(shape).clone())
               for part, shape in zip(torch.from_numpy(ours.flat).split(sizes), SHAPES)]
    optimiser = torch.optim.AdamW(tensors, 0.01, (0.9, 0.999), 1e-8, weight_decay=keys.get("weight_decay", 0.1))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda done: min(1.0, (done + 1) / warm) if warm else 1.0)
    for gradient in gradients(5):
        rate = schedule.get_last_lr()[0]
        for tensor, part in zip(tensors, torch.from_numpy(gradient).split(sizes)):
            tensor.grad = part.reshape(tensor.shape).clone()
        norm = torch.nn.utils.clip_grad_norm_(tensors, limit or np.inf)
        assert ours.update(gradient) == pytest.approx(norm.item()) and ours.rate == pytest.approx(rate)
        optimiser.step(), schedule.step()
        wanted = torch.cat([tensor.detach().ravel() for tensor in tensors]).numpy()
        np.testing.assert_allclose(ours.flat, wanted, rtol=1e-6, atol=1e-7)
    assert ours.updates == 5


@pytest.mark.parametrize("before", [0, 1, 4])
def test_a_learner_goes_on_from_its_state(settings, before):
    """To the bit; the state is no view of what goes on."""
    one, other = learner(settings), learner(settings, seed=9)
    for gradient in gradients(before):
        one.update(gradient)
    state = one.state()
    kept = bits(state)
    other.load_state(state)
    assert other.digest() == one.digest()
    for gradient in gradients(3, seed=2):
        assert one.update(gradient) == other.update(gradient)
        assert bits(one.state()) == bits(other.state()) and one.digest() == other.digest()
    assert bits(state) == kept


def test_an_update_changes_no_array_that_others_hold(settings):
    start, (gradient,) = np.ones(SIZE, np.float32), gradients(1)
    ours, kept = Learner(start, settings(lr=0.01)), gradient.copy()
    flat = ours.flat
    ours.update(gradient)
    assert (gradient == kept).all() and (start == 1).all() and (flat == 1).all() and (ours.flat != 1).all()


def test_the_digest_sees_every_bit(settings):
    ours = learner(settings)
    for gradient in gradients(2):
        ours.update(gradient)
    state, seen = ours.state(), {ours.digest()}
    for name in ("flat", "first", "second"):
        for at in (0, 12, SIZE - 1):
            for bit in (0, 15, 31):
                changed = state[name].copy()
                changed.view(np.uint32)[at] ^= np.uint32(1 << bit)
                ours.load_state({**state, name: changed})
                seen.add(ours.digest())
    ours.load_state({**state, "updates": np.int64(3)})
    seen.add(ours.digest())
    assert len(seen) == 1 + 27 + 1
    ours.load_state(state)
    assert ours.digest() in seen and abs(ours.digest()) < 2**63


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_refused(settings, value):
    ours, (good, bad) = learner(settings), gradients(2)
    ours.update(good)
    before = bits(ours.state())
    bad[3] = value
    message = refusal(ours.update, bad)
    assert "update 2" in message and "lr = 0.01" in message
    assert bits(ours.state()) == before
