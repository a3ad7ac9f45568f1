"""The vectors a run may hand over as its result: the search's last word is not always its best.

    final      the mean after the last update
    averaged   the means of all generations, each weighing 0.8 of the next: the mean wanders about the
               optimum in noise, and an average wanders less
    validated  the mean that did best on the validation rows
    candidate  the candidate with the best fitness ever, luck with its rows included
"""

import numpy as np

KEEP = 0.8   # of the average a generation


class Answers:
    """Kept on every rank alike. vectors: name -> (D,), those that there are."""

    def __init__(self, dimension: int):
        self._arrays = {
            "averaged": np.zeros(dimension), "averaged_generations": np.array(0),
            "validated": np.zeros(dimension), "validated_score": np.array(-np.inf),
            "candidate": np.zeros(dimension), "candidate_score": np.array(-np.inf),
        }

    def note(self, before: np.ndarray, after: np.ndarray, candidates: np.ndarray, fitness: np.ndarray,
             validation: float) -> None:
        """A generation: the mean before and after its update (D,), its candidates (population, D), their
        fitness, and the score of the mean before on the validation rows (nan: not done)."""
        a = self._arrays
        keep = KEEP if a["averaged_generations"] else 0.0
        a["averaged"] = keep * a["averaged"] + (1 - keep) * after
        a["averaged_generations"] = a["averaged_generations"] + 1
        self.validate(before, validation)
        best = int(np.argmax(fitness))
        if fitness[best] > a["candidate_score"]:
            a["candidate"], a["candidate_score"] = candidates[best].copy(), np.array(float(fitness[best]))

    def validate(self, mean: np.ndarray, score: float) -> None:
        """A mean's score on the validation rows; of equal ones the later counts, nan is none."""
        if score >= self._arrays["validated_score"]:
            self._arrays["validated"], self._arrays["validated_score"] = mean.copy(), np.array(float(score))

    def vectors(self, final: np.ndarray) -> dict[str, np.ndarray]:
        """name -> (D,) of every answer there is; final: the search's mean."""
        a = self._arrays
        found = {"final": final}
        if a["averaged_generations"]:
            found["averaged"] = a["averaged"]
        for name in ("validated", "candidate"):
            if np.isfinite(a[f"{name}_score"]):
                found[name] = a[name]
        return found

    def state(self) -> dict[str, np.ndarray]:
        """For a checkpoint. A score that is none is -inf."""
        return {name: array.copy() for name, array in self._arrays.items()}

    def load_state(self, state: dict) -> None:
        """Go on from `state()`."""
        self._arrays = {name: np.array(state[name], dtype=array.dtype) for name, array in self._arrays.items()}
