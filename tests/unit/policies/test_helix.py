"""Helix' flow, placement and weighted round robin, on instances worked by hand and against all placements there are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings

from policies import BlockRange, Hop, InfeasiblePlacement, Problem, RequestSpec, SystemState
from policies.checks import check_placement, check_route
from policies.helix import HUB, Capacities, Helix, Iwrr, largest_flow, links_of
from policies.helix_program import improved
from tests.support.problems import forwarded, linear, make_problem, placed, problems

LENGTHS: dict[str, Any] = {"n_input_tokens": 2, "n_output_tokens": 2, "cache_bytes_per_token": 0.25}
"""A mean request takes one byte per block; a prompt nothing, then one further token."""


def ranges(*pairs: tuple[int, int]) -> list[BlockRange]:
    return [BlockRange(*pair) for pair in pairs]


def test_a_server_serves_as_many_as_share_a_step_in_its_room() -> None:
    # Four blocks of 10 bytes leave 8 bytes of 48: two sessions. A step takes 4 s and 4 x 0.5 more for the second.
    problem = make_problem([48.0], decode_s=[1.0], **LENGTHS)
    problem = replace(problem, servers=(replace(problem.servers[0], session_slope_s=0.5),))
    assert Capacities(problem).server_rps(0, 4) == pytest.approx(2 / 6)
    prompts = replace(problem, servers=(replace(problem.servers[0], prefill_base_s=0.75),))
    assert Capacities(prompts).server_rps(0, 4) == pytest.approx(1 / (3.0 + 6.0 / 2))  # a prompt goes alone


def test_links_lead_to_servers_that_go_on_from_there() -> None:
    assert set(links_of(ranges((0, 2), (2, 4), (1, 3), (0, 0), (0, 4)), 4)) == {
        *((HUB, 0), (HUB, 4), (0, 1), (0, 2), (0, 4), (2, 1), (2, 4), (1, HUB), (4, HUB)),
    }


def test_the_flow_is_what_the_narrowest_stage_lets_through() -> None:
    # One session at a time in each: half of the blocks takes 2 x tau. Stage 0 serves 0.5 + 0.25, stage 1 serves 0.6.
    problem = make_problem([22.0] * 3, decode_s=[1.0, 2.0, 1 / 1.2], **LENGTHS)
    flow, links = largest_flow(Capacities(problem), ranges((0, 2), (0, 2), (2, 4)))
    assert flow == pytest.approx(0.6, rel=1e-5)
    assert links[2, HUB] == pytest.approx(0.6, rel=1e-5)
    assert sum(rps for (i, _), rps in links.items() if i == HUB) == pytest.approx(0.6, rel=1e-5)
    assert largest_flow(Capacities(problem), ranges((0, 2), (0, 2), (0, 0)))[0] == 0.0


def test_forwarding_servers_are_held_back_by_the_links_between_them() -> None:
    problem = forwarded(make_problem([22.0] * 2, decode_s=[1.0, 1.0], **LENGTHS), over_links=True)
    assert largest_flow(Capacities(problem), ranges((0, 2), (2, 4)))[0] == pytest.approx(0.5, rel=1e-5)
    assert problem.transmissions is not None
    slow = replace(problem, transmissions=replace(problem.transmissions, across=linear([[4.0] * 2] * 2)))
    # Three hidden states of 3 s each.
    assert largest_flow(Capacities(slow), ranges((0, 2), (2, 4)))[0] == pytest.approx(1 / 9, rel=1e-5)


def every_flow(capacities: Capacities, counts: list[int], n_blocks: int) -> float:
    """The largest of all placements."""
    options = [
        [BlockRange(0, 0)]
        + [BlockRange(a, a + k) for k in range(1, most + 1) for a in range(n_blocks - k + 1)]
        for most in counts
    ]
    return max(largest_flow(capacities, chosen)[0] for chosen in product(*options))


@settings(max_examples=15, deadline=None)
@given(problems(max_servers=3, max_blocks=4))
def test_no_placement_within_half_of_the_memory_has_a_larger_flow(problem: Problem) -> None:
    counts = [
        min(int(server.memory_bytes * 0.5 // problem.model.block_bytes), problem.model.n_blocks)
        for server in problem.servers
    ]
    best = every_flow(Capacities(problem), counts, problem.model.n_blocks)
    try:
        placement = Helix().place(problem)
    except InfeasiblePlacement:
        return
    check_placement(problem, placement)
    assert placement.bounds["proven_optimal"] == 1.0
    assert placement.bounds["flow_rps"] == pytest.approx(best, rel=1e-4)
    assert placement.bounds["flow_rps"] <= placement.bounds["upper_bound_rps"] * (1 + 1e-6)


def test_the_program_finds_what_its_start_has_not() -> None:
    # Both servers with the first half: nothing flows. The program must move one of them.
    problem = make_problem([44.0, 44.0], decode_s=[1.0, 1.0], **LENGTHS)
    capacities = Capacities(problem)
    start = tuple(ranges((0, 2), (0, 2)))
    found, bound, is_proven = improved(capacities, [2, 2], start, time_limit_s=20.0, max_nodes=1000)
    flow = largest_flow(capacities, found)[0]
    assert sorted(found) == ranges((0, 2), (2, 4))
    assert is_proven and flow == pytest.approx(bound, rel=1e-4)


def test_where_limits_decide_the_bounds_say_so() -> None:
    # Two kinds of server, too few for whole pipelines of each: the root of the search tree alone proves nothing.
    problem = make_problem(
        [64.0, 64.0, 44.0, 44.0, 24.0], n_blocks=6, decode_s=[0.1, 0.1, 0.3, 0.3, 0.7], **LENGTHS
    )
    placement = Helix(max_nodes=0).place(problem)
    assert placement.bounds["proven_optimal"] in (0.0, 1.0)
    gap = placement.bounds["upper_bound_rps"] / placement.bounds["flow_rps"] - 1
    assert (placement.bounds["proven_optimal"] == 1.0) == (gap < 1e-5)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(InfeasiblePlacement, match="with half of their memory"):
        Helix().place(make_problem([30.0, 30.0]))
    assert Helix().place(make_problem([30.0, 30.0]), 1).ranges
    with pytest.raises(InfeasiblePlacement, match="with room for 9 sessions"):
        Helix().place(make_problem([30.0, 30.0]), 9)


REQUEST = RequestSpec(0, 2, 2)


def test_servers_get_requests_in_the_ratio_of_their_flow_one_between_the_others() -> None:
    # Whole models; s1 serves twice as many as s0.
    problem = make_problem([440.0, 440.0], decode_s=[2.0, 1.0], **LENGTHS)
    placement = placed(problem, [(0, 4), (0, 4)], [400.0, 400.0])
    router = Iwrr().bind(problem, placement)
    state = SystemState(placement.cache_bytes)
    servers = []
    for _ in range(9):
        route = router.route(REQUEST, state, 0.0)
        assert route is not None and route.wait_s == 0.0
        check_route(problem, placement, route, "iwrr")
        servers.append(route.hops[0].server)
    assert Counter(servers) == {0: 3, 1: 6}
    assert servers[0] == 1 and 0 in servers[1:3]


def test_a_full_server_is_masked_and_what_waits_takes_no_turn() -> None:
    problem = make_problem([440.0, 440.0], decode_s=[2.0, 1.0], **LENGTHS)
    placement = placed(problem, [(0, 4), (0, 4)], [40.0, 40.0])
    router = Iwrr().bind(problem, placement)
    state = SystemState(placement.cache_bytes)
    state.open(
        "long", [Hop(1, 0, 4)], 8.5, 100.0
    )  # 34 of 40 bytes; with the request's 3.2 more than 0.9 of it
    route = router.route(REQUEST, state, 0.0)
    assert route is not None and (route.hops[0].server, route.wait_s) == (0, 0.0)
    state.open("other", [Hop(0, 0, 4)], 10.0, 50.0)
    state.open("more", [Hop(1, 0, 4)], 1.5, 70.0)
    for _ in range(5):
        route = router.route(REQUEST, state, 0.0)
        assert route is not None and route.wait_s > 0
    first = route.hops[0].server
    state.close("other")
    state.close("long")
    route = router.route(REQUEST, state, 0.0)
    assert route is not None and route.wait_s == 0.0 and route.hops[0].server == first


def test_links_that_carry_next_to_nothing_are_not_used() -> None:
    problem = make_problem([440.0] * 2, decode_s=[100.0, 1.0], **LENGTHS)
    placement = placed(problem, [(0, 4), (0, 4)], [400.0, 400.0])
    router = Iwrr().bind(problem, placement)
    state = SystemState(placement.cache_bytes)
    routes = [router.route(REQUEST, state, 0.0) for _ in range(200)]
    assert {route.hops[0].server for route in routes if route is not None} == {1}
