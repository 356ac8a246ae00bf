"""Use of a run's links, from when its clients and servers sent and received the messages with hidden states.

Every network has these instants. The links' rates and delays are those in force, so use is what the messages' bytes
took of them, and a wait is what a message took beyond its bytes and the delay: it was behind others, or its
connection's window let less through; jitter and losses are in it, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.links import Link, Pair
from testbed.experiments.experiment import Experiment, NetworkChange
from testbed.fast.overtime import LinkOverTime, OnLink
from testbed.records.links import LinksUsed, LinkUse, ends_of
from testbed.results.changes import as_carried_out
from testbed.results.hop_table import HopTable
from testbed.results.logs import RunRecords
from testbed.results.messages import messages_of_hops
from testbed.results.model import clients_of

Array = NDArray[np.float64]


def use_of_links(
    experiment: Experiment, records: RunRecords, hops: HopTable, *, shares_links: bool
) -> LinksUsed:
    """Returns the use of every link from 0 to the last request's end. ``shares_links``: the network has shared ones."""
    clients, changes = clients_of(experiment, records, hops), as_carried_out(experiment, records)
    until_s = max((record.last_seen_at_s for record in records.requests), default=0.0)
    return use_by_hops(experiment, hops, clients, changes, until_s, shares_links=shares_links)


def use_by_hops(
    experiment: Experiment,
    hops: HopTable,
    clients: NDArray[np.int64],
    changes: Sequence[NetworkChange],
    until_s: float,
    *,
    shares_links: bool,
) -> LinksUsed:
    """Returns the use of every link from 0 to ``until_s``; the rest is as in ``on_links`` and ``use_of_links``."""
    network = experiment.network
    uses: list[tuple[str, str, LinkUse]] = []
    of_shared: dict[str, list[OnLink]] = {}
    for pair, on_link in on_links(experiment, hops, clients, changes):
        uses.append((*pair, _use(on_link)))
        for name in network.shared_paths.get(pair, ()) if shares_links else ():
            of_shared.setdefault(name, []).append(
                on_link._replace(busy_s=on_link.n_bits / network.shared_bps[name])
            )
    for name, parts in of_shared.items():
        columns: Any = (np.concatenate(column) for column in zip(*parts, strict=True))
        together = OnLink(*columns)
        uses.append((*ends_of(name), _use(together)))
    return LinksUsed(uses, until_s)


def _use(on_link: OnLink) -> LinkUse:
    use = LinkUse()
    use.add(on_link.left_at_s, on_link.busy_s, on_link.wait_s)
    return use


def on_links(
    experiment: Experiment, hops: HopTable, clients: NDArray[np.int64], changes: Sequence[NetworkChange]
) -> Iterator[tuple[Pair, OnLink]]:
    """Yields what the messages of hops did on the link of each pair of nodes.

    ``clients``: the number of the client of each hop. ``changes``: those of links, as they were carried out.
    """
    problem, network = experiment.problem, experiment.network
    names = [*(server.name for server in problem.servers), *problem.clients]
    changed: dict[Pair, list[tuple[float, Link]]] = {}
    for change in changes:
        for pair, link in change.links.items():
            changed.setdefault(pair, []).append((change.at_s, link))
    for (a, b), sent in messages_of_hops(experiment, hops, clients).by_pair():
        pair = names[a], names[b]
        if a == b:  # two hops in a row on one server
            continue
        most_bps = min(
            (network.shared_bps[name] for name in network.shared_paths.get(pair, ())), default=math.inf
        )
        over_time = LinkOverTime(network.links[pair], changed.get(pair, ()), most_bps)
        n_bits = 8.0 * sent.n_bytes.astype(np.float64)
        yield pair, over_time.passed(sent.row, sent.sent_at_s, sent.arrived_at_s, n_bits)
