"""Servers on the loopback interface that can be killed and begun again, and a client's sessions on them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from nodes import wire
from nodes.admission import HostedBlocks
from nodes.clock import Clock
from nodes.compute import Computed, StubCompute
from nodes.connection import Connection
from nodes.hub import StubHub
from nodes.records import AnyRecord, HopRecord, Plan, Recoveries, States, Token
from nodes.request import Request
from nodes.server import Server
from nodes.session import HubSession, SessionRules
from policies.rules import PagingRules, RecoveryRules
from policies.workload import Backoff
from tests.support.data_plane import INSTANT, PATIENT, TOKEN_BYTES, until
from tests.support.manual_clock import ManualClock

Happens = Callable[[int, int, int], Any]
"""Called before a server computes a step: (server, position, tokens). May be a coroutine function."""


class _Watched(StubCompute):
    """Tells of every step before it is computed."""

    def __init__(self, number: int, happens: Happens) -> None:
        super().__init__(INSTANT, ManualClock())
        self._number = number
        self._happens = happens

    async def step(
        self, session: Any, position: int, n_tokens: int, payload: bytes, arrived_at_s: float
    ) -> Computed:
        result = self._happens(self._number, position, n_tokens)
        if result is not None:
            await result
        return await super().step(session, position, n_tokens, payload, arrived_at_s)


class Farm:
    """One server per range of blocks. ``kill`` is what a client sees of SIGKILL: connections are reset."""

    def __init__(
        self,
        ranges: Sequence[tuple[int, int]],
        clock: Clock | None = None,
        cache_bytes: float = 1e6,
        paging: PagingRules | None = None,
    ) -> None:
        self._cache = cache_bytes, paging
        self.ranges = list(ranges)
        self.up: set[int] = set()
        self.servers: dict[int, Server] = {}
        self.all_servers: list[Server] = []
        self.steps: list[tuple[int, int, int]] = []
        self.happens: Happens = lambda *_: None
        self.connections: list[Connection] = []
        self._clock = clock or ManualClock()
        self._sites: dict[int, web.TCPSite] = {}
        self._runners: dict[int, web.AppRunner] = {}
        self._old: list[web.AppRunner] = []
        self._ports: dict[int, int] = {}

    @property
    def n_blocks(self) -> int:
        return max(last for _, last in self.ranges)

    async def begin(self, number: int) -> None:
        """(Re)start a server at its address, with nothing in its caches."""
        cache_bytes, paging = self._cache
        hosted = HostedBlocks(*self.ranges[number], cache_bytes, 1.0, paging)
        compute = _Watched(number, self._step)
        server = self.servers[number] = Server(f"s{number}", hosted, compute, self._clock)
        self.all_servers.append(server)
        runner = web.AppRunner(server.app(), access_log=None, handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._ports.get(number, 0))
        await site.start()
        self._ports[number] = runner.addresses[0][1]
        self._sites[number], self._runners[number] = site, runner
        self.up.add(number)

    def _step(self, number: int, position: int, n_tokens: int) -> Any:
        self.steps.append((number, position, n_tokens))
        return self.happens(number, position, n_tokens)

    def kill(self, number: int) -> None:
        """Nobody listens any more, and every connection is reset; not of one that only begins."""
        if number not in self._runners:
            return
        self.up.discard(number)
        runner = self._runners.pop(number)
        listener = self._sites.pop(number)._server
        assert listener is not None and runner.server is not None
        listener.close()
        for protocol in runner.server.connections:
            if protocol.transport is not None:
                protocol.transport.abort()
        self._old.append(runner)

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self._ports[number]}{wire.PATH}"

    def is_free(self) -> bool:
        """Whether no server, dead or alive, holds anything of any session."""
        return all(s.account.used_bytes == 0 and not len(s.account) for s in self.all_servers)

    async def close(self) -> None:
        for runner in [*self._runners.values(), *self._old]:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def farm(
    ranges: Sequence[tuple[int, int]],
    clock: Clock,
    absent: Sequence[int] = (),
    cache_bytes: float = 1e6,
    paging: PagingRules | None = None,
) -> AsyncIterator[Farm]:
    """A farm with a client's connections to it."""
    servers = Farm(ranges, cache_bytes=cache_bytes, paging=paging)
    async with aiohttp.ClientSession() as http, contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(servers.close)
        for number in range(len(ranges)):
            await servers.begin(number)
        servers.connections = [Connection(http, servers.url(i), clock) for i in range(len(ranges))]
        for number, connection in enumerate(servers.connections):
            stack.push_async_callback(connection.close)
            if number in absent:
                servers.kill(number)
            else:
                await connection.open()
        yield servers


class Log:
    """Keeps what a session reports."""

    def __init__(self) -> None:
        self.states: list[tuple[str, dict[str, Any]]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.token_ids: list[int] = []
        self.rows: list[list[HopRecord]] = []

    def observe(self, record: AnyRecord) -> None:
        if isinstance(record, Token):
            self.token_ids.append(record.token_id)
            self.rows.append(record.hops)
        elif isinstance(record, States):
            self.states.append((record.kind, record.details()))
        elif isinstance(record, Recoveries):
            self.events.append((record.kind, {"at_s": record.at_s, **record.details()}))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [details for kind, details in self.events if kind == event]


class Session:
    """One request over a farm. Routes take, at every block, the first server of ``prefer`` that is usable."""

    def __init__(
        self,
        farm: Farm,
        clock: Clock,
        prefer: Sequence[int],
        *,
        n_input_tokens: int = 5,
        n_output_tokens: int = 4,
        recovery: RecoveryRules | None = None,
        give_up_s: float = 0.0,
        index: int = 3,
        kind: type[HubSession] = HubSession,
        model: StubHub | None = None,
    ) -> None:
        self.farm = farm
        self.log = Log()
        self.prefer = list(prefer)
        self.asked: list[tuple[int, int, int]] = []
        self.believed: Callable[[], set[int]] = lambda: farm.up
        rules = SessionRules(backoff=Backoff(give_up_s=give_up_s), recovery=recovery or PATIENT)
        self.hub = kind(
            Request(index, 0.0, n_input_tokens, n_output_tokens),
            str(index),
            "c",
            farm.connections,
            self._route,
            model or StubHub(TOKEN_BYTES, farm.n_blocks),
            rules,
            clock,
            self.log.observe,
            self._reroute,
        )

    async def _route(self, request: Request, attempt: int, n_done: int) -> Plan | None:
        return self._chain(0, self.farm.n_blocks)

    async def _reroute(self, request: Request, first: int, last: int, n_done: int) -> Plan | None:
        self.asked.append((first, last, n_done))
        return self._chain(first, last)

    def _chain(self, first: int, last: int) -> Plan | None:
        hops, usable = [], self.believed()
        while first < last:
            for number in self.prefer:
                low, high = self.farm.ranges[number]
                if number in usable and low <= first < high:
                    break
            else:
                return None
            hops.append([number, first, min(high, last)])
            first = hops[-1][2]
        return Plan(hops, 0.0, 0.0)

    async def run(self) -> Log:
        """Serves the request; the log of a good end: every token there, every cache free."""
        await self.hub.run()
        await until(self.farm.is_free)
        return self.log


def expected_tokens(
    n_blocks: int, n_input_tokens: int = 5, n_output_tokens: int = 4, index: int = 3
) -> list[int]:
    """The tokens of the whole model on one machine."""
    from nodes.digest import apply_blocks, embed, token_of

    caches = [0] * n_blocks
    position, pending, tokens = 0, [index + i for i in range(n_input_tokens)], []
    for _ in range(n_output_tokens):
        value = 0
        for token in pending:
            value = apply_blocks(embed(token, position), 0, caches)
            position += 1
        pending = [token_of(value)]
        tokens += pending
    return tokens
