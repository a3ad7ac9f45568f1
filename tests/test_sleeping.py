"""Measured scaling: real ranks, everything of a generation but the engine, a scorer that sleeps."""

import csv
import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import sleeping
from essa_mpi.latency import Engine, decode_seconds
from essa_mpi.scoring import Arm
from essa_mpi.shares import all_shares


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(the JSON, the rows of the CSV) of a run on three ranks."""
    path = tmp_path_factory.mktemp("sleeping") / "found.json"
    subprocess.run(["mpirun", "-n", "3", sys.executable, "-m", "benchmarks.sleeping", "--json", path, "--seconds", "1",
                    "--repeats", "2"], check=True, timeout=120, capture_output=True)
    with open(path.with_suffix(".csv")) as file:
        return json.loads(path.read_text()), list(csv.DictReader(file))


def test_every_number_of_ranks_is_measured_and_the_warm_up_dropped(found):
    lines, rows = found[0]["rows"], found[1]
    assert [(line["scaling"], line["ranks"]) for line in lines] == [(s, n) for s in ("strong", "weak") for n in (1, 2, 3)]
    assert [row["generation"] for row in rows] == ["1", "2"] * 6
    assert {row["population"] for row in rows if row["scaling"] == "strong"} == {str(sleeping.POPULATION)}
    assert [row["population"] for row in rows if row["scaling"] == "weak"] == ["2", "2", "4", "4", "6", "6"]


def test_pop_metrics_are_of_the_times_in_the_csv(found):
    """Parallel efficiency = load balance x communication efficiency; by its definition, mean work over elapsed time."""
    for line in found[0]["rows"]:
        mine = [row for row in found[1] if (row["scaling"], row["ranks"]) == (line["scaling"], str(line["ranks"]))]
        mean, most, total = (np.mean([float(row[name]) for row in mine]) for name in ("t_compute_mean", "t_compute_max", "t_total"))
        assert line["load_balance"] == pytest.approx(mean / most) and mean <= most * (1 + 1e-9)
        assert line["parallel_efficiency"] == pytest.approx(line["load_balance"] * line["communication_efficiency"])
        assert line["parallel_efficiency"] == pytest.approx(mean / total)


def test_a_generation_takes_no_less_than_its_sleep(found):
    """One rank sleeps a second (the answers are drawn anew each generation), and two about half as long each."""
    one, two = (line["seconds"] for line in found[0]["rows"][:2])
    assert one > 0.7 and two > 0.35


def test_the_same_answers_on_any_number_of_ranks():
    lengths, engine = np.array([3, 50, 7, 90, 11]), Engine(1e-6, 1e-7, 64)
    arms = [Arm("a", None, [], np.arange(10)), Arm("b", None, [], np.arange(5, 15))]
    tokens = []
    for ranks in (1, 2, 3, 7):
        total = 0
        for rank, tiles in enumerate(all_shares([10, 10], ranks)):
            total += sleeping.Sleeper(rank, lengths, engine).score(arms, tiles, 4)[1].counters["tokens"]
        tokens.append(total)
    assert len(set(tokens)) == 1 and tokens[0] > 0


def test_the_recorded_answers_take_the_seconds_asked_for():
    lengths, engine, about = sleeping.recorded(8, 16, 2.5)
    drawn = lengths[np.random.default_rng(0).integers(len(lengths), size=128)]
    assert decode_seconds(drawn, engine)[0] == pytest.approx(2.5)
    assert engine.read / engine.token == pytest.approx(about["step"] / about["token"])
