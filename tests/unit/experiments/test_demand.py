"""Clients whose rates go up and down over a day, each by its own curve and time zone."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from testbed.errors import ScenarioError
from testbed.experiments import load_experiment
from testbed.experiments.demand import Curve, Demand
from testbed.experiments.sources import Document, shipped_documents

HOUR_S = 3600.0
DAY = [0.0] * 8 + [1.0] * 12 + [0.0] * 4
"""Everybody is awake from 8 to 20 o'clock."""


def document(clients: list[dict[str, object]], **workload: object) -> Document:
    found = dict(shipped_documents())["clustered"]
    found["clients"] = clients
    found["workload"] |= {"rate": 0.005, "n_requests": 1296, **workload}
    return Document(found, "clustered")


def test_a_curve_has_its_values_in_turn_from_where_it_is_when_the_run_begins() -> None:
    curve = Curve((1.0, 2.0, 3.0), 30.0, 12.0)
    assert list(islice(curve.pieces(), 4)) == [(-2.0, 2.0), (8.0, 3.0), (18.0, 1.0), (28.0, 2.0)]
    assert [curve.over_mean(at_s) for at_s in (0.0, 7.9, 8.1, 18.1, 28.1)] == [1.0, 1.0, 1.5, 0.5, 1.0]


def test_the_rate_of_all_is_the_sum_of_the_clients() -> None:
    demand = Demand(3, (1.0, 1.0, 2.0), (Curve((0.0, 2.0), 10.0), Curve((0.0, 2.0), 10.0, 5.0), None))
    assert list(islice(demand.rates(4.0), 4)) == [(0.0, 4.0), (5.0, 4.0), (10.0, 4.0), (15.0, 4.0)]
    clients = demand.clients([1.0] * 300 + [6.0] * 300, random.Random(1))
    assert set(clients[:300]) == {1, 2} and set(clients[300:]) == {0, 2}
    assert clients[:300].count(1) == pytest.approx(150, abs=30)


def test_clients_send_by_their_local_time_of_day() -> None:
    clients = [
        {"site": "Cluster0", "name": "tokyo", "time_zone": "+09:00", "share": 2},
        {"site": "Cluster1", "name": "utc", "share": 1},
    ]
    experiment = load_experiment(document(clients, curve=DAY))
    hours = [
        {
            (request.arrival_at_s / HOUR_S + ahead) % 24
            for request in experiment.workload.requests
            if request.client == client
        }
        for client, ahead in ((0, 9), (1, 0))
    ]
    assert all(min(own) >= 8 - 1e-6 and max(own) <= 20 + 1e-6 for own in hours)
    n_tokyo = sum(request.client == 0 for request in experiment.workload.requests)
    assert n_tokyo == pytest.approx(864, abs=60), "three days"
    again = load_experiment(Document(dict(experiment.document), "clustered"))
    assert again.workload.requests == experiment.workload.requests


def test_curves_of_clients_that_are_all_alike_are_the_workloads() -> None:
    of_workload = load_experiment(document([{"site": "Cluster0"}], curve=DAY))
    of_client = load_experiment(document([{"site": "Cluster0", "curve": DAY}]))
    assert of_client.workload.requests == of_workload.workload.requests


@pytest.mark.parametrize(
    ("client", "workload", "said"),
    [
        ({"time_zone": "+09:00"}, {}, r"clients\.0\.time_zone: is that of a curve; give one"),
        ({"curve": DAY, "time_zone": "JST"}, {}, r'clients\.0\.time_zone: must be an offset from UTC such as "\+09:00"'),
        ({"curve": [0, 0]}, {}, r"clients\.0\.curve: is 0 at all times"),
        ({"curve": [1, -1]}, {}, r"clients\.0\.curve\.1: must be"),
        ({"curve": DAY}, {"changes": [{"at": "5 s", "rate": 1}]}, r"clients\.0\.curve: sets the rates, and so does workload\.changes"),
        ({"curve": DAY}, {"arrivals": "listed", "requests": [[0, 5, 5]], "rate": None, "n_requests": None, "n_input_tokens": None, "n_output_tokens": None}, r"clients\.0\.curve: is for generated arrivals"),
        ({}, {"curve_period": "1 h"}, r"workload\.curve_period: is of a curve"),
    ],
)  # fmt: skip
def test_what_contradicts_a_curve_is_said(
    client: dict[str, object], workload: dict[str, object], said: str
) -> None:
    found = document([{"site": "Cluster0", **client}], **workload)
    kept = {key: value for key, value in found.tables["workload"].items() if value is not None}
    with pytest.raises(ScenarioError, match=said):
        load_experiment(Document({**found.tables, "workload": kept}, "clustered"))
