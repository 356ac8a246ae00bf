"""Computes the network between all nodes, also between those that the testbed's own traffic never uses.

Programs of the user's can send to any node. ``Experiment.links`` has only the links that clients, servers and
``[[node]]`` need, which is enough where no other program can run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from policies.links import Link, Pair
from testbed.experiments.events import network_changes
from testbed.experiments.experiment import Experiment, NetworkChange
from testbed.experiments.shared_links import SharedLinks, narrowed


@dataclass(frozen=True)
class WholeNetwork:
    """``links`` of all ordered pairs of nodes, and their ``changes`` in the order of time.

    ``most_bps`` has the rate of the narrowest shared link on the way of the pairs that have one.
    """

    links: Mapping[Pair, Link]
    changes: tuple[NetworkChange, ...]
    most_bps: Mapping[Pair, float]


def whole_network(experiment: Experiment, is_virtual: bool = False) -> WholeNetwork:
    """Return the links and changes of ``experiment``, and those between its clients.

    Two clients whose sites have no row in the network have no link. In virtual time no user's programs run,
    and only what ``experiment`` has is returned.
    """
    network = experiment.network
    most_bps = SharedLinks(network.shared_bps, network.shared_paths).narrowest_bps()
    if is_virtual:
        return WholeNetwork(network.links, network.changes, most_bps)
    clients, sites, by_site = experiment.problem.clients, experiment.sites, network.site_links
    others = {
        (a, b): by_site[sites[a], sites[b]]
        for a in clients
        for b in clients
        if a != b and (sites[a], sites[b]) in by_site
    }
    changes = {change.at_s: change for change in network.changes}
    for more in network_changes(network.plans, others, sites, most_bps):
        known = changes.setdefault(more.at_s, more)
        changes[more.at_s] = replace(known, links={**known.links, **more.links})
    return WholeNetwork(
        {**network.links, **narrowed(others, most_bps)},
        tuple(changes[at_s] for at_s in sorted(changes)),
        most_bps,
    )
