"""Sends frames over a connection in the order of ``nodes.outbox``, large ones in parts, and joins the parts again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import msgspec

from nodes import wire
from nodes.outbox import Class, Outbox, Waiting

F = TypeVar("F", bound=wire.Request | wire.Answer)
M = TypeVar("M")

_AT_ONCE = 2
"""Frames whose parts alternate: one for each class that has parts."""


def class_of(frame: wire.Frame) -> Class:
    """Returns the class in which a frame is sent."""
    return class_of_payload(len(getattr(frame, "payload", b"")))


def class_of_payload(n_bytes: int) -> Class:
    """Returns the class in which a frame with a payload of ``n_bytes`` is sent."""
    if not n_bytes:
        return Class.CONTROL
    return Class.SMALL if n_bytes <= wire.SMALL_BYTES else Class.BULK


class Sending:
    """A frame that is sent. ``left_at_s``: when its last message was handed over; ``None`` before. Then ``on_left`` is called."""

    __slots__ = (
        "_left",
        "_on_left",
        "frame",
        "is_begun",
        "is_done",
        "is_whole",
        "kind",
        "left_at_s",
        "n_bytes",
    )

    def __init__(self, frame: wire.Frame, on_left: Callable[[], object] | None = None) -> None:
        self.frame = frame
        self._on_left = on_left
        self.n_bytes = len(getattr(frame, "payload", b""))
        """Bytes of its payload that have not been sent."""
        self.kind = class_of_payload(self.n_bytes)
        self.is_whole = self.n_bytes <= wire.PART_BYTES
        self.is_begun = self.is_done = False
        self.left_at_s: float | None = None
        self._left: asyncio.Future[None] | None = None

    def next(self) -> bytes:
        """Returns its next message. Packs it only now: large frames do not wait twice in memory."""
        self.is_begun = True
        frame, size = self.frame, wire.PART_BYTES
        if self.is_whole:
            self.is_done = True
            return wire.pack(frame)
        payload: bytes = frame.payload  # type: ignore[attr-defined]
        begin = len(payload) - self.n_bytes
        if self.n_bytes > size:
            self.n_bytes -= size
            return wire.pack(wire.More(frame.id, payload[begin : begin + size]))
        self.is_done = True
        return wire.pack(msgspec.structs.replace(frame, payload=payload[begin:]))

    async def left(self) -> None:
        """Waits until it has left. Raises ``ConnectionError`` if it never will. Cancelling the wait changes nothing."""
        if self.left_at_s is None:
            self._left = asyncio.get_running_loop().create_future()
            await self._left

    def end(self, now_s: float, error: ConnectionError | None = None) -> None:
        """As ``Waiting.end``; tells who waits for it."""
        if error is None:
            self.left_at_s = now_s
            if self._on_left is not None:
                self._on_left()
        if self._left is not None and not self._left.done():
            self._left.set_result(None) if error is None else self._left.set_exception(error)


class Messages(Generic[M]):
    """Sends frames' messages one after another; it owns what must be sent.

    Who cancels a call of it stops waiting and changes nothing else. ``write`` sends a message, and returns when the
    next one may be sent. If it fails, ``lost`` is called, and nothing more can be sent. ``at_once``: it hands the message
    over before it waits for anything.
    """

    def __init__(
        self,
        write: Callable[[M], Awaitable[None]],
        now_s: Callable[[], float],
        lost: Callable[[], object] = lambda: None,
        *,
        at_once: bool = True,
    ) -> None:
        self._write = write
        self._at_once = at_once
        self._now_s = now_s
        self._lost = lost
        self._outbox: Outbox[Waiting[M]] = Outbox()
        self._is_writing = False
        self._writer: asyncio.Task[None] | None = None
        self._why_not: str | None = None
        """Why nothing more can be sent."""

    async def begin(self, frame: Waiting[M]) -> None:
        """Sends a frame. If others are being sent, returns at once: it will be sent in its turn.

        Raises ``ConnectionError``.
        """
        if self._is_writing or not frame.is_whole or not self._at_once:
            self.put(frame)
            return
        if self._why_not is not None:
            raise ConnectionResetError(self._why_not)
        self._is_writing = True
        try:
            message = frame.next()
            frame.end(self._now_s())
            await self._write(message)
        except ConnectionError as error:
            self._fail(error)
            raise
        finally:
            self._is_writing = False
            if self._outbox:
                self._write_later()

    def put(self, frame: Waiting[M]) -> None:
        """Has a frame sent in its turn. Raises ``ConnectionError``."""
        if self._why_not is not None:
            raise ConnectionResetError(self._why_not)
        self._outbox.put(frame)
        if not self._is_writing:
            self._write_later()

    def _write_later(self) -> None:
        self._is_writing = True
        self._writer = asyncio.ensure_future(self._write_all())

    async def _write_all(self) -> None:
        try:
            while (frame := self._outbox.first()) is not None:
                message = frame.next()
                is_last = frame.is_done  # it may be dropped meanwhile
                await self._write(message)
                if is_last:
                    self._outbox.remove(frame)  # not before: if the connection breaks, those in it are told
                    frame.end(self._now_s())
                del frame, message  # or they would be kept while the next one is written
        except ConnectionError as error:
            self._fail(error)
        finally:
            self._is_writing = False

    def _fail(self, error: ConnectionError) -> None:
        self._writer = None
        self.end(str(error))
        self._lost()

    def end(self, why: str = "the connection was closed") -> None:
        """Sends nothing more."""
        if self._why_not is not None:
            return
        self._why_not = why
        if self._writer is not None:
            self._writer.cancel()
        for frame in self._outbox.clear():
            frame.end(self._now_s(), ConnectionResetError(why))


class Sender(Messages[bytes]):
    """Sends frames over a connection."""

    async def send(self, frame: wire.Frame) -> None:
        """Sends a frame, and returns when it has left. If the wait is cancelled, drops what has not been sent.

        Raises ``ConnectionError``.
        """
        sending = Sending(frame)
        await self.begin(sending)
        try:
            await sending.left()
        except asyncio.CancelledError:
            self.drop(sending)
            raise

    def drop(self, frame: Sending) -> None:
        """Does not send what is left of a frame: nobody wants it any more."""
        if frame.is_done or self._why_not is not None:
            return
        self._outbox.remove(frame)
        if frame.is_begun:
            self.put(Sending(wire.Drop(frame.frame.id)))
        frame.is_done = True


class Receiver(Generic[F]):
    """Joins frames that come in parts, up to ``max_bytes`` of payload. Other frames may come between the parts."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._begun: dict[int, bytearray] = {}

    def take(self, frame: F | wire.More | wire.Drop) -> F | None:
        """Adds a frame or a part of one. Returns the whole frame, or ``None`` while parts are missing.

        Raises ``FrameError``.
        """
        if isinstance(frame, wire.Drop):
            self._begun.pop(frame.id, None)
            return None
        payload: bytes | None = getattr(frame, "payload", None)
        if payload is None:
            return frame  # type: ignore[return-value]
        begun = self._begun.get(frame.id)
        if begun is None:
            if not isinstance(frame, wire.More):
                return frame
            if len(self._begun) == _AT_ONCE:
                text = f"parts of more than {_AT_ONCE} frames at once"
                raise wire.FrameError(wire.BAD_FRAME, text, frame.id)
            begun = self._begun[frame.id] = bytearray()
        if len(begun) + len(payload) > self._max_bytes:
            raise wire.FrameError(wire.TOO_LARGE, f"more than {self._max_bytes} bytes of payload", frame.id)
        begun.extend(payload)
        if isinstance(frame, wire.More):
            return None
        frame.payload = bytes(self._begun.pop(frame.id))  # type: ignore[union-attr]
        return frame
