"""Servers that push hidden states on to each other: tokens, failures, and what no client may do."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest

from nodes import wire
from nodes.compute import ComputeError
from nodes.forwarding_session import ForwardingSession
from nodes.request import SessionError
from policies.rules import RecoveryRules
from tests.support.data_plane import (
    PATIENT,
    TOKEN_BYTES,
    JumpClock,
    RawClient,
    drive,
    make_server,
    raw_client,
    serving,
    until,
)
from tests.support.farm import Farm, Session, expected_tokens
from tests.support.forwarding import forwarding_farm
from tests.support.manual_clock import ManualClock

RANGES = [(0, 2), (2, 5), (5, 6), (0, 2), (2, 4), (4, 6), (2, 5)]
"""Three preferred servers, and others for parts of them, of different lengths, so that chains differ."""
TOKENS = expected_tokens(6)
ROWS = bytes(TOKEN_BYTES)


def session(servers: Farm, clock: Any, **options: Any) -> Session:
    return Session(servers, clock, range(len(servers.ranges)), kind=ForwardingSession, **options)


async def test_a_chain_of_forwarding_servers_gives_the_tokens_of_the_whole_model() -> None:
    clock = JumpClock()
    async with forwarding_farm(RANGES, clock) as servers:
        log = await session(servers, clock).run()
        assert log.token_ids == TOKENS
        assert servers.steps[:3] == [(0, 0, 5), (1, 0, 5), (2, 0, 5)]
        assert all(len(server.sessions.forwarding.peers) == 7 for server in servers.servers.values())
        assert [peer.generation for peer in servers.servers[0].sessions.forwarding.peers] == [
            0,
            1,
            0,
            0,
            0,
            0,
            0,
        ]


@pytest.mark.parametrize("ranges", [[(0, 6)], [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]])
async def test_chains_of_one_and_of_many_servers_give_the_same_tokens(ranges: list[tuple[int, int]]) -> None:
    clock = JumpClock()
    async with forwarding_farm(ranges, clock) as servers:
        assert (await session(servers, clock).run()).token_ids == TOKENS


async def test_a_row_of_the_log_per_hop_and_only_the_last_answers_the_client() -> None:
    clock = JumpClock()
    async with forwarding_farm(RANGES, clock) as servers:
        log = await session(servers, clock).run()
    for token, rows in enumerate(log.rows):
        n_bytes = (1 if token else 5) * TOKEN_BYTES
        assert [tuple(row[:3]) for row in rows] == [(0, 0, 2), (1, 2, 5), (2, 5, 6)]
        assert [(row.up_bytes, row.down_bytes) for row in rows] == [
            (n_bytes, 0),
            (n_bytes, 0),
            (n_bytes, n_bytes),
        ]
        for before, after in itertools.pairwise(rows):
            sent_at_s, departed_at_s = after[3], before[5]
            assert sent_at_s == departed_at_s == before[6], "a server sends as soon as its step is done"


async def test_sessions_side_by_side_share_the_connections_and_leave_nothing() -> None:
    clock = JumpClock()
    async with forwarding_farm(RANGES, clock) as servers:
        sessions = [session(servers, clock, index=index) for index in range(20)]
        logs = await asyncio.gather(*(each.run() for each in sessions))
        for index, log in enumerate(logs):
            assert log.token_ids == expected_tokens(6, index=index)
        assert servers.servers[1].counters.connections == 2, "the client's and the first server's"
        assert not any(server.sessions.forwarding.n_places for server in servers.all_servers)


@pytest.mark.parametrize("position", [0, 5, 7], ids=["in the prefill", "at the first decode", "at the last"])
@pytest.mark.parametrize("victim", [0, 1, 2], ids=["first hop", "middle hop", "last hop"])
async def test_a_server_that_dies_changes_no_token_and_the_whole_history_goes_through_a_new_chain(
    victim: int, position: int
) -> None:
    clock = JumpClock()
    async with forwarding_farm(RANGES, clock) as servers:

        def happens(server: int, at: int, n_tokens: int) -> None:
            if (server, at) == (victim, position):
                servers.kill(victim)

        servers.happens = happens
        run = session(servers, clock)
        log = await run.run()
    assert log.token_ids == TOKENS
    n_done = max(0, position - 4)
    assert run.asked == [(0, 6, n_done)]
    assert [found["servers"] for found in log.of("detected")] == [[victim]], "no healthy server is blamed"
    (replayed,) = log.of("replayed")
    n_all = position + 1 if position else 5
    assert replayed["tokens"] == n_all
    chain = [server for server, _, _ in replayed["hops"]]
    assert victim not in chain
    assert [step for step in servers.steps if step[1:] == (0, n_all)][-len(chain) :] == [
        (server, 0, n_all) for server in chain
    ]
    assert [[row.replayed_tokens for row in rows if row.replayed_tokens] for rows in log.rows] == [
        [n_all] * len(chain) if token == n_done else [] for token in range(4)
    ]


@pytest.mark.parametrize("position", [0, 5, 7], ids=["in the prefill", "at the first decode", "at the last"])
async def test_step_by_step_a_new_chain_is_sent_the_prompt_and_then_every_token_on_its_own(
    position: int,
) -> None:
    clock = JumpClock()
    async with forwarding_farm(RANGES, clock) as servers:

        def happens(server: int, at: int, n_tokens: int) -> None:
            if (server, at) == (1, position):
                servers.kill(1)

        servers.happens = happens
        log = await session(servers, clock, recovery=replace(PATIENT, replay="step_by_step")).run()
    assert log.token_ids == TOKENS
    (replayed,) = log.of("replayed")
    chain = [server for server, _, _ in replayed["hops"]]
    assert 1 not in chain and replayed["tokens"] == (position + 1 if position else 5)
    for server in set(chain) - {0, 2}:
        assert [step[1:] for step in servers.steps if step[0] == server] == [(0, 5), (5, 1), (6, 1), (7, 1)]
    n_done = max(0, position - 4)
    sent = [(server, n) for n in [5] + [1] * n_done for server in chain]
    assert [
        [(row.server, row.replayed_tokens) for row in rows if row.replayed_tokens] for rows in log.rows
    ] == [sent if token == n_done else [] for token in range(4)]


@pytest.mark.parametrize("victims", [[0, 1], [1, 2], [0, 1, 2]])
async def test_servers_that_die_at_once_and_during_the_replay_change_no_token(victims: list[int]) -> None:
    clock = JumpClock()
    async with forwarding_farm([*RANGES, (0, 6)], clock) as servers:

        def happens(server: int, at: int, n_tokens: int) -> None:
            if (server, at) == (1, 6):
                for victim in victims:
                    servers.kill(victim)
            if (server, at, n_tokens) == (4, 0, 7):
                servers.kill(4)
                servers.kill(6)

        servers.happens = happens
        log = await session(servers, clock).run()
    assert log.token_ids == TOKENS


def banning(run: Session) -> Session:
    """Bans servers as the coordinator does: those that failed the client are not used again."""
    run.believed = lambda: run.farm.up - {j for found in run.log.of("detected") for j in found["servers"]}
    return run


async def test_the_client_learns_which_server_does_not_take_what_is_pushed_to_it() -> None:
    clock = JumpClock()
    async with forwarding_farm(RANGES, clock) as servers:
        # Only the way from the first to the second server is cut: the client reaches both.
        servers.servers[0].sessions.forwarding.peers[1].move("http://127.0.0.1:9/nobody")
        log = await banning(session(servers, clock)).run()
    assert log.token_ids == TOKENS
    (found,) = log.of("detected")
    assert found["servers"] == [1]
    assert "server 0 could not push to it" in found["reason"]


class Halting:
    """Servers that stop reading, as if their process were stopped."""

    def __init__(self, servers: Farm, halted: int) -> None:
        self._goes_on = asyncio.Event()
        server = servers.servers[halted]
        reads = server._until_it_reads

        async def never(connection: Any) -> None:
            await self._goes_on.wait()
            await reads(connection)

        server._until_it_reads = never  # type: ignore[method-assign]

    def ends(self) -> None:
        self._goes_on.set()


async def test_a_server_that_takes_no_push_in_time_is_named_to_the_client() -> None:
    clock = ManualClock()
    async with forwarding_farm(RANGES, clock, limit_s=60.0) as servers:
        rules = RecoveryRules(request_timeout_s=120.0, connect_timeout_s=5.0)
        run = banning(session(servers, clock, recovery=rules))
        halting: list[Halting] = []

        def happens(server: int, at: int, n_tokens: int) -> None:
            if (server, at) == (0, 6):
                halting.append(Halting(servers, 1))

        servers.happens = happens
        work = asyncio.ensure_future(run.hub.run())
        await drive(clock, work)
        await work
        halting[0].ends()
        await until(servers.is_free)
    assert run.log.token_ids == TOKENS
    (found,) = run.log.of("detected")
    assert (found["servers"], found["is_overdue"]) == ([1], False)
    assert "no answer for 60 s" in found["reason"]


async def test_without_a_result_in_time_the_servers_that_do_not_answer_a_ping_are_to_blame() -> None:
    clock = ManualClock()
    async with forwarding_farm(RANGES, clock) as servers:
        rules = RecoveryRules(request_timeout_s=120.0, connect_timeout_s=5.0)
        run = banning(session(servers, clock, recovery=rules))
        halting: list[Halting] = []

        async def happens(server: int, at: int, n_tokens: int) -> None:
            if (server, at) == (1, 6):
                halting.append(Halting(servers, 1))
                await asyncio.Event().wait()  # it has received the push, and stops while it computes

        servers.happens = happens
        work = asyncio.ensure_future(run.hub.run())
        await drive(clock, work)
        await work
        halting[0].ends()
        await until(servers.is_free)
    assert run.log.token_ids == TOKENS
    (found,) = run.log.of("detected")
    assert (found["servers"], found["is_overdue"]) == ([1], True)


async def test_a_server_that_cannot_compute_fails_its_hop_only() -> None:
    clock = JumpClock()
    async with forwarding_farm(RANGES, clock) as servers:

        def happens(server: int, at: int, n_tokens: int) -> None:
            if (server, at) == (2, 6):
                raise ComputeError("no memory")

        servers.happens = happens
        log = await banning(session(servers, clock)).run()
    assert log.token_ids == TOKENS
    (found,) = log.of("detected")
    assert found["servers"] == [2]
    assert found["reason"] == "compute-failed: no memory"


async def test_a_session_that_was_idle_too_long_is_replayed() -> None:
    clock = ManualClock()
    async with forwarding_farm(RANGES, clock) as servers:
        run = session(servers, clock)

        def happens(server: int, at: int, n_tokens: int) -> None:
            if (server, at) == (0, 6):
                expiring = servers.servers[2]
                connection, held = next(iter(expiring.sessions.forwarding._places.values())).owner
                expiring.sessions._expire(connection, held.key)

        servers.happens = happens
        work = asyncio.ensure_future(run.hub.run())
        await drive(clock, work)
        await work
        await until(servers.is_free)
    assert run.log.token_ids == TOKENS
    assert [found["servers"] for found in run.log.of("detected")] == [[2]]


async def test_without_recovery_the_request_fails_with_the_reason_and_frees_every_server() -> None:
    clock = JumpClock()
    async with forwarding_farm(RANGES, clock) as servers:
        servers.happens = lambda server, at, n: servers.kill(1) if (server, at) == (1, 6) else None
        run = session(servers, clock, recovery=replace(PATIENT, mode="off"))
        with pytest.raises(SessionError, match=r"^server 1: "):
            await run.hub.run()
        await until(servers.is_free)


JOIN = ("c", 0, 4, 10)


async def test_a_push_to_a_session_that_is_not_there_is_answered_and_the_connection_stays() -> None:
    server = make_server(0, 4)
    async with serving(server) as url, raw_client(url) as client:
        assert (await client.ask("push", 1, "guessed", 0, 1, b"", ROWS))[:3] == [
            "error",
            1,
            "unknown-session",
        ]
        assert await client.ask("ping", 2, b"") == ["out", 2, 0.0, 0.0, [0] * 6, b""]


@pytest.mark.parametrize(
    ("position", "n_tokens", "payload", "code"),
    [(1, 1, ROWS, "wrong-position"), (0, 1, ROWS[1:], "wrong-size"), (0, 11, 11 * ROWS, "wrong-position")],
)
async def test_a_push_that_is_wrong_harms_neither_its_session_nor_its_connection(
    position: int, n_tokens: int, payload: bytes, code: str
) -> None:
    server = make_server(0, 4)
    async with serving(server) as url, raw_client(url) as client:
        assert await client.ask("join", 1, "a", *JOIN, "token", 0, "") == ["ok", 1]
        assert (await client.ask("push", 2, "token", position, n_tokens, b"", payload))[:3] == [
            "error",
            2,
            code,
        ]
        assert await pushed(client, 3) == ["ok", 3]
        assert (await client.answer())[:3] == ["result", 1, 0]


async def pushed(client: RawClient, request_id: int, token: str = "token", position: int = 0) -> list[Any]:
    return await client.ask("push", request_id, token, position, 1, b"", ROWS)


async def test_whoever_has_the_token_may_push_but_only_the_client_hears_the_result() -> None:
    server = make_server(0, 4)
    async with serving(server) as url, raw_client(url) as client, raw_client(url) as other:
        assert await client.ask("join", 1, "a", *JOIN, "token", 0, "") == ["ok", 1]
        assert await pushed(other, 2) == ["ok", 2]
        assert (await client.answer())[:3] == ["result", 1, 0]


async def test_a_session_ends_with_the_connection_of_its_client_not_with_one_that_pushes() -> None:
    server = make_server(0, 4)
    async with serving(server) as url, raw_client(url) as other:
        async with raw_client(url) as client:
            assert await client.ask("join", 1, "a", *JOIN, "token", 0, "") == ["ok", 1]
        await until(lambda: not len(server.account))
        assert (await pushed(other, 2))[:3] == ["error", 2, "unknown-session"]
        assert not server.sessions.forwarding.n_places


@pytest.mark.parametrize("token", ["", "token"], ids=["empty", "of another session"])
async def test_a_token_that_others_could_know_is_refused(token: str) -> None:
    server = make_server(0, 4)
    async with serving(server) as url, raw_client(url) as first, raw_client(url) as second:
        assert await first.ask("join", 1, "a", *JOIN, "token", 0, "") == ["ok", 1]
        assert (await second.ask("join", 1, "b", *JOIN, token, 0, ""))[:3] == ["error", 1, "bad-frame"]
        assert await second.is_closed_by_server()
        assert len(server.account) == 1


async def test_a_client_names_the_next_server_by_number_and_only_one_that_the_orchestrator_told() -> None:
    server = make_server(0, 4)
    async with serving(server) as url, raw_client(url) as client:
        answer = await client.ask("join", 1, "a", *JOIN, "token", 0, "next")
        assert answer[:3] == ["error", 1, "bad-frame"]
        assert answer[3] == "there is no server number 0 to forward to"
        assert await client.is_closed_by_server()
        assert not len(server.account)


async def test_a_session_of_a_chain_takes_no_steps_by_its_key() -> None:
    server = make_server(0, 4)
    async with serving(server) as url, raw_client(url) as client:
        assert await client.ask("join", 1, "a", *JOIN, "token", 0, "") == ["ok", 1]
        assert (await client.ask("step", 2, "a", 0, 1, ROWS))[:3] == ["error", 2, "bad-frame"]


@pytest.mark.parametrize("timings", [b"x", bytes(20 * 257)])
async def test_timings_that_are_none_break_the_protocol(timings: bytes) -> None:
    server = make_server(0, 4)
    async with serving(server) as url, raw_client(url) as client:
        answer = await client.ask("push", 1, "token", 0, 1, timings, ROWS)
        assert answer[2:] == ["bad-frame", "not the timings of a chain"]
        assert await client.is_closed_by_server()


async def test_a_server_cannot_be_made_to_push_to_itself_for_ever() -> None:
    clock = JumpClock()
    async with (
        forwarding_farm([(0, 4)], clock) as servers,
        raw_client(servers.url(0)[: -len(wire.PATH)]) as me,
    ):
        assert await me.ask("join", 1, "a", *JOIN, "token", 0, "token") == ["ok", 1]
        assert await pushed(me, 2) == ["ok", 2]
        answer = await me.answer()
        assert answer[:3] == ["error", 1, wire.NOT_PASSED_ON]
        assert "wrong-position" in answer[3]
        assert len(servers.steps) == 1
