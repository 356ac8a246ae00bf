"""The messages on the sealed stream between the orchestrator and the agent of a machine."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from testbed.runtime.hosts.sealed import NotOurs

T = TypeVar("T")


class ForNode(msgspec.Struct, tag="node"):
    """First message of a stream that relays a node's control connection."""

    host: str


class ForAgent(msgspec.Struct, tag="agent"):
    """First message of the agent's own stream."""

    host: str


class Time(msgspec.Struct, tag="time"):
    """The orchestrator asks for the agent's time, which also shows that it is alive.

    The answer repeats ``number``.
    """

    number: int


class TimeIs(msgspec.Struct, tag="time-is"):
    """The agent received ``Time`` at the instant ``at`` of its machine's ``time.monotonic``."""

    number: int
    at: float


class Exited(msgspec.Struct, tag="exited"):
    """A node's process, or the launcher, has ended; ``log`` is the end of its log."""

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
    """Decode the first message of a stream. Raises ``NotOurs`` if it cannot be read."""
    return _read(_first, data)


def word(data: bytes) -> Word:
    """Decode a message. Raises ``NotOurs`` if it cannot be read."""
    return _read(_words, data)


def _read(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotOurs(f"a message that cannot be read: {error}") from error
