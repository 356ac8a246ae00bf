"""The time that the endpoint of ``testbed serve`` adds to a request, with 200 streams at once.

Times that a client of the endpoint measures are compared with the run's own: the time from sending to the
first event minus the run's time to the first token, and gaps between events minus gaps between tokens. The
baseline is a request for /health every 0.1 s at the same time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

from benchmarks.figure import figure
from testbed.results import load_run, read_tables
from testbed.serving.app import INDEX_HEADER

_N_STREAMS, _N_TOKENS, _SPREAD_S = 200, 100, 20.0
"""Streams begin within ``_SPREAD_S`` seconds and last longer than that, so that all are open at the same
time.
"""
_OPTIONS = (
    "hardware.mig-1g.memory=2 TB",
    "hardware.a100.memory=2 TB",
    "workload.rate=20",
    "policy.design_concurrency=200",
)


class _Seen(NamedTuple):
    """What a client measured of a request: when it was sent and when its events arrived
    (``time.monotonic``).
    """

    number: int
    sent_at: float
    came_at: list[float]


def measure() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        options = [text for option in _OPTIONS for text in ("--set", option)]
        command = [
            sys.executable,
            "-m",
            "testbed",
            "serve",
            "clustered",
            "--port",
            "0",
            "--no-twin",
            "--no-report",
        ]
        process = subprocess.Popen(
            [*command, "--out", str(run), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                seen, health_s = runner.run(_load(url))
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(60)
        assert code == 0, f"testbed serve ended with {code}"
        return _figures(run, seen, health_s)


async def _load(url: str) -> tuple[list[_Seen], list[float]]:
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    health = asyncio.create_task(_health(host, int(port)))
    work = [_ask(host, int(port), at_s) for at_s in np.linspace(0, _SPREAD_S, _N_STREAMS)]
    return await asyncio.gather(*work), await health


async def _health(host: str, port: int) -> list[float]:
    """Requests /health every 0.1 s while streams begin. Returns the seconds that each request took."""
    reader, writer = await asyncio.open_connection(host, port)
    took_s = []
    for _ in range(round(_SPREAD_S / 0.1)):
        await asyncio.sleep(0.1)
        sent_at = time.monotonic()
        writer.write(_request(f"{host}:{port}", "GET", "/health"))
        await reader.readuntil(b"\r\n\r\n")
        took_s.append(time.monotonic() - sent_at)
    writer.close()
    return took_s


def _request(host: str, method: str, path: str, body: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _ask(host: str, port: int, after_s: float) -> _Seen:
    """Requests one stream, over a connection that is open already.

    It uses plain sockets, so that no HTTP library's time is measured.
    """
    await asyncio.sleep(after_s)
    reader, writer = await asyncio.open_connection(host, port)
    body = {"model": "bloom-176b", "prompt": [1] * 20, "max_tokens": _N_TOKENS, "stream": True}
    request = _request(f"{host}:{port}", "POST", "/v1/completions", json.dumps(body).encode())
    await asyncio.sleep(0.1)
    sent_at, came_at = time.monotonic(), []
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    assert head.startswith("HTTP/1.1 200"), head
    number = int(head.partition(f"{INDEX_HEADER}: ")[2].partition("\r\n")[0])
    while (line := await reader.readline()) != b"data: [DONE]\n":
        if line.startswith(b"data: {"):
            came_at.append(time.monotonic())
    writer.close()
    return _Seen(number, sent_at, came_at)


def _figures(run: Path, seen: list[_Seen], health_s: list[float]) -> list[dict[str, Any]]:
    records = {record.index: record for record in read_tables(run, load_run(run)).records.requests}
    first_ms, lag_ms, gap_ms = [], [], []
    for index, sent_at, came_at in seen:
        record = records[index]
        assert len(came_at) == len(record.tokens) == _N_TOKENS
        ttft_s = record.tokens[0].at_s - record.arrived_at_s
        first_ms.append(1e3 * (came_at[0] - sent_at - ttft_s))
        lag_ms.append(1e3 * (record.arrived_at_s - record.intended_at_s))
        gap_ms.extend(1e3 * (np.diff(came_at) - np.diff([token.at_s for token in record.tokens])))
    load = f"{_N_STREAMS} streams at once, load {os.getloadavg()[0]:.1f}"
    gap = np.abs(gap_ms)
    return [
        figure(f"own part of TTFT, p50; {load}", float(np.percentile(first_ms, 50)), "ms", "<= 1 ms"),
        figure("own part of TTFT, p99", float(np.percentile(first_ms, 99)), "ms", "<= 3 ms"),
        figure("of it until the session begins, p50", float(np.percentile(lag_ms, 50)), "ms"),
        figure("of it until the session begins, p99", float(np.percentile(lag_ms, 99)), "ms"),
        figure("gaps, client's less the run's, |p50|", float(np.percentile(gap, 50)), "ms"),
        figure("gaps, client's less the run's, |p99|", float(np.percentile(gap, 99)), "ms", "<= 2 ms"),
        figure("/health meanwhile (baseline), p50", float(np.percentile(health_s, 50)) * 1e3, "ms"),
        figure("/health meanwhile (baseline), p99", float(np.percentile(health_s, 99)) * 1e3, "ms"),
    ]
