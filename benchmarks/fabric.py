"""The ``fabric`` network at scale: starting and stopping 149 nodes, lateness under load, CPU per megabyte,
losses.

- Up and down: the network alone, and the whole testbed with 148 servers (GTS-CE, one node each).
- Load: GTS-CE with 26 servers at time scale 10, with 5 and 20 requests at once. A hop crosses the forwarder
  twice, so the forwarder adds at most twice a packet's lateness to it.
- Streams: bulk TCP at rising rates, up to those that the forwarder or the machine cannot sustain.
- Machines: one stream on one machine, and over the underlay of two.
- Shared link: four streams over one link.
- Losses: the share of bytes that TCP itself reports as retransmitted on a link that loses packets.

Other load of the machine affects the figures, so most are the best of ``_TRIES`` runs; shared link and losses
are from one run each.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from benchmarks.fabric_streams import Streams, in_fork, one_way, streams
from benchmarks.figure import figure
from netem.fabric import FabricBackend
from netem.probe import become_network_admin
from netem.spec import NetworkSpec
from policies.links import Link
from testbed.control.placing import place_experiment
from testbed.experiments import load_experiment
from testbed.records.summary import RunSummary
from testbed.rundir import make_run_dir
from testbed.runs.session import run_quietly
from testbed.runtime.emulation import Emulation
from testbed.runtime.setup import RunSetup
from testbed.runtime.stage import choose_stage

T = TypeVar("T")
_TRIES = 3
_N_NODES = 149
_SESSIONS = (5, 20)
_SPREAD = ((1, 1e9), (1, 5e9), (4, 1e9), (8, 5e9))
_LOSSES = (0.001, 0.01, 0.05)
_DELAY_S = 0.005


def measure() -> list[dict[str, Any]]:
    figures = _up_and_down()
    for n_sessions in _SESSIONS:
        figures += _under_load(n_sessions)
    for n_pairs, rate_bps in _SPREAD:
        figures += _stream(n_pairs, rate_bps)
    for n_machines in (1, 2):
        figures += _across(n_machines)
    figures += _shared()
    for ratio in _LOSSES:
        link = Link(_DELAY_S, 1e9, loss_ratio=ratio)
        seen = streams(1, link, seconds=4.0)
        figures.append(
            figure(
                f"TCP retransmits at {100 * ratio:g} % loss, 1 Gbit/s, RTT 10 ms",
                100 * seen.retransmitted_ratio,
                "%",
                f"{100 * ratio:g}",
            )
        )
    return figures


def _best(run: Callable[[], T], key: Callable[[T], float]) -> T:
    return min((run() for _ in range(_TRIES)), key=key)


def _up_and_down() -> list[dict[str, Any]]:
    alone = [in_fork(_network_alone) for _ in range(_TRIES)]
    whole = [_whole_testbed() for _ in range(_TRIES)]
    return [
        figure(f"{_N_NODES} nodes' network up", min(up for up, _ in alone), "s", "<= 15"),
        figure(f"{_N_NODES} nodes' network down", min(down for _, down in alone), "s", "<= 5"),
        figure(
            f"{_N_NODES} nodes up, servers and client connected", min(up for up, _ in whole), "s", "<= 15"
        ),
        figure(f"{_N_NODES} nodes down, processes ended", min(down for _, down in whole), "s", "<= 5"),
    ]


def _network_alone() -> tuple[float, float]:
    become_network_admin()
    nodes = tuple(f"n{i}" for i in range(_N_NODES))
    link = Link(_DELAY_S, 1e9)
    backend = FabricBackend(NetworkSpec("up", nodes, {(a, b): link for a in nodes for b in nodes if a != b}))
    started_at = time.monotonic()
    backend.open()
    opened_at = time.monotonic()
    backend.close()
    return opened_at - started_at, time.monotonic() - opened_at


def _whole_testbed() -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        return uvloop.run(_start_and_stop(Path(folder)))


async def _start_and_stop(folder: Path) -> tuple[float, float]:
    started_at = time.monotonic()
    sets = ["servers.0.count=143", "workload.n_requests=1", "network.backend=fabric", "clock=real"]
    experiment = load_experiment("gts-ce", sets)
    assert len(experiment.nodes) == _N_NODES, "GTS-CE has 149 nodes"
    run_dir = make_run_dir(folder, "fabric")
    stage = choose_stage(experiment)
    launcher = stage.begin(experiment, run_dir)
    emulation = Emulation(RunSetup(experiment, place_experiment(experiment), run_dir, stage, launcher))
    try:
        await emulation.start()
        up_at = time.monotonic()
    finally:
        await emulation.stop()
    return up_at - started_at, time.monotonic() - up_at


def _under_load(n_sessions: int) -> list[dict[str, Any]]:
    sets = [
        "time_scale=10",
        f"workload.n_requests={n_sessions}",
        "workload.rate=10",
        "network.backend=fabric",
    ]

    def run() -> RunSummary:
        with tempfile.TemporaryDirectory() as folder:
            return run_quietly(load_experiment("gts-ce", sets), Path(folder))

    summary = _best(run, lambda each: each["forwarder"]["late_p99_s"])
    seen = summary["forwarder"]
    label = f"26 servers, time scale 10, {summary['achieved_concurrency']['max']:g} sessions"
    work_s = seen["cpu_s"] - seen["spun_s"]
    # In scenario seconds, of which 10 are one real second: 1e2 times it is real milliseconds.
    overhead = summary["metrics"]["hop_overhead_s"]
    return [
        figure(f"{label}: forwarder's lateness, p99", 1e3 * seen["late_p99_s"], "ms", "<= 0.5"),
        figure(f"{label}: the same, mean", 1e3 * seen["late_total_s"] / seen["packets"], "ms"),
        figure(f"{label}: the same, max", 1e3 * seen["late_max_s"], "ms"),
        figure(f"{label}: hop with its processes over the model, p50", 1e2 * overhead["p50"], "ms"),
        figure(f"{label}: the same, p99", 1e2 * overhead["p99"], "ms"),
        figure(f"{label}: CPU per forwarded MB, work", 1e3 * work_s / (seen["wire_bytes"] / 1e6), "ms"),
        figure(
            f"{label}: the same, waiting included", 1e3 * seen["cpu_s"] / (seen["wire_bytes"] / 1e6), "ms"
        ),
        figure(f"{label}: busiest second of the forwarder", 100 * seen["busy_max_ratio"], "%"),
    ]


def _shared() -> list[dict[str, Any]]:
    n_pairs, shared_bps = 4, 1e9
    seen = streams(n_pairs, Link(_DELAY_S, 1e9), 6.0, shared_bps)
    label = f"{n_pairs} x 1 Gbit/s over one shared link of 1 Gbit/s"
    return [
        figure(f"{label}: goodput in all", seen.goodput_bps / 1e6, "Mbit/s", "965"),
        figure(f"{label}: slowest stream's part of a fair share", 100 * seen.least_share_ratio, "%"),
    ]


def _across(n_machines: int) -> list[dict[str, Any]]:
    """Measures delays and streams on one machine or over the underlay of two, which are namespaces here."""
    errors_s = _best(lambda: sorted(one_way(_DELAY_S, 1000, n_machines)), lambda each: each[990])
    label = f"{n_machines} machine{'s'[: n_machines - 1]}, one-way error at {1e3 * _DELAY_S:g} ms"
    figures = [
        figure(f"{label}: p50", 1e3 * errors_s[500], "ms"),
        figure(f"{label}: p99", 1e3 * errors_s[990], "ms"),
    ]
    for rate_bps in (1e9, 10e9):
        run = functools.partial(streams, 1, Link(_DELAY_S, rate_bps), seconds=3.0, n_machines=n_machines)
        seen: Streams = _best(run, lambda each: -each.goodput_bps)
        label = f"{n_machines} machine{'s'[: n_machines - 1]}, {rate_bps / 1e9:g} Gbit/s asked"
        figures += [
            figure(f"{label}: goodput", seen.goodput_bps / 1e9, "Gbit/s"),
            figure(f"{label}: packets delivered", seen.packets_per_s, "1/s"),
            figure(f"{label}: CPU per MB of all forwarders", 1e3 * seen.cpu_s_per_mb, "ms"),
            figure(f"{label}: busier forwarder", 100 * seen.busy_ratio, "%"),
            figure(f"{label}: lateness, p99", 1e3 * seen.late_p99_s, "ms"),
            figure(f"{label}: datagrams lost", seen.underlay_lost, ""),
        ]
    return figures


def _stream(n_pairs: int, rate_bps: float) -> list[dict[str, Any]]:
    link = Link(_DELAY_S, rate_bps)
    seen: Streams = _best(
        functools.partial(streams, n_pairs, link, seconds=3.0), lambda each: -each.goodput_bps
    )
    label = f"{n_pairs} x {rate_bps / 1e9:g} Gbit/s asked"
    return [
        figure(f"{label}: goodput in all", seen.goodput_bps / 1e9, "Gbit/s"),
        figure(f"{label}: forwarder's lateness, p99", 1e3 * seen.late_p99_s, "ms"),
        figure(f"{label}: CPU per forwarded MB, work", 1e3 * seen.cpu_s_per_mb, "ms"),
        figure(f"{label}: forwarder busy", 100 * seen.busy_ratio, "%"),
    ]
