"""A server that moves to other blocks: which sessions go on, are refused, wait, and are cut."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nodes import wire
from nodes.compute import StubProfile
from nodes.connection import Connection
from nodes.digest import apply_blocks, write_rows
from nodes.errors import ServerError
from nodes.messages import Moved
from nodes.moving import Moving
from nodes.server import Server
from policies.steps import StepTimes
from tests.support.data_plane import TOKEN_BYTES, ask, connected, drive, make_server, until
from tests.support.manual_clock import ManualClock


class Phases:
    """Collects the phases that a server reports."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []

    def __call__(self, phase: str, at_s: float) -> None:
        self.told.append((phase, at_s))


def moving(server: Server) -> tuple[Moving, Phases]:
    phases = Phases()
    return Moving(server.sessions, phases), phases


async def opened(connection: Connection, key: str, first: int, last: int, tokens: int = 10) -> None:
    await ask(connection, "open", key, "c", first, last, tokens)


async def refusal(work: Any) -> str:
    with pytest.raises(ServerError) as refused:
        await work
    return refused.value.code


def step(connection: Connection, key: str, position: int) -> Any:
    return ask(connection, "step", key, position, 1, write_rows([7], TOKEN_BYTES))


async def test_sessions_on_kept_blocks_go_on_while_others_are_waited_for_and_then_the_new_blocks_open() -> (
    None
):
    clock = ManualClock()
    server = make_server(0, 4, clock=clock)
    mover, phases = moving(server)
    async with connected([server], clock) as [connection]:
        await opened(connection, "stays", 2, 4)
        await opened(connection, "goes", 0, 4)
        work = asyncio.ensure_future(mover.rehost(2, 6, 500.0, 100.0, 8.0))
        await until(lambda: server.sessions.phase == "draining")
        assert await refusal(opened(connection, "new", 0, 2)) == wire.NO_CAPACITY
        await opened(connection, "also kept", 2, 4)
        frame, _, _ = await step(connection, "stays", 0)
        caches = [0, 0]
        assert frame.payload == write_rows([apply_blocks(7, 2, caches)], TOKEN_BYTES)
        await clock.advance(3.0)
        assert not work.done()
        await ask(connection, "close", "goes")
        await until(lambda: server.sessions.phase == "loading")
        assert await refusal(opened(connection, "too early", 4, 6)) == wire.NO_CAPACITY
        await step(connection, "stays", 1)
        await drive(clock, work, 1.0)
        await opened(connection, "new", 4, 6)
        await step(connection, "stays", 2)
        health = server.status()
    assert work.result() == Moved(0.0, 3.0, 11.0, 0)
    assert phases.told == [("draining", 0.0), ("loading", 3.0), ("serving", 11.0)]
    assert (health.first_block, health.last_block, health.phase) == (2, 6, "serving")
    assert health.cache_capacity_bytes == 500.0


async def test_sessions_that_take_too_long_are_cut_with_a_reason_and_others_notice_nothing() -> None:
    clock = ManualClock()
    server = make_server(0, 4, clock=clock)
    mover, _ = moving(server)
    async with connected([server], clock) as [connection]:
        await opened(connection, "stays", 2, 4)
        await opened(connection, "goes", 0, 4)
        await step(connection, "goes", 0)
        work = asyncio.ensure_future(mover.rehost(2, 6, 1e6, 5.0, 0.0))
        await drive(clock, work, 1.0)
        assert await refusal(step(connection, "goes", 1)) == wire.SESSION_MOVED
        await ask(connection, "close", "goes")  # its end is not reported
        await step(connection, "stays", 0)
        assert connection.has(connection.generation)
    result = work.result()
    assert (result.drained_at_s, result.n_cut) == (5.0, 1)


async def test_room_that_goes_costs_the_sessions_that_came_last() -> None:
    clock = ManualClock()
    server = make_server(0, 4, cache_bytes=120.0, clock=clock)
    mover, _ = moving(server)
    async with connected([server], clock) as [connection]:
        for key in ("a", "b", "c"):
            await opened(connection, key, 0, 4)  # 40 bytes each
        work = asyncio.ensure_future(mover.rehost(0, 4, 80.0, 1.0, 0.0))
        await drive(clock, work, 1.0)
        assert work.result().n_cut == 1
        assert await refusal(step(connection, "c", 0)) == wire.SESSION_MOVED
        await step(connection, "a", 0)
        await step(connection, "b", 0)
        assert server.account.used_bytes == 80.0


async def test_a_server_that_does_not_drain_cuts_everything_at_once_and_keeps_nothing_meanwhile() -> None:
    clock = ManualClock()
    server = make_server(0, 4, clock=clock)
    mover, phases = moving(server)
    async with connected([server], clock) as [connection]:
        await opened(connection, "x", 2, 4)
        work = asyncio.ensure_future(mover.rehost(2, 6, 1e6, None, 4.0))
        await until(lambda: server.sessions.phase == "loading")
        assert (
            server.sessions.admission.hosted.first,
            server.sessions.admission.hosted.last,
            len(server.account),
        ) == (0, 0, 0)
        assert await refusal(step(connection, "x", 0)) == wire.SESSION_MOVED
        assert await refusal(opened(connection, "y", 2, 4)) == wire.NO_CAPACITY
        await drive(clock, work, 1.0)
    assert phases.told == [("draining", 0.0), ("loading", 0.0), ("serving", 4.0)]
    assert work.result().n_cut == 1


async def test_a_step_that_runs_when_its_session_is_cut_is_answered_and_the_next_is_not() -> None:
    clock = ManualClock()
    profile = StubProfile(TOKEN_BYTES, StepTimes(1.0, 1.0, 0.0))
    server = make_server(0, 2, clock=clock, profile=profile)
    mover, _ = moving(server)
    async with connected([server], clock) as [connection]:
        await opened(connection, "x", 0, 2)
        running = asyncio.ensure_future(step(connection, "x", 0))
        await until(
            lambda: bool(server.sessions.live) and any(c.tasks for c in server.sessions.live.values())
        )
        await mover.rehost(2, 4, 1e6, None, 0.0)
        await drive(clock, running, 1.0)
        caches = [0, 0]
        assert running.result().frame.payload == write_rows([apply_blocks(7, 0, caches)], TOKEN_BYTES)
        assert await refusal(step(connection, "x", 1)) == wire.SESSION_MOVED
        assert server.account.used_bytes == 0


async def test_two_moves_of_one_server_come_one_after_the_other() -> None:
    clock = ManualClock()
    server = make_server(0, 4, clock=clock)
    mover, phases = moving(server)
    both = asyncio.gather(mover.rehost(2, 6, 1.0, 9.0, 2.0), mover.rehost(0, 3, 2.0, 9.0, 2.0))
    await drive(clock, both, 1.0)
    assert (
        server.sessions.admission.hosted.first,
        server.sessions.admission.hosted.last,
        server.account.capacity_bytes,
    ) == (
        0,
        3,
        2.0,
    )
    assert [phase for phase, _ in phases.told] == ["draining", "loading", "serving"] * 2


async def test_a_server_that_leaves_while_it_moves_takes_no_new_sessions_on_its_new_blocks() -> None:
    clock = ManualClock()
    server = make_server(0, 4, clock=clock)
    mover, _ = moving(server)
    async with connected([server], clock) as [connection]:
        work = asyncio.ensure_future(mover.rehost(2, 6, 1e6, 9.0, 5.0))
        await until(lambda: server.sessions.phase == "loading")
        await mover.leave()
        await drive(clock, work, 1.0)
        assert (server.sessions.admission.hosted.first, server.sessions.admission.hosted.last) == (2, 6)
        assert await refusal(opened(connection, "new", 2, 6)) == wire.NO_CAPACITY
