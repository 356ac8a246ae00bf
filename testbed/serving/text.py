"""Text to tokens and back. The stub's text is made up, and has exactly as many tokens as were computed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from testbed.errors import UserError

SMALL = Path(__file__).parent / "tokenizer"
"""The folder of the tokenizer that comes with the tool."""

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Decoders put this character for one of which some tokens are still missing."""
_WORD_LIMIT = 1000
"""Most words that the stub's text is made of."""
_TRIED = 200
"""Number of words in a random text, which must have as many tokens."""


class Codec(Protocol):
    """A tokenizer: texts to token ids, and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Return the token ids of the prompt for a chat's (role, text) pairs. Raises ``ValueError`` if it has none."""
        ...


class StubCodec:
    """The stub's tokenizer, from a folder; needs no torch. Each of ``words`` is one token.

    It is one in any order, if the tokenizer has such words or other such texts (``counts_again``). Else words are the texts
    of tokens. Raises ``UserError`` if the folder has no readable ``tokenizer.json``, or no token with a text.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{folder} has no tokenizer.json; give a tokenizer's folder with --tokenizer")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            raise UserError(
                f"{path} is not a tokenizer ({error}); give another folder with --tokenizer"
            ) from error
        self.words, self.counts_again = self._words()

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        return self.encode(plain_chat(messages))

    def _words(self) -> tuple[list[str], bool]:
        """Return the texts of the stub, and whether each is one token in any text made of them.

        They are words after a space, or single letters, or any tokens that a text can have.
        """
        words: list[str] = []
        others: list[str] = []
        begin = len(self._tokenizer.decode([0]))
        for token in range(self._tokenizer.get_vocab_size()):
            text = str(self._tokenizer.decode([0, token])[begin:])
            if not text or UNFINISHED in text:
                continue
            others.append(text)
            if (
                text[0] == " "
                and len(text) > 3
                and text[1:].isascii()
                and text[1:].isalpha()
                and self._count(text) == 1
            ):
                words.append(text)
            if len(words) == _WORD_LIMIT:
                break
        if not others:
            raise UserError("this tokenizer has no token with a text; give another folder with --tokenizer")
        single = [text for text in others if len(text) == 1 and text.isprintable() and self._count(text) == 1]
        for found in (words, single):
            if found and self._counts_again(found):
                return found, True
        return others[:_WORD_LIMIT], False

    def _counts_again(self, words: Sequence[str]) -> bool:
        """Return whether random texts of ``words`` have as many tokens as words."""
        chance = random.Random("words")
        return all(
            self._count("".join(chance.choices(words, k=n_words))) == n_words
            for n_words in (2, _TRIED, _TRIED)
        )

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def plain_chat(messages: Sequence[tuple[str, str]]) -> str:
    """Return the prompt of a chat for models without a chat template."""
    return "".join(f"{role}: {text}\n" for role, text in messages) + "assistant:"


class BlocksCodec:
    """The tokenizer in a checkpoint's folder, read by transformers. Raises ``UserError``."""

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

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        from nodes.compute import ComputeError

        try:
            found = self._text.chat(messages)
        except ComputeError as error:
            raise ValueError(str(error)) from error
        return self.encode(plain_chat(messages)) if found is None else found


class Detokenizer(Protocol):
    """The text of one response, token by token."""

    def add(self, token_id: int) -> str:
        """Add a token; returns the text that it completes, which may be empty."""
        ...

    def rest(self) -> str:
        """Return the text that is left after the last token."""
        ...


class StubDetokenizer:
    """The stub's made-up text: a random word per token. ``request`` is the seed."""

    def __init__(self, codec: StubCodec, request: int) -> None:
        self._chance = random.Random(f"text:{request}")
        self._words = codec.words

    def add(self, token_id: int) -> str:
        return self._chance.choice(self._words)

    def rest(self) -> str:
        return ""


class IncrementalDetokenizer:
    """The model's text. A character of several tokens is returned with the last of them."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        self._begin = self._end = 0
        """Range of the tokens whose text was returned last. New ones are decoded together with them, because
        spaces between tokens depend on the token before."""

    def add(self, token_id: int) -> str:
        self._tokens.append(token_id)
        text = self._new()
        if text.endswith(UNFINISHED):
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


class StopSequences:
    """Cuts a text before the first of ``sequences``, even if that arrives in pieces. ``found``: it did."""

    def __init__(self, sequences: Sequence[str]) -> None:
        self._sequences = tuple(sequences)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Add text; returns what can be shown now. An end that may begin a sequence is held back."""
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
        """Return the text that was held back; call it after the last text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, sequence: str) -> int:
    """Return how many characters at the end of ``text`` are the beginning of ``sequence``."""
    longest = min(len(text), len(sequence) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(sequence[:n])), 0)
