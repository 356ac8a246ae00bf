"""What a server takes from its clients at most, and what it still says to those who ask for more."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from aiohttp import WSCloseCode, web

from nodes import wire

HELLO_S = 10.0
"""Seconds of the event loop's time, real or virtual, that a connection which asks for nothing stays open."""
LAST_WORDS_S = 10.0
"""Seconds of the event loop's time, real or virtual, that a peer which broke the protocol has to take the reason
and to hang up."""


@dataclass
class ServerLimits:
    """Bounds on what clients may ask. ``max_payload_bytes`` bounds a frame's payload, in however many parts it comes.

    A step is pending until its answer is handed to the kernel. Over ``max_pending_bytes`` (payloads of a
    connection's pending steps) or ``max_unread_bytes`` (answers that its client does not take) nothing
    more is read from that connection until it is below again: TCP then stops the sender.
    """

    max_payload_bytes: int = 256 * 1024**2
    max_sessions_per_connection: int = 4096
    max_sessions: int = 65_536
    max_session_tokens: int = 100_000_000
    max_connections: int = 512
    max_connections_per_client: int = 256
    """From one address."""
    max_pending_steps: int = 4096
    """On one connection."""
    max_pending_bytes: int = 1024**3
    max_unread_bytes: int = 16 * 1024**2
    idle_s: float = 300.0
    """A session without a step for so long is closed (scenario seconds)."""


class ServerSocket(web.WebSocketResponse):
    """Sends an error frame before aiohttp closes a connection over an oversized message."""

    async def close(self, *, code: int = WSCloseCode.OK, message: bytes = b"", drain: bool = True) -> bool:
        if code == WSCloseCode.MESSAGE_TOO_BIG and not self.closed:
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self.send_bytes(
                        wire.pack(
                            wire.Error(-1, wire.TOO_LARGE, "the frame is larger than this server accepts")
                        )
                    )
        return await super().close(code=code, message=message, drain=drain)


def cut(error: object) -> str:
    """What is said of an error over the wire."""
    return str(error)[: wire.MAX_ERROR_CHARACTERS]


def shown(name: str) -> str:
    """A name that a client chose, as logs and messages show it: no line ends, no control characters."""
    return ascii(name)[1:-1]
