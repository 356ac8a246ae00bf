"""``trace.json``: Chrome trace events for Perfetto. Process = site, thread = server or session."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nodes.records import BATCH
from testbed.experiments.experiment import Experiment
from testbed.records.events import (
    BY_HAND,
    FaultEvent,
    LinksChanged,
    Moved,
    event_data,
)
from testbed.results.hop_table import HopTable
from testbed.results.logs import RequestRecord, RunRecords
from testbed.rundir import replacing

_US = 1e6
_LANES = 1000
"""Threads reserved per server, the last for its moves. Steps beyond the others share the one before it."""
_FIRST_SESSION = 1_000_000_000
"""Thread of request 0, above those of all servers, so that Perfetto lists sessions below a site's servers."""


def write_trace(path: Path, experiment: Experiment, records: RunRecords, hops: HopTable) -> None:
    """Write the events of all requests, links and servers to ``path``, whole or not at all."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(_events(experiment, records, hops)):
            file.write((b",\n" if number else b"") + msgspec.json.encode(event))
        file.write(b"\n]}\n")


def _events(experiment: Experiment, records: RunRecords, hops: HopTable) -> Iterator[dict[str, Any]]:
    sites = sorted(set(experiment.sites.values()))
    process = {site: number + 1 for number, site in enumerate(sites)}
    for site in sites:
        yield _meta("process_name", process[site], 0, site)
    yield from map(_change, records.changes)
    yield from (_fault(event) for event in records.faults if event.applies)
    names = [s.name for s in experiment.problem.servers]
    for move in records.moves:
        yield from _move_events(move, names.index(move.server), process[experiment.sites[move.server]])
    for server, name in enumerate(names):
        yield from _server_events(name, server, process[experiment.sites[name]], hops)
    indices = [record.index for record in records.requests]
    begins, ends = (np.searchsorted(hops.request, indices, side=side) for side in ("left", "right"))
    for record, begin, end in zip(records.requests, begins, ends, strict=True):
        pid, tid = process[experiment.sites[record.client]], _FIRST_SESSION + record.index
        yield _meta("thread_name", pid, tid, f"{record.client} request {record.index}")
        yield from _session_events(record, pid, tid)
        yield from _message_events(hops, slice(begin, end), pid, tid, names)


def _move_events(move: Moved, server: int, pid: int) -> Iterator[dict[str, Any]]:
    """Yield a server's change of blocks: the time it drains, and the time it loads."""
    tid = 1 + server * _LANES + _LANES - 1
    yield _meta("thread_name", pid, tid, f"{move.server} (blocks)")
    details = {"old": move.old, "new": move.new}
    yield _span("drain", pid, tid, move.closed_at_s, move.drained_at_s, details)
    yield _span("load", pid, tid, move.drained_at_s, move.open_at_s, details)


def _server_events(name: str, server: int, pid: int, hops: HopTable) -> Iterator[dict[str, Any]]:
    """Yield the steps that a server computed.

    Steps overlap, but the spans of one thread may not: each step is put into the first free thread of the
    server.
    """
    tid = 1 + server * _LANES
    yield _meta("thread_name", pid, tid, name)
    rows = np.flatnonzero(hops.server == server)
    rows = rows[np.argsort(hops.arrived_at_s[rows], kind="stable")]
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    n_lanes = 0
    for row in rows.tolist():
        start_s, end_s = float(hops.arrived_at_s[row]), float(hops.departed_at_s[row])
        while busy and busy[0][0] <= start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, n_lanes = min(n_lanes, _LANES - 2), n_lanes + 1
            if 0 < lane == n_lanes - 1:
                yield _meta("thread_name", pid, tid + lane, f"{name} ({lane + 1})")
        heapq.heappush(busy, (end_s, lane))
        request, token = int(hops.request[row]), int(hops.token[row])
        blocks = f"{int(hops.first[row])}-{int(hops.last[row])}"
        kind = "decode" if token else "prefill"
        details = {"request": request, "token": token, "blocks": blocks}
        yield _span(f"{kind} r{request}", pid, tid + lane, start_s, end_s, details)


def _session_events(record: RequestRecord, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    """Yield the spans of a request: the whole, its phases, and its tokens."""
    end_s = record.last_seen_at_s
    details = {"status": record.status, "reason": record.reason, "n_rejections": record.n_rejections}
    yield _span(f"request {record.index}", pid, tid, record.arrived_at_s, end_s, details)
    if record.opening_at_s is None or record.opened_at_s is None:
        yield _span("queue", pid, tid, record.arrived_at_s, end_s, {})
        return
    ready_at_s = record.tokens[0].ready_at_s if record.tokens else record.opened_at_s
    yield _span("queue", pid, tid, record.arrived_at_s, record.opening_at_s, {})
    yield _span("setup", pid, tid, record.opening_at_s, ready_at_s, {})
    for token in record.tokens:
        yield _span(f"token {token.token}", pid, tid, token.ready_at_s, token.at_s, {})


def _message_events(
    hops: HopTable, rows: slice, pid: int, tid: int, servers: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield the time that each message of a request was on its way."""
    columns = (
        *(hops.server, hops.replayed_tokens, hops.up_bytes, hops.down_bytes),
        *(hops.sent_at_s, hops.arrived_at_s, hops.departed_at_s, hops.received_at_s),
        *(getattr(hops, name) for name in BATCH),
    )
    for server, replayed, up, down, sent, arrived, departed, received, *batch in zip(
        *(column[rows].tolist() for column in columns), strict=True
    ):
        of = {"server": servers[server]} | ({"replayed_tokens": replayed} if replayed else {})
        of |= dict(zip(BATCH, batch, strict=True)) if batch[0] else {}
        yield _span("up", pid, tid, sent, arrived, of | {"bytes": up})
        yield _span("down", pid, tid, departed, received, of | {"bytes": down})


def _change(change: LinksChanged) -> dict[str, Any]:
    details: dict[str, Any] = {"by": BY_HAND}
    if change.planned_at_s is not None and change.late_s is not None:
        details = {"planned_at_s": change.planned_at_s, "late_ms": 1e3 * change.late_s}
    return _instant(change.at_s, change.why, details)


def _fault(event: FaultEvent) -> dict[str, Any]:
    details = event_data(event)
    kind = details.pop("kind", event.kind_of_event)
    return _instant(event.at_s, f"{kind} {details.pop('server')}", details)


def _instant(at_s: float | None, name: str, details: dict[str, Any]) -> dict[str, Any]:
    assert at_s is not None, "faults and changes have instants"
    return {
        "ph": "i",
        "s": "g",
        "name": name,
        "pid": 1,
        "tid": 0,
        "ts": round(at_s * _US, 3),
        "args": details,
    }


def _meta(name: str, pid: int, tid: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": text}}


def _span(
    name: str, pid: int, tid: int, start_s: float, end_s: float, details: dict[str, Any]
) -> dict[str, Any]:
    """Return a span in microseconds. Both ends are rounded alike, so that nested spans stay nested."""
    start_us, end_us = round(start_s * _US, 3), round(end_s * _US, 3)
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start_us,
        "dur": round(end_us - start_us, 3),
        "args": details,
    }
