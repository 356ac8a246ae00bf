"""The client's end of the data plane: one lasting connection per server, shared by all requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import aiohttp

from nodes import wire
from nodes.clock import Clock
from nodes.errors import ConnectionLost, ServerError
from nodes.framesizes import WARM_BYTES
from nodes.links import DelayedMessages, DelayLine, DelayProfile
from nodes.outbox import Class
from nodes.parts import Messages, Receiver, Sender, Sending, class_of
from nodes.watchdog import Limit, Overdue, Watchdog
from policies.links import UNSENT_BYTES

_CLOSING_S = 0.5
"""Event-loop seconds that a connection's closing waits for the server's confirmation: a link may be cut."""
_HOST = {"Host": "testbed.invalid"}
"""The request for a WebSocket is as long whatever the server's address is."""
AnyAnswer = wire.Answer | wire.More | wire.Drop | wire.Got
OnAnswer = Callable[[wire.Answer | None, float], None]
"""Called with (answer, received_at_s); the answer is ``None`` when the connection is lost."""


class Answered(NamedTuple):
    """An answer other than an error, and when its request was sent and it was received (scenario seconds)."""

    frame: wire.Ok | wire.Found | wire.Out | wire.Result
    sent_at_s: float
    received_at_s: float


class _Arrived:
    """A message from the server, on a link that delays it here."""

    __slots__ = ("_n_bytes", "frame", "is_done", "is_whole", "kind")

    def __init__(self, frame: AnyAnswer, n_bytes: int, kind: Class) -> None:
        self.frame = frame
        self._n_bytes = n_bytes
        self.kind = kind
        self.is_whole = self.is_done = True

    def __len__(self) -> int:
        """Its bytes."""
        return self._n_bytes

    def next(self) -> _Arrived:
        return self

    def end(self, now_s: float, error: ConnectionError | None = None) -> None:
        """Nobody waits for it."""


@dataclass(eq=False)
class _Channel:
    """One WebSocket and its requests, by id.

    ``waiting``: requests that wait for their answer. ``listeners``: what is called with further answers to a request.
    ``heard_at_s``: when anything came from the server. ``lines``: messages that are delayed here; ``queue``: those from the
    server that wait for the link to be free.
    """

    socket: aiohttp.ClientWebSocketResponse
    number: int
    receiver: Receiver[wire.Answer]
    heard_at_s: float
    sender: Sender = field(init=False)
    waiting: dict[int, asyncio.Future[tuple[wire.Answer, float]]] = field(default_factory=dict)
    listeners: dict[int, OnAnswer] = field(default_factory=dict)
    lines: list[DelayedMessages[Any]] = field(default_factory=list)
    queue: Messages[_Arrived] | None = None
    reader: asyncio.Task[None] | None = None

    def fail(self, why: str) -> None:
        """Fail all requests that wait. Their futures stay in no frame that lasts: they hold what was asked."""
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(ConnectionLost(why))
                future.exception()  # who asked may have stopped waiting: then nobody else looks at it

    def end(self) -> None:
        """Sends and delivers nothing more."""
        self.sender.end()
        if self.queue is not None:
            self.queue.end()
        for line in self.lines:
            line.close()


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
        self._next_id = wire.FIRST_ID
        self._tasks: set[asyncio.Task[None]] = set()
        self._closings: set[asyncio.Task[None]] = set()
        """Those of them that close sessions."""
        self._is_closed = False
        self.generation = 0
        self.is_doubted = False

    async def open(self) -> None:
        """Connects. Raises ``aiohttp.ClientError`` or ``OSError`` when the server cannot be reached."""
        ws = await self._http.ws_connect(
            self._url,
            headers=_HOST,
            compress=0,
            autoping=True,
            timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSING_S),
            max_msg_size=min(self._max_payload_bytes, wire.PART_BYTES) + wire.FRAME_OVERHEAD_BYTES,
        )
        prepare(ws.get_extra_info("socket"))
        self.generation += 1
        receiver: Receiver[wire.Answer] = Receiver(self._max_payload_bytes)
        self._channel = channel = _Channel(ws, self.generation, receiver, self._clock.now_s())
        hang_up = partial(self._hang_up, channel)
        write: Callable[[bytes], Awaitable[None]] = ws.send_bytes
        if self._up is not None:
            line = DelayedMessages(self._up, self._clock, ws.send_bytes, hang_up)
            channel.lines.append(line)
            write = line.send
        channel.sender = Sender(write, self._clock.now_s, hang_up, at_once=self._up is None)
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
        return self._next_id - 1

    async def ask(
        self,
        request: wire.Request,
        *,
        generation: int | None = None,
        on_answer: OnAnswer | None = None,
        limit: Limit | None = None,
        on_left: Callable[[], object] | None = None,
    ) -> Answered:
        """Sends a request with an id from ``next_id`` and returns its answer.

        ``on_answer`` is called with further answers to it until ``ignore`` is called with its id. ``limit`` is made to
        count from when the request has left, or anything has come from the server: a server is not overdue because
        much waits for the link. ``on_left`` is called when it has left.

        The connection owns what is sent. If the call is cancelled, parts that have not been sent are dropped, and the
        server is told; an opening that is sent, or will be answered, is closed. Nothing else changes.

        Raises ``ServerError`` for an error frame and ``ConnectionLost`` when no answer can come, or when
        the connection of ``generation`` is gone.
        """
        channel = self._channel
        if channel is None or channel.socket.closed:
            raise ConnectionLost(f"not connected to {self._url}")
        if generation is not None and generation != channel.number:
            raise ConnectionLost(f"the connection to {self._url} was lost and opened again")
        future: asyncio.Future[tuple[wire.Answer, float]] = asyncio.get_running_loop().create_future()
        channel.waiting[request.id] = future
        is_accepted = is_abandoned = False
        if on_answer is not None:
            channel.listeners[request.id] = on_answer
        sending = Sending(request, on_left)
        sent_at_s = self._clock.now_s()
        if limit is not None:
            limit.since = partial(_quiet_since_s, channel, sending)
        try:
            await channel.sender.begin(sending)
            # Unless shielded, an answer that comes between a cancellation and its handling would be lost, with the open session.
            is_opening = isinstance(request, wire.Opening)
            frame, received_at_s = await (asyncio.shield(future) if is_opening else future)
            is_accepted = not isinstance(frame, wire.Error)
        except (ConnectionError, aiohttp.ClientError) as error:
            raise ConnectionLost(f"{self._url}: {error}") from error
        except asyncio.CancelledError:
            channel.sender.drop(sending)
            if isinstance(request, wire.Opening) and sending.is_begun:
                is_abandoned = True
                self._close_later(self._close_when_open(channel, request, future))
            raise
        finally:
            if not is_abandoned:
                channel.waiting.pop(request.id, None)
            if not is_accepted:
                channel.listeners.pop(request.id, None)
            del future, sending  # exceptions would keep this stack frame alive, and with it the payload
        if isinstance(frame, wire.Error):
            raise ServerError(frame.code, frame.message)
        return Answered(frame, sent_at_s, received_at_s)

    async def _close_when_open(
        self, channel: _Channel, request: wire.Opening, answer: asyncio.Future[tuple[wire.Answer, float]]
    ) -> None:
        """Closes the session of an opening that was cancelled, if the server opens it or has opened it."""
        try:
            frame, _ = await answer
        except ConnectionLost:
            return
        finally:
            channel.waiting.pop(request.id, None)
        if isinstance(frame, wire.Ok | wire.Found):
            await self._forget(request.session, channel.number)

    def ignore(self, request_id: int, generation: int) -> None:
        """Drops further answers to that request."""
        if self._channel is not None and self._channel.number == generation:
            self._channel.listeners.pop(request_id, None)

    def forget(self, session: str, generation: int, pages: bytes | None = None) -> asyncio.Task[None] | None:
        """Closes a session in the background; returns what ends when the server has closed it.

        The server may keep its cache if ``pages`` are given (``wire.Keep``). Sessions of a lost connection are closed already.
        """
        return self._close_later(self._forget(session, generation, pages)) if self.has(generation) else None

    def _close_later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        closing = self._later(work)
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)
        return closing

    async def _forget(self, session: str, generation: int, pages: bytes | None = None) -> None:
        number = self.next_id()
        request = wire.Close(number, session) if pages is None else wire.Keep(number, session, pages)
        with contextlib.suppress(ServerError, ConnectionLost):  # then the session has ended as well
            await self.ask(request, generation=generation)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _read(self, channel: _Channel) -> None:
        reason = "was closed"
        delay = None if self._down is None else self._delayed(channel, self._down)
        try:
            async for message in channel.socket:
                if message.type != aiohttp.WSMsgType.BINARY:
                    reason = f"carried a {message.type.name} message"
                    break
                frame, n_bytes = wire.unpack_answer(message.data), len(message.data)
                del message  # or it would be kept until the next one comes
                if delay is None:
                    self._take(channel, frame)
                else:
                    delay(frame, n_bytes)
                del frame
        except wire.FrameError as error:
            reason = f"carried an invalid answer: {error}"
        finally:
            channel.fail(f"the connection to {self._url} {reason}")
            for listener in list(channel.listeners.values()):
                listener(None, self._clock.now_s())
            channel.listeners.clear()
            channel.end()
            await channel.socket.close()  # nothing is read any more, so no request may be sent

    def _delayed(self, channel: _Channel, down: DelayLine) -> Callable[[AnyAnswer, int], None]:
        """Returns what takes messages as if they crossed the link ``down`` now, in the order of ``nodes.outbox``."""

        async def deliver(message: _Arrived) -> None:
            try:
                self._take(channel, message.frame)
            except wire.FrameError as error:
                channel.fail(f"the connection to {self._url} carried an invalid answer: {error}")
                raise ConnectionResetError from error

        begun: set[int] = set()
        """Frames of which parts have come: they keep their order, with the last part."""

        def take(frame: AnyAnswer, n_bytes: int) -> None:
            kind = class_of(frame)
            if isinstance(frame, wire.More):
                begun.add(frame.id)
                kind = Class.BULK
            elif frame.id in begun and (kind is not Class.CONTROL or isinstance(frame, wire.Drop)):
                begun.remove(frame.id)
                kind = Class.BULK
            queue.put(_Arrived(frame, n_bytes, kind))

        hang_up = partial(self._hang_up, channel)
        line: DelayedMessages[_Arrived] = DelayedMessages(down, self._clock, deliver, hang_up)
        channel.lines.append(line)
        channel.queue = queue = Messages(line.send, self._clock.now_s, hang_up)
        return take

    def _hang_up(self, channel: _Channel) -> None:
        """Closes a connection that can carry nothing more, as the kernel would."""
        if not self._is_closed:
            self._later(_close(channel.socket))

    def _take(self, channel: _Channel, message: AnyAnswer) -> None:
        """Takes a message that has arrived. Raises ``FrameError``."""
        channel.heard_at_s = now_s = self._clock.now_s()
        if isinstance(message, wire.Got):
            return
        frame = channel.receiver.take(message)
        if frame is not None:
            self._deliver(channel, frame, now_s)

    def _deliver(self, channel: _Channel, frame: wire.Answer, received_at_s: float) -> None:
        future = channel.waiting.get(frame.id)
        if future is not None and not future.done():
            future.set_result((frame, received_at_s))
        elif frame.id in channel.listeners:
            channel.listeners[frame.id](frame, received_at_s)

    async def settle(self, limit_s: float) -> None:
        """Waits until sessions that were to be closed are closed, or nothing has come from the server for ``limit_s``."""
        watchdog = Watchdog(self._clock)
        with contextlib.suppress(Overdue), watchdog.limit(limit_s) as limit:
            limit.since = lambda: self._channel.heard_at_s if self._channel is not None else 0.0
            while self._closings:
                await asyncio.wait(self._closings)
        watchdog.close()

    async def close(self) -> None:
        """Closes the connection; it cannot be opened again."""
        self._is_closed = True
        reader = None
        if self._channel is not None:
            self._channel.end()
            await self._channel.socket.close()
            reader = self._channel.reader
        for task in self._tasks:
            if task is not reader:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _quiet_since_s(channel: _Channel, request: Sending) -> float:
    """Returns since when a request that waits for its answer waits for the server, and nothing comes from there."""
    return max(channel.heard_at_s, request.left_at_s or 0.0)


async def _close(socket: aiohttp.ClientWebSocketResponse) -> None:
    await socket.close()


def prepare(raw: Any) -> None:
    """Has the kernel send every message at once, and take no more than ``UNSENT_BYTES`` before it has sent the rest.

    ``raw`` is the connection's socket; ``None`` where there is none.
    """
    if raw is not None:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


async def warm(connections: Iterable[Connection], n_bytes: int, at_once_bytes: int) -> None:
    """Opens every connection and sends ``n_bytes`` over it and back, over all of them at the same time.

    More than ``WARM_BYTES`` would change nothing; ``at_once_bytes`` are on their way at once. Raises ``ConnectionLost``,
    ``ServerError``.
    """
    payload = bytes(min(n_bytes, wire.PART_BYTES))
    n_pings = -(-min(n_bytes, WARM_BYTES) // wire.PART_BYTES)

    async def ping(connection: Connection, generation: int, room: asyncio.Semaphore) -> None:
        async with room:
            await connection.ask(wire.Ping(connection.next_id(), payload), generation=generation)

    async def warm_one(connection: Connection) -> None:
        generation, room = await connection.ready(), asyncio.Semaphore(at_once_bytes // wire.PART_BYTES)
        await asyncio.gather(*(ping(connection, generation, room) for _ in range(n_pings)))

    await asyncio.gather(*map(warm_one, connections))
