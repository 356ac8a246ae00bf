"""The control plane: orchestrator and nodes talk over Unix domain sockets, off the emulated network.

On the wire a 4-byte length is followed by a msgpack array: ``[0, id, question]`` asks, ``[1, id, result]``
answers, ``[2, id, text]`` answers with an error, ``[3, message]`` needs no answer. ``nodes.messages`` has the
types.

No node can exhaust the orchestrator's memory: it accepts small messages only, and bounds all that may wait
(``ControlLimits``). A node trusts the orchestrator that forked it, and accepts whole workloads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import msgspec

from nodes.messages import A, Message, Question, answers

log = logging.getLogger(__name__)

_MAX_SOCKET_PATH = 100
_MAX_ERROR_CHARACTERS = 2000

Handler = Callable[[Any], Awaitable[Any]]
"""Carries out one type of message. What it returns is the answer to a question."""
Handlers = Mapping[type[Message], Handler]


class _Asked(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=0):
    id: int
    question: msgspec.Raw


class _Answered(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=1):
    id: int
    result: msgspec.Raw


class _Failed(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=2):
    id: int
    text: str


class _Told(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=3):
    message: msgspec.Raw


Envelope = _Asked | _Answered | _Failed | _Told
_envelopes: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(Envelope)


@dataclass(frozen=True)
class ControlLimits:
    """What one end accepts from the other: the size of a message, and what may wait.

    ``max_pending``: messages being handled. ``max_unread_bytes``: answers that the other side has not read.
    """

    max_message_bytes: int
    max_pending: int = 10_000
    max_unread_bytes: int = 16 * 1024**2


FROM_ORCHESTRATOR = ControlLimits(256 * 1024**2)
"""What nodes accept. A client's whole workload comes in one message: ten million requests of 26 bytes."""
FROM_NODES = ControlLimits(1024**2, max_pending=200_000)
"""What the orchestrator accepts.

Questions for routes, states and counters are well below 1 kB each; those for a route may wait in the
coordinator's queue.
"""
MAX_PEERS = 4096
"""Most control connections of one run."""


class ControlError(Exception):
    """The other side answered with an error, or is gone."""


@contextlib.contextmanager
def _short_path(path: Path) -> Any:
    """Yields ``path`` in a form that fits into a socket address, however deep the run directory is."""
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def unpack(body: bytes) -> Envelope:
    """Decodes an envelope, but not the message in it. Raises ``ControlError``."""
    return _read(_envelopes, body)


def _read(decoder: msgspec.msgpack.Decoder[A], data: bytes | msgspec.Raw) -> A:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)[:_MAX_ERROR_CHARACTERS]
        raise ControlError(f"a control message that cannot be read: {text}") from error


class Peer:
    """One end of a control connection. ``limits`` are this end's, ``sends`` those of the other end."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handlers: Handlers,
        limits: ControlLimits = FROM_NODES,
        sends: ControlLimits = FROM_ORCHESTRATOR,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.take(handlers)
        self._limits = limits
        self._sends = sends
        self._unread_bytes = 0
        self._waiting: dict[int, tuple[asyncio.Future[Any], msgspec.msgpack.Decoder[Any]]] = {}
        self._next_id = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, handlers: Handlers) -> None:
        """Accepts messages of these types, and no others, from now on."""
        self._handlers = handlers
        types = tuple(handlers)
        self._messages = msgspec.msgpack.Decoder(Union[types]) if types else None  # noqa: UP007 - not known before

    async def serve(self) -> None:
        """Handles messages until the other side is gone; then every pending ``ask`` fails.

        Raises ``ControlError`` when the other side does not speak the protocol.
        """
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(4), "big")
                if size > self._limits.max_message_bytes:
                    raise ControlError(
                        f"a control message of {size} bytes; at most {self._limits.max_message_bytes} allowed"
                    )
                self._dispatch(unpack(await self._reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            for future, _ in self._waiting.values():
                if not future.done():
                    future.set_exception(ControlError("the control connection was closed"))
            self._waiting.clear()
            self._writer.close()

    def _dispatch(self, envelope: Envelope) -> None:
        match envelope:
            case _Asked():
                self._begin(envelope.question, envelope.id)
            case _Told():
                self._begin(envelope.message, None)
            case _Answered():
                if (asked := self._asked(envelope.id)) is not None:
                    future, decoder = asked
                    future.set_result(_read(decoder, envelope.result))
            case _Failed():
                if (asked := self._asked(envelope.id)) is not None:
                    asked[0].set_exception(ControlError(envelope.text))

    def _asked(self, number: int) -> tuple[asyncio.Future[Any], msgspec.msgpack.Decoder[Any]] | None:
        """Returns the future and the decoder of a question's answer; ``None`` if nobody waits for it."""
        asked = self._waiting.get(number)
        return None if asked is None or asked[0].done() else asked

    def _begin(self, data: msgspec.Raw, asked_as: int | None) -> None:
        if len(self._tasks) >= self._limits.max_pending:
            raise ControlError(f"more than {self._limits.max_pending} control messages wait to be handled")
        if self._messages is None:
            raise ControlError("a control message where none is accepted")
        task = asyncio.ensure_future(self._handle(_read(self._messages, data), asked_as))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, message: Message, asked_as: int | None) -> None:
        """Carries out a message. ``asked_as`` is its number if it is a question."""
        try:
            result = await self._handlers[type(message)](message)
            if asked_as is not None:
                self._answer((_Answered.__struct_config__.tag, asked_as, result))
        except Exception as error:
            if asked_as is None:  # nobody waits for an answer, so only the log can show the error
                log.exception("a %s could not be carried out", type(message).__name__)
                return
            text = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS]
            with contextlib.suppress(ControlError):  # the other side is gone and needs no answer
                self._answer((_Failed.__struct_config__.tag, asked_as, text))

    def _answer(self, envelope: tuple[Any, ...]) -> None:
        """Sends an answer. If the other side has too many of them unread, closes the connection instead."""
        if self._writer.transport.get_write_buffer_size() == 0:
            self._unread_bytes = 0
        elif self._unread_bytes > self._limits.max_unread_bytes:
            log.warning("%d bytes of answers are not read: closing a control connection", self._unread_bytes)
            self._writer.transport.abort()
            return
        self._unread_bytes += self._send(envelope)

    def _send(self, envelope: tuple[Any, ...]) -> int:
        if self._writer.is_closing():
            raise ControlError("the control connection is closed")
        body = msgspec.msgpack.encode(envelope)
        if len(body) > self._sends.max_message_bytes:
            raise ControlError(
                f"a control message of {len(body)} bytes;"
                f" the other side accepts {self._sends.max_message_bytes}"
            )
        self._writer.write(len(body).to_bytes(4, "big") + body)
        return len(body)

    def notify(self, message: Message) -> None:
        """Sends a message that has no answer. Raises ``ControlError`` on a closed connection."""
        self._send((_Told.__struct_config__.tag, message))

    async def ask(self, question: Question[A]) -> A:
        """Sends ``question`` and returns its answer. Raises ``ControlError`` if it fails on the other side."""
        self._next_id += 1
        number = self._next_id
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._send((_Asked.__struct_config__.tag, number, question))
        self._waiting[number] = future, answers(type(question))
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        self._writer.close()


class Listener:
    """A socket that accepts control connections, and the connections that are open."""

    def __init__(self, server: asyncio.AbstractServer, serving: set[asyncio.Task[Any]]) -> None:
        self._server = server
        self._serving = serving

    def close(self) -> None:
        """Accepts no more connections."""
        self._server.close()

    async def ended(self) -> None:
        """Waits until all connections have ended. The caller closes them first."""
        await asyncio.gather(*self._serving, return_exceptions=True)


async def listen(path: Path, accept: Callable[[Peer], Awaitable[None]]) -> Listener:
    """Listens on ``path``, usable by its owner only.

    ``accept`` is called with every new peer and must serve it.

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


async def connect(path: Path, handlers: Handlers) -> Peer:
    """Connects to a listening orchestrator; the caller runs ``serve``."""
    with _short_path(path) as name:
        reader, writer = await asyncio.open_unix_connection(name)
    return Peer(reader, writer, handlers, FROM_ORCHESTRATOR, FROM_NODES)


async def until_stopped(peer: Peer, stopped: asyncio.Event) -> None:
    """Serves the control connection until ``stopped`` is set or the orchestrator is gone."""
    serving = asyncio.ensure_future(peer.serve())
    waiting = asyncio.ensure_future(stopped.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    waiting.cancel()
    for ended in await asyncio.gather(serving, waiting, return_exceptions=True):
        if isinstance(ended, ControlError):
            log.warning("closed the control connection: %s", ended)
