"""The simulator when servers fail, on random faults: what must hold whatever happens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import BlockRange, Placement, Problem, RequestSpec, SystemState
from policies.membership import MembershipRules
from policies.problem import Hop, service_s
from policies.subrange import SubrangeRouter
from policies.workload import RequestPlan
from policies.wsrr import WsRr
from testbed.experiment import After, Fault, RecoveryRules
from testbed.simulation.record import STEP_COLUMNS
from tests.support.failing import fail
from tests.support.problems import forwarded, make_problem
from tests.support.simulation import run_real

N_BLOCKS = 4
TIMES = st.integers(0, 120).map(lambda n: n / 8)

ranges = st.tuples(st.integers(0, N_BLOCKS - 1), st.integers(1, N_BLOCKS)).map(
    lambda r: BlockRange(min(r), max(r[1], min(r) + 1))
)


@st.composite
def systems(draw: st.DrawFn) -> tuple[Problem, Placement]:
    """Some servers, one of which holds the whole model, so that the placement is complete."""
    held = (BlockRange(0, N_BLOCKS), *draw(st.lists(ranges, min_size=1, max_size=5)))
    n = len(held)
    problem = make_problem(
        [1000.0] * n,
        n_blocks=N_BLOCKS,
        rtt_s=[[draw(st.integers(1, 20)) / 64 for _ in range(n)] for _ in range(2)],
        decode_s=[draw(st.integers(1, 9)) / 128 for _ in range(n)],
        prefill_slope_s=1 / 256,
        input_rtt_s=0.125,
        server_rtt_s=[[draw(st.integers(1, 20)) / 64 for _ in range(n)] for _ in range(n)],
    )
    if draw(st.booleans()):
        problem = forwarded(problem, over_links=draw(st.booleans()))
    rooms = tuple(draw(st.sampled_from([24.0, 60.0, 960.0])) for _ in range(n))
    return problem, Placement("random", held, rooms)


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


def plans(draw: st.DrawFn) -> list[RequestPlan]:
    at_s = sorted(draw(st.lists(TIMES, min_size=1, max_size=8)))
    return [
        RequestPlan(i, draw(st.integers(0, 1)), t, draw(st.integers(1, 4)), draw(st.integers(1, 8)))
        for i, t in enumerate(at_s)
    ]


rules = st.builds(
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


@settings(max_examples=150, deadline=None)
@given(st.data(), systems(), rules, memberships, st.booleans())
def test_whatever_fails_every_request_is_accounted_for_and_every_token_is_made_once(
    data: st.DataObject,
    made: tuple[Problem, Placement],
    recovery: RecoveryRules,
    membership: MembershipRules,
    serial: bool,
) -> None:
    requests = data.draw(st.composite(plans)())
    problem, placement = made
    faults = data.draw(fault_lists(problem.n_servers, len(requests)))
    used: dict[int, float] = defaultdict(float)

    def on_cache(now_s: float, server: int, n_bytes: float) -> None:
        used[server] += n_bytes
        assert -1e-6 < used[server] <= placement.cache_bytes[server] + 1e-6

    def run() -> object:
        used.clear()
        return fail(
            made,
            requests,
            *faults,
            rules=recovery,
            membership=membership,
            serial_compute=serial,
            on_cache=on_cache,
        )

    first = run()
    assert [r.plan for r in first.requests] == requests  # type: ignore[attr-defined]
    tokens: dict[int, list[tuple[float, int, int]]] = defaultdict(list)
    steps: Sequence[float] = first.record.steps  # type: ignore[attr-defined]
    for i in range(0, len(steps), STEP_COLUMNS):
        tokens[int(steps[i])].append((steps[i + 1], int(steps[i + 4]), int(steps[i + 5])))
    for r in first.requests:  # type: ignore[attr-defined]
        made_of = tokens[r.plan.index]
        assert made_of == sorted(made_of), "steps go token by token and block by block"
        for token in range(r.plan.n_output_tokens):
            blocks = [b for t, a, z in made_of if t == token for b in range(a, z)]
            if r.status == "completed":
                assert blocks == list(range(N_BLOCKS))
            else:
                assert blocks == list(range(len(blocks)))
                assert r.reason
    for recovered in first.record.recoveries:  # type: ignore[attr-defined]
        assert recovered.recovery_s >= recovered.floor_s - 1e-9
    times_s = [event["at_s"] for event in first.record.events]  # type: ignore[attr-defined]
    assert times_s == sorted(times_s)
    again = run()
    assert again.requests == first.requests  # type: ignore[attr-defined]
    assert again.record.events == first.record.events  # type: ignore[attr-defined]


@settings(max_examples=60, deadline=None)
@given(st.data(), systems(), st.booleans())
def test_faults_that_touch_nothing_change_nothing(
    data: st.DataObject, made: tuple[Problem, Placement], serial: bool
) -> None:
    # No two steps reach a serial server at one instant: which of them is first hinges on how they were planned.
    requests = [
        replace(plan, arrival_at_s=plan.arrival_at_s + 0.00137 * (plan.index + 1) ** 1.5)
        for plan in data.draw(st.composite(plans)())
    ]
    problem, placement = made
    plain = run_real(problem, placement, requests, serial_compute=serial)
    last_s = max(r.ended_at_s for r in plain.requests)
    harmless = [Fault("slow", 0, 0.0, for_s=1.0, factor=1.0), Fault("kill", 0, last_s + 1.0)]
    run = fail(made, requests, *harmless, serial_compute=serial)
    for ours, theirs in zip(run.requests, plain.requests, strict=True):
        assert (ours.status, ours.n_attempts) == (theirs.status, theirs.n_attempts)
        assert ours.ended_at_s == pytest.approx(theirs.ended_at_s)
        assert ours.waiting_s == pytest.approx(theirs.waiting_s)
        if theirs.status == "completed":
            assert ours.route is not None and theirs.route is not None
            assert ours.route.hops == theirs.route.hops
            assert ours.ttft_s == pytest.approx(theirs.ttft_s)


@settings(max_examples=150, deadline=None)
@given(st.data(), systems())
def test_a_lost_range_gets_the_cheapest_chain_among_those_that_are_left(
    data: st.DataObject, made: tuple[Problem, Placement]
) -> None:
    problem, placement = made
    first = data.draw(st.integers(0, N_BLOCKS - 1))
    last = data.draw(st.integers(first + 1, N_BLOCKS))
    alive = data.draw(st.frozensets(st.integers(0, problem.n_servers - 1)))
    request = RequestSpec(data.draw(st.integers(0, 1)), 3, 4)
    router = SubrangeRouter(WsRr().bind, problem, placement)
    route = router.route(request, SystemState(placement.cache_bytes), 0.0, alive, first, last)
    room = problem.model.cache_bytes(request.n_tokens)
    costs_s = []
    for n in range(1, last - first + 1):
        for servers in product(sorted(alive), repeat=n):
            hops: list[Hop] = []
            at = first
            for j in servers:
                held = placement.ranges[j]
                if at < last and held.first <= at < held.last:
                    hops.append(Hop(j, at, min(held.last, last)))
                    at = hops[-1].last
            fits = all(hop.n_blocks * room <= placement.cache_bytes[hop.server] for hop in hops)
            if at == last and len(hops) == n and fits:
                costs_s.append(service_s(problem, request, hops)[1])
    if route is None:
        assert not costs_s
        return
    assert (route.hops[0].first, route.hops[-1].last) == (first, last)
    assert {hop.server for hop in route.hops} <= alive
    for hop in route.hops:
        assert placement.ranges[hop.server].first <= hop.first < hop.last <= placement.ranges[hop.server].last
    assert service_s(problem, request, route.hops)[1] == pytest.approx(min(costs_s))
