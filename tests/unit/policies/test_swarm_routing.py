"""SWARM's routing on instances worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies import Hop, RequestSpec, SystemState
from policies.swarm_routing import SwarmRouter, SwarmRouting
from tests.support.problems import make_problem, placed

REQUEST = RequestSpec(0, 5, 1)


def servers(router: SwarmRouter, state: SystemState, times: int) -> list[int]:
    found = []
    for _ in range(times):
        route = router.route(REQUEST, state, 0.0)
        assert route is not None
        found.append(route.hops[-1].server)
    return found


def router_of(smoothing_ratio: float = 0.1) -> tuple[SwarmRouter, SystemState]:
    # A prompt of five tokens takes 0.05 s a block. s0 holds two of four blocks, s1 and s2 all four.
    problem = make_problem([100.0] * 3, prefill_slope_s=0.01, input_rtt_s=0.2)
    placement = placed(problem, [(0, 2), (2, 4), (1, 4)], [60.0, 60.0, 60.0])
    return SwarmRouting(smoothing_ratio).bind(problem, placement), SystemState(placement.cache_bytes)


def test_servers_that_are_equally_fast_take_turns_and_one_that_waits_is_left_alone() -> None:
    router, state = router_of()
    assert servers(router, state, 4) == [1, 2, 1, 2]
    # 58 bytes are held until 3 s. Priorities 0.6 both: s1 is next, and waits; 0.1 of 3.3 s and 0.9 of 0.3 s is 0.6 s.
    state.open("other", [Hop(1, 2, 4)], 29.0, 3.0)
    assert servers(router, state, 1) == [1]
    # s1 is at 1.2, s2 at 0.6: twice s2 until both are at 1.2 (0.3 each), then the first listed again.
    assert servers(router, state, 2) == [2, 2]
    state.close("other")


def test_a_server_twice_as_slow_is_taken_half_as_often() -> None:
    problem = make_problem([100.0] * 2, rtt_s=[[0.1, 0.1]])
    near_and_far = replace(problem, input_rtt_base_s=((0.25, 0.5),))
    placement = placed(near_and_far, [(0, 4), (0, 4)], [60.0, 60.0])
    router, state = SwarmRouting().bind(near_and_far, placement), SystemState(placement.cache_bytes)
    taken = servers(router, state, 300)
    assert taken[:4] == [0, 1, 0, 0]
    assert taken.count(1) == 100


def test_swarm_routes_wait_and_cost_what_the_chain_does() -> None:
    router, state = router_of()
    route = router.route(REQUEST, state, 0.0)
    assert route is not None
    assert route.hops == (Hop(0, 0, 2), Hop(1, 2, 4))
    assert (route.wait_s, route.cost_s) == (0.0, pytest.approx(2 * 0.2 + 4 * 0.05))
    assert router.route(RequestSpec(0, 500, 1), state, 0.0) is None
