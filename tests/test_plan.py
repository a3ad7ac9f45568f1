"""The latency model, `plan`, and the simulation of `benchmarks.scaling`: against hand-worked numbers and limits."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from conftest import ROOT, refusal
from essa_mpi import config as configuration
from essa_mpi import latency, plan
from essa_mpi.cli import parser
from essa_mpi.latency import Engine, Network
from essa_mpi.world import Busy, TileScore, World, share

SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 16, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 10, "model_type": "llama", "tie_word_embeddings": True}
QUIET = dict(update=0.0, place=0.0, straggling=0.0)


@pytest.fixture
def generation(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import generation
    return generation


@pytest.fixture
def scaling(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import scaling
    return scaling


# -- formulas ----------------------------------------------------------------------------------------

def test_appendix_b_by_hand():
    # 128 candidates, 256 rows, 16 GPUs, 2 an engine, half a second a sample: 128 x 256 x 2 x 0.5 / 16 = 2048 s.
    assert latency.essa_seconds(128, 256, 16, 2, 0.5, math.inf) == 2048
    assert latency.essa_seconds(128, 256, 16, 2, 0.5, 1024) == 2049      # 8 bytes a candidate
    assert latency.allreduce_paper(4, 100, 50) == 3                      # 2 x 100 x 3 / (4 x 50)
    # theta 0.75: 512 x 1 x 3 / (0.75 x 8) = 256 s of training, and 512 x 1 x 1 / (0.25 x 8) = 256 of generation.
    assert latency.best_theta(1, 3, 1, 1) == 0.75
    assert latency.gradient_seconds(512, 8, 1, 3, 1, 1, 0, 1) == 256
    assert latency.gradient_seconds(512, 8, 1, 3, 1, 1, 0, 1, theta=0.5) == 384


@pytest.mark.parametrize("theta", [0.1, 0.4, 0.6, 0.9])
def test_no_other_theta_is_better(theta):
    sizes = 512, 8, 2, 3.0, 4, 0.5, 10.0, 1.0
    assert latency.gradient_seconds(*sizes) <= latency.gradient_seconds(*sizes, theta=theta)


def test_theorem_b2_is_where_the_two_formulas_meet():
    sizes = batch, gpus, m_fb, eta_fb, m_gen, eta_gen, nbytes, bandwidth = 512, 16, 1, 3.0, 2, 0.5, 1e9, 1e9
    samples, printed = latency.break_even(*sizes)
    essa = latency.essa_seconds(samples, 1, gpus, m_gen, eta_gen, math.inf)
    assert essa == pytest.approx(latency.gradient_seconds(*sizes))
    assert samples == 512 * (3 / 1 + 1) + 2 * 15 / 1
    assert printed == 512 * (3 / (16 * 0.5) + 1) + 15 / (16 * 0.5)
    # With what it takes for granted, m_gen = G and m_fb = 1, only the factor 2 of the all-reduce is between them.
    a, b = (latency.break_even(512, 16, 1, 3.0, 16, 0.5, n, 1e9) for n in (0.0, 1e9))
    assert a[0] == a[1] and b[0] - a[0] == pytest.approx(2 * (b[1] - a[1]))


def test_collectives_by_hand():
    network = Network(2.0, 10.0)
    assert latency.allgather_seconds(8, 10, network, "doubling") == 3 * 2 + 7 * 1
    assert latency.allgather_seconds(5, 10, network, "bruck") == 3 * 2 + 4
    assert latency.allgather_seconds(5, 10, network, "ring") == 4 * 2 + 4
    assert latency.allgather_seconds(5, 10, network, "doubling") == math.inf      # for powers of two only
    assert latency.allreduce_seconds(4, 100, network, "ring") == 2 * 3 * 2 + 2 * 100 * 3 / 40
    assert latency.allreduce_seconds(4, 100, network, "tree") == 2 * 2 * 2 + 15
    for algorithm in ("doubling", "bruck", "ring"):
        assert latency.allgather_seconds(1, 10, network, algorithm) == 0
    assert latency.allreduce_seconds(1, 100, network) == 0
    # The one published measurement: 8 bytes, 16 ranks, 10.62 us.
    assert latency.allgather_seconds(16, 8, Network()) == pytest.approx(10.62e-6, rel=0.1)


def test_greatest_of_normal_numbers():
    rng = np.random.default_rng(0)
    for count in (1, 2, 16, 512):
        drawn = rng.standard_normal((4000, count)).max(axis=1)
        assert latency.greatest_of(count) == pytest.approx(drawn.mean(), abs=0.06)


# -- tiles -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ranks, population, batch", [
    (1, 3, 5), (2, 3, 5), (4, 3, 5), (7, 3, 5), (15, 3, 5), (40, 3, 5), (16, 128, 256), (512, 128, 256),
    (1000, 96, 100)])
def test_tiles_are_those_of_the_program(ranks, population, batch):
    cells = latency.boundaries(ranks, population, batch)
    seen = np.zeros((population, batch), int)
    for rank, count in enumerate(latency.tiles_of(cells, batch)):
        tiles = share([batch] * population, rank, ranks)
        assert len(tiles) == count
        flat = [tile.arm * batch + row for tile in tiles for row in range(tile.start, tile.stop)]
        assert flat == list(range(cells[rank], cells[rank + 1]))
        for tile in tiles:
            seen[tile.arm, tile.start:tile.stop] += 1
    assert (seen == 1).all()        # every cell is scored once


def test_candidates_stay_whole_without_tiles():
    cells = latency.boundaries(8, 5, 10, tiles=False)
    assert (cells % 10 == 0).all() and cells[-1] == 50 and (np.diff(cells) <= 10).all()


def test_bytes_are_those_that_the_program_sends(scaling):
    for ranks, population, batch in ((1, 4, 6), (3, 4, 6), (16, 128, 256), (40, 4, 6)):
        world = World(scaling.Stub(ranks))
        tiles = share([batch] * population, 0, ranks)
        sent = world.exchange([batch] * population, [TileScore() for _ in tiles], 0, Busy()).bytes_sent
        assert sent == latency.exchange_bytes(ranks, population, batch)


# -- the engine --------------------------------------------------------------------------------------

ENGINE = Engine(read=1.0, token=0.25, slots=8)


def test_decoding_by_hand():
    # Two answers of 3 and 5 tokens: five steps, none with more than the 4 sequences that fill one.
    assert latency.decode_seconds(np.array([[3, 5]]), ENGINE)[0] == 5
    # Eight of 3 and one after them of 2: three steps of 8 / 4 s, then two that are read for one sequence.
    assert latency.decode_seconds(np.array([[3] * 8 + [2]]), ENGINE)[0] == 3 * 2 + 2
    assert ENGINE.full == 4 and ENGINE.step(4) == ENGINE.step(1) == 1 and ENGINE.step(8) == 2
    # 7 x 2 slots taken all along, in waves: a closed form.
    assert latency.decode_seconds(np.full((1, 14), 10), Engine(0.0, 0.25, 2))[0] == pytest.approx(7 * 10 * 2 * 0.25)


@pytest.mark.parametrize("slots", [64, 200])
def test_event_by_event_is_the_closed_form_where_all_fit(slots):
    lengths = np.random.default_rng(0).integers(1, 300, (5, 64))
    engine = Engine(0.01, 0.0004, slots, kv=1e-5, transfer=1e-5, overhead=1e-3)
    closed = latency.decode_seconds(lengths, engine)
    assert closed == pytest.approx([latency._queued(row, engine) for row in lengths])


def test_decoding_lies_between_its_bounds_and_is_monotone():
    rng = np.random.default_rng(1)
    lengths, engine = rng.integers(1, 200, 100), Engine(0.01, 0.001, 16)
    seconds = latency._queued(lengths, engine)
    arithmetic = lengths.sum() * engine.token
    assert arithmetic <= seconds <= arithmetic + (lengths.sum() / 16 + 200) * engine.read
    assert latency._queued(np.append(lengths, 50), engine) >= seconds
    assert latency._queued(lengths + 1, engine) > seconds
    # Nothing but arithmetic: the order and the slots do not matter.
    free = Engine(0.0, 0.001, 16)
    assert latency._queued(lengths, free) == pytest.approx(lengths.sum() * 0.001)
    assert latency.decode_seconds(np.zeros((2, 3), int), engine).tolist() == [0, 0]


# -- the simulation ----------------------------------------------------------------------------------

def test_without_losses_efficiency_is_one_up_to_rounding(generation):
    setting = generation.Setting(network=Network(0.0, math.inf), **QUIET)
    one = generation.simulate(setting, generation.Way(1), 1)["seconds"]
    for gpus in (16, 128, 512, 32768):       # they divide the cells
        assert one / (gpus * generation.simulate(setting, generation.Way(gpus), 1)["seconds"]) == pytest.approx(1)
    for gpus in (3, 100, 5000, 100_000):
        exact = 128 * 256 / gpus / math.ceil(128 * 256 / gpus)
        assert one / (gpus * generation.simulate(setting, generation.Way(gpus), 1)["seconds"]) == pytest.approx(exact)


def test_terms_add_up_and_more_ranks_are_never_slower(generation):
    for cost in ("constant", "engine"):
        before = math.inf
        for gpus in (16, 64, 256, 1024):
            found = generation.simulate(generation.Setting(**QUIET), generation.Way(gpus, cost), 2)
            assert sum(found["terms"].values()) == pytest.approx(found["seconds"])
            assert found["seconds"] < before and min(found["terms"].values()) >= -1e-9
            before = found["seconds"]


def test_stragglers_and_whole_candidates_cost(generation):
    setting = generation.Setting()
    tiled, whole = (generation.simulate(setting, generation.Way(512, "constant", tiles), 3)["seconds"]
                    for tiles in (True, False))
    assert whole > 3 * tiled        # 128 of 512 ranks have work
    calm = generation.simulate(generation.Setting(straggling=0.0), generation.Way(512), 3)
    assert calm["seconds"] < tiled and calm["terms"]["stragglers"] == 0
    share_of = generation.simulate(setting, generation.Way(512), 50)["terms"]["stragglers"] / calm["terms"]["work"]
    assert share_of == pytest.approx(math.exp(0.04 * latency.greatest_of(512)) - 1, rel=0.1)


def test_every_answer_is_generated_once_however_it_is_cut(generation, monkeypatch):
    """With steps that cost nothing but arithmetic, all ranks' seconds add up to those of one rank."""
    setting = generation.Setting(population=12, batch=10)
    monkeypatch.setattr(generation.Setting, "engine", lambda self, parallel=1, cache=False: Engine(0.0, 0.01, 4))
    totals = []
    for gpus in (1, 2, 5, 12, 60, 200):
        for tiles in (True, False):
            for rows_first in (False, True):
                busy, work, _ = generation._busy(setting, generation.Way(gpus, "engine", tiles, 1, rows_first),
                                                 np.random.default_rng(3))
                assert busy == pytest.approx(work)
                totals.append(busy.sum())
    assert totals == pytest.approx([totals[0]] * len(totals))
    monkeypatch.setattr(generation, "CHUNK", 50)      # the pieces that a large population is drawn in
    busy, _, cells = generation._busy(setting, generation.Way(6, "engine"), np.random.default_rng(3))
    assert (busy > 0).all() and np.diff(cells).sum() == 120


def test_constant_cost_is_that_of_an_engine_with_full_slots(generation):
    """(a) and (b) agree where (b) has nothing to lose: answers of one length, in whole waves of full slots."""
    setting = generation.Setting(deviation=1e-12, network=Network(0.0, math.inf), **QUIET)
    for parallel in (1, 2):
        a, b = (generation.simulate(setting, generation.Way(16, cost, tensor_parallel=parallel), 1)["seconds"]
                for cost in ("constant", "engine"))
        assert a == pytest.approx(b, rel=1e-3)


def test_models_are_those_of_their_names(generation):
    for size, parameters in (("7B", 7_615_616_512), ("32B", 32_763_876_352), ("72B", 72_706_203_648)):
        assert generation.qwen(size).parameters == parameters       # as their model cards and files have it
    assert generation.qwen("32B").dimension(8) == 4096
    # Rank 8 on q, k, v, o of 7B: 28 x 8 x (2 x (3584 + 3584) + 2 x (3584 + 512)).
    assert generation.qwen("7B").adapter_parameters(8) == 28 * 8 * (2 * 7168 + 2 * 4096)


def test_what_does_not_fit_is_refused(generation):
    with pytest.raises(ValueError, match="72B does not fit on 1"):
        generation.Setting(size="72B").engine()


# -- the benchmark -----------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The JSON and the words of a quick run."""
    file = tmp_path_factory.mktemp("scaling") / "scaling.json"
    done = subprocess.run([sys.executable, "-m", "benchmarks.scaling", "--quick", "--json", str(file)], cwd=ROOT,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout, file


def test_benchmark_reports_both_models_with_and_without_tiles(quick):
    found, said, file = quick
    for name in ("efficiency_128", "efficiency_512", "efficiency_128_engine", "efficiency_512_engine"):
        for suffix in ("", "_without_tiles"):
            assert 0 < found["ratios"][name + suffix] <= 1
    assert found["ratios"]["efficiency_512"] > found["ratios"]["efficiency_512_without_tiles"]
    assert found["ratios"]["efficiency_512_engine"] < found["ratios"]["efficiency_512"]
    assert found["setting"]["median"] == 450 and "log-normal" in " ".join(found["assumed"]) and "log-normal" in said
    for row in found["rows"]:
        assert row["seconds"] == pytest.approx(sum(row["terms"].values())) and row["limit"] in row["terms"]
    best = [row for row in found["rows"] if row["scaling"] == "best split"]
    assert all(row["seconds"] == min(each["seconds"] for each in row["tried"]) for row in best)
    assert {row["method"] for row in found["paper"]["fits"]} == {"ESSA", "GRPO"}
    pytest.importorskip("matplotlib")
    assert file.with_suffix(".png").stat().st_size < 200_000


@pytest.mark.parametrize("words, says", [(["--json", "/nowhere/f.json"], "does not exist"),
                                         (["--generations", "0"], "allowed: an integer >= 1")])
def test_benchmark_refuses_in_one_line(scaling, words, says, capsys):
    try:
        code = scaling.main(words)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and says in error and error.count("essa") <= 1


def test_figure_3_is_solved_for_both_unknowns(scaling, generation):
    """Putting the number of all-reduces back in gives both of the paper's minutes."""
    from benchmarks import figure3
    for row in figure3.all_reduces(generation.Setting()):
        times = {g: row["number"] * latency.allreduce_paper(g, row["bytes"], 25e9) / 60 for g in (16, 128)}
        work = 16 * (400 - times[16])
        assert work / 128 + times[128] == pytest.approx(150)


# -- plan --------------------------------------------------------------------------------------------

@pytest.fixture
def config(tmp_path):
    """A config file, its model folder beside it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(SMALL))
    file = tmp_path / "c.toml"
    file.write_text(f'name = "x"\nmodel = "{tmp_path}/model"\nadapter = "{tmp_path}/none"\ntask = "rows.jsonl"\n'
                    f"rank = 2\npopulation = 8\nbatch = 16\nmax_tokens = 100\n")
    return file


def planned(config, *words):
    options = parser().parse_args(["plan", str(config), "--gpus", "1,2,4,8,64", *words])
    return plan.make_plan(configuration.load(config, options.overrides), options)


MEASURED = ("--token-seconds", "0.01", "--tokens", "50")


def test_model_sizes_by_hand():
    model = plan.Model.of(SMALL)
    # q 8 x 8, k and v 8 x 4, o 8 x 8, three MLP matrices 8 x 16, two norms; a final norm; tied embeddings 10 x 8.
    assert model.parameters == 2 * (64 + 2 * 32 + 64 + 3 * 128 + 16) + 8 + 80
    assert model.weight_bytes == 2 * model.parameters
    assert model.adapter_parameters(2) == 2 * 2 * (16 + 12 + 12 + 16) and model.dimension(2) == 2 * 4 * 2 * 2
    assert model.dimension(8, alpha=0.3) == 2 * 4 * 2 * 2


def test_model_is_what_transformers_says(real_model):
    from safetensors import safe_open
    with safe_open(real_model / "model.safetensors", "pt") as file:
        elements = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    assert plan.Model.read(real_model).parameters == elements


def test_generation_by_hand(config):
    # 8 x 16 answers of 50 tokens of 10 ms: 64 s on one rank; a step of 0.02 s makes the longest answer 2 s.
    p = planned(config, *MEASURED, "--straggling", "0", "--step-seconds", "0.02", "--update-seconds", "0.5",
                "--latency", "1e-9")
    one, many = plan.generation(p, 1), plan.generation(p, 64)
    assert one["seconds"] == pytest.approx(64.5) and one["limit"] == "update"
    assert many["terms"]["work"] == pytest.approx(1) and many["terms"]["longest answer"] == pytest.approx(1)
    assert many["limit"] == "longest answer" and many["answers_a_rank"] == 2 and many["ranks_a_candidate"] == 8
    assert plan.generation(p, 96)["terms"]["rounding"] == pytest.approx((2 - 128 / 96) * 0.5)
    for row in (one, many):
        assert row["seconds"] == pytest.approx(sum(row["terms"].values()))
        assert row["appendix_b_seconds"] == pytest.approx(64 / row["gpus"], abs=1e-6)


def test_where_it_stops_and_what_pays(config):
    floor = planned(config, *MEASURED, "--straggling", "0", "--step-seconds", "0.1")       # 10 s the longest
    end = plan.stops(floor, 1)
    assert end["limit"] == "longest answer" and (end["last_good"], end["gpus"]) == (8, 16) and end["efficiency"] < 0.5
    assert plan.what_pays(floor, 1)["pays"] == "more ranks"
    found = plan.what_pays(floor, 64)
    assert found["pays"] == "more candidates" and found["cheap_population"] == 64       # 16 x 64 / 64 answers: 8 s
    bare = planned(config, *MEASURED, "--straggling", "0")
    assert plan.stops(bare, 1)["limit"] == "rounding"       # ranks without one answer each
    slow = planned(config, *MEASURED, "--straggling", "0", "--update-seconds", "30")
    assert plan.stops(slow, 1)["limit"] == "update"


def test_ideal_machine_scales(config):
    p = planned(config, *MEASURED, "--straggling", "0", "--latency", "1e-12", "--bandwidth", "1e20")
    found = plan.study(p, [1, 2, 4, 8, 64, 128])
    assert [row["efficiency"] for row in found["rows"]] == pytest.approx([1.0] * 6)
    assert any("least time is not known" in line for line in found["said"])
    seconds = [row["seconds"] for row in plan.study(planned(config, *MEASURED), [1, 2, 4, 8, 64])["rows"]]
    assert seconds == sorted(seconds, reverse=True)


def test_grpo_step_by_hand(config):
    # 16 x 8 rollouts: 64 s to generate, 192 to train.
    p = planned(config, *MEASURED, "--train-token-seconds", "0.03")
    found = plan.step(p, 4, 1e9)
    assert found["terms"]["work"] == pytest.approx(64) and found["theta"] == 0.75
    assert found["terms"]["all-reduce"] == pytest.approx(2 * 1e9 * 3 / (4 * 25e9))


def test_measured_from_a_run(tmp_path, config):
    """The history of a run is read back: tokens, seconds, ranks."""
    from essa_mpi.runfile import History, RunFolder, history_schema
    text = configuration.dump(configuration.load(config))
    folder = RunFolder.create("x", text, tmp_path / "runs")
    history = History(history_schema(8))
    for g in range(3):
        scale = 10.0 if g == 0 else 1.0      # warm-up
        values = {name: np.zeros(*kind) for name, kind in history_schema(8).items() if name != "generation"}
        history.append(g, **{**values, "tokens": 128 * 20, "times/generate": 5.0 * scale, "times/score": 0.12 * scale,
                             "times/wait": 0.256,
                             "times/seconds": 5.12 * scale + 0.256, "times/update": 0.3, "times/place": 0.4})
    history.write(folder.history, {"config": text, "ranks": 2})
    found = plan.read_run(folder.path)
    assert found.token == pytest.approx(5.12 * 2 / (128 * 20)) and found.tokens == 20
    assert found.update == pytest.approx(0.3) and found.place == pytest.approx(0.4 * 2 / 8) and found.train is None
    assert found.straggling == pytest.approx(0.05 / latency.greatest_of(2)) and found.load == 64
    p = planned(config, "--run", str(folder.path))
    assert plan.generation(p, 2)["terms"]["work"] == pytest.approx(5.12)      # it predicts what was measured
    (folder.metrics).write_text("".join(json.dumps({"generation": g, "completions": 160}) + "\n" for g in range(3)))
    assert plan.read_run(folder.path).tokens == 16
    folder.metrics.write_text("".join(json.dumps({"generation": g, "completions": 160, "ranks": 2 + 2 * (g == 2)}) + "\n"
                                      for g in range(3)))     # resumed on four
    found = plan.read_run(folder.path)
    assert found.token == pytest.approx(5.12 * 3 / (128 * 20)) and found.load == 160 / 3 and "2 to 4 ranks" in found.source


@pytest.mark.parametrize("words, says", [
    ((), "nothing is measured; give --run"), (("--token-seconds", "0.1"), "--tokens is missing"),
    (("--token-seconds", "0.1", "--tokens", "101"), "max_tokens = 100"), (("--run", "nowhere"), "nowhere"),
    ((*MEASURED, "--set", "model=nowhere"), "nowhere/config.json cannot be read"),
    ((*MEASURED, "--set", "populatio=3"), "did you mean `population`"),
    ((*MEASURED, "--set", "tensor_parallel=2"), "--gpus 1: an engine takes tensor_parallel = 2")])
def test_refusals(config, words, says):
    options = parser().parse_args(["plan", str(config), "--gpus", "1,2", *words])
    assert says in refusal(plan.plan, options)


@pytest.mark.parametrize("table, says", [("[1]", "not a JSON object"), ("{", "not a JSON object"),
                                         ("{}", "hidden_size is missing"),
                                         (json.dumps({**SMALL, "num_experts": 8}), "has experts")])
def test_models_it_does_not_know(config, table, says):
    (config.parent / "model/config.json").write_text(table)
    assert says in refusal(planned, config, *MEASURED)


@pytest.mark.parametrize("words", [["--gpus", "4,2"], ["--gpus", "a"], ["--gpus", "0"],
                                   ["--gpus", "1", "--latency", "0"], ["--gpus", "1", "--straggling", "1"], []])
def test_wrong_options_are_refused(config, words, capsys):
    with pytest.raises(SystemExit) as stop:
        parser().parse_args(["plan", str(config), *words])
    assert stop.value.code == 2 and "usage" in capsys.readouterr().err


def test_command_prints_a_table_and_writes_json(config, tmp_path):
    file = tmp_path / "plan.json"
    def run(*words):
        command = [sys.executable, "-m", "essa_mpi", "plan", str(config), "--gpus", "1,4,64", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    done = run(*MEASURED, "--json", str(file), "--memory-bandwidth", "0.001")
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = json.loads(file.read_text())
    assert [row["gpus"] for row in found["rows"]] == [1, 4, 64] and found["rows"][0]["efficiency"] == 1
    for word in ("efficiency", "it scales to", "what pays", "theorem", "GRPO"):
        assert word in done.stdout
    assert not any(word in done.stdout for word in ("nan", "None"))
    broken = run()
    assert broken.returncode == 2 and broken.stderr.count("\n") == 1
    assert broken.stderr.startswith("essa_mpi: plan: nothing is measured")
