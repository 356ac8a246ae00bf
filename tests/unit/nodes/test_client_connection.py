from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from nodes import wire
from nodes.clock import Clock, ScaledClock
from nodes.compute import StubProfile
from nodes.connection import Connection
from nodes.errors import ConnectionLost, ServerError
from nodes.links import GIVE_UP_S, DelayLine, DelayProfile
from policies.steps import StepTimes
from tests.support.data_plane import (
    TOKEN_BYTES,
    ask,
    connected,
    drive,
    make_server,
    raw_frame,
    serving,
    serving_app,
    until,
)
from tests.support.manual_clock import ManualClock


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
        answers = await asyncio.gather(*(ask(connection, "ping", bytes([i])) for i in range(100)))
    assert [answer.frame.payload for answer in answers] == [bytes([i]) for i in range(100)]


async def test_an_error_frame_is_raised_with_its_code_and_the_connection_serves_on() -> None:
    async with connected([make_server(cache_bytes=1.0)], ManualClock()) as (connection,):
        with pytest.raises(ServerError, match=r"^never-fits: ") as caught:
            await ask(connection, "open", "s", "c", 0, 4, 10)
        assert caught.value.code == wire.NEVER_FITS
        assert (await ask(connection, "ping", b"x")).frame.payload == b"x"


async def test_a_server_that_goes_away_fails_what_is_pending_and_what_is_asked_later() -> None:
    server = make_server(profile=StubProfile(TOKEN_BYTES, StepTimes(1.0, 1.0, 0.0)))
    async with contextlib.AsyncExitStack() as running:
        url = await running.enter_async_context(serving(server))
        async with connection_to(url, ManualClock()) as connection:
            await ask(connection, "open", "s", "c", 0, 4, 10)
            pending = asyncio.ensure_future(ask(connection, "step", "s", 0, 1, bytes(TOKEN_BYTES)))
            await until(lambda: server.clock._sleepers[0][0] == 4.0)  # type: ignore[attr-defined]
            await running.aclose()
            with pytest.raises(ConnectionLost, match=url):
                await pending
            with pytest.raises(ConnectionLost, match=url):
                await ask(connection, "ping", b"")


async def test_a_connection_that_was_never_opened_says_so() -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(ConnectionLost, match="not connected to http://nowhere/"):
            await ask(Connection(http, "http://nowhere/", ManualClock()), "ping", b"")


async def test_a_server_that_cannot_be_reached_is_an_error_of_opening() -> None:
    async with serving(make_server()) as url:
        pass
    with pytest.raises(aiohttp.ClientError):
        async with connection_to(url, ManualClock()):
            pass


Answer = Callable[[web.WebSocketResponse], Awaitable[None]]


@contextlib.asynccontextmanager
async def misbehaving(answer: Answer) -> AsyncIterator[str]:
    """A server that answers every message with ``answer`` and keeps the connection open."""

    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            await answer(socket)
        return socket

    app = web.Application()
    app.router.add_get(wire.PATH, handle)
    async with serving_app(app) as url:
        yield url


MISBEHAVIOUR: dict[str, Answer] = {
    "garbage": lambda socket: socket.send_bytes(b"\xc1\xc1"),
    "half an answer": lambda socket: socket.send_bytes(raw_frame("error", 1)),
    "no answer frame": lambda socket: socket.send_bytes(raw_frame("ping", 1, b"")),
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
            ask(connection, "ping", b"1"), ask(connection, "ping", b"2"), return_exceptions=True
        )
        assert isinstance(first, ConnectionLost)
        assert isinstance(second, ConnectionLost)
        with pytest.raises(ConnectionLost):
            await ask(connection, "ping", b"3")


async def test_closing_does_not_wait_for_a_server_that_is_not_heard() -> None:
    ends = asyncio.Event()

    async def deaf(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await ends.wait()
        return socket

    app = web.Application()
    app.router.add_get(wire.PATH, deaf)
    async with serving_app(app) as url, connection_to(url, ManualClock()) as connection:
        async with asyncio.timeout(5):
            await connection.close()
        ends.set()


async def test_an_answer_that_nobody_waits_for_is_ignored() -> None:
    async def twice(socket: web.WebSocketResponse) -> None:
        await socket.send_bytes(raw_frame("ok", 77))
        for request_id in (wire.FIRST_ID, wire.FIRST_ID + 1):
            await socket.send_bytes(raw_frame("ok", request_id))

    async with misbehaving(twice) as url, connection_to(url, ManualClock()) as connection:
        assert (await ask(connection, "ping", b"")).frame == wire.Ok(wire.FIRST_ID)
        assert (await ask(connection, "ping", b"")).frame == wire.Ok(wire.FIRST_ID + 1)


async def test_messages_take_the_delay_of_the_link_each_way_at_least() -> None:
    clock = ScaledClock()
    up, down = DelayProfile(0.004, 1e-6), DelayProfile(0.006, 2e-6)
    async with serving(make_server()) as url, connection_to(url, clock, up, down) as connection:
        for n_bytes in (1, 1000):
            _, sent_at_s, received_at_s = await ask(connection, "ping", bytes(n_bytes))
            assert received_at_s - sent_at_s >= 0.010 + 3e-6 * n_bytes
    clock.close()


@pytest.mark.parametrize("n_bytes", [[2000, 1, 1, 500, 1], [1, 2, 3, 4, 5]])
async def test_delayed_messages_are_answered_in_the_order_they_were_sent(n_bytes: list[int]) -> None:
    clock = ScaledClock()
    link = DelayProfile(0.002, 1e-6)
    answered: list[int] = []
    async with serving(make_server()) as url, connection_to(url, clock, link, link) as connection:

        async def ping(index: int) -> None:
            await ask(connection, "ping", bytes(n_bytes[index]))
            answered.append(index)

        await asyncio.gather(*(ping(index) for index in range(len(n_bytes))))
    assert answered == list(range(len(n_bytes)))
    clock.close()


class Carried:
    """Sends messages through one delay line, and notes when each has arrived."""

    def __init__(self, profile: DelayProfile) -> None:
        self.clock = ManualClock()
        self.line = DelayLine(profile, self.clock)
        self.arrived: list[tuple[str, float]] = []
        self.tasks: list[asyncio.Task[None]] = []

    def send(self, name: str, n_bytes: int) -> None:
        async def run() -> None:
            await self.clock.sleep_until_s(await self.line.enter(n_bytes))
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


async def test_a_new_profile_is_for_messages_sent_from_then_on_and_none_overtakes_another() -> None:
    carried = Carried(DelayProfile(8.0, 0.0))
    carried.send("slow", 1)
    await carried.clock.advance(1.0)
    carried.line.change(DelayProfile(2.0, 0.0))
    carried.send("behind it", 1)
    await carried.clock.advance(7.5)
    carried.send("fast", 1)
    await carried.clock.advance(100.0)
    assert carried.arrived == [("slow", 8.0), ("behind it", 8.0), ("fast", 10.5)]


async def test_nothing_that_is_sent_while_a_link_is_cut_arrives_before_it_is_up_again() -> None:
    carried = Carried(DelayProfile(2.0, 0.25))
    carried.send("on its way", 4)
    await carried.clock.advance(0.5)
    carried.line.change(DelayProfile(2.0, 0.25, 0.0, 1.0))
    carried.send("first", 4)
    carried.send("second", 4)
    await carried.clock.advance(99.5)
    assert carried.arrived == [("on its way", 3.0)]
    carried.line.change(DelayProfile(2.0, 0.25))
    carried.send("third", 4)
    await carried.clock.advance(100.0)
    assert carried.arrived[1:] == [("first", 103.0), ("second", 104.0), ("third", 105.0)]


async def test_a_link_that_stays_cut_is_given_up() -> None:
    clock = ManualClock()
    line = DelayLine(DelayProfile(1.0, 0.0, 0.0, 1.0), clock)
    carrying = asyncio.create_task(line.enter(1))
    await clock.advance(GIVE_UP_S - 1)
    assert not carrying.done()
    await clock.advance(1)
    with pytest.raises(ConnectionError, match="nothing came through for 900 s"):
        await carrying


async def test_jitter_keeps_the_order() -> None:
    carried = Carried(DelayProfile(1.0, 0.001, 0.5))
    for i in range(200):
        carried.send(str(i), 10)
        await carried.clock.advance(0.05)
    await carried.clock.advance(10.0)
    assert [name for name, _ in carried.arrived] == [str(i) for i in range(200)]


async def test_jitter_is_anything_between_its_bounds() -> None:
    carried = Carried(DelayProfile(1.0, 0.001, 0.5))
    for i in range(200):
        carried.send(str(i), 10)
        await carried.clock.advance(2.0)
    took_s = [at_s - 2.0 * i for i, (_, at_s) in enumerate(carried.arrived)]
    assert 0.51 - 1e-9 <= min(took_s) < 0.55
    assert 1.47 < max(took_s) <= 1.51 + 1e-9


@pytest.mark.parametrize(("delay_s", "again_s"), [(0.01, 0.22), (0.5, 1.2)])
async def test_a_lost_packet_is_sent_again_after_a_round_trip_and_the_timer(
    delay_s: float, again_s: float
) -> None:
    line_of = DelayProfile(delay_s, 0.0, 0.0, 0.5)
    took_s = []
    for _ in range(40):
        carried = Carried(line_of)
        carried.line = DelayLine(line_of, carried.clock, random.Random(len(took_s)))
        carried.send("one packet", 1448)
        await carried.clock.advance(1000.0)
        took_s.append(carried.arrived[0][1])
    rounds = [(value_s - delay_s) / again_s for value_s in took_s]
    assert all(abs(n - round(n)) < 1e-6 for n in rounds)
    assert {round(n) for n in rounds} >= {0, 1, 2}


class Draws(random.Random):
    """Counts the packets for which a loss is drawn; none is lost."""

    n = 0

    def random(self) -> float:
        self.n += 1
        return 1.0


@pytest.mark.parametrize(("segment_bytes", "n_packets"), [(1448, 7), (8948, 2)])
async def test_a_message_is_lost_in_as_many_packets_as_it_has_segments(
    segment_bytes: int, n_packets: int
) -> None:
    clock, draws = ManualClock(), Draws()
    line = DelayLine(DelayProfile(0.0, 0.0, loss_ratio=0.5, segment_bytes=segment_bytes), clock, draws)
    await line.enter(9000)
    assert draws.n == n_packets


async def test_a_connection_whose_link_gives_up_is_lost_for_everybody_who_waits() -> None:
    cut = DelayProfile(0.001, 0.0, 0.0, 1.0)
    for up, down in ((cut, DelayProfile(0.0, 0.0)), (DelayProfile(0.0, 0.0), cut)):
        clock = ManualClock()
        async with serving(make_server()) as url, connection_to(url, clock, up, down) as connection:
            asked = asyncio.ensure_future(ask(connection, "ping", b"x"))
            await until(lambda clock=clock: bool(clock._sleepers))
            await clock.advance(GIVE_UP_S)
            with pytest.raises(ConnectionLost):
                await asked


async def test_answers_that_wait_for_their_link_are_lost_with_their_connection_and_hold_up_no_other() -> None:
    answered_at_s = set()
    for n_waiting in (0, 4):
        clock = ManualClock()
        link = DelayProfile(1.0, 1.0)
        async with serving(make_server()) as url, connection_to(url, clock, None, link) as connection:
            asked = [asyncio.ensure_future(ask(connection, "ping", b"x")) for _ in range(1 + n_waiting)]
            await until(lambda clock=clock: bool(clock._sleepers))  # the first answer is on its way
            await asyncio.sleep(0.05)  # others, if any, wait for the link
            assert connection._channel is not None
            await connection._channel.socket.close()
            await asyncio.wait(asked)
            assert all(isinstance(each.exception(), ConnectionLost) for each in asked)
            await connection.ready()
            again = asyncio.ensure_future(ask(connection, "ping", b"x"))
            await drive(clock, again)
            answered_at_s.add(again.result().received_at_s)
    assert len(answered_at_s) == 1


async def test_the_links_of_an_open_connection_can_change() -> None:
    clock = ScaledClock()
    none = DelayProfile(0.0, 0.0)
    async with serving(make_server()) as url, connection_to(url, clock, none, none) as connection:
        connection.change_links(None, DelayProfile(0.02, 0.0))
        _, sent_at_s, received_at_s = await ask(connection, "ping", b"x")
        assert received_at_s - sent_at_s >= 0.02
    clock.close()


async def test_an_opening_that_is_cancelled_as_its_answer_arrives_is_closed() -> None:
    clock = ManualClock()
    server = make_server(clock=clock)
    async with connected([server], clock) as [connection]:
        deliver = connection._deliver
        opening = asyncio.create_task(ask(connection, "open", "s", "c", 0, 4, 8))

        def deliver_and_cancel(link: Any, frame: list[Any], received_at_s: float) -> None:
            deliver(link, frame, received_at_s)
            opening.cancel()  # the answer has arrived, but the task that waits for it has not run yet

        connection._deliver = deliver_and_cancel  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert server.counters.opened == 1
        await until(lambda: server.counters.closed == 1)
        assert server.account.used_bytes == 0


async def test_an_opening_that_is_cancelled_while_its_link_is_busy_is_sent_and_closed() -> None:
    clock = ManualClock()
    server = make_server(clock=clock)
    link = DelayProfile(0.0, s_per_byte=1.0)
    async with serving(server) as url, connection_to(url, clock, up=link) as connection:
        first = asyncio.create_task(ask(connection, "ping", bytes(100)))
        await clock.advance(1.0)
        opening = asyncio.create_task(ask(connection, "open", "s", "c", 0, 4, 8))
        await clock.advance(1.0)
        opening.cancel()
        await clock.advance(10_000.0)
        await first
        await until(lambda: server.counters.opened == 1)
        await clock.advance(10_000.0)
        await until(lambda: not connection._closings)
        assert server.counters.closed == 1 and server.account.used_bytes == 0


async def test_what_was_asked_on_a_lost_connection_is_not_kept() -> None:
    server = make_server(profile=StubProfile(TOKEN_BYTES, StepTimes(1.0, 1.0, 0.0)))

    def lost() -> list[ConnectionLost]:
        return [thing for thing in gc.get_objects() if type(thing) is ConnectionLost]

    gc.collect()
    of_other_tests = lost()
    gc.disable()  # it counts objects, not bytes: memory that only it finds stays for long
    try:
        async with contextlib.AsyncExitStack() as running:
            url = await running.enter_async_context(serving(server))
            async with connection_to(url, ManualClock()) as connection:
                await ask(connection, "open", "s", "c", 0, 4, 10)
                pending = asyncio.ensure_future(ask(connection, "step", "s", 0, 1, bytes(TOKEN_BYTES)))
                await until(lambda: server.account.used_bytes > 0 and bool(server.clock._sleepers))  # type: ignore[attr-defined]
                await running.aclose()
                with pytest.raises(ConnectionLost):
                    await pending
                del pending
                await asyncio.sleep(0)
        assert len(lost()) == len(of_other_tests)
    finally:
        gc.enable()
