"""``python -m benchmarks scale``: CPU time and memory of a run on one machine, for more and more servers and
sessions.

Each session has a chain of four hops, each server holds one of four blocks, and the RTT is 20 ms. Runs are in
real time on ``fabric`` and ``loopback``. CPU time and memory come from the kernel (``/proc``), for all
processes of the run; other load of the machine has little effect on them. The CPU time per hop and step
bounds the steps per second that the machine's CPUs can serve.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.proc import memory_bytes, usage

_SCENARIO = """
name = "scale"
seed = 1
model = {{ profile = "bloom-176b", n_blocks = 4 }}
clients = {{ site = "a", count = {n_clients} }}
policy = {{ placement = "fixed:{plan}", routing = "ws-rr" }}
workload = {{ arrivals = "constant", rate = {rate}, n_requests = {n_requests}, n_input_tokens = 16, n_output_tokens = 64 }}

[[servers]]
hardware = "a100"
site = "b"
count = {n_servers}
memory = "6 GB"

[network]
kind = "clusters"
pairs = [
    {{ sites = ["a", "a"], rtt = "2 ms", rate = "10 Gbit/s" }},
    {{ sites = ["b", "b"], rtt = "2 ms", rate = "10 Gbit/s" }},
    {{ sites = ["a", "b"], rtt = "20 ms", rate = "1 Gbit/s" }},
]
"""


@dataclass(frozen=True)
class Cost:
    """The cost of one run. CPU times are those while it served; memory is the proportional set size (``Pss``)
    in MB.

    - ``hop_steps``: number of steps of all hops; ``started_s``: seconds to start
    - ``cpu_share``: kind of process -> share of the CPU time
    - ``overhead_ms``: the testbed's own overhead per hop
    """

    network: str
    n_servers: int
    n_sessions: int
    started_s: float
    mb_per_server: float
    mb_client: float
    mb_orchestrator: float
    hop_steps: int
    served_s: float
    cpu_ms_per_hop_step: float
    cpu_share: dict[str, float]
    overhead_ms: float | None
    load: float
    """Load of the machine in the minute before the run: it affects wall-clock times."""


def _kind(name: str) -> str:
    if not name.startswith("tb:"):
        return "orchestrator"
    name = name[3:]
    for prefix in ("a100", "client", "fabric"):
        if name.startswith(prefix):
            return {"a100": "servers", "client": "clients", "fabric": "forwarder"}[prefix]
    return "other"


def _cpu_s(pid: int) -> float:
    try:
        return usage(pid)[1]
    except OSError:
        return 0.0


def _processes(run_dir: Path, orchestrator: int) -> dict[int, str]:
    """Returns process id -> name for all processes of a run, without those that only keep CPUs awake."""
    found = {orchestrator: "orchestrator"}
    mark = b"TESTBED_RUN=" + os.fsencode(run_dir)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    name = (entry / "comm").read_text().rstrip("\n")
                    if not name.startswith("tb:awake"):
                        found[int(entry.name)] = name
            except OSError:
                continue
    return found


def _wait_for(log: Path, text: str, process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Waits until ``text`` is in ``log``. Raises ``SystemExit`` if the process ends first, or after
    ``limit_s``.
    """
    until_s = time.monotonic() + limit_s
    while text not in log.read_text(encoding="utf-8"):
        if process.poll() is not None or time.monotonic() > until_s:
            raise SystemExit(
                f"scale: the run did not print {text!r}: {log.read_text(encoding='utf-8')[-2000:]}"
            )
        time.sleep(0.05)


def run_once(network: str, n_servers: int, n_sessions: int) -> Cost:
    """Does one run, with ``n_sessions`` sessions that all begin in the first second."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        plan, scenario, log = place / "plan.json", place / "scale.toml", place / "stderr"
        plan.write_text(json.dumps([[1 + number % 4, 1] for number in range(n_servers)]), encoding="utf-8")
        text = _SCENARIO.format(
            n_clients=1, plan=plan, rate=n_sessions, n_requests=n_sessions, n_servers=n_servers
        )
        scenario.write_text(text, encoding="utf-8")
        run_dir = place / "run"
        command = [
            sys.executable,
            "-m",
            "testbed",
            "up",
            str(scenario),
            "--network",
            network,
            "--hold",
            "--no-page",
        ]
        command += [
            "--clock",
            "real",
            "--no-twin",
            "--no-report",
            "--no-trace",
            "--json",
            "--out",
            str(run_dir),
        ]
        load = os.getloadavg()[0]
        with open(log, "wb") as stderr, open(place / "stdout", "wb") as stdout:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
            try:
                _wait_for(log, "nodes up", process, 300)
                names = _processes(run_dir, process.pid)
                before = {pid: _cpu_s(pid) for pid in names}
                _wait_for(log, "holding the testbed up", process, 600)
                used = {pid: _cpu_s(pid) - cpu_s for pid, cpu_s in before.items()}
                memory: dict[str, list[float]] = {}
                for pid, name in names.items():
                    memory.setdefault(_kind(name), []).append(memory_bytes(pid)["Pss"] / 2**20)
                process.send_signal(signal.SIGINT)
                process.wait(120)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        summary = json.loads((place / "stdout").read_text(encoding="utf-8"))
        plan_of_run = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    n_steps = int(summary["metrics"]["hop_compute_s"]["n"])
    cpu: dict[str, float] = {}
    for pid, cpu_s in used.items():
        cpu[_kind(names[pid])] = cpu.get(_kind(names[pid]), 0.0) + cpu_s
    overhead_s, total_s = summary["overhead_per_hop_s"], sum(cpu.values())
    return Cost(
        network,
        n_servers,
        n_sessions,
        plan_of_run["startup_s"]["total"],
        sum(memory["servers"]) / len(memory["servers"]),
        sum(memory["clients"]),
        sum(memory["orchestrator"]),
        n_steps,
        summary["wall_s"],
        1000 * total_s / n_steps,
        {kind: round(cpu_s / total_s, 3) for kind, cpu_s in sorted(cpu.items(), key=lambda entry: -entry[1])},
        None if overhead_s is None else 1000 * overhead_s,
        load,
    )


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks scale", description=__doc__)
    parser.add_argument("--servers", type=int, nargs="+", default=[12, 40, 120, 300])
    parser.add_argument("--sessions", type=int, nargs="+", default=[4, 16, 40])
    parser.add_argument("--networks", nargs="+", default=["fabric", "loopback"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    cases = [(network, n, options.sessions[0]) for network in options.networks for n in options.servers]
    cases += [(network, options.servers[0], n) for network in options.networks for n in options.sessions[1:]]
    costs: list[dict[str, Any]] = []
    head = "network   servers sessions  start s  MB/server MB client MB orch.  hop-steps  served s  CPU ms/hop-step  overhead ms  load"
    print(head, file=sys.stderr)
    for case in cases:
        cost = run_once(*case)
        overhead = "-" if cost.overhead_ms is None else f"{cost.overhead_ms:.2f}"
        print(
            f"{cost.network:<9} {cost.n_servers:>7} {cost.n_sessions:>8} {cost.started_s:>8.2f} {cost.mb_per_server:>10.1f}"
            f" {cost.mb_client:>9.1f} {cost.mb_orchestrator:>8.1f} {cost.hop_steps:>10} {cost.served_s:>9.1f}"
            f" {cost.cpu_ms_per_hop_step:>16.2f} {overhead:>12} {cost.load:>5.1f}  "
            + " ".join(f"{kind} {share:.0%}" for kind, share in cost.cpu_share.items()),
            file=sys.stderr,
        )
        costs.append(asdict(cost))
    if options.json:
        print(json.dumps(costs))
    return 0
