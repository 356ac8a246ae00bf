"""The mode ``real`` when servers fail; times as ``tests.support.failing.pairs`` says."""

from __future__ import annotations

from typing import Any

import pytest

from policies import BlockRange, Hop
from policies.membership import MembershipRules
from testbed.experiment import After, Fault, RecoveryRules
from testbed.simulation.hub import FailingRun
from testbed.simulation.record import STEP_COLUMNS
from tests.support.failing import fail, kill, pairs
from tests.support.simulation import arrivals

TEN = arrivals(0.0, n_output=10)
"""Without failure: open at 0.1 s, tokens at 0.32 s and every 0.24 s, on s0 and s1; the last at 2.48 s."""


def events(run: FailingRun, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.record.events if event["event"] == kind]


def ended_at_s(run: FailingRun) -> list[float]:
    return [r.ended_at_s for r in run.requests]


def hops(run: FailingRun, number: int = 0) -> tuple[Hop, ...]:
    route = run.requests[number].route
    return () if route is None else route.hops


def token_at_s(run: FailingRun, request: int = 0, last_hop: int = 1) -> list[float]:
    """When the tokens of a request came."""
    steps = [run.record.steps[i : i + STEP_COLUMNS] for i in range(0, len(run.record.steps), STEP_COLUMNS)]
    return [step[9] for step in steps if step[0] == request and step[2] == last_hop]


def test_without_failure_a_session_takes_what_the_model_says() -> None:
    run = fail(pairs(), TEN, kill(0, 99.0))
    assert ended_at_s(run) == pytest.approx([2.48])
    assert token_at_s(run) == pytest.approx([0.32 + 0.24 * k for k in range(10)])
    assert run.record.events == []


def test_a_hop_that_dies_between_its_steps_is_noticed_when_it_is_needed() -> None:
    # The answer of 0.99 s is on its way as s1 dies; its next step would be sent at 1.16 s.
    run = fail(pairs(), TEN, kill(1, 1.0))
    [detected] = events(run, "detected")
    assert detected["at_s"] == pytest.approx(1.16)
    assert (detected["servers"], detected["blocks"], detected["position"]) == (["s1"], [2, 4], 4)
    assert hops(run) == (Hop(0, 0, 2), Hop(3, 2, 4))
    # One connection, then 4 tokens and the present one at once: there at 1.41 s, without failure at 1.28 s.
    [recovery] = run.record.recoveries
    assert recovery.recovery_s == pytest.approx(0.1 + 0.15)
    assert recovery.floor_s == pytest.approx(recovery.recovery_s)
    assert ended_at_s(run) == pytest.approx([2.48 + 0.13])
    assert run.requests[0].n_replays == 1


def test_a_hop_that_dies_at_work_is_noticed_one_way_later() -> None:
    run = fail(pairs(), TEN, kill(1, 0.98))
    [detected] = events(run, "detected")
    assert detected["at_s"] == pytest.approx(1.03)
    assert detected["reason"] == "connection reset"
    [recovery] = run.record.recoveries
    assert (recovery.n_tokens, recovery.recovery_s) == (4, pytest.approx(0.05 + 0.1 + 0.14))
    assert recovery.floor_s == pytest.approx(recovery.recovery_s)
    # What was due at 1.04 s came at 1.27 s.
    assert ended_at_s(run) == pytest.approx([2.48 + 0.23])


def test_what_happened_is_told_in_the_order_of_time() -> None:
    run = fail(pairs(), TEN, kill(1, 1.0, 0.2))
    told = [(e["event"], round(e["at_s"], 6)) for e in run.record.events]
    assert told == [
        ("fault", 1.0),
        ("detected", 1.16),
        ("re-routed", 1.16),
        ("begun", 1.2),
        ("replayed", 1.41),
    ]


def test_a_replay_step_by_step_takes_a_round_trip_per_token_and_so_does_its_floor() -> None:
    run = fail(pairs(), TEN, kill(1, 1.0), rules=RecoveryRules(replay="step_by_step"))
    [recovery] = run.record.recoveries
    # One connection, the prompt of 1 token in 0.11 s, then 4 tokens in 0.12 s each; at once they take 0.15 s.
    assert (recovery.n_tokens, recovery.recovery_s) == (5, pytest.approx(0.1 + 0.11 + 4 * 0.12))
    assert recovery.floor_s == pytest.approx(recovery.recovery_s)
    assert ended_at_s(run) == pytest.approx([2.48 + 0.13 + 0.11 + 4 * 0.12 - 0.15])
    assert (run.requests[0].n_replays, hops(run)) == (1, (Hop(0, 0, 2), Hop(3, 2, 4)))
    steps = [run.record.steps[i : i + STEP_COLUMNS] for i in range(0, len(run.record.steps), STEP_COLUMNS)]
    assert [step[12] for step in steps if step[3] == 3][:6] == [1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("second_at_s", [1.2, 1.3, 1.45, 1.6])
def test_a_replacement_that_dies_in_the_middle_of_its_steps_is_replaced_in_steps(second_at_s: float) -> None:
    faults = kill(1, 1.0, 0.05), kill(3, second_at_s)
    run = fail(pairs(), TEN, *faults, rules=RecoveryRules(replay="step_by_step", ban_s=0.0))
    assert [r.status for r in run.requests] == ["completed"]
    assert hops(run) == (Hop(0, 0, 2), Hop(1, 2, 4))


def test_healthy_hops_keep_their_caches_and_lost_ones_give_theirs_back() -> None:
    changes: list[tuple[float, int, float]] = []
    fail(pairs(), TEN, kill(1, 1.0), on_cache=lambda *change: changes.append(change))
    by_server = {j: [n for _, k, n in changes if k == j] for j in range(4)}
    assert by_server == {0: [11.0], 1: [11.0, -11.0], 2: [], 3: [11.0]}


def test_a_failure_during_the_prompt_sends_it_again() -> None:
    run = fail(pairs(), TEN, kill(1, 0.2))
    [recovery] = run.record.recoveries
    # Needed at 0.21 s, reset at 0.25 s, open at 0.35 s, through at 0.46 s.
    assert recovery == (0, 1, pytest.approx(0.25), pytest.approx(0.25))
    assert ended_at_s(run) == pytest.approx([2.48 + 0.14])


def test_a_recovery_in_the_prompt_does_not_wait_for_healthy_hops() -> None:
    run = fail(pairs(), TEN, kill(0, 0.16))
    # At work from 0.15 s, reset at 0.21 s, open at 0.31 s, through at 0.42 s; then s1 gets the prompt.
    [recovery] = run.record.recoveries
    assert recovery == (0, 1, pytest.approx(0.26), pytest.approx(0.26))


def test_all_hops_that_are_known_to_be_lost_are_replaced_together() -> None:
    run = fail(pairs(), TEN, kill(0, 1.0), kill(1, 1.0))
    [detected] = events(run, "detected")
    assert detected["servers"] == ["s0", "s1"]
    assert [e["blocks"] for e in events(run, "re-routed")] == [[0, 4]]
    assert hops(run) == (Hop(2, 0, 2), Hop(3, 2, 4))
    [recovery] = run.record.recoveries
    # s0 is needed at 1.04 s, its reset comes at 1.05 s; one connection, two replays.
    assert recovery.recovery_s == pytest.approx(0.01 + 0.1 + 2 * 0.15)


def test_a_failure_during_the_replay_belongs_to_the_same_recovery() -> None:
    run = fail(pairs(3), TEN, kill(1, 1.0), kill(3, 1.3))
    assert [e["servers"] for e in events(run, "detected")] == [["s1"], ["s3"]]
    [recovery] = run.record.recoveries
    # From 1.16 s to 1.6 s: s3 was lost at 1.35 s.
    assert recovery.recovery_s == pytest.approx(1.35 - 1.16 + 0.1 + 0.15)
    assert recovery.floor_s == pytest.approx(0.1 + 0.15)
    assert hops(run)[1] == Hop(5, 2, 4)
    assert run.requests[0].n_replays == 1


def test_a_replaced_hop_can_fail_again() -> None:
    run = fail(pairs(3), TEN, kill(1, 1.0), kill(3, 1.8))
    assert [r.n_tokens for r in run.record.recoveries] == [5, 7]
    assert [r.status for r in run.requests] == ["completed"]
    assert len(token_at_s(run)) == 10


def test_a_replacement_may_hold_more_than_what_was_lost() -> None:
    problem, placement = pairs()
    ranges = (*placement.ranges[:2], BlockRange(0, 4), BlockRange(0, 0))
    made = problem, type(placement)("wide", ranges, placement.cache_bytes)
    run = fail(made, TEN, kill(0, 1.0), bind=None)
    used = {hop.server for hop in hops(run)}
    assert run.requests[0].status == "completed"
    assert used in ({2}, {1, 2})


def test_without_replacement_a_session_waits_with_growing_pauses_until_there_is_one() -> None:
    rules = RecoveryRules(ban_s=0.0)
    run = fail(pairs(1), TEN, kill(1, 1.0, 3.0), rules=rules)
    [re_routed] = events(run, "re-routed")
    # Asked at 1.16, 2.16 and 4.16 s; s1 serves again from 4 s on.
    assert (re_routed["at_s"], re_routed["attempt"]) == (pytest.approx(4.16), 3)
    assert run.requests[0].status == "completed"
    [recovery] = run.record.recoveries
    assert recovery.recovery_s == pytest.approx(3.0 + 0.25)
    assert recovery.floor_s == pytest.approx(0.25)


def test_a_server_that_failed_is_left_out_for_as_long_as_it_is_banned() -> None:
    run = fail(pairs(1), TEN, kill(1, 1.0, 3.0), rules=RecoveryRules(ban_s=5.0))
    [re_routed] = events(run, "re-routed")
    assert re_routed["at_s"] == pytest.approx(1.16 + 1 + 2 + 4)
    careless = RecoveryRules(ban_s=5.0, ban_failed_servers=False)
    run = fail(pairs(1), TEN, kill(1, 1.0, 3.0), rules=careless)
    assert events(run, "re-routed")[0]["at_s"] == pytest.approx(1.16 + 1 + 2)


def test_a_session_gives_up_in_the_end_with_the_reason_and_others_go_on() -> None:
    rules = RecoveryRules(give_up_s=5.0, ban_s=0.0)
    two = [*arrivals(0.0, 50.0, n_output=10)]
    run = fail(pairs(1), two, kill(1, 1.0, 20.0), rules=rules)
    assert [r.status for r in run.requests] == ["failed", "completed"]
    assert run.requests[0].reason == (
        "blocks [2, 4) could not be replaced within 5 s (no route covers blocks [2, 4))"
    )
    assert run.requests[0].ended_at_s == pytest.approx(1.16 + 1 + 2)


def test_off_a_failed_hop_fails_the_request() -> None:
    run = fail(pairs(), TEN, kill(1, 1.0), rules=RecoveryRules("off"))
    assert (run.requests[0].status, run.requests[0].reason) == ("failed", "s1: connection reset")
    assert events(run, "re-routed") == []


def test_petals_head_recovers_in_the_prompt_and_never_after_it() -> None:
    rules = RecoveryRules("head", give_up_s=30.0)
    early = fail(pairs(), TEN, kill(1, 0.2), rules=rules)
    assert early.requests[0].status == "completed"
    late = fail(pairs(), TEN, kill(1, 1.0), rules=rules)
    assert late.requests[0].status == "failed"
    assert late.requests[0].reason == (
        "blocks [2, 4) could not be replaced within 30 s (s3: a replacement cannot start at position 4)"
    )
    assert late.record.recoveries == []


def test_a_halted_server_delays_what_it_works_on_and_loses_nothing() -> None:
    run = fail(pairs(), TEN, Fault("stop", 1, 0.98, for_s=2.0))
    # Due at 0.99 s, the answer goes out at 2.98 s.
    assert ended_at_s(run) == pytest.approx([2.48 + 1.99])
    assert events(run, "detected") == []


def test_a_server_that_is_halted_for_too_long_is_replaced_and_forgets_the_session_as_it_goes_on() -> None:
    changes: list[tuple[float, int, float]] = []
    rules = RecoveryRules(request_timeout_s=5.0)
    two = [*arrivals(0.0, 20.0, n_output=10)]
    run = fail(
        pairs(),
        two,
        Fault("stop", 1, 0.98, for_s=19.0),
        rules=rules,
        on_cache=lambda *change: changes.append(change),
    )
    [detected] = events(run, "detected")
    # Sent at 0.92 s.
    assert (detected["at_s"], detected["reason"]) == (pytest.approx(5.92), "no answer for 5 s")
    assert run.requests[0].status == "completed"
    assert hops(run)[1] == Hop(3, 2, 4)
    freed = [(at_s, n) for at_s, server, n in changes if server == 1]
    assert freed[:2] == [(pytest.approx(0.05), 11.0), (pytest.approx(19.98), -11.0)]


def test_an_opening_that_a_halted_server_never_answers_ends_after_the_connect_timeout() -> None:
    stale = MembershipRules("announced", refresh_s=1000.0)
    run = fail(pairs(), arrivals(1.0, n_output=10), Fault("stop", 1, 0.5), membership=stale)
    # Asked at 1 s, given up at 6 s, closed on the other at 6.1 s, asked again a second later.
    assert run.requests[0].waiting_s == pytest.approx(6.1)
    assert hops(run) == (Hop(0, 0, 2), Hop(3, 2, 4))
    assert (run.record.n_stale_decisions, run.record.n_misled_decisions) == (2, 1)


def test_an_opening_on_a_dead_server_is_refused_and_the_decision_counted() -> None:
    stale = MembershipRules("announced", refresh_s=1000.0)
    run = fail(pairs(), arrivals(1.0, n_output=10), kill(1, 0.5), membership=stale)
    assert run.requests[0].waiting_s == pytest.approx(0.1 + 0.1 + 1.0)
    assert (run.record.n_decisions, run.record.n_misled_decisions) == (2, 1)


def test_routers_that_know_at_once_avoid_the_dead_and_the_halted() -> None:
    late = arrivals(1.0, n_output=10)
    for fault in (kill(1, 0.5), Fault("stop", 1, 0.5), Fault("leave", 1, 0.5)):
        run = fail(pairs(), late, fault)
        assert hops(run) == (Hop(0, 0, 2), Hop(3, 2, 4))
        assert run.requests[0].waiting_s == 0.0
        assert (run.record.n_stale_decisions, run.record.n_misled_decisions) == (0, 0)


def test_a_slow_server_computes_longer_until_it_is_quick_again() -> None:
    # Steps that begin at s1 at 0.97 and 1.21 s take 0.1 s instead of 0.02 s; the next begins at 1.61 s.
    run = fail(pairs(), TEN, Fault("slow", 1, 0.9, for_s=0.6, factor=5.0))
    assert ended_at_s(run) == pytest.approx([2.48 + 2 * 0.08])


def test_a_restart_loses_the_caches_and_the_server_can_be_taken_again() -> None:
    run = fail(pairs(1), TEN, Fault("restart", 1, 1.0), rules=RecoveryRules(ban_s=0.0))
    assert hops(run) == (Hop(0, 0, 2), Hop(1, 2, 4))
    assert ended_at_s(run) == pytest.approx([2.48 + 0.13])
    assert run.requests[0].n_replays == 1


def test_one_that_leaves_finishes_what_it_has_and_takes_nothing_new() -> None:
    two = arrivals(0.0, 1.0, n_output=10)
    run = fail(pairs(), two, Fault("leave", 1, 0.5), Fault("kill", 1, 5.0))
    assert [hops(run, n)[1].server for n in (0, 1)] == [1, 3]
    assert ended_at_s(run) == pytest.approx([2.48, 3.48])
    assert events(run, "detected") == []
    [left] = events(run, "left")
    assert (left["at_s"], left["n_sessions"]) == (pytest.approx(2.53), 0)
    run = fail(pairs(), arrivals(0.0, 1.0, 9.0, n_output=10), Fault("leave", 1, 0.5), kill(1, 5.0))
    assert [e["applies"] for e in events(run, "fault")] == [True, False]  # it had ended before


def test_one_that_leaves_does_not_wait_for_its_sessions_for_ever() -> None:
    rules = RecoveryRules(give_up_s=1.0)
    run = fail(pairs(), TEN, Fault("leave", 1, 0.5), rules=rules)
    [left] = events(run, "left")
    assert (left["at_s"], left["took_s"], left["n_sessions"]) == (1.5, 1.0, 1)
    assert hops(run) == (Hop(0, 0, 2), Hop(3, 2, 4))
    assert run.requests[0].status == "completed"


def test_one_that_left_can_be_restarted() -> None:
    run = fail(pairs(1), arrivals(9.0, n_output=10), Fault("leave", 1, 0.5), Fault("restart", 1, 5.0))
    assert run.requests[0].status == "completed"


def test_one_that_joins_takes_blocks_and_serves_from_then_on() -> None:
    problem, placement = pairs()
    ranges = (*placement.ranges[:3], BlockRange(0, 0))
    made = problem, type(placement)("two", ranges, (*placement.cache_bytes[:3], 0.0), 2)
    run = fail(made, TEN, kill(1, 1.0), Fault("join", 3, 3.0), absent=frozenset({3}))
    [move] = run.moves
    assert (move.server, move.new, move.open_at_s) == (3, BlockRange(0, 4), 3.0)
    assert events(run, "moved")[0] | {"at_s": 0} == {
        "event": "moved",
        "at_s": 0,
        "server": "s3",
        "old": [0, 0],
        "new": [0, 4],
    }
    assert hops(run) == (Hop(0, 0, 2), Hop(3, 2, 4))


def test_a_fault_can_follow_a_token() -> None:
    run = fail(pairs(), TEN, Fault("kill", 1, after=After(0, 4)))
    assert events(run, "fault")[0]["at_s"] == pytest.approx(1.04)
    assert events(run, "detected")[0]["position"] == 4


def test_a_fault_after_a_token_that_never_comes_never_happens() -> None:
    two = arrivals(0.0, 1.0, n_output=10)
    faults = (kill(1, 0.5), Fault("kill", 0, after=After(0, 4)))
    run = fail(pairs(), two, *faults, rules=RecoveryRules("off"))
    assert [e["server"] for e in events(run, "fault")] == ["s1"]
    assert [r.status for r in run.requests] == ["failed", "completed"]


def test_a_fault_without_anything_to_do_does_nothing_and_neither_does_its_end() -> None:
    late = arrivals(50.0, n_output=10)
    run = fail(pairs(1), late, kill(1, 1.0, 10.0), kill(1, 2.0, 60.0), Fault("stop", 1, 3.0, for_s=70.0))
    assert [e["applies"] for e in events(run, "fault")] == [True, False, False]
    assert ended_at_s(run) == pytest.approx([52.48])


def test_a_model_that_nobody_will_ever_hold_again_fails_new_requests_at_once() -> None:
    run = fail(pairs(1), arrivals(5.0, n_output=10), kill(1, 1.0))
    assert run.requests[0].reason == "no route covers the model"
    assert run.requests[0].ended_at_s == 5.0


def test_new_requests_wait_for_servers_that_come_back() -> None:
    run = fail(pairs(1), arrivals(5.0, n_output=10), kill(1, 1.0, 5.0))
    # Asked at 5 s and at 6 s.
    assert run.requests[0].waiting_s == pytest.approx(1.0)
    assert run.requests[0].status == "completed"


def test_serial_servers_replay_in_turn() -> None:
    # A replay of n tokens keeps s3 busy for 0.1 n s.
    made = pairs(prefill_slope_s=0.05)
    run = fail(made, arrivals(0.0, 0.0, n_output=10), kill(1, 1.5), serial_compute=True)
    assert [r.n_replays for r in run.requests] == [1, 1]
    beyond_s = [r.recovery_s - r.floor_s for r in run.record.recoveries]
    assert min(beyond_s) == pytest.approx(0.0, abs=1e-9)
    assert max(beyond_s) > 0.1


def test_routers_see_what_replacements_hold() -> None:
    seen: list[list[float]] = []
    problem, placement = pairs(cache_bytes_per_token=1.0)

    class Looking:
        def __init__(self, router: Any) -> None:
            self._router = router

        def route(self, request: Any, state: Any, now_s: float) -> Any:
            seen.append([state.cache_bytes[j] - state.free_bytes(j) for j in range(4)])
            return self._router.route(request, state, now_s)

    from policies.wsrr import WsRr

    requests = arrivals(0.0, 1.5, n_output=10)
    made = problem, placement
    fail(made, requests, kill(1, 1.0), bind=lambda *args: Looking(WsRr().bind(*args)))
    # A new session, the lost hop alone, and after it the second session.
    assert seen == [[0.0] * 4, [22.0, 0.0, 0.0, 0.0], [22.0, 0.0, 0.0, 22.0]]
