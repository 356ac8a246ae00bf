"""When every message should have arrived, given when it was sent: the links of the closed model.

There are two kinds. Links that carry messages in turn are arithmetic of their own. Those that carry them in parts are the
simulator's (``testbed.fast``): they are used where short messages overtake the parts of long ones, or pairs of nodes share links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nodes import framesizes
from nodes.framesizes import FrameSize
from nodes.prefixes import MAX_PAGES, PAGE_ID_BYTES, reusable
from policies.links import Link, Pair
from policies.problem import Hop
from testbed.experiments.experiment import Experiment, NetworkPart
from testbed.experiments.stub import kept_tokens
from testbed.experiments.timeline import Timeline
from testbed.fast.events import EventQueue
from testbed.fast.lines import Line
from testbed.fast.links import Links
from testbed.faultkinds import KINDS
from testbed.records.events import FaultEvent, FaultHappened, FaultOver
from testbed.results.changes import as_carried_out, as_intended
from testbed.results.hop_table import HopTable
from testbed.results.logs import RequestRecord, RunRecords
from testbed.results.messages import Array, Messages, each_of, messages_of_hops, messages_that_open

_KEEP_CONNECTIONS = frozenset(
    name for name, kind in KINDS.items() if kind.state in (None, "halted", "online")
)
"""Kinds of fault after which the server's process is still there: slower, halted or continued."""
_AFTER_ALL_S = 1e6
"""Later after the last message was sent than any arrives."""


def fill_network(
    experiment: Experiment, records: RunRecords, table: HopTable, clients: NDArray[np.int64]
) -> None:
    """Fill in the model's network times of all hops, and when chains should have been open.

    ``clients``: the number of each row's client.
    """
    of_hops, network = messages_of_hops(experiment, table, clients), experiment.network
    lacks = {
        "short messages that overtake the parts of long ones": of_hops.overtake(),
        "links that pairs of nodes share": any(
            network.shared_paths.get(pair) for pair in network.links if experiment.uses(pair)
        ),
    }
    if any(lacks.values()) and _are_known(experiment, records):
        _InParts(experiment, table, of_hops).carry(records.requests)
        table.model_links = "in parts"
    else:
        openings = messages_that_open(experiment, records)
        _carry_in_turn(experiment, records, table, of_hops.joined(openings))
        table.links_lack = [what for what, is_there in lacks.items() if is_there]


def _are_known(experiment: Experiment, records: RunRecords) -> bool:
    """Return whether links and connections were always what the scenario says, but for what is random."""
    is_as_planned = all(change.at_s == change.planned_at_s for change in records.changes)
    has_lost = (
        not all(map(_keeps_connections, records.faults))
        or records.replays
        or any(refusal.broken for record in records.requests for _, refusal, _ in record.attempts)
    )
    return is_as_planned and not has_lost


def _keeps_connections(event: FaultEvent) -> bool:
    """Return whether all connections outlive a fault."""
    if isinstance(event, FaultHappened):
        return not event.applies or event.kind in _KEEP_CONNECTIONS
    return isinstance(event, FaultOver)


def _without_chance(network: NetworkPart) -> NetworkPart:
    """Return the network without jitter and random loss, which the model has not."""

    def sure(links: Mapping[Pair, Link]) -> dict[Pair, Link]:
        return {
            pair: Link(link.delay_s, link.rate_bps, loss_ratio=float(link.loss_ratio >= 1))
            for pair, link in links.items()
        }

    changes = tuple(replace(change, links=sure(change.links)) for change in network.changes)
    return replace(network, links=sure(network.links), changes=changes)


def _note(table: HopTable, sent: Messages, arrives_at_s: Array, waits_s: Array) -> None:
    """Add the times of messages to their rows of the table: at most one per row, since ``+=`` adds once."""
    is_hop = sent.row >= 0
    row = sent.row[is_hop]
    table.model_link_queue_s[row] += waits_s[is_hop]
    table.model_network_s[row] += arrives_at_s[is_hop] - sent.sent_at_s[is_hop]


def _carry_in_turn(experiment: Experiment, records: RunRecords, table: HopTable, messages: Messages) -> None:
    """Carry one message after the other on the link of every pair of nodes, in the order of their sending."""
    n_servers = experiment.problem.n_servers
    names = [*(s.name for s in experiment.problem.servers), *experiment.problem.clients]
    link = _InTurn(experiment, records)
    # Messages of clients first: a server replies to an opening when it arrives.
    is_clients = messages.sender >= n_servers
    answers = []
    for pair, sent in messages.chosen(is_clients).by_pair():
        starts_at_s, arrives_at_s = link.carry((names[pair[0]], names[pair[1]]), sent)
        _note(table, sent, arrives_at_s, starts_at_s - sent.sent_at_s)
        is_opening = sent.row < 0
        opened, at_s = sent.chosen(is_opening), arrives_at_s[is_opening]
        sizes = each_of(experiment, framesizes.OK, len(at_s))
        answers.append(
            Messages(opened.receiver, opened.sender, at_s, at_s, opened.row, opened.opening, *sizes)
        )
    for pair, sent in messages.chosen(~is_clients).joined(*answers).by_pair():
        starts_at_s, arrives_at_s = link.carry((names[pair[0]], names[pair[1]]), sent)
        _note(table, sent, arrives_at_s, starts_at_s - sent.sent_at_s)
        is_opening = sent.row < 0
        for request, at_s in zip(
            sent.opening[is_opening].tolist(), arrives_at_s[is_opening].tolist(), strict=True
        ):
            table.model_opened_at_s[request] = max(table.model_opened_at_s.get(request, -math.inf), at_s)


class _InParts:
    """The simulator's links, with all of their planned changes, but without what is random."""

    def __init__(self, experiment: Experiment, table: HopTable, messages: Messages) -> None:
        self._queue = EventQueue()
        network = _without_chance(experiment.network)
        self._links = Links(self._queue, experiment, network)
        self._n_servers, self._clients = experiment.problem.n_servers, experiment.problem.clients
        self._forwarding, self._changes = experiment.problem.forwarding, network.changes
        self._table, self._messages = table, messages
        self._page_tokens = kept_tokens(experiment)
        self._arrives_at_s, self._waits_s = messages.sent_at_s.copy(), np.zeros(len(messages.row))

    def carry(self, requests: Sequence[RequestRecord]) -> None:
        """Carry the messages of hops, and all that opens and closes chains, from when they were sent."""
        queue, messages = self._queue, self._messages
        order = np.lexsort((messages.row, messages.arrived_at_s, messages.sent_at_s))
        # Between two hops in a row on one server there is no link.
        order = order[messages.sender[order] != messages.receiver[order]]
        columns = messages.sent_at_s, messages.sender, messages.receiver, messages.size
        self._coming = zip(order.tolist(), *(column[order].tolist() for column in columns), strict=True)
        self._links.follow(self._changes)
        self._plan_next()
        for record in requests:
            for number, (chain, refusal, at_s) in enumerate(record.attempts):
                if chain and refusal.refused:
                    queue.at(at_s, self._open, record, chain, refusal.refused, number)
            if record.opening_at_s is not None and not record.was_open:
                queue.at(record.opening_at_s, self._open, record, record.chain)
            if record.ended_at_s is not None:
                queue.at(record.ended_at_s, self._close, record)
        queue.at(float(messages.sent_at_s.max(initial=0.0)) + _AFTER_ALL_S, queue.stop)
        queue.run()
        is_there = messages.receiver < self._n_servers
        for which in (is_there, ~is_there):
            sent = messages.chosen(which)
            _note(self._table, sent, self._arrives_at_s[which], self._waits_s[which])

    def _plan_next(self) -> None:
        """Plans the next message; all at once would take much memory."""
        if (coming := next(self._coming, None)) is not None:
            i, at_s, *message = coming
            self._queue.at(at_s, self._at_last, i, *message)

    def _at_last(self, *message: Any) -> None:
        """Sends a message behind all that happens at its instant: it is what follows from that."""
        self._queue.at(self._queue.now_s, self._send, *message)
        self._plan_next()

    def _send(self, i: int, sender: int, receiver: int, size: FrameSize) -> None:
        is_there = receiver < self._n_servers
        node, server = (sender, receiver) if is_there else (receiver, sender)
        source = node - self._n_servers if node >= self._n_servers else len(self._clients) + node
        there, back = self._links.up(source, server), self._links.down(source, server)
        line = there if is_there else back
        line.send(size, self._arrived, i, line.idle_s(size), back if is_there and self._forwarding else None)

    def _arrived(self, i: int, idle_s: float, accepts: Line | None) -> None:
        now_s = self._arrives_at_s[i] = self._queue.now_s
        self._waits_s[i] = max(now_s - self._messages.sent_at_s[i] - idle_s, 0.0)
        if accepts is not None:
            accepts.tell(framesizes.OK)  # the answer to a push, before the server computes

    def _open(
        self, record: RequestRecord, chain: Sequence[Hop], refused: Collection[int] = (), number: int = 0
    ) -> None:
        """Opens a chain; if some servers refuse, the others are closed again. ``number``: that of a refused attempt."""
        began_at_s, client = self._queue.now_s, self._clients.index(record.client)
        servers = [hop[0] for hop in chain]

        def answered() -> None:
            if refused:
                others = [(server, framesizes.OK) for server in servers if server not in refused]
                self._ask(client, framesizes.CLOSE, others, closed)
            else:
                self._table.model_opened_at_s[record.index] = self._queue.now_s

        def closed() -> None:
            self._table.model_attempts_s[record.index, number] = self._queue.now_s - began_at_s

        n_pages = self._n_pages(record)
        opened = framesizes.FOUND if n_pages else framesizes.OK
        answers = [(server, framesizes.ERROR if server in refused else opened) for server in servers]
        self._ask(client, framesizes.opening(n_pages, forwarding=self._forwarding), answers, answered)

    def _n_pages(self, record: RequestRecord) -> int:
        """Returns how many pages of the prompt an opening names, which its servers may have kept."""
        if self._page_tokens is None:
            return 0
        return min(MAX_PAGES, reusable(record.n_input_tokens, self._page_tokens))

    def _close(self, record: RequestRecord) -> None:
        """Closes a chain whose request has ended."""
        n_more = len(record.pages) // PAGE_ID_BYTES - self._n_pages(record)
        size = framesizes.keeping(n_more) if record.pages else framesizes.CLOSE
        answers = [(hop[0], framesizes.OK) for hop in record.chain]
        self._ask(self._clients.index(record.client), size, answers, lambda: None)

    def _ask(
        self,
        client: int,
        question: FrameSize,
        answers: Sequence[tuple[int, FrameSize]],
        then: Callable[[], None],
    ) -> None:
        """Sends servers a question; ``then`` is called when the answers of all have come."""
        n_left = len(answers)

        def answered() -> None:
            nonlocal n_left
            n_left -= 1
            if not n_left:
                then()

        for server, answer in answers:
            there, back = self._links.up(client, server), self._links.down(client, server)
            there.send(question, back.send, answer, answered)
        if not answers:
            then()


class _InTurn:
    """The run's links, FIFO, with all of their changes."""

    def __init__(self, experiment: Experiment, records: RunRecords) -> None:
        self._timeline = Timeline(experiment, as_carried_out(experiment, records))
        self._planned = Timeline(experiment, as_intended(experiment, records))
        self._is_changing = bool(records.changes)

    def carry(self, pair: tuple[str, str], messages: Messages) -> tuple[Array, Array]:
        """Return when each of ``messages``, given in the order of their sending, goes out and arrives."""
        timeline = self._timeline
        starts_at_s, arrives_at_s = [], []
        free_at_s = -math.inf
        columns = (messages.sent_at_s, messages.arrived_at_s, messages.n_bytes)
        for sent_at_s, arrived_at_s, n_bytes in zip(*(column.tolist() for column in columns), strict=True):
            start_s = max(sent_at_s, free_at_s)
            if self._is_changing:
                start_s = self._up_again(pair, start_s, arrived_at_s)
            free_at_s = timeline.through_at_s(pair, start_s, n_bytes, arrived_at_s)
            starts_at_s.append(start_s)
            arrives_at_s.append(free_at_s + timeline.link(pair, start_s).delay_s)
        return np.array(starts_at_s), np.array(arrives_at_s)

    def _up_again(self, pair: tuple[str, str], ready_at_s: float, arrived_at_s: float) -> float:
        """Return when a message that is ready at ``ready_at_s`` goes out, given when it really arrived."""
        start_s = departs_at_s(self._timeline, pair, ready_at_s)
        if start_s == ready_at_s and self._planned.is_cut(pair, ready_at_s):
            # Sent while the cut was being carried out: its arrival shows whether the cut held it back.
            held_until_s = departs_at_s(self._timeline, pair, departs_at_s(self._planned, pair, ready_at_s))
            return held_until_s if arrived_at_s > held_until_s else start_s
        return start_s


def departs_at_s(timeline: Timeline, pair: tuple[str, str], at_s: float) -> float:
    """Return when a message that is ready at ``at_s`` goes out: on a cut link when that is up again.

    If the link is never up again, returns ``at_s``: the message has arrived, so it went out before the cut.
    """
    up_at_s = timeline.up_at_s(pair, at_s)
    return up_at_s if math.isfinite(up_at_s) else at_s
