"""Policies and replay against the published simulator's answers, request by request."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies import InfeasiblePlacement, Placement, PlacementPolicy, RoutingPolicy
from policies.bounds import greedy_plan_of
from policies.cgbp import theorem1_per_token_s
from policies.design import choose_design_concurrency
from policies.petals_routing import PetalsRouting
from policies.registry import resolve_pair, resolve_placement, resolve_routing
from policies.replay import ReplayedRequest, replay
from testbed.simulator.instance import Instance, parse_instance

FILE = Path(__file__).parents[2] / "data" / "reference_runs.json.gz"
CASES: list[dict[str, Any]] = json.loads(gzip.decompress(FILE.read_bytes()))
ALGORITHMS = (
    "petals",
    "petals-optimized-number",
    "petals-optimized-order",
    "petals-optimized-rr",
    "proposed",
)
REL = 1e-9
"""Both sides sum the same float64 terms; the answers are kept in nanoseconds."""

each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c["instance"]["id"])


def instance_of(case: dict[str, Any]) -> Instance:
    """The case's instance, with the |R| of the published simulator, which does not look at block caps."""
    instance = parse_instance(case["instance"], case["instance"]["id"])
    return replace(instance, problem=replace(instance.problem, caps_limit_concurrency=False))


def policies_of(algorithm: str, instance: Instance) -> tuple[PlacementPolicy, RoutingPolicy]:
    placement, routing = resolve_pair(algorithm)
    if routing == "petals":
        return (
            resolve_placement(placement),
            PetalsRouting(instance.hop_overhead_s, instance.shortage_penalty_s),
        )
    return resolve_placement(placement), resolve_routing(routing)


def mean_of(done: list[ReplayedRequest], n_output_tokens: int) -> dict[str, float]:
    """Means over the requests, in the published simulator's units, and its count of active sessions."""
    n = len(done)
    ends_s = [r.plan.arrival_at_s + r.time_s for r in done]
    active = [sum(end_s > r.plan.arrival_at_s for end_s in ends_s[:i]) + 1 for i, r in enumerate(done)]
    return {
        "per_token_ms": sum(r.time_s for r in done) * 1e3 / n / n_output_tokens,
        "ttft_ms": sum(r.ttft_s for r in done) * 1e3 / n,
        "rest_ms": sum(r.time_s - r.ttft_s for r in done) * 1e3 / n / (n_output_tokens - 1),
        "waiting_ms": sum(r.waiting_s for r in done) * 1e3 / n,
        "max_concurrent": max(active),
    }


def test_the_cases_are_all_algorithms_with_and_without_the_setup_constants() -> None:
    assert len(CASES) == 73
    for case in CASES:
        assert sorted(case["runs"]) == list(ALGORITHMS)
        for run in filter(None, case["runs"].values()):
            assert [variant["session_setup_ms"] > 0 for variant in run["variants"]] == [True, False]


@each_case
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_placements_routes_and_times_are_the_reference_simulators(
    case: dict[str, Any], algorithm: str
) -> None:
    instance, run = instance_of(case), case["runs"][algorithm]
    placing, routing = policies_of(algorithm, instance)
    if run is None:
        with pytest.raises(InfeasiblePlacement):
            placing.place(instance.problem)
        return
    placement = placing.place(instance.problem)
    assert [list(r) for r in placement.ranges] == run["ranges"]
    if algorithm == "proposed":
        greedy = greedy_plan_of(instance.problem, placement)
        assert greedy is not None
        bound_ms = theorem1_per_token_s(instance.problem, greedy) * 1e3
        assert bound_ms == pytest.approx(run["theorem1_per_token_ms"], rel=REL)
    for variant in run["variants"]:
        check_variant(instance, placement, routing, run, variant)


def check_variant(
    instance: Instance,
    placement: Placement,
    routing: RoutingPolicy,
    run: dict[str, Any],
    variant: dict[str, Any],
) -> None:
    """``run`` has each chain's times without waiting and session setup, ``variant`` what is added to them."""
    setup_ms = variant["session_setup_ms"]
    router = routing.bind(instance.problem, placement)
    done = replay(instance.problem, placement, router, instance.requests, setup_ms / 1e3)
    assert [r.waiting_s for r in done] == variant["waiting_s"]
    added_ms = [wait_s * 1e3 + setup_ms for wait_s in variant["waiting_s"]]
    for times, key in (([r.time_s for r in done], "time_ms"), ([r.ttft_s for r in done], "ttft_ms")):
        expected_ms = [run[key][chain] + more for chain, more in zip(variant["chain"], added_ms, strict=True)]
        assert [time_s * 1e3 for time_s in times] == pytest.approx(expected_ms, rel=REL)
    tied = set(variant["tied"])
    for i, (request, chain) in enumerate(zip(done, variant["chain"], strict=True)):
        # Where another chain costs the same, that the times are equal is enough.
        assert i in tied or [hop.server for hop in request.route.hops] == run["chains"][chain], i
    mean = mean_of(done, instance.problem.n_output_tokens)
    assert mean == pytest.approx(variant["mean"], rel=REL)


def test_with_block_caps_a_chosen_concurrency_is_one_that_fits_where_the_reference_finds_no_placement() -> (
    None
):
    n_refused = 0
    for case in CASES:
        if case["runs"]["proposed"] is None and (case["design_concurrency"] or 0) >= 1:
            problem = replace(instance_of(case).problem, caps_limit_concurrency=True)
            chosen = choose_design_concurrency(problem)
            assert chosen.value == chosen.largest < case["design_concurrency"]
            placement = resolve_placement("cg-bp").place(problem)
            assert placement.design_concurrency == chosen.value
            n_refused += 1
    assert n_refused == 4


@each_case
def test_the_design_concurrency_is_the_reference_simulators(case: dict[str, Any]) -> None:
    problem = instance_of(case).problem
    if case["design_concurrency"] is None or case["design_concurrency"] < 1:
        with pytest.raises(InfeasiblePlacement):
            choose_design_concurrency(problem)
        return
    chosen = choose_design_concurrency(problem)
    assert chosen.value == case["design_concurrency"]
    assert chosen.memory_bound == case["memory_bound"]
    assert chosen.single_request_s * 1e3 == pytest.approx(case["single_request_ms"], rel=REL)
