"""What a node process runs after it has entered its network: a server or a client until told to stop.

The launcher makes the process and has it run ``serve`` or ``drive`` with a plain configuration; from then on
the orchestrator speaks to it over the control plane.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
from aiohttp import web

from nodes import control, wire
from nodes.blocks.spec import BlocksSpec, HubSpec
from nodes.clock import Clock, RunClock
from nodes.compute import Compute, ComputeError, StubCompute, StubProfile
from nodes.connection import Connection
from nodes.eventlog import EventLog, LogFullError
from nodes.forwarded import ForwardedSession
from nodes.host import Host
from nodes.hub import HubModel, StubHub
from nodes.links import profiles
from nodes.load import LoadGenerator
from nodes.moving import Moving
from nodes.peering import Peering
from nodes.request import Request
from nodes.server import HostedBlocks, Server, ServerLimits
from nodes.session import HubSession, SessionRules
from nodes.slow import slowed

log = logging.getLogger(__name__)

DATA_PORT = 7000
_PROGRESS_S, _VIRTUAL_PROGRESS_S = 0.2, 10.0
"""How often a client says how far it is; in virtual time that is many times a second."""


@dataclass(frozen=True)
class NodeConfig:
    """What every node is told when it is forked. ``port`` 0 takes any free one."""

    name: str
    control_path: Path
    address: str
    port: int
    time_scale: float


@dataclass(frozen=True)
class ServerConfig(NodeConfig):
    """A server: what it hosts, and what computes there."""

    hosted: HostedBlocks = field(kw_only=True)
    compute: StubProfile | BlocksSpec = field(kw_only=True)
    limits: ServerLimits = field(kw_only=True)


@dataclass(frozen=True)
class StubHubSpec:
    """The hub's part of the stub: see ``nodes.hub.StubHub``."""

    token_bytes: int
    n_blocks: int
    token_s: float = 0.0


@dataclass(frozen=True)
class ClientConfig(NodeConfig):
    """A client: where its log goes, what its sessions obey and its part of the model."""

    log_path: Path = field(kw_only=True)
    rules: SessionRules = field(kw_only=True)
    model: StubHubSpec | HubSpec = field(kw_only=True)
    forwarding: bool = field(kw_only=True, default=False)
    """Servers send hidden states straight to the next one."""


async def _compute(config: ServerConfig, clock: Clock) -> Compute:
    if isinstance(config.compute, StubProfile):
        return StubCompute(config.compute, clock)
    from nodes.blocks.compute import BlocksCompute  # brings torch

    compute = BlocksCompute(config.compute)
    await compute.host(config.hosted.first, config.hosted.last)
    return compute


def _hub(config: ClientConfig, clock: Clock) -> HubModel:
    if isinstance(config.model, StubHubSpec):
        spec = config.model
        return StubHub(spec.token_bytes, spec.n_blocks, clock=clock, token_s=spec.token_s)
    from nodes.blocks.hub import BlocksHub  # brings torch

    return BlocksHub(config.model)


async def _unfit(config: NodeConfig, host: Host, error: ComputeError) -> NoReturn:
    """Tell the orchestrator why this node cannot begin, and end."""
    peer = await host.control(config.control_path, {})
    serving = asyncio.ensure_future(peer.serve())
    with contextlib.suppress(control.ControlError):  # the orchestrator is gone: nobody to tell
        await peer.ask("unfit", config.name, str(error))
    serving.cancel()
    raise SystemExit(f"{config.name}: {error}")


async def serve(config: ServerConfig, host: Host) -> None:
    """Serve until the orchestrator says ``stop`` or is gone."""
    clock = host.clock(config.time_scale)
    try:
        compute = await _compute(config, clock)
    except ComputeError as error:
        await _unfit(config, host, error)
    server = Server(config.name, config.hosted, compute, clock, config.limits)
    runner = web.AppRunner(server.app(), access_log=None, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    port = await host.listen(runner, config.address, config.port)
    stopped = asyncio.Event()

    async def start(origin_at: float) -> None:
        clock.origin_at = origin_at
        await clock.sleep_until_s(clock.now_s())  # makes its timer now, not at the first step

    async def status() -> dict[str, Any]:
        return server.status()

    async def slow(factor: float) -> None:
        server.sessions.compute = slowed(compute, factor, clock)

    async def stop() -> None:
        stopped.set()

    def tell_phase(phase: str, at_s: float) -> None:
        with contextlib.suppress(control.ControlError):  # the orchestrator is gone, and this node ends
            peer.tell("phase", config.name, phase, at_s)

    moving = Moving(server.sessions, tell_phase)
    handlers: dict[str, control.Handler] = {
        "start": start,
        "status": status,
        "rehost": moving.rehost,
        "slow": slow,
        "drain": moving.leave,
        "emptied": moving.emptied,
        "stop": stop,
    }
    peering = Peering(host.connector, config.address, clock, server.sessions.forwarding)
    peer = await host.control(config.control_path, {**handlers, **peering.handlers()})
    watch = host.watch(config.address, stopped)
    try:
        peer.tell("hello", config.name, os.getpid(), port)
        await control.until_stopped(peer, stopped)
        watch.close()
    finally:
        await peering.close()
        await runner.cleanup()
        compute.close()
        clock.close()


def _request(
    index: int, arrival_at_s: float, n_input_tokens: int, n_output_tokens: int, prompt: list[int]
) -> Request:
    return Request(index, arrival_at_s, n_input_tokens, n_output_tokens, tuple(prompt))


class _Client:
    """Methods that the orchestrator calls on a client node."""

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
        self._watched: frozenset[int] = frozenset()
        self._log = EventLog(config.log_path)

    async def connect(self, servers: list[dict[str, Any]]) -> None:
        """Connect to every server: ``{address, port, up, down, seed}``; the last three only for loopback.

        Port 0: it is not there yet, and nobody connects to it before ``reach`` says where it is.
        """
        for server in servers:
            up, down = profiles(server)
            url = wire.url(server["address"], server["port"])
            seed = server.get("seed", "")
            self.connections.append(Connection(self.http, url, self.clock, up, down, seed=seed))
        present = zip(self.connections, servers, strict=True)
        await asyncio.gather(*(connection.open() for connection, server in present if server["port"]))

    async def reach(self, server: int, address: str, port: int) -> None:
        """Where a server is that has just begun."""
        self.connections[server].move(wire.url(address, port))

    async def links(self, changed: list[dict[str, Any]]) -> float:
        """Change the links to servers: ``{server, up, down}``, by number. Only where the client delays.

        Answers the instant at which that was done.
        """
        for entry in changed:
            self.connections[entry["server"]].change_links(*profiles(entry))
        return self.clock.now_s()

    async def warm(self, n_bytes: int) -> None:
        """Send one message of ``n_bytes`` each way on every connection."""
        payload = bytes(n_bytes)
        await asyncio.gather(
            *(c.ask(wire.Ping(c.next_id(), payload)) for c in self.connections if c.generation)
        )

    async def start(self, origin_at: float) -> None:
        self.clock.origin_at = origin_at
        await self.clock.sleep_until_s(self.clock.now_s())  # makes its timer now, not at the first request

    async def serve(self, requests: list[list[Any]], watched: list[int]) -> None:
        """Run the workload in the background; ``done`` is told at its end, ``token`` for ``watched`` requests."""
        self._watched = frozenset(watched)
        self._work = asyncio.create_task(self._run([_request(*fields) for fields in requests]))

    async def _run(self, requests: list[Request]) -> None:
        generator = LoadGenerator(
            self.clock, self._log, self._session, self._progress, self._recovered, self._new_token
        )
        reporting = asyncio.create_task(self._report(generator))
        failure = ""
        try:
            await generator.run(requests, self.config.name)
        except LogFullError as error:
            failure = str(error)
        except asyncio.CancelledError:
            failure = "interrupted"
        except Exception as error:
            log.exception("the load generator broke")
            failure = f"{type(error).__name__}: {error}"
        reporting.cancel()
        self._tell("done", self.config.name, failure)

    def _session(self, request: Request, generator: LoadGenerator) -> HubSession:
        session = ForwardedSession if self.config.forwarding else HubSession
        return session(
            request,
            str(request.index),
            self.config.name,
            self.connections,
            self._route,
            self.model,
            self.config.rules,
            self.clock,
            generator,
            self._reroute,
        )

    async def _reroute(self, request: Request, first: int, last: int, n_done: int) -> dict[str, Any] | None:
        assert self.peer is not None
        answer: dict[str, Any] | None = await self.peer.ask("reroute", request.index, first, last, n_done)
        return answer

    async def _route(self, request: Request, attempt: int) -> dict[str, Any] | None:
        assert self.peer is not None
        answer: dict[str, Any] | None = await self.peer.ask("route", request.index, attempt)
        return answer

    def _progress(self, state: str, index: int, at_s: float) -> None:
        self._tell("state", index, state, at_s)

    def _recovered(self, event: str, index: int, at_s: float, details: Mapping[str, Any]) -> None:
        self._tell("recovery", event, index, at_s, dict(details))

    def _new_token(self, index: int, n_tokens: int) -> None:
        if index in self._watched:
            self._tell("token", index, n_tokens)

    async def _report(self, generator: LoadGenerator) -> None:
        while True:
            self._tell(
                "tokens", self.config.name, generator.n_tokens, generator.last_ttft_s, generator.last_gap_s
            )
            await asyncio.sleep(_VIRTUAL_PROGRESS_S if self.clock.is_virtual else _PROGRESS_S)

    def _tell(self, method: str, *params: Any) -> None:
        assert self.peer is not None
        try:
            self.peer.tell(method, *params)
        except control.ControlError:  # the orchestrator is gone: stop, the log holds everything
            self.stopped.set()

    async def finish(self) -> None:
        """End the workload now; running requests are logged as interrupted."""
        if self._work is not None and not self._work.done():
            self._work.cancel()
            await asyncio.wait({self._work})

    async def stop(self) -> None:
        self.stopped.set()

    async def end(self) -> None:
        """As ``finish``; nothing more is logged."""
        await self.finish()
        self._log.close()


async def drive(config: ClientConfig, host: Host) -> None:
    """Take work from the orchestrator until it says ``stop`` or is gone."""
    clock = host.clock(config.time_scale)
    connector = host.connector(config.address)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        try:
            model = _hub(config, clock)
        except ComputeError as error:
            await _unfit(config, host, error)
        client = _Client(config, http, model, clock)
        handlers: dict[str, control.Handler] = {
            name: getattr(client, name)
            for name in ("connect", "reach", "links", "warm", "start", "serve", "finish", "stop")
        }
        client.peer = await host.control(config.control_path, handlers)
        watch = host.watch(config.address, client.stopped)
        try:
            client.peer.tell("hello", config.name, os.getpid(), 0)
            await control.until_stopped(client.peer, client.stopped)
            watch.close()
        finally:
            await client.end()
            await asyncio.gather(*(c.close() for c in client.connections), return_exceptions=True)
            client.clock.close()
            model.close()
