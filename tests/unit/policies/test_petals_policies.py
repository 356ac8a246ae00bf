from __future__ import annotations

import pytest

from policies import Hop, InfeasiblePlacement, ModelSpec, RequestSpec, SystemState
from policies.petals import PetalsPlacement
from policies.petals_routing import PetalsRouting
from tests.support.problems import make_problem, placed

ONE = RequestSpec(0, 1, 1)
"""One byte of cache per block in the problems here."""


def test_servers_join_in_the_given_order_and_take_the_weakest_window() -> None:
    # Block and reserved cache are 12 bytes: two blocks each.
    problem = make_problem([24.0, 24.0, 24.0], join_order=[2, 0, 1])
    placement = PetalsPlacement().place(problem)
    assert placement.ranges == ((2, 4), (0, 2), (0, 2))
    assert placement.cache_bytes == (4.0, 4.0, 4.0)


def test_the_number_of_blocks_leaves_room_for_autograd_and_stops_at_the_model_and_the_cap() -> None:
    gib = 2**30
    problem = make_problem([2 * gib + 36.0, 2 * gib + 35.0, 1e12, 1e12], block_caps=[None, None, None, 2])
    model = ModelSpec("m", 4, 14336, 10.0, 0.5, petals_cache_tokens=4)
    problem = type(problem)(**{**problem.__dict__, "model": model})
    assert [r.n_blocks for r in PetalsPlacement().place(problem).ranges] == [3, 2, 4, 2]


def test_blocks_that_nobody_takes_are_named() -> None:
    with pytest.raises(InfeasiblePlacement) as caught:
        PetalsPlacement().place(make_problem([24.0, 12.0], hardware=["big", "small"], n_blocks=5))
    assert str(caught.value) == (
        "PETALS' placement leaves 2 of 5 blocks unplaced: blocks 3-4 are on no server, because "
        "24 bytes of memory are missing; 1 more big server or 2 more small servers would do"
    )


def test_a_route_is_charged_half_round_trips_overhead_and_compute() -> None:
    problem = make_problem([1.0, 1.0], rtt_s=[[0.2, 0.4]], server_rtt_s=[[0, 0.06], [0.1, 0]])
    placement = placed(problem, [(0, 3), (1, 4)], [9.0, 9.0])
    route = PetalsRouting().bind(problem, placement).route(ONE, SystemState(placement.cache_bytes), 0.0)
    assert route is not None
    assert route.hops == (Hop(0, 0, 3), Hop(1, 3, 4))
    # client to s0, three blocks; s0 to s1, one block; s1 to client
    assert route.cost_s == pytest.approx((0.1 + 0.018 + 0.03) + (0.03 + 0.018 + 0.01) + 0.2)


def test_a_server_exactly_full_costs_ten_seconds_more_but_an_oversubscribed_one_nothing() -> None:
    problem = make_problem([1.0, 1.0], decode_s=[0.01, 0.02])
    placement = placed(problem, [(0, 4), (0, 4)], [8.0, 8.0])
    router, state = PetalsRouting().bind(problem, placement), SystemState(placement.cache_bytes)
    chosen = []
    for key in range(4):
        route = router.route(ONE, state, 0.0)
        assert route is not None
        chosen.append((route.hops[0].server, route.wait_s))
        state.open(key, [Hop(0, 0, 4)], 1.0, 7.0 + key)
    # Room for two sessions: the third finds server 0 full; the fourth finds three there.
    assert chosen == [(0, 0.0), (0, 0.0), (1, 0.0), (0, 8.0)]


def test_of_equal_chains_the_one_through_the_first_listed_servers_is_taken() -> None:
    problem = make_problem([1.0] * 4)
    placement = placed(problem, [(2, 4), (0, 2), (0, 2), (2, 4)], [9.0] * 4)
    route = PetalsRouting().bind(problem, placement).route(ONE, SystemState(placement.cache_bytes), 0.0)
    assert route is not None
    assert [h.server for h in route.hops] == [1, 0]


def test_of_equal_chains_the_nearer_predecessor_wins_over_the_first_listed() -> None:
    # To reach server 2 with one block left: through 0 (three blocks) or 1 (farther away, fewer blocks).
    problem = make_problem(
        [1.0] * 3,
        rtt_s=[[1.0, 0.5, 1.0]],
        decode_s=[0.0, 0.0, 0.125],
        server_rtt_s=[[0, 0, 0.25], [4.0, 0, 0.5], [0, 0, 0]],
    )
    placement = placed(problem, [(0, 3), (0, 2), (1, 4)], [9.0] * 3)
    router = PetalsRouting(hop_overhead_s=0.0).bind(problem, placement)
    route = router.route(ONE, SystemState(placement.cache_bytes), 0.0)
    assert route is not None
    # Both: (0.5 + 0.125 + 0.125) + 0.5 through 0, (0.25 + 0.25 + 0.25) + 0.5 through 1.
    assert route.cost_s == 1.25
    assert [h.server for h in route.hops] == [1, 2]


def test_there_is_no_route_where_blocks_are_missing_or_the_cache_can_never_suffice() -> None:
    problem = make_problem([1.0, 1.0])
    for ranges, cache in (([(0, 2), (3, 4)], 9.0), ([(0, 2), (2, 4)], 1.9)):
        placement = placed(problem, ranges, [cache, cache])
        state = SystemState(placement.cache_bytes)
        assert PetalsRouting().bind(problem, placement).route(ONE, state, 0.0) is None
