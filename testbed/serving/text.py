"""Text to tokens and back: the model's, or for the stub text that has exactly as many tokens as were computed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from testbed.errors import UserError

SMALL = Path(__file__).parent / "tokenizer"
"""The folder of the tokenizer that comes with the tool."""

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a character looks like of which not all tokens have come."""
_WORD_LIMIT = 1000
_TRIED = 200


class Codec(Protocol):
    """A tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def chat(self, messages: Sequence[tuple[str, str]]) -> str:
        """The prompt that (role, text) pairs make."""
        ...


class StubCodec:
    """A tokenizer of a folder, which needs no torch. ``words`` are each one token, in any order.

    Raises ``UserError`` if the folder has no ``tokenizer.json`` that can be read, or no such words.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{folder} has no tokenizer.json; give a tokenizer's folder with --tokenizer")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            raise UserError(f"{path} is no tokenizer: {error}") from error
        self.words = self._words()

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def chat(self, messages: Sequence[tuple[str, str]]) -> str:
        return plain_chat(messages)

    def _words(self) -> list[str]:
        """Words with a space before them that stay one token each wherever they stand."""
        found: list[str] = []
        size = self._tokenizer.get_vocab_size()
        for token in range(size):
            text = str(self._tokenizer.decode([0, token])[len(self._tokenizer.decode([0])) :])
            if (
                len(text) > 3
                and text[0] == " "
                and text[1:].isascii()
                and text[1:].isalpha()
                and self._count(text) == 1
            ):
                found.append(text)
            if len(found) == _WORD_LIMIT:
                break
        chance = random.Random("words")
        for n_words in (2, _TRIED, _TRIED):
            tried = chance.choices(found, k=n_words) if found else []
            if self._count("".join(tried)) != n_words:
                raise UserError(
                    "this tokenizer has no words that are one token each; give another --tokenizer"
                )
        return found

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def plain_chat(messages: Sequence[tuple[str, str]]) -> str:
    """A prompt for models that have no template of their own."""
    return "".join(f"{role}: {text}\n" for role, text in messages) + "assistant:"


class BlocksCodec:
    """The tokenizer beside a checkpoint's weights, as transformers reads it. Raises ``UserError``."""

    def __init__(self, folder: Path) -> None:
        from nodes.blocks.text import Text
        from nodes.compute import ComputeError

        try:
            self._text = Text(folder)
        except ComputeError as error:
            raise UserError(str(error)) from error

    def encode(self, text: str) -> list[int]:
        return self._text.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._text.decode(list(tokens))

    def chat(self, messages: Sequence[tuple[str, str]]) -> str:
        return self._text.chat(messages) or plain_chat(messages)


class Said(Protocol):
    """The text of one request, as its tokens come."""

    def add(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        ...

    def rest(self) -> str:
        """What is left when no token comes any more."""
        ...


class StubSaid:
    """Made-up text of one word per token, the same for the same request."""

    def __init__(self, codec: StubCodec, request: int) -> None:
        self._chance = random.Random(f"text:{request}")
        self._words = codec.words

    def add(self, token_id: int) -> str:
        return self._chance.choice(self._words)

    def rest(self) -> str:
        return ""


class BlocksSaid:
    """The model's text. A character that needs several tokens comes with the last of them."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        self._begin = self._end = 0
        """Of the tokens whose text came last: what follows is decoded together with them, for its spaces."""

    def add(self, token_id: int) -> str:
        self._tokens.append(token_id)
        text = self._new()
        if text.endswith(_UNFINISHED):
            return ""
        self._begin, self._end = self._end, len(self._tokens)
        return text

    def rest(self) -> str:
        text = self._new()
        self._begin = self._end = len(self._tokens)
        return text

    def _new(self) -> str:
        before = self._codec.decode(self._tokens[self._begin : self._end])
        return self._codec.decode(self._tokens[self._begin :])[len(before) :]


class Stops:
    """Ends a text before the first of ``sequences``, also if that came in pieces."""

    def __init__(self, sequences: Sequence[str]) -> None:
        self._sequences = tuple(sequences)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """What can be shown of all text so far and has not been: nothing that may begin a sequence."""
        if self.found or not self._sequences:
            return "" if self.found else text
        text = self._held + text
        ends = [at for at in map(text.find, self._sequences) if at >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)]
        n_held = max(_overlap(text, sequence) for sequence in self._sequences)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def rest(self) -> str:
        """What was held back when no text comes any more."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, sequence: str) -> int:
    """How many characters at the end of ``text`` begin ``sequence``."""
    longest = min(len(text), len(sequence) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(sequence[:n])), 0)
