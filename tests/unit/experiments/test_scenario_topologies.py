"""Shipped topologies against known round trips, and places drawn by a scenario's seed."""

from __future__ import annotations

import pytest

from testbed.errors import ScenarioError
from testbed.experiments import load_experiment
from testbed.experiments.experiment import Experiment
from testbed.experiments.topologies import load_topology, shipped_topologies

SCATTERED = ("abovenet", "bellcanada", "gts-ce")

# Raw round trips in ms that the paper's public simulator computes between these nodes (by number).
KNOWN_RTT_MS = {
    "abovenet": {(9, 4): 21.784, (9, 8): 1.222, (9, 18): 37.546, (9, 5): 2.42, (4, 11): 9.998},
    "bellcanada": {(8, 9): 0.16, (8, 0): 3.102, (8, 36): 5.334, (8, 24): 18.304, (8, 41): 16.744},
    "gts-ce": {(31, 94): 2.81, (31, 15): 0.9, (31, 49): 6.774, (31, 61): 0.444, (107, 146): 5.968},
}


@pytest.mark.parametrize(
    ("name", "n_nodes", "n_links"), [("abovenet", 23, 31), ("bellcanada", 48, 65), ("gts-ce", 149, 193)]
)
def test_a_shipped_topology_has_its_sources_nodes_and_links(name: str, n_nodes: int, n_links: int) -> None:
    topology = load_topology(name)
    assert (len(topology.nodes), len(topology.links)) == (n_nodes, n_links)


def test_the_shipped_topologies_are_those_of_the_scattered_scenarios() -> None:
    assert shipped_topologies() == list(SCATTERED)


@pytest.mark.parametrize("name", SCATTERED)
def test_round_trips_are_those_of_the_papers_simulator(name: str) -> None:
    topology = load_topology(name)
    for (a, b), rtt_ms in KNOWN_RTT_MS[name].items():
        matrix_s = topology.rtt_matrix_s([topology.node_names[a], topology.node_names[b]])
        assert matrix_s[0][1] * 1e3 == pytest.approx(rtt_ms, rel=1e-9)
        assert matrix_s[1][0] == matrix_s[0][1]


@pytest.mark.parametrize("name", SCATTERED)
def test_light_in_fibre_takes_three_times_the_published_delays_and_a_detour_more(name: str) -> None:
    given = load_topology(name)
    fibre = given.with_fibre_delays(1.5)
    for before, after in zip(given.links, fibre.links, strict=True):
        assert before.delay_s is not None and after.delay_s is not None
        if {before.a, before.b} & set(fibre.without_coordinates):
            assert after == before
        elif before.delay_s >= 1e-4:  # shorter ones are rounded to microseconds
            assert after.delay_s / before.delay_s == pytest.approx(3 * 1.5, rel=0.06)


def client_sites(experiment: Experiment) -> list[str]:
    return [experiment.sites[name] for name in experiment.problem.clients]


def server_sites(experiment: Experiment) -> list[str]:
    return [experiment.sites[server.name] for server in experiment.problem.servers]


@pytest.mark.parametrize(("name", "n_servers"), [("abovenet", 9), ("bellcanada", 26), ("gts-ce", 26)])
def test_places_are_drawn_by_the_seed_alone_and_each_server_has_its_own(name: str, n_servers: int) -> None:
    first = load_experiment(name)
    assert load_experiment(name).sites == first.sites
    assert load_experiment(name, ["workload.rate=0.5", "workload.n_requests=7"]).sites == first.sites
    assert load_experiment(name, ["seed=1"]).sites != first.sites
    assert len(set(server_sites(first))) == first.problem.n_servers == n_servers
    assert not set(client_sites(first)) & set(server_sites(first))


@pytest.mark.parametrize("name", SCATTERED)
def test_the_problem_has_the_round_trips_of_the_places_drawn(name: str) -> None:
    experiment = load_experiment(name)
    clients, servers = client_sites(experiment), server_sites(experiment)
    matrix_s = load_topology(name).rtt_matrix_s([*clients, *servers])
    assert experiment.problem.raw_rtt_s[0] == pytest.approx(matrix_s[0][1:], rel=1e-12)
    for row, expected in zip(experiment.problem.server_rtt_s, matrix_s[1:], strict=True):
        assert row == pytest.approx(expected[1:], rel=1e-12)


def test_more_servers_keep_the_places_of_fewer_and_more_clients_do_not_move_them() -> None:
    few = load_experiment("abovenet", ["servers.1.count=2"])
    more = load_experiment("abovenet", ["servers.1.count=6"])
    assert server_sites(more)[: len(server_sites(few))] == server_sites(few)
    assert client_sites(more) == client_sites(few)
    crowd = load_experiment("abovenet", ["clients.count=5"])
    assert server_sites(crowd) == server_sites(few)
    assert client_sites(crowd)[0] == client_sites(few)[0]
    assert len(set(client_sites(crowd))) == 5


def test_a_named_place_is_kept_and_not_drawn_again() -> None:
    experiment = load_experiment("abovenet", ["clients.site=abovenet-05"])
    assert client_sites(experiment) == ["abovenet-05"]
    assert "abovenet-05" not in server_sites(experiment)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("clients.site=abovenet-5", 'unknown node "abovenet-5"; nodes of abovenet: abovenet-00'),
        ("servers.0.count=23", 'is "any" for 25 servers, but abovenet has only 23 nodes'),
        ("network.topology=abovnet", 'neither a shipped topology.*"abovenet"'),
    ],
)
def test_places_that_cannot_be_had_are_refused_in_one_sentence(change: str, sentence: str) -> None:
    with pytest.raises(ScenarioError, match=sentence) as caught:
        load_experiment("abovenet", [change])
    assert "\n" not in str(caught.value)
