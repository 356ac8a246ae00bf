"""Placements of other systems and round robin, on instances worked by hand; and what holds for all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import BlockRange, Hop, InfeasiblePlacement, Placement, Problem, RequestSpec, SystemState
from policies.checks import check_placement, check_route
from policies.pipelines import (
    Exo,
    RoundRobin,
    SeparatePipelines,
    Swarm,
    WholeModel,
    disjoint_pipelines,
    shares,
)
from tests.support.problems import make_problem, placed, problems

POLICIES = (Exo(), SeparatePipelines(), Swarm(), WholeModel())


def ranges(placement: Placement) -> list[tuple[int, int]]:
    return [tuple(held) for held in placement.ranges]


def test_shares_are_by_the_largest_remainder_and_within_bounds() -> None:
    assert shares(10, [1, 1, 1], [9, 9, 9]) == [4, 3, 3]
    assert shares(10, [6, 3, 1], [9, 9, 9]) == [6, 3, 1]
    assert shares(7, [50, 30, 20], [9, 9, 9]) == [4, 2, 1]  # 3.5, 2.1, 1.4
    assert shares(10, [6, 3, 1], [4, 9, 9]) == [
        4,
        4,
        2,
    ]  # what the first cannot take goes to 3.0 and 1.0 in turn
    assert shares(3, [98, 1, 1], [9, 9, 9]) == [1, 1, 1]


def test_exo_makes_one_pipeline_of_the_fewest_servers_by_their_memory() -> None:
    # A block with one session's cache takes 11 bytes: 2, 6, 1 and 3 blocks fit, ten are needed: the three largest.
    problem = make_problem([22, 66, 11, 33], n_blocks=10)
    placement = Exo().place(problem, 1)
    # 22, 66 and 33 of 121: 1.82, 5.45 and 2.73 blocks.
    assert ranges(placement) == [(0, 2), (2, 7), (0, 0), (7, 10)]
    assert placement.cache_bytes == (2.0, 16.0, 0.0, 3.0)


def test_exo_takes_one_server_where_it_is_enough() -> None:
    assert ranges(Exo().place(make_problem([44, 500]), 1)) == [(0, 0), (0, 4)]


def test_left_open_the_design_is_for_as_many_sessions_as_can_be() -> None:
    # Four blocks on one server of 100 bytes: 10 + c a block are at most 25.
    placement = WholeModel().place(make_problem([100.0]))
    assert placement.design_concurrency == 15
    assert WholeModel().place(make_problem([100.0]), 15).ranges == placement.ranges
    with pytest.raises(InfeasiblePlacement):
        WholeModel().place(make_problem([100.0]), 16)


def test_whole_models_stand_where_they_fit() -> None:
    assert ranges(WholeModel().place(make_problem([44, 43, 60]), 1)) == [(0, 4), (0, 0), (0, 4)]


def test_separate_pipelines_are_of_one_kind_each() -> None:
    # Kind a holds two blocks a server: two stages, of five servers two pipelines. Kind b holds all four.
    problem = make_problem([22, 50, 22, 22, 22, 22], hardware=["a", "b", "a", "a", "a", "a"])
    placement = SeparatePipelines().place(problem, 1)
    assert ranges(placement) == [(0, 2), (0, 4), (2, 4), (0, 2), (2, 4), (0, 0)]


def test_a_kind_leaves_servers_out_that_would_make_its_pipelines_fewer() -> None:
    # With the server of one block a pipeline has four stages, and three servers are one too few.
    problem = make_problem([22, 11, 22])
    assert ranges(SeparatePipelines().place(problem, 1)) == [(0, 2), (0, 0), (2, 4)]


def test_swarm_joins_the_fastest_first_to_the_weakest_stage() -> None:
    # Two blocks fit on each: two stages. s1 is the fastest: stage 0. s3 to stage 1, s0 to stage 1 (10 < 20), s2.
    problem = make_problem([22] * 4, decode_s=[0.2, 0.05, 0.5, 0.1])
    # Stage 0 has 20/s; stage 1 10, then 15, then 17.
    assert ranges(Swarm().place(problem, 1)) == [(2, 4), (0, 2), (2, 4), (2, 4)]


def test_swarm_has_as_many_stages_as_its_weakest_server_asks_for_if_there_are_servers_for_them() -> None:
    assert ranges(Swarm().place(make_problem([22, 11, 22, 22]), 1)) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert ranges(Swarm().place(make_problem([22, 11, 22]), 1)) == [(0, 2), (0, 0), (2, 4)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_what_does_not_fit_is_said(policy: Exo) -> None:
    with pytest.raises(InfeasiblePlacement, match=f"{policy.name} with room for 1 sessions has no way"):
        policy.place(make_problem([5.0, 5.0]))


@settings(max_examples=150)
@given(st.sampled_from(POLICIES), problems(), st.sampled_from([None, 1, 2]))
def test_what_is_placed_is_whole_and_serves_as_many_as_it_was_made_for(
    policy: Exo, problem: Problem, design_concurrency: int | None
) -> None:
    try:
        placement = policy.place(problem, design_concurrency)
    except InfeasiblePlacement:
        return
    check_placement(problem, placement)
    assert placement.design_concurrency is not None
    needs = placement.design_concurrency * problem.design_cache_bytes
    for held, room in zip(placement.ranges, placement.cache_bytes, strict=True):
        assert room >= held.n_blocks * needs * (1 - 1e-9)
    router = RoundRobin().bind(problem, placement)
    route = router.route(RequestSpec(0, 1, 1), SystemState(placement.cache_bytes), 0.0)
    assert route is not None
    check_route(problem, placement, route, "rr")


def test_round_robin_takes_pipelines_in_turn_whether_they_have_room_or_not() -> None:
    problem = make_problem([40] * 5, n_blocks=4, input_rtt_s=0.25)
    placement = placed(problem, [(0, 2), (2, 4), (0, 4), (0, 2), (0, 0)], [4.0, 4.0, 8.0, 4.0, 0.0])
    router = RoundRobin().bind(problem, placement)
    assert [[hop.server for hop in hops] for hops in router.pipelines] == [[0, 1], [2]]
    state, request = SystemState(placement.cache_bytes), RequestSpec(0, 1, 1)
    servers = []
    for _ in range(4):
        route = router.route(request, state, 0.0)
        assert route is not None
        servers.append([hop.server for hop in route.hops])
    assert servers == [[0, 1], [2], [0, 1], [2]]
    assert (route.cost_s, route.wait_s) == (0.25, 0.0)


def test_round_robin_leaves_out_pipelines_that_could_never_hold_the_request() -> None:
    problem = make_problem([40] * 2)
    placement = placed(problem, [(0, 4), (0, 4)], [2.0, 20.0])
    router = RoundRobin().bind(problem, placement)
    state = SystemState(placement.cache_bytes)
    for _ in range(3):
        route = router.route(RequestSpec(0, 1, 1), state, 0.0)
        assert route is not None and route.hops[0].server == 1
    assert router.route(RequestSpec(0, 20, 1), state, 0.0) is None


def test_pipelines_are_found_around_dead_ends() -> None:
    problem = make_problem([40] * 4)
    placement = placed(problem, [(0, 1), (0, 2), (1, 3), (2, 4)], [9.0] * 4)
    router = RoundRobin().bind(problem, placement)
    assert [[hop.server for hop in hops] for hops in router.pipelines] == [[1, 3]]


def test_a_pipeline_takes_the_rest_of_a_range_that_begins_earlier_if_no_range_begins_there() -> None:
    overlapping = [BlockRange(0, 4), BlockRange(2, 6), BlockRange(0, 3), BlockRange(4, 6), BlockRange(3, 6)]
    whole = [(Hop(0, 0, 4), Hop(3, 4, 6)), (Hop(2, 0, 3), Hop(4, 3, 6))]
    assert disjoint_pipelines(overlapping, 6) == whole
    assert disjoint_pipelines(overlapping[:2], 6) == [(Hop(0, 0, 4), Hop(1, 4, 6))]
