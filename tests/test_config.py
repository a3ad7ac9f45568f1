"""Keys that are each allowed but do not go together, and what those keys mean where they do."""

import re

import pytest

from conftest import refusal
from essa_mpi import config as configuration
from essa_mpi.config import check_resumable, reward_bounds


def make(**keys):
    return configuration.make({"name": "t", "model": "m", "adapter": "a", "task": "t.jsonl", "population": 10,
                               "batch": 20, **keys})


BOUNDS = dict(reward_low=-1.0, reward_high=2)


@pytest.mark.parametrize("keys, says, mended", [
    (dict(offset_scale={"gate_proj": 2.0}),
     "offset_scale = {gate_proj = 2.0}: its keys must be of q_proj, k_proj, v_proj, "
     "o_proj, A, B and its values numbers above 0", dict(offset_scale={"q_proj": 2.0, "A": 1})),
    (dict(offset_scale={"A": 0}), "offset_scale = {A = 0}: ", dict(offset_scale={"A": 1e-9})),
    (dict(offset_scale={"A": -1.0}), "offset_scale = {A = -1.0}: ", {}),
    (dict(offset_scale={"A": True}), "offset_scale = {A = True}: ", {}),
    (dict(offset_scale={"A": "2"}), "offset_scale = {A = '2'}: ", {}),
    (dict(offset_scale={"A": 1.0, "B": {"q": 1}}), "offset_scale = {B = {'q': 1}}: ", {}),
    (dict(rows="pool", pool_rows=19), "pool_rows = 19: must be 0 or at least batch = 20", dict(pool_rows=20)),
    (dict(rows="growing", batch_max=1), "batch_max = 1: must be 0 or at least batch = 20", dict(batch_max=0)),
    (dict(rows="pool", pool_turnover=21), "pool_turnover = 21: must be at most batch = 20", dict(pool_turnover=20)),
    (dict(reward_low=1.0, reward_high=0.5), "reward_low = 1: must be at most reward_high = 0.5", dict(reward_low=0.5)),
    (dict(racing=1), "racing = 1: a race has at least 2 rounds; set 0 for none", dict(racing=2)),
    (dict(racing=21), "racing = 21: must be at most batch = 20, a row a round", dict(racing=20)),
    (dict(racing=2, reward="m:f"),
     "racing = 2: needs the least and largest reward 'm:f' can give, which decide who cannot win "
     "any more: set reward_low and reward_high", dict(BOUNDS)),
    (dict(racing=2, reward="m:f", reward_low=1.0, reward_high=1.0), "racing = 2: needs the least and largest",
     dict(BOUNDS)),
    (dict(racing=2, active=True),
     "racing = 2: not with active = True, which needs the scores of the candidates a race drops; "
     "turn one of them off", dict(active=False)),
    (dict(racing=2, step_size="tpa"), "racing = 2: not with step_size = 'tpa', which needs", dict(step_size="csa")),
    (dict(racing=2, reevaluate=3), "racing = 2: not with reevaluate = 3, which needs", dict(racing=0)),
    (dict(reevaluate=11), "reevaluate = 11: must be at most population = 10", dict(reevaluate=10)),
    (dict(answer="validated"), "answer = 'validated': nothing is validated; set validation_every and validation rows",
     dict(validation_every=1)),
    (dict(step_size="tpa", population=3),
     "population = 3: step_size = 'tpa' needs at least 4, two of which try the step size",
     dict(population=4)),
    (dict(active=True, search="limited"),
     "active = true: search = 'limited' has no negative weights; set active = false or "
     "another search", dict(search="fast")),
], ids=lambda x: str(x)[:60])
def test_keys_that_do_not_go_together(keys, says, mended):
    assert refusal(lambda: make(**keys)).startswith(f"config: {says}")
    assert make(**{**keys, **mended}) if mended else make(**{k: v for k, v in keys.items() if k != "offset_scale"})


@pytest.mark.parametrize("keys, key", [
    (dict(rows="all"), "rows"), (dict(answer="best"), "answer"), (dict(offsets="log"), "offsets"),
    (dict(search="cmaes"), "search"),
    (dict(step_size="psa"), "step_size"),
    (dict(mean_decay=0.6), "mean_decay"), (dict(batch_growth=0.9), "batch_growth"),
    (dict(racing=65), "racing"), (dict(reevaluate=-1), "reevaluate"), (dict(active=1), "active")])
def test_values_out_of_their_range(keys, key):
    value = keys[key]
    assert re.match(rf"config: {key} = {re.escape(repr(value))}: (must be (one of|at least|above) |needs )",
                    refusal(lambda: make(**keys)))


def test_the_bounds_of_rewards():
    for reward in ("exact", "boxed", "math", "reasoning_gym"):
        assert reward_bounds(make(reward=reward)) == (0.0, 1.0)
        assert reward_bounds(make(reward=reward, **BOUNDS)) == (-1.0, 2.0)      # said is said
    assert reward_bounds(make(reward="m:f")) is None
    assert reward_bounds(make(reward="m:f", **BOUNDS)) == (-1.0, 2.0)


NEW = dict(offsets="exp", offset_scale={"A": 0.5, "v_proj": 2}, search="fast", active=True, step_size="tpa",
           mean_decay=0.01,
           rows="pool", pool_rows=30, pool_turnover=4, batch_growth=1.5, batch_max=40, reward_low=-1.0, reward_high=2.0,
           reevaluate=3)


def test_a_config_is_what_its_own_words_say(tmp_path):
    for config in (make(**NEW, answer="averaged"), make(racing=4), make()):
        (tmp_path / "config.toml").write_text(configuration.dump(config))
        assert configuration.load(tmp_path / "config.toml") == config


@pytest.mark.parametrize("key", [*NEW, "racing"])
def test_a_run_is_not_resumed_as_another_search(key):
    other = dict(racing=2) if key == "racing" else {key: NEW[key]}
    if key == "reward_low":
        other["reward_high"] = 0.0
    assert refusal(check_resumable, make(), make(**other)).startswith(f"--resume: {key} = ")


def test_a_run_is_resumed_for_another_answer():
    check_resumable(make(validation_every=1), make(validation_every=1, answer="validated"))
