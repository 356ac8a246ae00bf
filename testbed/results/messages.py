"""The messages between a run's nodes, as far as their times are those of hops or of openings of chains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from netem.flows import Tcp
from nodes import framesizes
from nodes.framesizes import FrameSize
from nodes.wire import SMALL_BYTES
from testbed.experiments.experiment import Experiment
from testbed.fast.lines import bytes_on_wire
from testbed.results.hop_table import HopTable
from testbed.results.logs import RunRecords

Array = NDArray[np.float64]


class Messages(NamedTuple):
    """Columns with one row per message between nodes. Nodes are numbers: servers first, then clients.

    ``row`` is the message's row in the ``HopTable``, or -1 for an opening; ``opening`` is the request of an
    opening, or -1. ``size`` has its ``FrameSize``, and ``n_bytes`` its bytes on the wire with all headers.
    """

    sender: NDArray[np.int64]
    receiver: NDArray[np.int64]
    sent_at_s: Array
    arrived_at_s: Array
    row: NDArray[np.int64]
    opening: NDArray[np.int64]
    size: NDArray[Any]
    n_bytes: NDArray[np.int64]

    def chosen(self, which: NDArray[Any]) -> Messages:
        return Messages(*(column[which] for column in self))

    def joined(self, *others: Messages) -> Messages:
        return Messages(*(np.concatenate(columns) for columns in zip(self, *others, strict=True)))

    def by_pair(self) -> Iterator[tuple[tuple[int, int], Messages]]:
        """Yield the messages of each pair of nodes (sender, receiver), in the order of their sending."""
        keys = (self.row, self.arrived_at_s, self.sent_at_s, self.receiver, self.sender)
        ordered = self.chosen(np.lexsort(keys))
        pairs = np.stack([ordered.sender, ordered.receiver], axis=1)
        begins = np.flatnonzero(np.any(np.diff(pairs, axis=0, prepend=-1), axis=1)).tolist()
        for begin, end in pairwise([*begins, len(pairs)]):
            yield (int(pairs[begin, 0]), int(pairs[begin, 1])), ordered.chosen(np.arange(begin, end))

    def overtake(self) -> bool:
        """Return whether a smaller message was sent while a large one, which goes in parts, was on its way between the same nodes."""
        for _, sent in self.by_pair():
            is_large = sent.n_bytes > SMALL_BYTES
            until_s = np.maximum.accumulate(np.where(is_large, sent.arrived_at_s, -np.inf))
            if np.any(~is_large & (sent.sent_at_s < until_s)):
                return True
        return False


def messages_of_hops(experiment: Experiment, table: HopTable, clients: NDArray[np.int64]) -> Messages:
    """Return the messages of all hops. ``clients``: the number of each row's client.

    With forwarding, the server of the row before sends to the next one, and only the last to the client.
    """
    rows = np.arange(len(table.request))
    clients = experiment.problem.n_servers + clients
    sender = clients
    if experiment.problem.forwarding:
        sender = np.where(table.hop > 0, np.roll(table.server, 1), clients)
    none = np.full(len(rows), -1)
    there, back = (_sizes(experiment, table, is_back=is_back) for is_back in (False, True))
    up = Messages(sender, table.server, table.sent_at_s, table.arrived_at_s, rows, none, *there)
    down = Messages(table.server, clients, table.departed_at_s, table.received_at_s, rows, none, *back)
    return up.joined(down.chosen(table.down_bytes > 0))


def messages_that_open(experiment: Experiment, records: RunRecords) -> Messages:
    """Return the messages that open chains: one to each server of every admitted request, all at once."""
    first = experiment.problem.n_servers
    number = {name: first + i for i, name in enumerate(experiment.problem.clients)}
    found = [
        (number[record.client], hop[0], record.opening_at_s, record.opening_at_s, -1, record.index)
        for record in records.requests
        if record.opening_at_s is not None and not record.was_open
        for hop in record.chain
    ]
    columns = np.array(found, dtype=np.float64).reshape(len(found), 6).T
    sender, receiver, row, opening = (columns[i].astype(np.int64) for i in (0, 1, 4, 5))
    sizes = each_of(experiment, framesizes.opening(0, forwarding=experiment.problem.forwarding), len(found))
    return Messages(sender, receiver, columns[2], columns[3], row, opening, *sizes)


def each_of(experiment: Experiment, size: FrameSize, n: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the last columns of ``n`` messages of one size."""
    return _columns(experiment, [size], np.zeros(n, dtype=np.int64))


def _sizes(
    experiment: Experiment, table: HopTable, *, is_back: bool
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the last columns of each row's messages to the server, or of its answers to the client."""
    size_of = partial(
        framesizes.back if is_back else framesizes.there, forwarding=experiment.problem.forwarding
    )
    payloads, numbers = (table.down_bytes, table.hop + 1) if is_back else (table.up_bytes, table.hop)
    most = int(numbers.max(initial=0)) + 1  # one number for both: pairs would be sorted in 40 times the time
    kinds, which = np.unique(payloads * most + numbers, return_inverse=True)
    return _columns(experiment, [size_of(kind % most)(kind // most) for kind in kinds.tolist()], which)


def _columns(
    experiment: Experiment, sizes: Sequence[FrameSize], which: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    tcp = Tcp.of(experiment.network.tcp, experiment.network.mtu)
    objects = np.empty(len(sizes), dtype=object)
    for i, size in enumerate(sizes):
        objects[i] = size  # numpy would make columns of a list of tuples
    n_bytes = np.array([bytes_on_wire(tcp, size) for size in sizes], dtype=np.int64)
    return objects[which], n_bytes[which]
