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

log = logging.getLogger(__name__)

_EXPIRED_REMEMBERED = 10_000


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
    blocks: int
    max_tokens: int
    state: Any
    used_at_s: float
    position: int = 0
    running: bool = False


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
class ServerLimits:
    """Bounds on what one client may ask. ``max_frame_bytes`` bounds the payload of one frame."""

    max_frame_bytes: int = 256 * 1024**2
    max_sessions_per_connection: int = 4096
    max_connections: int = 256
    idle_s: float = 300.0
    """A session without a step for so long is closed (scenario seconds)."""


class _WebSocket(web.WebSocketResponse):
    """Sends an error frame before aiohttp closes a connection over an oversized message."""

    async def close(self, *, code: int = WSCloseCode.OK, message: bytes = b"", drain: bool = True) -> bool:
        if code == WSCloseCode.MESSAGE_TOO_BIG and not self.closed:
            with contextlib.suppress(ConnectionError):
                await self.send_bytes(
                    wire.pack("error", -1, wire.TOO_LARGE, "the frame is larger than this server accepts")
                )
        return await super().close(code=code, message=message, drain=drain)


@dataclass
class _Connection:
    socket: _WebSocket
    sessions: dict[str, _Session] = field(default_factory=dict)
    expired: OrderedDict[str, None] = field(default_factory=OrderedDict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


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
        self._connections: set[int] = set()
        self._next_connection = 0

    def app(self) -> web.Application:
        app = web.Application()
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
        if len(self._connections) >= self.limits.max_connections:
            raise web.HTTPServiceUnavailable(text="too many connections")
        socket = _WebSocket(
            compress=False,
            max_msg_size=self.limits.max_frame_bytes + wire.FRAME_OVERHEAD_BYTES,
        )
        await socket.prepare(request)
        connection = _Connection(socket)
        self._next_connection += 1
        number = self._next_connection
        self._connections.add(number)
        self.counters.connections += 1
        try:
            async with self._expiring(connection, number):
                with contextlib.suppress(ConnectionError):  # the client left before it was answered
                    await self._read(connection, number)
        finally:
            self._connections.discard(number)
            for task in connection.tasks:
                task.cancel()
            for key in list(connection.sessions):
                self._release(connection, number, key)
        return socket

    async def _read(self, connection: _Connection, number: int) -> None:
        socket = connection.socket
        async for message in socket:
            arrived_at_s = self.clock.now_s()
            if message.type == WSMsgType.ERROR:  # aiohttp has closed the connection already
                self.counters.errors += isinstance(message.data, WebSocketError)
                log.warning("a connection has ended: %s", message.data)
                return
            if message.type != WSMsgType.BINARY:
                await self._reject(socket, wire.FrameError(wire.BAD_FRAME, "only binary frames are served"))
                return
            try:
                frame = wire.unpack_request(message.data)
                if frame[0] == "step":
                    session = self._check_step(connection, frame)
                    if session is None:
                        await socket.send_bytes(
                            wire.pack(
                                "error",
                                frame[1],
                                wire.SESSION_EXPIRED,
                                f"session {frame[2]} was idle for too long",
                            )
                        )
                        continue
                    task = asyncio.ensure_future(self._step(connection, number, session, frame, arrived_at_s))
                    connection.tasks.add(task)
                    task.add_done_callback(connection.tasks.discard)
                elif frame[0] == "open":
                    await socket.send_bytes(self._open(connection, number, frame))
                elif frame[0] == "close":
                    await socket.send_bytes(self._close(connection, number, frame))
                else:
                    await socket.send_bytes(
                        wire.pack("out", frame[1], arrived_at_s, self.clock.now_s(), frame[2])
                    )
            except wire.FrameError as error:
                await self._reject(socket, error)
                return

    async def _reject(self, socket: _WebSocket, error: wire.FrameError) -> None:
        """Answer an error frame and close: the peer does not speak the protocol."""
        self.counters.errors += 1
        log.warning("closing a connection: %s: %s", error.code, error)
        await socket.send_bytes(wire.pack("error", error.request_id, error.code, str(error)))
        await socket.close(code=WSCloseCode.PROTOCOL_ERROR, message=error.code.encode())

    def _open(self, connection: _Connection, number: int, frame: list[Any]) -> bytes:
        _, request_id, key, client, first, last, max_tokens = frame
        hosted = self.hosted
        if not hosted.first <= first < last <= hosted.last:
            raise wire.FrameError(
                wire.WRONG_BLOCKS,
                f"blocks {first} to {last} asked for, {hosted.first} to {hosted.last} are here",
                request_id,
            )
        if key in connection.sessions:
            raise wire.FrameError(wire.BAD_FRAME, f"session {key} is open already", request_id)
        if max_tokens < 1:
            raise wire.FrameError(wire.BAD_FRAME, "a session needs room for a token", request_id)
        n_bytes = hosted.cache_bytes_per_token * max_tokens * (last - first)
        try:
            if len(connection.sessions) >= self.limits.max_sessions_per_connection:
                raise NoCapacityError("too many sessions on this connection")
            self.account.reserve((number, key), n_bytes)
            try:
                state = self.compute.new_session(client, first, last, max_tokens)
            except ComputeError as error:
                self.account.release((number, key))
                raise NoCapacityError(str(error)) from error
        except NoCapacityError as error:
            self.counters.refused += 1
            return wire.pack("error", request_id, wire.NO_CAPACITY, str(error))
        connection.sessions[key] = _Session(key, last - first, max_tokens, state, self.clock.now_s())
        self.counters.opened += 1
        return wire.pack("ok", request_id)

    def _close(self, connection: _Connection, number: int, frame: list[Any]) -> bytes:
        _, request_id, key = frame
        if key in connection.sessions:
            self._release(connection, number, key)
            self.counters.closed += 1
        elif key not in connection.expired:
            raise wire.FrameError(wire.UNKNOWN_SESSION, f"no session {key}", request_id)
        return wire.pack("ok", request_id)

    def _release(self, connection: _Connection, number: int, key: str) -> None:
        self.compute.close_session(connection.sessions.pop(key).state)
        self.account.release((number, key))

    def _forget(self, connection: _Connection, number: int, key: str) -> None:
        """End a session that its client did not close; what is still asked of it is answered, not an error."""
        self._release(connection, number, key)
        connection.expired[key] = None
        while len(connection.expired) > _EXPIRED_REMEMBERED:
            connection.expired.popitem(last=False)

    def _check_step(self, connection: _Connection, frame: list[Any]) -> _Session | None:
        """The step's session; ``None`` if it has expired. Raises ``FrameError``."""
        _, request_id, key, position, n_tokens, payload = frame
        session = connection.sessions.get(key)
        if session is None:
            if key in connection.expired:
                return None
            raise wire.FrameError(wire.UNKNOWN_SESSION, f"no session {key}", request_id)
        if n_tokens < 1 or len(payload) != n_tokens * self.compute.token_bytes:
            raise wire.FrameError(
                wire.WRONG_SIZE,
                f"{len(payload)} bytes for {n_tokens} hidden states of {self.compute.token_bytes} bytes",
                request_id,
            )
        if position != session.position or session.running:
            raise wire.FrameError(
                wire.WRONG_POSITION,
                f"session {key} is at position {session.position}, not {position}",
                request_id,
            )
        if position + n_tokens > session.max_tokens:
            raise wire.FrameError(
                wire.WRONG_POSITION, f"session {key} has room for {session.max_tokens} tokens", request_id
            )
        session.running = True
        return session

    async def _step(
        self, connection: _Connection, number: int, session: _Session, frame: list[Any], arrived_at_s: float
    ) -> None:
        _, request_id, _, position, n_tokens, payload = frame
        try:
            answer = await self.compute.step(session.state, position, n_tokens, payload, arrived_at_s)
        except ComputeError as error:
            log.warning("session %s: %s", session.key, error)
            if session.key in connection.sessions:
                self._forget(connection, number, session.key)
            with contextlib.suppress(ConnectionError):
                await connection.socket.send_bytes(
                    wire.pack("error", request_id, wire.COMPUTE_FAILED, str(error))
                )
            return
        except Exception:
            log.exception("computing session %s failed: closing its connection", session.key)
            await connection.socket.close(code=WSCloseCode.INTERNAL_ERROR, message=b"computing failed")
            return
        session.position += n_tokens
        session.running = False
        departed_at_s = session.used_at_s = self.clock.now_s()
        self.counters.steps += 1
        self.counters.compute_s += departed_at_s - arrived_at_s
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
                await self.clock.sleep_until_s(now_s + self.limits.idle_s / 4)

        task = asyncio.ensure_future(watch())
        try:
            yield
        finally:
            task.cancel()

    def _expire(self, connection: _Connection, number: int, key: str) -> None:
        self._forget(connection, number, key)
        self.counters.expired += 1
        log.warning("session %s was idle for %g s: closed", key, self.limits.idle_s)
