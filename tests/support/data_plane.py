"""Real servers on the loopback interface, and clocks that need no waiting, for tests of ``nodes``."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import aiohttp
import msgpack
from aiohttp import web

from nodes import wire
from nodes.admission import HostedBlocks
from nodes.clock import Clock
from nodes.compute import Compute, StubCompute, StubProfile
from nodes.connection import Answered, Connection
from nodes.messages import ServerStatus
from nodes.server import Server, ServerLimits
from policies.rules import PagingRules, RecoveryRules
from policies.steps import StepTimes
from tests.support.manual_clock import ManualClock

PATIENT = RecoveryRules(request_timeout_s=math.inf, connect_timeout_s=math.inf)
"""Rules of clients that wait for as long as it takes: tests move the clock in large steps."""
TOKEN_BYTES = 64
INSTANT = StubProfile(TOKEN_BYTES, StepTimes(0.0, 0.0, 0.0))
"""A stub that takes no time."""


class JumpClock:
    """Time jumps to whatever instant is waited for; ``waits_s`` tells how long each wait was."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self.waits_s: list[float] = []

    def now_s(self) -> float:
        return self._now_s

    async def sleep_until_s(self, at_s: float) -> None:
        if at_s > self._now_s:
            self.waits_s.append(at_s - self._now_s)
            self._now_s = at_s
        await asyncio.sleep(0)


def make_server(
    first: int = 0,
    last: int = 4,
    *,
    name: str = "s",
    cache_bytes: float = 1e6,
    clock: Clock | None = None,
    profile: StubProfile = INSTANT,
    compute: Compute | None = None,
    limits: ServerLimits | None = None,
    paging: PagingRules | None = None,
    kept_tokens: int | None = None,
) -> Server:
    """Attention cache of one token in one block takes one byte. Without ``clock`` time stands still."""
    clock = clock or ManualClock()
    return Server(
        name,
        HostedBlocks(first, last, cache_bytes, 1.0, paging, kept_tokens),
        compute or StubCompute(profile, clock),
        clock,
        limits,
    )


@contextlib.asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    """The base address of ``server``, which listens on a free port of 127.0.0.1."""
    async with serving_app(server.app()) as url:
        yield url


@contextlib.asynccontextmanager
async def serving_app(app: web.Application) -> AsyncIterator[str]:
    """The base address of ``app``, on a free port of 127.0.0.1."""
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def connected(servers: Sequence[Server], clock: Clock) -> AsyncIterator[list[Connection]]:
    """A hub client's connections to ``servers``, in order."""
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(server)) for server in servers]
        http = await stack.enter_async_context(aiohttp.ClientSession())
        connections = [Connection(http, url + wire.PATH, clock) for url in urls]
        for connection in connections:
            await connection.open()
            stack.push_async_callback(connection.close)
        yield connections


def status(**fields: Any) -> ServerStatus:
    """A server's status with everything else zero."""
    zeros = dict.fromkeys(ServerStatus.__struct_fields__, 0)
    return ServerStatus(**{**zeros, "name": "s", "phase": "serving", "memory": {}, **fields})


def raw_frame(*fields: Any) -> bytes:
    """A frame as it goes over the wire, whatever ``nodes.wire`` thinks of it."""
    return bytes(msgpack.packb(fields))


def unpadded(fields: list[Any]) -> list[Any]:
    """A frame's fields without the padding, which is the last one of most kinds."""
    return fields[:-1] if fields[0] not in ("ok", "got", "more", "drop") else fields


def ask(
    connection: Connection, kind: str, *fields: Any, generation: int | None = None
) -> Coroutine[Any, Any, Answered]:
    """Sends a request of that kind over a client's connection."""
    frame = wire.unpack_request(raw_frame(kind, connection.next_id(), *fields))
    return connection.ask(frame, generation=generation)


class RawClient:
    """A WebSocket that may send anything at all."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def send(self, data: bytes | str) -> None:
        if isinstance(data, str):
            await self.socket.send_str(data)
        else:
            await self.socket.send_bytes(data)

    async def ask(self, *fields: Any) -> list[Any]:
        await self.send(raw_frame(*fields))
        return await self.answer()

    async def answer(self) -> list[Any]:
        return unpadded(msgpack.unpackb(await self.socket.receive_bytes(timeout=10)))

    async def is_closed_by_server(self) -> bool:
        """Whether the next thing from the server is the end of the connection."""
        message = await self.socket.receive(timeout=10)
        return message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)


@contextlib.asynccontextmanager
async def raw_client(url: str) -> AsyncIterator[RawClient]:
    """A client of its own TCP connection; leaving the block drops the connection."""
    async with aiohttp.ClientSession() as http, http.ws_connect(url + wire.PATH, max_msg_size=0) as socket:
        yield RawClient(socket)


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until ``condition`` holds; fails after 10 s."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.001)


async def drive(clock: ManualClock, work: asyncio.Future[Any], step_s: float = 1.0) -> None:
    """Moves ``clock`` on until ``work`` is done; fails after 20 s."""
    async with asyncio.timeout(20):
        while not work.done():
            await clock.advance(step_s)
