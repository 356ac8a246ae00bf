"""Foresight: what its routing prefers, what its search finds, and when it keeps the proposed placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest

from policies import Hop, InfeasiblePlacement, Placement, PolicyError, Problem, RequestSpec, SystemState
from policies.cgbp import CgBp
from policies.checks import check_placement
from policies.composition import ChainComposition
from policies.foresight import ForesightPlacement
from policies.foresight_routing import ForesightRouting
from policies.greedy import block_counts
from policies.interfaces import RoutingPolicy
from policies.optimal_rr import OptimalRr
from policies.registry import resolve_pair, resolve_placement, resolve_routing
from policies.replay import replay
from policies.search import (
    STATED,
    Load,
    Trials,
    candidate_concurrencies,
    search_design_concurrency,
    stream_requests,
    synthetic_requests,
    typical_lengths,
)
from policies.wsrr import WsRr
from testbed.experiments import load_experiment
from tests.support.effort import EFFORT
from tests.support.problems import make_problem, placed

FEW = ("calibration.set=petals-scattered", "servers.0.count=4", "servers.1.count=1", "workload.rate=0.1")
"""One A100 and four MIG servers."""


def per_token_s(
    problem: Problem, placement: Placement, routing: RoutingPolicy, sets: tuple[str, ...]
) -> float:
    """Mean over the requests of AboveNet with ``sets``, which are not among those of the search."""
    requests = load_experiment("abovenet", sets).workload.requests
    done = replay(problem, placement, routing.bind(problem, placement), requests)
    return fmean(d.time_s / d.plan.n_output_tokens for d in done)


def test_a_route_whose_wait_ends_just_before_a_retry_is_preferred() -> None:
    # Server 0 is free after 3.5 s, but the client asks again at 3 s and at 7 s; server 1 after 2.9 s.
    problem = make_problem([100.0, 100.0], decode_s=[0.2, 0.5], n_output_tokens=2, rtt_s=[[0.0, 0.0]])
    placement = placed(problem, [(0, 4), (0, 4)], [6.0, 6.0])
    state = SystemState(placement.cache_bytes)
    state.open("a", [Hop(0, 0, 4)], 1.5, 3.5)
    state.open("b", [Hop(1, 0, 4)], 1.5, 2.9)
    request = RequestSpec(0, 1, 2)
    nearest = OptimalRr().bind(problem, placement).route(request, state, 0.0)
    route = ForesightRouting().bind(problem, placement).route(request, state, 0.0)
    assert nearest is not None
    assert route is not None
    assert nearest.hops == (Hop(0, 0, 4),)
    assert route.hops == (Hop(1, 0, 4),)
    assert (route.wait_s, route.cost_s) == (2.9, pytest.approx(3 + 4 * 0.5))


def test_a_router_asked_for_a_request_that_no_server_can_hold_answers_none() -> None:
    problem = make_problem([100.0])
    placement = placed(problem, [(0, 4)], [1.0])
    state = SystemState(placement.cache_bytes)
    assert ForesightRouting().bind(problem, placement).route(RequestSpec(0, 1, 1), state, 0.0) is None


def test_the_pair_foresight_is_its_placement_with_its_routing() -> None:
    placement, routing = resolve_pair("foresight")
    assert isinstance(resolve_placement(placement), ForesightPlacement)
    assert isinstance(resolve_routing(routing), ForesightRouting)


def test_one_a100_and_four_mig_serve_a_tenth_faster_than_under_the_proposed_pair() -> None:
    problem = load_experiment("abovenet", FEW).problem
    proposed, found = CgBp().place(problem), ForesightPlacement().place(problem)
    check_placement(problem, found)
    before_s = per_token_s(problem, proposed, WsRr(), FEW)
    assert per_token_s(problem, found, ForesightRouting(), FEW) < 0.9 * before_s


def test_more_requests_than_stated_wait_less_than_under_the_proposed_pair() -> None:
    stated = ("calibration.set=petals-scattered", "workload.rate=0.2")
    problem = load_experiment("abovenet", stated).problem
    proposed, found = CgBp().place(problem), ForesightPlacement().place(problem)
    actual = (*stated, "workload.rate=1")
    before_s = per_token_s(problem, proposed, WsRr(), actual)
    assert per_token_s(problem, found, ForesightRouting(), actual) < 0.5 * before_s


def test_streams_have_as_many_requests_as_there_are_at_a_time() -> None:
    # 32 s per request: 3 at a time, 253, and more than trials have time for; `clustered` has no room for more than 177.
    for scenario, rate, n in (
        ("gts-ce", 0.1, 100),
        ("gts-ce", 8, 317),
        ("gts-ce", 30, 576),
        ("clustered", 30, 222),
    ):
        assert stream_requests(load_experiment(scenario, [f"workload.rate={rate}"]).problem) == n
    assert stream_requests(make_problem([15.0])) == 100


@pytest.mark.parametrize(("scenario", "rate"), [("gts-ce", 8), ("bellcanada", 12)][:EFFORT])
def test_where_hundreds_are_served_at_a_time_there_is_room_for_them(scenario: str, rate: int) -> None:
    high = (f"workload.rate={rate}", "workload.n_requests=2000")
    problem, requests = (
        load_experiment(scenario, high).problem,
        load_experiment(scenario, high).workload.requests,
    )
    mean_s = {}
    for policy in (ForesightPlacement(), CgBp(), ChainComposition()):
        placement = policy.place(problem)
        router = ForesightRouting().bind(problem, placement)
        mean_s[policy.name] = fmean(d.time_s for d in replay(problem, placement, router, requests))
    assert mean_s["foresight"] <= 1.01 * min(mean_s.values())


def test_the_same_problem_always_gets_the_same_placement() -> None:
    problem = load_experiment("abovenet", FEW).problem
    assert ForesightPlacement().place(problem) == ForesightPlacement().place(problem)


def test_the_proposed_placement_is_kept_where_nothing_is_better() -> None:
    problem = make_problem([100.0], n_output_tokens=2)
    proposed, found = CgBp().place(problem), ForesightPlacement().place(problem)
    assert found == replace(proposed, policy="foresight")


def test_a_given_concurrency_is_that_of_the_placement_to_be_beaten() -> None:
    problem = make_problem([100.0], n_output_tokens=2)
    assert ForesightPlacement().place(problem, 3).design_concurrency == 3
    with pytest.raises(PolicyError, match="at least 1"):
        ForesightPlacement().place(problem, 0)


def test_where_cg_bp_refuses_a_smaller_concurrency_serves() -> None:
    problem = load_experiment("abovenet", (*FEW, "workload.rate=0.5")).problem
    too_many = CgBp().place(problem).design_concurrency
    assert too_many is not None
    with pytest.raises(InfeasiblePlacement):
        CgBp().place(problem, too_many + 1)
    found = ForesightPlacement().place(problem, too_many + 1)
    check_placement(problem, found)
    state = SystemState(found.cache_bytes)
    longest = RequestSpec(0, problem.n_input_tokens, problem.n_output_tokens)
    assert ForesightRouting().bind(problem, found).route(longest, state, 0.0) is not None


def test_where_not_even_one_session_fits_the_refusal_is_cg_bps() -> None:
    problem = make_problem([15.0, 15.0])
    with pytest.raises(InfeasiblePlacement, match="blocks unplaced"):
        ForesightPlacement().place(problem, 1)


def test_a_server_without_room_takes_no_part() -> None:
    problem = make_problem([5.0, 100.0, 100.0], n_output_tokens=2)
    found = ForesightPlacement().place(problem)
    check_placement(problem, found)
    assert found.ranges[0].n_blocks == 0


def test_candidates_are_the_largest_concurrency_of_each_set_of_block_counts() -> None:
    problem = make_problem([60.0, 100.0], cache_bytes_per_token=1.0)
    found = candidate_concurrencies(problem, 40)
    counts = [block_counts(problem, concurrency) for concurrency in found]
    assert all(a != b for a, b in pairwise(counts))
    for concurrency, count in zip(found, counts, strict=True):
        assert block_counts(problem, concurrency + 1) != count
    assert candidate_concurrencies(problem, 2) == [found[0], found[-1]]


def test_no_concurrency_is_a_candidate_where_not_even_one_session_fits() -> None:
    assert candidate_concurrencies(make_problem([15.0]), 40) == []


@pytest.mark.parametrize("options", [(), ("workload.n_input_tokens=1000",)], ids=["short", "waits for links"])
def test_the_searched_concurrency_is_the_fastest_of_all(options: Sequence[str]) -> None:
    """Though trials of slower ones end early; the largest of equally fast ones."""
    problem = load_experiment("abovenet", [*FEW, *options]).problem
    trials = Trials(problem, WsRr().bind, (STATED,))
    means_s = {}
    for concurrency in reversed(candidate_concurrencies(problem, 40)):
        placement = CgBp().place(problem, concurrency)
        means_s[concurrency] = sum(trials.per_token_s(placement, [f"search {i}" for i in range(3)])[0]) / 3
    best = min(means_s, key=means_s.__getitem__)
    searched = search_design_concurrency(problem, CgBp().place, WsRr().bind)
    assert searched == (best, CgBp().place(problem, best))


def test_a_search_without_any_placement_says_what_is_missing() -> None:
    with pytest.raises(InfeasiblePlacement, match="memory"):
        search_design_concurrency(make_problem([15.0]), CgBp().place, WsRr().bind)


def test_synthetic_requests_have_the_rate_the_clients_and_the_lengths_of_their_load() -> None:
    rtt_s = [[0.1], [0.2], [0.3]]
    problem = make_problem([100.0], rtt_s=rtt_s, n_input_tokens=8, n_output_tokens=40, request_rate=2.0)
    load = Load("test", rate_ratio=2.0, shape=0.5, length_ratios=(0.25, 1.0))
    requests = synthetic_requests(problem, load, "a stream", 4000)
    assert requests == synthetic_requests(problem, load, "a stream", 4000)
    assert requests != synthetic_requests(problem, load, "another stream", 4000)
    assert 4000 / requests[-1].arrival_at_s == pytest.approx(4.0, rel=0.1)
    assert {r.client for r in requests} == {0, 1, 2}
    assert {r.n_input_tokens for r in requests} == {2, 8}
    assert {r.n_output_tokens for r in requests} == {10, 40}


def test_the_stated_load_has_the_maximal_lengths() -> None:
    problem = make_problem([100.0], n_input_tokens=3, n_output_tokens=7)
    requests = synthetic_requests(problem, STATED, "a stream", 50)
    assert {(r.n_input_tokens, r.n_output_tokens) for r in requests} == {(3, 7)}


def test_arrivals_to_try_placements_on_have_the_lengths_that_are_known() -> None:
    problem = make_problem([99.0], n_input_tokens=100, n_output_tokens=100)
    lengths = {(r.n_input_tokens, r.n_output_tokens) for r in synthetic_requests(problem, STATED, "x")}
    assert lengths == {(100, 100)}
    samples = tuple((n, 2 * n) for n in range(1, 49))
    known = replace(problem, length_samples=samples, reserved_output_tokens=90)
    typical = typical_lengths(known)
    assert len(typical) == 8
    assert typical[0] == (4, 7)  # of (1, 2) to (6, 12): 3.5 and 7 in the mean
    requests = synthetic_requests(known, STATED, "x", 400)
    assert {(r.n_input_tokens, r.n_output_tokens) for r in requests} == set(typical)
    assert {r.known.n_output_tokens for r in requests} == {90}
    assert typical_lengths(replace(problem, length_samples=((3, 4),) * 9)) == [(3, 4)]
