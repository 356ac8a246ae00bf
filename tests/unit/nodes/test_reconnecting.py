"""A connection whose server dies, starts again, is stopped, or answers late."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from nodes import wire
from nodes.chain import Chain, Refusal
from nodes.connection import Connection
from nodes.errors import ConnectionLost
from nodes.request import Request
from policies.rules import RecoveryRules
from tests.support.data_plane import TOKEN_BYTES, ask, drive, serving_app, until
from tests.support.farm import farm
from tests.support.manual_clock import ManualClock


def n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0


async def test_a_server_that_began_again_is_connected_to_anew_and_old_sessions_are_lost() -> None:
    async with farm([(0, 4)], ManualClock()) as servers:
        (connection,) = servers.connections
        first = await connection.ready()
        await ask(connection, "open", "s", "c", 0, 4, 10, generation=first)
        servers.kill(0)
        await until(lambda: not connection.has(first))
        with pytest.raises(ConnectionLost):
            await connection.ready()
        await servers.begin(0)
        second = await connection.ready()
        assert second == first + 1
        with pytest.raises(ConnectionLost, match="was lost and opened again"):
            await ask(connection, "step", "s", 0, 1, bytes(TOKEN_BYTES), generation=first)
        await ask(connection, "open", "s", "c", 0, 4, 10, generation=second)


async def test_sessions_that_need_a_lost_connection_at_once_share_one_attempt() -> None:
    async with farm([(0, 4)], ManualClock()) as servers:
        (connection,) = servers.connections
        servers.kill(0)
        await until(lambda: not connection.has(1))
        await servers.begin(0)
        assert await asyncio.gather(*(connection.ready() for _ in range(20))) == [2] * 20
        assert servers.servers[0].counters.connections == 1


async def test_a_hundred_deaths_leave_no_socket_and_no_task_behind() -> None:
    async with farm([(0, 4)], ManualClock()) as servers:
        (connection,) = servers.connections

        async def die_and_return() -> None:
            generation = connection.generation
            servers.kill(0)
            await until(lambda: not connection.has(generation))
            await servers._old.pop().cleanup()
            await servers.begin(0)
            await connection.ready()

        await die_and_return()
        descriptors, tasks = n_descriptors(), len(asyncio.all_tasks())
        for _ in range(100):
            await die_and_return()
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        assert n_descriptors() <= descriptors


async def test_a_connection_that_was_closed_is_not_opened_again() -> None:
    async with farm([(0, 4)], ManualClock()) as servers:
        (connection,) = servers.connections
        await connection.close()
        with pytest.raises(ConnectionLost, match="was closed"):
            await connection.ready()


async def test_a_server_may_be_at_another_address_when_it_begins() -> None:
    async with farm([(0, 4), (0, 4)], ManualClock()) as servers, aiohttp.ClientSession() as http:
        late = Connection(http, "http://127.0.0.1:9/nowhere", ManualClock())
        with pytest.raises(ConnectionLost):
            await late.ready()
        late.move(servers.url(1))
        assert await late.ready() == 1
        await late.close()


def chain_of(connection: Connection, clock: ManualClock) -> Chain:
    return Chain(
        Request(0, 0.0, 3, 3),
        "0",
        "c",
        [connection],
        clock,
        RecoveryRules(connect_timeout_s=5.0, request_timeout_s=180.0),
    )


@contextlib.asynccontextmanager
async def silent_listener() -> AsyncIterator[str]:
    """Accepts connections and sends nothing, as a machine does whose process is stopped."""
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{wire.PATH}"
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):  # the client has gone
                await writer.wait_closed()


async def test_a_server_that_takes_the_connection_and_says_nothing_is_not_there() -> None:
    clock = ManualClock()
    async with silent_listener() as url, aiohttp.ClientSession() as http:
        connection = Connection(http, url, clock)
        chain = chain_of(connection, clock)
        opening = asyncio.ensure_future(chain.open([(0, 0, 4)], 1))
        await drive(clock, opening)
        assert opening.result() == Refusal(0, "no connection within 5 s", (0,), (0,), False)
        assert clock.now_s() == 5.0
        chain.end()
        await connection.close()


@contextlib.asynccontextmanager
async def answering_when_told(told: asyncio.Event, frames: list[wire.Request]) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            frames.append(wire.unpack_request(message.data))
            await told.wait()
            await socket.send_bytes(wire.pack(wire.Ok(frames[-1].id)))
        return socket

    app = web.Application()
    app.router.add_get(wire.PATH, handle)
    async with serving_app(app) as url:
        yield url + wire.PATH


async def test_a_session_whose_opening_is_confirmed_too_late_is_closed() -> None:
    clock, told, frames = ManualClock(), asyncio.Event(), list[wire.Request]()
    async with answering_when_told(told, frames) as url, aiohttp.ClientSession() as http:
        connection = Connection(http, url, clock)
        await connection.open()
        chain = chain_of(connection, clock)
        opening = asyncio.ensure_future(chain.open([(0, 0, 4)], 1))
        await drive(clock, opening)
        assert isinstance(opening.result(), Refusal)
        told.set()
        await until(lambda: len(frames) == 2)
        assert [type(frame) for frame in frames] == [wire.Open, wire.Close]
        assert frames[1].session == frames[0].session == "0"
        chain.end()
        await connection.close()


async def test_the_sessions_of_others_do_not_notice_that_one_is_forgotten() -> None:
    async with farm([(0, 4)], ManualClock()) as servers:
        (connection,) = servers.connections
        await ask(connection, "open", "a", "c", 0, 4, 10)
        await ask(connection, "open", "b", "c", 0, 4, 10)
        connection.forget("a", 1)
        await until(lambda: len(servers.servers[0].account) == 1)
        await ask(connection, "step", "b", 0, 1, bytes(TOKEN_BYTES))
        assert connection.has(1)
