"""Chains with capacities on instances worked by hand, and Theorem 4's bound against queues with known answers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from policies import BlockRange, Hop, InfeasiblePlacement, Placement, Problem, RequestSpec, SystemState
from policies.checks import check_placement, check_route
from policies.composition import Chain, ChainComposition, Jffc, MeanRequests, compose, least_response_s
from tests.support.effort import n_drawn
from tests.support.problems import make_problem, placed, problems

A_HOP = (Hop(0, 0, 1),)
TWO_AND_TWO: dict[str, Any] = {"n_input_tokens": 2, "n_output_tokens": 2, "cache_bytes_per_token": 0.25}
"""A mean request takes one byte per block, and one further token."""


def chains(*capacities_and_times: tuple[int, float]) -> list[Chain]:
    return [Chain(A_HOP, capacity, time_s) for capacity, time_s in capacities_and_times]


def test_the_bound_is_the_mean_response_of_queues_with_known_answers() -> None:
    assert least_response_s(chains((1, 1.0)), 0.5) == pytest.approx(2.0)  # M/M/1: 1 / (mu - lambda)
    assert least_response_s(chains((2, 1.0)), 1.0) == pytest.approx(4 / 3)  # M/M/2: 1 / (mu (1 - rho^2))
    # Speeds 2 and 1 at rate 1: states 1, 1/2, 1/6, 1/18, ...; 1.125 of 1.75 requests in the mean.
    assert least_response_s(chains((1, 1.0), (1, 0.5)), 1.0) == pytest.approx(1.125 / 1.75)


def test_the_bound_of_many_slots_at_little_load_is_the_fastest_chains_time() -> None:
    assert least_response_s(chains((100_000, 7.0), (5, 3.0)), 1e-9) == pytest.approx(3.0)
    assert least_response_s(chains((100_000, 7.0)), 1000.0) == pytest.approx(7.0)  # and none of it overflows


def test_chains_that_cannot_carry_the_load_have_no_bound() -> None:
    assert least_response_s(chains((2, 1.0), (1, 0.5)), 4.0) == math.inf
    assert least_response_s(chains((2, 1.0), (1, 0.5)), 3.999) < math.inf


def test_the_fastest_chain_takes_all_its_room_then_the_next() -> None:
    # A mean request has two tokens and takes 1 byte of cache per block: rooms are slots. s0 is ten times as fast as the
    # others. s0, s1: two blocks each; s0 has room for three requests, s1 for two: two of them. Then s0 has two slots left:
    # one request, for s3's second half. s2 and s3 alone hold the model; s3 has one request's worth less than before.
    problem = make_problem([99.0] * 4, decode_s=[0.1, 1.0, 2.0, 3.0], n_output_tokens=1)
    problem = replace(problem, n_output_tokens=2, n_input_tokens=2)
    assert MeanRequests(problem).slot_bytes == 2.0
    placement = placed(problem, [(0, 2), (2, 4), (0, 2), (0, 4)], [12.0, 8.0, 4.0, 24.0])
    found = compose(MeanRequests(problem), placement)
    assert [(chain.hops, chain.capacity) for chain in found] == [
        ((Hop(0, 0, 2), Hop(1, 2, 4)), 2),
        ((Hop(0, 0, 2), Hop(3, 2, 4)), 1),
        ((Hop(2, 0, 2), Hop(3, 2, 4)), 1),
        ((Hop(3, 0, 4),), 2),
    ]


def test_windows_lie_end_to_end_and_the_last_of_a_chain_is_shifted_back() -> None:
    # One session takes a byte per block: m = 3, 2 and 3 of five blocks. By time per block s1, s0, s2.
    problem = make_problem(
        [33.0, 22.0, 33.0], n_blocks=5, decode_s=[2.0, 1.0, 3.0], request_rate=1e-6, **TWO_AND_TWO
    )
    placement = ChainComposition().place(problem, 1)
    assert placement.ranges == (BlockRange(2, 5), BlockRange(0, 2), BlockRange(0, 0))
    problem = make_problem(
        [33.0, 33.0, 33.0], n_blocks=5, decode_s=[2.0, 1.0, 3.0], request_rate=1e-6, **TWO_AND_TWO
    )
    placement = ChainComposition().place(problem, 1)
    assert placement.ranges == (BlockRange(2, 5), BlockRange(0, 3), BlockRange(0, 0))
    assert placement.cache_bytes == (3.0, 3.0, 0.0)


def test_chain_composition_adds_chains_until_they_carry_the_load_over_seven_tenths_and_no_incomplete_one() -> (
    None
):
    # Each server holds the model for one session, and a request takes 4 s there: a chain carries 0.25/s, 0.175/s of it.
    problem = make_problem([44.0] * 5, decode_s=[1.0] * 5, **TWO_AND_TWO)
    time_s = MeanRequests(problem).time_s((Hop(0, 0, 4),))
    for rate, n_chains in ((0.69, 1), (0.71, 2), (1.39, 2), (1.41, 3), (100.0, 5)):
        asked = replace(problem, request_rate=rate / time_s)
        held = ChainComposition().place(asked, 1).ranges
        assert sum(r.n_blocks > 0 for r in held) == n_chains, rate
    halves = make_problem([22.0] * 5, decode_s=[1.0] * 5, request_rate=100.0, **TWO_AND_TWO)
    assert [r.n_blocks for r in ChainComposition().place(halves, 1).ranges] == [2, 2, 2, 2, 0]


def test_c_is_the_one_with_the_least_bound() -> None:
    # Alone, one session at a time on one server is fastest; at load the room for more is worth a second hop.
    problem = make_problem([80.0, 80.0], rtt_s=[[1.0, 1.0]], decode_s=[0.1, 0.1], n_output_tokens=10)
    at = {}
    for rate in (1e-6, 0.5):
        asked = replace(problem, request_rate=rate)
        chosen = ChainComposition().place(asked)
        at[rate] = chosen
        mean = MeanRequests(asked)
        bound = least_response_s(compose(mean, chosen), rate)
        for c in range(1, 40):
            try:
                other = ChainComposition().place(asked, c)
            except InfeasiblePlacement:
                continue
            assert bound <= least_response_s(compose(mean, other), rate) * (1 + 1e-9), c
    assert at[1e-6].ranges[0].n_blocks == 4
    assert at[0.5].design_concurrency > at[1e-6].design_concurrency  # type: ignore[operator]


def test_servers_that_make_no_chain_are_refused() -> None:
    with pytest.raises(InfeasiblePlacement, match="chain-composition makes no chain of 4 blocks"):
        ChainComposition().place(make_problem([11.0] * 3))


REQUEST = RequestSpec(0, 2, 2)


def two_servers() -> tuple[Problem, Placement]:
    """Whole models: s1 is faster and has two slots, s0 three."""
    problem = make_problem([99.0] * 2, decode_s=[2.0, 1.0], **TWO_AND_TWO)
    return problem, placed(problem, [(0, 4), (0, 4)], [12.0, 8.0])


def test_jffc_takes_the_fastest_chain_with_a_free_slot_and_else_waits_for_the_first() -> None:
    problem, placement = two_servers()
    router = Jffc().bind(problem, placement)
    assert [(chain.hops[0].server, chain.capacity) for chain in router.chains] == [(1, 2), (0, 3)]
    state = SystemState(placement.cache_bytes)
    servers = []
    for number in range(5):
        route = router.route(REQUEST, state, 0.0)
        assert route is not None and route.wait_s == 0.0
        servers.append(route.hops[0].server)
        state.open(number, route.hops, 1.0, 10.0 + number)
    assert servers == [1, 1, 0, 0, 0]
    route = router.route(REQUEST, state, 4.0)
    assert route is not None and (route.hops[0].server, route.wait_s) == (1, 6.0)
    state.close(3)
    route = router.route(REQUEST, state, 4.0)
    assert route is not None and (route.hops[0].server, route.wait_s) == (0, 0.0)


def test_a_slot_is_taken_by_a_short_session_too_and_a_long_one_needs_room_for_all_of_it() -> None:
    problem, placement = two_servers()
    router = Jffc().bind(problem, placement)
    state = SystemState(placement.cache_bytes)
    for number in range(2):
        state.open(number, (Hop(1, 0, 4),), 0.001, 7.0)  # next to no cache
    route = router.route(REQUEST, state, 0.0)
    assert route is not None and route.hops[0].server == 0
    state.close(0)
    route = router.route(RequestSpec(0, 4, 4), state, 0.0)  # 8 bytes: s1 has 0.004 less
    assert route is not None and (route.hops[0].server, route.wait_s) == (0, 0.0)
    assert router.route(RequestSpec(0, 20, 20), state, 0.0) is None


@settings(max_examples=n_drawn(40))
@given(problems())
def test_composed_placements_are_whole_and_every_chain_has_room(problem: Problem) -> None:
    try:
        placement = ChainComposition().place(problem)
    except InfeasiblePlacement:
        return
    check_placement(problem, placement)
    router = Jffc().bind(problem, placement)
    assert router.chains
    mean = MeanRequests(problem).request
    state = SystemState(placement.cache_bytes)
    for number in range(min(20, sum(chain.capacity for chain in router.chains))):
        route = router.route(mean, state, 0.0)
        assert route is not None and route.wait_s == 0.0
        check_route(problem, placement, route, "jffc")
        state.open(number, route.hops, problem.model.cache_bytes(mean.n_tokens), 1.0)
