"""The closed model: the time that every hop and every opening of a chain should have taken.

A hop takes transmission and propagation each way, and k tau (decode) or k tau^I(l) (prefill) for its k
blocks, plus the calibration's overheads; context and contention count as in the timing stub. With forwarding,
a message goes one way from the server before, and from the last server back to the client. The client's part
of a token comes after its last hop.

- A message is transmitted at the rates that its link has meanwhile, and has the delay at their beginning. On a cut link it waits
  until the link is up again.
- A message's bytes are those on the wire, with its frame and all headers.
- Waiting for another session's message (``testbed.results.model_links``) is part of the model and not an error of the
  emulation, and so is waiting for a server that computes serially.
- Errors do not accumulate: every stage begins at its measured instant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nodes.batching import FactorAt, Step, batches_of
from nodes.compute import StubProfile, Turns
from nodes.records import BATCH
from policies.problem import Hop
from testbed.experiments.experiment import Experiment
from testbed.experiments.stub import stub_profile
from testbed.experiments.timeline import Timeline
from testbed.results.hop_table import HopTable
from testbed.results.logs import RunRecords
from testbed.results.model_links import departs_at_s, fill_network
from testbed.results.slow import SlowServers

Array = NDArray[np.float64]

_WHOLE = (
    *("request", "token", "hop", "server", "first", "last"),
    *("up_bytes", "down_bytes", "replayed_tokens"),
    *(name for name in BATCH if not name.endswith("_s")),
)
"""Columns of whole numbers."""


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
    fill_network(experiment, records, table, clients)
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
            steps.append(Step(begins_at_s, position, n_tokens, range(first, last)))
            overheads_s.append(profile.overhead_s(names[client], position, n_tokens))
        ends_at_s = np.array(list(_ends(profile, steps, partial(slow.factor, server))), dtype=np.float64)
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


def _ends(profile: StubProfile, steps: Sequence[Step], factor_at: FactorAt) -> Iterator[float]:
    """Yield when each of a server's steps should have ended; ``steps`` are in the order of their arrival."""
    batches = profile.batches(factor_at)
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
        yield step.arrived_at_s + turns.take(step.arrived_at_s, step_s * factor_at(step.arrived_at_s))


def model_setup_s(
    experiment: Experiment,
    client: str,
    chain: Sequence[Hop],
    timeline: Timeline | None = None,
    at_s: float = 0.0,
    opened_at_s: float | None = None,
    *,
    is_reference: bool = False,
) -> float:
    """Return the modelled seconds to open a chain.

    They are the slowest hop's round trip, or the initial delay if that is longer, plus session setup. In the mode
    ``reference`` (``is_reference``) nothing is sent to open it: they are the initial delay and session setup.

    ``opened_at_s``: when the replies to the openings sent at ``at_s`` had all arrived, if the model knows.
    Links are those of ``timeline`` at ``at_s``; without it, those at the start.
    """
    if is_reference:
        opened_s = 0.0
    elif opened_at_s is None:
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
    of_servers = experiment.problem.servers

    def rtt_s(server: str) -> float:
        up, down = (client, server), (server, client)
        if timeline is None:
            return experiment.network.links[up].delay_s + experiment.network.links[down].delay_s
        arrived_at_s = departs_at_s(timeline, up, at_s)
        arrived_at_s += timeline.link(up, arrived_at_s).delay_s
        answered_at_s = departs_at_s(timeline, down, arrived_at_s)
        return answered_at_s + timeline.link(down, answered_at_s).delay_s - at_s

    return max((rtt_s(of_servers[server].name) for server in servers), default=0.0)
