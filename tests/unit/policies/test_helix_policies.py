"""The largest flow of a placement, Helix' placement and its routing, on instances worked by hand and against every placement."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from policies import BlockRange, Hop, InfeasiblePlacement, Placement, Problem, RequestSpec, SystemState
from policies.checks import check_placement
from policies.flow import HUB, Rates, max_flow
from policies.greedy import whole
from policies.helix import Helix
from policies.iwrr import Iwrr, IwrrRouter
from tests.support.effort import n_drawn
from tests.support.problems import forwarded, make_problem, placed, placements, problems


def held(*ranges: tuple[int, int]) -> list[BlockRange]:
    return [BlockRange(*r) for r in ranges]


def test_a_server_passes_the_tokens_of_its_time_per_block_and_all_of_its_blocks_count() -> None:
    # Prefill 2 x 0.002 s and two decodes of 0.01 s: four tokens in 0.024 s per block.
    problem = make_problem(
        [100.0], decode_s=[0.01], prefill_slope_s=0.002, n_input_tokens=2, n_output_tokens=3
    )
    assert Rates(problem).server_tps(0, 1) == pytest.approx(4 / 0.024)
    assert Rates(problem).server_tps(0, 4) == pytest.approx(1 / 0.024)


def test_the_flow_is_the_least_cut_of_servers() -> None:
    # Decode alone of 10, 20, 40 ms; two tokens a request, one of them decoded: 200, 100 and 50 tokens/s per block.
    problem = make_problem([100.0] * 3, decode_s=[0.01, 0.02, 0.04], n_output_tokens=2)
    flow = max_flow(Rates(problem), held((0, 2), (2, 4), (2, 4)), 4)
    assert flow.total_tps == pytest.approx(75.0)  # 100 into two servers of 50 and 25
    edges = {(HUB, 0): 75.0, (0, 1): 50.0, (0, 2): 25.0, (1, HUB): 50.0, (2, HUB): 25.0}
    assert flow.edges_tps == pytest.approx(edges)


def test_the_flow_enters_a_range_in_the_middle() -> None:
    problem = make_problem([100.0] * 2, decode_s=[0.01, 0.01], n_output_tokens=2)
    flow = max_flow(Rates(problem), held((0, 2), (1, 4)), 4)
    assert flow.total_tps == pytest.approx(200 / 3)
    assert max_flow(Rates(problem), held((0, 2), (3, 4)), 4).total_tps == 0.0


def test_links_bound_the_flow_when_servers_forward() -> None:
    problem = forwarded(make_problem([100.0] * 2, decode_s=[0.01, 0.01], n_output_tokens=2), over_links=True)
    # From s0 to s1 a hidden state takes 3/4 of 2/2048 s after the first.
    slow = replace(problem, servers=tuple(replace(s, decode_s=1e-6) for s in problem.servers))
    assert problem.transmissions is not None
    across_s, up_s = problem.transmissions.across.slope_s[0][1], problem.transmissions.up.slope_s[0][0]
    assert (across_s, up_s) == (0.75 * 2 / 2048, 0.0)
    assert max_flow(Rates(slow), held((0, 2), (2, 4)), 4).total_tps == pytest.approx(
        min(1 / across_s, 1 / problem.transmissions.down.slope_s[0][1])
    )


def test_through_the_client_its_links_bound_what_servers_take() -> None:
    problem = make_problem([100.0], rtt_s=[[0.1], [0.1]], decode_s=[0.01], n_output_tokens=2)
    slow = replace(problem, input_rtt_slope_s=((0.1,), (0.2,)))
    # Two clients that send alike: the slower link brings 5 tokens a second, and is half of it.
    assert max_flow(Rates(slow), held((0, 4)), 4).total_tps == pytest.approx(10.0)


@settings(max_examples=n_drawn(40))
@given(st.data())
def test_a_flow_is_kept_at_servers_and_within_their_rates(data: st.DataObject) -> None:
    problem = data.draw(problems())
    if data.draw(st.booleans()):
        problem = forwarded(problem, over_links=data.draw(st.booleans()))
    ranges = data.draw(placements(problem)).ranges
    rates, n_blocks = Rates(problem), problem.model.n_blocks
    flow = max_flow(rates, ranges, n_blocks)
    assert (flow.total_tps > 0) == (not Placement("", ranges, ()).uncovered(n_blocks))
    close = pytest.approx(flow.total_tps, rel=1e-6, abs=1e-6)
    assert sum(tps for (tail, _), tps in flow.edges_tps.items() if tail == HUB) == close
    assert sum(tps for (_, head), tps in flow.edges_tps.items() if head == HUB) == close
    for j, at in enumerate(ranges):
        into = sum(tps for (_, head), tps in flow.edges_tps.items() if head == j)
        out = sum(tps for (tail, _), tps in flow.edges_tps.items() if tail == j)
        assert into == pytest.approx(out, abs=1e-6 * (1 + flow.total_tps))
        if at.n_blocks:
            assert into <= rates.server_tps(j, at.n_blocks) * (1 + 1e-6)
    for edge, tps in flow.edges_tps.items():
        assert tps <= rates.link_tps(*edge) * (1 + 1e-6)


def test_helix_passes_as_much_as_all_servers_together_can() -> None:
    # Half of 180 bytes holds all four blocks on each; 30 and 10 ms.
    problem = make_problem([180.0, 180.0], decode_s=[0.03, 0.01], n_output_tokens=2)
    placement = Helix().place(problem)
    # As one pipeline, three blocks on the fast one, they pass 200/3 tokens/s; each with all blocks 50 and 50/3: as much.
    assert placement.bounds["flow_tps"] == pytest.approx(200 / 3)
    assert placement.bounds["proven_optimal"] == 1.0
    check_placement(problem, placement)


def test_helix_leaves_half_of_the_memory_for_caches() -> None:
    placement = Helix().place(make_problem([45.0] * 2, n_blocks=4, n_output_tokens=2))
    assert sorted(placement.ranges) == [(0, 2), (2, 4)]
    # 25 bytes are left for two blocks: 1.5 bytes of cache each a session.
    assert placement.design_concurrency == 8


def test_helix_takes_more_than_half_where_half_is_not_enough() -> None:
    placement = Helix().place(make_problem([35.0, 15.0], n_blocks=4))
    assert placement.ranges == (BlockRange(0, 3), BlockRange(3, 4))


def test_helix_keeps_cache_for_the_sessions_it_is_designed_for() -> None:
    problem = make_problem([90.0, 90.0], n_blocks=4, n_output_tokens=1)  # s_c 1
    assert max(r.n_blocks for r in Helix().place(problem).ranges) == 4
    placement = Helix().place(problem, 20)  # 90 / 30
    assert max(r.n_blocks for r in placement.ranges) <= 3
    assert placement.design_concurrency == 20
    with pytest.raises(InfeasiblePlacement, match="helix with room for 80 sessions cannot place"):
        Helix().place(problem, 80)


def best_flow_tps(problem: Problem, most: list[int]) -> float:
    n_blocks = problem.model.n_blocks
    options = [
        [BlockRange(0, 0)]
        + [BlockRange(a, a + k) for k in range(1, count + 1) for a in range(n_blocks - k + 1)]
        for count in most
    ]
    rates = Rates(problem)
    return max(max_flow(rates, ranges, n_blocks).total_tps for ranges in itertools.product(*options))


@settings(max_examples=n_drawn(20))
@given(problems(3, 4, 100, block_caps=[None] * 3), st.booleans())
def test_no_placement_passes_more_where_helix_says_so(problem: Problem, forward: bool) -> None:
    if forward:
        problem = forwarded(problem, over_links=True)
    try:
        placement = Helix().place(problem)
    except InfeasiblePlacement:
        event("infeasible")
        return
    event(f"{problem.n_servers} servers")
    n_blocks, s_c = problem.model.n_blocks, problem.design_cache_bytes
    most = [min(whole(s.memory_bytes, 10.0 + s_c), n_blocks) for s in problem.servers]
    half = [min(whole(s.memory_bytes / 2, 10.0), m) for s, m in zip(problem.servers, most, strict=True)]
    best_tps = best_flow_tps(problem, half if sum(half) >= n_blocks else most)
    bounds = placement.bounds
    assert bounds["flow_tps"] == pytest.approx(best_tps, rel=1e-6)
    assert bounds["flow_tps"] <= bounds["flow_bound_tps"] * (1 + 1e-9)
    assert bounds["proven_optimal"] == 1.0


def test_helix_says_how_far_it_may_be_from_the_best_where_its_branches_were_too_few() -> None:
    problem = make_problem(
        [90.0] * 5, n_blocks=12, decode_s=[0.011, 0.017, 0.023, 0.029, 0.037], n_output_tokens=2
    )
    bounds = Helix(max_nodes=0).place(problem).bounds
    assert bounds["proven_optimal"] == 0.0
    assert bounds["gap_ratio"] == pytest.approx(1 - bounds["flow_tps"] / bounds["flow_bound_tps"])
    assert 0 < bounds["gap_ratio"] < 1


def servers(router: IwrrRouter, state: SystemState, request: RequestSpec, times: int) -> list[list[int]]:
    found = []
    for _ in range(times):
        route = router.route(request, state, 0.0)
        assert route is not None
        found.append([hop.server for hop in route.hops])
    return found


def test_iwrr_takes_turns_in_proportion_to_the_flow() -> None:
    # 100 tokens/s into servers of 50 and 25: twice to s1, once to s2. Loads after a length of 1: 0.02, 0.04.
    problem = make_problem([100.0] * 3, decode_s=[0.01, 0.02, 0.04], n_output_tokens=2)
    placement = placed(problem, [(0, 2), (2, 4), (2, 4)], [80.0, 80.0, 80.0])
    router, state = Iwrr().bind(problem, placement), SystemState(placement.cache_bytes)
    # s1 at 0.02, then both would be at 0.04: the first listed; then s2 at 0.04, and again.
    taken = servers(router, state, RequestSpec(0, 1, 2), 6)
    assert taken == [[0, 1], [0, 1], [0, 2], [0, 1], [0, 1], [0, 2]]


def test_iwrr_leaves_thin_edges_out() -> None:
    # s1 passes 24/25 of what s0 sends on.
    problem = make_problem([100.0] * 3, decode_s=[0.001, 0.01, 0.24], n_output_tokens=2)
    placement = placed(problem, [(0, 2), (2, 4), (2, 4)], [80.0, 80.0, 80.0])
    router, state = Iwrr().bind(problem, placement), SystemState(placement.cache_bytes)
    assert servers(router, state, RequestSpec(0, 1, 2), 40) == [[0, 1]] * 40


def test_iwrr_leaves_servers_out_that_would_be_too_full_unless_all_are() -> None:
    problem = make_problem([100.0] * 2, decode_s=[0.01, 0.01], n_input_tokens=4, n_output_tokens=10)
    placement = placed(problem, [(0, 4), (0, 4)], [40.0, 40.0])
    state = SystemState(placement.cache_bytes)
    request = RequestSpec(0, 4, 10)  # expected: 10 tokens, 20 bytes on four blocks; reserved: 28
    router = Iwrr().bind(problem, placement)
    assert servers(router, state, request, 4) == [[0], [1], [0], [1]]
    state.open("other", [Hop(0, 0, 4)], 5.75, 9.0)  # 23 bytes, 16.4 of them expected: 36.4 of 36 are allowed
    assert servers(router, state, request, 3) == [[1]] * 3
    state.open("another", [Hop(1, 0, 4)], 5.5, 9.0)  # 22 bytes, 15.7 expected: below
    assert servers(router, state, request, 1) == [[1]]
    state.open("third", [Hop(1, 0, 4)], 0.25, 9.0)
    route = router.route(request, state, 0.0)
    assert route is not None and route.hops[0].server == 0  # all are above: whose turn it is
    assert route.wait_s == 9.0


def test_iwrr_goes_where_no_flow_goes_for_a_request_that_fits_nowhere_else() -> None:
    problem = make_problem([100.0] * 2, decode_s=[0.001, 0.1], n_output_tokens=2)
    placement = placed(problem, [(0, 4), (0, 4)], [4.0, 80.0])
    router, state = Iwrr().bind(problem, placement), SystemState(placement.cache_bytes)
    assert servers(router, state, RequestSpec(0, 1, 1), 2) == [[0], [0]]
    assert servers(router, state, RequestSpec(0, 5, 5), 2) == [[1], [1]]
    assert router.route(RequestSpec(0, 50, 50), state, 0.0) is None
