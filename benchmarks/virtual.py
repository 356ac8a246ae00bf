"""Accuracy, repeatability and speed of virtual time on both of its networks, alone and beside busy loops.

Errors are relative to the model, computed from the times at which messages were sent. Speeds are relative to
real time.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.figure import figure
from testbed.experiments import load_experiment
from testbed.records.summary import RunSummary
from testbed.runs.session import run_quietly

_BUSY_PER_CPU = 2
_SPEED_GOALS = {"memory": (">= 150", ">= 30"), "fabric": (">= 50", ">= 15")}
_GTS_CE = ("workload.rate=0.5", "workload.n_requests=100")
_HOP_COST_GOALS = {"memory": "<= 0.25", "fabric": ""}
_WAITING = {
    "prompts of 1,000 tokens": (
        *("workload.n_input_tokens=1000", "workload.n_output_tokens=30"),
        *("workload.n_requests=20", "workload.rate=0.5"),
    ),
    "two servers share 40 Mbit/s": (
        'sites=[{name="Cluster1", up="40 Mbit/s", down="200 Mbit/s"}]',
        *("workload.n_output_tokens=30", "workload.n_requests=40", "workload.rate=1"),
    ),
}
"""Scenarios whose messages overtake each other or share links."""
_WAITING_GOALS = {"memory": ("<= 0.001", "<= 0.01"), "fabric": ("<= 1", "<= 2")}
_RECORD = ("events/client-0.log", "events.jsonl", "hops.parquet", "requests.parquet", "trace.json")


def measure() -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []
    for network in ("memory", "fabric"):
        with tempfile.TemporaryDirectory() as folder:
            figures += _clustered(network, Path(folder))
            figures += _waiting(network, Path(folder))
            figures += _larger(network, Path(folder))
    return figures


def _run(scenario: str, network: str, out: Path, *settings: str) -> RunSummary:
    experiment = load_experiment(scenario, [f"network.backend={network}", *settings])
    return run_quietly(experiment, out)


def _clustered(network: str, folder: Path) -> list[dict[str, Any]]:
    alone, again, beside = (folder / name for name in ("alone", "again", "beside"))
    summary = _run("clustered", network, alone)
    _run("clustered", network, again)
    with _busy_loops():
        busy = _run("clustered", network, beside)
    n_hops = summary["metrics"]["hop_compute_s"]["n"]
    speed_goal, _ = _SPEED_GOALS[network]
    figures = []
    for what, found in (("", summary), (f", {_BUSY_PER_CPU} busy loops per CPU", busy)):
        error = found["emulation_error"]
        per_token, hop = error["per_token_s"], error["hop_s"]
        label = f"clustered on {network}{what}"
        figures += [
            figure(f"{label}: per-token error, mean", 100 * per_token["mean_abs_ratio"], "%", "<= 0.02"),
            figure(f"{label}: per-token error, p99", 100 * per_token["p99_abs_ratio"], "%", "<= 0.1"),
            figure(f"{label}: hop error, max", 100 * hop["max_abs_ratio"], "%", "<= 0.1"),
            figure(
                f"{label}: faster than life",
                found["scenario_s"] / found["wall_s"],
                "times",
                speed_goal if not what else "",
            ),
        ]
    hop_ms = 1e3 * summary["wall_s"] / n_hops
    figures.append(
        figure(f"clustered on {network}: real time per hop and token", hop_ms, "ms", _HOP_COST_GOALS[network])
    )
    for what, other in (("again", again), ("beside busy loops", beside)):
        n_same = sum(filecmp.cmp(alone / name, other / name, shallow=False) for name in _RECORD)
        figures.append(
            figure(f"clustered on {network}, {what}: files with the same bytes", n_same, f"of {len(_RECORD)}")
        )
        figures.append(
            figure(
                f"clustered on {network}, {what}: instants of hops differ by",
                1e6 * _apart_s(alone, other),
                "us",
                "<= 1",
            )
        )
    return figures


def _waiting(network: str, folder: Path) -> list[dict[str, Any]]:
    figures, (mean_goal, p99_goal) = [], _WAITING_GOALS[network]
    for what, settings in _WAITING.items():
        error = _run("clustered", network, folder / what, *settings)["emulation_error"]
        label = f"clustered on {network}, {what}"
        for metric, name in (("per_token_s", "per-token"), ("ttft_s", "TTFT")):
            mean, p99 = (100 * error[metric][of] for of in ("mean_abs_ratio", "p99_abs_ratio"))
            figures.append(figure(f"{label}: {name} error, mean", mean, "%", mean_goal))
            figures.append(figure(f"{label}: {name} error, p99", p99, "%", p99_goal))
    return figures


def _apart_s(one: Path, other: Path) -> float:
    """Returns the largest difference of any instant of a hop between two runs, in seconds."""
    names = ("sent_at_s", "arrived_at_s", "departed_at_s", "received_at_s")
    tables = [pq.read_table(path / "hops.parquet", columns=list(names)) for path in (one, other)]
    apart = [np.abs(np.subtract(*(table[name].to_numpy() for table in tables))).max() for name in names]
    return float(max(apart))


def _larger(network: str, folder: Path) -> list[dict[str, Any]]:
    _, goal = _SPEED_GOALS[network]
    gts = _run("gts-ce", network, folder / "gts", *_GTS_CE)
    speed = gts["scenario_s"] / gts["wall_s"]
    figures = [
        figure(f"gts-ce, 26 servers, 0.5 requests/s, on {network}: faster than life", speed, "times", goal)
    ]
    all_nodes = _run("gts-ce", network, folder / "all", "servers.0.count=143", "workload.n_requests=20")
    figures += [
        figure(f"149 nodes on {network}: up", all_nodes["startup_s"], "s"),
        figure(f"149 nodes on {network}: requests completed of 20", all_nodes["n_completed"], "", "20"),
        figure(
            f"149 nodes on {network}: faster than life",
            all_nodes["scenario_s"] / all_nodes["wall_s"],
            "times",
        ),
    ]
    return figures


@contextlib.contextmanager
def _busy_loops() -> Iterator[None]:
    """Runs ``_BUSY_PER_CPU`` processes per CPU that never wait while the body runs."""
    count = _BUSY_PER_CPU * len(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
