"""CPU seconds to load scenarios whose links change often, by ``[[network.event]]`` and ``[[network.trace]]``.

Ten times the events should take about ten times as long. The baseline is reading the file as TOML.
"""

from __future__ import annotations

import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.figure import figure
from testbed.experiments import load_experiment

_SCENARIO = """
model = { profile = "bloom-176b" }
servers = [{ hardware = "a100", site = "A", count = 4 }]
clients = [{ site = "B" }]
workload = { rate = 0.2, n_requests = 10, n_input_tokens = 20, n_output_tokens = 16 }
[network]
kind = "clusters"
pairs = [{ sites = ["A", "A"], rtt = "5 ms", rate = "1 Gbit/s" }, { sites = ["A", "B"], rtt = "90 ms", rate = "1 Gbit/s" }]
"""
_N_EVENTS = (1_000, 10_000, 100_000)


def measure() -> list[dict[str, Any]]:
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scenario.toml"
        for n_events in _N_EVENTS:
            rows = (
                f'[[network.event]]\nat = "{100 * n} ms"\nfor = "100 ms"\nlink = ["B", "A"]\n'
                f'rate = "{1 + n % 7} Mbit/s"\n'
                for n in range(n_events)
            )
            path.write_text(_SCENARIO + "".join(rows), encoding="utf-8")
            took_s = _cpu_s(lambda: load_experiment(str(path)))
            figures.append(
                figure(f"{n_events:,} events, loaded", took_s, "s", "<= 10 s" if n_events > 10_000 else "")
            )
        read_s = _cpu_s(lambda: tomllib.loads(path.read_text(encoding="utf-8")))
        figures.append(figure(f"{n_events:,} events, read as TOML (baseline)", read_s, "s"))
        (Path(folder) / "trace").write_text(
            "".join(f"{ms}\n" for ms in range(1, 60_001, 3)), encoding="utf-8"
        )
        trace = '[[network.trace]]\nlink = ["B", "A"]\nkind = "mahimahi"\nfile = "trace"\n'
        path.write_text(_SCENARIO + trace, encoding="utf-8")
        took_s = _cpu_s(lambda: load_experiment(str(path)))
        figures.append(figure("mahimahi trace of 60 s, repeated for an hour, loaded", took_s, "s"))
    return figures


def _cpu_s(run: Callable[[], object]) -> float:
    began_s = time.process_time()
    run()
    return time.process_time() - began_s
