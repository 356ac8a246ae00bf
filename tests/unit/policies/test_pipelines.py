"""Placements of other systems, and round robin: instances worked by hand, and what holds for all."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import BlockRange, Hop, InfeasiblePlacement, Placement, Problem, RequestSpec, SystemState
from policies.checks import check_placement, check_route
from policies.parallax import Parallax, ShortestByLayer, water_filled
from policies.pipelines import (
    Exo,
    RoundRobin,
    SeparatePipelines,
    Swarm,
    WholeModel,
    disjoint_pipelines,
    shares,
)
from tests.support.effort import n_drawn
from tests.support.problems import make_problem, placed, problems

POLICIES = (Exo(), SeparatePipelines(), Swarm(), WholeModel(), Parallax())


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
    with pytest.raises(
        InfeasiblePlacement, match=r"a server that holds all 4 blocks.*\|R\| = 16; the largest has"
    ):
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
def test_pipelines_that_do_not_fit_are_refused_with_the_reason(policy: Exo) -> None:
    whys = "(with room for 1 session cannot place|needs a server that holds all)"
    with pytest.raises(InfeasiblePlacement, match=f"{policy.name} {whys}"):
        policy.place(make_problem([5.0, 5.0]))


@settings(max_examples=n_drawn(60))
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


def test_layers_are_in_proportion_to_compute_until_a_server_is_full() -> None:
    assert water_filled(12, [3, 2, 1], [9, 9, 9]) == [6, 4, 2]
    assert water_filled(12, [3, 2, 1], [4, 9, 9]) == [4, 5, 3]  # 8 are left for 2 : 1, which is 5.33 and 2.67
    assert water_filled(12, [9, 2, 1], [6, 3, 3]) == [6, 3, 3]


def pipelines(placement: Placement) -> list[list[tuple[int, int]]]:
    """Return the (server, blocks) of each pipeline."""
    found = disjoint_pipelines(placement.ranges, max(held.last for held in placement.ranges))
    return [[(hop.server, hop.n_blocks) for hop in hops] for hops in found]


def test_parallax_interleaves_pipelines_where_one_after_the_other_makes_fewer() -> None:
    # Rooms for 4, 4, 2, 2, 1 and 1 of seven blocks: k = 1 has two servers at best (4 + 4): 1/2; k = 2 all six: 4/6.
    problem = make_problem([4 * 20, 4 * 20, 2 * 20, 2 * 20, 20, 20], n_blocks=7)
    placement = Parallax().place(problem, 9)  # a block with its caches takes 19 bytes, 0.65 of 80 holds 5
    assert ranges(placement) == [(0, 4), (0, 4), (4, 6), (4, 6), (6, 7), (6, 7)]
    assert pipelines(placement) == [[(0, 4), (2, 2), (4, 1)], [(1, 4), (3, 2), (5, 1)]]


def test_parallax_takes_fewer_servers_where_more_pipelines_are_not_worth_it() -> None:
    # k = 1: one server of four blocks, 1. k = 2: four more of one block each, 4/5.
    problem = make_problem([80, 20, 20, 20, 20])
    assert ranges(Parallax().place(problem, 9)) == [(0, 4), (0, 0), (0, 0), (0, 0), (0, 0)]
    # Two of two blocks make it 4/3.
    assert ranges(Parallax().place(make_problem([80, 40, 40]), 9)) == [(0, 4), (0, 2), (2, 4)]


def test_parallax_gives_layers_by_speed_within_a_pipeline() -> None:
    # 0.65 of 120 bytes holds seven of twelve blocks: both are needed. 1 : 3 would be 3 and 9.
    problem = make_problem([120, 120], n_blocks=12, decode_s=[0.03, 0.01])
    placement = Parallax().place(problem)
    assert ranges(placement) == [(0, 5), (5, 12)]
    assert placement.design_concurrency == 7  # 50 bytes of cache for seven blocks


def fewest_servers(most: list[int], n_blocks: int, k: int) -> float:
    """Return s*(k), by trying all ways to put servers into pipelines or none."""
    best = float("inf")
    for given_to in itertools.product(range(k + 1), repeat=len(most)):
        n_given = len(most) - given_to.count(k)
        if k <= n_given < best and all(
            sum(m for m, at in zip(most, given_to, strict=True) if at == i) >= n_blocks for i in range(k)
        ):
            best = n_given
    return best


@settings(max_examples=n_drawn(40))
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 7))
def test_parallax_has_the_best_score_of_all_pipelines(most: list[int], n_blocks: int) -> None:
    most = [min(count, n_blocks) for count in most]
    # A block takes 10 bytes and 9 sessions' caches 9: 19 of 20 a block; the rest is too little for another block.
    problem = make_problem([19.5 * count for count in most], n_blocks=n_blocks)
    scores = {k: k * k / fewest_servers(most, n_blocks, k) for k in range(1, len(most) + 1)}
    best = max(scores.values())
    try:
        placement = Parallax().place(problem, 9)
    except InfeasiblePlacement:
        assert best == 0
        return
    check_placement(problem, placement)
    found = pipelines(placement)
    assert sum(map(len, found)) == sum(held.n_blocks > 0 for held in placement.ranges)
    assert len(found) == min(k for k, score in scores.items() if score == best)
    assert len(found) ** 2 / sum(map(len, found)) == best


def test_dp_counts_a_server_once_however_many_blocks_it_has() -> None:
    # s0 and s1: 0.03 + 0.02 + 0.01; s2 alone: 0.05, though its four blocks take 0.2 s against 0.08 s.
    problem = make_problem([80.0] * 3, decode_s=[0.03, 0.01, 0.05])
    placement = placed(problem, [(0, 2), (2, 4), (0, 4)], [40.0] * 3)
    router, state = ShortestByLayer().bind(problem, placement), SystemState(placement.cache_bytes)
    request = RequestSpec(0, 1, 1)

    def servers() -> list[int]:
        route = router.route(request, state, 0.0)
        assert route is not None
        return [hop.server for hop in route.hops]

    assert servers() == [2]
    state.open("other", [Hop(2, 0, 4)], 10.0, 5.0)
    assert servers() == [0, 1]  # s2 has no room now
    state.open("another", [Hop(1, 2, 4)], 20.0, 7.0)
    route = router.route(request, state, 0.0)
    assert route is not None and (route.hops[0].server, route.wait_s) == (2, 5.0)  # nor has s1


def test_dp_prefers_the_emptier_of_equally_fast_servers() -> None:
    # A quarter of s0's and s1's room is used, which counts 0.0125 ms each; s2 takes 0.02 ms longer than s0.
    problem = make_problem([80.0] * 3, decode_s=[0.01, 0.01, 0.01002])
    placement = placed(problem, [(0, 4)] * 3, [40.0] * 3)
    router, state = ShortestByLayer().bind(problem, placement), SystemState(placement.cache_bytes)
    chosen = []
    for key in range(5):
        route = router.route(RequestSpec(0, 1, 1), state, 0.0)
        assert route is not None
        chosen.append(route.hops[0].server)
        state.open(key, route.hops, 2.5, 5.0)
    assert chosen == [0, 1, 0, 1, 2]


def test_dp_enters_a_range_in_the_middle_only_where_whole_ranges_make_no_chain() -> None:
    problem = make_problem([80.0] * 3, decode_s=[0.01, 0.01, 0.5])
    router = ShortestByLayer().bind(problem, placed(problem, [(0, 2), (1, 4), (2, 4)], [40.0] * 3))
    state = SystemState([40.0] * 3)
    route = router.route(RequestSpec(0, 1, 1), state, 0.0)
    assert route is not None and [hop.server for hop in route.hops] == [0, 2]
    router = ShortestByLayer().bind(problem, placed(problem, [(0, 2), (1, 4), (0, 0)], [40.0] * 3))
    route = router.route(RequestSpec(0, 1, 1), state, 0.0)
    assert route is not None and route.hops == (Hop(0, 0, 2), Hop(1, 2, 4))
