"""The summary of each client, and the line about clients that differ."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from testbed.experiments import load_experiment
from testbed.experiments.slo import Objectives
from testbed.records.base import data_of
from testbed.records.summary import summary_from
from testbed.results.clients import clients_text
from testbed.simulator.cases import Case
from testbed.simulator.engine import simulate
from testbed.simulator.summary import summarize_simulation

TWO = (
    "clients=[{site='Cluster0', name='near', rate=0.3}, {site='Cluster2', name='far', rate=0.1, hub_token='200 ms'}]",
    "policy.name='proposed'",
    "workload.n_requests=12",
    "workload.n_output_tokens=16",
)


def summary_of(*options: str, objectives: dict[str, float] | None = None) -> Any:
    simulation = simulate(Case(load_experiment("clustered", [*TWO, *options])), "testbed")
    return simulation.rows, summarize_simulation(simulation, Objectives(objectives or {}))


def test_each_client_has_the_figures_of_its_own_requests() -> None:
    rows, summary = summary_of(objectives={"tpot": 0.5})
    assert list(summary.clients) == ["near", "far"]
    for name, client in summary.clients.items():
        own = [row for row in rows if row.client == name]
        assert (client.n_requests, client.n_completed) == (len(own), len(own))
        assert client.n_tokens == 16 * len(own)
        mean_s = sum(row.times.ttft_s for row in own) / len(own)
        assert client.metrics["ttft_s"].mean == pytest.approx(mean_s)
        assert client.n_met == sum(row.times.tpot_s <= 0.5 for row in own)
    assert summary_from(data_of(summary)).clients == summary.clients


def test_the_text_names_the_clients_that_differ_and_no_others() -> None:
    _, summary = summary_of()
    far, near = (summary.clients[name].metrics["tpot_s"].p95 for name in ("far", "near"))
    low, high = sorted([(far, "far"), (near, "near")])
    assert high[0] > 1.1 * low[0], "else the scenario does not show it"
    said = f"TPOT {low[0]:.3f} s ({low[1]}) to {high[0]:.3f} s ({high[1]})"
    assert len(lines := clients_text(summary.clients)) == 1 and said in lines[0]
    assert clients_text({"near": summary.clients["near"], "same": summary.clients["near"]}) == []
    assert clients_text({"near": summary.clients["near"]}) == []


def test_requests_that_have_not_ended_miss_no_objectives() -> None:
    _, summary = summary_of("backoff.give_up='1 s'", objectives={"ttft": 60})
    near, far = summary.clients.values()
    assert near.n_met == near.n_completed and far.n_met == far.n_completed
    waiting = structs.replace(near, n_requests=2 * near.n_requests)  # of a run that was interrupted
    assert "objectives" not in "".join(clients_text({"near": waiting, "far": far}))
    failed = structs.replace(near, n_completed=1, n_failed=3, n_met=1)
    assert (
        "the fewest requests meet the objectives at near, 25%"
        in clients_text({"near": failed, "far": far})[0]
    )
