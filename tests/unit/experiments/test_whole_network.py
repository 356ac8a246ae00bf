"""The network between all nodes, where programs of the user's may send anything to anybody."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

from policies.links import Link
from testbed.experiments.experiment import Experiment
from testbed.experiments.whole import whole_network
from testbed.runtime.wiring import network_spec

Load = Callable[..., Experiment]
TWO_CLIENTS = ("[clients]", '[[clients]]\nsite = "A"\n[[clients]]')


def test_in_real_time_all_pairs_of_nodes_have_links_also_where_clients_are_hubs(load: Load) -> None:
    e = load(replace=TWO_CLIENTS)
    spec = network_spec(e, "run")
    assert set(spec.links) == set(permutations(e.nodes, 2))
    between = spec.links["a100-0", "a100-1"], spec.links["client-0", "client-1"]
    assert [(link.delay_s, link.rate_bps) for link in between] == [(0.0025, 1e9), (0.05, 1e8)]


def test_in_virtual_time_only_pairs_that_exchange_messages_have_links(load: Load) -> None:
    links = network_spec(load(replace=TWO_CLIENTS), "run", is_virtual=True).links
    assert all(("client" in a) != ("client" in b) for a, b in links)


def test_clients_whose_sites_have_no_row_have_no_link(load: Load) -> None:
    e = load(replace=("[clients]", '[[clients]]\nsite = "B"\n[[clients]]'))
    missing = set(permutations(e.nodes, 2)) - set(whole_network(e).links)
    assert missing == {("client-0", "client-1"), ("client-1", "client-0")}


def test_events_change_links_between_clients_too(load: Load) -> None:
    replaced = (TWO_CLIENTS[0], TWO_CLIENTS[1] + '\nsite = "A"\n[[clients]]')
    e = load("network.event=[{at='1 s', site='A', down=true}]", replace=replaced)
    whole = whole_network(e)
    assert [change.at_s for change in whole.changes] == [1.0]
    assert e.network.changes[0].links.items() < whole.changes[0].links.items()
    assert whole.changes[0].links["client-0", "client-1"] == Link(0.0025, 1e9, 0.0, 1.0)


def test_sites_own_links_limit_links_between_clients_too_after_their_events(load: Load) -> None:
    replaced = (TWO_CLIENTS[0], TWO_CLIENTS[1] + '\nsite = "B"\n[[clients]]')
    event = "network.event=[{at='1 s', site='A', rate_factor=0.5}]"
    whole = whole_network(load('sites=[{name="A",up="30 Mbit/s"}]', event, replace=replaced))
    pairs = ("client-0", "client-1"), ("client-1", "client-0")
    assert sorted(whole.links[pair].rate_bps for pair in pairs) == [3e7, 1e8]
    assert whole.changes[0].links.keys() & set(pairs) == {
        pair for pair in pairs if whole.links[pair].rate_bps == 1e8
    }
