"""Offline CG-BPRR, Theorem 1's bound and the lower bounds, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies import BlockRange, Hop, InfeasiblePlacement, PolicyError, RequestSpec
from policies.link_costs import link_costs, with_costs
from policies.offline import cg_bprr, knapsack_lower_bound_s, lower_bound_s
from tests.support.problems import make_problem

ONE = RequestSpec(0, 1, 1)


def test_cg_bprr_routes_every_request_on_its_cheapest_chain() -> None:
    # For two sessions each server takes 3 of 4 blocks (30 + 6 <= 42): the fast one [0, 3), the other [1, 4).
    problem = make_problem([42.0, 42.0], decode_s=[0.01, 0.02], rtt_s=[[0.1, 0.2], [0.1, 0.4]])
    answer = cg_bprr(problem, [ONE, replace(ONE, client=1)], decode_only=True)
    assert answer.ranges == (BlockRange(0, 3), BlockRange(1, 4))
    assert answer.chains == ((Hop(0, 0, 3), Hop(1, 3, 4)),) * 2
    assert answer.per_request_s == pytest.approx((0.1 + 0.03 + 0.2 + 0.02, 0.1 + 0.03 + 0.4 + 0.02))
    assert answer.objective_s == pytest.approx(0.35 + 0.55)


def test_theorem_1s_bound_takes_the_farthest_client_and_no_block_twice() -> None:
    problem = make_problem([42.0, 42.0], decode_s=[0.01, 0.02], rtt_s=[[0.1, 0.2], [0.1, 0.4]])
    answer = cg_bprr(problem, [ONE, replace(ONE, client=1)], decode_only=True)
    # Hops 0.1 and 0.4, 3 blocks on each, less the 2 blocks of the last one that are held already.
    per_request_s = 0.1 + 3 * 0.01 + 0.4 + 3 * 0.02 - 2 * 0.02
    assert answer.theorem1_s == pytest.approx(2 * per_request_s)


def test_cg_bprr_ignores_block_caps_and_names_blocks_that_fit_nowhere() -> None:
    capped = make_problem([100.0], block_caps=[2])
    assert cg_bprr(capped, [ONE]).ranges == (BlockRange(0, 4),)
    with pytest.raises(InfeasiblePlacement, match=r"\|R\| = 2 leaves 1 of 4 blocks unplaced"):
        cg_bprr(make_problem([44.0]), [ONE] * 2)


def test_requests_that_are_longer_than_caches_are_designed_for_are_refused() -> None:
    problem = make_problem([100.0], n_input_tokens=2, n_output_tokens=3)
    cg_bprr(problem, [RequestSpec(0, 4, 1)])
    with pytest.raises(PolicyError, match="request 1 has 6 tokens, more than the 5"):
        cg_bprr(problem, [RequestSpec(0, 4, 1), RequestSpec(0, 4, 2)])


def test_no_requests_are_refused() -> None:
    with pytest.raises(PolicyError, match="at least 1"):
        cg_bprr(make_problem([100.0]), [])


def test_a_forwarded_hop_costs_the_way_from_the_server_before_and_the_last_one_the_way_back() -> None:
    problem = make_problem(
        [33.0, 33.0], rtt_s=[[0.2, 0.6]], server_rtt_s=[[0.0, 0.1], [0.3, 0.0]], n_output_tokens=2
    )
    costs = link_costs(replace(problem, forwarding=True), RequestSpec(0, 1, 2), decode_only=True)
    # Half a round trip there, from server 0 to server 1, and from there back; the blocks are 0.01 s each.
    assert costs.of([Hop(0, 0, 2), Hop(1, 2, 4)]) == pytest.approx(0.1 + 0.05 + 0.3 + 4 * 0.01)
    assert costs.of([Hop(1, 0, 2), Hop(0, 2, 4)]) == pytest.approx(0.3 + 0.15 + 0.1 + 4 * 0.01)
    least, most = costs.of_any_way(min), costs.of_any_way(max)
    assert (least.hop_s, least.returned_s) == (pytest.approx((0.1, 0.05)), pytest.approx(0.1))
    assert (most.hop_s, most.returned_s) == (pytest.approx((0.15, 0.3)), pytest.approx(0.3))
    without = link_costs(problem, ONE)
    assert without.of_any_way(min) is without


def test_the_fractional_bound_charges_part_of_a_hop_and_the_knapsack_all_of_it() -> None:
    # 33 bytes hold 3 blocks with one session, 22 bytes 2: a request takes 3 + 1 blocks.
    problem = make_problem([33.0, 22.0], decode_s=[0.01, 0.02], rtt_s=[[0.3, 0.2]])
    fractional_s = 3 * (0.01 + 0.3 / 3) + 1 * (0.02 + 0.2 / 2)
    assert lower_bound_s(problem, [ONE], decode_only=True) == pytest.approx(fractional_s)
    knapsack_s = min(0.3 + 0.03 + 0.2 + 0.02, 0.3 + 0.02 + 0.2 + 0.04)
    assert knapsack_lower_bound_s(problem, [ONE], decode_only=True) == pytest.approx(knapsack_s)
    assert lower_bound_s(problem, [ONE] * 3, decode_only=True) == pytest.approx(3 * fractional_s)


def test_without_room_for_all_blocks_the_lower_bounds_are_infinite() -> None:
    problem = make_problem([33.0])
    assert lower_bound_s(problem, [ONE]) == float("inf")
    assert knapsack_lower_bound_s(problem, [ONE]) == float("inf")


def test_link_costs_are_means_over_the_tokens_of_the_request_itself() -> None:
    problem = make_problem(
        [100.0], decode_s=[0.01], rtt_s=[[0.1], [0.2]], input_rtt_s=0.5, prefill_slope_s=0.02
    )
    request = RequestSpec(1, 3, 4)
    costs = link_costs(problem, request)
    assert costs.hop_s == pytest.approx(((0.5 + 3 * 0.2) / 4,))
    assert costs.block_s == pytest.approx(((3 * 0.02 + 3 * 0.01) / 4,))
    assert costs.of([Hop(0, 0, 3), Hop(0, 3, 4)]) == pytest.approx(2 * costs.hop_s[0] + 4 * costs.block_s[0])
    assert link_costs(problem, request, decode_only=True) == ((0.2,), (0.01,), None, None)


def test_a_problem_with_given_costs_has_them_as_decode_steps_of_one_client() -> None:
    problem = make_problem([100.0, 50.0], rtt_s=[[0.1, 0.2], [0.3, 0.4]])
    request = RequestSpec(1, 3, 4)
    costs = link_costs(problem, request)
    changed = with_costs(problem, request, costs)
    assert changed.clients == ("c1",)
    assert (changed.n_input_tokens, changed.n_output_tokens) == (3, 4)
    assert link_costs(changed, RequestSpec(0, 3, 4), decode_only=True) == costs
