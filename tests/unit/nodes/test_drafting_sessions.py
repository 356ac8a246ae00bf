"""Sessions that draft: servers go back after each round, and tokens are those of the whole model, whatever fails."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nodes import wire
from nodes.clock import ScaledClock
from nodes.compute import StubCompute, StubProfile
from nodes.digest import apply_blocks
from nodes.forwarding_session import ForwardingSession
from nodes.hub import StubHub
from nodes.prefixes import page_ids
from nodes.records import Drafted
from nodes.request import Request, WrongTokenError
from nodes.session import HubSession
from policies.decoding import Decoding, Seen
from policies.rules import PagingRules
from policies.steps import StepTimes
from tests.support.data_plane import (
    INSTANT,
    PATIENT,
    TOKEN_BYTES,
    JumpClock,
    make_server,
    raw_client,
    raw_frame,
    serving,
    until,
)
from tests.support.farm import Session, expected_tokens, farm
from tests.support.forwarding import forwarding_farm
from tests.unit.nodes.test_session_recovery import RANGES, Kill

N_OUTPUT = 24
TOKENS = expected_tokens(6, n_output_tokens=N_OUTPUT)
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
        drawn = decoding.drawn(3, n_done, decoding.n_drafted(N_OUTPUT - n_done, (), Seen()))
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


SLOW = StubProfile(TOKEN_BYTES, StepTimes(1.0, 1.0, 0.0))


@pytest.fixture
def quick() -> Iterator[ScaledClock]:
    """A clock 20 times as fast as the machine's."""
    with contextlib.closing(ScaledClock(time.monotonic(), 20)) as clock:
        yield clock


async def test_a_step_behind_another_waits_for_it_and_one_instead_takes_the_place_of_those_that_wait(
    quick: ScaledClock,
) -> None:
    server = make_server(0, 2, profile=SLOW, clock=quick)
    caches = [0, 0]
    first, second = (apply_blocks(value, 0, caches) for value in (11, 12))
    after_first = [0, 0]
    apply_blocks(11, 0, after_first)
    instead = apply_blocks(15, 0, after_first)
    async with serving(server) as url, raw_client(url) as client:
        await client.ask("open", 1, "s", "c", 0, 2, 40, 4)
        await client.send(raw_frame("step", 2, "s", 0, 1, rows(11)))
        await client.send(raw_frame("behind", 3, "s", 1, 1, rows(12)))
        answers = [await client.answer() for _ in range(2)]
        assert [(a[1], a[-1]) for a in answers] == [(2, rows(first)), (3, rows(second))]
        (_, _, arrived_at_s, departed_at_s, *_) = answers[1]
        assert departed_at_s - arrived_at_s > 3, (
            "it has waited for two blocks of a second each, and computed two"
        )
        for number, position in ((4, 2), (5, 3), (6, 4)):
            await client.send(raw_frame("behind", number, "s", position, 1, rows(13)))
        answer = await client.ask("instead", 7, "s", 1, 1, rows(15))
        assert (answer[1], answer[-1]) == (7, rows(instead)), "the others have no answer"
        answer = await client.ask("behind", 8, "s", 2, 1, rows(16))
        assert answer[-1] == rows(apply_blocks(16, 0, after_first))
        assert server.counters.steps == 4
        assert await client.ask("close", 9, "s") == ["ok", 9]


@pytest.mark.parametrize(("kind", "position"), [("behind", 2), ("behind", 0), ("instead", 3), ("step", 1)])
async def test_a_step_that_fits_nowhere_behind_another_is_a_wrong_position(kind: str, position: int) -> None:
    server = make_server(0, 2, profile=SLOW)
    async with serving(server) as url, raw_client(url) as client:
        await client.ask("open", 1, "s", "c", 0, 2, 40, 4)
        await client.send(raw_frame("step", 2, "s", 0, 1, rows(11)))
        answer = await client.ask(kind, 3, "s", position, 1, rows(12))
        assert answer[:3] == ["error", 3, wire.WRONG_POSITION]


async def test_what_is_given_up_frees_its_pages_and_is_forgotten_with_its_session(quick: ScaledClock) -> None:
    server = make_server(0, 2, profile=SLOW, clock=quick, paging=PagingRules(2))
    async with serving(server) as url, raw_client(url) as client:
        await client.ask("open", 1, "s", "c", 0, 2, 40, 2)
        await client.ask("step", 2, "s", 0, 2, rows(11, 12))
        for number, position in ((3, 2), (4, 4), (5, 6)):
            await client.send(raw_frame("behind", number, "s", position, 2, rows(13, 14)))
        await until(lambda: server.account.used_bytes == 2 * 8)
        answer = await client.ask("instead", 6, "s", 2, 1, rows(15))
        assert answer[1] == 6 and server.account.used_bytes == 2 * 4
        for number, position in ((7, 3), (8, 4)):
            await client.send(raw_frame("behind", number, "s", position, 1, rows(16)))
        assert await client.ask("close", 9, "s") == ["ok", 9]
        assert server.account.used_bytes == 0


async def test_what_was_computed_is_kept_while_a_round_in_vain_is_computed(quick: ScaledClock) -> None:
    server = make_server(
        0, 2, profile=StubProfile(TOKEN_BYTES, SLOW.times, kept_tokens=4), clock=quick, kept_tokens=4
    )
    tokens = list(range(20, 31))
    pages = page_ids(tokens, 4)
    async with serving(server) as url, raw_client(url) as client:
        opened = await client.ask("open-pages", 1, "s", "c", 0, 2, 40, 11, 0.0, pages)
        assert opened == ["found", 1, 0]
        await client.ask("step", 2, "s", 0, 11, rows(*tokens))
        await client.send(raw_frame("behind", 3, "s", 11, 2, rows(7, 8)))
        assert await client.ask("keep", 4, "s", b"") == ["ok", 4]
        assert await client.ask("open-pages", 5, "t", "c", 0, 2, 40, 11, 0.0, pages) == ["found", 5, 8]
        answer, caches = await client.ask("step", 6, "t", 8, 3, rows(*tokens[8:])), [0, 0]
        assert answer[-1] == rows(*[apply_blocks(token, 0, caches) for token in tokens][8:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("most", [2, 5])
async def test_several_rounds_in_flight_make_the_same_tokens(kind: str, acceptance: float, most: int) -> None:
    session_kind, make = KINDS[kind]
    decoding, clock = Decoding("ngram", 4, acceptance, seed=1, in_flight=most), JumpClock()
    async with make(RANGES, clock) as servers:
        options = {"n_output_tokens": N_OUTPUT, "model": drafting(decoding), "kind": session_kind}
        log = await Session(servers, clock, range(3), **options).run()
        assert log.token_ids == TOKENS
        assert servers.is_free()
    rounds = {(server, position) for server, position, _ in servers.steps}
    one_at_a_time = len([hops for hops in log.rows if hops])
    assert len([1 for server, _ in rounds if not server]) >= one_at_a_time


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replay", ["at_once", "step_by_step"])
@pytest.mark.parametrize("victim", [0, 1, 2], ids=["first hop", "middle hop", "last hop"])
@pytest.mark.parametrize("behind", [0, 1], ids=["the oldest", "one behind"])
async def test_a_server_that_dies_with_rounds_in_flight_changes_no_token(
    kind: str, replay: str, victim: int, behind: int
) -> None:
    session_kind, make = KINDS[kind]
    decoding = replace(DECODING, acceptance=1.0, in_flight=3)
    clock, rules = JumpClock(), replace(PATIENT, replay=replay)
    async with make(RANGES, clock) as servers:
        servers.happens = kill = Kill(servers, victim, 5 + 5 * behind, [victim])
        options = {"n_output_tokens": N_OUTPUT, "model": drafting(decoding), "kind": session_kind}
        log = await Session(servers, clock, range(7), recovery=rules, **options).run()
        assert kill.has_happened and len(log.of("replayed")) == 1
        assert log.token_ids == TOKENS


async def test_a_model_that_ends_its_text_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that are away at the end are given up."""
    decoding, clock = Decoding("ngram", 4, 1.0, in_flight=3), JumpClock()
    model, make = drafting(decoding), StubHub.sequence
    sequences: list[Any] = []

    def sequence(hub: StubHub, request: Request) -> Any:
        made = make(hub, request)
        take = made.take

        async def taken(payload: bytes) -> list[int]:
            tokens: list[int] = await take(payload)
            made.ended = len(made.tokens) > 5 + 11
            return tokens

        made.take = taken
        sequences.append(made)
        return made

    monkeypatch.setattr(StubHub, "sequence", sequence)
    async with farm(RANGES, clock) as servers:
        log = await Session(servers, clock, range(3), n_output_tokens=N_OUTPUT, model=model).run()
        assert log.token_ids == TOKENS[: len(log.token_ids)] and 11 < len(log.token_ids) < N_OUTPUT
        await until(servers.is_free)
    assert not sequences[0]._away
