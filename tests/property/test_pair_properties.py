"""Every pair of policies on random problems: several clients, mixed lengths, servers without room."""

from __future__ import annotations

import math

from hypothesis import event, given, settings
from hypothesis import strategies as st

from policies import InfeasiblePlacement, Placement, PolicyError, Problem, Router, service_s
from policies.checks import check_placement, check_route
from policies.problem import RequestSpec
from policies.registry import PAIRS, resolve_placement, resolve_routing
from policies.replay import ReplayedRequest, backoff_s, replay
from policies.workload import Backoff, RequestPlan
from tests.support.effort import n_drawn
from tests.support.problems import forwarded, problems

Run = tuple[Problem, str, tuple[RequestPlan, ...]]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Draw a problem, a pair's name, and requests no longer than the problem is designed for."""
    pair = draw(st.sampled_from(sorted(PAIRS)))
    problem = draw(problems(4, 6, 60, cache_bytes_per_token=draw(st.sampled_from([0.125, 0.5]))))
    if draw(st.booleans()):
        problem = forwarded(problem, over_links=draw(st.booleans()))
    at_s, plans = 0.0, []
    for index in range(draw(st.integers(2, 14))):
        at_s += draw(st.integers(0, 8)) / 40
        plans.append(
            RequestPlan(
                index,
                draw(st.integers(0, len(problem.clients) - 1)),
                at_s,
                draw(st.integers(1, problem.n_input_tokens)),
                draw(st.integers(1, problem.n_output_tokens)),
            )
        )
    return problem, pair, tuple(plans)


def bound(problem: Problem, pair: str) -> tuple[Placement, Router] | None:
    placement_name, routing_name = PAIRS[pair]
    try:
        placement = resolve_placement(placement_name).place(problem, 1)
    except InfeasiblePlacement:
        return None
    return placement, resolve_routing(routing_name).bind(problem, placement)


def replayed(run: Run) -> list[ReplayedRequest] | str | None:
    """Return the requests' outcomes, or why the run ended, or ``None`` without a placement."""
    problem, pair, plans = run
    chosen = bound(problem, pair)
    if chosen is None:
        return None
    try:
        return replay(problem, *chosen, plans, session_setup_s=0.5)
    except PolicyError as error:
        return str(error)


@settings(max_examples=n_drawn(50))
@given(runs())
def test_every_request_ends_once_after_what_its_chain_and_its_waiting_take(run: Run) -> None:
    problem, pair, plans = run
    chosen = bound(problem, pair)
    if chosen is None:
        event("no placement")
        return
    placement, router = chosen
    check_placement(problem, placement)
    done = replay(problem, placement, router, plans, session_setup_s=0.5)
    assert [r.plan for r in done] == list(plans)
    event("somebody waits" if any(r.waiting_s for r in done) else "nobody waits")
    for plan, route, waiting_s, ttft_s, time_s in done:
        check_route(problem, placement, route, pair)
        request = RequestSpec(plan.client, plan.n_input_tokens, plan.n_output_tokens)
        first_s, all_s = service_s(problem, request, route.hops)
        assert waiting_s == backoff_s(route.wait_s, Backoff())
        assert math.isclose(ttft_s, waiting_s + 0.5 + first_s, rel_tol=1e-9)
        assert math.isclose(time_s, waiting_s + 0.5 + all_s, rel_tol=1e-9)
        cache_bytes = problem.model.cache_bytes(request.n_tokens)
        for hop in route.hops:
            assert hop.n_blocks * cache_bytes <= placement.cache_bytes[hop.server] * (1 + 1e-9)


@settings(max_examples=n_drawn(20))
@given(runs())
def test_the_same_run_is_the_same_every_time(run: Run) -> None:
    assert replayed(run) == replayed(run)


@settings(max_examples=n_drawn(40))
@given(runs())
def test_a_session_that_does_not_wait_never_overbooks_a_servers_memory(run: Run) -> None:
    problem, pair, plans = run
    chosen = bound(problem, pair)
    if chosen is None:
        return
    placement, router = chosen
    done = replay(problem, placement, router, plans, session_setup_s=0.5)
    for newest in done:
        if newest.waiting_s > 0:
            continue  # a waiting request holds cache from its arrival on, like those that it waits for
        now_s = newest.plan.arrival_at_s
        used = [0.0] * problem.n_servers
        for r in done[: newest.plan.index + 1]:
            if r.plan.arrival_at_s + r.time_s > now_s:
                n_tokens = r.plan.n_input_tokens + r.plan.n_output_tokens
                for hop in r.route.hops:
                    used[hop.server] += hop.n_blocks * problem.model.cache_bytes(n_tokens)
        for hop in newest.route.hops:
            held = placement.ranges[hop.server].n_blocks * problem.model.block_bytes
            memory_bytes = problem.servers[hop.server].memory_bytes
            assert used[hop.server] <= placement.cache_bytes[hop.server] + 1e-6
            assert used[hop.server] + held <= memory_bytes + 1e-6
