"""The hub's session over three real servers: tokens, admission, waiting and failures."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from nodes import wire
from nodes.clock import Clock
from nodes.compute import Computed, StubCompute, StubProfile
from nodes.connection import Connection
from nodes.digest import DIGEST_BYTES, apply_blocks, embed, read_rows, token_of
from nodes.hub import HubModel, StubHub
from nodes.records import AnyRecord, Opening, Plan, States, Token
from nodes.request import Request, SessionError, WrongTokenError
from nodes.server import Server
from nodes.session import HubSession, SessionRules
from policies.steps import StepTimes
from policies.workload import Backoff
from tests.support.data_plane import (
    INSTANT,
    PATIENT,
    TOKEN_BYTES,
    JumpClock,
    ask,
    connected,
    make_server,
    serving,
    until,
)
from tests.support.manual_clock import ManualClock

HOPS = [(0, 0, 2), (1, 2, 5), (2, 5, 6)]
RULES = SessionRules(recovery=PATIENT)
MODEL = StubHub(TOKEN_BYTES, 6)


class Recorder:
    """Keeps everything that a session reports."""

    def __init__(self) -> None:
        self.states: list[tuple[str, float, dict[str, Any]]] = []
        self.opened: list[tuple[float, float]] = []
        self.tokens: list[tuple[int, float, float, list[Any]]] = []
        self.recoveries: list[tuple[str, dict[str, Any]]] = []

    def observe(self, record: AnyRecord) -> None:
        if isinstance(record, Token):
            self.tokens.append((record.token, record.ready_at_s, record.at_s, record.hops))
        elif isinstance(record, Opening):
            self.opened.append((record.at_s, record.opened_at_s))
        elif isinstance(record, States):
            self.states.append((record.kind, record.at_s, record.details()))
        else:
            self.recoveries.append((record.kind, record.details()))


class Corrupting(StubCompute):
    """Changes every step's answer."""

    def __init__(self, change: Any) -> None:
        super().__init__(INSTANT, ManualClock())
        self._change = change

    async def step(
        self, session: Any, position: int, n_tokens: int, payload: bytes, arrived_at_s: float
    ) -> Computed:
        computed = await super().step(session, position, n_tokens, payload, arrived_at_s)
        return Computed(self._change(computed.payload))


def servers(middle: Server | None = None) -> list[Server]:
    return [
        make_server(0, 2, name="s0"),
        middle or make_server(2, 5, name="s1"),
        make_server(5, 6, name="s2"),
    ]


async def always(request: Request, attempt: int, n_done: int) -> Plan:
    return Plan(HOPS, 0.0, 0.0)


def session(
    connections: Sequence[Connection],
    clock: Clock,
    recorder: Recorder,
    *,
    request: Request = Request(3, 0.0, 5, 4),  # noqa: B008 - frozen
    route: Any = always,
    rules: SessionRules = RULES,
    model: HubModel = MODEL,
) -> HubSession:
    return HubSession(request, "3", "c", connections, route, model, rules, clock, recorder.observe)


def is_free(all_servers: Sequence[Server]) -> bool:
    return all(server.account.used_bytes == 0.0 and len(server.account) == 0 for server in all_servers)


async def test_a_chain_of_servers_gives_the_tokens_of_the_whole_model() -> None:
    clock, recorder, chain = JumpClock(), Recorder(), servers()
    async with connected(chain, clock) as connections:
        run = session(connections, clock, recorder)
        run.stays_open = True
        await run.run()
        chosen = list(run.hops)
        await run.release()
    assert [state for state, _, _ in recorder.states] == ["routed", "admitted", "completed"]
    assert [token for token, *_ in recorder.tokens] == [0, 1, 2, 3]
    for token, _, _, hops in recorder.tokens:
        n_tokens = 5 if token == 0 else 1
        assert [hop[:3] for hop in hops] == HOPS
        assert [(hop.up_bytes, hop.down_bytes) for hop in hops] == [(n_tokens * TOKEN_BYTES,) * 2] * 3
    caches = [0] * 6
    expected = [embed(3 + i, i) for i in range(5)]
    value = [apply_blocks(entry, 0, caches) for entry in expected][-1]
    for position in range(5, 8):
        expected.append(embed(token_of(value), position))
        value = apply_blocks(expected[-1], 0, caches)
    first = bytes(chosen[0].inputs)
    assert read_rows(first, DIGEST_BYTES) == expected, "the first hop was sent the tokens of the model"
    assert [len(hop.inputs) for hop in chosen] == [8 * DIGEST_BYTES] * 3
    sent = MODEL.recall(first)
    assert (len(sent), MODEL.remember(sent)) == (8 * TOKEN_BYTES, first)
    assert is_free(chain)
    assert [server.counters.steps for server in chain] == [4, 4, 4]


async def test_a_session_reserves_room_for_its_input_and_output_on_each_hop() -> None:
    clock, chain = JumpClock(), servers()
    seen: list[list[float]] = []

    class Looking(Recorder):
        def observe(self, record: AnyRecord) -> None:
            if isinstance(record, Opening):
                seen.append([server.account.used_bytes for server in chain])

    recorder = Looking()
    async with connected(chain, clock) as connections:
        await session(connections, clock, recorder).run()
    assert seen == [[2 * 9.0, 3 * 9.0, 1 * 9.0]]


async def test_opening_takes_at_least_the_initial_delay_and_then_the_setup() -> None:
    clock, recorder = JumpClock(), Recorder()
    rules = SessionRules(recovery=PATIENT, initial_delay_s=0.07, setup_s=60.0)
    async with connected(servers(), clock) as connections:
        await session(connections, clock, recorder, rules=rules).run()
    assert recorder.opened == [(0.0, 0.0)]
    assert recorder.tokens[0][1] == pytest.approx(60.07)
    assert clock.now_s() == recorder.tokens[0][1]


@pytest.mark.parametrize("wrong", [0, 1, 2])
async def test_a_server_that_computes_something_else_fails_the_request_at_its_first_token(wrong: int) -> None:
    clock, recorder = JumpClock(), Recorder()
    chain = servers()
    first, last = HOPS[wrong][1:]
    chain[wrong] = make_server(
        first, last, compute=Corrupting(lambda answer: answer[:-TOKEN_BYTES] + b"\x01" * TOKEN_BYTES)
    )
    async with connected(chain, clock) as connections:
        with pytest.raises(WrongTokenError, match=r"^token 0 differs from the whole model's$"):
            await session(connections, clock, recorder).run()
    assert [state for state, _, _ in recorder.states] == ["routed", "admitted"]
    assert is_free(chain)


async def test_a_wrong_token_passes_where_verifying_is_off() -> None:
    clock, recorder = JumpClock(), Recorder()
    chain = servers(make_server(2, 5, compute=Corrupting(lambda answer: bytes(len(answer)))))
    model = StubHub(TOKEN_BYTES, 6, verify=False)
    async with connected(chain, clock) as connections:
        await session(connections, clock, recorder, model=model).run()
    assert len(recorder.tokens) == 4


@pytest.mark.parametrize("broken", [0, 2], ids=["before another hop", "last hop"])
@pytest.mark.parametrize(
    "change", [lambda answer: b"", lambda answer: answer[:-1], lambda answer: answer * 2]
)
async def test_an_answer_of_another_size_fails_its_own_request_and_no_other_server_is_blamed(
    change: Any, broken: int
) -> None:
    clock, recorder = JumpClock(), Recorder()
    chain = servers()
    chain[broken] = make_server(*HOPS[broken][1:], compute=Corrupting(change))
    async with connected(chain, clock) as connections:
        with pytest.raises(SessionError, match=rf"^server {broken}: its answer is not 5 hidden states$"):
            await session(connections, clock, recorder).run()
        assert is_free(chain)
        assert [server.counters.errors for server in chain] == [0, 0, 0]


async def test_without_room_it_closes_what_it_opened_backs_off_and_asks_the_router_each_time() -> None:
    clock, recorder = JumpClock(), Recorder()
    chain = servers(make_server(2, 5, name="s1", cache_bytes=30.0))
    asked: list[tuple[int, float]] = []
    async with connected(chain, clock) as connections:
        await ask(connections[1], "open", "filler", "c", 2, 3, 10)

        async def route(request: Request, attempt: int, n_done: int) -> Plan:
            asked.append((attempt, clock.now_s()))
            assert chain[0].account.used_bytes == chain[2].account.used_bytes == 0.0
            if attempt == 8:
                await ask(connections[1], "close", "filler")
            return await always(request, attempt, n_done)

        await session(connections, clock, recorder, route=route).run()
    series = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert clock.waits_s == series
    assert asked == [(attempt, sum(series[:attempt])) for attempt in range(9)]
    rejected = [details for state, _, details in recorder.states if state == "rejected"]
    assert [details["backoff_s"] for details in rejected] == series
    assert {details["server"] for details in rejected} == {1}
    assert {details["reason"] for details in rejected} == {
        "no-capacity: 27 B asked for, 20 B free",
    }
    assert recorder.states[-2][:2] == ("admitted", 183.0)
    assert recorder.opened == [(183.0, 183.0)], "opening starts with the attempt that was admitted"
    assert chain[0].counters.opened == chain[0].counters.closed == 9
    assert is_free(chain)


async def test_jitter_makes_every_wait_of_every_request_another_within_its_share() -> None:
    clock, recorder = JumpClock(), Recorder()
    backoff = Backoff(jitter_ratio=0.25, seed=7)

    async def route(request: Request, attempt: int, n_done: int) -> Plan | None:
        return None if attempt < 8 else await always(request, attempt, n_done)

    async with connected(servers(), clock) as connections:
        await session(
            connections, clock, recorder, route=route, rules=SessionRules(recovery=PATIENT, backoff=backoff)
        ).run()
    series = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    ratios = [wait_s / usual_s for wait_s, usual_s in zip(clock.waits_s, series, strict=True)]
    assert all(0.75 <= ratio <= 1.25 for ratio in ratios) and len(set(ratios)) == 8
    same, others = backoff.waits_s(3), [backoff.waits_s(4), replace(backoff, seed=8).waits_s(3)]
    assert clock.waits_s == pytest.approx([next(same) for _ in series])
    assert all(next(other) != clock.waits_s[0] for other in others)


async def test_where_no_route_covers_the_model_it_waits_and_asks_again() -> None:
    clock, recorder = JumpClock(), Recorder()

    async def route(request: Request, attempt: int, n_done: int) -> Plan | None:
        return None if attempt < 2 else await always(request, attempt, n_done)

    async with connected(servers(), clock) as connections:
        await session(connections, clock, recorder, route=route).run()
    assert clock.waits_s == [1.0, 2.0]
    assert recorder.states[0][2] == {
        "server": -1,
        "reason": "no route covers the model",
        "backoff_s": 1.0,
        "refused": [],
        "broken": [],
    }


async def test_a_session_gives_up_rather_than_wait_beyond_its_time() -> None:
    clock, recorder = JumpClock(), Recorder()
    chain = servers(make_server(2, 5, cache_bytes=0.0))
    rules = SessionRules(recovery=PATIENT, backoff=Backoff(give_up_s=10.0))
    async with connected(chain, clock) as connections:
        with pytest.raises(SessionError, match=r"^no room at the last attempt within 10 s \(never-fits: "):
            await session(connections, clock, recorder, rules=rules).run()
    assert clock.waits_s == [1.0, 2.0, 4.0], "the next, of 8 s, would end after 10 s"
    assert is_free(chain)


async def test_a_server_that_is_gone_is_asked_for_no_room_and_the_router_is_asked_again() -> None:
    clock, recorder = JumpClock(), Recorder()
    chain = servers()
    async with (
        connected(chain, clock) as connections,
        aiohttp.ClientSession() as http,
        contextlib.AsyncExitStack() as dying,
    ):
        url = await dying.enter_async_context(serving(make_server(2, 5)))
        lost = Connection(http, url + wire.PATH, clock)
        await lost.open()
        await dying.aclose()

        async def route(request: Request, attempt: int, n_done: int) -> Plan:
            middle = (3, 2, 5) if attempt == 0 else HOPS[1]
            return Plan([HOPS[0], middle, HOPS[2]], 0.0, 0.0)

        await session([*connections, lost], clock, recorder, route=route).run()
        await lost.close()
    assert clock.waits_s == [1.0]
    assert [details["server"] for state, _, details in recorder.states if state == "rejected"] == [3]
    assert recorder.states[-1][0] == "completed"
    assert recorder.recoveries == [("unreachable", {"servers": [3]})]
    assert is_free(chain)


async def test_a_server_lost_while_computing_fails_the_request_and_frees_the_other_hops() -> None:
    clock, recorder = JumpClock(), Recorder()
    server_clock = ManualClock()
    dying_server = make_server(
        2, 5, clock=server_clock, profile=StubProfile(TOKEN_BYTES, StepTimes(1.0, 1.0, 0.0))
    )
    others = [make_server(0, 2), make_server(5, 6)]
    async with connected(others, clock) as connections, contextlib.AsyncExitStack() as dying:
        url = await dying.enter_async_context(serving(dying_server))
        http = await dying.enter_async_context(aiohttp.ClientSession())
        lost = Connection(http, url + wire.PATH, clock)
        await lost.open()
        run = asyncio.ensure_future(session([connections[0], lost, connections[1]], clock, recorder).run())
        await until(lambda: any(at_s == 3.0 for at_s, _, _ in server_clock._sleepers))
        await dying.aclose()
        with pytest.raises(SessionError, match=r"^server 1: "):
            await run
        assert is_free(others)
        await lost.close()


async def test_a_session_that_expired_fails_its_request_with_the_reason() -> None:
    clock, recorder, chain = JumpClock(), Recorder(), servers()

    server_clock = ManualClock()
    chain[1] = make_server(2, 5, clock=server_clock)
    chain[2] = make_server(
        5, 6, clock=server_clock, profile=StubProfile(TOKEN_BYTES, StepTimes(1.0, 1000.0, 0.0))
    )
    async with connected(chain, clock) as connections:
        run = asyncio.ensure_future(session(connections, clock, recorder).run())
        await until(lambda: any(at_s == 1000.0 for at_s, _, _ in server_clock._sleepers))
        await server_clock.advance(1000.0)
        with pytest.raises(SessionError, match=r"^server 1: session-expired: "):
            await run
    assert [token for token, *_ in recorder.tokens] == [0]
    assert is_free(chain)


async def test_cancelling_a_session_frees_its_cache_at_once() -> None:
    clock, recorder = JumpClock(), Recorder()
    slow = make_server(2, 5, profile=StubProfile(TOKEN_BYTES, StepTimes(1.0, 1.0, 0.0)))
    chain = servers(slow)
    async with connected(chain, clock) as connections:
        run = asyncio.ensure_future(session(connections, clock, recorder).run())
        await until(lambda: any(at_s == 3.0 for at_s, _, _ in slow.clock._sleepers))  # type: ignore[attr-defined]
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert is_free(chain)


async def test_other_clients_of_the_servers_do_not_change_a_sessions_tokens() -> None:
    clock, chain = JumpClock(), servers()
    recorders = [Recorder() for _ in range(8)]
    async with connected(chain, clock) as connections:
        await asyncio.gather(
            *(
                HubSession(
                    Request(i, 0.0, 3 + i, 5),
                    str(i),
                    "c",
                    connections,
                    always,
                    MODEL,
                    RULES,
                    clock,
                    recorder.observe,
                ).run()
                for i, recorder in enumerate(recorders)
            )
        )
    assert all(len(recorder.tokens) == 5 for recorder in recorders)
    assert is_free(chain)
