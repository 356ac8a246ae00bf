"""Text to tokens and back, with the tokenizer in a checkpoint's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoTokenizer

from nodes.blocks.files import read_generation_config
from nodes.blocks.spec import WeightSource
from nodes.compute import ComputeError


def invalid(config: Mapping[str, Any], error: Exception) -> ComputeError:
    """Returns what is said of a ``config.json`` that a family's classes refuse."""
    reason = " ".join(str(error).split())
    return ComputeError(f"the configuration is invalid for a {config['model_type']} model: {reason}")


def end_tokens(source: WeightSource) -> frozenset[int]:
    """Returns the tokens that end an output: by the checkpoint's generation settings, else by its ``config.json``.

    Raises ``ComputeError``.
    """
    settings = read_generation_config(Path(source.folder)) if source.folder else {}
    if "eos_token_id" not in settings:
        try:
            parsed = CONFIG_MAPPING[source.config["model_type"]].from_dict(dict(source.config))
        except Exception as error:  # the settings of an unknown file can cause any error in the model's code
            raise invalid(source.config, error) from error
        settings = {"eos_token_id": parsed.eos_token_id}
    ends = settings["eos_token_id"]
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


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
