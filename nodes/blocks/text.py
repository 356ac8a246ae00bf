"""Text to tokens and back, with the tokenizer that stands beside a checkpoint's weights."""

from __future__ import annotations

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
