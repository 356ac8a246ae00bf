"""Costs of the page: the CPU time of its server, and the errors of a run while pages are open.

CPU: 60 servers and 200 sessions that decode all the time, with two pages open; the logs are written as
clients write them, in real time. The baseline is reading the same logs afterwards, all at once. Errors: those
of ``clustered`` in real time compared with its twin, with two pages open. The baseline is the same without a
page; each is run twice, in turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.figure import figure
from benchmarks.proc import usage
from nodes.eventlog import EventLog, LogReader
from nodes.records import Admitted, Arrived, HopRecord, Opening, Token
from policies.problem import Hop
from testbed.control.placing import place_experiment
from testbed.experiments import dump_toml, load_experiment
from testbed.records.base import data_of
from testbed.records.events import EventWriter, Serving
from testbed.records.plan import PLAN, Clock, PlacementRow, Plan
from testbed.rundir import make_run_dir, write_json

_SETS = ["servers.0.count=40", "servers.1.count=20", "workload.n_requests=200", "clock=real"]
_SESSIONS = 200
_TOKEN_S = 0.44
"""Time per token in seconds, as in the paper's clustered experiment."""
_SECONDS = 20.0
_WARM_S = 3.0


_RUN = ("workload.rate=0.5", "workload.n_requests=12", "workload.n_output_tokens=64")


def measure() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        return _measure(Path(name) / "run") + _fidelity(Path(name))


def _fidelity(folder: Path) -> list[dict[str, Any]]:
    figures = []
    for turn in ("first", "second"):
        for is_open in (False, True):
            run_dir = folder / f"{turn}-{is_open}"
            error = _error_of_a_run(run_dir, is_open)
            label = f"token gaps against the twin, {'a page open' if is_open else 'no page (baseline)'}, {turn} turn"
            figures.append(figure(f"{label}: mean", 100 * error["mean_abs_ratio"], "%"))
            figures.append(figure(f"{label}: p99", 100 * error["p99_abs_ratio"], "%"))
    return figures


def _error_of_a_run(run_dir: Path, is_open: bool) -> dict[str, float]:
    options = [text for option in _RUN for text in ("--set", option)]
    command = [sys.executable, "-m", "testbed", "up", "clustered", "--clock", "real", "--no-report", *options]
    page = ["--page", "0"] if is_open else ["--no-page"]
    with subprocess.Popen(
        [*command, *page, "--out", str(run_dir)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None, "it is a pipe"
        if is_open:
            url = run.stderr.readline().split()[1].partition("#")[0]
            _until_there(url)
            pages = [_Watching(url) for _ in range(2)]
        run.stderr.read()
    if is_open:
        assert all(page.n_updates > 100 for page in pages), "each page must have received updates"
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    error: dict[str, float] = summary["emulation_error"]["token_gap_s"]
    return error


def _measure(folder: Path) -> list[dict[str, Any]]:
    experiment = load_experiment("clustered", _SETS)
    run_dir = make_run_dir(folder, experiment.name)
    (run_dir / "scenario.toml").write_text(dump_toml(experiment), encoding="utf-8")
    placement = PlacementRow.of(place_experiment(experiment).placement)
    plan = Plan(placement=placement, network="fabric", clock=Clock(name="real", why="asked for"))
    write_json(run_dir / PLAN, data_of(plan))
    events = EventWriter(run_dir)
    events.write(Serving(at_s=0.0))
    clients = _Clients(run_dir / "events" / "client-0.log", experiment.problem.n_servers)
    command = [sys.executable, "-m", "testbed", "view", str(run_dir), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None, "it is a pipe"
            url = server.stdout.readline().partition("#")[0]
            pages = [_Watching(url) for _ in range(2)]
            clients.run_for(_WARM_S)
            before_s, n_before = usage(server.pid)[1], pages[0].n_updates
            started = time.monotonic()
            clients.run_for(_SECONDS)
            took_s = time.monotonic() - started
            used_s, n_updates = usage(server.pid)[1] - before_s, pages[0].n_updates - n_before
            size = pages[0].n_bytes
        finally:
            server.terminate()
    events.close()
    return [
        figure("60 servers, 200 sessions, 2 pages: share of a core", 100 * used_s / took_s, "%", "<= 10 %"),
        figure("updates per second to each page", n_updates / took_s, "1/s", "<= 10"),
        figure("sent to a page", size / (took_s + _WARM_S) / 1e3, "kB/s"),
        figure("tokens per second in the logs", clients.n_tokens / (took_s + _WARM_S), "1/s"),
        figure("reading the same logs at once (baseline)", 100 * clients.reading_s() / took_s, "%"),
    ]


class _Clients:
    """Writes the log records that clients of 200 sessions would write, one token per session every 0.44 s."""

    def __init__(self, path: Path, n_servers: int) -> None:
        self._path = path
        self._log = EventLog(path)
        self._since = time.monotonic()
        self._n_servers = n_servers
        self._numbers = [0] * _SESSIONS
        self.n_tokens = 0
        for request in range(_SESSIONS):
            self._log.write(Arrived(request, 0.0, "client-0", 0.0, 20, 1_000_000))
            self._log.write(
                Admitted(request, 0.0, [Hop(self._server(request, i), 14 * i, 14 * i + 14) for i in range(5)])
            )
            self._log.write(Opening(request, 0.0, 0.0))

    def _server(self, request: int, hop: int) -> int:
        return (7 * request + hop) % self._n_servers

    def run_for(self, seconds: float) -> None:
        end_at = time.monotonic() + seconds
        while (now := time.monotonic()) < end_at:
            at_s = now - self._since
            for request in range(_SESSIONS):
                due_s = _TOKEN_S * (self._numbers[request] + 1 + request / _SESSIONS)
                if due_s <= at_s:
                    self._log.write(self._token(request, due_s))
                    self._numbers[request] += 1
                    self.n_tokens += 1
            time.sleep(0.002)

    def _token(self, request: int, at_s: float) -> Token:
        hops = []
        begin_s = ready_at_s = at_s - _TOKEN_S
        for i in range(5):
            step_s = _TOKEN_S / 5
            # Times on a real machine vary, too.
            late_s = 0.004 * ((self._numbers[request] * 31 + request * 17 + i) % 7)
            arrived_s, departed_s = begin_s + 0.3 * step_s + late_s, begin_s + 0.7 * step_s
            hop = (self._server(request, i), 14 * i, 14 * i + 14, begin_s, arrived_s, departed_s)
            hops.append(HopRecord(*hop, begin_s + step_s, 28672, 28672))
            begin_s += step_s
        return Token(request, at_s, self._numbers[request], ready_at_s, hops, 1)

    def reading_s(self) -> float:
        before_s = time.process_time()
        for _ in LogReader(self._path):
            pass
        return time.process_time() - before_s


class _Watching:
    """A page: receives the server's updates, and counts them."""

    def __init__(self, url: str) -> None:
        self.n_updates = self.n_bytes = 0
        with urllib.request.urlopen(url + "api/run") as answer:
            text = answer.read().decode()
        feed = text.rpartition('"feed":"')[2].partition('"')[0]
        place = text.rpartition('"position":[')[2].partition("]")[0].replace(",", ".")
        self._stream = urllib.request.urlopen(f"{url}api/news?from={feed}.{place}")
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for line in self._stream:
                self.n_bytes += len(line)
                self.n_updates += line.startswith(b"data:")
        except (OSError, ValueError):  # the server has ended
            return


def _until_there(url: str) -> None:
    """Waits until the run has started; until then the page's server returns status 503."""
    for _ in range(600):
        try:
            urllib.request.urlopen(url + "api/run").close()
        except urllib.error.HTTPError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("the run has not started within a minute")
