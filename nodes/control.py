"""The control plane: orchestrator and nodes talk over Unix domain sockets, off the emulated network.

A message is a 4-byte length and a msgpack array: ``[0, id, method, params]`` asks,
``[1, id, result]`` answers, ``[2, id, text]`` answers with an error, ``[3, method, params]`` tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgpack

_ASK, _ANSWER, _FAIL, _TELL = range(4)
_FORMS = [[4, _ASK], [3, _ANSWER], [3, _FAIL], [3, _TELL]]
"""Length and first element of every message."""
MAX_MESSAGE_BYTES = 256 * 1024**2
_MAX_SOCKET_PATH = 100

Handler = Callable[..., Awaitable[Any]]


class ControlError(Exception):
    """The other side answered with an error, or is gone."""


@contextlib.contextmanager
def _short_path(path: Path) -> Any:
    """``path`` in a form that fits into a socket address, however deep the run directory is."""
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _unpack(body: bytes) -> list[Any]:
    try:
        message = msgpack.unpackb(body, strict_map_key=False)
    except ValueError as error:  # what msgpack's errors have in common
        raise ControlError(f"a control message that is not msgpack: {error}") from error
    if not isinstance(message, list) or [len(message), *message[:1]] not in _FORMS:
        raise ControlError("a control message of an unknown form")
    return message


class Peer:
    """One end of a control connection. ``handlers`` maps a method to a coroutine function."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handlers: dict[str, Handler],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.handlers = handlers
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Handle messages until the other side is gone; then every pending ``ask`` fails.

        Raises ``ControlError`` when the other side does not speak the protocol.
        """
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(4), "big")
                if size > MAX_MESSAGE_BYTES:
                    raise ControlError(f"a control message of {size} bytes")
                self._dispatch(_unpack(await self._reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ControlError("the control connection was closed"))
            self._waiting.clear()
            self._writer.close()

    def _dispatch(self, message: list[Any]) -> None:
        kind = message[0]
        if kind in (_ASK, _TELL):
            task = asyncio.ensure_future(self._handle(kind, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        future = self._waiting.pop(message[1], None)
        if future is None or future.done():
            return
        if kind == _ANSWER:
            future.set_result(message[2])
        else:
            future.set_exception(ControlError(message[2]))

    async def _handle(self, kind: int, message: list[Any]) -> None:
        method, params = message[-2], message[-1]
        try:
            result = await self.handlers[method](*params)
            if kind == _ASK:
                self._send([_ANSWER, message[1], result])
        except Exception as error:
            if kind == _TELL:
                raise
            with contextlib.suppress(ControlError):  # whoever asked is gone and needs no answer
                self._send([_FAIL, message[1], f"{type(error).__name__}: {error}"])

    def _send(self, message: list[Any]) -> None:
        if self._writer.is_closing():
            raise ControlError("the control connection is closed")
        body = msgpack.packb(message)
        self._writer.write(len(body).to_bytes(4, "big") + body)

    def tell(self, method: str, *params: Any) -> None:
        """Send without waiting for an answer. Raises ``ControlError`` on a closed connection."""
        self._send([_TELL, method, params])

    async def ask(self, method: str, *params: Any) -> Any:
        """Call ``method`` on the other side. Raises ``ControlError`` if it fails there."""
        self._next_id += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._send([_ASK, self._next_id, method, params])
        self._waiting[self._next_id] = future
        return await future

    def close(self) -> None:
        self._writer.close()


async def listen(path: Path, accept: Callable[[Peer], Awaitable[None]]) -> asyncio.AbstractServer:
    """Listen on ``path``, readable by its owner only; ``accept`` gets a fresh peer and must serve it."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept(Peer(reader, writer, {}))

    with _short_path(path) as name:
        mask = os.umask(0o077)
        try:
            return await asyncio.start_unix_server(connected, name)
        finally:
            os.umask(mask)


async def connect(path: Path, handlers: dict[str, Handler]) -> Peer:
    """Connect to a listening orchestrator; the caller runs ``serve``."""
    with _short_path(path) as name:
        reader, writer = await asyncio.open_unix_connection(name)
    return Peer(reader, writer, handlers)


async def until_stopped(peer: Peer, stopped: asyncio.Event) -> None:
    """Serve the control connection until ``stop`` arrives or the orchestrator is gone."""
    serving = asyncio.ensure_future(peer.serve())
    waiting = asyncio.ensure_future(stopped.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    waiting.cancel()
