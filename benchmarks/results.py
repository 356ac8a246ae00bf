"""CPU seconds and memory to make the tables of a run from its logs, with a million hops and with a tenth of
them.

The logs are many copies of those of a run in virtual time. The baseline only reads the same logs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figure import figure
from nodes.eventlog import EventLog, read_log
from nodes.records import AnyRecord, Token
from testbed.experiments import dump_toml, load_experiment
from testbed.runs.session import run_quietly

_HOPS = (100_000, 1_000_000)
_OPTIONS = ["clock=virtual", "network.backend=memory"]
_READ = (
    "import sys; from nodes.eventlog import LogReader; n = sum(1 for p in sys.argv[1:] for _ in LogReader(p))"
)


def measure() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        once = folder / "once"
        run_quietly(load_experiment("clustered", _OPTIONS), once)
        return [row for n_hops in _HOPS for row in _measure(once, folder / str(n_hops), n_hops)]


def _measure(once: Path, run: Path, n_hops: int) -> list[dict[str, Any]]:
    n_copies = _repeat(once, run, n_hops)
    report = [sys.executable, "-m", "testbed", "report", str(run), "--json"]
    size, big = f"{n_hops:,} hops, {100 * n_copies:,} requests", n_hops == _HOPS[-1]
    rows = []
    for what, command, goals in (
        ("tables and summary", [*report, "--no-trace"], ("<= 30 s", "<= 1000 MB") if big else ("", "")),
        ("and trace.json", report, ("", "")),
        ("reading the logs (baseline)", [sys.executable, "-c", _READ, *map(str, _logs(run))], ("", "")),
    ):
        took_s, peak_bytes = _run(command)
        rows.append(figure(f"{size}: {what}", took_s, "s", goals[0]))
        rows.append(figure(f"{size}: {what}, memory", peak_bytes / 1e6, "MB", goals[1]))
    rows.append(figure(f"{size}: trace.json", (run / "trace.json").stat().st_size / 1e6, "MB"))
    shutil.rmtree(run)
    return rows


def _logs(run: Path) -> list[Path]:
    return sorted((run / "events").glob("*.log"))


def _repeat(once: Path, run: Path, n_hops: int) -> int:
    """Makes the run ``run`` from so many copies of ``once`` that it has ``n_hops``. Returns the number of
    copies.
    """
    shutil.copytree(once, run)
    logs = {path.name: read_log(path)[0] for path in _logs(once)}
    there = [record for records in logs.values() for record in records]
    n_there = sum(len(record.hops) for record in there if isinstance(record, Token))
    n_requests = 1 + max(record.request for record in there)
    span_s = 1 + max(record.at_s for record in there)
    n_copies = round(n_hops / n_there)
    experiment = load_experiment("clustered", [*_OPTIONS, f"workload.n_requests={n_copies * n_requests}"])
    (run / "scenario.toml").write_text(dump_toml(experiment), encoding="utf-8")
    for name, records in logs.items():
        (run / "events" / name).unlink()
        log = EventLog(run / "events" / name)
        for copy in range(n_copies):
            for record in records:
                log.write(_later(record, copy * n_requests, copy * span_s))
        log.close()
    return n_copies


def _later(record: AnyRecord, n_requests: int, by_s: float) -> AnyRecord:
    changes: dict[str, Any] = {"request": record.request + n_requests, "at_s": record.at_s + by_s}
    for name in ("intended_at_s", "ready_at_s", "opened_at_s"):
        if hasattr(record, name):
            changes[name] = getattr(record, name) + by_s
    if isinstance(record, Token):
        changes["hops"] = [
            hop._replace(
                **{name: getattr(hop, name) + by_s for name in hop._fields if name.endswith("_at_s")}
            )
            for hop in record.hops
        ]
    return msgspec.structs.replace(record, **changes)


def _run(command: Sequence[str]) -> tuple[float, float]:
    """Runs a command. Returns its CPU seconds and its largest resident memory in bytes.

    Raises ``RuntimeError`` if the exit code is not 0.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
