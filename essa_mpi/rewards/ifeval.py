"""IFEval's verifiable instructions (arXiv 2311.07911), by the checkers of the package if-verifiable.

Rows are those of IFEval's own file: `prompt`, `instruction_id_list` and `kwargs`. Any prompts will do; none are
shipped.
"""

import importlib.util
import json
import os
import random

from ..config import Config, UserError
from .child import Reply
from .judged import Judged

# ifeval_score -> the library's name for it; all four are logged.
SCORES = {"strict": "binary_strict", "loose": "binary_loose",
          "partial_strict": "partial_strict", "partial_loose": "partial_loose"}


class IFEval(Judged):
    """All instructions followed (`strict`, or `loose`: after removal of marks and outer lines), or the share that is."""

    names = tuple(SCORES)

    def __init__(self, name: str, config: Config):
        if importlib.util.find_spec("if_verifiable") is None:
            raise UserError("config: reward = 'ifeval': needs if-verifiable; pip install if-verifiable==0.1.2")
        super().__init__(name, config, "ifeval:Verifier",
                         {"score": config.ifeval_score, "nltk_data": config.ifeval_nltk_data})
        self.child.start()

    def check(self, rows):
        known = set(self.child.facts["instructions"])
        for row in rows:
            ids, kwargs = row.fields.get("instruction_id_list"), _kwargs(row)
            if not isinstance(ids, list) or not ids or not isinstance(kwargs, list) or len(ids) != len(kwargs):
                raise UserError(f"{row.source}: reward = 'ifeval' needs instruction_id_list and kwargs, two lists of the "
                                f"same length; the row has {', '.join(map(repr, row.fields)) or 'no other columns'}")
            unknown = [each for each in ids if each not in known]   # the library would skip them without a word
            if unknown:
                raise UserError(f"{row.source}: there is no instruction {unknown[0]!r}; there are {', '.join(sorted(known))}")


def _kwargs(row):
    """The row's kwargs, which some data sets hold as JSON in a string."""
    found = row.fields.get("kwargs")
    if not isinstance(found, str):
        return found
    try:
        return json.loads(found)
    except ValueError:
        return None


class Verifier:
    """In the child; see `child.serve`."""

    def __init__(self, score: str, nltk_data: str):
        if nltk_data:
            os.environ["NLTK_DATA"] = os.pathsep.join(filter(None, [nltk_data, os.environ.get("NLTK_DATA")]))
        os.environ["HF_HUB_OFFLINE"] = "1"      # the package can fetch prompts; nothing is fetched here
        import nltk
        try:
            nltk.data.find("tokenizers/punkt_tab/english")
        except LookupError:
            raise UserError("config: reward = 'ifeval': NLTK's punkt_tab is not found" + (
                            f" in ifeval_nltk_data = {nltk_data!r}" if nltk_data else "") + "; set ifeval_nltk_data (or NLTK_DATA) "
                            "to a folder that has tokenizers/punkt_tab/english, from `python -m nltk.downloader -d DIR "
                            "punkt_tab` on a machine with a network") from None
        import langdetect
        langdetect.DetectorFactory.seed = 0     # else it draws, and the same text is now English, now Dutch
        from if_verifiable import IFEvalSample, evaluate_output_for_sample
        from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT
        self._sample, self._evaluate, self._score = IFEvalSample, evaluate_output_for_sample, SCORES[score]
        self.facts = {"instructions": list(INSTRUCTION_DICT)}

    def judge(self, items):
        for item in items:
            row = item.row
            prompt = row.prompt if isinstance(row.prompt, str) else row.prompt[-1]["content"]
            random.seed(0)      # what an instruction's kwargs leave open is drawn: the same for all candidates
            sample = self._sample(0, prompt, row.fields["instruction_id_list"],
                                  [kwargs or {} for kwargs in _kwargs(row)])
            try:
                _, scores = self._evaluate("ifeval", sample, item.text)
            except Exception as error:
                raise UserError(f"{row.source}: if-verifiable fails on it: {type(error).__name__}: {error}; mend kwargs") from error
            parts = {name: float(getattr(scores, theirs)) for name, theirs in SCORES.items()}
            yield Reply(float(getattr(scores, self._score)), parts)
