"""The system itself when servers fail, in virtual time; times as ``tests.support.failing.pairs`` says."""

from __future__ import annotations

from typing import Any

import pytest

from policies import BlockRange, Hop, Placement, Problem
from policies.membership import MembershipRules
from policies.rules import RecoveryRules
from policies.wsrr import WsRr
from testbed.experiments.experiment import After, Fault
from tests.support.failing import SystemRun, fail, kill, pairs
from tests.support.simulation import arrivals

TEN = arrivals(0.0, n_output=10)
"""Without failure: open at 0.1 s, tokens at 0.32 s and every 0.24 s, on s0 and s1; the last at 2.48 s."""


CONNECTING_S = 0.2
"""A new connection to a server: TCP's handshake, and the one of WebSockets. Closing takes as long."""


def at(at_s: float) -> Any:
    """That instant, but for the nanoseconds to which virtual time is rounded."""
    return pytest.approx(at_s, abs=1e-6)


def decisions(run: SystemRun) -> dict[str, int]:
    found: dict[str, int] = run.summary["decisions"]
    return found


def test_without_failure_a_session_takes_what_the_model_says() -> None:
    run = fail(pairs(), TEN, kill(0, 99.0))
    assert run.ended_at_s() == at([2.48])
    assert run.token_at_s() == at([0.32 + 0.24 * k for k in range(10)])
    assert [e["event"] for e in run.events] == ["network", "serving", "stopped"]


def test_a_hop_that_dies_between_its_steps_is_noticed_when_it_is_needed() -> None:
    # The answer of 0.99 s is on its way as s1 dies; its next step would be sent at 1.16 s.
    run = fail(pairs(), TEN, kill(1, 1.0))
    [detected] = run.of_kind("detected")
    assert detected["at_s"] == at(1.16)
    assert (detected["servers"], detected["blocks"], detected["position"]) == (["s1"], [2, 4], 4)
    assert run.hops() == (Hop(0, 0, 2), Hop(3, 2, 4))
    # One connection, then 4 tokens and the present one at once: there at 1.41 s, without failure at 1.28 s.
    [recovery] = run.of_kind("replayed")
    assert recovery["recovery_s"] == at(0.1 + 0.15)
    assert recovery["floor_s"] == at(recovery["recovery_s"])
    assert run.ended_at_s() == at([2.48 + 0.13])
    assert run.requests[0].n_recoveries == 1


def test_a_hop_that_dies_at_work_is_noticed_one_way_later() -> None:
    run = fail(pairs(), TEN, kill(1, 0.98))
    [detected] = run.of_kind("detected")
    assert detected["at_s"] == at(1.03)
    assert "was closed" in detected["reason"]
    [recovery] = run.of_kind("replayed")
    assert (recovery["tokens"], recovery["recovery_s"]) == (4, at(0.05 + 0.1 + 0.14))
    assert recovery["floor_s"] == at(recovery["recovery_s"])
    # What was due at 1.04 s came at 1.27 s.
    assert run.ended_at_s() == at([2.48 + 0.23])


def test_events_are_logged_in_the_order_of_time() -> None:
    run = fail(pairs(), TEN, kill(1, 1.0, 0.2))
    told = [(e["event"], round(e["at_s"], 6)) for e in run.events[2:-1]]
    assert told == [
        ("fault", 1.0),
        ("detected", 1.16),
        ("re-routed", 1.16),
        ("begun", 1.2),
        ("replayed", 1.41),
    ]


def test_a_replay_step_by_step_takes_a_round_trip_per_token_and_so_does_its_floor() -> None:
    run = fail(pairs(), TEN, kill(1, 1.0), recovery=RecoveryRules(replay="step_by_step"))
    [recovery] = run.of_kind("replayed")
    # One connection, the prompt of 1 token in 0.11 s, then 4 tokens in 0.12 s each; at once they take 0.15 s.
    assert (recovery["tokens"], recovery["recovery_s"]) == (5, at(0.1 + 0.11 + 4 * 0.12))
    assert recovery["floor_s"] == at(recovery["recovery_s"])
    assert run.ended_at_s() == at([2.48 + 0.13 + 0.11 + 4 * 0.12 - 0.15])
    assert (run.requests[0].n_recoveries, run.hops()) == (1, (Hop(0, 0, 2), Hop(3, 2, 4)))
    replayed = run.table.replayed_tokens[run.table.server == 3]
    assert list(replayed[:6]) == [1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("second_at_s", [1.2, 1.3, 1.45, 1.6])
def test_a_replacement_that_dies_in_the_middle_of_its_steps_is_replaced_in_steps(second_at_s: float) -> None:
    faults = kill(1, 1.0, 0.05), kill(3, second_at_s)
    run = fail(pairs(), TEN, *faults, recovery=RecoveryRules(replay="step_by_step", ban_s=0.0))
    assert [r.status for r in run.requests] == ["completed"]
    assert run.hops() == (Hop(0, 0, 2), Hop(1, 2, 4))


def test_healthy_hops_keep_their_caches_and_nothing_stays_behind() -> None:
    run = fail(pairs(), TEN, kill(1, 1.0))
    assert not run.table.is_replay[run.table.server == 0].any()
    assert not any(run.summary["leaks"].values())


def test_a_failure_during_the_prompt_sends_it_again() -> None:
    run = fail(pairs(), TEN, kill(1, 0.2))
    [recovery] = run.of_kind("replayed")
    # Needed at 0.21 s, reset at 0.25 s, open at 0.35 s, through at 0.46 s.
    assert (recovery["tokens"], recovery["recovery_s"], recovery["floor_s"]) == (1, at(0.25), at(0.25))
    assert run.ended_at_s() == at([2.48 + 0.14])


def test_a_recovery_in_the_prompt_does_not_wait_for_healthy_hops() -> None:
    run = fail(pairs(), TEN, kill(0, 0.16))
    # At work from 0.15 s, reset at 0.21 s, open at 0.31 s, through at 0.42 s; then s1 gets the prompt.
    [recovery] = run.of_kind("replayed")
    assert (recovery["tokens"], recovery["recovery_s"], recovery["floor_s"]) == (1, at(0.26), at(0.26))


def test_all_hops_that_are_known_to_be_lost_are_replaced_together() -> None:
    run = fail(pairs(), TEN, kill(0, 1.0), kill(1, 1.0))
    [detected] = run.of_kind("detected")
    assert detected["servers"] == ["s0", "s1"]
    assert [e["blocks"] for e in run.of_kind("re-routed")] == [[0, 4]]
    assert run.hops() == (Hop(2, 0, 2), Hop(3, 2, 4))
    [recovery] = run.of_kind("replayed")
    # s0 is needed at 1.04 s, its reset comes at 1.05 s; one connection, two replays.
    assert recovery["recovery_s"] == at(0.01 + 0.1 + 2 * 0.15)


def test_a_failure_during_the_replay_belongs_to_the_same_recovery() -> None:
    run = fail(pairs(3), TEN, kill(1, 1.0), kill(3, 1.3))
    assert [e["servers"] for e in run.of_kind("detected")] == [["s1"], ["s3"]]
    [recovery] = run.of_kind("replayed")
    # From 1.16 s to 1.6 s: s3 was lost at 1.35 s.
    assert recovery["recovery_s"] == at(1.35 - 1.16 + 0.1 + 0.15)
    assert recovery["floor_s"] == at(0.1 + 0.15)
    assert run.hops()[1] == Hop(5, 2, 4)
    assert run.requests[0].n_recoveries == 1


def test_a_replaced_hop_can_fail_again() -> None:
    run = fail(pairs(3), TEN, kill(1, 1.0), kill(3, 1.8))
    assert [e["tokens"] for e in run.of_kind("replayed")] == [5, 7]
    assert [r.status for r in run.requests] == ["completed"]
    assert len(run.token_at_s()) == 10


def test_a_replacement_may_hold_more_than_what_was_lost() -> None:
    problem, placement = pairs()
    ranges = (*placement.ranges[:2], BlockRange(0, 4), BlockRange(0, 0))
    made = problem, type(placement)("wide", ranges, placement.cache_bytes)
    run = fail(made, TEN, kill(0, 1.0))
    used = {hop.server for hop in run.hops()}
    assert run.requests[0].status == "completed"
    assert used in ({2}, {1, 2})


def test_without_replacement_a_session_waits_with_growing_pauses_until_there_is_one() -> None:
    rules = RecoveryRules(ban_s=0.0)
    run = fail(pairs(1), TEN, kill(1, 1.0, 3.0), recovery=rules)
    [re_routed] = run.of_kind("re-routed")
    # Asked at 1.16, 2.16 and 4.16 s; s1 serves again from 4 s on, and the client connects to it again.
    assert (re_routed["at_s"], re_routed["attempt"]) == (at(4.16), 3)
    assert run.requests[0].status == "completed"
    [recovery] = run.of_kind("replayed")
    assert recovery["recovery_s"] == at(3.0 + 0.25 + CONNECTING_S)
    assert recovery["floor_s"] == at(0.25)


def test_a_server_that_failed_is_left_out_for_as_long_as_it_is_banned() -> None:
    run = fail(pairs(1), TEN, kill(1, 1.0, 3.0), recovery=RecoveryRules(ban_s=5.0))
    [re_routed] = run.of_kind("re-routed")
    assert re_routed["at_s"] == at(1.16 + 1 + 2 + 4)
    careless = RecoveryRules(ban_s=5.0, ban_failed_servers=False)
    run = fail(pairs(1), TEN, kill(1, 1.0, 3.0), recovery=careless)
    assert run.of_kind("re-routed")[0]["at_s"] == at(1.16 + 1 + 2)


def test_a_session_gives_up_in_the_end_with_the_reason_and_others_go_on() -> None:
    rules = RecoveryRules(give_up_s=5.0, ban_s=0.0)
    two = [*arrivals(0.0, 50.0, n_output=10)]
    run = fail(pairs(1), two, kill(1, 1.0, 20.0), recovery=rules)
    assert [r.status for r in run.requests] == ["failed", "completed"]
    assert run.requests[0].reason == (
        "blocks [2, 4) could not be replaced within 5 s (no route covers blocks [2, 4))"
    )
    assert run.of_kind("failed")[0]["at_s"] == at(
        1.16 + 1 + 2 + 0.1
    )  # and a round trip to close the other hop


def test_a_failed_hop_fails_the_request_where_recovery_is_off() -> None:
    run = fail(pairs(), TEN, kill(1, 1.0), recovery=RecoveryRules("off"))
    assert (run.requests[0].status, run.requests[0].reason) == (
        "failed",
        "s1: not connected to http://198.18.0.3:7000/v1/sessions",
    )
    assert run.of_kind("re-routed") == []


def test_petals_head_recovers_in_the_prompt_and_never_after_it() -> None:
    rules = RecoveryRules("head", give_up_s=30.0)
    early = fail(pairs(), TEN, kill(1, 0.2), recovery=rules)
    assert early.requests[0].status == "completed"
    late = fail(pairs(), TEN, kill(1, 1.0), recovery=rules)
    assert late.requests[0].status == "failed"
    assert late.requests[0].reason == (
        "blocks [2, 4) could not be replaced within 30 s (s3: a new session cannot start at position 4)"
    )
    assert late.of_kind("replayed") == []


def test_a_halted_server_delays_what_it_works_on_and_loses_nothing() -> None:
    run = fail(pairs(), TEN, Fault("stop", 1, 0.98, for_s=2.0))
    # Due at 0.99 s, the answer goes out at 2.98 s.
    assert run.ended_at_s() == at([2.48 + 1.99])
    assert run.of_kind("detected") == []


def test_a_server_that_is_halted_for_too_long_is_replaced_and_forgets_the_session_as_it_goes_on() -> None:
    rules = RecoveryRules(request_timeout_s=5.0)
    two = [*arrivals(0.0, 20.0, n_output=10)]
    run = fail(pairs(), two, Fault("stop", 1, 0.98, for_s=19.0), recovery=rules)
    [detected] = run.of_kind("detected")
    # Sent at 0.92 s.
    assert (detected["at_s"], detected["reason"]) == (at(5.92), "no answer for 5 s")
    assert [r.status for r in run.requests] == ["completed", "completed"]
    assert run.hops()[1] == Hop(3, 2, 4)
    assert not any(run.summary["leaks"].values())


def test_an_opening_that_a_halted_server_never_answers_ends_after_the_connect_timeout() -> None:
    stale = MembershipRules("announced", refresh_s=1000.0)
    run = fail(pairs(), arrivals(1.0, n_output=10), Fault("stop", 1, 0.5), membership=stale)
    # Asked at 1 s, given up at 6 s, closed on the other at 6.1 s, asked again a second later.
    assert run.requests[0].waited_s == at(6.1)
    assert run.hops() == (Hop(0, 0, 2), Hop(3, 2, 4))
    assert (decisions(run)["n_stale_decisions"], decisions(run)["n_misled_decisions"]) == (2, 1)


def test_an_opening_on_a_dead_server_is_refused_and_the_decision_counted() -> None:
    stale = MembershipRules("announced", refresh_s=1000.0)
    run = fail(pairs(), arrivals(1.0, n_output=10), kill(1, 0.5), membership=stale)
    assert run.requests[0].waited_s == at(0.1 + 0.1 + 1.0)
    assert (decisions(run)["n_decisions"], decisions(run)["n_misled_decisions"]) == (2, 1)


def test_routers_that_know_at_once_avoid_the_dead_and_the_halted() -> None:
    late = arrivals(1.0, n_output=10)
    for fault in (kill(1, 0.5), Fault("stop", 1, 0.5), Fault("leave", 1, 0.5)):
        run = fail(pairs(), late, fault)
        assert run.hops() == (Hop(0, 0, 2), Hop(3, 2, 4))
        assert run.requests[0].waited_s == 0.0
        assert (decisions(run)["n_stale_decisions"], decisions(run)["n_misled_decisions"]) == (0, 0)


def test_a_slow_server_computes_longer_until_it_is_quick_again() -> None:
    # Steps that begin at s1 at 0.97 and 1.21 s take 0.1 s instead of 0.02 s; the next begins at 1.61 s.
    run = fail(pairs(), TEN, Fault("slow", 1, 0.9, for_s=0.6, factor=5.0))
    assert run.ended_at_s() == at([2.48 + 2 * 0.08])


def test_a_restart_loses_the_caches_and_the_server_can_be_taken_again() -> None:
    run = fail(pairs(1), TEN, Fault("restart", 1, 1.0), recovery=RecoveryRules(ban_s=0.0))
    assert run.hops() == (Hop(0, 0, 2), Hop(1, 2, 4))
    assert run.ended_at_s() == at([2.48 + 0.13 + CONNECTING_S])
    assert run.requests[0].n_recoveries == 1


def test_a_server_that_leaves_finishes_what_it_has_and_takes_nothing_new() -> None:
    two = arrivals(0.0, 1.0, n_output=10)
    run = fail(pairs(), two, Fault("leave", 1, 0.5), Fault("kill", 1, 5.0))
    assert [run.hops(n)[1].server for n in (0, 1)] == [1, 3]
    assert run.ended_at_s() == at([2.48, 3.48])
    assert run.of_kind("detected") == []
    [left] = run.of_kind("left")
    assert (left["at_s"], left["n_sessions"]) == (at(2.53 + CONNECTING_S), 0)
    run = fail(pairs(), arrivals(0.0, 1.0, 9.0, n_output=10), Fault("leave", 1, 0.5), kill(1, 5.0))
    assert [e["applies"] for e in run.of_kind("fault")] == [True, False]  # it had ended before


def test_a_server_that_leaves_does_not_wait_for_its_sessions_for_ever() -> None:
    rules = RecoveryRules(give_up_s=1.0)
    run = fail(pairs(), TEN, Fault("leave", 1, 0.5), recovery=rules)
    [left] = run.of_kind("left")
    assert (left["at_s"], left["took_s"], left["n_sessions"]) == (
        at(1.5 + CONNECTING_S),
        at(1.0 + CONNECTING_S),
        1,
    )
    assert run.hops() == (Hop(0, 0, 2), Hop(3, 2, 4))
    assert run.requests[0].status == "completed"


def test_a_server_that_left_can_be_restarted() -> None:
    run = fail(pairs(1), arrivals(9.0, n_output=10), Fault("leave", 1, 0.5), Fault("restart", 1, 5.0))
    assert run.requests[0].status == "completed"


def test_a_server_that_joins_takes_blocks_and_serves_from_then_on() -> None:
    problem, placement = pairs()
    ranges = (*placement.ranges[:3], BlockRange(0, 0))
    made = problem, type(placement)("two", ranges, (*placement.cache_bytes[:3], 0.0), 2)
    run = fail(made, TEN, kill(1, 1.0), Fault("join", 3, 3.0), absent=frozenset({3}))
    [move] = run.moves
    assert (move.server, move.new, move.open_at_s) == (3, BlockRange(0, 4), 3.0)
    [moved] = run.of_kind("moved")
    assert (moved["server"], moved["old"], moved["new"], moved["n_cut"]) == ("s3", [0, 0], [0, 4], 0)
    assert run.hops() == (Hop(0, 0, 2), Hop(3, 2, 4))


def test_a_fault_can_follow_a_token() -> None:
    run = fail(pairs(), TEN, Fault("kill", 1, after=After(0, 4)))
    assert run.of_kind("fault")[0]["at_s"] == at(1.04)
    assert run.of_kind("detected")[0]["position"] == 4


def test_a_fault_after_a_token_that_never_comes_never_happens() -> None:
    two = arrivals(0.0, 1.0, n_output=10)
    faults = (kill(1, 0.5), Fault("kill", 0, after=After(0, 4)))
    run = fail(pairs(), two, *faults, recovery=RecoveryRules("off"))
    assert [e["server"] for e in run.of_kind("fault")] == ["s1"]
    assert [r.status for r in run.requests] == ["failed", "completed"]


def test_a_fault_without_anything_to_do_does_nothing_and_neither_does_its_end() -> None:
    late = arrivals(50.0, n_output=10)
    run = fail(pairs(1), late, kill(1, 1.0, 10.0), kill(1, 2.0, 60.0), Fault("stop", 1, 3.0, for_s=70.0))
    assert [e["applies"] for e in run.of_kind("fault")] == [True, False, False]
    assert run.ended_at_s() == at([52.48 + CONNECTING_S])


def test_new_requests_for_a_model_that_nobody_holds_any_more_give_up() -> None:
    run = fail(pairs(1), arrivals(5.0, n_output=10), kill(1, 1.0))
    assert run.requests[0].reason == "no room at the last attempt within 300 s (no route covers the model)"


def test_new_requests_wait_for_servers_that_come_back() -> None:
    run = fail(pairs(1), arrivals(5.0, n_output=10), kill(1, 1.0, 5.0))
    # Asked at 5, 6 and 8 s; the first message of the new connection finds out that the server is there.
    assert run.requests[0].waited_s in (at(1.0), at(3.0))
    assert run.requests[0].status == "completed"


def test_serial_servers_replay_in_turn() -> None:
    # A replay of n tokens keeps s3 busy for 0.1 n s.
    made = pairs(prefill_slope_s=0.05)
    run = fail(made, arrivals(0.0, 0.0, n_output=10), kill(1, 1.5), batching="serial")
    assert [r.n_recoveries for r in run.requests] == [1, 1]
    beyond_s = [e["recovery_s"] - e["floor_s"] for e in run.of_kind("replayed")]
    assert min(beyond_s) == at(0.0)
    assert max(beyond_s) > 0.1


def test_routers_see_what_replacements_hold() -> None:
    seen: list[list[float]] = []

    class Looking(WsRr):
        def bind(self, problem: Problem, placement: Placement) -> Any:
            router = super().bind(problem, placement)
            plain = router.route

            def route(request: Any, state: Any, now_s: float) -> Any:
                seen.append([state.cache_bytes[j] - state.free_bytes(j) for j in range(4)])
                return plain(request, state, now_s)

            router.route = route  # type: ignore[method-assign]
            return router

    requests = arrivals(0.0, 1.5, n_output=10)
    fail(pairs(cache_bytes_per_token=1.0), requests, kill(1, 1.0), routing=Looking())
    # A new session, the lost hop alone, and after it the second session.
    assert seen == [[0.0] * 4, [22.0, 0.0, 0.0, 0.0], [22.0, 0.0, 0.0, 22.0]]
