"""Use of a run's links, from when its clients and servers sent and received the messages with hidden states.

Every network has these instants. The links' rates and delays are those in force, so use is what the messages' bytes
took of them, and a wait is what a message took beyond its bytes and the delay: it was behind others, or its
connection's window let less through; jitter and losses are in it, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from netem.flows import Tcp
from nodes import framesizes
from policies.links import Link
from testbed.experiments.experiment import Experiment, NetworkChange
from testbed.experiments.timeline import Pair
from testbed.fast.lines import bytes_on_wire
from testbed.records.links import LinksUsed, LinkUse, ends_of
from testbed.results.changes import as_carried_out
from testbed.results.logs import RunRecords
from testbed.results.model import HopTable, Messages, by_pair, clients_of, messages_of

Array = NDArray[np.float64]


class OnLink(NamedTuple):
    """What messages did on one link; columns with a row per message.

    ``row``: the message's row in the ``HopTable``. ``n_bits``: its bits on the wire. ``left_at_s``: when the last of
    them left the link. ``busy_s``: how long the link took for them. With nothing else on the link, which may change
    meanwhile, the message takes ``transmission_s``, the time that the link is cut, and ``delay_s`` to its arrival; it took
    ``wait_s`` longer.
    """

    row: NDArray[np.int64]
    n_bits: Array
    sent_at_s: Array
    left_at_s: Array
    busy_s: Array
    delay_s: Array
    transmission_s: Array
    wait_s: Array


def use_of_links(
    experiment: Experiment, records: RunRecords, hops: HopTable, *, shares_links: bool
) -> LinksUsed:
    """Returns the use of every link from 0 to the last request's end. ``shares_links``: the network has shared ones."""
    network = experiment.network
    uses: list[tuple[str, str, LinkUse]] = []
    of_shared: dict[str, list[OnLink]] = {}
    clients, changes = clients_of(experiment, records, hops), as_carried_out(experiment, records)
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
    until_s = max((record.last_seen_at_s for record in records.requests), default=0.0)
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
    tcp = Tcp.of(network.tcp, network.mtu)
    changed: dict[Pair, list[tuple[float, Link]]] = {}
    for change in changes:
        for pair, link in change.links.items():
            changed.setdefault(pair, []).append((change.at_s, link))
    for (a, b), sent in by_pair(messages_of(experiment, hops, problem.n_servers + clients)):
        pair = names[a], names[b]
        if a == b:  # two hops in a row on one server
            continue
        is_back = b >= problem.n_servers
        n_bits = 8 * _wire_bytes(tcp, sent, hops.hop[sent.row], is_back, problem.forwarding)
        most_bps = min(
            (network.shared_bps[name] for name in network.shared_paths.get(pair, ())), default=math.inf
        )
        over_time = LinkOverTime(network.links[pair], changed.get(pair, ()), most_bps)
        yield pair, over_time.passed(sent, n_bits)


def _wire_bytes(tcp: Tcp, sent: Messages, hop: NDArray[np.int64], is_back: bool, forwarding: bool) -> Array:
    """Returns the bytes on the wire of each message, which is that of hop number ``hop``, or its result."""
    size_of = framesizes.back if is_back else framesizes.there
    kinds, which = np.unique(np.stack([sent.n_bytes, hop + is_back]), axis=1, return_inverse=True)
    sizes = [
        bytes_on_wire(tcp, size_of(number, forwarding=forwarding)(n_bytes))
        for n_bytes, number in kinds.T.tolist()
    ]
    return np.array(sizes, dtype=np.float64)[which.reshape(-1)]


class LinkOverTime:
    """The link of one pair of nodes with its changes (instant, link): how much it can carry until when.

    ``most_bps``: the rate of the narrowest shared link on the way. A cut link carries nothing.
    """

    def __init__(self, link: Link, changes: Sequence[tuple[float, Link]], most_bps: float) -> None:
        links = [(0.0, link), *changes]
        self._since_s = np.array([at_s for at_s, _ in links])
        self._delays_s = np.array([one.delay_s for _, one in links])
        self._rates_bps = np.array(
            [0.0 if one.loss_ratio >= 1 else min(one.rate_bps, most_bps) for _, one in links]
        )
        self._is_up = (self._rates_bps > 0).astype(np.float64)

    def _since_start(self, per_s: Array, at_s: Array) -> Array:
        """Returns how much has come together until ``at_s`` of what comes ``per_s`` of the links in force."""
        until = np.concatenate([[0.0], np.cumsum(np.diff(self._since_s) * per_s[:-1])])
        last = np.searchsorted(self._since_s, at_s, "right").clip(1) - 1
        found: Array = until[last] + (at_s - self._since_s[last]) * per_s[last]
        return found

    def _carried(self, at_s: Array) -> Array:
        """Returns how many bits it could have carried until ``at_s``."""
        return self._since_start(self._rates_bps, at_s)

    def _carried_at_s(self, n_bits: Array, side: Literal["left", "right"] = "left") -> Array:
        """Returns when it could first (``left``) or last have carried ``n_bits``; infinite if it never could."""
        until_bits = self._carried(self._since_s)
        last = np.searchsorted(until_bits, n_bits, side).clip(1) - 1
        rate_bps, never_s = self._rates_bps[last], np.full(len(n_bits), math.inf)
        more_s = np.divide(n_bits - until_bits[last], rate_bps, out=never_s, where=rate_bps > 0)
        at_s: Array = self._since_s[last] + more_s
        return at_s

    def passed(self, sent: Messages, n_bits: Array) -> OnLink:
        """Returns what messages of ``n_bits`` did on it."""
        delay_s = self._delays_s[np.searchsorted(self._since_s, sent.sent_at_s, "right").clip(1) - 1]
        idle_left_at_s = self._carried_at_s(self._carried(sent.sent_at_s) + n_bits)
        took_s = sent.arrived_at_s - sent.sent_at_s
        is_idle = np.isfinite(idle_left_at_s)  # else it was cut after the message had gone
        idle_left_at_s = np.where(is_idle, idle_left_at_s, sent.arrived_at_s - delay_s)
        idle_s = np.where(is_idle, idle_left_at_s + delay_s - sent.sent_at_s, took_s)
        up_at_s = (self._since_start(self._is_up, at_s) for at_s in (sent.sent_at_s, idle_left_at_s))
        transmission_s = np.where(is_idle, -np.subtract(*up_at_s), took_s - delay_s)
        left_at_s = sent.arrived_at_s - delay_s
        began_at_s = self._carried_at_s(self._carried(left_at_s) - n_bits, "right")
        busy_s = self._since_start(self._is_up, left_at_s) - self._since_start(self._is_up, began_at_s)
        busy_s = busy_s.clip(0.0, np.maximum(left_at_s - sent.sent_at_s, 0.0))
        waits = delay_s, transmission_s, took_s - idle_s
        return OnLink(sent.row, n_bits, sent.sent_at_s, left_at_s, busy_s, *waits)
