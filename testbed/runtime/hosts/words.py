"""What is said over the sealed stream between an orchestrator and the agent of one of its machines."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from testbed.runtime.hosts.sealed import NotOurs

T = TypeVar("T")


class ForNode(msgspec.Struct, tag="node"):
    """First word of a stream that carries a node's control connection."""

    host: str


class ForAgent(msgspec.Struct, tag="agent"):
    """First word of the agent's own stream."""

    host: str


class Time(msgspec.Struct, tag="time"):
    """The orchestrator asks for the agent's time; ``number`` comes back with the answer. A sign of life, too."""

    number: int


class TimeIs(msgspec.Struct, tag="time-is"):
    """It was ``at`` (``time.monotonic``) on the agent's machine when ``Time`` came."""

    number: int
    at: float


class Exited(msgspec.Struct, tag="exited"):
    """A node's process, or the launcher, has ended; ``log`` is the end of what it wrote."""

    name: str
    status: int
    log: bytes


FirstWord = ForNode | ForAgent
Word = Time | TimeIs | Exited
_first: msgspec.msgpack.Decoder[FirstWord] = msgspec.msgpack.Decoder(FirstWord)
_words: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)


def pack(word: FirstWord | Word) -> bytes:
    return msgspec.msgpack.encode(word)


def first_word(data: bytes) -> FirstWord:
    """Raises ``NotOurs``."""
    return _read(_first, data)


def word(data: bytes) -> Word:
    """Raises ``NotOurs``."""
    return _read(_words, data)


def _read(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotOurs(f"a word that cannot be read: {error}") from error
