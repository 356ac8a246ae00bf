"""Which node is on which machine."""

from __future__ import annotations

from collections import Counter

import pytest

from testbed.errors import UserError
from testbed.experiments.experiment import Machine
from testbed.runtime.hosts.spread import spread

SITES = {"a": "Cluster0", "b": "Cluster0", "c": "Cluster1", "d": "Cluster1"}


def machine(name: str, *servers: str) -> Machine:
    return Machine(name, {"CPU": 1}, servers)


def test_servers_are_shared_in_proportion_and_clients_stay_here() -> None:
    servers = [f"s{number}" for number in range(12)]
    sites = dict.fromkeys(servers, "x")
    where = spread(["hub"], servers, sites, [(machine("m"), 1.0), (machine("n"), 3.0)])
    assert where["hub"] == -1
    assert Counter(where[server] for server in servers) == {0: 3, 1: 9}


def test_a_machine_has_the_servers_and_sites_that_it_names_and_the_others_the_rest() -> None:
    named = [(machine("m", "Cluster1", "a"), 1.0), (machine("n"), 1.0)]
    assert spread([], list(SITES), SITES, named) == {"a": 0, "b": 1, "c": 0, "d": 0}


@pytest.mark.parametrize(
    ("machines", "said"),
    [
        ([machine("m", "nowhere"), machine("n")], "hosts.0.servers: there is no server or site 'nowhere'"),
        ([machine("m", "a"), machine("n", "Cluster0")], "hosts.1.servers: a is also on another machine"),
        ([machine("m", "a"), machine("n", "b", "c")], "no machine has d; name them"),
    ],
)
def test_servers_that_cannot_be_spread_over_the_machines_are_refused(
    machines: list[Machine], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        spread([], list(SITES), SITES, [(each, 1.0) for each in machines])
