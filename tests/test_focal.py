"""F-GRPO's formulas, simulation and maze: each against something worked out another way."""

import itertools
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from conftest import ROOT


@pytest.fixture(autouse=True, scope="module")
def importable():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield


@pytest.fixture(scope="module")
def focal(importable):
    from benchmarks import focal
    return focal


@pytest.fixture(scope="module")
def categorical(importable):
    from benchmarks import categorical
    return categorical


@pytest.fixture(scope="module")
def maze(importable):
    from benchmarks import maze
    return maze


# -- the formulas ----------------------------------------------------------------------------------

@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("tau, mu", [(0.05, 0.3), (0.2, 0.9), (0.5, 0.5), (0.01, 1.0)])
def test_tail_miss_is_the_sum_over_all_groups(focal, tau, mu, size):
    mass = {"tail": tau, "right": mu - tau, "wrong": 1 - mu}
    missed = mixed = 0.0
    for group in itertools.product(mass, repeat=size):
        if 0 < group.count("wrong") < size:
            p = math.prod(mass[one] for one in group)
            mixed += p
            missed += p * ("tail" not in group)
    assert focal.tail_miss(tau, mu, size) == pytest.approx(missed, abs=1e-12)
    assert focal.active(mu, size) == pytest.approx(mixed, abs=1e-12)


def test_sampled_groups_agree_and_would_refute_a_wrong_formula(focal, monkeypatch):
    def largest():
        rows = focal.check_tail_miss(5000, np.random.default_rng(1))
        return max(abs(row["z"]) for row in rows if row["z"] is not None)
    assert largest() < focal.REFUTED
    right = focal.tail_miss
    # Groups without any right answer counted as misses.
    monkeypatch.setattr(focal, "tail_miss", lambda tau, mu, size: right(tau, mu, size) + (1 - mu) ** size)
    assert largest() > focal.REFUTED


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.5, 1.0, 2.0])
def test_multiplier_is_the_ratio_of_mean_update_sizes(focal, gamma):
    from scipy.integrate import quad
    sizes = [quad(lambda mu: (1 - mu) ** g * math.sqrt(mu * (1 - mu)), 0, 1)[0] for g in (gamma, 0.0)]
    assert focal.multiplier(gamma) == pytest.approx(sizes[0] / sizes[1], rel=1e-6)
    assert focal.multiplier_by_quadrature(gamma) == pytest.approx(sizes[0] / sizes[1], rel=1e-6)
    assert focal.multiplier_of_groups(gamma, 20_000) == pytest.approx(sizes[0] / sizes[1], rel=1e-4)


def test_multiplier_of_the_paper(focal):
    assert focal.multiplier(0.5) == pytest.approx(0.679, abs=5e-4)


# -- the simulation ----------------------------------------------------------------------------------

def test_hand_computed_surrogate_gradient(categorical):
    # Right: 0 and 1. Sampled: 0 twice and 2; mu = 2/3, so g = 1/3, A = +sqrt(1/2) and -sqrt(2).
    p, good, bad = np.array([0.1, 0.2, 0.3, 0.4]), 0.5**0.5 / 9, -(2**0.5) / 9
    S = 0.1 * good + 0.3 * bad
    expected = [0.1 * (good - S), -0.2 * S, 0.3 * (bad - S), -0.4 * S]
    np.testing.assert_allclose(categorical.gradient(p, np.array([0, 0, 2]), 2, 1.0), expected, rtol=1e-12)
    base = categorical.gradient(p, np.array([0, 0, 2]), 2, 0.0)
    np.testing.assert_allclose(base, 3 * np.array(expected), rtol=1e-12)
    score = categorical.gradient(p, np.array([0, 0, 2]), 2, 1.0, score_function=True)
    np.testing.assert_allclose(score, [2 * good, 0, bad, 0], rtol=1e-12)


def test_surrogate_gradient_is_that_of_its_objective(categorical):
    logits, sampled, gamma = np.random.default_rng(0).normal(size=6), np.array([0, 1, 1, 4, 5]), 0.5
    mu = 3 / 5
    advantage = {0: (0.4 / 0.6) ** 0.5, 1: (0.4 / 0.6) ** 0.5, 4: -(1.5**0.5), 5: -(1.5**0.5)}

    def objective(z):
        return sum((1 - mu) ** gamma * A * categorical.softmax(z)[a] for a, A in advantage.items()) / 5
    numeric = [(objective(logits + step) - objective(logits - step)) / 2e-6 for step in 1e-6 * np.eye(6)]
    found = categorical.gradient(categorical.softmax(logits), sampled, 3, gamma)
    np.testing.assert_allclose(found, numeric, atol=1e-9)


@pytest.mark.parametrize("sampled", [[0, 0, 1], [2, 3, 3]])
def test_groups_of_equal_rewards_update_nothing(categorical, sampled):
    for score_function in (False, True):
        assert not categorical.gradient(np.full(4, 0.25), np.array(sampled), 2, 0.0, score_function).any()


def test_one_step_of_simulation_by_hand(categorical):
    logits, rng = categorical.initial_logits(50, 10), np.random.default_rng([7, 32])
    before = categorical.softmax(logits)
    slope = categorical.gradient(before, categorical.sample(before, 32, rng), 10, 0.0)
    assert slope.all()
    # Adam's first step is rate * sign of the gradient, up to epsilon.
    after = categorical.softmax(logits + categorical.RATE * np.sign(slope))
    found = categorical.simulate(32, 0.0, 7, steps=1, actions=50, correct=10)
    lost = np.maximum(0, before - after)[:10].sum()
    assert found["retained"] == pytest.approx(1 - lost / before[:10].sum(), abs=1e-9)
    assert found["correct"] == pytest.approx(after[:10].sum(), abs=1e-9)
    plain = categorical.softmax(logits + categorical.RATE * slope)
    found = categorical.simulate(32, 0.0, 7, "surrogate, ascent", steps=1, actions=50, correct=10)
    assert found["correct"] == pytest.approx(plain[:10].sum(), abs=1e-12)


def test_adam_is_that_of_torch(categorical):
    rng, parameter = np.random.default_rng([3, 16]), torch.tensor(categorical.initial_logits(50, 10))
    adam = torch.optim.Adam([parameter], categorical.RATE, categorical.BETAS, categorical.EPSILON, maximize=True)
    for _ in range(20):
        p = categorical.softmax(parameter.numpy())
        parameter.grad = torch.from_numpy(categorical.gradient(p, categorical.sample(p, 16, rng), 10, 1.0))
        adam.step()
    found = categorical.simulate(16, 1.0, 3, steps=20, actions=50, correct=10)
    assert found["correct"] == pytest.approx(categorical.softmax(parameter.numpy())[:10].sum(), abs=1e-12)


def test_initial_mass_and_samples(categorical):
    p = categorical.softmax(categorical.initial_logits())
    assert p[:10_000].sum() == pytest.approx(0.630, abs=5e-4)
    few = np.array([0.5, 0.25, 0.0, 0.25])
    drawn = categorical.sample(few, 40_000, np.random.default_rng(0))
    assert (np.diff(drawn) >= 0).all()
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 40_000, few, atol=0.012)     # 5 standard errors


def test_retained_mass(categorical):
    assert categorical.retained(np.array([0.2, 0.3]), np.array([0.1, 0.9])) == pytest.approx(0.8)


def test_valley_is_where_gamma_0_retains_least(focal):
    def row(size, gamma, *values):
        return {"variant": focal.categorical.VARIANTS[0], "size": size, "gamma": gamma,
                "retained": focal.summary(values)}
    rows = [row(2, 0.0, 0.5, 0.7), row(2, 1.0, 0.5, 0.7), row(4, 0.0, 0.1, 0.2), row(4, 1.0, 0.3, 0.4),
            row(8, 0.0, 0.9, 1)]
    size, over = focal.valley(rows)
    assert size == 4 and over.keys() == {4}
    assert over[4]["values"] == pytest.approx([3, 2]) and over[4]["standard_error"] == pytest.approx(0.5)
    rows += [row(16, 0.0, 0.15, 0.16), row(16, 1.0, 0.15, 0.32)]      # 0.155: within a tenth of the least, 0.15
    size, over = focal.valley(rows)
    assert size == 4 and over.keys() == {4, 16} and over[16]["values"] == pytest.approx([1, 2])


# -- the maze ----------------------------------------------------------------------------------------

def ways(squares):
    """Every way over free squares, without a step back, from the top left cell to the bottom right one."""
    goal = len(squares) - 2

    def onward(way):
        if way[-1] == (goal, goal):
            yield way
            return
        row, column = way[-1]
        for square in ((row - 1, column), (row, column + 1), (row + 1, column), (row, column - 1)):
            if squares[square] and square not in way:
                yield from onward(way + [square])
    return list(onward([(1, 1)]))


@pytest.mark.parametrize("cells", [2, 3, 4, 6])
def test_mazes_have_exactly_one_path(maze, cells):
    rng = np.random.default_rng(cells)
    for _ in range(30):
        squares, path = maze.make_maze(cells, rng)
        border = squares.copy()
        border[1:-1, 1:-1] = False
        assert not border.any() and squares[1::2, 1::2].all()
        assert squares.sum() == 2 * cells**2 - 1        # all cells and the n - 1 openings of a spanning tree
        found = ways(squares)
        assert len(found) == 1
        walked = [(1, 1)]
        for move in path:
            for _ in range(2):
                walked.append(tuple(np.add(walked[-1], maze.MOVES[move])))
        assert walked == found[0]


def test_all_mazes_are_equally_likely(maze):
    rng, count = np.random.default_rng(0), {}
    for _ in range(4000):
        key = maze.make_maze(2, rng)[0].tobytes()
        count[key] = count.get(key, 0) + 1
    assert len(count) == 4 and max(abs(n - 1000) for n in count.values()) < 5 * (4000 * 0.25 * 0.75) ** 0.5


def test_too_many_mazes_are_refused(maze):
    with pytest.raises(ValueError, match="5 different mazes of 2 x 2 cells: found 4"):
        maze.make_mazes(5, 2, np.random.default_rng(0))


def test_reward_accepts_only_the_path(maze):
    squares, answers = maze.make_mazes(4, 2, np.random.default_rng(0))
    tokens = torch.tensor(list(itertools.product(range(5), repeat=4)))
    # What the policy can write: nothing but END after an END.
    ended = (tokens == maze.END).cumsum(-1) > 0
    tokens = tokens[(~ended | (tokens == maze.END)).all(-1)]
    for shown, answer in zip(squares, answers):
        accepted = tokens[maze.rewards(answer, tokens) == 1].tolist()
        assert len(accepted) == 1
        walked = [(1, 1)]
        for move in accepted[0]:
            if move != maze.END:
                for _ in range(2):
                    walked.append(tuple(np.add(walked[-1], maze.MOVES[move])))
        assert [walked] == ways(shown.view(5, 5).numpy() > 0)


def test_mask_counts_the_first_end(maze):
    written = torch.tensor([[0, 1, 4, 4], [4, 4, 4, 4], [0, 1, 2, 3]])
    assert maze.mask(written).tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_advantages_by_hand(maze):
    reward = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    plain, focal = maze.advantages(reward, 0.0), maze.advantages(reward, 1.0)
    assert plain[0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert plain[1].tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5], abs=1e-5)
    assert not plain[2:].any() and not focal[2:].any()
    assert torch.allclose(focal[:2], plain[:2] * torch.tensor([[0.75], [0.25]]))


def test_loss_is_the_mean_over_chosen_tokens(maze):
    log_probability = torch.tensor([[[-1.0, -2.0], [-3.0, -4.0]]], requires_grad=True)
    loss = maze.grpo_loss(log_probability, torch.tensor([[2.0, -1.0]]), torch.tensor([[[1.0, 1.0], [1.0, 0.0]]]))
    assert loss.item() == pytest.approx(-(2 * -3 + 3) / 3)
    loss.backward()
    assert log_probability.grad.flatten().tolist() == pytest.approx([-2 / 3, -2 / 3, 1 / 3, 0])


def test_gradient_through_the_policy_is_that_of_the_ratio(maze):
    """GRPO's surrogate with its ratio, at the sampling policy, by finite differences in every parameter of a layer."""
    torch.manual_seed(0)
    policy = maze.Policy(25, 4).double()
    squares, answers = maze.make_mazes(2, 2, np.random.default_rng(0))
    squares, answers = squares.double().repeat_interleave(3, 0), answers.repeat_interleave(3, 0)
    written = policy.sample(squares, 4, torch.Generator().manual_seed(0))
    chosen = maze.mask(written).view(2, 3, 4).double()
    advantage = maze.advantages(torch.tensor([[1.0, 0, 0], [1, 1, 0]]), 0.5).double()

    def picked():
        return policy(squares, written).gather(-1, written[..., None])[..., 0].view(2, 3, 4)
    maze.grpo_loss(picked(), advantage, chosen).backward()
    with torch.no_grad():
        old = picked().clone()

        def surrogate():
            return -((picked() - old).exp() * advantage[..., None] * chosen).sum() / chosen.sum()
        for parameter in (policy.out.weight, policy.gru.bias_hh_l0, policy.see[0].bias):
            flat = parameter.view(-1)
            for i in range(0, len(flat), 3):
                kept, sides = flat[i].item(), []
                for step in (1e-6, -1e-6):
                    flat[i] = kept + step
                    sides.append(surrogate().item())
                flat[i] = kept
                assert parameter.grad.view(-1)[i].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-8)


def test_samples_follow_the_policy(maze):
    torch.manual_seed(1)
    policy, squares = maze.Policy(25, 8), maze.make_mazes(1, 2, np.random.default_rng(0))[0]
    written = policy.sample(squares.repeat(20_000, 1), 3, torch.Generator().manual_seed(0))
    ended = (written == maze.END).cumsum(-1)
    assert (written[ended > 0] == maze.END).all()
    every = torch.tensor(list(itertools.product(range(5), repeat=2)))
    every = every[(every[:, 0] != maze.END) | (every[:, 1] == maze.END)]
    with torch.no_grad():
        picked = policy(squares.repeat(len(every), 1), every).gather(-1, every[..., None])[..., 0]
    chance = (picked * maze.mask(every)).sum(-1).exp()
    assert chance.sum().item() == pytest.approx(1, abs=1e-5)
    for tokens, p in zip(every, chance.tolist()):
        seen = (written[:, :2] == tokens).all(-1).float().mean().item()
        assert abs(seen - p) < 5 * (p * (1 - p) / 20_000) ** 0.5


def test_training_learns_one_maze(maze):
    """GRPO alone, from an untrained policy, on the four smallest mazes."""
    squares, answers = maze.make_mazes(4, 2, np.random.default_rng(0))
    settings = maze.Settings(cells=2, hidden=32, warm_steps=0, steps=80, prompts=4, rate=1e-2, samples=16)
    for gamma in (0.0, 0.5):
        policy = maze.warm_start(settings, squares, answers, 0)
        before = maze.evaluate(settings, policy, squares, answers, (1,), 0)[1]
        maze.train(settings, policy, squares, answers, 32, gamma, 0)
        assert before < 0.2 and maze.evaluate(settings, policy, squares, answers, (1,), 0)[1] > 0.7


# -- the command -------------------------------------------------------------------------------------

def run(*arguments):
    return subprocess.run([sys.executable, "-m", "benchmarks.focal", *arguments], cwd=ROOT, capture_output=True,
                          text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_command_writes_json_and_picture(focal, tmp_path):
    pytest.importorskip("matplotlib")
    done = run("--quick", "--seeds", "2", "--maze-seeds", "2", "--json", str(tmp_path / "focal.json"))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "focal.json").read_text())
    assert (tmp_path / "focal.png").read_bytes().startswith(b"\x89PNG")
    assert report["quick"] and report["ratios"]["valley_gamma1_over_gamma0"] > 0
    assert report["ratios"]["multiplier_gamma_0.5"] == pytest.approx(0.679, abs=5e-4)
    assert {row["part"] for row in report["rows"]} == {"tail miss", "multiplier", "categorical", "maze"}
    for row in report["rows"]:
        if "minus_gamma_0" in row:
            base = focal.of(report["rows"], part="maze", size=row["size"], gamma=0, rate_factor=1)
            expected = [a - b for a, b in zip(row["pass@1"]["values"], base["pass@1"]["values"])]
            assert row["minus_gamma_0"]["pass@1"]["values"] == pytest.approx(expected)


def test_no_seeds_are_refused():
    done = run("--maze-seeds", "0")
    assert done.returncode == 2 and "--maze-seeds = 0; allowed: an integer >= 1" in done.stderr
