"""Sessions that draft: servers go back after each round, and tokens are those of the whole model, whatever fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nodes import wire
from nodes.compute import StubCompute
from nodes.digest import apply_blocks
from nodes.forwarding_session import ForwardingSession
from nodes.hub import StubHub
from nodes.records import Drafted
from nodes.request import WrongTokenError
from nodes.session import HubSession
from policies.decoding import Decoding, RoundCosts, Seen
from policies.rules import PagingRules
from tests.support.data_plane import (
    INSTANT,
    PATIENT,
    TOKEN_BYTES,
    JumpClock,
    make_server,
    raw_client,
    raw_frame,
    serving,
)
from tests.support.farm import Session, expected_tokens, farm
from tests.support.forwarding import forwarding_farm
from tests.unit.nodes.test_session_recovery import RANGES, Kill

N_OUTPUT = 24
TOKENS = expected_tokens(6, n_output_tokens=N_OUTPUT)
FREE = RoundCosts(0.0, 0.0)
DECODING = Decoding("ngram", 4, 0.7, seed=1)
KINDS = {"hub-spoke": (HubSession, farm), "forwarding": (ForwardingSession, forwarding_farm)}


def rows(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") + bytes(TOKEN_BYTES - 8) for value in values)


def drafting(decoding: Decoding = DECODING, **more: Any) -> StubHub:
    return StubHub(TOKEN_BYTES, 6, decoding=decoding, **more)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafter", ["ngram", "petals"])
@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
async def test_tokens_are_the_whole_models_and_rounds_as_drawn(
    kind: str, drafter: str, acceptance: float
) -> None:
    session_kind, make = KINDS[kind]
    decoding, clock = Decoding(drafter, 4, acceptance, seed=1), JumpClock()
    records: list[Any] = []
    async with make(RANGES, clock) as servers:
        options = {"n_output_tokens": N_OUTPUT, "kind": session_kind, "model": drafting(decoding)}
        session = Session(servers, clock, range(3), **options)
        observe = session.hub._observe
        session.hub._observe = lambda record: (records.append(record), observe(record))
        log = await session.run()
    assert log.token_ids == TOKENS
    drafted = [(record.tokens, record.accepted) for record in records if isinstance(record, Drafted)]
    n_done, expected, sent = 1, [], [(0, 5)]
    while n_done < N_OUTPUT:
        drawn = decoding.drawn(3, n_done, decoding.n_drafted(N_OUTPUT - n_done, FREE, Seen()))
        expected.append((drawn.drafted, drawn.accepted))
        sent.append((4 + n_done, drawn.sent))
        n_done += drawn.made
    assert drafted == expected
    for server in range(3):
        assert [(at, n) for j, at, n in servers.steps if j == server] == sent
    assert [bool(hops) for hops in log.rows].count(True) == len(sent)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replay", ["at_once", "step_by_step"])
@pytest.mark.parametrize("victim", [0, 1, 2], ids=["first hop", "middle hop", "last hop"])
async def test_a_server_that_dies_in_a_round_changes_no_token(kind: str, replay: str, victim: int) -> None:
    session_kind, make = KINDS[kind]
    clock, rules = JumpClock(), replace(PATIENT, replay=replay)
    n_done = 1
    while n_done < 8:
        n_done += DECODING.drawn(3, n_done, DECODING.tokens).made
    async with make(RANGES, clock) as servers:
        servers.happens = kill = Kill(servers, victim, 4 + n_done, [victim])
        options = {"n_output_tokens": N_OUTPUT, "kind": session_kind, "model": drafting()}
        log = await Session(servers, clock, range(7), recovery=rules, **options).run()
    assert kill.has_happened and len(log.of("replayed")) == 1
    assert log.token_ids == TOKENS


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_does_not_go_back_is_found_out(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_kind, make = KINDS[kind]

    async def forgetful(self: Any, session: Any, position: int, *rest: Any) -> Any:
        return await original(self, session, max(position, len(session.seen)), *rest)

    original = StubCompute.step
    monkeypatch.setattr(StubCompute, "step", forgetful)
    clock = JumpClock()
    async with make(RANGES, clock) as servers:
        options = {"n_output_tokens": N_OUTPUT, "kind": session_kind, "model": drafting()}
        with pytest.raises(WrongTokenError, match="differs from the whole model's"):
            await Session(servers, clock, range(3), **options).run()


async def test_a_step_before_the_sessions_end_makes_the_rest_void_and_frees_its_pages() -> None:
    server = make_server(0, 2, paging=PagingRules(4))
    seen = [11, 12, 13, 14, 15, 16, 17, 18, 19]

    def after(*tokens: int) -> list[int]:
        caches = [0, 0]
        return [apply_blocks(token, 0, caches) for token in tokens]

    async with serving(server) as url, raw_client(url) as client:
        await client.ask("open", 1, "s", "c", 0, 2, 40, 4)
        answer = await client.ask("step", 2, "s", 0, 4, rows(*seen[:4]))
        answer = await client.ask("step", 3, "s", 4, 5, rows(*seen[4:]))
        assert answer[-1] == rows(*after(*seen)[4:])
        assert server.account.used_bytes == 2 * 12
        answer = await client.ask("step", 4, "s", 6, 1, rows(99))  # within the last step
        assert answer[-1] == rows(after(*seen[:6], 99)[-1])
        assert server.account.used_bytes == 2 * 8
        answer = await client.ask("step", 5, "s", 2, 1, rows(98))  # before it
        assert answer[-1] == rows(after(*seen[:2], 98)[-1])
        assert server.account.used_bytes == 2 * 4
        await client.send(raw_frame("step", 6, "s", 4, 1, rows(1)))
        assert (await client.answer())[:3] == ["error", 6, wire.WRONG_POSITION]


async def test_drafting_takes_the_client_time_for_every_token() -> None:
    clock = JumpClock()
    hub = drafting(Decoding("ngram", 4, 0.7, draft_token_s=0.5), clock=clock, verify=False)
    assert INSTANT.times.decode_s == 0
    async with farm(RANGES, clock) as servers:
        await Session(servers, clock, range(3), n_output_tokens=3, model=hub).run()
    assert clock.waits_s[0] == 0.5, "two tokens are left, of which the model makes one"
