"""What the client computes per token, in every way in which the simulator serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from policies import Hop, Placement, Problem, RequestSpec, service_s
from policies.optimal_rr import OptimalRr
from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.simulator.cases import Case
from testbed.simulator.engine import simulate
from testbed.simulator.hops import hop_table
from tests.support.problems import make_problem, placed
from tests.support.simulation import arrivals, run_fast

HUB_S = 0.25


def small(forwarding: bool = False, hub_token_s: float = HUB_S) -> tuple[Problem, Placement]:
    problem = make_problem(
        [99.0, 99.0], rtt_s=[[0.1, 0.4]], input_rtt_s=0.5, prefill_slope_s=0.01, n_output_tokens=7
    )
    problem = replace(problem, forwarding=forwarding, hub_token_s=hub_token_s)
    return problem, placed(problem, [(0, 2), (2, 4)], [99.0, 99.0])


@pytest.mark.parametrize("forwarding", [False, True])
def test_a_requests_time_has_the_client_in_it_once_per_output_token(forwarding: bool) -> None:
    request, hops = RequestSpec(0, 3, 7), [Hop(0, 0, 2), Hop(1, 2, 4)]
    first_s, all_s = service_s(small(forwarding)[0], request, hops)
    without_first_s, without_all_s = service_s(small(forwarding, 0.0)[0], request, hops)
    assert first_s - without_first_s == pytest.approx(HUB_S)
    assert all_s - without_all_s == pytest.approx(7 * HUB_S)


@pytest.mark.parametrize("forwarding", [False, True])
def test_the_fast_engine_counts_the_client_alike(forwarding: bool) -> None:
    problem, placement = small(forwarding)
    plans = arrivals(0.0, n_input=3, n_output=7)
    [closed] = run_fast(problem, placement, plans).requests
    [without] = run_fast(*small(forwarding, 0.0), plans).requests
    assert closed.ttft_s is not None and without.ttft_s is not None
    assert closed.ttft_s - without.ttft_s == pytest.approx(HUB_S)
    assert closed.time_s - without.time_s == pytest.approx(7 * HUB_S)


def test_no_policy_chooses_another_chain_for_it() -> None:
    routes = []
    for hub_token_s in (0.0, 100.0):
        problem = make_problem([99.0] * 3, rtt_s=[[0.1, 0.4, 0.2]], n_output_tokens=7)
        problem = replace(problem, hub_token_s=hub_token_s)
        placement = placed(problem, [(0, 2), (2, 4), (1, 4)], [99.0] * 3)
        [r] = run_fast(problem, placement, arrivals(0.0, n_output=7), OptimalRr()).requests
        routes.append(r.route)
    assert routes[0] is not None and routes[0] == routes[1]


OPTIONS = {
    "closed form": ("workload.arrivals='constant'", "workload.rate=0.01"),
    "step by step": ("workload.rate=1",),
    "forwarding": ("policy.communication='server-to-server'", "workload.rate=10"),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_hops_add_up_to_their_request_and_the_client_is_after_the_last(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    small = ["workload.n_requests=3", "workload.n_output_tokens=5", "compute.hub_token='40 ms'", *options]
    experiment = load_experiment("clustered", small)
    simulation = simulate(Case(experiment), "testbed", folder=tmp_path)
    assert ("in closed form" in simulation.why) == ("workload.rate=0.01" in options)
    table = hop_table(simulation)
    assert_allclose(table.model_s, table.measured_s)
    is_last = table.last == experiment.problem.model.n_blocks
    assert_allclose(table.tail_s, np.where(is_last, 0.04, 0.0))
    for row in simulation.rows:
        hops = table.request == row.request
        assert row.is_completed
        assert table.received_at_s[hops][-1] + 0.04 == pytest.approx(row.ended_at_s)
        sent_at_s, token = table.sent_at_s[hops], table.token[hops]
        first = np.flatnonzero(np.diff(token)) + 1
        # A replay is sent when its servers are open.
        free = ~table.is_replay[hops][first]
        before_s = table.received_at_s[hops][first - 1] + 0.04
        assert_allclose(sent_at_s[first][free], before_s[free])


def test_the_reference_mode_refuses_a_client_that_it_does_not_have() -> None:
    experiment = load_experiment("clustered", ['compute.hub_token="1 ms"'])
    with pytest.raises(
        UserError, match=r"compute\.hub_token has no meaning in the reference mode; add --mode testbed"
    ):
        simulate(Case(experiment), "reference")
    zero = load_experiment("clustered", ['compute.hub_token="0 ms"', "workload.n_requests=2"])
    assert len(simulate(Case(zero), "reference").rows) == 2


def test_without_a_client_time_the_problem_and_the_resolved_scenario_are_as_ever() -> None:
    experiment = load_experiment("clustered")
    assert experiment.problem.hub_token_s == 0.0
    assert "hub_token" not in experiment.document["compute"]
