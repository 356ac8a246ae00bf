"""What a server admits, and how often a client tries: the machines of nodes and of the fast engine."""

from __future__ import annotations

import itertools

import pytest

from nodes.admission import Admission, Attempts, HostedBlocks, Need, name_of_attempt, ready_at_s
from nodes.request import SessionError
from policies.rules import PagingRules


def admission(
    cache_bytes: float = 100.0, paging: PagingRules | None = None
) -> tuple[Admission[str], list[str], list[float]]:
    preempted: list[str] = []
    changes: list[float] = []
    hosted = HostedBlocks(2, 6, cache_bytes, 1.0, paging)
    return Admission(hosted, preempted.append, changes.append), preempted, changes


def test_a_session_reserves_its_cache_in_all_its_blocks_until_it_is_released() -> None:
    server, _, changes = admission()
    assert server.admit("a", 2, 4, Need(5, 20)) is None
    assert (server.account.used_bytes, server.cached_tokens("a")) == (40.0, 20)
    server.release("a")
    server.release("a")
    assert (server.account.used_bytes, server.cached_tokens("a"), changes) == (0.0, 0, [40.0, -40.0])


def test_a_refusal_is_final_only_where_the_session_can_never_fit_and_the_server_has_not_moved() -> None:
    server, _, _ = admission()
    assert server.admit("a", 2, 6, Need(5, 20)) is None
    full, never = server.admit("b", 2, 6, Need(5, 20)), server.admit("b", 2, 6, Need(5, 26))
    assert full is not None and (full.reason, full.is_final) == ("80 B asked for, 20 B free", False)
    assert never is not None and never.is_final
    server.offer(2, 6, 100.0)
    moved = server.admit("b", 2, 6, Need(5, 26))
    assert moved is not None and not moved.is_final


def test_a_server_that_moves_refuses_other_blocks_and_names_the_sessions_that_cannot_stay() -> None:
    server, _, _ = admission()
    for name, first, last in (("a", 2, 4), ("b", 4, 6), ("c", 2, 3), ("d", 3, 4)):
        assert server.admit(name, first, last, Need(1, 10)) is None
    assert server.leaving() == []
    server.offer(2, 4, 30.0)
    assert server.leaving() == ["b", "d"], "b's blocks go, and a and c use up the room"
    gone = server.admit("e", 4, 6, Need(1, 1))
    assert gone is not None and gone == ("its blocks are not here any more", False)


def test_a_server_that_leaves_refuses_whatever_it_offers_later_and_nothing_for_good() -> None:
    server, _, _ = admission()
    assert server.admit("a", 2, 4, Need(1, 10)) is None
    server.leave()
    server.offer(2, 6, 1000.0)
    refused = server.admit("b", 2, 4, Need(1, 10))
    assert refused is not None and not refused.is_final
    assert (server.leaving(), server.cached_tokens("a")) == ([], 10)


def test_a_cache_that_grows_takes_that_of_the_session_that_came_last() -> None:
    server, preempted, changes = admission(paging=PagingRules(page_tokens=10, high_water=1.0))
    for name, at_s in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        assert server.admit(name, 2, 3, Need(25, 60, (at_s, name))) is None
    assert server.account.used_bytes == 90.0
    assert server.grow("a", 35) and preempted == []
    assert server.grow("a", 41) and preempted == ["b"]
    assert (server.cached_tokens("a"), server.cached_tokens("b")) == (50, 0)
    assert not server.grow("b", 31), "it has lost its cache"
    assert server.grow("a", 60) and server.grow("c", 40)
    assert not server.grow("c", 50) and preempted == ["b", "c"], "it came last itself"
    assert changes == [30.0, 30.0, 30.0, 10.0, -30.0, 10.0, 10.0, 10.0, -40.0]


def test_a_client_that_waits_for_room_gives_up_in_time_and_for_ever_only_where_waiting_may_help() -> None:
    patient = Attempts(itertools.repeat(4.0), 10.0, 0.0, 9.0)
    assert [patient.failed(now_s, "full", is_final=False) for now_s in (10.0, 1e6)] == [4.0, 4.0]
    with pytest.raises(SessionError, match=r"^no room at the last attempt within 9 s \(too large\)$"):
        patient.failed(16.0, "too large", is_final=True)
    hasty = Attempts(itertools.repeat(4.0), 10.0, 5.0, 9.0)
    assert hasty.failed(11.0, "full", is_final=True) == 4.0
    with pytest.raises(SessionError, match=r"^no room at the last attempt within 5 s \(full\)$"):
        hasty.failed(11.5, "full", is_final=False)
    few = Attempts(itertools.repeat(4.0), 10.0, 0.0, 0.0, most=2)
    assert few.failed(10.0, "full", is_final=False) == 4.0
    with pytest.raises(SessionError, match=r"^2 attempts to open a session failed \(full\)$"):
        few.failed(14.0, "full", is_final=False)


def test_the_prompt_is_sent_after_the_longer_of_opening_and_initial_delay_and_after_the_setup() -> None:
    assert ready_at_s(10.0, 12.0, 5.0, 1.0) == 16.0
    assert ready_at_s(10.0, 17.0, 5.0, 1.0) == 18.0
    assert [name_of_attempt("7", number) for number in range(3)] == ["7", "7.1", "7.2"]
