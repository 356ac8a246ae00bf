"""The system itself in virtual time, on random problems: with faults it loses nothing, without it is as the fast engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from policies import BlockRange, Placement, Problem
from policies.membership import MembershipRules
from policies.optimal_rr import OptimalRr
from policies.petals_routing import PetalsRouting
from policies.rules import PagingRules, RecoveryRules
from policies.workload import Backoff, QueueRules, RequestPlan
from policies.wsrr import ShortestPath, WsRr
from testbed.experiments.experiment import After, Fault
from tests.support.alike import served_alike
from tests.support.effort import n_drawn
from tests.support.failing import SystemRun, fail
from tests.support.problems import make_problem
from tests.support.simulation import run_fast

N_BLOCKS = 4
TIMES = st.integers(0, 120).map(lambda n: n / 8)
MEETING = st.integers(0, 12).map(lambda n: n / 32)
"""Few instants, to which whole numbers of round trips and steps lead back."""

ranges = st.tuples(st.integers(0, N_BLOCKS - 1), st.integers(1, N_BLOCKS)).map(
    lambda r: BlockRange(min(r), max(r[1], min(r) + 1))
)

queues = st.sampled_from(
    [
        None,
        QueueRules("fifo", 0.0, 0.0, 60.0),
        QueueRules("backfill", 4.0, 0.0, 60.0),
        QueueRules("backfill", 60.0, 5.0, 2.0),
    ]
)


@st.composite
def systems(draw: st.DrawFn) -> tuple[Problem, Placement]:
    """Some servers, one of which holds the whole model, so that the placement is complete."""
    held = (BlockRange(0, N_BLOCKS), *draw(st.lists(ranges, min_size=1, max_size=5)))
    n = len(held)
    rtt_s = [[draw(st.integers(1, 20)) / 64 for _ in range(n)] for _ in range(2)]
    apart_s = [draw(st.integers(1, 20)) / 64 for _ in range(n)]
    problem = make_problem(
        [1000.0] * n,
        n_blocks=N_BLOCKS,
        rtt_s=rtt_s,
        decode_s=[draw(st.integers(1, 9)) / 128 for _ in range(n)],
        prefill_slope_s=1 / 256,
        server_rtt_s=[[apart_s[i] + apart_s[j] for j in range(n)] for i in range(n)],
    )
    problem = replace(problem, input_rtt_base_s=problem.raw_rtt_s, forwarding=draw(st.booleans()))
    rooms = tuple(draw(st.sampled_from([24.0, 60.0, 960.0])) for _ in range(n))
    return problem, Placement("random", held, rooms)


@st.composite
def workloads(draw: st.DrawFn, *, meet: bool = False) -> list[RequestPlan]:
    """Up to eight requests of two clients. No two of them ever do anything at one instant, unless they ``meet``: then many do."""
    at_s = sorted(draw(st.lists(MEETING if meet else TIMES, min_size=1, max_size=12 if meet else 8)))
    return [
        RequestPlan(
            number,
            draw(st.integers(0, 1)),
            at + (0.0 if meet else 0.00137 * (number + 1) ** 1.5),
            draw(st.integers(1, 4)),
            draw(st.integers(1, 8)),
        )
        for number, at in enumerate(at_s)
    ]


@st.composite
def fault_lists(draw: st.DrawFn, n_servers: int, n_requests: int) -> list[Fault]:
    found = []
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["kill", "kill", "stop", "slow", "restart", "leave"]))
        server = draw(st.integers(0, n_servers - 1))
        for_s = draw(st.none() | TIMES.filter(bool)) if kind in ("kill", "stop", "slow") else None
        factor = 4.0 if kind == "slow" else 1.0
        if draw(st.booleans()):
            found.append(Fault(kind, server, draw(TIMES), None, for_s, factor))
        else:
            after = After(draw(st.integers(0, n_requests - 1)), draw(st.integers(1, 5)))
            found.append(Fault(kind, server, None, after, for_s, factor))
    return found


recoveries = st.builds(
    RecoveryRules,
    mode=st.sampled_from(["replay", "replay", "head", "off"]),
    request_timeout_s=st.sampled_from([2.0, 180.0]),
    give_up_s=st.sampled_from([4.0, 40.0]),
    ban_s=st.sampled_from([0.0, 2.0]),
    ban_failed_servers=st.booleans(),
)
memberships = st.sampled_from(
    [
        MembershipRules(),
        MembershipRules("announced", 2.0, 5.0, 3.0),
        MembershipRules("announced", 1.0, 1.0, 8.0),
    ]
)


def blocks_of(run: SystemRun, request: int, token: int) -> list[int]:
    """The blocks that a token has passed, in the order in which it did; replays for it left out."""
    table = run.table
    rows = np.flatnonzero((table.request == request) & (table.token == token) & (table.replayed_tokens <= 1))
    return [b for row in rows for b in range(table.first[row], table.last[row])]


@settings(max_examples=n_drawn(20), deadline=None)
@given(
    st.data(),
    systems(),
    workloads(),
    recoveries,
    memberships,
    st.sampled_from(["none", "serial", "continuous"]),
    queues,
    st.sampled_from([None, PagingRules(1, 0.5), PagingRules(4, 1.0)]),
)
def test_whatever_fails_every_request_is_accounted_for_and_nothing_stays(
    data: st.DataObject,
    made: tuple[Problem, Placement],
    requests: list[RequestPlan],
    recovery: RecoveryRules,
    membership: MembershipRules,
    batching: str,
    queue: QueueRules | None,
    paging: PagingRules | None,
) -> None:
    faults = data.draw(fault_lists(made[0].n_servers, len(requests)))
    options: dict[str, Any] = {"recovery": recovery, "membership": membership}
    options |= {"batching": batching, "queue": queue, "paging": paging}
    run = fail(made, requests, *faults, **options)
    assert [r.request for r in run.requests] == [plan.index for plan in requests]
    for r in run.requests:
        event(r.status)
        event("preempted" if any(e["request"] == r.request for e in run.of_kind("preempted")) else "kept")
        assert (r.status, bool(r.reason)) in (("completed", False), ("failed", True))
        assert r.n_tokens_done == r.n_output_tokens or r.status == "failed"
    assert not any(run.summary["leaks"].values())
    assert run.summary["n_faults"] + run.summary["n_faults_without_effect"] + run.summary[
        "n_faults_never_came"
    ] == len(faults)
    for replayed in run.of_kind("replayed"):
        assert replayed["recovery_s"] >= replayed["floor_s"] - 1e-6
    again = fail(made, requests, *faults, **options)
    assert (again.requests, again.events) == (run.requests, run.events)


def assert_alike(*arguments: Any, **options: Any) -> None:
    """As ``tests.support.alike``, with Hypothesis' events."""
    for word in served_alike(*arguments, **options):
        event(word)


@settings(max_examples=n_drawn(20), deadline=None)
@given(
    systems(),
    workloads(),
    st.sampled_from([WsRr, PetalsRouting, OptimalRr, ShortestPath]),
    st.sampled_from([0.0, 5.0, 90.0]),
    st.sampled_from([0.0, 0.7, 10.0]),
    st.sampled_from([0.0, 2.0]),
    queues,
)
def test_where_nothing_happens_the_fast_engine_is_as_the_system(
    made: tuple[Problem, Placement],
    requests: list[RequestPlan],
    routing: Any,
    give_up_s: float,
    state_age_s: float,
    session_setup_s: float,
    queue: QueueRules | None,
) -> None:
    assert_alike(
        made,
        requests,
        routing=routing(),
        backoff=Backoff(1.0, 60.0, give_up_s),
        # On old reports a look through the queue lets in more than there is room for, and all at one instant.
        state_age_s=0.0 if queue else state_age_s,
        session_setup_s=session_setup_s,
        queue=queue,
    )


crowds = workloads(meet=True)
slopes = st.sampled_from([0.0, 1 / 64, 0.0371])


@settings(max_examples=n_drawn(20), deadline=None)
@given(systems(), crowds, st.sampled_from([None, 1, 3]), slopes, queues, st.sampled_from([0.0, 0.7]))
def test_where_sessions_share_steps_the_fast_engine_is_as_the_system(
    made: tuple[Problem, Placement],
    requests: list[RequestPlan],
    chunk_tokens: int | None,
    session_slope_s: float,
    queue: QueueRules | None,
    state_age_s: float,
) -> None:
    """Who is first where many do something at one instant included."""
    problem, placement = made
    servers = tuple(replace(server, session_slope_s=session_slope_s) for server in problem.servers)
    assert_alike(
        (replace(problem, servers=servers), placement),
        requests,
        within_s=1e-9,
        batching="continuous",
        chunk_tokens=chunk_tokens,
        queue=queue,
        backoff=Backoff(1.0, 60.0, 30.0),
        state_age_s=0.0 if queue else state_age_s,
    )


@settings(max_examples=n_drawn(20), deadline=None)
@given(
    systems(),
    crowds,
    st.sampled_from(["none", "continuous"]),
    st.sampled_from([PagingRules(1, 0.5), PagingRules(1, 1.0), PagingRules(4, 1.0)]),
    st.sampled_from(["at_once", "step_by_step"]),
    st.sampled_from([5.0, 30.0]),
    queues,
)
def test_where_caches_grow_the_fast_engine_is_as_the_system(
    made: tuple[Problem, Placement],
    requests: list[RequestPlan],
    batching: str,
    paging: PagingRules,
    replay: str,
    give_up_s: float,
    queue: QueueRules | None,
) -> None:
    problem, placement = made
    rooms = tuple(min(room_bytes, 30.0) for room_bytes in placement.cache_bytes)  # so that they run out
    assert_alike(
        (problem, replace(placement, cache_bytes=rooms)),
        [replace(plan, max_new_tokens=8) for plan in requests],
        within_s=1e-9,
        batching=batching,
        paging=paging,
        expected_output=2,
        recovery=RecoveryRules(replay=replay),
        backoff=Backoff(1.0, 60.0, give_up_s),
        queue=queue,
    )


@settings(max_examples=n_drawn(10), deadline=None)
@given(systems(), workloads())
def test_faults_that_touch_nothing_change_nothing(
    made: tuple[Problem, Placement], requests: list[RequestPlan]
) -> None:
    assert_alike(made, requests, Fault("slow", 0, 0.0, for_s=1.0, factor=1.0), Fault("kill", 0, 1e6))


@st.composite
def kills(draw: st.DrawFn, n_servers: int) -> list[Fault]:
    """Up to four servers that die for good or for a while, at instants at which no request arrives and no message does."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        kind, server = draw(st.sampled_from(["kill", "kill", "restart"])), draw(st.integers(0, n_servers - 1))
        for_s = draw(st.none() | st.integers(1, 40).map(lambda n: n / 16)) if kind == "kill" else None
        found.append(Fault(kind, server, draw(st.integers(0, 96)) / 32 + 0.0000713, for_s=for_s))
    return found


@settings(max_examples=n_drawn(15), deadline=None)
@given(
    st.data(),
    systems(),
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 6), st.integers(2, 24)), min_size=1, max_size=6),
    recoveries,
    st.sampled_from(["at_once", "step_by_step"]),
    st.sampled_from(["none", "continuous"]),
    queues,
    st.sampled_from([None, None, PagingRules(1, 0.5), PagingRules(4, 1.0)]),
)
def test_where_servers_are_killed_the_fast_engine_is_as_the_system(
    data: st.DataObject,
    made: tuple[Problem, Placement],
    drawn: list[tuple[int, int, int]],
    recovery: RecoveryRules,
    replay: str,
    batching: str,
    queue: QueueRules | None,
    paging: PagingRules | None,
) -> None:
    """Chains, recoveries and the instants of all steps."""
    faults = data.draw(kills(made[0].n_servers))
    requests = [RequestPlan(i, c, 0.2 * i + 0.00137, n, m) for i, (c, n, m) in enumerate(drawn)]
    options: dict[str, Any] = {"batching": batching, "queue": queue, "backoff": Backoff(1.0, 60.0, 30.0)}
    # Two that try again at one instant may be served in either order, since processes take turns.
    options["recovery"] = replace(recovery, replay=replay, request_timeout_s=180.0, retry_jitter_ratio=0.2)
    if paging is not None and not made[0].forwarding:
        requests = [replace(plan, max_new_tokens=24) for plan in requests]
        rooms = tuple(60.0 + min(room_bytes, 60.0) for room_bytes in made[1].cache_bytes)
        made = made[0], replace(made[1], cache_bytes=rooms)
        options |= {"paging": paging, "expected_output": 2}
    fast = run_fast(*made, requests, planned=tuple(faults), **options)
    event("cut" if fast.is_cut else "not cut")
    if fast.is_cut:
        assert_alike(made, requests, *faults, planned=tuple(faults), **options)
