"""A server's listening socket: how many connections may be open, and how long one may say nothing.

The web server below counts requests; a connection that never sends one would be counted nowhere.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

log = logging.getLogger(__name__)

SPARE_CONNECTIONS = 64
"""Above the WebSockets that a server takes: health, metrics, and those that are told that there is no room."""
HELLO_S = 10.0
"""Real seconds until a connection must have sent its first request."""
_REFUSED = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 41\r\nConnection: close\r\n\r\n"
    b"too many connections to this server's port"
)


class _Refusal(asyncio.Protocol):
    """Says that there is no room, and hangs up."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_REFUSED)
        transport.close()


class Gate:
    """``runner`` on ``address``; ``port`` is the one that was taken. Made by ``open_gate``."""

    def __init__(self, runner: web.AppRunner, max_connections: int, hello_s: float) -> None:
        self._runner = runner
        self._max_connections = max_connections
        self._hello_s = hello_s
        self._listener: asyncio.Server | None = None
        self._full = False
        self.port = 0

    async def open(self, address: str, port: int) -> None:
        """Raises ``OSError`` when the port cannot be had."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._admit, address, port, backlog=128)
        self.port = self._listener.sockets[0].getsockname()[1]

    def _admit(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None, "a connection before the runner was set up"
        full = len(server.connections) >= self._max_connections
        if full != self._full:
            self._full = full
            log.warning(
                "%d connections are open: %s", self._max_connections, "no more" if full else "room again"
            )
        if full:
            return _Refusal()
        handler = server()
        asyncio.get_running_loop().call_later(self._hello_s, _hang_up_on_the_silent, handler)
        return handler

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()


def _hang_up_on_the_silent(handler: asyncio.Protocol) -> None:
    """Aborts a connection whose first request is not complete."""
