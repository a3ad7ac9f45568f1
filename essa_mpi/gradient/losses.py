"""Advantages and losses, each a function of tensors alone.

N rollouts of a prompt are a group. Of a group, A_i = (r_i - mean) / (std + 1e-4) (arXiv 2402.03300, with the
sample's standard deviation, as TRL has it), times the focal weight (1 - mu_hat)^gamma (2602.06717), where
mu_hat is the share of its rollouts that are right.
"""

from dataclasses import dataclass

import torch

from ..config import UserError

EPSILON = 1e-4      # TRL's


@dataclass(frozen=True)
class Objective:
    """What a batch of tokens is worth. Values of clip_low and clip_high are distances from a ratio of 1."""

    loss: str               # "grpo", "dapo", "cispo", "dr_grpo"
    clip_low: float
    clip_high: float
    kl: float               # weight of the divergence from the warm start
    most_tokens: int        # longest completion there can be: dr_grpo's normalisation


# The papers' own: GRPO .2 / .2, DAPO .2 / .28; CISPO's ratio is capped at 1 + 5 and has its floor at 1 - 1 = 0
# (F-GRPO, appendix; TRL's epsilon_high is the cap itself, 6).
CLIPS = {"grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "cispo": (1.0, 5.0), "dr_grpo": (0.2, 0.2)}


def advantages(rewards: torch.Tensor, scale: bool) -> torch.Tensor:
    """A (groups, N) float64 of rewards (groups, N), nan where there is none: those leave the group and get 0.

    scale: divide by the group's standard deviation (ddof 1) + 1e-4; Dr. GRPO does not.
    """
    rewards = rewards.double()
    known = rewards.isfinite()
    count = known.sum(1, keepdim=True)
    filled = rewards.where(known, 0.0)
    mean = filled.sum(1, keepdim=True) / count.clamp(min=1)
    centred = (filled - mean).where(known & ~flat(rewards)[:, None], 0.0)     # a mean's rounding teaches nothing
    if not scale:
        return centred
    std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return centred / (std + EPSILON)


def flat(rewards: torch.Tensor) -> torch.Tensor:
    """Which groups (groups,) teach nothing: all their rewards are the same, or fewer than two are there."""
    known = rewards.isfinite()
    high = rewards.where(known, -torch.inf).amax(1)
    low = rewards.where(known, torch.inf).amin(1)
    return ~(high > low)


def focal_weight(rewards: torch.Tensor, gamma: float, threshold: float | None) -> torch.Tensor:
    """(1 - mu_hat)^gamma of each group, (groups,) float64; mu_hat: the share of its rewards that are >= threshold.

    threshold None: rewards are binary, 0 or 1 (or -1 or 1), and 1 is right; others raise UserError. Missing ones
    leave N; a group without any has weight 1.
    """
    rewards = rewards.double()
    known = rewards.isfinite()
    if threshold is None:
        other = rewards[known & (rewards.abs() != 1) & (rewards != 0)]
        if len(other):
            raise UserError(f"config: focal_gamma = {gamma:g}: needs focal_threshold, the reward from which a completion "
                            f"counts as right: a reward was {other[0].item():g}, neither 0 nor 1")
        threshold = 1.0
    right = (rewards.where(known, -torch.inf) >= threshold).sum(1)
    share = right.double() / known.sum(1).clamp(min=1)
    return (1 - share) ** gamma


def token_losses(objective: Objective, logp: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor,
                 reference: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses, whether its ratio was clipped), (sequences, tokens) each.

    logp, old, reference: log-probabilities (sequences, tokens) of the tokens under the policy, under the policy
    that drew them, and under the warm start; advantage (sequences,). Only logp has a gradient.
    """
    ratio = (logp - old).exp()
    A = advantage[:, None]
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    if objective.loss == "cispo":      # the clipped ratio is a weight, without a gradient of its own
        loss = -ratio.clamp(low, high).detach() * A * logp
        clipped = (ratio < low) | (ratio > high)
    else:
        loss = -torch.minimum(ratio * A, ratio.clamp(low, high) * A)
        clipped = ((ratio < low) & (A < 0)) | ((ratio > high) & (A > 0))
    if reference is not None:
        loss = loss + objective.kl * k3(logp, reference)
    return loss, clipped


def k3(logp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The divergence KL(policy || reference) a token, estimated at tokens the policy drew: r - 1 - ln r, r = p_ref / p."""
    log_ratio = reference - logp
    return log_ratio.exp() - 1 - log_ratio


def total_loss(objective: Objective, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum over these sequences of what the batch's loss is a mean of: divide by `normaliser` of the whole batch.

    grpo: each sequence's mean over its tokens; the others: all tokens. mask: (sequences, tokens), 1 for a token that counts.
    """
    sums = (losses * mask).sum(1)
    if objective.loss == "grpo":
        sums = sums / mask.sum(1).clamp(min=1)
    return sums.sum()


def normaliser(objective: Objective, sequences: int, tokens: int) -> float:
    """What `total_loss`, summed over the batch's parts, is divided by. sequences, tokens: of the batch that count."""
    if objective.loss == "grpo":
        return max(1, sequences)
    if objective.loss == "dr_grpo":
        return max(1, sequences * objective.most_tokens)
    return max(1, tokens)      # dapo, cispo
