"""What the closed model says that every hop and every opening should have taken, given when messages were sent.

Per hop: transmission and propagation each way, and k tau (decode) or k tau^I(l) (prefill) plus what the
calibration adds, context and contention as the stub has them; with forwarding, one way from the server before,
and from the last one back to the client. Of a link that changes, what is in force when a message goes out
counts, and a message that meets a cut link goes out when it is up again. Links are FIFO in the order of the
measured sends, so that queueing behind another session's message is part of the model and not an error of the
emulation; so is queueing at a server that computes serially. What the client computes per token comes after its
last hop. Errors do not accumulate: every stage starts from its measured input.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nodes.compute import Turns
from nodes.records import HopPlan, HopRecord
from testbed.results.logs import RunRecords
from testbed.results.slow import SlowServers
from testbed.runtime.wiring import scaled, stub_profile
from testbed.scenario.experiment import Experiment
from testbed.scenario.timeline import Timeline

Array = NDArray[np.float64]

_WHOLE = (
    *("request", "token", "hop", "server", "first", "last"),
    *("up_bytes", "down_bytes", "replayed_tokens"),
)
"""Columns of whole numbers."""
_NO_BYTES = 0
"""What opening a session and its answer take on a link: as good as nothing, but they wait for what does."""


@dataclass
class HopTable:
    """One row per token and hop, in the order of the log; scenario seconds.

    ``network_s`` is propagation, transmission and queueing on both links; ``link_queue_s`` the last of
    these alone; ``compute_s`` includes what the calibration adds.
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
    """Client time before this hop's send; after the last hop's receive it is in ``tail_s``."""
    tail_s: Array
    model_network_s: Array
    model_link_queue_s: Array
    model_compute_s: Array
    replayed_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Hidden states in a message of a replay; 0, for every other row, if not given."""
    model_client_s: Array = field(default_factory=lambda: np.zeros(0))
    """What the client computes for the token, at its last hop; 0 if not given."""
    model_opened_at_s: dict[int, float] = field(default_factory=dict)
    """When the chain of a request should have been open, by its number: given when it was asked to."""

    def __post_init__(self) -> None:
        if not len(self.replayed_tokens):
            self.replayed_tokens = np.zeros_like(self.request)
        if not len(self.model_client_s):
            self.model_client_s = np.zeros(len(self.request))

    @property
    def is_replay(self) -> NDArray[np.bool_]:
        """Rows of replays: their ``client_s`` holds the noticing and the search for a replacement."""
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
        """Everything that the hop took, the client's part included; sums to the token's time."""
        return self.client_s + self.network_s + self.compute_s + self.tail_s


def hop_table(experiment: Experiment, records: RunRecords) -> HopTable:
    """The measured hops of all requests with the model's times beside them."""
    rows: list[tuple[float, ...]] = []
    clients: list[str] = []
    for request in records.requests:
        for token in request.tokens:
            previous_s = token.ready_at_s
            for number, hop in enumerate(token.hops):
                is_last = number == len(token.hops) - 1
                tail = token.at_s - hop.received_at_s if is_last else 0.0
                rows.append((request.index, token.token, number, *hop, hop.sent_at_s - previous_s, tail))
                clients.append(request.client)
                previous_s = hop.received_at_s
    names = ("request", "token", "hop", *HopRecord._fields, "client_s", "tail_s")
    values = np.array(rows, dtype=np.float64).reshape(len(rows), len(names)).T
    columns: dict[str, Any] = dict(zip(names, values, strict=True))
    columns |= {name: columns[name].astype(np.int64) for name in _WHOLE}
    table = HopTable(
        **columns,
        model_network_s=np.zeros(len(rows)),
        model_link_queue_s=np.zeros(len(rows)),
        model_compute_s=np.zeros(len(rows)),
        model_client_s=hub_times_s(experiment, columns["last"]),
    )
    _fill_network(experiment, records, table, np.array(clients))
    slow = SlowServers(records.faults, [s.name for s in experiment.problem.servers])
    _fill_compute(experiment, table, np.array(clients), slow)
    return table


def hub_times_s(experiment: Experiment, last: NDArray[np.int64]) -> Array:
    """The client's part of hops that end at blocks ``last``: a token passes the end of the model once."""
    problem = experiment.problem
    return np.where(last == problem.model.n_blocks, problem.hub_token_s, 0.0)


class _Message(NamedTuple):
    """What one node sends another; ``opening`` is the request that it opens, else -1, ``row`` then -1."""

    sent_at_s: float
    arrived_at_s: float
    row: int
    n_bytes: int
    opening: int = -1


def _fill_network(
    experiment: Experiment, records: RunRecords, table: HopTable, clients: NDArray[np.str_]
) -> None:
    messages = _messages(experiment, table, clients)
    _add_openings(experiment, records, messages)
    timeline = Timeline(experiment, records.changed_at_s)
    planned = Timeline(experiment, [change.at_s for change in experiment.changes[: len(records.changes)]])
    # Clients first: when an opening arrives is when its server answers it.
    for pair in sorted(messages, key=lambda pair: (pair[0] not in experiment.problem.clients, pair)):
        free_at_s = -np.inf
        for message in sorted(messages[pair]):
            ready_at_s = max(message.sent_at_s, free_at_s)
            start = up_again(timeline, pair, ready_at_s)
            if start == ready_at_s and planned.is_cut(pair, ready_at_s):
                # Sent while the cut was being carried out: when it arrived tells whether it was caught.
                caught_until_s = up_again(timeline, pair, up_again(planned, pair, ready_at_s))
                start = caught_until_s if message.arrived_at_s > caught_until_s else start
            profile = scaled(timeline.link(pair, start), 1.0)
            free_at_s = start + profile.transmission_s(message.n_bytes, experiment.mtu)
            arrives_at_s = free_at_s + profile.delay_s
            if message.opening < 0:
                table.model_link_queue_s[message.row] += start - message.sent_at_s
                table.model_network_s[message.row] += arrives_at_s - message.sent_at_s
            elif pair[0] in experiment.problem.clients:
                answer = _Message(arrives_at_s, arrives_at_s, -1, _NO_BYTES, message.opening)
                messages[pair[::-1]].append(answer)
            else:
                known_s = table.model_opened_at_s.get(message.opening, -math.inf)
                table.model_opened_at_s[message.opening] = max(known_s, arrives_at_s)


def _add_openings(
    experiment: Experiment, records: RunRecords, messages: dict[tuple[str, str], list[_Message]]
) -> None:
    """What opens the chain of every admitted request, to each of its servers at once."""
    names = [server.name for server in experiment.problem.servers]
    for record in records.requests:
        if record.opening_at_s is None:
            continue
        for server, _, _ in record.chain:
            up, down = (record.client, names[server]), (names[server], record.client)
            sent_at_s = record.opening_at_s
            messages.setdefault(down, [])
            opening = _Message(sent_at_s, sent_at_s, -1, _NO_BYTES, record.index)
            messages.setdefault(up, []).append(opening)


def _messages(
    experiment: Experiment, table: HopTable, clients: NDArray[np.str_]
) -> dict[tuple[str, str], list[_Message]]:
    """Every step that went from one node to another, by that pair.

    With forwarding the server of the row before sends to the next one, and only the last to the client.
    """
    names = [s.name for s in experiment.problem.servers]
    found: dict[tuple[str, str], list[_Message]] = {}
    for row, (client, number) in enumerate(zip(clients.tolist(), table.server.tolist(), strict=True)):
        is_pushed = experiment.problem.forwarding and table.hop[row] > 0
        sender = names[table.server[row - 1]] if is_pushed else client
        up = _Message(
            float(table.sent_at_s[row]), float(table.arrived_at_s[row]), row, int(table.up_bytes[row])
        )
        found.setdefault((sender, names[number]), []).append(up)
        if table.down_bytes[row]:
            times_s = float(table.departed_at_s[row]), float(table.received_at_s[row])
            down = _Message(*times_s, row, int(table.down_bytes[row]))
            found.setdefault((names[number], client), []).append(down)
    return found


def up_again(timeline: Timeline, pair: tuple[str, str], at_s: float) -> float:
    """When a message that is ready at ``at_s`` goes out: what meets a cut link waits until it is up.

    What arrived although its link is never up again was on the way before: it did not wait.
    """
    up_at_s = timeline.up_at_s(pair, at_s)
    return up_at_s if math.isfinite(up_at_s) else at_s


def _fill_compute(
    experiment: Experiment, table: HopTable, clients: NDArray[np.str_], slow: SlowServers
) -> None:
    lengths = {r.index: r.n_input_tokens for r in experiment.requests}
    for server in sorted(set(table.server)):
        profile = stub_profile(experiment, int(server))
        turns = Turns(profile.serial, profile.times.contention_ratio)
        chosen = np.flatnonzero(table.server == server)
        n_replayed: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        for row in chosen[np.argsort(table.arrived_at_s[chosen], kind="stable")]:
            replayed = int(table.replayed_tokens[row])
            token, n_input_tokens = int(table.token[row]), lengths[int(table.request[row])]
            position, n_tokens = (n_input_tokens + token - 1, 1) if token else (0, n_input_tokens)
            if replayed:
                # One message, or as the steps were; after the last of them another replay would begin.
                key = (int(table.request[row]), token, int(table.first[row]))
                position, n_tokens = n_replayed[key], replayed
                n_replayed[key] = (position + replayed) % (n_input_tokens + token)
            alone = profile.times.step_s(position, n_tokens, int(table.last[row] - table.first[row]))
            arrived = table.arrived_at_s[row]
            start, busy = turns.take(arrived, alone * slow.factor(int(server), float(arrived)))
            overhead = profile.overhead_s(str(clients[row]), position, n_tokens)
            table.model_compute_s[row] = start - arrived + busy + overhead


def model_setup_s(
    experiment: Experiment,
    client: str,
    chain: Sequence[HopPlan],
    timeline: Timeline | None = None,
    at_s: float = 0.0,
    opened_at_s: float | None = None,
) -> float:
    """Opening a chain: the slowest hop's round trip, at least the initial delay, plus session setup.

    ``opened_at_s``: when all hops have answered what was sent at ``at_s``, if that is known. With ``timeline`` its
    links at ``at_s``; without, those of the start.
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
    """What a small message that a client sends at ``at_s`` to several servers at once takes, there and back."""
    names = [s.name for s in experiment.problem.servers]

    def rtt_s(server: str) -> float:
        up, down = (client, server), (server, client)
        if timeline is None:
            return experiment.links[up].delay_s + experiment.links[down].delay_s
        arrived_at_s = up_again(timeline, up, at_s)
        arrived_at_s += timeline.link(up, arrived_at_s).delay_s
        answered_at_s = up_again(timeline, down, arrived_at_s)
        return answered_at_s + timeline.link(down, answered_at_s).delay_s - at_s

    return max((rtt_s(names[server]) for server in servers), default=0.0)
