"""``trace.json``: Chrome trace events for Perfetto. Process = site, thread = server or session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testbed.experiment import Experiment
from testbed.results.logs import RequestRecord, RunRecords

_US = 1e6


def write_trace(path: Path, experiment: Experiment, records: RunRecords) -> None:
    """Stream the events of all requests to ``path``; whole or not at all."""
    temporary = path.with_suffix(".part")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, event in enumerate(_events(experiment, records)):
                file.write((",\n" if number else "") + json.dumps(event))
            file.write("\n]}\n")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _events(experiment: Experiment, records: RunRecords) -> Iterator[dict[str, Any]]:
    sites = sorted(set(experiment.sites.values()))
    process = {site: number + 1 for number, site in enumerate(sites)}
    servers = [s.name for s in experiment.problem.servers]
    for site in sites:
        yield _meta("process_name", process[site], 0, site)
    for number, name in enumerate(servers):
        yield _meta("thread_name", process[experiment.sites[name]], number + 1, name)
    for record in records.requests:
        pid = process[experiment.sites[record.client]]
        tid = 1000 + record.index
        yield _meta("thread_name", pid, tid, f"{record.client} request {record.index}")
        yield from _session_events(record, pid, tid)
        for token in record.tokens:
            for server, first, last, sent, arrived, departed, received, up, down in token.hops:
                place = process[experiment.sites[servers[server]]]
                label = "prefill" if token.token == 0 else "decode"
                details = {"request": record.index, "token": token.token, "blocks": f"{first}-{last}"}
                yield _span(f"{label} r{record.index}", place, server + 1, arrived, departed, details)
                yield _span("up", pid, tid, sent, arrived, {"server": servers[server], "bytes": up})
                yield _span("down", pid, tid, departed, received, {"server": servers[server], "bytes": down})


def _session_events(record: RequestRecord, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    end_s = record.tokens[-1].finished_at_s if record.tokens else record.ended_at_s
    if end_s is None:
        return
    details = {"status": record.status, "n_rejections": record.n_rejections}
    yield _span(f"request {record.index}", pid, tid, record.arrived_at_s, end_s, details)
    if record.opening_at_s is not None:
        yield _span("queue", pid, tid, record.arrived_at_s, record.opening_at_s, {})
        if record.tokens:
            yield _span("setup", pid, tid, record.opening_at_s, record.tokens[0].ready_at_s, {})
    for token in record.tokens:
        yield _span(f"token {token.token}", pid, tid, token.ready_at_s, token.finished_at_s, {})


def _meta(name: str, pid: int, tid: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": text}}


def _span(
    name: str, pid: int, tid: int, start_s: float, end_s: float, details: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": round(start_s * _US, 3),
        "dur": round((end_s - start_s) * _US, 3),
        "args": details,
    }
