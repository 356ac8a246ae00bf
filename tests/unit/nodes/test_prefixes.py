"""Kept pages: their ids, which are evicted, what they take of a server's room, and sessions that begin with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from nodes.admission import Admission, HostedBlocks, Need
from nodes.compute import StubCompute
from nodes.digest import apply_to_rows
from nodes.hub import StubHub
from nodes.prefixes import PAGE_ID_BYTES, KeptPages, Page, page_ids, reusable, split_ids
from nodes.records import AnyRecord, Plan, Reused, Token
from nodes.request import Generation, Request, WrongTokenError
from nodes.session import HubSession, SessionRules
from policies.rules import PagingRules
from tests.support.data_plane import INSTANT, PATIENT, TOKEN_BYTES, JumpClock, connected, make_server
from tests.support.manual_clock import ManualClock

PAGE = 4
HOPS = [(0, 0, 2), (1, 2, 4)]
PROMPT = tuple(range(100, 114))


def test_an_id_stands_for_all_tokens_up_to_its_page_and_for_no_page_in_part() -> None:
    ids = split_ids(page_ids([1, 2, 3, 4, 5, 6, 7], 3))
    assert len(ids) == 2 and {len(each) for each in ids} == {PAGE_ID_BYTES}
    assert split_ids(page_ids([1, 2, 3, 4, 5, 9], 3)) == [
        ids[0],
        *split_ids(page_ids([1, 2, 3, 4, 5, 9], 3))[1:],
    ]
    assert ids[1] not in split_ids(page_ids([9, 2, 3, 4, 5, 6], 3))
    assert split_ids(page_ids([1, 2, 3, 4, 5, 6], 3, most=1)) == ids[:1]
    assert (reusable(12, 4), reusable(13, 4), reusable(1, 4)) == (2, 3, 0)


def pages(*ids: str) -> list[Page]:
    return [Page(0, 2, each.encode()) for each in ids]


def test_the_least_recently_used_pages_go_first_and_of_a_session_the_last_one() -> None:
    gone: list[bytes] = []
    kept = KeptPages(PAGE, lambda page: gone.append(page.id))
    kept.keep(pages("a", "b"), 1.0)
    kept.keep(pages("x", "y"), 1.0)
    kept.keep(pages("a"), 1.0)
    kept.fit(1.0)
    assert gone == [b"b", b"y", b"x"]
    assert kept.find(0, 2, [b"a", b"b"]) == pages("a") and kept.find(0, 1, [b"a"]) == []


def test_a_page_that_sessions_use_stays_until_the_last_of_them_leaves() -> None:
    kept = KeptPages(PAGE)
    kept.keep(pages("a"), 1.0)
    kept.use(pages("a"))
    kept.use(pages("a"))
    kept.fit(0.0)
    assert kept.leave(pages("a"), 1.0) == 0
    kept.fit(0.0)
    assert pages("a")[0] in kept
    assert kept.leave(pages("a"), 1.0) == 1
    kept.fit(0.0)
    assert len(kept) == 0 and kept.idle_bytes == 0.0


def admission(n_tokens: int, **how: Any) -> Admission[str]:
    """A server with room for so many tokens on its two blocks."""
    return Admission(HostedBlocks(0, 2, 2.0 * n_tokens, 1.0, kept_tokens=PAGE, **how), lambda key: None)


IDS = tuple(split_ids(page_ids(PROMPT, PAGE)))


@pytest.mark.parametrize("paging", [None, PagingRules(PAGE, 1.0)])
def test_kept_pages_are_free_room_and_shared_ones_count_once(paging: PagingRules | None) -> None:
    server = admission(32, paging=paging)
    assert server.admit("a", 0, 2, Need(14, 16)) is None
    assert [number for number, _ in server.keep("a", IDS)] == [0, 1, 2]
    assert server.account.used_bytes == 0.0 and server.kept is not None and server.kept.idle_bytes == 24.0
    assert server.admit("b", 0, 2, Need(14, 16), IDS) is None
    assert server.found_tokens("b") == 12 and server.account.used_bytes == 32.0
    assert server.admit("c", 0, 2, Need(14, 16), IDS) is None
    assert server.account.used_bytes == 2 * (12 + 4 + 4)
    server.release("b")
    server.release("c")
    assert server.account.used_bytes == 0.0 and len(server.kept) == 3
    assert server.admit("large", 0, 2, Need(30, 30)) is None
    assert len(server.kept) == 0


def test_a_backend_that_copies_pages_has_its_session_admitted_without_them_where_both_have_no_room() -> None:
    server = admission(20, copies_kept=True)
    assert server.admit("a", 0, 2, Need(14, 16)) is None
    server.keep("a", IDS)
    assert server.admit("b", 0, 2, Need(14, 16), IDS) is None
    assert server.found_tokens("b") == 0 and server.account.used_bytes == 32.0


def test_pages_of_blocks_that_a_server_no_longer_holds_are_evicted() -> None:
    server = admission(32)
    assert server.admit("a", 0, 2, Need(14, 16)) is None
    server.keep("a", IDS)
    server.offer(1, 3, 64.0)
    assert server.kept is not None and len(server.kept) == 0


@pytest.mark.parametrize("n", [7, 100])
def test_the_caches_at_marks_are_those_of_the_tokens_up_to_there(n: int) -> None:
    values, at_marks = [31 * i + 5 for i in range(n)], []
    apply_to_rows(values, 2, [0, 0, 0], range(2, n, 3), at_marks)
    assert len(at_marks) == len(range(2, n, 3))
    for mark, caches in zip(range(2, n, 3), at_marks, strict=True):
        alone = [0, 0, 0]
        apply_to_rows(values[: mark + 1], 2, alone)
        assert caches == alone


class Forgetful(StubCompute):
    """Keeps the caches of another page than it should."""

    def kept(self, session: Any, tokens: range) -> list[int]:
        return super().kept(session, range(0, len(tokens)))


async def serve(
    prompts: Sequence[tuple[int, ...]], second: type[StubCompute] = StubCompute
) -> list[AnyRecord]:
    """Serves the prompts one after another; answers all records of reuse and of tokens."""
    clock, records = JumpClock(), []
    profile = replace(INSTANT, kept_tokens=PAGE)
    servers = [
        make_server(0, 2, profile=profile, kept_tokens=PAGE),
        make_server(2, 4, compute=second(profile, ManualClock()), kept_tokens=PAGE),
    ]

    async def route(request: Request, attempt: int, n_done: int) -> Plan:
        return Plan(HOPS, 0.0, 0.0)

    async with connected(servers, clock) as connections:
        rules = SessionRules(recovery=PATIENT, kept_tokens=PAGE)
        for number, prompt in enumerate(prompts):
            request = Request(number, 0.0, len(prompt), 6, Generation(prompt))
            model = StubHub(TOKEN_BYTES, 4)
            session = HubSession(
                request, str(number), "c", connections, route, model, rules, clock, records.append
            )
            await session.run()
    return [record for record in records if isinstance(record, Reused | Token)]


async def test_a_prompt_that_begins_as_an_earlier_one_is_computed_from_there_on() -> None:
    records = await serve([PROMPT, PROMPT, (*PROMPT[:9], 7, 7, 7)])
    assert [r.tokens for r in records if isinstance(r, Reused)] == [0, 12, 8]
    first = [r for r in records if isinstance(r, Token) and r.token == 0]
    assert [hop.up_bytes for r in first for hop in r.hops] == [n * TOKEN_BYTES for n in (14, 14, 2, 2, 4, 4)]
    ids = [[r.token_id for r in records if isinstance(r, Token) and r.request == n] for n in (0, 1)]
    assert ids[0] == ids[1]


async def test_a_wrong_reuse_is_noticed_by_the_stubs_client() -> None:
    with pytest.raises(WrongTokenError):
        await serve([PROMPT, PROMPT], Forgetful)
