"""The system itself, in virtual time, where caches grow and servers run out of room, with and without forwarding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies import BlockRange, Placement, Problem
from policies.rules import PagingRules, RecoveryRules
from policies.workload import Backoff, RequestPlan
from testbed.experiments.experiment import Fault
from tests.support.failing import SystemRun, fail, kill, pairs

N_TOKENS = 30
"""Of input and output together: 60 bytes on a server with two blocks."""
PAGING = PagingRules(4, 1.0)
both_ways = pytest.mark.parametrize("forwarding", [False, True], ids=["hub-spoke", "forwarding"])


def small(forwarding: bool, room_bytes: float = 100.0) -> tuple[Problem, Placement]:
    """``pairs`` with room for one and a half sessions of ``N_TOKENS``."""
    problem, placement = pairs()
    rooms = (room_bytes,) * len(placement.ranges)
    return replace(problem, forwarding=forwarding), replace(placement, cache_bytes=rooms)


def requests(n: int, gap_s: float = 0.31) -> list[RequestPlan]:
    return [RequestPlan(i, 0, gap_s * i, 3 + i % 3, N_TOKENS - 3 - i % 3, 40) for i in range(n)]


def serve(made: tuple[Problem, Placement], n: int, *faults: Fault, **settings: Any) -> SystemRun:
    options: dict[str, Any] = {"paging": PAGING, "expected_output": 8, "backoff": Backoff(1.0, 4.0, 0.0)}
    return fail(made, requests(n), *faults, **options | settings)


@both_ways
def test_preempted_sessions_come_to_their_end_and_what_it_cost_is_told(forwarding: bool) -> None:
    run = serve(small(forwarding), 8)
    # A request completes only with the whole model's tokens, every one of them.
    assert {r.status for r in run.requests} == {"completed"}
    lost, resumed = run.of_kind("preempted"), run.of_kind("resumed")
    preemption = run.summary["preemption"]
    assert len(lost) == len(resumed) == preemption["n_preemptions"] > 2
    assert preemption["tokens"] == sum(event["tokens"] for event in lost) > 0
    assert (
        preemption["n_requests"] == len({event["request"] for event in lost}) == preemption["waited_s"]["n"]
    )
    waited_s = sum(event["at_s"] for event in resumed) - sum(event["at_s"] for event in lost)
    assert preemption["waited_s"]["mean"] * preemption["waited_s"]["n"] == pytest.approx(waited_s, abs=1e-6)
    assert run.of_kind("detected", "replayed", "unreachable") == [], "no server has failed"
    assert not any(run.summary["leaks"].values())
    # Every replay is in the table, on every hop of the new chain.
    replays = run.table.replayed_tokens[run.table.replayed_tokens > 0]
    assert sorted(set(replays)) == sorted({event["tokens"] for event in resumed})


@both_ways
@pytest.mark.parametrize("batching", ["serial", "continuous"])
def test_who_came_first_is_never_preempted_and_nobody_waits_for_ever(forwarding: bool, batching: str) -> None:
    run = serve(small(forwarding, 64.0), 10, batching=batching)
    assert {r.status for r in run.requests} == {"completed"}
    lost = run.of_kind("preempted")
    assert 0 not in {event["request"] for event in lost}
    times = np.bincount([event["request"] for event in lost])
    assert times.max() >= 2, "one was preempted twice"
    # Whoever loses its cache loses it to one that came before: when it does, an earlier request is being served.
    ends_at_s = [row.ended_at_s for row in run.requests]
    for event in lost:
        assert any(end_at_s > event["at_s"] - 1.0 for end_at_s in ends_at_s[: event["request"]])


@both_ways
@pytest.mark.parametrize("replay", ["at_once", "step_by_step"])
def test_preemptions_among_failures_leave_nothing_behind(forwarding: bool, replay: str) -> None:
    rules = RecoveryRules(request_timeout_s=10.0, connect_timeout_s=5.0, replay=replay)
    run = serve(small(forwarding), 8, kill(0, 2.0, 3.0), kill(3, 4.5, 3.0), recovery=rules)
    assert {r.status for r in run.requests} == {"completed"}
    assert run.of_kind("preempted") and run.of_kind("replayed")
    assert not any(run.summary["leaks"].values())


def test_a_push_that_overtakes_the_word_of_a_preemption_is_no_failure_of_a_server() -> None:
    """The first server is near the client and the second far away: its neighbour would be heard before it."""
    problem, _ = pairs(1, rtt_s=[[0.01, 4.0]], server_rtt_s=[[0.0, 0.01], [0.01, 0.0]], decode_s=[0.5, 0.01])
    placement = Placement("far", (BlockRange(0, 2), BlockRange(2, 4)), (1000.0, 100.0))
    run = serve((replace(problem, forwarding=True), placement), 4)
    assert {r.status for r in run.requests} == {"completed"}
    assert {event["server"] for event in run.of_kind("preempted")} == {"s1"}
    assert run.of_kind("detected", "unreachable") == []
