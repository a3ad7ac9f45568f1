"""What a run hands over: final, averaged, validated or candidate, by hand, through checkpoints and to adapter/."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from deterministic_run import write_run
from essa_mpi import config as configuration
from essa_mpi.answers import Answers
from essa_mpi.config import UserError
from essa_mpi.report import NAMES
from essa_mpi.results import answer_of, export
from essa_mpi.runfile import RunFolder, load_checkpoint, save_checkpoint
from essa_mpi.spectrum import Spectrum
from test_run_mpi import history, run, sets

ANSWERS = ("final", "averaged", "validated", "candidate")


# -- by hand -----------------------------------------------------------------------------------------

def noted(answers, *generations):
    """generations: (mean before, mean after, candidates, fitness, validation), a number for each vector of one."""
    for before, after, candidates, fitness, validation in generations:
        answers.note(np.array([before]), np.array([after]), np.array(candidates)[:, None], np.array(fitness),
                     validation)
    return answers


def vectors(answers, final=9.0):
    return {name: float(vector[0]) for name, vector in answers.vectors(np.array([final])).items()}


def test_without_generations_there_is_the_final_mean_alone():
    assert vectors(Answers(1)) == {"final": 9.0}


def test_the_average_weighs_each_mean_by_four_fifths_of_the_next():
    answers = Answers(1)
    means, expected = [1.0, -2.0, 5.0, 0.5, 0.25], None
    for i, mean in enumerate(means):
        noted(answers, (99.0, mean, [7.0], [0.5], math.nan))
        expected = mean if expected is None else 0.8 * expected + 0.2 * mean    # of one generation it is its mean
        assert vectors(answers)["averaged"] == pytest.approx(expected, rel=1e-15)
    weights = np.array([0.8**4, 0.8**3 * 0.2, 0.8**2 * 0.2, 0.8 * 0.2, 0.2])
    assert vectors(answers)["averaged"] == pytest.approx(float(weights @ means)) and weights.sum() == pytest.approx(1.0)


def test_the_validated_mean_is_the_one_before_the_update_and_of_equal_ones_the_later():
    answers = noted(Answers(1), (1.0, 2.0, [7.0], [0.5], 0.3))
    assert vectors(answers)["validated"] == 1.0
    assert vectors(noted(answers, (2.0, 3.0, [7.0], [0.5], 0.3)))["validated"] == 2.0       # later
    assert vectors(noted(answers, (3.0, 4.0, [7.0], [0.5], 0.29)))["validated"] == 2.0      # worse
    assert vectors(noted(answers, (4.0, 5.0, [7.0], [0.5], math.nan)))["validated"] == 2.0  # not validated
    assert vectors(noted(answers, (5.0, 6.0, [7.0], [0.5], -math.inf)))["validated"] == 2.0  # no score at all
    answers.validate(np.array([6.0]), 0.31)
    assert vectors(answers)["validated"] == 6.0


def test_a_mean_without_a_finite_score_is_no_validated_one():
    answers = noted(Answers(1), (1.0, 2.0, [7.0], [0.5], math.nan), (2.0, 3.0, [7.0], [0.5], -math.inf))
    assert set(vectors(answers)) == {"final", "averaged", "candidate"}
    assert vectors(noted(answers, (3.0, 4.0, [7.0], [0.5], -1e300)))["validated"] == 3.0


def test_the_first_of_equally_good_candidates_is_kept():
    answers = noted(Answers(1), (0.0, 0.0, [1.0, 2.0, 3.0], [0.1, 0.6, 0.6], math.nan))
    assert vectors(answers)["candidate"] == 2.0
    noted(answers, (0.0, 0.0, [4.0, 5.0], [0.6, 0.5], math.nan), (0.0, 0.0, [6.0, 7.0], [-math.inf, 0.2], math.nan))
    assert vectors(answers)["candidate"] == 2.0
    noted(answers, (0.0, 0.0, [8.0, 9.0], [-math.inf, 0.61], math.nan))
    assert vectors(answers)["candidate"] == 9.0


def test_what_is_kept_is_a_copy():
    answers, mean, candidates = Answers(1), np.array([1.0]), np.array([[2.0]])
    answers.note(mean, mean, candidates, np.array([0.5]), 0.5)
    mean[:], candidates[:] = 7.0, 7.0
    assert vectors(answers) == {"final": 9.0, "averaged": 1.0, "validated": 1.0, "candidate": 2.0}
    state = answers.state()
    state["averaged"][:] = 8.0
    assert vectors(answers)["averaged"] == 1.0


def random_generation(rng, dimension=5):
    return (*rng.normal(size=(2, dimension)), rng.normal(size=(7, dimension)), rng.integers(0, 9, 7) / 8,
            rng.choice([math.nan, 0.5, 0.25]))


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_state_goes_through_a_checkpoint_bit_by_bit(tmp_path, monkeypatch, after):
    """And what goes on from it is what would have been without."""
    monkeypatch.chdir(tmp_path)
    rng, answers = np.random.default_rng(after), Answers(5)
    for _ in range(after):
        answers.note(*random_generation(rng))
    folder = RunFolder.create("x", "")
    save_checkpoint(folder, after, {"answers": answers.state()}, {}, 2)
    again = Answers(5)
    again.load_state(load_checkpoint(folder).groups["answers"])
    for _ in range(5):
        one, other = ({k: v.tobytes() for k, v in kept.state().items()} for kept in (again, answers))
        assert one == other
        assert again.vectors(np.ones(5)).keys() == answers.vectors(np.ones(5)).keys()
        generation = random_generation(rng)
        answers.note(*generation)
        again.note(*generation)


# -- of whole runs -------------------------------------------------------------------------------------

KEYS = dict(generations=5, validation_every=2, heldout_rows=4)


def tensors(folder):
    return {name: array.tobytes() for name, array in load_file(folder / "adapter_model.safetensors").items()}


def adapter_of(folder, vector, target):
    """The tensors of the adapter for a search vector."""
    config = configuration.load(folder / "config.toml")
    Spectrum.load(config.adapter, config.alpha, config.offsets, config.offset_scale).save(target, vector)
    return tensors(target)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run's folder, and the best of its answers by the scores of the run."""
    from conftest import Mpirun
    folder = tmp_path_factory.mktemp("finished")
    write_run(folder, **KEYS)
    runs = Mpirun()
    try:
        outcome = run(runs, 1, folder)
    finally:
        runs.close()
    return folder, outcome.stdout


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copy(finished[0] / "config.toml", tmp_path / "config.toml")
    shutil.copytree(finished[0] / "runs", tmp_path / "runs")
    return tmp_path


def kept(folder):
    """name -> vector of the answers that eval and export know, from the newest checkpoint."""
    groups = load_checkpoint(RunFolder.open(folder / "runs/run")).groups
    answers = Answers(32)
    answers.load_state(groups.get("ended", groups["answers"]))
    return answers.vectors(groups["search"]["mean"])


def test_all_answers_are_scored_and_named(finished):
    folder, said = finished
    summary = json.loads((folder / "runs/run/summary.json").read_text())
    assert summary["answer"] == "final"
    assert list(summary["heldout"]) == ["n", "base", "warm_start", "evolved", "averaged", "validated", "candidate"]
    assert len({summary["heldout"][arm]["accuracy"] for arm in ("warm_start", "evolved", "averaged", "candidate")}) == 4
    assert "scoring base, warm start and 4 answers on 4 held-out rows" in said
    for line in ("base", "warm start", "evolved (final mean)", "averaged mean", "best validated mean",
                 "best candidate"):
        assert f"\n  {line:<30} " in said
    assert set(NAMES) == set(ANSWERS)


@pytest.mark.parametrize("answer", ANSWERS)
def test_adapter_export_and_eval_are_the_answer_that_was_asked_for(mpirun, copied, tmp_path, monkeypatch, answer):
    """Asked for when the run is resumed, though nothing is left to evolve: another answer is no other search."""
    monkeypatch.chdir(copied)
    before = history(copied)
    found = kept(copied)
    assert len({vector.tobytes() for vector in found.values()}) == 4 and set(found) == set(ANSWERS)
    run(mpirun, 2, copied, "--resume", *sets(answer=answer))
    assert history(copied) == before
    expected = adapter_of(copied, found[answer], tmp_path / "expected")
    assert tensors(copied / "runs/run/adapter") == expected
    summary = json.loads((copied / "runs/run/summary.json").read_text())
    assert summary["answer"] == answer
    assert list(summary["heldout"])[:4] == ["n", "base", "warm_start", "evolved"]
    assert set(summary["heldout"]) == {"n", "base", "warm_start", "evolved", *ANSWERS} - {answer}

    config = configuration.load(copied / "runs/run/config.toml")        # says what the run was started with
    assert config.answer == "final"
    export(config, "runs/run", None, "exported", False)
    assert tensors(copied / "exported") == expected
    export(replace(config, answer="candidate"), "runs/run", None, "other", False)
    assert tensors(copied / "other") == adapter_of(copied, found["candidate"], tmp_path / "candidate")
    run(mpirun, 2, copied, "--eval", "runs/run")
    scores = json.loads((copied / "eval.json").read_text())
    assert scores["evolved"] == summary["heldout"]["evolved"]


def test_the_answers_of_a_run_started_for_them(mpirun, tmp_path):
    write_run(tmp_path, answer="averaged", **KEYS)
    run(mpirun, 2, tmp_path)
    assert tensors(tmp_path / "runs/run/adapter") == adapter_of(tmp_path, kept(tmp_path)["averaged"],
                                                                tmp_path / "expected")


def test_the_last_mean_is_validated_too(finished, mpirun, copied):
    """For the answer only: a run that goes on is the run that never ended, validated when that one is."""
    groups = load_checkpoint(RunFolder.open(copied / "runs/run")).groups
    assert groups["ended"]["validated_score"] >= groups["answers"]["validated_score"]
    run(mpirun, 1, copied, "--resume", *sets(generations=7, answer="validated"))
    write_run(copied / "whole", **{**KEYS, "generations": 7, "answer": "validated"})
    shutil.copy(copied / "config.toml", copied / "whole/config.toml")
    run(mpirun, 1, copied / "whole", *sets(generations=7, answer="validated"))
    assert history(copied) == history(copied / "whole")
    assert tensors(copied / "runs/run/adapter") == tensors(copied / "whole/runs/run/adapter")
    one, other = (load_checkpoint(RunFolder.open(folder / "runs/run")).groups for folder in (copied, copied / "whole"))
    for group in ("answers", "ended"):
        assert all(one[group][key].tobytes() == other[group][key].tobytes() for key in other[group])


def test_a_run_of_release_0_1_is_resumed_without_its_answers(mpirun, finished, copied):
    """Its checkpoints have no such group: the answers begin where the run is resumed."""
    shutil.rmtree(copied / "runs")
    run(mpirun, 1, copied, *sets(generations=3))
    folder = RunFolder.open(copied / "runs/run")
    old = load_checkpoint(folder)
    groups = {name: arrays for name, arrays in old.groups.items() if name not in ("answers", "ended")}
    save_checkpoint(folder, old.generation, groups, {k: v for k, v in old.attributes.items()
                                                     if k not in ("schema", "generation")}, 2)
    assert set(load_checkpoint(folder).groups) == {"search", "history"}
    config = configuration.load(folder.config)
    spectrum, vector = answer_of(config, folder.path)[:2]
    assert vector.tobytes() == groups["search"]["mean"].tobytes()
    with pytest.raises(UserError, match="answer = 'averaged': .*runs/run has none yet; there are final$"):
        answer_of(replace(config, answer="averaged"), folder.path)
    run(mpirun, 2, copied, "--resume", *sets(generations=5))
    assert history(copied) == history(finished[0])
    assert set(kept(copied)) == set(ANSWERS)


def test_an_answer_the_run_has_not_got_is_told_and_the_final_mean_taken(mpirun, tmp_path):
    """Not one validation row had a score, which shows at the end of the run: too late to refuse."""
    write_run(tmp_path, answer="validated", **{**KEYS, "generations": 2})
    gone = json.dumps({"kind": "nan", "candidates": [0, 8]})        # the arm beside the candidates and the warm start
    outcome = run(mpirun, 2, tmp_path, "--fault", gone)
    assert "warning: answer = 'validated': the run has none; the final mean is handed over instead" in outcome.stdout
    assert json.loads((tmp_path / "runs/run/summary.json").read_text())["answer"] == "final"
    assert tensors(tmp_path / "runs/run/adapter") == adapter_of(tmp_path, kept(tmp_path)["final"],
                                                                tmp_path / "expected")


def test_validated_without_validation_rows_is_refused_before_anything_is_evolved(mpirun, tmp_path):
    write_run(tmp_path, **KEYS)
    outcome = run(mpirun, 1, tmp_path, *sets(answer="validated", validation_data=""), rc=2)
    assert "answer = 'validated': there are no validation rows; set validation_data or " in outcome.stderr
    assert not (tmp_path / "runs").exists()
