"""Text to tokens and back, with the tokenizer that stands beside a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from nodes.compute import ComputeError


class Text:
    """Raises ``ComputeError`` if the folder holds no tokenizer."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # it runs a foreign file's settings through code of many classes
            reason = " ".join(str(error).split())[:200]
            raise ComputeError(f"{folder} holds no tokenizer that can be read: {reason}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids, with those that the model expects around a text."""
        return [int(token) for token in self._tokenizer(text)["input_ids"]]

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, without those that are none."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def chat(self, messages: Sequence[tuple[str, str]]) -> str | None:
        """The prompt that (role, text) pairs make in the model's own template; ``None`` if it has none."""
        if not getattr(self._tokenizer, "chat_template", None):
            return None
        turns = [{"role": role, "content": text} for role, text in messages]
        return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
