"""What a node process runs after it has entered its network: a server or a client, until it is stopped.

The launcher makes the process, which runs ``serve`` or ``drive`` with its configuration. From then on the
orchestrator controls it over the control plane.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import aiohttp
from aiohttp import web

from nodes import control, wire
from nodes.admission import HostedBlocks
from nodes.blocks.spec import BlocksSpec, HubSpec
from nodes.clock import Clock, RunClock
from nodes.compute import Compute, ComputeError, StubCompute, StubProfile
from nodes.connection import Connection, warm
from nodes.eventlog import EventLog, LogFullError
from nodes.forwarding_session import ForwardingSession
from nodes.host import Host
from nodes.hub import HubModel, StubHub
from nodes.load import LoadGenerator
from nodes.messages import (
    CannotStart,
    Connect,
    Done,
    End,
    Finish,
    GetReplacement,
    GetRoute,
    GetStatus,
    Hello,
    Links,
    Message,
    NewToken,
    Phase,
    Progress,
    Reach,
    Recorded,
    Serve,
    ServerStatus,
    Slow,
    Start,
    Stop,
    Submit,
    Warm,
)
from nodes.moving import Moving
from nodes.peering import Peering
from nodes.prefixes import HubHistory
from nodes.records import ENDED, AnyRecord, Drafted, Opening, Plan, Token
from nodes.request import Request
from nodes.server import Server, ServerLimits
from nodes.session import HubSession, SessionRules
from policies.decoding import Decoding
from policies.outcomes import Times

log = logging.getLogger(__name__)

DATA_PORT = 7000
_PROGRESS_S, _VIRTUAL_PROGRESS_S = 0.2, 10.0
"""Event-loop seconds between two ``Progress`` messages.

In virtual time, 10 s pass many times per real second.
"""


@dataclass(frozen=True)
class NodeConfig:
    """The configuration of every node. ``port`` 0 means any free port.

    ``name`` is that of its place in the network, ``process`` its own name where several nodes are in one
    place.
    """

    name: str
    control_path: Path
    address: str
    port: int
    time_scale: float
    process: str = field(kw_only=True, default="")
    key: str = field(kw_only=True, default="")
    """The key that connections to servers must present; empty: none."""


@dataclass(frozen=True)
class ServerConfig(NodeConfig):
    """The configuration of a server: the blocks that it hosts, its compute backend and its limits."""

    hosted: HostedBlocks = field(kw_only=True)
    compute: StubProfile | BlocksSpec = field(kw_only=True)
    limits: ServerLimits = field(kw_only=True)


@dataclass(frozen=True)
class StubHubSpec:
    """The parameters of ``nodes.hub.StubHub``."""

    token_bytes: int
    n_blocks: int
    token_s: float = 0.0
    decoding: Decoding | None = None


@dataclass(frozen=True)
class ClientConfig(NodeConfig):
    """The configuration of a client: its log, the rules of its sessions and its part of the model."""

    log_path: Path = field(kw_only=True)
    rules: SessionRules = field(kw_only=True)
    model: StubHubSpec | HubSpec = field(kw_only=True)
    forwarding: bool = field(kw_only=True, default=False)
    """Whether servers send hidden states straight to the next one."""
    sends_times: bool = field(kw_only=True, default=False)
    """Whether a routing policy learns from what the client measures of requests."""


async def _compute(config: ServerConfig, clock: Clock) -> Compute:
    if isinstance(config.compute, StubProfile):
        return StubCompute(config.compute, clock)
    from nodes.blocks.compute import BlocksCompute  # imports torch

    compute = BlocksCompute(config.compute, clock)
    await compute.host(config.hosted.first, config.hosted.last)
    return compute


def _hub(config: ClientConfig, clock: Clock) -> HubModel:
    if isinstance(config.model, StubHubSpec):
        spec = config.model
        return StubHub(
            spec.token_bytes, spec.n_blocks, clock=clock, token_s=spec.token_s, decoding=spec.decoding
        )
    from nodes.blocks.hub import BlocksHub  # imports torch

    return BlocksHub(config.model)


async def _unfit(config: NodeConfig, host: Host, error: Exception) -> NoReturn:
    """Reports to the orchestrator why this node cannot start, and ends the process."""
    peer = await host.control(config.control_path, {})
    serving = asyncio.ensure_future(peer.serve())
    with contextlib.suppress(control.ControlError):  # the orchestrator is gone: nobody needs the report
        await peer.ask(CannotStart(config.name, str(error)))
    serving.cancel()
    raise SystemExit(f"{config.name}: {error}")


async def serve(config: ServerConfig, host: Host) -> None:
    """Runs a server node until the orchestrator sends ``Stop`` or is gone."""
    clock = host.clock(config.time_scale)
    try:
        compute = await _compute(config, clock)
    except ComputeError as error:
        await _unfit(config, host, error)
    server = Server(config.name, config.hosted, compute, clock, config.limits, config.key)
    runner = web.AppRunner(server.app(), access_log=None, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    port = await host.listen(runner, config.address, config.port)
    stopped = asyncio.Event()

    async def start(message: Start) -> None:
        await _begin_time(clock, message)

    async def status(_: GetStatus) -> ServerStatus:
        return server.status()

    async def slow(message: Slow) -> None:
        compute.factor = message.factor

    async def stop(_: Stop) -> None:
        stopped.set()

    def tell_phase(phase: str, at_s: float) -> None:
        with contextlib.suppress(control.ControlError):  # the orchestrator is gone, and this node ends
            peer.notify(Phase(config.name, phase, at_s))

    peering = Peering(host.connector, config.address, clock, server.sessions.forwarding, config.key)
    handlers: control.Handlers = {
        Start: start,
        GetStatus: status,
        Slow: slow,
        Stop: stop,
        **Moving(server.sessions, tell_phase).handlers(),
        **peering.handlers(),
    }
    peer = await host.control(config.control_path, handlers)
    watch = host.watch(config.address, stopped)
    try:
        peer.notify(Hello(config.name, os.getpid(), port))
        await control.until_stopped(peer, stopped)
        watch.close()
    finally:
        await peering.close()
        await runner.cleanup()
        compute.close()
        clock.close()


async def _begin_time(clock: RunClock, message: Start) -> None:
    clock.origin_at = message.origin_at
    await clock.sleep_until_s(clock.now_s())  # makes its timer now, not when the first step or request comes


class _Client:
    """A client node: carries out the orchestrator's messages, with one load generator."""

    def __init__(
        self, config: ClientConfig, http: aiohttp.ClientSession, model: HubModel, clock: RunClock
    ) -> None:
        self.config = config
        self.model = model
        self.clock = clock
        self.http = http
        self.connections: list[Connection] = []
        self.stopped = asyncio.Event()
        self.peer: control.Peer | None = None
        self._work: asyncio.Task[None] | None = None
        self._generator: LoadGenerator | None = None
        self._watched: set[int] = set()
        self._times: dict[int, Times] = {}
        """Those of requests that have not ended, if they are sent."""
        self._log = EventLog(config.log_path)
        n_bytes = config.rules.history_bytes
        self._history = HubHistory(n_bytes) if n_bytes else None

    def handlers(self) -> control.Handlers:
        """Returns the handlers of the orchestrator's messages."""
        return {
            Connect: self.connect,
            Reach: self.reach,
            Links: self.links,
            Warm: self.warm,
            Start: self.start,
            Serve: self.serve,
            Submit: self.submit,
            End: self.end_request,
            Finish: lambda _: self.finish(),
            Stop: self.stop,
        }

    async def connect(self, message: Connect) -> None:
        """Connects to every server that has started. ``reach`` brings the addresses of others later."""
        for server in message.servers:
            url = wire.url(server.address, server.port)
            connection = Connection(self.http, url, self.clock, server.up, server.down, seed=server.seed)
            self.connections.append(connection)
        present = zip(self.connections, message.servers, strict=True)
        await asyncio.gather(*(connection.open() for connection, server in present if server.port))

    async def reach(self, message: Reach) -> None:
        self.connections[message.server].move(wire.url(message.address, message.port))

    async def links(self, message: Links) -> float:
        for link in message.changed:
            self.connections[link.server].change_links(link.up, link.down)
        return self.clock.now_s()

    async def warm(self, message: Warm) -> None:
        await warm((c for c in self.connections if c.generation), message.n_bytes, message.at_once_bytes)

    async def start(self, message: Start) -> None:
        await _begin_time(self.clock, message)

    async def serve(self, message: Serve) -> None:
        self._watched = set(message.watched)
        self._generator = LoadGenerator(
            self.clock,
            self._log,
            self._session,
            self._recorded,
            self.config.name,
            self.config.rules.hold_s,
        )
        self._work = asyncio.create_task(self._run(self._generator, message))

    async def submit(self, message: Submit) -> None:
        assert self._generator is not None, "a request was submitted before Serve"
        self._watched.add(message.request.index)
        with contextlib.suppress(LogFullError):  # this ends the workload, and Done reports it
            self._generator.begin(message.request)

    async def end_request(self, message: End) -> None:
        assert self._generator is not None, "a request was ended before Serve"
        self._generator.end(message.request, enough=message.enough, reason=message.reason)

    async def _run(self, generator: LoadGenerator, message: Serve) -> None:
        reporting = asyncio.create_task(self._report(generator))
        failure = ""
        try:
            await generator.run(message.requests, stays_open=message.stays_open)
        except LogFullError as error:
            failure = str(error)
        except asyncio.CancelledError:
            failure = "interrupted"
        except Exception as error:
            log.exception("the load generator failed")
            failure = f"{type(error).__name__}: {error}"
        reporting.cancel()
        limit_s = self.config.rules.recovery.connect_timeout_s
        await asyncio.gather(*(connection.settle(limit_s) for connection in self.connections))
        self._notify(Done(self.config.name, failure))

    def _session(self, request: Request, generator: LoadGenerator, after: HubSession | None) -> HubSession:
        session = ForwardingSession if self.config.forwarding else HubSession
        return session(
            request,
            str(request.index),
            self.config.name,
            self.connections,
            self._route,
            self.model,
            self.config.rules,
            self.clock,
            generator.record,
            self._reroute,
            after,
            self._history,
        )

    async def _reroute(self, request: Request, first: int, last: int, n_done: int) -> Plan | None:
        assert self.peer is not None
        return await self.peer.ask(GetReplacement(request.index, first, last, n_done))

    async def _route(self, request: Request, attempt: int, n_done: int) -> Plan | None:
        assert self.peer is not None
        return await self.peer.ask(GetRoute(request.index, attempt, n_done))

    def _recorded(self, record: AnyRecord) -> None:
        times = self._measured(record) if self.config.sends_times else None
        if isinstance(record, Token):
            if record.request in self._watched:
                n_tokens = record.token + 1
                self._notify(NewToken(record.request, n_tokens, record.token_id, record.at_s))
        elif not isinstance(record, Opening | Drafted):
            self._notify(Recorded(record, times))
            if isinstance(record, ENDED):
                self._watched.discard(record.request)

    def _measured(self, record: AnyRecord) -> Times | None:
        """Keeps what a record says of its request's times; returns them if it is the last one."""
        times = self._times.get(record.request, Times())
        if isinstance(record, ENDED):
            self._times.pop(record.request, None)
            return times
        if isinstance(record, Opening):
            self._times[record.request] = times._replace(opened_at_s=record.at_s)
        elif isinstance(record, Token):
            first_at_s = record.at_s if times.first_at_s is None else times.first_at_s
            self._times[record.request] = Times(times.opened_at_s, first_at_s, record.token + 1)
        return None

    async def _report(self, generator: LoadGenerator) -> None:
        while True:
            latest = generator.last_ttft_s, generator.last_gap_s
            self._notify(Progress(self.config.name, generator.n_tokens, *latest))
            await asyncio.sleep(_VIRTUAL_PROGRESS_S if self.clock.is_virtual else _PROGRESS_S)

    def _notify(self, message: Message) -> None:
        assert self.peer is not None
        try:
            self.peer.notify(message)
        except control.ControlError:  # the orchestrator is gone: stop, the log holds everything
            self.stopped.set()

    async def finish(self) -> None:
        """Ends the workload now; requests that are still running are logged as interrupted."""
        if self._work is not None and not self._work.done():
            self._work.cancel()
            await asyncio.wait({self._work})

    async def stop(self, _: Stop) -> None:
        self.stopped.set()

    async def end(self) -> None:
        """As ``finish``, and closes the log."""
        await self.finish()
        self._log.close()


async def drive(config: ClientConfig, host: Host) -> None:
    """Runs a client node until the orchestrator sends ``Stop`` or is gone."""
    clock = host.clock(config.time_scale)
    connector = host.connector(config.address)
    timeout, headers = aiohttp.ClientTimeout(total=None), wire.headers(config.key)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as http:
        try:
            model = _hub(config, clock)
            client = _Client(config, http, model, clock)
        except (ComputeError, LogFullError) as error:
            await _unfit(config, host, error)
        client.peer = await host.control(config.control_path, client.handlers())
        watch = host.watch(config.address, client.stopped)
        try:
            client.peer.notify(Hello(config.name, os.getpid(), 0))
            await control.until_stopped(client.peer, client.stopped)
            watch.close()
        finally:
            await client.end()
            await asyncio.gather(*(c.close() for c in client.connections), return_exceptions=True)
            client.clock.close()
            model.close()
