"""A server node: an aiohttp application that hosts blocks and serves sessions over WebSockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WebSocketError, WSCloseCode, WSMsgType, web

from nodes import wire
from nodes.cache import CacheAccount, NoCapacityError
from nodes.clock import Clock
from nodes.compute import Compute, ComputeError
from nodes.forwarding import Forwarding, Place
from nodes.limits import HELLO_S, LAST_WORDS_S, ServerSocket, cut, shown
from nodes.limits import ServerLimits as ServerLimits

log = logging.getLogger(__name__)

_EXPIRED_REMEMBERED = 10_000
_LOOK_AGAIN_S = 0.005
"""Real seconds between two looks at a client that does not read."""


@dataclass(frozen=True)
class HostedBlocks:
    """What a server holds and how much attention cache sessions may use (bytes)."""

    first: int
    last: int
    cache_bytes: float
    cache_bytes_per_token: float
    """Attention cache of one token in one block."""


@dataclass
class _Session:
    key: str
    first: int
    last: int
    max_tokens: int
    state: Any
    used_at_s: float
    position: int = 0
    running: bool = False
    place: Place | None = None
    """In a chain of servers that forward; ``None``: its client brings and fetches every step."""


@dataclass
class Counters:
    """Totals since start; the metrics page shows them."""

    opened: int = 0
    refused: int = 0
    closed: int = 0
    expired: int = 0
    steps: int = 0
    errors: int = 0
    connections: int = 0
    compute_s: float = 0.0


@dataclass
class _Connection:
    socket: ServerSocket
    transport: asyncio.Transport
    sessions: dict[str, _Session] = field(default_factory=dict)
    expired: OrderedDict[str, tuple[str, str]] = field(default_factory=OrderedDict)
    """Sessions that the server has ended: the code and the words for whoever asks for them."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    pending_bytes: int = 0


class Server:
    """Sessions on one server's blocks. ``app()`` is the aiohttp application.

    Sessions belong to the connection that opened them and end with it.
    """

    def __init__(
        self,
        name: str,
        hosted: HostedBlocks,
        compute: Compute,
        clock: Clock,
        limits: ServerLimits | None = None,
    ) -> None:
        self.name = name
        self.hosted = hosted
        self.compute = compute
        self.clock = clock
        self.limits = limits or ServerLimits()
        self.account = CacheAccount(hosted.cache_bytes)
        self.counters = Counters()
        self.forwarding = Forwarding(clock)
        self.phase = "serving"
        """What it does to its blocks: see ``nodes.moving``."""
        self.may_move = False
        """Its blocks may be others than a client has heard."""
        self.released = asyncio.Event()
        """Set whenever a session has ended."""
        self.live: dict[int, _Connection] = {}
        """Connections by number; those of ``account`` are ``(number, session)``."""
        self._connections: dict[int, str] = {}
        self._next_connection = 0

    @property
    def n_connections(self) -> int:
        """WebSockets that are open."""
        return len(self._connections)

    def app(self) -> web.Application:
        app = web.Application(handler_args={"keepalive_timeout": HELLO_S})
        app.router.add_get(wire.PATH, self._serve_connection)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response(self.status())

    def status(self) -> dict[str, Any]:
        """Health and counters, as ``/health`` shows them."""
        return {
            "name": self.name,
            "first_block": self.hosted.first,
            "last_block": self.hosted.last,
            "phase": self.phase,
            "n_sessions": len(self.account),
            "cache_used_bytes": self.account.used_bytes,
            "cache_capacity_bytes": self.account.capacity_bytes,
            **vars(self.counters),
            "memory": self.compute.memory(),
        }

    async def _metrics(self, _: web.Request) -> web.Response:
        """Prometheus text; vLLM's names where one exists."""
        label = f'{{server="{self.name}"}}'
        rows: tuple[tuple[str, str, float], ...] = (
            ("vllm:num_requests_running", "gauge", len(self.account)),
            ("vllm:kv_cache_usage_perc", "gauge", self.account.used_ratio),
            ("testbed_sessions_opened_total", "counter", self.counters.opened),
            ("testbed_sessions_refused_total", "counter", self.counters.refused),
            ("testbed_sessions_expired_total", "counter", self.counters.expired),
            ("testbed_steps_total", "counter", self.counters.steps),
            ("testbed_protocol_errors_total", "counter", self.counters.errors),
            ("testbed_compute_seconds_total", "counter", self.counters.compute_s),
            ("testbed_hosted_blocks", "gauge", self.hosted.last - self.hosted.first),
        )
        text = "".join(f"# TYPE {name} {kind}\n{name}{label} {value}\n" for name, kind, value in rows)
        return web.Response(text=text, content_type="text/plain")

    async def _serve_connection(self, request: web.Request) -> web.StreamResponse:
        client = request.remote or ""
        if len(self._connections) >= self.limits.max_connections:
            raise web.HTTPServiceUnavailable(text="too many connections to this server")
        if list(self._connections.values()).count(client) >= self.limits.max_connections_per_client:
            raise web.HTTPServiceUnavailable(text=f"too many connections from {client}")
        transport = request.transport
        if transport is None:
            raise web.HTTPBadRequest(text="the connection is gone")
        socket = ServerSocket(
            compress=False,
            max_msg_size=self.limits.max_frame_bytes + wire.FRAME_OVERHEAD_BYTES,
        )
        self._next_connection += 1
        number = self._next_connection
        self._connections[number] = client
        self.live[number] = connection = _Connection(socket, transport)
        try:
            await socket.prepare(request)
            self.counters.connections += 1
            async with self._expiring(connection, number):
                with contextlib.suppress(ConnectionError):  # the client left before it was answered
                    await self._read(connection, number)
        finally:
            del self._connections[number], self.live[number]
            self._drop(connection, number)
            if transport.get_write_buffer_size():  # whoever does not read keeps nothing of this server
                transport.abort()
        return socket

    def _drop(self, connection: _Connection, number: int) -> None:
        """End all that a connection has here."""
        for task in connection.tasks:
            task.cancel()
        for key in list(connection.sessions):
            self._release(connection, number, key)

    async def _read(self, connection: _Connection, number: int) -> None:
        socket = connection.socket
        async for message in socket:
            arrived_at_s = self.clock.now_s()
            if message.type == WSMsgType.ERROR:  # aiohttp has closed the connection already
                self.counters.errors += isinstance(message.data, WebSocketError)
                log.warning("a connection has ended: %s", message.data)
                return
            if message.type != WSMsgType.BINARY:
                error = wire.FrameError(wire.BAD_FRAME, "only binary frames are served")
                await self._reject(connection, number, error)
                return
            await self._until_it_reads(connection)
            try:
                frame = wire.unpack_request(message.data)
                if frame[0] == "step":
                    if len(connection.tasks) >= self.limits.max_pending_steps:
                        text = f"{len(connection.tasks)} steps of this connection wait for their answers"
                        await socket.send_bytes(wire.pack("error", frame[1], wire.TOO_MANY_STEPS, text))
                        continue
                    session = self._check_step(connection, frame)
                    if session is None:
                        await socket.send_bytes(wire.pack("error", frame[1], *connection.expired[frame[2]]))
                        continue
                    self._begin(connection, number, session, frame, arrived_at_s)
                elif frame[0] == "push":
                    await socket.send_bytes(self._push(frame, arrived_at_s))
                elif frame[0] in ("open", "join"):
                    await socket.send_bytes(self._open(connection, number, frame))
                elif frame[0] == "close":
                    await socket.send_bytes(self._close(connection, number, frame))
                else:
                    await socket.send_bytes(
                        wire.pack("out", frame[1], arrived_at_s, self.clock.now_s(), frame[2])
                    )
            except wire.FrameError as error:
                await self._reject(connection, number, error)
                return

    async def _until_it_reads(self, connection: _Connection) -> None:
        """Wait while a client has too much pending or unread; what it sends meanwhile stays with it."""
        limits, transport = self.limits, connection.transport
        warned = False
        while not transport.is_closing():
            unread_bytes = transport.get_write_buffer_size()
            if (
                unread_bytes <= limits.max_unread_bytes
                and connection.pending_bytes <= limits.max_pending_bytes
            ):
                return
            if not warned:
                log.warning(
                    "reading nothing more from a client with %d bytes of steps pending and %d of answers unread",
                    connection.pending_bytes,
                    unread_bytes,
                )
                warned = True
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _reject(self, connection: _Connection, number: int, error: wire.FrameError) -> None:
        """Answer an error frame and close: the peer does not speak the protocol.

        What it holds is given back first: it may take long to hang up.
        """
        self.counters.errors += 1
        log.warning("closing a connection: %s: %s", error.code, error)
        self._drop(connection, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                answer = wire.pack("error", error.request_id, error.code, cut(error))
                await connection.socket.send_bytes(answer)
                await connection.socket.close(code=WSCloseCode.PROTOCOL_ERROR, message=error.code.encode())

    def _open(self, connection: _Connection, number: int, frame: list[Any]) -> bytes:
        _, request_id, key, client, first, last, max_tokens, *chained = frame
        hosted = self.hosted
        if not hosted.first <= first < last <= hosted.last:
            if self.may_move:  # the client was told of blocks that have gone since
                self.counters.refused += 1
                text = f"blocks {first} to {last} are not here any more"
                return wire.pack("error", request_id, wire.NO_CAPACITY, text)
            raise wire.FrameError(
                wire.WRONG_BLOCKS,
                f"blocks {first} to {last} asked for, {hosted.first} to {hosted.last} are here",
                request_id,
            )
        if key in connection.sessions:
            raise wire.FrameError(wire.BAD_FRAME, f"session {shown(key)} is open already", request_id)
        if max_tokens < 1:
            raise wire.FrameError(wire.BAD_FRAME, "a session needs room for a token", request_id)
        if max_tokens > self.limits.max_session_tokens:
            raise wire.FrameError(
                wire.BAD_FRAME,
                f"a session of {max_tokens} tokens; at most {self.limits.max_session_tokens} are taken",
                request_id,
            )
        if chained:
            self.forwarding.check(request_id, *chained)
        n_bytes = hosted.cache_bytes_per_token * max_tokens * (last - first)
        try:
            if len(connection.sessions) >= self.limits.max_sessions_per_connection:
                raise NoCapacityError("too many sessions on this connection")
            if len(self.account) >= self.limits.max_sessions:
                raise NoCapacityError("too many sessions on this server")
            self.account.reserve((number, key), n_bytes)
            try:
                state = self.compute.new_session(client, first, last, max_tokens)
            except ComputeError as error:
                self.account.release((number, key))
                raise NoCapacityError(str(error)) from error
        except NoCapacityError as error:
            self.counters.refused += 1
            return wire.pack("error", request_id, wire.NO_CAPACITY, cut(error))
        session = _Session(key, first, last, max_tokens, state, self.clock.now_s())
        connection.sessions[key] = session
        if chained:
            owner = connection, number, session
            session.place = self.forwarding.join(Place(owner, connection.socket, request_id, *chained))
        self.counters.opened += 1
        return wire.pack("ok", request_id)

    def _close(self, connection: _Connection, number: int, frame: list[Any]) -> bytes:
        _, request_id, key = frame
        if key in connection.sessions:
            self._release(connection, number, key)
            self.counters.closed += 1
        elif key not in connection.expired:
            raise wire.FrameError(wire.UNKNOWN_SESSION, f"no session {shown(key)}", request_id)
        return wire.pack("ok", request_id)

    def _release(self, connection: _Connection, number: int, key: str) -> None:
        session = connection.sessions.pop(key)
        if session.place is not None:
            self.forwarding.leave(session.place)
        self.compute.close_session(session.state)
        self.account.release((number, key))
        self.released.set()

    def _forget(self, connection: _Connection, number: int, key: str, code: str, reason: str) -> None:
        """End a session that its client did not close; what is still asked of it is answered, not an error."""
        self._release(connection, number, key)
        connection.expired[key] = code, cut(f"session {shown(key)} {reason}")
        while len(connection.expired) > _EXPIRED_REMEMBERED:
            connection.expired.popitem(last=False)

    def _push(self, frame: list[Any], arrived_at_s: float) -> bytes:
        """Begin a step of a session that any connection may push to; the answer to who pushed.

        What is wrong with it is no reason to close the connection: other clients' steps come over it, too.
        """
        _, request_id, token, position, n_tokens, timings, payload = frame
        place = self.forwarding.place(token)
        if place is None:
            return wire.pack("error", request_id, wire.UNKNOWN_SESSION, "the session is not here any more")
        connection, number, session = place.owner
        limits = self.limits
        if (
            len(connection.tasks) >= limits.max_pending_steps
            or connection.pending_bytes > limits.max_pending_bytes
        ):
            text = f"{len(connection.tasks)} steps of this client are pending"
            return wire.pack("error", request_id, wire.TOO_MANY_STEPS, text)
        step = ["step", place.join_id, session.key, position, n_tokens, payload]
        try:
            self._check_step(connection, step, is_pushed=True)
        except wire.FrameError as error:
            return wire.pack("error", request_id, error.code, cut(error))
        self._begin(connection, number, session, step, arrived_at_s, timings)
        return wire.pack("ok", request_id)

    def _check_step(
        self, connection: _Connection, frame: list[Any], is_pushed: bool = False
    ) -> _Session | None:
        """The step's session; ``None`` if it has expired. Raises ``FrameError``."""
        _, request_id, key, position, n_tokens, payload = frame
        session = connection.sessions.get(key)
        if session is None:
            if key in connection.expired:
                return None
            raise wire.FrameError(wire.UNKNOWN_SESSION, f"no session {shown(key)}", request_id)
        if session.place is not None and not is_pushed:
            raise wire.FrameError(
                wire.BAD_FRAME, f"session {shown(key)} is part of a chain: push to it", request_id
            )
        if n_tokens < 1 or len(payload) != n_tokens * self.compute.token_bytes:
            raise wire.FrameError(
                wire.WRONG_SIZE,
                f"{len(payload)} bytes for {n_tokens} hidden states of {self.compute.token_bytes} bytes",
                request_id,
            )
        if position != session.position or session.running:
            raise wire.FrameError(
                wire.WRONG_POSITION,
                f"session {shown(key)} is at position {session.position}, not {position}",
                request_id,
            )
        if position + n_tokens > session.max_tokens:
            raise wire.FrameError(
                wire.WRONG_POSITION,
                f"session {shown(key)} has room for {session.max_tokens} tokens",
                request_id,
            )
        session.running = True
        return session

    def _begin(
        self,
        connection: _Connection,
        number: int,
        session: _Session,
        frame: list[Any],
        arrived_at_s: float,
        timings: bytes = b"",
    ) -> None:
        step = self._step(connection, number, session, frame, arrived_at_s, timings)
        task = asyncio.ensure_future(step)
        connection.tasks.add(task)
        connection.pending_bytes += len(frame[5])
        task.add_done_callback(connection.tasks.discard)

    async def _step(
        self,
        connection: _Connection,
        number: int,
        session: _Session,
        frame: list[Any],
        arrived_at_s: float,
        timings: bytes,
    ) -> None:
        try:
            await self._compute(connection, number, session, frame, arrived_at_s, timings)
        finally:
            connection.pending_bytes -= len(frame[5])

    async def _compute(
        self,
        connection: _Connection,
        number: int,
        session: _Session,
        frame: list[Any],
        arrived_at_s: float,
        timings: bytes,
    ) -> None:
        _, request_id, _, position, n_tokens, payload = frame
        try:
            answer = await self.compute.step(session.state, position, n_tokens, payload, arrived_at_s)
        except ComputeError as error:
            log.warning("session %s: %s", shown(session.key), error)
            if session.key in connection.sessions:
                self._forget(connection, number, session.key, wire.COMPUTE_FAILED, f"has failed: {error}")
            with contextlib.suppress(ConnectionError):
                await connection.socket.send_bytes(
                    wire.pack("error", request_id, wire.COMPUTE_FAILED, cut(error))
                )
            return
        except Exception:
            log.exception("computing session %s failed: closing its connection", shown(session.key))
            await connection.socket.close(code=WSCloseCode.INTERNAL_ERROR, message=b"computing failed")
            return
        session.position += n_tokens
        session.running = False
        departed_at_s = session.used_at_s = self.clock.now_s()
        self.counters.steps += 1
        self.counters.compute_s += departed_at_s - arrived_at_s
        if session.place is not None:
            timings += wire.pack_timing(arrived_at_s, departed_at_s, len(payload))
            await self.forwarding.pass_on(session.place, position, n_tokens, timings, answer)
            return
        with contextlib.suppress(ConnectionError):  # the client left; _serve_connection cleans up
            await connection.socket.send_bytes(
                wire.pack("out", request_id, arrived_at_s, departed_at_s, answer)
            )

    @contextlib.asynccontextmanager
    async def _expiring(self, connection: _Connection, number: int) -> AsyncIterator[None]:
        """Close the connection's idle sessions while the body runs."""

        async def watch() -> None:
            while True:
                now_s = self.clock.now_s()
                for session in list(connection.sessions.values()):
                    if not session.running and session.used_at_s + self.limits.idle_s <= now_s:
                        self._expire(connection, number, session.key)
                        if session.place is not None:
                            await session.place.tell(
                                "error", wire.SESSION_EXPIRED, "it was idle for too long"
                            )
                await self.clock.sleep_until_s(now_s + self.limits.idle_s / 4)

        task = asyncio.ensure_future(watch())
        try:
            yield
        finally:
            task.cancel()

    def _expire(self, connection: _Connection, number: int, key: str) -> None:
        self._forget(connection, number, key, wire.SESSION_EXPIRED, "was idle for too long")
        self.counters.expired += 1
        log.warning("session %s was idle for %g s: closed", shown(key), self.limits.idle_s)

    async def end(self, key: tuple[int, str], code: str, reason: str) -> None:
        """End the session of ``account`` with that key; its client hears when it asks, of a chain at once."""
        connection = self.live[key[0]]
        session = connection.sessions[key[1]]
        self._forget(connection, *key, code, reason)
        if session.place is not None:
            await session.place.tell("error", code, f"it {reason}")

    def blocks_of(self, key: tuple[int, str]) -> tuple[int, int]:
        """The blocks that the session of ``account`` with that key uses, half-open."""
        session = self.live[key[0]].sessions[key[1]]
        return session.first, session.last
