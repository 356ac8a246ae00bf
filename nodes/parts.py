"""Frames that are too large for one message: splits them into parts, and joins the parts again."""

from __future__ import annotations

import asyncio
from typing import Generic, Protocol, TypeVar

import msgspec

from nodes import wire

F = TypeVar("F", bound=wire.Request | wire.Answer)


class Socket(Protocol):
    """What a ``Sender`` needs of a WebSocket."""

    async def send_bytes(self, data: bytes) -> None: ...


def messages(frame: wire.Request | wire.Answer) -> list[bytes]:
    """Returns the messages that carry a frame, in order."""
    payload = getattr(frame, "payload", b"")
    if len(payload) <= wire.PART_BYTES:
        return [wire.pack(frame)]
    size, last = wire.PART_BYTES, (len(payload) - 1) // wire.PART_BYTES * wire.PART_BYTES
    parts = (wire.More(frame.id, payload[at : at + size]) for at in range(0, last, size))
    end: wire.Frame = msgspec.structs.replace(frame, payload=payload[last:])
    return [*map(wire.pack, parts), wire.pack(end)]


class Sender:
    """Sends frames over a connection.

    The parts of a frame follow each other without another frame between.
    """

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._turn = asyncio.Lock()

    async def send(self, frame: wire.Request | wire.Answer) -> None:
        """Sends a frame. Raises what ``send_bytes`` raises."""
        await self.send_messages(messages(frame))

    async def send_messages(self, packed: list[bytes]) -> None:
        """As ``send``, with the result of ``messages``."""
        if len(packed) == 1 and not self._turn.locked():
            await self._socket.send_bytes(packed[0])
            return
        async with self._turn:
            for data in packed:
                await self._socket.send_bytes(data)


class Receiver(Generic[F]):
    """Joins frames that come in parts, up to ``max_bytes`` of payload."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._begun: tuple[int, bytearray] | None = None

    def take(self, frame: F | wire.More) -> F | None:
        """Adds a frame or a part of one. Returns the whole frame, or ``None`` while parts are missing.

        Raises ``FrameError``.
        """
        begun = self._begun
        if begun is None and not isinstance(frame, wire.More):
            return frame
        if begun is None:
            begun = self._begun = frame.id, bytearray()
        payload = getattr(frame, "payload", None)
        if frame.id != begun[0] or payload is None:
            raise wire.FrameError(wire.BAD_FRAME, "another frame between the parts of one", frame.id)
        if len(begun[1]) + len(payload) > self._max_bytes:
            raise wire.FrameError(wire.TOO_LARGE, f"more than {self._max_bytes} bytes of payload", frame.id)
        begun[1].extend(payload)
        if isinstance(frame, wire.More):
            return None
        frame.payload = bytes(begun[1])  # type: ignore[union-attr]
        self._begun = None
        return frame
