"""Mazes with one correct path, a small recurrent policy that writes the path down, and GRPO with a focal weight on it.

A small version of the single-solution maze of F-GRPO (arXiv 2602.06717), which is 17 x 17 squares and a 3M-parameter
decoder. A maze here is a random spanning tree on n x n cells, drawn as (2n + 1) x (2n + 1) squares, so that walls are
squares too; the way leads from the top left cell to the bottom right one. The policy, a GRU of some 0.1M parameters,
is shown the squares once and then writes moves from cell to cell and an end token. It is not told where it stands. The
reward is 1 for the one path without a step back, written to its end, and 0 for everything else.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from essa_mpi.estimates import pass_at_k

MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))      # up, right, down, left, as (rows, columns)
END, START = len(MOVES), len(MOVES) + 1         # START is only read, never written


@dataclass(frozen=True)
class Settings:
    """Of the warm start, the training and the evaluation; chosen with seeds that are not reported."""

    cells: int = 4              # a side: 9 x 9 squares
    mazes: int = 20_000         # to train on
    heldout: int = 256          # to evaluate on, none of them trained on
    hidden: int = 128
    warm_steps: int = 300       # of supervised learning
    warm_batch: int = 128
    warm_rate: float = 2e-3
    steps: int = 150            # of GRPO
    prompts: int = 32           # mazes a step
    rate: float = 3e-4
    clip: float = 1.0           # the largest norm of a gradient
    samples: int = 128          # a held-out maze, for pass@k

    @property
    def length(self) -> int:
        """The longest answer: through all cells, and the end token."""
        return self.cells**2


def make_maze(cells: int, rng: np.random.Generator) -> tuple[np.ndarray, list[int]]:
    """(squares, path) of a maze drawn uniformly from the spanning trees, by Wilson's algorithm (STOC 1996).

    squares: (2 cells + 1, 2 cells + 1) bool, True where one can go; cell (i, j) is square (2i + 1, 2j + 1). path: the
    moves (0 to 3, as in MOVES) from the top left cell to the bottom right one. A tree has no other.
    """
    out = {(cells - 1, cells - 1): None}        # cell in the tree -> its move towards the goal, the root
    for cell in np.ndindex(cells, cells):
        last, at = {}, cell
        while at not in out:                    # a random walk to the tree; its last exits are the walk without loops
            move = int(rng.integers(4))
            to = at[0] + MOVES[move][0], at[1] + MOVES[move][1]
            if 0 <= to[0] < cells and 0 <= to[1] < cells:
                last[at], at = move, to
        while cell not in out:
            out[cell] = last[cell]
            cell = cell[0] + MOVES[out[cell]][0], cell[1] + MOVES[out[cell]][1]
    squares = np.zeros((2 * cells + 1, 2 * cells + 1), bool)
    for (row, column), move in out.items():
        squares[2 * row + 1, 2 * column + 1] = True
        if move is not None:
            squares[2 * row + 1 + MOVES[move][0], 2 * column + 1 + MOVES[move][1]] = True
    path, at = [], (0, 0)
    while out[at] is not None:
        path.append(out[at])
        at = at[0] + MOVES[path[-1]][0], at[1] + MOVES[path[-1]][1]
    return squares, path


def make_mazes(number: int, cells: int, rng) -> tuple[torch.Tensor, torch.Tensor]:
    """Different mazes: squares (number, (2 cells + 1)^2) float32 of 0 and 1, answers (number, cells^2) int64.

    An answer is the path, then END up to the full length. ValueError if so many different ones are not to be found.
    """
    found = {}
    for _ in range(20 * number):
        squares, path = make_maze(cells, rng)
        found[squares.tobytes()] = squares, path + [END] * (cells**2 - len(path))
        if len(found) == number:
            squares, answers = zip(*found.values())
            return torch.tensor(np.array(squares).reshape(number, -1), dtype=torch.float32), torch.tensor(answers)
    raise ValueError(f"{number} different mazes of {cells} x {cells} cells: found {len(found)} in {20 * number} draws")


def rewards(answers, written):
    """1.0 where the tokens written (..., length) are the answer up to and with its first END, else 0.0.

    What follows an END does not count: the policy stops there, and both sides are filled with END.
    """
    return (written == answers).all(-1).float()


def mask(written):
    """1.0 for the tokens (..., length) that the policy chose, the first END among them, and 0.0 for the filling."""
    ended = (written == END).cumsum(-1)
    return ((ended == 0) | ((ended == 1) & (written == END))).float()


class Policy(nn.Module):
    """log pi(token | squares, tokens before it)."""

    def __init__(self, squares: int, hidden: int):
        super().__init__()
        self.see = nn.Sequential(nn.Linear(squares, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.embed = nn.Embedding(START + 1, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, END + 1)

    def forward(self, squares, written):
        """log-probabilities (B, length, 5) of squares (B, S) and the tokens written (B, length)."""
        before = torch.cat([torch.full_like(written[:, :1], START), written[:, :-1]], dim=1)
        seen = self.see(squares)
        states, _ = self.gru(self.embed(before) + seen[:, None], seen[None])
        return self.out(states).log_softmax(-1)

    @torch.no_grad()
    def sample(self, squares, length: int, generator):
        """Tokens (B, length) int64, one answer a row of squares (B, S), temperature 1; END after the first END."""
        seen = self.see(squares)
        state, token = seen[None], torch.full((len(squares),), START)
        written = torch.full((len(squares), length), END)
        for t in range(length):
            states, state = self.gru((self.embed(token) + seen)[:, None], state)
            # The largest of logits and Gumbel noise is a draw from their softmax.
            noise = -torch.empty(len(squares), END + 1).exponential_(generator=generator).log()
            token = torch.where(token == END, END, (self.out(states[:, 0]) + noise).argmax(-1))
            written[:, t] = token
            if (token == END).all():
                break
        return written


def advantages(reward, gamma: float, eps: float = 1e-6):
    """F-GRPO's advantages (B, N) of rewards 0 and 1 (B, N), a group a row: g (r - mean) / (std + eps).

    g = (1 - mu)^gamma with mu the share of right answers in the group; gamma 0 is GRPO. std: n - 1, as in TRL and verl.
    """
    mu = reward.mean(-1, keepdim=True)
    return (1 - mu) ** gamma * (reward - mu) / (reward.std(-1, keepdim=True) + eps)


def grpo_loss(log_probability, advantage, chosen):
    """- mean over all chosen tokens of A log pi: log_probability, chosen (B, N, length), advantage (B, N).

    The data are the policy's own and each is used once, so the ratio to the sampling policy is 1, nothing is clipped,
    and the gradient is that of GRPO's surrogate. No KL term.
    """
    return -(advantage[..., None] * log_probability * chosen).sum() / chosen.sum()


def warm_start(settings: Settings, squares, answers, seed: int) -> Policy:
    """A policy trained on right answers, but not to the end."""
    torch.manual_seed(seed)
    draw = np.random.default_rng([seed, 1])
    policy = Policy(squares.shape[1], settings.hidden)
    adam = torch.optim.AdamW(policy.parameters(), settings.warm_rate, weight_decay=0.01)
    for _ in range(settings.warm_steps):
        batch = draw.choice(len(squares), settings.warm_batch, replace=False)
        answer = answers[batch]
        loss = (cross_entropy(policy(squares[batch], answer).transpose(1, 2), answer, reduction="none")
                * mask(answer)).sum() / mask(answer).sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return policy


def train(settings: Settings, policy: Policy, squares, answers, size: int, gamma: float, seed: int,
          rate_factor: float = 1.0) -> list[float]:
    """F-GRPO in place, `size` answers a maze; the mean reward of every step. Same seed, same mazes for every gamma."""
    draw, generator = np.random.default_rng([seed, 2]), torch.Generator().manual_seed(seed)
    adam = torch.optim.AdamW(policy.parameters(), settings.rate * rate_factor, weight_decay=0.01)
    history = []
    for _ in range(settings.steps):
        batch = draw.choice(len(squares), settings.prompts, replace=False).repeat(size)
        written = policy.sample(squares[batch], settings.length, generator)
        reward = rewards(answers[batch], written).view(-1, size)
        advantage = advantages(reward, gamma)
        history.append(float(reward.mean()))
        if advantage.any():                     # all groups all right or all wrong: nothing to learn
            log_probability = policy(squares[batch], written).gather(-1, written[..., None])[..., 0]
            loss = grpo_loss(log_probability.view(-1, size, settings.length), advantage,
                             mask(written).view(-1, size, settings.length))
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), settings.clip)
            adam.step()
    return history


def evaluate(settings: Settings, policy: Policy, squares, answers, ks, seed: int) -> dict:
    """{k: pass@k over the held-out mazes}, without bias from `samples` answers a maze."""
    generator = torch.Generator().manual_seed(seed)
    right = np.zeros(len(squares))
    for start in range(0, settings.samples, 16):      # 16 answers a maze at once: the memory is small
        n = min(16, settings.samples - start)
        written = policy.sample(squares.repeat_interleave(n, 0), settings.length, generator)
        right += rewards(answers.repeat_interleave(n, 0), written).view(-1, n).sum(-1).numpy()
    return {k: float(pass_at_k(settings.samples, right, k).mean()) for k in ks}
