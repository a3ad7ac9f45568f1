"""The card and the files of an export: what is said belongs to what is exported, and others can load it."""

import json
import os
import re
import shutil
import stat
from dataclasses import replace

import pytest
import yaml

from adapters import make_adapter, make_model, shapes_of
from conftest import ROOT
from deterministic_run import write_run
from essa_mpi import config as configuration
from essa_mpi.report import NAMES, closing, summarise
from essa_mpi.results import export
from essa_mpi.runfile import RunFolder, load_checkpoint
from test_run_mpi import PATIENCE, fault, run, sets, start

SFT = {"steps": 13, "tokens": 19_800, "completion_tokens": 1664, "seconds": 41.3, "loss": 0.4,
       "config": {"sft_lr": 1e-3, "sft_batch": 16}}
SPENT = {"steps": 13, "tokens": 19_800, "completion_tokens": 1664, "seconds": 41.3}
SPENT_LINE = "\nwarm start: 13 steps, 20 k tokens, 41 s of supervised training, not in the times above\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of five generations with held-out scores, and what it said."""
    from conftest import Mpirun
    folder = tmp_path_factory.mktemp("finished")
    write_run(folder, generations=5, heldout_rows=4, system_prompt="Be `brief`.", chat=False)
    (folder / "adapter/sft.json").write_text(json.dumps(SFT))
    runs = Mpirun()
    try:
        outcome = run(runs, 2, folder)
    finally:
        runs.close()
    return folder, outcome.stdout


@pytest.fixture
def copied(finished, tmp_path, monkeypatch):
    """The current directory, with that run in it."""
    shutil.copy(finished[0] / "config.toml", tmp_path / "config.toml")
    shutil.copytree(finished[0] / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def exported(out="out", adapter=None, merged=False, **keys):
    """The card of an export of runs/run."""
    config = replace(configuration.load("runs/run/config.toml"), **keys)
    export(config, "runs/run", adapter, out, merged)
    return (RunFolder(out).path / "README.md").read_text()


def front(card):
    return yaml.safe_load(card.split("---\n")[1])


def section(card, title):
    return card.split(f"\n## {title}\n\n")[1].split("\n\n## ")[0].strip()


def summary():
    return json.loads(RunFolder("runs/run").summary.read_text())


def shown(value):
    return f"{value:.3f}"


# -- what a run says of its warm start -------------------------------------------------------------------

def test_the_warm_start_is_counted(mpirun, finished, copied):
    assert summary()["warm_start"] == SPENT and SPENT_LINE in finished[1]
    config = configuration.load("runs/run/config.toml")
    (copied / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):   # another program's: no sft.json
        shutil.copy(f"{config.adapter}/{name}", copied / "adapter" / name)
    for said in (None, "{", "[]", '{"steps": 1}', json.dumps({**SFT, "seconds": None})):
        if said is not None:
            (copied / "adapter/sft.json").write_text(said)
        from essa_mpi.provenance import warm_start
        assert warm_start(copied / "adapter") is None
    other = (copied / "config.toml").read_text().replace(config.adapter, str(copied / "adapter"))
    (copied / "config.toml").write_text(other.replace('name = "run"', 'name = "other"'))
    outcome = run(mpirun, 1, copied, *sets(generations=1))
    assert json.loads((copied / "runs/other/summary.json").read_text())["warm_start"] is None
    assert "warm start:" not in outcome.stdout


@pytest.mark.parametrize("tokens, said", [(640, "640 tokens"), (19_800, "20 k tokens"), (999_499, "999 k tokens"),
                                          (999_500, "1.0 M tokens"), (1_340_000, "1.3 M tokens")])
def test_tokens_in_words(copied, tokens, said):
    found = {**summary(), "warm_start": {**SPENT, "tokens": tokens}}
    assert f"13 steps, {said}, 41 s" in closing(found, RunFolder("runs/run"))
    del found["warm_start"]         # as in release 0.1
    assert "warm start:" not in closing(found, RunFolder("runs/run"))


def test_a_summary_without_a_warm_start(copied):
    arrays = load_checkpoint(RunFolder("runs/run")).groups["history"]
    assert summarise(configuration.load("config.toml"), 1, 32, arrays, None)["warm_start"] is None
