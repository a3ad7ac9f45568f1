"""Prompt and completion as the model saw them, in text, for rewards that judge both together."""

from ..config import Config
from ..tasks import Row, render_text


class Conversation:
    """Texts by the tokenizer and chat template of the model that is evolved."""

    def __init__(self, config: Config):
        from transformers import AutoTokenizer
        self._config = config
        self._tokenizer = AutoTokenizer.from_pretrained(config.model, local_files_only=True)
        self._prompts: dict[str, str] = {}

    def prompt(self, row: Row) -> str:
        """The prompt with the template's marks and system prompt."""
        if row.source not in self._prompts:
            self._prompts[row.source] = render_text(row, self._tokenizer, self._config)
        return self._prompts[row.source]

    def whole(self, item) -> str:
        """Prompt and completion, special tokens included where the completion's are known."""
        if item.tokens is None:
            return self.prompt(item.row) + item.text
        return self.prompt(item.row) + self._tokenizer.decode(list(item.tokens), skip_special_tokens=False)
