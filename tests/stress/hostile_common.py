"""What hostile targets have in common: an event loop of their own, and connections that may send any bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

PATIENCE_S = 5.0
_SMALL_BUFFER_BYTES = 4096
_LINGER_S = 15.0
"""Tasks that are ending may take 10 s."""


class LoopTarget:
    """A target that runs in this process. ``n_resident``: number of its tasks that always run."""

    def __init__(self, n_resident: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self._n_resident = n_resident
        self._failures: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._unhandled)

    def _unhandled(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _play(self, case: Coroutine[Any, Any, None]) -> None:
        """Runs ``case``. Raises ``AssertionError`` if any task failed meanwhile."""
        try:
            self._loop.run_until_complete(case)
        finally:
            failures = self._failures.copy()
            self._failures.clear()
        assert not failures, "\n".join(failures)

    def n_left(self) -> int:
        """Returns the number of tasks on the loop, after waiting for those that are ending."""
        deadline = time.monotonic() + _LINGER_S
        while len(asyncio.all_tasks(self._loop)) > self._n_resident and time.monotonic() < deadline:
            self._loop.run_until_complete(asyncio.sleep(0.02))
        return len(asyncio.all_tasks(self._loop))


async def connected(address: tuple[str, int], takes_little: bool) -> socket.socket:
    """Returns a socket that is connected to ``address``. ``takes_little``: its receive buffer is small."""
    raw = socket.socket()
    if takes_little:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER_BYTES)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, address)
    return raw


class RawLine:
    """A client's end of a connection that may send any bytes and hang up in any way."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.deaf = self._ended = False

    def send(self, data: bytes) -> None:
        """Sends bytes unchanged. Does nothing if the connection is closing."""
        if not self._ended and not self.writer.is_closing():
            self.writer.write(data)

    def leave(self, how: str) -> None:
        """Hang up: ``reset`` with an RST, ``close`` without, ``half`` only stops sending."""
        raw = self.writer.get_extra_info("socket")
        if how == "reset" and raw is not None:
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "half":
            if not self._ended and not self.writer.is_closing():
                with contextlib.suppress(OSError):  # the server was faster
                    self.writer.write_eof()
            self._ended = True
        else:
            self.writer.transport.abort()
