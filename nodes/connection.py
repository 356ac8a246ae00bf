"""The client's end of the data plane: one lasting connection per server, shared by all requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from nodes import wire
from nodes.clock import Clock
from nodes.links import DelayLine, DelayProfile
from nodes.parts import Receiver, Sender, messages

OnAnswer = Callable[[wire.Answer | None, float], None]
"""Called with (answer, received_at_s); the answer is ``None`` when the connection is lost."""


class Answered(NamedTuple):
    """An answer other than an error, and when its request was sent and it was received (scenario seconds)."""

    frame: wire.Ok | wire.Out | wire.Result
    sent_at_s: float
    received_at_s: float


WARM_BYTES = 8 * 1024**2
"""Most bytes on their way at once while connections are warmed. They take twice as much memory here."""


class ServerError(Exception):
    """The server answered with an error frame. ``code`` is one of those in ``nodes.wire``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class ConnectionLost(Exception):
    """The connection to the server is gone."""


@dataclass(eq=False)
class _Channel:
    """One WebSocket and its requests, by id.

    ``waiting``: requests that wait for their answer. ``abandoned``: sessions whose opening was cancelled
    before its answer came. ``listeners``: what is called with further answers to a request.
    """

    socket: aiohttp.ClientWebSocketResponse
    sender: Sender
    number: int
    waiting: dict[int, asyncio.Future[tuple[wire.Answer, float]]] = field(default_factory=dict)
    abandoned: dict[int, str] = field(default_factory=dict)
    listeners: dict[int, OnAnswer] = field(default_factory=dict)
    reader: asyncio.Task[None] | None = None

    def fail(self, why: str) -> None:
        """Fail all requests that wait. Their futures stay in no frame that lasts: they hold what was asked."""
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(ConnectionLost(why))


class Connection:
    """A connection to one server. ``up`` and ``down`` delay messages where the network does not.

    ``generation`` counts how often it was opened; a session belongs to one generation and ends with it.
    ``is_doubted``: the server has failed this client and has not answered since.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        clock: Clock,
        up: DelayProfile | None = None,
        down: DelayProfile | None = None,
        max_payload_bytes: int = wire.MAX_PAYLOAD_BYTES,
        seed: str = "",
    ) -> None:
        self._http = http
        self._url = url
        self._clock = clock
        self._up = DelayLine(up, clock, random.Random(f"{seed}:up")) if up else None
        self._down = DelayLine(down, clock, random.Random(f"{seed}:down")) if down else None
        self._max_payload_bytes = max_payload_bytes
        self._channel: _Channel | None = None
        self._opening = asyncio.Lock()
        self._next_id = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.generation = 0
        self.is_doubted = False

    async def open(self) -> None:
        """Connects. Raises ``aiohttp.ClientError`` or ``OSError`` when the server cannot be reached."""
        ws = await self._http.ws_connect(
            self._url,
            compress=0,
            autoping=True,
            max_msg_size=min(self._max_payload_bytes, wire.PART_BYTES) + wire.FRAME_OVERHEAD_BYTES,
        )
        raw = ws.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.generation += 1
        self._channel = channel = _Channel(ws, Sender(ws), self.generation)
        channel.reader = self._later(self._read(channel))

    async def ready(self) -> int:
        """Connects if the connection is not there; returns the generation.

        Raises ``ConnectionLost`` when the server cannot be reached.
        """
        async with self._opening:  # sessions that need it at once share one attempt
            if self._is_closed:
                raise ConnectionLost(f"the connection to {self._url} was closed")
            if not self.has(self.generation):
                try:
                    await self.open()
                except (aiohttp.ClientError, OSError) as error:
                    raise ConnectionLost(f"{self._url}: {error}") from error
            return self.generation

    def has(self, generation: int) -> bool:
        """Returns whether the connection of that generation is still there."""
        channel = self._channel
        return channel is not None and channel.number == generation and not channel.socket.closed

    def move(self, url: str) -> None:
        """Uses another URL for the next connection."""
        self._url = url

    def change_links(self, up: DelayProfile | None, down: DelayProfile | None) -> None:
        """Delays messages sent from now on by these profiles; ``None`` leaves a direction as it is."""
        for line, profile in ((self._up, up), (self._down, down)):
            if profile is not None:
                assert line is not None, "the kernel delays messages: there is no link to change here"
                line.change(profile)

    def next_id(self) -> int:
        """Returns a number that no other request on this connection has."""
        self._next_id += 1
        return self._next_id

    async def ask(
        self, request: wire.Request, *, generation: int | None = None, on_answer: OnAnswer | None = None
    ) -> Answered:
        """Sends a request with an id from ``next_id`` and returns its answer.

        ``on_answer`` is called with further answers to it until ``ignore`` is called with its id.

        Raises ``ServerError`` for an error frame and ``ConnectionLost`` when no answer can come, or when
        the connection of ``generation`` is gone. If opening a session is cancelled, the session is closed.
        """
        channel = self._channel
        if channel is None or channel.socket.closed:
            raise ConnectionLost(f"not connected to {self._url}")
        if generation is not None and generation != channel.number:
            raise ConnectionLost(f"the connection to {self._url} was lost and opened again")
        future: asyncio.Future[tuple[wire.Answer, float]] = asyncio.get_running_loop().create_future()
        channel.waiting[request.id] = future
        is_accepted = False
        if on_answer is not None:
            channel.listeners[request.id] = on_answer
        packed = messages(request)
        sent_at_s = self._clock.now_s()
        is_sent = False
        try:
            if self._up is not None:
                await self._carry(channel, self._up, sum(map(len, packed)))
            is_sent = True
            await channel.sender.send_messages(packed)
            frame, received_at_s = await future
            is_accepted = not isinstance(frame, wire.Error)
        except (ConnectionError, aiohttp.ClientError) as error:
            raise ConnectionLost(f"{self._url}: {error}") from error
        except asyncio.CancelledError:
            if isinstance(request, wire.Opening) and is_sent:
                self._abandon(channel, request, future)
            raise
        finally:
            channel.waiting.pop(request.id, None)
            if not is_accepted:
                channel.listeners.pop(request.id, None)
            del future  # its exception would keep this stack frame alive, and with it the payload
        if isinstance(frame, wire.Error):
            raise ServerError(frame.code, frame.message)
        return Answered(frame, sent_at_s, received_at_s)

    def _abandon(
        self, channel: _Channel, request: wire.Opening, answer: asyncio.Future[tuple[wire.Answer, float]]
    ) -> None:
        """Closes the session of an opening that was cancelled, if the server opens it or has opened it."""
        if answer.cancelled() or not answer.done():
            channel.abandoned[request.id] = request.session
        elif answer.exception() is None and isinstance(answer.result()[0], wire.Ok):
            # The answer came at the moment of the cancellation.
            self.forget(request.session, channel.number)

    def ignore(self, request_id: int, generation: int) -> None:
        """Drops further answers to that request."""
        if self._channel is not None and self._channel.number == generation:
            self._channel.listeners.pop(request_id, None)

    def forget(self, session: str, generation: int) -> None:
        """Closes a session in the background. Sessions of a lost connection are closed already."""
        if self.has(generation):
            self._later(self._forget(session, generation))

    async def _forget(self, session: str, generation: int) -> None:
        with contextlib.suppress(ServerError, ConnectionLost):  # then the session has ended as well
            await self.ask(wire.Close(self.next_id(), session), generation=generation)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _read(self, channel: _Channel) -> None:
        reason = "was closed"
        receiver: Receiver[wire.Answer] = Receiver(self._max_payload_bytes)
        n_bytes = 0
        try:
            async for message in channel.socket:
                if message.type != aiohttp.WSMsgType.BINARY:
                    reason = f"carried a {message.type.name} message"
                    break
                n_bytes += len(message.data)
                frame = receiver.take(wire.unpack_answer(message.data))
                del message  # or it would be kept until the next one comes
                if frame is None:
                    continue
                if self._down is None:
                    self._deliver(channel, frame, self._clock.now_s())
                else:
                    self._later(self._deliver_late(channel, frame, n_bytes, self._down))
                del frame
                n_bytes = 0
        except wire.FrameError as error:
            reason = f"carried an invalid answer: {error}"
        finally:
            channel.fail(f"the connection to {self._url} {reason}")
            for listener in list(channel.listeners.values()):
                listener(None, self._clock.now_s())
            channel.listeners.clear()
            await channel.socket.close()  # nothing is read any more, so no request may be sent

    async def _deliver_late(
        self, channel: _Channel, frame: wire.Answer, n_bytes: int, down: DelayLine
    ) -> None:
        with contextlib.suppress(ConnectionError):  # _carry has closed the socket: all waiting requests fail
            await self._carry(channel, down, n_bytes)
            self._deliver(channel, frame, self._clock.now_s())

    async def _carry(self, channel: _Channel, line: DelayLine, n_bytes: int) -> None:
        """As ``DelayLine.carry``. If the link gives up, closes the connection, as the kernel would."""
        try:
            await line.carry(n_bytes)
        except ConnectionError:
            await channel.socket.close()
            raise

    def _deliver(self, channel: _Channel, frame: wire.Answer, received_at_s: float) -> None:
        future = channel.waiting.get(frame.id)
        if future is not None and not future.done():
            future.set_result((frame, received_at_s))
        elif frame.id in channel.listeners:
            channel.listeners[frame.id](frame, received_at_s)
        session = channel.abandoned.pop(frame.id, None)
        if session is not None and isinstance(frame, wire.Ok):
            self.forget(session, channel.number)

    async def close(self) -> None:
        """Closes the connection; it cannot be opened again."""
        self._is_closed = True
        reader = None
        if self._channel is not None:
            await self._channel.socket.close()
            reader = self._channel.reader
        for task in self._tasks:
            if task is not reader:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def warm(connections: Iterable[Connection], n_bytes: int) -> None:
    """Opens every connection and sends ``n_bytes`` over it and back.

    Raises ``ConnectionLost``, ``ServerError``.
    """
    payload = bytes(n_bytes)
    room = asyncio.Semaphore(max(1, WARM_BYTES // max(1, n_bytes)))

    async def warm_one(connection: Connection) -> None:
        async with room:
            generation = await connection.ready()
            if n_bytes:
                await connection.ask(wire.Ping(connection.next_id(), payload), generation=generation)

    await asyncio.gather(*map(warm_one, connections))
