"""Clients with lengths and objectives of their own."""

from __future__ import annotations

from functools import cache

import pytest

from testbed.errors import ScenarioError
from testbed.experiments import Change, load_experiment
from testbed.experiments.experiment import Experiment
from testbed.experiments.slo import Objectives
from testbed.experiments.sources import Document
from testbed.records.base import data_of
from testbed.records.summary import summary_from
from testbed.results.slo import n_met, objectives_of
from testbed.simulator.cases import Case
from testbed.simulator.engine import Simulation, simulate
from testbed.simulator.summary import summarize_simulation

NEAR, FAR = {"site": "Cluster0", "name": "near"}, {"site": "Cluster2", "name": "far"}
OWN = {
    "n_input_tokens": {"distribution": "uniform", "low": 3, "high": 9},
    "n_output_tokens": {"p50": 6, "p95": 12},
    "slo": "ttft=1s",
}


@cache
def of(far: tuple[str, ...] = (), *options: str) -> Experiment:
    """Return ``clustered`` with two clients, of which the far one has the keys ``far`` of ``OWN``."""
    clients = [NEAR, {**FAR, **{key: OWN[key] for key in far}}]
    few = ("workload.n_requests=40", "workload.n_output_tokens=8", "workload.slo='tpot=500ms'")
    return load_experiment("clustered", [Change("clients", clients), *few, *options])


@pytest.fixture(scope="module")
def served() -> Simulation:
    return simulate(Case(of(tuple(OWN))), "testbed")


def lengths(experiment: Experiment, client: int) -> list[tuple[float, int, int]]:
    return [
        (r.arrival_at_s, r.n_input_tokens, r.n_output_tokens)
        for r in experiment.workload.requests
        if r.client == client
    ]


def test_own_lengths_change_nothing_of_other_clients_requests() -> None:
    plain, own = of(), of(tuple(OWN))
    assert lengths(plain, 0) == lengths(own, 0)
    assert [at_s for at_s, *_ in lengths(plain, 1)] == [at_s for at_s, *_ in lengths(own, 1)]
    n_inputs, n_outputs = ({row[column] for row in lengths(own, 1)} for column in (1, 2))
    assert n_inputs <= set(range(3, 10)) and len(n_inputs) > 3 and len(n_outputs) > 3


def test_the_design_has_the_longest_of_all_clients_and_past_lengths_are_a_mix() -> None:
    plain, own = of(), of(("n_output_tokens",))
    assert plain.problem.n_output_tokens == 8 < own.problem.n_output_tokens
    known = [n_output for _, n_output in own.problem.length_samples]
    assert 0.3 < known.count(8) / len(known) < 0.7, "the near client's, and some of the far one's"
    only = load_experiment("clustered", [Change("clients", [{**FAR, **OWN}]), "workload.n_output_tokens=900"])
    assert only.problem.n_output_tokens < 900, "no client has the workload's"


def test_the_resolved_scenario_has_the_same_requests_again() -> None:
    own = of(tuple(OWN))
    again = load_experiment(Document(own.document))
    assert (again.workload.requests, again.problem.length_samples) == (
        own.workload.requests,
        own.problem.length_samples,
    )
    assert again.objectives == own.objectives and again.workload.source == own.workload.source
    assert "1 of 2 clients have lengths of their own" in own.workload.source


def test_each_request_is_judged_by_its_own_client_s_objective(served: Simulation) -> None:
    experiment = served.case.experiment
    assert experiment.objectives == Objectives({"tpot": 0.5}, {"far": {"ttft": 1.0}})
    assert experiment.problem.objectives_of(0) == (("tpot", 0.5),)
    assert experiment.problem.objectives_of(1) == (("ttft", 1.0),)
    summary = summarize_simulation(served, experiment.objectives)
    near, far = ([row for row in served.rows if row.client == name] for name in ("near", "far"))
    expected = sum(row.times.tpot_s <= 0.5 for row in near), sum(row.times.ttft_s <= 1.0 for row in far)
    assert tuple(client.n_met for client in summary.clients.values()) == expected
    assert n_met(served.rows, experiment.objectives) == sum(expected)
    swapped = sum(row.times.ttft_s <= 1.0 for row in near), sum(row.times.tpot_s <= 0.5 for row in far)
    assert expected != swapped, "else the scenario does not show it"
    again = summary_from(data_of(summary))
    assert objectives_of(again) == experiment.objectives
    assert objectives_of(again).in_words() == "tpot <= 0.5 s; far: ttft <= 1 s"


def test_the_system_serves_what_the_simulator_does() -> None:
    case = Case(of(tuple(OWN), "workload.n_requests=12", "network.backend='memory'"))
    fast, virtual = simulate(case, "testbed"), simulate(case, "testbed", is_virtual=True)
    assert [
        (row.client, row.n_input_tokens, row.n_output_tokens, row.times.e2e_s) for row in virtual.rows
    ] == [
        (row.client, row.n_input_tokens, row.n_output_tokens, pytest.approx(row.times.e2e_s, rel=1e-4))
        for row in fast.rows
    ]


@pytest.mark.parametrize(
    ("far", "options", "message"),
    [
        (
            ("n_input_tokens",),
            ("workload.turns=3",),
            "clients.1.n_input_tokens: is given, and workload.turns",
        ),
        (
            ("n_output_tokens",),
            ("workload.arrivals='listed'", "workload.requests=[[0, 3, 4], [9, 3, 4]]"),
            "clients.1.n_output_tokens: is given, and the workload's requests have recorded lengths; leave it out",
        ),
    ],
)
def test_own_lengths_are_refused_where_lengths_come_from_elsewhere(
    far: tuple[str, ...], options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ScenarioError, match=message):
        of(far, "workload.n_requests=2", *options)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("slo", "speed=5s", "clients.0.slo: unknown objective 'speed'"),
        ("n_input_tokens", -1, "clients.0.n_input_tokens"),
        ("n_output_tokens", {"p50": 9, "p95": 3}, "clients.0.n_output_tokens.p95: must be at least p50"),
    ],
)
def test_a_wrong_value_is_refused_with_its_client(key: str, value: object, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        load_experiment("clustered", [Change("clients", [{**NEAR, key: value}])])
