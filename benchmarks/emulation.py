"""Errors of the clustered experiment in real time, compared with its twin.

It has 20 requests at 0.5 per second and a client in Cluster0, at time scale 1 (two minutes) and 10. The
baseline is the twin: the same requests in virtual time.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.figure import figure
from testbed.experiments import load_experiment
from testbed.runs.session import run_quietly

_GOALS = {1: ("<= 1", "<= 3"), 10: ("<= 3", "<= 8")}


def measure() -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []
    for scale, (mean_goal, p99_goal) in _GOALS.items():
        sets = ["clock=real", f"time_scale={scale}", "workload.rate=0.5", "workload.n_requests=20"]
        with tempfile.TemporaryDirectory() as folder:
            summary = run_quietly(load_experiment("clustered", sets), Path(folder) / "run", with_twin=True)
        error = summary["emulation_error"]["token_gap_s"]
        per_token = summary["emulation_error"]["per_token_s"]
        label = f"{summary['network']}, time scale {scale}"
        figures += [
            figure(
                f"{label}: per-token time against the twin, mean, signed",
                100 * per_token["mean_ratio"],
                "%",
            ),
            figure(
                f"{label}: token gaps against the twin, mean error",
                100 * error["mean_abs_ratio"],
                "%",
                mean_goal,
            ),
            figure(
                f"{label}: token gaps against the twin, p99 error",
                100 * error["p99_abs_ratio"],
                "%",
                p99_goal,
            ),
            figure(
                f"{label}: own overhead per hop, p50", 1e3 * summary["overhead_per_hop_s"], "ms", "<= 1.5"
            ),
        ]
    return figures
