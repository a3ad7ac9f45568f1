"""Reward models: a sequence classifier through transformers, or a server over HTTP."""

import json
import time
import urllib.error
import urllib.request
from pathlib import Path

from ..config import Config, UserError
from ..tasks import one_line
from .child import Reply
from .conversation import Conversation
from .judged import Judged

TRIES = 6       # of a server, 1, 2, 4, ... seconds apart


class Model(Judged):
    """What the sequence classifier `reward_model` says of prompt and completion as a chat."""

    def __init__(self, name: str, config: Config):
        if not config.reward_model:
            raise UserError("config: reward = 'model': needs reward_model, the folder of a sequence classifier; or use a "
                            "server: reward = 'http://host:port/path'")
        if not (Path(config.reward_model) / "config.json").is_file():
            raise UserError(f"config: reward_model = {config.reward_model!r}: there is no such folder with a config.json; "
                            f"give a Hugging Face model folder; nothing is downloaded")
        super().__init__(name, config, "model:Classifier", {"config": config})


class Classifier:
    """In the child; see `child.serve`."""

    facts: dict = {}

    def __init__(self, config: Config):
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        self._torch = torch
        self._device = config.reward_device or ("cuda" if torch.cuda.is_available() else "cpu")
        options = {"local_files_only": True, "trust_remote_code": config.reward_trust_code}
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(config.reward_model, **options)
            self._model = AutoModelForSequenceClassification.from_pretrained(
                config.reward_model, dtype="auto", **options).to(self._device).eval()
        except Exception as error:
            raise UserError(f"config: reward_model = {config.reward_model!r}: cannot be loaded: {one_line(error)}; a model "
                            f"that brings its own code needs reward_trust_code = true") from error
        if not self._tokenizer.chat_template:
            raise UserError(f"config: reward_model = {config.reward_model!r}: its tokenizer has no chat template")

    def judge(self, items):
        for item in items:      # one by one: in a padded batch a score's last bits depend on its neighbours
            yield Reply(self._one(item))

    def _one(self, item) -> float:
        messages = [{"role": "user", "content": item.row.prompt}] if isinstance(item.row.prompt, str) else item.row.prompt
        ids = self._tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": item.text}],
                                                  return_tensors="pt", return_dict=False).to(self._device)
        with self._torch.inference_mode():
            out = self._model(ids)
        score = out["score"] if "score" in out else out.logits      # ArmoRM's own, or a classifier with one label
        if score.numel() != 1:
            raise UserError(f"config: reward_model: it gives {score.numel()} numbers for a text; needs a model with a "
                            f"score or a single label")
        return float(score.float().item())


class Server(Judged):
    """What a server says, asked as OpenRLHF asks one: POST {"query": [...], "prompts": [...], "labels": [...]}, where
    a query is prompt and completion; the answer is {"rewards": [...]}."""

    def __init__(self, name: str, config: Config):
        super().__init__(name, config, "model:Client", {"url": name, "config": config})


class Client:
    """In the child; see `child.serve`."""

    facts = {"together": True}

    def __init__(self, url: str, config: Config):
        self._url, self._conversation = url, Conversation(config)

    def judge(self, items):
        body = {"query": [self._conversation.whole(item) for item in items],
                "prompts": [self._conversation.prompt(item.row) for item in items],
                "labels": [item.row.answer for item in items]}
        answer = self._post(json.dumps(body, default=str).encode())
        rewards = answer.get("rewards") if isinstance(answer, dict) else answer
        if not isinstance(rewards, list) or len(rewards) != len(items):
            raise UserError(f"reward {self._url}: answered {str(answer)[:80]!r} for {len(items)} completions; needs "
                            f'{{"rewards": [...]}} with a number each')
        return [Reply(value) for value in rewards]

    def _post(self, body: bytes):
        for attempt in range(TRIES):
            try:
                request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request) as reply:
                    return json.loads(reply.read())
            except (OSError, ValueError) as error:      # refused, reset, 5xx, no JSON
                last = error
                refused = isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500
                if refused or attempt == TRIES - 1:
                    break
                time.sleep(2.0**attempt)
        raise UserError(f"reward {self._url}: {one_line(last)}, after {attempt + 1} tries; is the server up? The run can be "
                        f"resumed")
