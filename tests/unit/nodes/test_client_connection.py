from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from nodes import wire
from nodes.clock import Clock, ManualClock, ScaledClock
from nodes.compute import StubProfile
from nodes.connection import Connection, ConnectionLost, ServerError
from nodes.links import DelayLine, DelayProfile
from tests.support.data_plane import TOKEN_BYTES, connected, make_server, serving, until


@contextlib.asynccontextmanager
async def connection_to(
    url: str, clock: Clock, up: DelayProfile | None = None, down: DelayProfile | None = None
) -> AsyncIterator[Connection]:
    async with aiohttp.ClientSession() as http:
        connection = Connection(http, url + wire.PATH, clock, up, down)
        await connection.open()
        try:
            yield connection
        finally:
            await connection.close()


async def test_many_requests_on_one_connection_each_get_their_own_answer() -> None:
    async with connected([make_server()], ManualClock()) as (connection,):
        answers = await asyncio.gather(*(connection.ask("ping", bytes([i])) for i in range(100)))
    assert [frame[-1] for frame, _, _ in answers] == [bytes([i]) for i in range(100)]


async def test_an_error_frame_is_raised_with_its_code_and_the_connection_serves_on() -> None:
    async with connected([make_server(cache_bytes=1.0)], ManualClock()) as (connection,):
        with pytest.raises(ServerError, match=r"^no-capacity: ") as caught:
            await connection.ask("open", "s", "c", 0, 4, 10)
        assert caught.value.code == wire.NO_CAPACITY
        assert (await connection.ask("ping", b"x"))[0][-1] == b"x"


async def test_a_server_that_goes_away_fails_what_is_pending_and_what_is_asked_later() -> None:
    server = make_server(profile=StubProfile(TOKEN_BYTES, 1.0, 1.0, 0.0))
    async with contextlib.AsyncExitStack() as running:
        url = await running.enter_async_context(serving(server))
        async with connection_to(url, ManualClock()) as connection:
            await connection.ask("open", "s", "c", 0, 4, 10)
            pending = asyncio.ensure_future(connection.ask("step", "s", 0, 1, bytes(TOKEN_BYTES)))
            await until(lambda: server.clock._sleepers[0][0] == 4.0)  # type: ignore[attr-defined]
            await running.aclose()
            with pytest.raises(ConnectionLost, match=url):
                await pending
            with pytest.raises(ConnectionLost, match=url):
                await connection.ask("ping", b"")


async def test_a_connection_that_was_never_opened_says_so() -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(ConnectionLost, match="not connected to http://nowhere/"):
            await Connection(http, "http://nowhere/", ManualClock()).ask("ping", b"")


async def test_a_server_that_cannot_be_reached_is_an_error_of_opening() -> None:
    async with serving(make_server()) as url:
        pass
    with pytest.raises(aiohttp.ClientError):
        async with connection_to(url, ManualClock()):
            pass


Answer = Callable[[web.WebSocketResponse], Awaitable[None]]


@contextlib.asynccontextmanager
async def misbehaving(answer: Answer) -> AsyncIterator[str]:
    """A server that answers every message in its own way and keeps the connection open."""

    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            await answer(socket)
        return socket

    app = web.Application()
    app.router.add_get(wire.PATH, handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


MISBEHAVIOUR: dict[str, Answer] = {
    "garbage": lambda socket: socket.send_bytes(b"\xc1\xc1"),
    "half an answer": lambda socket: socket.send_bytes(wire.pack("error", 1)),
    "no answer frame": lambda socket: socket.send_bytes(wire.pack("ping", 1, b"")),
    "text": lambda socket: socket.send_str("hello"),
}


@pytest.mark.parametrize("delayed", [False, True], ids=["plain", "delayed"])
@pytest.mark.parametrize("answer", MISBEHAVIOUR.values(), ids=MISBEHAVIOUR.keys())
async def test_a_server_that_breaks_the_protocol_is_a_lost_connection_for_everybody_who_asks(
    answer: Answer, delayed: bool
) -> None:
    down = DelayProfile(0.0, 0.0) if delayed else None
    async with (
        asyncio.timeout(10),
        misbehaving(answer) as url,
        connection_to(url, ManualClock(), down=down) as connection,
    ):
        first, second = await asyncio.gather(
            connection.ask("ping", b"1"), connection.ask("ping", b"2"), return_exceptions=True
        )
        assert isinstance(first, ConnectionLost)
        assert isinstance(second, ConnectionLost)
        with pytest.raises(ConnectionLost):
            await connection.ask("ping", b"3")


async def test_an_answer_that_nobody_waits_for_is_ignored() -> None:
    async def twice(socket: web.WebSocketResponse) -> None:
        await socket.send_bytes(wire.pack("ok", 77))
        for request_id in (1, 2):
            await socket.send_bytes(wire.pack("ok", request_id))

    async with misbehaving(twice) as url, connection_to(url, ManualClock()) as connection:
        assert (await connection.ask("ping", b""))[0] == ["ok", 1]
        assert (await connection.ask("ping", b""))[0] == ["ok", 2]


async def test_messages_take_the_delay_of_the_link_each_way_at_least() -> None:
    clock = ScaledClock()
    up, down = DelayProfile(0.004, 1e-6), DelayProfile(0.006, 2e-6)
    async with serving(make_server()) as url, connection_to(url, clock, up, down) as connection:
        for n_bytes in (1, 1000):
            _, sent_at_s, received_at_s = await connection.ask("ping", bytes(n_bytes))
            assert received_at_s - sent_at_s >= 0.010 + 3e-6 * n_bytes
    clock.close()


@pytest.mark.parametrize("n_bytes", [[2000, 1, 1, 500, 1], [1, 2, 3, 4, 5]])
async def test_delayed_messages_are_answered_in_the_order_they_were_sent(n_bytes: list[int]) -> None:
    clock = ScaledClock()
    link = DelayProfile(0.002, 1e-6)
    answered: list[int] = []
    async with serving(make_server()) as url, connection_to(url, clock, link, link) as connection:

        async def ask(index: int) -> None:
            await connection.ask("ping", bytes(n_bytes[index]))
            answered.append(index)

        await asyncio.gather(*(ask(index) for index in range(len(n_bytes))))
    assert answered == list(range(len(n_bytes)))
    clock.close()


class Carried:
    """Messages sent into one line, and when each came out."""

    def __init__(self, profile: DelayProfile) -> None:
        self.clock = ManualClock()
        self.line = DelayLine(profile, self.clock)
        self.arrived: list[tuple[str, float]] = []
        self.tasks: list[asyncio.Task[None]] = []

    def send(self, name: str, n_bytes: int) -> None:
        async def run() -> None:
            await self.line.carry(n_bytes)
            self.arrived.append((name, self.clock.now_s()))

        self.tasks.append(asyncio.create_task(run()))


async def test_a_message_arrives_after_those_before_it_its_transmission_and_the_delay() -> None:
    carried = Carried(DelayProfile(delay_s=8.0, s_per_byte=0.25))
    carried.send("big", 16)
    carried.send("small", 1)
    await carried.clock.advance(6.0)
    carried.send("on a free link", 4)
    await carried.clock.advance(100.0)
    assert carried.arrived == [("big", 12.0), ("small", 12.25), ("on a free link", 15.0)]


async def test_messages_of_no_size_keep_their_order() -> None:
    carried = Carried(DelayProfile(1.0, 0.0))
    for i in range(20):
        carried.send(str(i), 5)
    await carried.clock.advance(1.0)
    assert carried.arrived == [(str(i), 1.0) for i in range(20)]
