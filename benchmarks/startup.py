"""Seconds until a testbed with 9 and with 60 servers serves, and the private memory per server.

The baseline is starting 9 interpreters that import the same server module.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.figure import figure
from benchmarks.proc import memory_bytes
from testbed.control.placing import place_experiment
from testbed.experiments import load_experiment
from testbed.rundir import make_run_dir
from testbed.runtime.emulation import Emulation
from testbed.runtime.setup import RunSetup
from testbed.runtime.stage import choose_stage

_SIZES = {9: (7, 2), 60: (50, 10)}


def measure() -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []
    for count, (n_mig, n_a100) in _SIZES.items():
        sets = [
            f"servers.0.count={n_mig}",
            f"servers.1.count={n_a100}",
            "workload.n_requests=1",
            "clock=real",
        ]
        with tempfile.TemporaryDirectory() as folder:
            took_s, private, network = uvloop.run(_start(sets, Path(folder)))
        goal = "2 s" if count == 9 else "6 s"
        figures.append(figure(f"{count} servers up on {network}", took_s, "s", f"<= {goal}"))
        figures.append(
            figure(
                f"private memory per server of {count}, mean",
                sum(private) / len(private) / 1e6,
                "MB",
                "<= 15 MB",
            )
        )
    figures.append(figure("9 interpreters importing the server (baseline)", _interpreters(9), "s"))
    return figures


async def _start(sets: list[str], folder: Path) -> tuple[float, list[float], str]:
    started_at = time.monotonic()
    experiment = load_experiment("clustered", sets)
    run_dir = make_run_dir(folder, "startup")
    stage = choose_stage(experiment)
    launcher = stage.begin(experiment, run_dir)
    emulation = Emulation(RunSetup(experiment, place_experiment(experiment), run_dir, stage, launcher))
    try:
        await emulation.start()
        took_s = time.monotonic() - started_at
        await asyncio.sleep(0.5)
        private = [_private_bytes(emulation.processes.pids[s.name]) for s in experiment.problem.servers]
    finally:
        await emulation.stop()
    assert emulation.network is not None
    return took_s, private, emulation.network.name


def _private_bytes(pid: int) -> float:
    return sum(float(size) for kind, size in memory_bytes(pid).items() if kind.startswith("Private_"))


def _interpreters(count: int) -> float:
    started_at = time.monotonic()
    code = "import nodes.node; print('up', flush=True); input()"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    took_s = time.monotonic() - started_at
    for process in processes:
        process.communicate(b"\n")
    return took_s
