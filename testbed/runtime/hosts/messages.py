"""The messages on the sealed stream between the orchestrator and the agent of a machine."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from testbed.runtime.hosts.sealed import AuthenticationError

T = TypeVar("T")


class NodeStream(msgspec.Struct, tag="node"):
    """First message of a stream that relays a node's control connection."""

    host: str


class AgentStream(msgspec.Struct, tag="agent"):
    """First message of the agent's own stream."""

    host: str


class GetTime(msgspec.Struct, tag="time"):
    """The orchestrator asks for the agent's time, which also shows that it is alive.

    The answer repeats ``number``.
    """

    number: int


class TimeReply(msgspec.Struct, tag="time-is"):
    """The agent received ``GetTime`` at the instant ``at`` of its machine's ``time.monotonic``."""

    number: int
    at: float


class Exited(msgspec.Struct, tag="exited"):
    """A node's process, or the launcher, has ended; ``log`` is the end of its log."""

    name: str
    status: int
    log: bytes


FirstMessage = NodeStream | AgentStream
HostMessage = GetTime | TimeReply | Exited
_first: msgspec.msgpack.Decoder[FirstMessage] = msgspec.msgpack.Decoder(FirstMessage)
_messages: msgspec.msgpack.Decoder[HostMessage] = msgspec.msgpack.Decoder(HostMessage)


def pack(message: FirstMessage | HostMessage) -> bytes:
    return msgspec.msgpack.encode(message)


def unpack_first(data: bytes) -> FirstMessage:
    """Decode the first message of a stream. Raises ``AuthenticationError`` if it cannot be read."""
    return _read(_first, data)


def unpack(data: bytes) -> HostMessage:
    """Decode a message. Raises ``AuthenticationError`` if it cannot be read."""
    return _read(_messages, data)


def _read(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AuthenticationError(f"a message that cannot be read: {error}") from error
