"""Text to tokens and back, with the tokenizer in a checkpoint's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from nodes.compute import ComputeError


class Text:
    """A checkpoint's tokenizer. Raises ``ComputeError`` if the folder holds none."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the settings of an unknown file can cause any error in transformers
            reason = " ".join(str(error).split())[:200]
            raise ComputeError(f"{folder} holds no tokenizer that can be read: {reason}") from error

    def encode(self, text: str) -> list[int]:
        """Returns a text's token ids, with the special tokens that the model expects around it."""
        return [int(token) for token in self._tokenizer(text)["input_ids"]]

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of tokens, without special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int] | None:
        """Returns the prompt's token ids for (role, text) pairs by the model's chat template; ``None`` if it has none.

        A template writes special tokens itself: no others are added. Raises ``ComputeError`` if it refuses the messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            return None
        turns = [{"role": role, "content": text} for role, text in messages]
        try:
            found = self._tokenizer.apply_chat_template(
                turns, tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # templates are programs: they raise what they like, also on purpose
            reason = " ".join(str(error).split())[:200]
            raise ComputeError(f"the model's chat template refuses these messages: {reason}") from error
        return [int(token) for token in found]
