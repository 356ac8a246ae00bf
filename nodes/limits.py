"""A server's limits on what clients may send, and how it reports that they were exceeded."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from aiohttp import WSCloseCode, web

from nodes import wire

HELLO_S = 10.0
"""Event-loop seconds, real or virtual, that a connection without a request stays open."""
LAST_WORDS_S = 10.0
"""Event-loop seconds, real or virtual, for a peer that broke the protocol to read the error and hang up."""


@dataclass
class ServerLimits:
    """Limits on what clients may send.

    ``max_payload_bytes`` is for a frame's whole payload, over all its parts.

    A step is pending until its answer is handed to the kernel. While a connection has more than
    ``max_pending_bytes`` (payloads of pending steps) or ``max_unread_bytes`` (answers that its client has not
    read), nothing is read from it, so TCP stops the sender.
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
    """A session without a step for this long is closed (scenario seconds)."""


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
    """Returns an error's message, cut to the length that the wire allows."""
    return str(error)[: wire.MAX_ERROR_CHARACTERS]


def shown(name: str) -> str:
    """Returns a name that a client chose in a form for logs and messages, without control characters."""
    return ascii(name)[1:-1]
