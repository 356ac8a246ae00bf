from __future__ import annotations

import math

import pytest

from policies import Hop, RequestSpec, SystemState
from policies.positions import PositionGraph
from policies.problem import BlockRange
from policies.waiting import waiting_s
from policies.wsrr import WsRr
from tests.support.problems import make_problem, placed

ONE = RequestSpec(0, 1, 1)


def test_waiting_lasts_until_enough_sessions_have_ended() -> None:
    state = SystemState([10.0])
    for key, (n_blocks, ends_at_s) in enumerate([(4, 30.0), (3, 10.0), (2, 20.0)]):
        state.open(key, [Hop(0, 0, n_blocks)], 1.0, ends_at_s)
    waits = [waiting_s(state, 0, need, 5.0) for need in (1.0, 2.0, 4.0, 5.0, 6.0, 7.0, 10.0, 10.5)]
    assert waits == [0.0, 5.0, 5.0, 15.0, 15.0, 25.0, 25.0, math.inf]


def test_a_session_past_its_expected_end_is_expected_to_end_now() -> None:
    state = SystemState([1.0])
    state.open("late", [Hop(0, 0, 1)], 1.0, 3.0)
    assert waiting_s(state, 0, 1.0, 8.0) == 0.0


@pytest.mark.parametrize("s_c", [0.1, 0.3, 1e9 / 7])
def test_as_many_sessions_fit_as_the_cache_is_a_multiple_of_theirs_in_spite_of_rounding(s_c: float) -> None:
    for n in range(1, 60):
        state = SystemState([n * s_c])
        for key in range(n):
            assert waiting_s(state, 0, s_c, 0.0) == 0.0
            state.open(key, [Hop(0, 0, 1)], s_c, 5.0)
        assert waiting_s(state, 0, s_c, 0.0) == 5.0


def test_a_short_wait_on_the_fast_chain_is_better_than_the_slow_chain_and_a_long_one_is_not() -> None:
    problem = make_problem([1.0, 1.0], prefill_slope_s=0.0, decode_s=[0.25, 1.0], n_output_tokens=2)
    placement = placed(problem, [(0, 4), (0, 4)], [6.0, 6.0])
    router = WsRr().bind(problem, placement)
    two = RequestSpec(0, 1, 2)
    chosen = []
    for ends_at_s in (2.5, 3.5):
        state = SystemState(placement.cache_bytes)
        state.open("other", [Hop(0, 0, 4)], 1.5, ends_at_s)
        route = router.route(two, state, 0.0)
        assert route is not None
        chosen.append((route.hops[0].server, route.wait_s, route.cost_s))
    assert chosen == [(0, 2.5, pytest.approx(3.6)), (1, 0.0, pytest.approx(4.1))]


def test_a_chain_leaves_a_server_at_the_end_of_its_range_and_waits_for_the_slowest_of_its_hops() -> None:
    problem = make_problem([1.0, 1.0])
    placement = placed(problem, [(0, 3), (1, 4)], [3.0, 3.0])
    state = SystemState(placement.cache_bytes)
    state.open("a", [Hop(0, 0, 3)], 1.0, 2.0)
    state.open("b", [Hop(1, 1, 4)], 1.0, 5.0)
    route = WsRr().bind(problem, placement).route(ONE, state, 0.0)
    assert route is not None
    assert route.hops == (Hop(0, 0, 3), Hop(1, 3, 4))
    assert route.wait_s == 5.0
    assert route.cost_s == 7.0  # waits add up in the cost


def test_costs_and_cache_follow_each_requests_own_lengths_and_client() -> None:
    # Client 0 is near server 0, client 1 near server 1; a request of 6 tokens fits on server 1 only.
    problem = make_problem([1.0, 1.0], rtt_s=[[0.1, 0.3], [0.3, 0.1]])
    placement = placed(problem, [(0, 4), (0, 4)], [4.0, 12.0])
    router, state = WsRr().bind(problem, placement), SystemState(placement.cache_bytes)
    asked = [RequestSpec(0, 1, 3), RequestSpec(1, 1, 1), RequestSpec(0, 1, 1), RequestSpec(0, 1, 5)]
    routes = [router.route(request, state, 0.0) for request in asked]
    assert [route and route.hops[0].server for route in routes] == [1, 0, 0, 1]
    assert router.route(RequestSpec(0, 1, 6), state, 0.0) is None
    assert routes[0] is not None
    assert routes[0].cost_s == pytest.approx(2 * (0.3 + 0.04))


def test_only_positions_that_a_chain_can_stand_at_are_nodes() -> None:
    graph = PositionGraph([BlockRange(0, 3), BlockRange(2, 5), BlockRange(1, 2), BlockRange(4, 6)], 6)
    assert graph.positions == [0, 3, 5, 6]
    assert graph.into == (
        (),
        ((0, Hop(0, 0, 3)),),
        ((1, Hop(1, 3, 5)),),
        ((2, Hop(3, 5, 6)),),
    )


def test_without_a_server_for_some_block_there_is_no_route() -> None:
    problem = make_problem([1.0, 1.0])
    for ranges in ([(0, 2), (3, 4)], [(0, 2), (0, 2)], [(1, 4), (2, 4)], [(0, 0), (0, 0)]):
        placement = placed(problem, ranges, [9.0, 9.0])
        state = SystemState(placement.cache_bytes)
        assert WsRr().bind(problem, placement).route(ONE, state, 0.0) is None


def test_the_last_session_that_fits_is_admitted_at_once_in_spite_of_rounding() -> None:
    problem = make_problem([1.0], n_blocks=1, cache_bytes_per_token=0.05)
    assert 0.3 - 0.1 - 0.1 < 0.1
    placement = placed(problem, [(0, 1)], [0.3])
    router, state = WsRr().bind(problem, placement), SystemState(placement.cache_bytes)
    waits_s = []
    for key in range(4):
        route = router.route(ONE, state, 0.0)
        assert route is not None
        waits_s.append(route.wait_s)
        state.open(key, route.hops, 0.1, 5.0)
    assert waits_s == [0.0, 0.0, 0.0, 5.0]


def test_a_session_as_large_as_the_whole_cache_is_admitted_in_spite_of_rounding() -> None:
    problem = make_problem([1.0], n_blocks=3, cache_bytes_per_token=0.05)
    assert 3 * 0.1 > 0.3
    placement = placed(problem, [(0, 3)], [0.3])
    route = WsRr().bind(problem, placement).route(ONE, SystemState(placement.cache_bytes), 0.0)
    assert route is not None
    assert route.wait_s == 0.0
