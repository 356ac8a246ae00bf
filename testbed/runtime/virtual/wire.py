"""Control connections inside one process: what is written arrives at the same instant of virtual time."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

from nodes import control


class _End(asyncio.Transport):
    """One end of a connection. Its protocol is called in ``context``."""

    peer: _End

    def __init__(self, loop: asyncio.AbstractEventLoop, context: contextvars.Context) -> None:
        super().__init__()
        self._loop = loop
        self.context = context
        self._is_closing = False
        self.reader = asyncio.StreamReader(loop=loop)
        self._protocol = asyncio.StreamReaderProtocol(self.reader, loop=loop)
        self.writer = asyncio.StreamWriter(self, self._protocol, self.reader, loop)

    def begin(self) -> None:
        self.context.run(self._protocol.connection_made, self)

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Does nothing: control messages are small, and readers keep up."""

    def resume_reading(self) -> None:
        """See ``pause_reading``."""

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self._loop.call_soon(self.peer._receive, bytes(data), context=self.peer.context)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self.peer._receive, b"", context=self.peer.context)
            self._loop.call_soon(self._protocol.connection_lost, None, context=self.context)

    abort = close

    def _receive(self, data: bytes) -> None:
        if self._is_closing:
            return
        if data:
            self._protocol.data_received(data)
        else:
            self._protocol.eof_received()
            self.close()


def connect(handlers: control.Handlers, there: contextvars.Context) -> tuple[control.Peer, control.Peer]:
    """Make a connection; returns the node's end (in this context) and the orchestrator's (in ``there``)."""
    loop = asyncio.get_running_loop()
    near, far = _End(loop, contextvars.copy_context()), _End(loop, there)
    near.peer, far.peer = far, near
    near.begin()
    far.begin()
    return (
        control.Peer(near.reader, near.writer, handlers, control.FROM_ORCHESTRATOR, control.FROM_NODES),
        control.Peer(far.reader, far.writer, {}, control.FROM_NODES, control.FROM_ORCHESTRATOR),
    )
