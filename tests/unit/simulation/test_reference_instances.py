"""Policies and replay against the published simulator's answers, request by request."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from policies import (
    InfeasiblePlacement,
    ModelSpec,
    PlacementPolicy,
    Problem,
    RequestSpec,
    RoutingPolicy,
    ServerSpec,
    SystemState,
)
from policies.cgbp import CgBp, lower_bounds_per_token_s
from policies.design import choose_design_concurrency
from policies.petals import PetalsPlacement
from policies.petals_routing import PetalsRouting
from policies.replay import replay
from policies.wsrr import WsRr
from testbed.simulation.instance import Instance, parse_instance

DATA = Path(__file__).parents[2] / "data"


def load(name: str) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = json.loads(gzip.decompress((DATA / name).read_bytes()))
    return data


CASES = load("reference_runs.json.gz")
TINY = load("tiny_instances.json.gz")
ROUNDED_DOWN = "tiny16"
"""Here M - s_m = 3 s_c exactly, but (2.36 - 1.25) / 0.37 is just under 3 in float64: the reference counts two."""


def policies_of(algorithm: str, instance: Instance) -> tuple[PlacementPolicy, RoutingPolicy]:
    if algorithm == "proposed":
        return CgBp(), WsRr()
    return PetalsPlacement(), PetalsRouting(instance.hop_overhead_s, instance.shortage_penalty_s)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["instance"]["id"])
def test_placements_routes_and_times_are_the_reference_simulators(case: dict[str, Any]) -> None:
    instance = parse_instance(case["instance"], case["instance"]["id"])
    for run in case["runs"]:
        placing, routing = policies_of(run["algorithm"], instance)
        if run.get("infeasible"):
            with pytest.raises(InfeasiblePlacement):
                placing.place(instance.problem)
            continue
        placement = placing.place(instance.problem)
        assert [list(r) for r in placement.ranges] == run["ranges"]
        if "theorem1_per_token_ms" in run:
            bound_ms = placement.bounds["theorem1_per_token_s"] * 1e3
            assert bound_ms == pytest.approx(run["theorem1_per_token_ms"], rel=1e-12)
        done = replay(
            instance.problem,
            placement,
            routing.bind(instance.problem, placement),
            instance.requests,
            run["session_setup_ms"] / 1e3,
        )
        assert [[h.server for h in r.route.hops] for r in done] == [run["chains"][i] for i in run["chain"]]
        assert [r.waiting_s * 1e3 for r in done] == run["waiting_ms"]
        assert [r.time_s * 1e3 for r in done] == pytest.approx(run["time_ms"], rel=1e-12)
        assert [r.ttft_s * 1e3 for r in done] == pytest.approx(run["ttft_ms"], rel=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["instance"]["id"])
def test_the_design_concurrency_is_the_reference_simulators(case: dict[str, Any]) -> None:
    problem = parse_instance(case["instance"], "case").problem
    if case["design_concurrency"] is None or case["design_concurrency"] < 1:
        with pytest.raises(InfeasiblePlacement):
            choose_design_concurrency(problem)
        return
    chosen = choose_design_concurrency(problem)
    assert chosen.value == case["design_concurrency"]
    assert chosen.memory_bound == case["memory_bound"]
    assert chosen.single_request_s * 1e3 == pytest.approx(case["single_request_ms"], rel=1e-12)


def tiny_problem(tiny: dict[str, Any]) -> Problem:
    """Cost is decoding alone: no prefill, and a request of no input and two output tokens decodes once."""
    n, rtt_s = len(tiny["memory"]), tuple(tuple(t / 1e3 for t in row) for row in tiny["rtt_ms"])
    nothing = tuple((0.0,) * n for _ in rtt_s)
    return Problem(
        model=ModelSpec("tiny", tiny["n_blocks"], 1, tiny["block"], tiny["cache"] / 2),
        servers=tuple(
            ServerSpec(f"s{j}", "gpu", tiny["memory"][j], tiny["decode_ms"][j] / 1e3, 0.0, 0.0, 1.0, 1.0)
            for j in range(n)
        ),
        clients=tuple(f"c{c}" for c in range(len(rtt_s))),
        raw_rtt_s=rtt_s,
        token_rtt_s=rtt_s,
        input_rtt_base_s=nothing,
        input_rtt_slope_s=nothing,
        server_rtt_s=((0.0,) * n,) * n,
        n_input_tokens=0,
        n_output_tokens=2,
        request_rate=1.0,
        join_order=tuple(range(n)),
    )


@pytest.mark.parametrize("tiny", TINY, ids=lambda t: t["id"])
def test_tiny_instances_are_placed_as_the_reference_does_and_lie_between_bound_and_optimum(
    tiny: dict[str, Any],
) -> None:
    problem = tiny_problem(tiny)
    if "ranges" not in tiny and tiny["id"] != ROUNDED_DOWN:
        with pytest.raises(InfeasiblePlacement):
            CgBp().place(problem, len(tiny["clients"]))
        return
    placement = CgBp().place(problem, len(tiny["clients"]))
    bounds_s = lower_bounds_per_token_s(problem)
    lower_ms = sum(bounds_s[c] for c in tiny["clients"]) * 1e3
    assert lower_ms == pytest.approx(tiny["lower_bound_ms"], rel=1e-12)
    router, state = WsRr().bind(problem, placement), SystemState(placement.cache_bytes)
    objective_ms, chains = 0.0, []
    for key, client in enumerate(tiny["clients"]):
        route = router.route(RequestSpec(client, 0, 2), state, 0.0)
        assert route is not None
        state.open(key, route.hops, tiny["cache"], 1e9)
        objective_ms += route.cost_s * 1e3
        chains.append([h.server for h in route.hops])
    bound_ms = placement.bounds["theorem1_per_token_s"] * 1e3
    assert lower_ms <= tiny["optimum_ms"] * (1 + 1e-12)
    assert tiny["optimum_ms"] <= objective_ms * (1 + 1e-12)
    assert objective_ms <= bound_ms * len(tiny["clients"]) * (1 + 1e-12)
    if tiny["id"] != ROUNDED_DOWN:
        assert [list(r) for r in placement.ranges] == tiny["ranges"]
        assert bound_ms == pytest.approx(tiny["bound_ms"], rel=1e-12)
        assert objective_ms == pytest.approx(tiny["objective_ms"], rel=1e-12)
        assert chains == tiny["chains"]
