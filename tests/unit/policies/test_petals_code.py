"""PETALS' routing as in its code."""

from __future__ import annotations

import pytest

from policies import Hop, Placement, PolicyError, Problem, RequestSpec, Route, SystemState
from policies.petals_code import PetalsCodeRouting
from policies.registry import resolve_routing
from tests.support.problems import make_problem, placed

ONE = RequestSpec(0, 1, 1)
"""One byte of cache per block in the problems here."""


def routed(
    problem: Problem, placement: Placement, policy: PetalsCodeRouting, request: RequestSpec = ONE
) -> Route:
    route = policy.bind(problem, placement).route(request, SystemState(placement.cache_bytes), 0.0)
    assert route is not None
    return route


def test_petals_code_routing_goes_by_its_name() -> None:
    assert isinstance(resolve_routing("petals-code"), PetalsCodeRouting)


def test_a_chain_costs_pings_overhead_and_compute() -> None:
    problem = make_problem([1.0, 1.0], rtt_s=[[0.2, 0.4]], server_rtt_s=[[0, 0.06], [0.1, 0]])
    placement = placed(problem, [(0, 3), (1, 4)], [9.0, 9.0])
    route = routed(problem, placement, PetalsCodeRouting())
    assert route.hops == (Hop(0, 0, 3), Hop(1, 3, 4))
    # client to s0, three blocks; s0 to s1, one block; s1 to client
    assert route.cost_s == pytest.approx((0.1 + 0.018 + 0.03) + (0.03 + 0.018 + 0.01) + 0.2)


def test_one_way_delays_count_for_five_seconds_at_most() -> None:
    problem = make_problem([1.0], rtt_s=[[60.0]])
    route = routed(problem, placed(problem, [(0, 4)], [9.0]), PetalsCodeRouting())
    assert route.cost_s == pytest.approx(5.0 + 0.018 + 0.04 + 5.0)


def test_cache_is_short_when_the_whole_range_does_not_fit_though_the_hop_would() -> None:
    # Server 1 would process only block 3, but has room for two of its three blocks: ten seconds more.
    problem = make_problem([1.0] * 3, decode_s=[0.01, 0.01, 0.5])
    placement = placed(problem, [(0, 3), (1, 4), (3, 4)], [9.0, 2.0, 9.0])
    route = routed(problem, placement, PetalsCodeRouting())
    assert route.hops == (Hop(0, 0, 3), Hop(2, 3, 4))
    assert route.wait_s == 0.0
    cheap = routed(problem, placement, PetalsCodeRouting(shortage_penalty_s=0.4))
    assert cheap.hops == (Hop(0, 0, 3), Hop(1, 3, 4))


def test_an_oversubscribed_server_still_costs_the_penalty() -> None:
    problem = make_problem([1.0, 1.0], decode_s=[0.01, 0.02])
    placement = placed(problem, [(0, 4), (0, 4)], [8.0, 8.0])
    router, state = PetalsCodeRouting().bind(problem, placement), SystemState(placement.cache_bytes)
    chosen = []
    for key in range(4):
        route = router.route(ONE, state, 0.0)
        assert route is not None
        chosen.append((route.hops[0].server, route.wait_s))
        state.open(key, [Hop(0, 0, 4)], 1.0, 7.0 + key)
    assert chosen == [(0, 0.0), (0, 0.0), (1, 0.0), (1, 0.0)]


def test_a_chain_through_a_full_server_says_how_long_it_waits() -> None:
    problem = make_problem([1.0])
    placement = placed(problem, [(0, 4)], [4.0])
    state = SystemState(placement.cache_bytes)
    state.open("a", [Hop(0, 0, 4)], 1.0, 7.5)
    route = PetalsCodeRouting().bind(problem, placement).route(ONE, state, 2.0)
    assert route is not None
    assert route.wait_s == 5.5


def test_of_equal_chains_the_one_through_the_first_listed_servers_is_taken() -> None:
    problem = make_problem([1.0] * 4)
    placement = placed(problem, [(2, 4), (0, 2), (0, 2), (2, 4)], [9.0] * 4)
    assert [h.server for h in routed(problem, placement, PetalsCodeRouting()).hops] == [1, 0]


def test_a_server_that_was_not_pinged_counts_with_the_unknown_delay() -> None:
    # Whole-model servers 0 and 1; a client that pings nobody sees 0.15 s to both and takes the faster.
    problem = make_problem([1.0, 1.0], rtt_s=[[0.01, 2.0]], decode_s=[0.02, 0.01])
    placement = placed(problem, [(0, 4), (0, 4)], [9.0, 9.0])
    blind = routed(problem, placement, PetalsCodeRouting(client_pings=0))
    assert blind.hops[0].server == 1
    assert blind.cost_s == pytest.approx(0.15 + 0.018 + 0.04 + 0.15)
    assert routed(problem, placement, PetalsCodeRouting()).hops[0].server == 0


def test_a_server_with_only_the_first_block_is_never_pinged() -> None:
    problem = make_problem([1.0, 1.0], rtt_s=[[0.002, 0.002]])
    placement = placed(problem, [(0, 1), (1, 4)], [9.0, 9.0])
    route = routed(problem, placement, PetalsCodeRouting(client_pings=3))
    # 0.15 s to server 0, which nobody pings; 0.01 s from there to server 1; 0.001 s back.
    assert route.cost_s == pytest.approx((0.15 + 0.018 + 0.01) + (0.01 + 0.018 + 0.03) + 0.001)


def test_pings_are_drawn_once_per_client_from_the_seed() -> None:
    rtt = [[0.01 * (j + 1) for j in range(12)]] * 2
    problem = make_problem([1.0] * 12, rtt_s=rtt)
    placement = placed(problem, [(0, 4)] * 12, [9.0] * 12)
    chosen = {
        (seed, client): routed(
            problem, placement, PetalsCodeRouting(client_pings=1, seed=seed), RequestSpec(client, 1, 1)
        )
        for seed in range(6)
        for client in range(2)
    }
    again = routed(problem, placement, PetalsCodeRouting(client_pings=1, seed=3), RequestSpec(1, 1, 1))
    assert again == chosen[3, 1]
    assert len({route.hops for route in chosen.values()}) > 1


def test_a_negative_number_of_pings_is_refused() -> None:
    problem = make_problem([1.0])
    with pytest.raises(PolicyError, match="petals-code cannot ping -1 servers; set client_pings >= 0"):
        PetalsCodeRouting(client_pings=-1).bind(problem, placed(problem, [(0, 4)], [9.0]))


def test_there_is_no_route_where_blocks_are_missing_or_the_cache_can_never_suffice() -> None:
    problem = make_problem([1.0, 1.0])
    for ranges, cache in (([(0, 2), (3, 4)], 9.0), ([(0, 2), (2, 4)], 1.9), ([(0, 0), (0, 0)], 9.0)):
        placement = placed(problem, ranges, [cache, cache])
        state = SystemState(placement.cache_bytes)
        assert PetalsCodeRouting().bind(problem, placement).route(ONE, state, 0.0) is None
