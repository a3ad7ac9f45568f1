"""F-GRPO's categorical simulation: one prompt, 128,000 answers of which 10,000 are right, N of them sampled a step.

Source: arXiv 2602.06717. The policy is a softmax over the answers' logits, so what a group of N does to the answers
that it did not contain can be read off exactly. A large group samples all of the right answers, a small one mostly has
equal rewards and no update; those between reward the answers they see and take from the right ones they do not.

The paper leaves the update open to reading. Here: the objective is the surrogate over the DISTINCT sampled answers,

    J(theta) = 1/N sum over sampled a of g A_a pi_theta(a),     A_a = (R_a - mean R) / std R,  g = (1 - mu_hat)^gamma,

of which the logits' gradient is g/N pi_a (1[a sampled] A_a - S), S = sum over sampled b of pi_b A_b: the terms of
Proposition 3.2. It is followed by Adam ("surrogate, adam"), or plainly ("surrogate, ascent"), which barely moves, for
pi_a is about 1e-5. In "score function, adam" the gradient is that of 1/N sum_i g A_i log pi(a_i), repeats counted: as
the advantages sum to zero, it is zero for all that is not sampled, and only the softmax's sum moves those.
"""

import numpy as np

ACTIONS, CORRECT = 128_000, 10_000
ANCHOR_LOGIT, CORRECT_LOGIT = 5.0, 3.0      # of one right answer, of the other right ones; the wrong ones have 0
STEPS, RATE = 1000, 1e-2
BETAS, EPSILON = (0.9, 0.999), 1e-15        # the usual 1e-8 would swamp gradients of pi_a / N
VARIANTS = ("surrogate, adam", "surrogate, ascent", "score function, adam")


def initial_logits(actions: int = ACTIONS, correct: int = CORRECT) -> np.ndarray:
    """(actions,) float64; the first `correct` are right, the very first is the anchor."""
    logits = np.zeros(actions)
    logits[:correct], logits[0] = CORRECT_LOGIT, ANCHOR_LOGIT
    return logits


def softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max())
    return p / p.sum()


def sample(p: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """`size` actions (size,) int64 drawn from p, ascending: the inverse of the distribution function, in order."""
    total, spacings = np.cumsum(p), np.cumsum(rng.standard_exponential(size + 1))
    # Sums of exponentials over the last of them are uniforms in order, without sorting (Devroye 1986, V.3).
    return np.searchsorted(total[:-1], spacings[:-1] * (total[-1] / spacings[-1]), side="right")


def gradient(p: np.ndarray, sampled: np.ndarray, correct: int, gamma: float, score_function=False) -> np.ndarray:
    """dJ / d logits (actions,) float64 at probabilities p. sampled: actions (N,), ascending; right: those < `correct`.

    Rewards are +1 and -1, so mean R = 2 mu - 1 and std R = 2 sqrt(mu (1 - mu)) (over n). Zero if all rewards are equal.
    """
    size, right = len(sampled), int(np.searchsorted(sampled, correct))
    found = np.zeros_like(p)
    if not 0 < right < size:
        return found
    mu = right / size
    weight = (1 - mu) ** gamma / size
    good, bad = weight * ((1 - mu) / mu) ** 0.5, -weight * (mu / (1 - mu)) ** 0.5       # g A / N
    if score_function:
        found[:] = np.bincount(sampled, minlength=len(p))       # less pi_a sum_i A_i, which is zero
        found[:correct] *= good
        found[correct:] *= bad
        return found
    found[sampled[:right]], found[sampled[right:]] = good, bad  # repeats write the same again
    found -= p @ found
    found *= p
    return found


def retained(before: np.ndarray, after: np.ndarray) -> float:
    """M_ret of the right answers' probabilities: 1 - sum max(0, before - after) / sum before."""
    return float(1 - np.maximum(0, before - after).sum() / before.sum())


def simulate(size: int, gamma: float, seed: int, variant: str = VARIANTS[0], steps: int = STEPS,
             actions: int = ACTIONS, correct: int = CORRECT) -> dict:
    """Retained and total correct mass after `steps` updates. The uniforms of the draws are the same for every gamma."""
    rng, logits = np.random.default_rng([seed, size]), initial_logits(actions, correct)
    before = softmax(logits)
    first, second = np.zeros(actions), np.zeros(actions)        # Adam's moments
    scratch, updates = np.empty(actions), 0
    for step in range(1, steps + 1):
        p = softmax(logits)
        slope = gradient(p, sample(p, size, rng), correct, gamma, variant.startswith("score"))
        updates += bool(slope.any())
        if variant.endswith("ascent"):
            logits += RATE * slope
            continue
        first *= BETAS[0]
        first += np.multiply(slope, 1 - BETAS[0], out=scratch)
        slope *= slope
        second *= BETAS[1]
        second += np.multiply(slope, 1 - BETAS[1], out=scratch)
        np.sqrt(second, out=scratch)
        scratch *= (1 - BETAS[1] ** step) ** -0.5
        scratch += EPSILON
        np.divide(first, scratch, out=scratch)
        scratch *= RATE / (1 - BETAS[0] ** step)
        logits += scratch
    after = softmax(logits)
    return {"retained": retained(before[:correct], after[:correct]), "correct": float(after[:correct].sum()),
            "anchor": float(after[0]), "mixed_groups": updates / steps}
