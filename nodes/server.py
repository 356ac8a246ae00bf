"""A server node: an aiohttp application that hosts blocks and serves sessions over WebSockets."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Iterator

import msgspec
from aiohttp import WebSocketError, WSCloseCode, WSMsgType, web
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nodes import wire
from nodes.admission import HostedBlocks
from nodes.batching import Composition
from nodes.clock import Clock
from nodes.compute import Compute, ComputeError
from nodes.connection import prepare
from nodes.limits import HELLO_S, LAST_WORDS_S, ServerSocket, cut, shown
from nodes.limits import ServerLimits as ServerLimits
from nodes.messages import ServerStatus
from nodes.parts import Receiver, Sender, Sending
from nodes.sessions import Connection, Session, Sessions

log = logging.getLogger(__name__)

_KINDS = {"step": wire.Step, "behind": wire.Behind, "instead": wire.Instead}
_LOOK_AGAIN_S = 0.005
"""Event-loop seconds, real or virtual, between two checks of a client that does not read its answers."""


class Server(Collector):
    """Reads requests from the wire, has ``sessions`` carry them out, and sends the answers.

    ``app()`` returns the aiohttp application. With ``key``, only connections that present it are accepted.
    """

    def __init__(
        self,
        name: str,
        hosted: HostedBlocks,
        compute: Compute,
        clock: Clock,
        limits: ServerLimits | None = None,
        key: str = "",
    ) -> None:
        self.name = name
        self._needed = wire.headers(key)
        self.clock = clock
        self.limits = limits or ServerLimits()
        self.sessions = Sessions(hosted, compute, clock, self.limits)
        self.account = self.sessions.admission.account
        self.counters = self.sessions.counters
        self._n_accepted = 0

    def app(self) -> web.Application:
        app = web.Application(handler_args={"keepalive_timeout": HELLO_S})
        app.router.add_get(wire.PATH, self._serve_connection)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response(msgspec.to_builtins(self.status()))

    def status(self) -> ServerStatus:
        """Returns health and counters, as ``/health`` shows them."""
        return ServerStatus(
            name=self.name,
            first_block=self.sessions.admission.hosted.first,
            last_block=self.sessions.admission.hosted.last,
            phase=self.sessions.phase,
            # A session counts for as long as it has cache, or a place in a chain.
            n_sessions=max(len(self.account), self.sessions.forwarding.n_places),
            cache_used_bytes=self.account.used_bytes,
            cache_capacity_bytes=self.account.capacity_bytes,
            **vars(self.counters),
            memory=self.sessions.compute.memory(),
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        """Serves the metrics that Prometheus reads, with vLLM's names where one exists."""
        return web.Response(body=generate_latest(self), content_type="text/plain", charset="utf-8")

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics; called by ``prometheus_client``."""
        counters, hosted = self.counters, self.sessions.admission.hosted
        rows: tuple[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, float], ...] = (
            (GaugeMetricFamily, "vllm:num_requests_running", "Sessions with cache here", len(self.account)),
            (
                GaugeMetricFamily,
                "vllm:kv_cache_usage_perc",
                "Share of the cache room that is used",
                self.account.used_ratio,
            ),
            (GaugeMetricFamily, "testbed_hosted_blocks", "Blocks held", hosted.last - hosted.first),
            (CounterMetricFamily, "testbed_sessions_opened", "Sessions opened", counters.opened),
            (CounterMetricFamily, "testbed_sessions_refused", "Sessions refused", counters.refused),
            (CounterMetricFamily, "testbed_sessions_expired", "Sessions closed as idle", counters.expired),
            (CounterMetricFamily, "testbed_sessions_preempted", "Sessions preempted", counters.preempted),
            (CounterMetricFamily, "testbed_steps", "Steps computed", counters.steps),
            (
                CounterMetricFamily,
                "testbed_protocol_errors",
                "Connections that broke the protocol",
                counters.errors,
            ),
            (
                CounterMetricFamily,
                "testbed_compute_seconds",
                "Scenario seconds of computing",
                counters.compute_s,
            ),
        )
        kept = self.sessions.admission.kept
        if kept is not None:
            rows += (
                (
                    CounterMetricFamily,
                    "vllm:prefix_cache_queries",
                    "Tokens of prompts in whole pages, looked for in kept caches",
                    kept.n_queries,
                ),
                (CounterMetricFamily, "vllm:prefix_cache_hits", "Those of them that were found", kept.n_hits),
            )
        for kind, name, text, value in rows:
            family = kind(name, text, labels=("server",))
            family.add_metric((self.name,), value)
            yield family

    async def _serve_connection(self, request: web.Request) -> web.StreamResponse:
        client, live = request.remote or "", self.sessions.live
        for name, value in self._needed.items():
            if not hmac.compare_digest(request.headers.get(name, "").encode(), value.encode()):
                raise web.HTTPUnauthorized(text="this server takes connections of its own run only")
        if len(live) >= self.limits.max_connections:
            raise web.HTTPServiceUnavailable(text="too many connections to this server")
        if sum(other.client == client for other in live.values()) >= self.limits.max_connections_per_client:
            raise web.HTTPServiceUnavailable(text=f"too many connections from {client}")
        transport = request.transport
        if transport is None:
            raise web.HTTPBadRequest(text="the connection is gone")
        socket = ServerSocket(
            compress=False,
            max_msg_size=min(self.limits.max_payload_bytes, wire.PART_BYTES) + wire.FRAME_OVERHEAD_BYTES,
        )
        self._n_accepted += 1
        prepare(transport.get_extra_info("socket"))
        sender = Sender(socket.send_bytes, self.clock.now_s, transport.abort)
        live[self._n_accepted] = connection = Connection(self._n_accepted, client, socket, transport, sender)
        try:
            await socket.prepare(request)
            self.counters.connections += 1
            async with self.sessions.expiring(connection):
                with contextlib.suppress(ConnectionError):  # the client left before it was answered
                    await self._read(connection)
        finally:
            del live[connection.number]
            self.sessions.drop(connection)
            if transport.get_write_buffer_size():  # unread answers must not keep memory of this server
                transport.abort()
        return socket

    async def _read(self, connection: Connection) -> None:
        receiver: Receiver[wire.Request] = Receiver(self.limits.max_payload_bytes)
        async for message in connection.socket:
            arrived_at_s = self.clock.now_s()
            if message.type == WSMsgType.ERROR:  # aiohttp has closed the connection already
                self.counters.errors += isinstance(message.data, WebSocketError)
                log.warning("a connection has ended: %s", message.data)
                return
            if message.type != WSMsgType.BINARY:
                error = wire.FrameError(wire.BAD_FRAME, "only binary frames are served")
                await self._reject(connection, error)
                return
            await self._until_it_reads(connection)
            try:
                part = wire.unpack_request(message.data)
                frame = receiver.take(part)
                answer: wire.Answer | wire.Got | None = None
                if frame is not None:
                    answer = self._take(connection, frame, arrived_at_s)
                elif isinstance(part, wire.More):
                    answer = wire.Got(part.id)
            except wire.FrameError as error:
                await self._reject(connection, error)
                return
            if answer is not None:
                await _reply(connection, answer)
            del message, part, frame, answer  # or they would be kept until the next message comes

    def _take(self, connection: Connection, frame: wire.Request, arrived_at_s: float) -> wire.Answer | None:
        """Carries out a request. Returns its answer, or ``None`` if that is sent later.

        Raises ``FrameError``.
        """
        match frame:
            case wire.Step():
                if len(connection.tasks) >= self.limits.max_pending_steps:
                    text = f"{len(connection.tasks)} steps of this connection wait for their answers"
                    return wire.Error(frame.id, wire.TOO_MANY_STEPS, text)
                session = self.sessions.check_step(connection, frame)
                if session is None:
                    return wire.Error(frame.id, *connection.ended[frame.session])
                self._begin(connection, session, frame, arrived_at_s)
                return None
            case wire.Push():
                return self._push(frame, arrived_at_s)
            case wire.Open() | wire.Join():
                return self._open(connection, frame)
            case wire.Close():
                return self.sessions.close(connection, frame)
            case wire.Ping():
                return wire.Out(frame.id, arrived_at_s, self.clock.now_s(), Composition(), frame.payload)

    def _open(self, connection: Connection, frame: wire.Open | wire.Join) -> wire.Answer | None:
        """Opens a session. Returns ``None`` if its memory is not there yet: then the answer is sent later."""
        answer = self.sessions.open(connection, frame)
        if not isinstance(answer, Awaitable):
            return answer
        task = asyncio.ensure_future(self._answer_opening(connection, frame, answer))
        connection.openings.add(task)
        task.add_done_callback(connection.openings.discard)
        return None

    async def _answer_opening(
        self,
        connection: Connection,
        frame: wire.Open | wire.Join,
        opening: Awaitable[wire.Answer | None],
    ) -> None:
        try:
            answer = await opening
        except Exception:
            log.exception("opening session %s failed: closing its connection", shown(frame.session))
            await connection.socket.close(code=WSCloseCode.INTERNAL_ERROR, message=b"opening failed")
            return
        if answer is not None:
            await _answer(connection, answer)

    async def _until_it_reads(self, connection: Connection) -> None:
        """Waits while the client has too many bytes of steps pending or of answers unread.

        Nothing is read from the connection meanwhile, so TCP stops the client.
        """
        limits, transport = self.limits, connection.transport
        warned = False
        while not transport.is_closing():
            connection.replies = [reply for reply in connection.replies if reply.left_at_s is None]
            unread_bytes = transport.get_write_buffer_size() + sum(r.n_bytes for r in connection.replies)
            if (
                unread_bytes <= limits.max_unread_bytes
                and connection.pending_bytes <= limits.max_pending_bytes
            ):
                return
            if not warned:
                log.warning(
                    "reading nothing more from a client: %d bytes of steps pending, %d of answers unread",
                    connection.pending_bytes,
                    unread_bytes,
                )
                warned = True
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _reject(self, connection: Connection, error: wire.FrameError) -> None:
        """Sends an error frame and closes the connection: the peer broke the protocol.

        Its sessions are released first, because the peer may take long to hang up.
        """
        self.counters.errors += 1
        log.warning("closing a connection: %s: %s", error.code, error)
        self.sessions.drop(connection)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                answer = wire.Error(error.request_id, error.code, cut(error))
                await connection.socket.send_bytes(wire.pack(answer))
                await connection.socket.close(code=WSCloseCode.PROTOCOL_ERROR, message=error.code.encode())

    def _push(self, frame: wire.Push, arrived_at_s: float) -> wire.Answer:
        """Begins a step that was pushed; returns the answer for the sender.

        An error does not close the connection, because other clients' steps come over it, too.
        """
        place = self.sessions.forwarding.place(frame.token)
        if place is None and self.sessions.forwarding.has_notified(frame.token):
            return wire.Ok(frame.id)
        if place is None:
            return wire.Error(frame.id, wire.UNKNOWN_SESSION, "the session is not here any more")
        if not place.is_passed_after(len(wire.unpack_timings(frame.timings))):
            text = "the step has passed another number of hops than the one before it"
            return wire.Error(frame.id, wire.WRONG_POSITION, text)
        connection, session = place.owner
        limits = self.limits
        if (
            len(connection.tasks) >= limits.max_pending_steps
            or connection.pending_bytes > limits.max_pending_bytes
        ):
            text = f"{len(connection.tasks)} steps of this client are pending"
            return wire.Error(frame.id, wire.TOO_MANY_STEPS, text)
        kind = _KINDS[frame.kind] if isinstance(frame, wire.PushRound) else wire.Step
        step = kind(place.join_id, session.key, frame.position, frame.n_tokens, frame.payload)
        try:
            taken = self.sessions.check_step(connection, step, is_pushed=True)
        except wire.FrameError as error:
            return wire.Error(frame.id, error.code, cut(error))
        if taken is None:  # the session was preempted when it had to grow; its client has been notified
            return wire.Ok(frame.id)
        self._begin(connection, session, step, arrived_at_s, frame)
        return wire.Ok(frame.id)

    def _begin(
        self,
        connection: Connection,
        session: Session,
        step: wire.Step,
        arrived_at_s: float,
        push: wire.Push | None = None,
    ) -> None:
        task = asyncio.ensure_future(self._compute(connection, session, step, arrived_at_s, push))
        session.steps.append(task)
        connection.tasks.add(task)
        connection.pending_bytes += len(step.payload)

        def ended(task: asyncio.Task[None]) -> None:
            connection.tasks.discard(task)
            connection.pending_bytes -= len(step.payload)
            session.steps.remove(task)

        task.add_done_callback(ended)

    async def _compute(
        self,
        connection: Connection,
        session: Session,
        step: wire.Step,
        arrived_at_s: float,
        push: wire.Push | None,
    ) -> None:
        position, n_tokens = step.position, step.n_tokens
        is_behind = session.turn.locked()
        try:
            async with session.turn:
                ready_at_s = self.clock.now_s() if is_behind else arrived_at_s
                computed = await self.sessions.compute.step(
                    session.state, position, n_tokens, step.payload, ready_at_s
                )
                session.position += n_tokens
                session.n_running -= 1
        except ComputeError as error:
            log.warning("session %s: %s", shown(session.key), error)
            if session.key in connection.sessions:
                self.sessions.forget(connection, session.key, wire.COMPUTE_FAILED, f"has failed: {error}")
                ended = wire.COMPUTE_FAILED, cut(error)
            else:  # the session was ended while the step waited: send the reason of that
                ended = connection.ended.get(session.key, (wire.COMPUTE_FAILED, cut(error)))
            await _answer(connection, wire.Error(step.id, *ended))
            return
        except Exception:
            log.exception("computing session %s failed: closing its connection", shown(session.key))
            await connection.socket.close(code=WSCloseCode.INTERNAL_ERROR, message=b"computing failed")
            return
        departed_at_s = session.used_at_s = self.clock.now_s()
        self.counters.steps += 1
        self.counters.compute_s += departed_at_s - arrived_at_s
        if session.place is not None and push is not None:
            timing = wire.Timing(arrived_at_s, departed_at_s, len(step.payload), computed.together)
            push.timings += wire.pack_timing(timing)
            push.payload = computed.payload
            await self.sessions.forwarding.pass_on(session.place, push)
            return
        payload = b"" if isinstance(step, wire.Fill) else computed.payload
        await _answer(connection, wire.Out(step.id, arrived_at_s, departed_at_s, computed.together, payload))


async def _reply(connection: Connection, frame: wire.Answer | wire.Got) -> None:
    """Answers at once, or in turn, without waiting for the client to read it."""
    reply = Sending(frame)
    await connection.sender.begin(reply)
    if reply.left_at_s is None:
        connection.replies.append(reply)


async def _answer(connection: Connection, frame: wire.Answer) -> None:
    with contextlib.suppress(ConnectionError):  # the client left; _serve_connection cleans up
        await connection.sender.send(frame)
