"""Sizes of the data plane's messages are those of real frames, as aiohttp writes them to a connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import http

from nodes import framesizes, wire
from nodes.batching import Composition
from nodes.framesizes import FrameSize
from nodes.parts import Sending

TOKEN = "0123456789abcdef" * 2
TIMING = wire.pack_timing(wire.Timing(1.5, 2.5, 3))
OUT = wire.Out(wire.FIRST_ID, 1.5, 2.5, Composition(), b"")
FRAMES: dict[str, tuple[wire.Frame, Any, bool]] = {
    "open": (wire.Open(wire.FIRST_ID, "150", "client9", 3, 70, 2000, 900, 7.25), framesizes.OPEN, True),
    "join": (
        wire.Join(wire.FIRST_ID, "150", "client9", 3, 70, 2000, TOKEN, 9, TOKEN, 900, 7.25),
        framesizes.JOIN,
        True,
    ),
    "open-pages": (
        wire.OpenPages(wire.FIRST_ID, "150", "client9", 3, 70, 2000, 900, 7.25, bytes(240)),
        framesizes.opening(30, forwarding=False),
        True,
    ),
    "join-pages": (
        wire.JoinPages(wire.FIRST_ID, "150", "client9", 3, 70, 2000, TOKEN, 9, TOKEN, 900, 7.25, bytes(240)),
        framesizes.opening(30, forwarding=True),
        True,
    ),
    "found": (wire.Found(wire.FIRST_ID, 1500), framesizes.FOUND, False),
    "keep": (wire.Keep(wire.FIRST_ID, "150", bytes(800)), framesizes.keeping(100), True),
    "close": (wire.Close(wire.FIRST_ID, "150"), framesizes.CLOSE, True),
    "ok": (wire.Ok(wire.FIRST_ID), framesizes.OK, False),
    "got": (wire.Got(wire.FIRST_ID), framesizes.GOT, False),
    "step": (wire.Step(wire.FIRST_ID, "150", 1500, 1, b""), framesizes.step, True),
    "ping": (wire.Ping(wire.FIRST_ID, b""), framesizes.ping, True),
    "out": (OUT, framesizes.out, False),
    "push": (
        wire.Push(wire.FIRST_ID, TOKEN, 1500, 1, 2 * TIMING, b""),
        lambda n: framesizes.push(n, 2),
        True,
    ),
    "result": (wire.Result(wire.FIRST_ID, 1500, 7 * TIMING, b""), lambda n: framesizes.result(n, 7), False),
}
PAYLOADS = (1, 100, 255, 256, 16_000, 28_672, 61_440, 61_441, 573_440, 2_000_000)


class Written:
    """A transport that counts what is written to it."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        self.sizes.append(len(data))


def written(message: bytes, is_masked: bool) -> list[int]:
    """The bytes of a message on a connection, of each write."""
    transport: Any = Written()
    protocol: Any = type("Protocol", (), {"_paused": False})()
    writer = http.WebSocketWriter(protocol, transport, use_mask=is_masked)
    asyncio.run(writer.send_frame(message, http.WSMsgType.BINARY))
    return transport.sizes  # type: ignore[no-any-return]


def writes(n_bytes: int, head_bytes: int) -> list[int]:
    return [head_bytes, n_bytes - head_bytes] if head_bytes else [n_bytes]


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_takes_as_many_bytes_and_messages_as_a_real_one_of_its_class(name: str) -> None:
    frame, size_of, is_masked = FRAMES[name]
    has_payload = hasattr(frame, "payload")
    for n_bytes in PAYLOADS if has_payload else (0,):
        if has_payload:
            frame.payload = bytes(n_bytes)  # type: ignore[attr-defined]
        sending = Sending(frame)
        found = []
        while not sending.is_done:
            found.append(written(sending.next(), is_masked))
        size = size_of(n_bytes) if has_payload else size_of
        assert isinstance(size, FrameSize)
        part = writes(size.part_bytes, size.part_head_bytes)
        assert [*[part] * size.n_parts, writes(size.last_bytes, size.last_head_bytes)] == found, n_bytes
        assert size.kind == sending.kind
