"""The closed model: the time that every hop and every opening of a chain should have taken.

A hop takes transmission and propagation each way, and k tau (decode) or k tau^I(l) (prefill) for its k
blocks, plus the calibration's overheads; context and contention count as in the timing stub. With forwarding,
a message goes one way from the server before, and from the last server back to the client. The client's part
of a token comes after its last hop.

- A message is transmitted at the rates that its link has meanwhile, and has the delay at their beginning. On a cut link it waits
  until the link is up again.
- A message's bytes are those on the wire, with its frame and all headers.
- Links are FIFO in the order in which messages were sent in the run. So waiting for another session's message
  is part of the model and not an error of the emulation, and so is waiting for a server that computes
  serially. The parts of long messages, which short ones overtake, are not modelled.
- Errors do not accumulate: every stage begins at its measured instant.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from netem.flows import Tcp
from nodes import framesizes
from nodes.batching import Step, batches_of
from nodes.compute import StubProfile, Turns
from nodes.records import BATCH
from nodes.wire import SMALL_BYTES
from policies.problem import Hop
from testbed.experiments.experiment import Experiment
from testbed.experiments.stub import stub_profile
from testbed.experiments.timeline import Timeline
from testbed.fast.lines import bytes_on_wire
from testbed.results.changes import as_carried_out, as_intended
from testbed.results.logs import RunRecords
from testbed.results.slow import SlowServers

Array = NDArray[np.float64]

_WHOLE = (
    *("request", "token", "hop", "server", "first", "last"),
    *("up_bytes", "down_bytes", "replayed_tokens"),
    *(name for name in BATCH if not name.endswith("_s")),
)
"""Columns of whole numbers."""


class TokenSums(NamedTuple):
    """Columns with one row per token."""

    request: NDArray[np.int64]
    token: NDArray[np.int64]
    model_s: Array
    has_replay: NDArray[np.bool_]


@dataclass
class HopTable:
    """Columns with one row per token and hop, ordered by request and then as logged; scenario seconds.

    ``network_s`` is propagation, transmission and queueing on both links, ``model_link_queue_s`` only the
    queueing. ``compute_s`` includes the calibration's overheads.
    """

    request: NDArray[np.int64]
    token: NDArray[np.int64]
    hop: NDArray[np.int64]
    server: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    sent_at_s: Array
    arrived_at_s: Array
    departed_at_s: Array
    received_at_s: Array
    up_bytes: NDArray[np.int64]
    down_bytes: NDArray[np.int64]
    client_s: Array
    """The client's time before it sent this hop; its time after the last hop is ``tail_s``."""
    tail_s: Array
    model_network_s: Array
    model_link_queue_s: Array
    model_compute_s: Array
    replayed_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Hidden states in a message of a replay; 0 in all other rows. Default: all 0."""
    batch_steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    batch_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    batch_context_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    batch_prompt_end: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    batch_blocks: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    batch_began_at_s: Array = field(default_factory=lambda: np.zeros(0))
    """What the server computed together with this step (``nodes.batching.Composition``). Default: all 0."""
    model_client_s: Array = field(default_factory=lambda: np.zeros(0))
    """The client's computing for the token, in the row of its last hop. Default: all 0."""
    model_opened_at_s: dict[int, float] = field(default_factory=dict)
    """By request: when its chain should have been open, given when the client sent the opening."""
    has_overtaking: bool = False
    """Whether a smaller message was sent while a large one, which goes in parts, was on its way over the same link."""

    def __post_init__(self) -> None:
        for name in ("replayed_tokens", *BATCH, "model_client_s"):
            if not len(getattr(self, name)):
                setattr(self, name, np.zeros(len(self.request), dtype=getattr(self, name).dtype))

    def begins_token(self) -> NDArray[np.bool_]:
        """Return which rows are the first of their tokens."""
        begins: NDArray[np.bool_] = (np.diff(self.request, prepend=-1) != 0) | (
            np.diff(self.token, prepend=-1) != 0
        )
        return begins

    def tokens(self) -> TokenSums:
        """Sum the hops of each token, in the order of the rows."""
        if not len(self.request):
            return TokenSums(self.request, self.token, np.zeros(0), np.zeros(0, dtype=bool))
        begins = np.flatnonzero(self.begins_token())
        return TokenSums(
            self.request[begins],
            self.token[begins],
            np.add.reduceat(self.model_s, begins),
            np.logical_or.reduceat(self.is_replay, begins),
        )

    @property
    def is_replay(self) -> NDArray[np.bool_]:
        """Rows of replays; their ``client_s`` includes the detection of the failure and the new routing."""
        return self.replayed_tokens > 0

    @property
    def network_s(self) -> Array:
        return (self.arrived_at_s - self.sent_at_s) + (self.received_at_s - self.departed_at_s)

    @property
    def compute_s(self) -> Array:
        return self.departed_at_s - self.arrived_at_s

    @property
    def model_s(self) -> Array:
        return self.model_network_s + self.model_compute_s + self.model_client_s

    @property
    def measured_s(self) -> Array:
        """The hop's whole time with the client's part; the hops of a token sum to the token's time."""
        return self.client_s + self.network_s + self.compute_s + self.tail_s


def hop_table(experiment: Experiment, records: RunRecords) -> HopTable:
    """Return the measured hops of all requests, with the closed model's times."""
    columns: dict[str, Any] = records.hops.columns()
    columns |= {name: columns[name].astype(np.int64) for name in _WHOLE}
    n_rows = len(columns["request"])
    table = HopTable(
        **columns,
        model_network_s=np.zeros(n_rows),
        model_link_queue_s=np.zeros(n_rows),
        model_compute_s=np.zeros(n_rows),
        model_client_s=np.zeros(n_rows),
    )
    clients = clients_of(experiment, records, table)
    table.model_client_s = hub_times_s(experiment, clients, columns["last"])
    drafts_s = _draft_times_s(experiment, table)
    if _overlaps(experiment):  # when a round was sent ahead is given
        drafts_s = np.where(_sent_ahead(table), 0.0, drafts_s) + np.minimum(table.client_s, 0.0)
    table.model_client_s += drafts_s
    _fill_network(experiment, records, table, clients)
    slow = SlowServers(records.faults, [s.name for s in experiment.problem.servers])
    _fill_compute(experiment, records, table, clients, slow)
    return table


def clients_of(experiment: Experiment, records: RunRecords, table: HopTable) -> NDArray[np.int64]:
    """Return the number of the client whose request each row belongs to."""
    number = {name: i for i, name in enumerate(experiment.problem.clients)}
    indices = np.array([record.index for record in records.requests], dtype=np.int64)
    clients = np.array([number[record.client] for record in records.requests], dtype=np.int64)
    return clients[np.searchsorted(indices, table.request)] if len(indices) else indices


def hub_times_s(experiment: Experiment, clients: NDArray[np.int64], last: NDArray[np.int64]) -> Array:
    """Return the clients' computing in seconds by hops' last blocks: only hops at the model's end have it."""
    problem = experiment.problem
    hubs_s = np.array([problem.hub_s(client) for client in range(len(problem.clients))])
    return np.where(last == problem.model.n_blocks, hubs_s[clients], 0.0)


def _draft_times_s(experiment: Experiment, table: HopTable) -> Array:
    """Return the clients' drafting in seconds, in the rows of hops at the model's end."""
    decoding, model = experiment.problem.decoding, experiment.problem.model
    if decoding is None:
        return np.zeros(len(table.request))
    n_sent = table.up_bytes // model.token_bytes
    drafts_s = (n_sent - decoding.n_sent(1) + 1) * decoding.draft_token_s
    has_drafts = (table.token > 0) & (table.last == model.n_blocks) & ~table.is_replay
    return np.where(has_drafts, drafts_s, 0.0)


def _overlaps(experiment: Experiment) -> bool:
    """Return whether several rounds of a session may be away at a time."""
    decoding = experiment.problem.decoding
    return decoding is not None and decoding.in_flight > 1


def _sent_ahead(table: HopTable) -> NDArray[np.bool_]:
    """Return which rows are of rounds that were sent before the token before them was there."""
    numbers = np.cumsum(table.begins_token())
    found: NDArray[np.bool_] = np.isin(numbers, numbers[table.client_s < 0])
    return found


class Messages(NamedTuple):
    """Columns with one row per message between nodes. Nodes are numbers: servers first, then clients.

    ``row`` is the message's row in the ``HopTable``, or -1 for an opening; ``opening`` is the request of an
    opening, or -1.
    """

    sender: NDArray[np.int64]
    receiver: NDArray[np.int64]
    sent_at_s: Array
    arrived_at_s: Array
    row: NDArray[np.int64]
    n_bytes: NDArray[np.int64]
    opening: NDArray[np.int64]


def _fill_network(
    experiment: Experiment, records: RunRecords, table: HopTable, clients: NDArray[np.int64]
) -> None:
    """Fill in the model's network times of all hops, and when chains should have been open."""
    n_servers = experiment.problem.n_servers
    names = [*(s.name for s in experiment.problem.servers), *experiment.problem.clients]
    messages = _joined(messages_of(experiment, table, n_servers + clients), _openings(experiment, records))
    link = _Links(experiment, records)
    # Messages of clients first: a server replies to an opening when it arrives.
    is_clients = messages.sender >= n_servers
    answers = []
    for pair, sent in by_pair(_chosen(messages, is_clients)):
        starts_at_s, arrives_at_s = link.carry((names[pair[0]], names[pair[1]]), sent)
        _note(table, sent, starts_at_s, arrives_at_s)
        table.has_overtaking |= _overtakes(sent)
        is_opening = sent.row < 0
        opened = _chosen(sent, is_opening)
        at_s = arrives_at_s[is_opening]
        answers.append(
            opened._replace(
                sender=opened.receiver,
                receiver=opened.sender,
                sent_at_s=at_s,
                arrived_at_s=at_s,
                n_bytes=np.full(len(at_s), bytes_on_wire(_tcp(experiment), framesizes.OK)),
            )
        )
    for pair, sent in by_pair(_joined(_chosen(messages, ~is_clients), *answers)):
        starts_at_s, arrives_at_s = link.carry((names[pair[0]], names[pair[1]]), sent)
        _note(table, sent, starts_at_s, arrives_at_s)
        table.has_overtaking |= _overtakes(sent)
        is_opening = sent.row < 0
        for request, at_s in zip(
            sent.opening[is_opening].tolist(), arrives_at_s[is_opening].tolist(), strict=True
        ):
            table.model_opened_at_s[request] = max(table.model_opened_at_s.get(request, -math.inf), at_s)


def _note(table: HopTable, sent: Messages, starts_at_s: Array, arrives_at_s: Array) -> None:
    """Add the times of the messages of one pair of nodes to the table's rows."""
    is_hop = sent.row >= 0
    row, sent_at_s = sent.row[is_hop], sent.sent_at_s[is_hop]
    # += with an index array adds once per row. That is enough: a row's two messages belong to two pairs.
    table.model_link_queue_s[row] += starts_at_s[is_hop] - sent_at_s
    table.model_network_s[row] += arrives_at_s[is_hop] - sent_at_s


class _Links:
    """The run's links: FIFO, with their changes."""

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


def messages_of(experiment: Experiment, table: HopTable, clients: NDArray[np.int64]) -> Messages:
    """Return the messages of all hops, their ``n_bytes`` with all headers.

    With forwarding, the server of the row before sends to the next one, and only the last to the client.
    """
    rows = np.arange(len(table.request))
    sender = clients
    if experiment.problem.forwarding:
        sender = np.where(table.hop > 0, np.roll(table.server, 1), clients)
    none = np.full(len(rows), -1)
    up_bytes, down_bytes = (_wire_bytes(experiment, table, is_back=is_back) for is_back in (False, True))
    up = Messages(sender, table.server, table.sent_at_s, table.arrived_at_s, rows, up_bytes, none)
    down = Messages(table.server, clients, table.departed_at_s, table.received_at_s, rows, down_bytes, none)
    return _joined(up, _chosen(down, table.down_bytes > 0))


def _wire_bytes(experiment: Experiment, table: HopTable, *, is_back: bool) -> NDArray[np.int64]:
    """Return the bytes on the wire of each row's message to the server, or of its answer to the client."""
    tcp = _tcp(experiment)
    size_of = partial(
        framesizes.back if is_back else framesizes.there, forwarding=experiment.problem.forwarding
    )
    payloads, numbers = (table.down_bytes, table.hop + 1) if is_back else (table.up_bytes, table.hop)
    most = int(numbers.max(initial=0)) + 1  # one number for both: pairs would be sorted in 40 times the time
    kinds, which = np.unique(payloads * most + numbers, return_inverse=True)
    sizes = [bytes_on_wire(tcp, size_of(kind % most)(kind // most)) for kind in kinds.tolist()]
    return np.array(sizes, dtype=np.int64)[which]


def _tcp(experiment: Experiment) -> Tcp:
    return Tcp.of(experiment.network.tcp, experiment.network.mtu)


def _openings(experiment: Experiment, records: RunRecords) -> Messages:
    """Return the messages that open chains: one to each server of every admitted request, all at once."""
    first = experiment.problem.n_servers
    number = {name: first + i for i, name in enumerate(experiment.problem.clients)}
    n_bytes = bytes_on_wire(_tcp(experiment), framesizes.opening(0, forwarding=experiment.problem.forwarding))
    found = [
        (number[record.client], hop[0], record.opening_at_s, record.opening_at_s, -1, n_bytes, record.index)
        for record in records.requests
        if record.opening_at_s is not None and not record.was_open
        for hop in record.chain
    ]
    columns = np.array(found, dtype=np.float64).reshape(len(found), len(Messages._fields)).T
    whole = (column.astype(np.int64) for column in (*columns[:2], *columns[4:]))
    sender, receiver, row, n_bytes, opening = whole
    return Messages(sender, receiver, columns[2], columns[3], row, n_bytes, opening)


def _chosen(messages: Messages, which: NDArray[Any]) -> Messages:
    return Messages(*(column[which] for column in messages))


def _joined(*parts: Messages) -> Messages:
    return Messages(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def by_pair(messages: Messages) -> Iterator[tuple[tuple[int, int], Messages]]:
    """Yield the messages of each pair of nodes (sender, receiver), in the order of their sending."""
    keys = (messages.row, messages.arrived_at_s, messages.sent_at_s, messages.receiver, messages.sender)
    ordered = _chosen(messages, np.lexsort(keys))
    pairs = np.stack([ordered.sender, ordered.receiver], axis=1)
    begins = np.flatnonzero(np.any(np.diff(pairs, axis=0, prepend=-1), axis=1)).tolist()
    for begin, end in pairwise([*begins, len(pairs)]):
        yield (int(pairs[begin, 0]), int(pairs[begin, 1])), _chosen(ordered, np.arange(begin, end))


def _overtakes(messages: Messages) -> bool:
    """Return ``HopTable.has_overtaking`` for the messages of one pair of nodes; openings do not count."""
    sent = _chosen(messages, messages.row >= 0)
    is_large = sent.n_bytes > SMALL_BYTES
    until_s = np.maximum.accumulate(np.where(is_large, sent.arrived_at_s, -np.inf))
    return bool(np.any(~is_large & (sent.sent_at_s < until_s)))


def departs_at_s(timeline: Timeline, pair: tuple[str, str], at_s: float) -> float:
    """Return when a message that is ready at ``at_s`` goes out: on a cut link when that is up again.

    If the link is never up again, returns ``at_s``: the message has arrived, so it went out before the cut.
    """
    up_at_s = timeline.up_at_s(pair, at_s)
    return up_at_s if math.isfinite(up_at_s) else at_s


def _fill_compute(
    experiment: Experiment,
    records: RunRecords,
    table: HopTable,
    clients: NDArray[np.int64],
    slow: SlowServers,
) -> None:
    """Fill in the model's compute times, for the steps of each server in the order of their arrival."""
    lengths = {r.index: r.n_input_tokens for r in experiment.workload.requests}
    cached = {r.index: r.n_cached_tokens or 0 for r in records.requests}
    names = experiment.problem.clients
    for server in np.unique(table.server).tolist():
        profile = stub_profile(experiment, server)
        chosen = np.flatnonzero(table.server == server)
        chosen = chosen[np.argsort(table.arrived_at_s[chosen], kind="stable")]
        n_replayed: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        steps, overheads_s = [], []
        columns = (
            *(table.request, table.token, table.first, table.last),
            *(table.up_bytes, table.replayed_tokens, clients),
        )
        ready_at_s = table.arrived_at_s[chosen]
        if _overlaps(experiment):
            ready_at_s = _ready_at_s(table, chosen)
            order = np.argsort(ready_at_s, kind="stable")
            chosen, ready_at_s = chosen[order], ready_at_s[order]
        rows = zip(*(column[chosen].tolist() for column in columns), ready_at_s.tolist(), strict=True)
        for request, token, first, last, up_bytes, replayed, client, begins_at_s in rows:
            n_input_tokens = lengths[request]
            position, n_tokens = n_input_tokens + token - 1, 1
            if not token:
                position, n_tokens = cached[request], n_input_tokens - cached[request]
            elif experiment.problem.decoding is not None:
                n_tokens = up_bytes // experiment.problem.model.token_bytes
            if replayed:
                # A replay is one message, or one per step. After the last of them another replay can follow.
                key = request, token, first
                position, n_tokens = n_replayed[key], replayed
                end = position + replayed
                n_replayed[key] = 0 if end >= n_input_tokens + token else end
            factor = slow.factor(server, begins_at_s)
            steps.append(Step(begins_at_s, position, n_tokens, range(first, last), factor))
            overheads_s.append(profile.overhead_s(names[client], position, n_tokens))
        ends_at_s = np.array(list(_ends(profile, steps)), dtype=np.float64)
        table.model_compute_s[chosen] = ends_at_s - table.arrived_at_s[chosen] + overheads_s


def _ready_at_s(table: HopTable, chosen: NDArray[np.int64]) -> Array:
    """Return from when on a server's steps, rows ``chosen`` in the order of their arrival, do not wait for their own session.

    A round that was sent ahead begins when the one before it has ended.
    """
    ready_at_s = table.arrived_at_s[chosen].copy()
    ends_at_s: dict[int, float] = {}
    columns = (table.request[chosen].tolist(), table.departed_at_s[chosen].tolist())
    for row, (request, departed_at_s) in enumerate(zip(*columns, strict=True)):
        ready_at_s[row] = max(ready_at_s[row], ends_at_s.get(request, 0.0))
        ends_at_s[request] = departed_at_s
    return ready_at_s


def _ends(profile: StubProfile, steps: Sequence[Step]) -> Iterator[float]:
    """Yield when each of a server's steps should have ended; ``steps`` are in the order of their arrival."""
    batches = profile.batches()
    if batches is not None:
        ends_at_s = {step: batch.end_at_s for batch in batches_of(steps, batches) for step in batch.ended}
        yield from (ends_at_s[step] for step in steps)
        return
    turns = Turns(profile.times.contention_ratio)
    alone_s: dict[tuple[int, int, range], float] = {}
    for step in steps:
        kind = step.position, step.n_tokens, step.blocks
        step_s = alone_s.get(kind)
        if step_s is None:
            step_s = alone_s[kind] = profile.times.step_s(*kind)
        yield step.arrived_at_s + turns.take(step.arrived_at_s, step_s * step.factor)


def model_setup_s(
    experiment: Experiment,
    client: str,
    chain: Sequence[Hop],
    timeline: Timeline | None = None,
    at_s: float = 0.0,
    opened_at_s: float | None = None,
) -> float:
    """Return the modelled seconds to open a chain.

    They are the slowest hop's round trip, or the initial delay if that is longer, plus session setup.

    ``opened_at_s``: when the replies to the openings sent at ``at_s`` had all arrived, if the model knows.
    Links are those of ``timeline`` at ``at_s``; without it, those at the start.
    """
    if opened_at_s is None:
        opened_s = round_trip_s(experiment, client, [hop[0] for hop in chain], timeline, at_s)
    else:
        opened_s = opened_at_s - at_s
    return max(opened_s, experiment.problem.initial_delay_s) + experiment.calibration.session_setup_s


def round_trip_s(
    experiment: Experiment,
    client: str,
    servers: Iterable[int],
    timeline: Timeline | None = None,
    at_s: float = 0.0,
) -> float:
    """Return the seconds from a small message to all ``servers``, sent at ``at_s``, to the last reply."""
    names = [s.name for s in experiment.problem.servers]

    def rtt_s(server: str) -> float:
        up, down = (client, server), (server, client)
        if timeline is None:
            return experiment.network.links[up].delay_s + experiment.network.links[down].delay_s
        arrived_at_s = departs_at_s(timeline, up, at_s)
        arrived_at_s += timeline.link(up, arrived_at_s).delay_s
        answered_at_s = departs_at_s(timeline, down, arrived_at_s)
        return answered_at_s + timeline.link(down, answered_at_s).delay_s - at_s

    return max((rtt_s(names[server]) for server in servers), default=0.0)
