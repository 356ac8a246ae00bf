"""Paged caches: which sessions get room and which are preempted, and how a preempted one starts over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nodes import wire
from nodes.cache import CacheAccount, NoCapacityError
from nodes.digest import write_rows
from nodes.forwarding_session import ForwardingSession
from nodes.session import HubSession
from policies.rules import PagingRules
from tests.support.data_plane import TOKEN_BYTES, RawClient, make_server, raw_client, serving, until
from tests.support.farm import Session, expected_tokens, farm
from tests.support.forwarding import forwarding_farm
from tests.support.manual_clock import ManualClock

BY_FOUR = PagingRules(page_tokens=4, high_water=0.75)


async def opened(
    client: RawClient, key: str, arrived_at_s: float, n_first: int, n_most: int
) -> list[Any] | None:
    """Opens a session on one block, with a byte of cache per token."""
    return await client.ask("open", 1, key, "c", 0, 1, n_most, n_first, arrived_at_s)


async def stepped(client: RawClient, key: str, position: int, n_tokens: int) -> list[Any] | None:
    answer = await client.ask("step", 2, key, position, n_tokens, write_rows([1] * n_tokens, TOKEN_BYTES))
    assert answer is not None
    return answer[:1] if answer[0] == "out" else answer[:3]


def test_an_account_grows_by_what_is_free_and_only_for_those_who_hold_something() -> None:
    account = CacheAccount(10.0)
    account.reserve("a", 4.0)
    account.grow("a", 5.0)
    assert (account.held_bytes("a"), account.used_bytes) == (9.0, 9.0)
    with pytest.raises(NoCapacityError, match=r"1 B free"):
        account.grow("a", 2.0)
    with pytest.raises(KeyError):
        account.grow("b", 1.0)
    account.release("a")
    assert account.used_bytes == 0.0


async def test_a_session_has_whole_pages_for_its_prompt_and_then_for_its_tokens() -> None:
    server = make_server(cache_bytes=100.0, paging=BY_FOUR)
    async with serving(server) as url, raw_client(url) as client:
        assert await opened(client, "s", 0.0, 5, 30) == ["ok", 1]
        assert server.account.used_bytes == 8
        assert await stepped(client, "s", 0, 5) == ["out"]
        for position in (5, 6, 7):
            assert await stepped(client, "s", position, 1) == ["out"]
        assert server.account.used_bytes == 8
        assert await stepped(client, "s", 8, 1) == ["out"]
        assert server.account.used_bytes == 12
        assert await stepped(client, "s", 9, 21) == ["out"]
        assert server.account.used_bytes == 30  # never more than the session may need in total


async def test_new_sessions_leave_room_to_grow_but_for_the_first_and_one_too_long_never_fits() -> None:
    server = make_server(cache_bytes=40.0, paging=BY_FOUR)
    async with serving(server) as url, raw_client(url) as client:
        answer = await opened(client, "long", 0.0, 4, 41)
        assert answer is not None and answer[:3] == ["error", 1, wire.NEVER_FITS]
        assert await opened(client, "a", 0.0, 32, 40) == [
            "ok",
            1,
        ]  # more than 0.75 of 40, but there is no other session
        answer = await opened(client, "b", 0.0, 4, 40)
        assert (
            answer is not None and answer[2] == wire.NO_CAPACITY and "more than 75% of the room" in answer[3]
        )
        await client.ask("close", 9, "a")
        assert await opened(client, "c", 0.0, 12, 40) == ["ok", 1]
        assert await opened(client, "d", 0.0, 16, 40) == ["ok", 1]
        answer = await opened(client, "e", 0.0, 4, 40)
        assert answer is not None and answer[2] == wire.NO_CAPACITY


async def test_when_room_runs_out_the_request_that_arrived_last_makes_room() -> None:
    server = make_server(cache_bytes=24.0, paging=PagingRules(4, 1.0))
    async with serving(server) as url, raw_client(url) as client:
        for key, arrived_at_s in (("first", 1.0), ("last", 3.0), ("second", 2.0)):
            assert await opened(client, key, arrived_at_s, 8, 24) == ["ok", 1]
            assert await stepped(client, key, 0, 8) == ["out"]
        assert await stepped(client, "first", 8, 1) == ["out"]  # of 24 tokens' room 20 are in use
        assert await stepped(client, "last", 8, 1) == ["error", 2, wire.PREEMPTED]
        assert await stepped(client, "second", 8, 1) == ["out"]
        assert server.account.used_bytes == 24
        # Now "second" is the youngest: it is preempted by its own growth.
        for position in (9, 10, 11):
            assert await stepped(client, "second", position, 1) == ["out"]
        assert await stepped(client, "second", 12, 1) == ["error", 2, wire.PREEMPTED]
        assert await stepped(client, "first", 9, 15) == ["out"]  # the oldest has all that it may need
        assert server.counters.preempted == 2
        assert await client.ask("close", 9, "last") == ["ok", 9]


WAYS: list[tuple[Any, type[HubSession]]] = [(farm, HubSession), (forwarding_farm, ForwardingSession)]
both_ways = pytest.mark.parametrize("way", WAYS, ids=["hub-spoke", "forwarding"])


async def serve_two(way: Any, cache_bytes: float) -> tuple[Session, Session]:
    """Serve two sessions at once over two servers with half of the blocks each; both must complete."""
    clock = ManualClock()
    made, kind = way
    async with made([(0, 2), (2, 4)], clock, cache_bytes=cache_bytes, paging=PagingRules(2, 1.0)) as servers:
        sessions = (
            Session(servers, clock, [0, 1], n_output_tokens=12, index=3, kind=kind),
            Session(servers, clock, [0, 1], n_output_tokens=12, index=4, kind=kind),
        )
        running = asyncio.gather(*(session.hub.run() for session in sessions))
        while not running.done():
            await clock.advance(0.5)
            await asyncio.sleep(0)
        await running
        await until(servers.is_free)
    return sessions


@both_ways
async def test_a_preempted_session_starts_over_and_gets_the_same_tokens(way: Any) -> None:
    # Five input tokens each, 2 blocks a server. Both need at most 2 * 17 bytes; there are 44.
    first, second = await serve_two(way, 44.0)
    assert first.log.token_ids == expected_tokens(4, n_output_tokens=12)
    assert second.log.token_ids == expected_tokens(4, n_output_tokens=12, index=4)
    kinds = [[kind for kind, _ in session.log.states] for session in (first, second)]
    assert "preempted" not in kinds[0]  # of two that arrived at the same time, the one with the smaller key
    [lost] = [details for kind, details in second.log.states if kind == "preempted"]
    [resumed] = [details for kind, details in second.log.states if kind == "resumed"]
    assert resumed["tokens"] >= lost["tokens"] >= 5
    at = kinds[1].index("preempted")
    assert "admitted" in kinds[1][at : kinds[1].index("resumed")]
    assert not second.log.events, "it is no failure of a server"
    replayed = [hop.replayed_tokens for rows in second.log.rows for hop in rows if hop.replayed_tokens]
    assert replayed == [resumed["tokens"]] * 2  # on both servers, though only one of them needed room


@both_ways
async def test_with_room_for_both_nobody_is_preempted(way: Any) -> None:
    for session in await serve_two(way, 72.0):
        assert [kind for kind, _ in session.log.states].count("preempted") == 0
