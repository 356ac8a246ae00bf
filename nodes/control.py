"""The control plane: orchestrator and nodes talk over Unix domain sockets, off the emulated network.

A message is a 4-byte length and a msgpack array: ``[0, id, method, params]`` asks,
``[1, id, result]`` answers, ``[2, id, text]`` answers with an error, ``[3, method, params]`` tells.

The orchestrator trusts no node with its memory: what it takes is small, and all that may wait is
bounded (``ControlLimits``). A node trusts the orchestrator that forked it, and takes whole workloads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

log = logging.getLogger(__name__)

_ASK, _ANSWER, _FAIL, _TELL = range(4)
_FORMS: dict[int, tuple[type, ...]] = {
    _ASK: (int, str, list),
    _ANSWER: (int, object),
    _FAIL: (int, str),
    _TELL: (str, list),
}
"""What comes after the first element of every message."""
_MAX_SOCKET_PATH = 100
_MAX_ERROR_CHARACTERS = 2000
_SHOWN_CHARACTERS = 40

Handler = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class ControlLimits:
    """What one end takes from the other.

    ``max_items`` bounds every list and table in a message: a few bytes may claim a list of millions,
    which would be made before its elements are missed. ``max_pending``: questions being answered.
    ``max_unread_bytes``: answers that the other side does not read.
    """

    max_message_bytes: int
    max_items: int
    max_pending: int = 10_000
    max_unread_bytes: int = 16 * 1024**2


FROM_ORCHESTRATOR = ControlLimits(256 * 1024**2, 16 * 1024**2)
"""A client's whole workload comes in one message: ten million requests of 26 bytes."""
FROM_NODES = ControlLimits(1024**2, 4096)
"""Questions for routes, states, counters: well below 1 kB each."""
MAX_MESSAGE_BYTES = FROM_ORCHESTRATOR.max_message_bytes
MAX_PEERS = 4096
"""Control connections of one run."""


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


def unpack(body: bytes, limits: ControlLimits) -> list[Any]:
    """A message, checked. Raises ``ControlError``."""
    try:
        message: Any = msgpack.unpackb(
            body,
            strict_map_key=False,
            max_array_len=min(limits.max_items, len(body)),
            max_map_len=min(limits.max_items, len(body)),
            max_ext_len=0,
        )
    except Exception as error:  # msgpack raises a dozen kinds, some with a piece of the message in their text
        raise ControlError(f"a control message that cannot be read: {type(error).__name__}") from error
    if not isinstance(message, list):
        raise ControlError("a control message that is no list")
    kind = message[0] if message else None
    form = _FORMS.get(kind) if type(kind) is int else None
    if form is None or len(message) != len(form) + 1:
        raise ControlError("a control message of an unknown form")
    if not all(isinstance(field, wanted) for field, wanted in zip(message[1:], form, strict=True)):
        raise ControlError("a control message with a field of another type")
    return message


class Peer:
    """One end of a control connection. ``handlers`` maps a method to a coroutine function.

    ``limits`` is what this end takes, ``sends`` what the other one does.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handlers: dict[str, Handler],
        limits: ControlLimits = FROM_NODES,
        sends: ControlLimits = FROM_ORCHESTRATOR,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.handlers = handlers
        self._limits = limits
        self._sends = sends
        self._unread_bytes = 0
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
                if size > self._limits.max_message_bytes:
                    raise ControlError(
                        f"a control message of {size} bytes; at most {self._limits.max_message_bytes} are taken"
                    )
                self._dispatch(unpack(await self._reader.readexactly(size), self._limits))
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
            if len(self._tasks) >= self._limits.max_pending:
                raise ControlError(
                    f"more than {self._limits.max_pending} control messages wait to be handled"
                )
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
            handler = self.handlers.get(method)
            if handler is None:
                raise ControlError(f"there is no method {method[:_SHOWN_CHARACTERS]!r}")
            result = await handler(*params)
            if kind == _ASK:
                self._answer([_ANSWER, message[1], result])
        except Exception as error:
            if kind == _TELL:  # nobody waits for an answer: the log is where this can be seen
                log.exception("what was told by %r could not be done", method[:_SHOWN_CHARACTERS])
                return
            text = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS]
            with contextlib.suppress(ControlError):  # whoever asked is gone and needs no answer
                self._answer([_FAIL, message[1], text])

    def _answer(self, message: list[Any]) -> None:
        """Send an answer, unless too many of them wait for the other side to read; then hang up."""
        if self._writer.transport.get_write_buffer_size() == 0:
            self._unread_bytes = 0
        elif self._unread_bytes > self._limits.max_unread_bytes:
            log.warning("%d bytes of answers are not read: closing a control connection", self._unread_bytes)
            self._writer.transport.abort()
            return
        self._unread_bytes += self._send(message)

    def _send(self, message: list[Any]) -> int:
        if self._writer.is_closing():
            raise ControlError("the control connection is closed")
        body = msgpack.packb(message)
        if len(body) > self._sends.max_message_bytes:
            raise ControlError(
                f"a control message of {len(body)} bytes; the other side takes {self._sends.max_message_bytes}"
            )
        self._writer.write(len(body).to_bytes(4, "big") + body)
        return len(body)

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


class Listener:
    """A socket that control connections come to, and those that are open."""

    def __init__(self, server: asyncio.AbstractServer, serving: set[asyncio.Task[Any]]) -> None:
        self._server = server
        self._serving = serving

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()

    async def ended(self) -> None:
        """Returns when all connections have ended; close them first."""
        await asyncio.gather(*self._serving, return_exceptions=True)


async def listen(path: Path, accept: Callable[[Peer], Awaitable[None]]) -> Listener:
    """Listen on ``path``, usable by its owner only; ``accept`` gets a fresh peer and must serve it.

    A peer that breaks the protocol loses its connection, and the log says why.
    """
    peers: set[Peer] = set()
    serving: set[asyncio.Task[Any]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        task.add_done_callback(serving.discard)
        peer = Peer(reader, writer, {}, FROM_NODES, FROM_ORCHESTRATOR)
        if len(peers) >= MAX_PEERS:
            log.warning("refused a control connection: %d are open", MAX_PEERS)
            peer.close()
            return
        peers.add(peer)
        try:
            await accept(peer)
        except ControlError as error:
            log.warning("closed a control connection: %s", error)
        finally:
            peers.discard(peer)
            peer.close()

    with _short_path(path) as name:
        mask = os.umask(0o177)
        try:
            return Listener(await asyncio.start_unix_server(connected, name), serving)
        finally:
            os.umask(mask)


async def connect(path: Path, handlers: dict[str, Handler]) -> Peer:
    """Connect to a listening orchestrator; the caller runs ``serve``."""
    with _short_path(path) as name:
        reader, writer = await asyncio.open_unix_connection(name)
    return Peer(reader, writer, handlers, FROM_ORCHESTRATOR, FROM_NODES)


async def until_stopped(peer: Peer, stopped: asyncio.Event) -> None:
    """Serve the control connection until ``stop`` arrives or the orchestrator is gone."""
    serving = asyncio.ensure_future(peer.serve())
    waiting = asyncio.ensure_future(stopped.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    waiting.cancel()
    for ended in await asyncio.gather(serving, waiting, return_exceptions=True):
        if isinstance(ended, ControlError):
            log.warning("closed the control connection: %s", ended)
