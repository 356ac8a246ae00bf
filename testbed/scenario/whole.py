"""The network between all nodes, also those that none of ours sends to: what programs of the user's find there.

``Experiment`` has what its own clients and servers use, which is enough wherever nobody else can send
anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from testbed.scenario.events import network_changes
from testbed.scenario.experiment import Experiment, Link, NetworkChange

Pair = tuple[str, str]


@dataclass(frozen=True)
class WholeNetwork:
    """``links`` of all ordered pairs of nodes, and their ``changes`` in the order of time."""

    links: Mapping[Pair, Link]
    changes: tuple[NetworkChange, ...]


def whole_network(experiment: Experiment, is_virtual: bool = False) -> WholeNetwork:
    """What ``experiment`` has, and the same for pairs of clients. Two whose sites have no row have no link.

    Nobody else sends anything where time is virtual: then it is what ``experiment`` has.
    """
    if is_virtual:
        return WholeNetwork(experiment.links, experiment.changes)
    clients, sites, by_site = experiment.problem.clients, experiment.sites, experiment.site_links
    others = {
        (a, b): by_site[sites[a], sites[b]]
        for a in clients
        for b in clients
        if a != b and (sites[a], sites[b]) in by_site
    }
    changes = {change.at_s: change for change in experiment.changes}
    for more in network_changes(experiment.events, others, sites):
        known = changes.setdefault(more.at_s, more)
        changes[more.at_s] = replace(known, links={**known.links, **more.links})
    return WholeNetwork({**experiment.links, **others}, tuple(changes[at_s] for at_s in sorted(changes)))
