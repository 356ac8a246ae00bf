"""Checks in a long run with failing servers whether memory stays constant and nothing is left behind.

``python -m benchmarks soak --minutes 30 --time-scale 20``, or in virtual time: ``python -m benchmarks soak
--minutes 6000 --clock virtual``.

One ``testbed up`` serves the scenario's rate of requests for so long, while servers are killed and begin
again. Every ``_EVERY_S`` seconds the memory and the open descriptors of all its processes are read.
``samples.csv``, ``soak.json``, ``memory.png`` and the run are written below ``--out``.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.proc import TICKS, memory_bytes
from testbed.errors import EXIT_INTERRUPTED, UserError
from testbed.experiments.sources import read_source
from testbed.rundir import process_start
from testbed.runtime.real.handle import open_descriptors
from tests.stress import soak_figures
from tests.stress.soak_figures import SERVER, Sample

_EVERY_S = 10.0
_WARM_UP_RATIO = 0.5
"""The first part of the time, which is not judged: pools and caches of limited size fill up in it."""
_LEVEL_RATIO = 1.02
"""Memory grows if its floor in the last quarter is more than so many times the floor in the quarter
before.
"""
_PREFIX, _LAUNCHER = "tb:", "launcher"
_ROLES = (_LAUNCHER, "fabric", "client")
_IDLE = ("awake", "still")
_ORCHESTRATOR = "orchestrator"


def role_of(name: str) -> str | None:
    """Returns the role of a process by the name that the launcher gave it; None if it serves nothing."""
    if name.startswith(_IDLE):
        return None
    return next((role for role in _ROLES if name.startswith(role)), SERVER)


def processes(orchestrator: int) -> Iterator[tuple[int, str]]:
    """Yields (process id, name) of the orchestrator, its launcher and the launcher's children."""
    yield orchestrator, _ORCHESTRATOR
    for launcher in _children(orchestrator):
        if _name(launcher) == _LAUNCHER:
            yield launcher, _LAUNCHER
            for pid in _children(launcher):
                name = _name(pid)
                if name and name != _LAUNCHER:  # a child that has not begun yet has its parent's name
                    yield pid, name


def _name(pid: int) -> str | None:
    """Returns the name that the launcher gave a process; None if it has none, or if there is no such
    process.
    """
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
        if name.startswith(_PREFIX):
            return name.removeprefix(_PREFIX)
    return None


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


def sample(pid: int, name: str, elapsed_s: float) -> Sample | None:
    """Returns a sample of the process; None if it has ended, or if its role is not measured."""
    role = name if name == _ORCHESTRATOR else role_of(name)
    n_descriptors = open_descriptors({name: pid}).get(name)
    started = process_start(pid)
    if role is None or n_descriptors is None or not started:
        return None
    try:
        sizes = memory_bytes(pid)
    except OSError:
        return None
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / TICKS
    load = os.getloadavg()[0]
    return Sample(elapsed_s, name, role, pid, age_s, sizes["Rss"], sizes["Pss"], n_descriptors, load)


def watch(run: subprocess.Popen[bytes], path: Path) -> list[Sample]:
    """Samples all processes of ``run``, writes the samples to ``path`` and returns them.

    It ends when the launcher has ended and the run has written its tables.
    """
    samples: list[Sample] = []
    began_at = time.monotonic()
    has_begun = False
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Sample._fields)
        while run.poll() is None:
            elapsed_s = time.monotonic() - began_at
            found = list(processes(run.pid))
            # On the network ``memory`` all nodes are in the orchestrator.
            if any(role_of(name) == "client" for _, name in found) or (
                len(found) == 1 and has_log(path.parent)
            ):
                has_begun = True
                now = [entry for pid, name in found if (entry := sample(pid, name, elapsed_s))]
                writer.writerows(now)
                file.flush()
                samples += now
            elif has_begun:
                run.wait()
                break
            pause_s = began_at + (elapsed_s // _EVERY_S + 1) * _EVERY_S - time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(max(pause_s, 0.1))
    return samples


def has_log(out: Path) -> bool:
    """Whether the run has begun to serve and has not stopped yet."""
    events = out / "run" / "events.jsonl"
    return events.exists() and b'"event": "stopped"' not in events.read_bytes()[-1000:]


def command(
    scenario: str,
    minutes: float,
    time_scale: float,
    run_dir: Path,
    clock: str = "real",
    sets: Sequence[str] = (),
) -> list[str]:
    """Returns the command ``testbed up`` with as many requests as arrive in ``minutes`` of the chosen clock.

    Raises ``UserError`` if the scenario has no rate.
    """
    rate = read_source(scenario).document.get("workload", {}).get("rate")
    if not isinstance(rate, int | float):
        raise UserError(f"{scenario} has no workload.rate; choose a scenario whose arrivals have one")
    n_requests = max(1, round(rate * minutes * 60 * time_scale))
    options = ["--time-scale", f"{time_scale:g}", "--set", f"workload.n_requests={n_requests}"]
    options += ["--clock", clock, "--no-trace", *(word for one in sets for word in ("--set", one))]
    return [
        *(sys.executable, "-m", "testbed", "up", scenario),
        *(*options, "--no-report", "--json", "--out", str(run_dir)),
    ]


def judge(summary: Mapping[str, Any] | None, growth: Mapping[str, Any]) -> list[str]:
    """Returns one sentence per promise that the run has broken."""
    if summary is None:
        return ["the run failed and has no summary"]
    wrong: list[str] = []
    n_ended = summary["n_completed"] + summary["n_failed"]
    if n_ended != summary["n_requests"]:
        wrong.append(f"{summary['n_requests'] - n_ended} requests neither completed nor failed")
    leaks = summary["leaks"] or {"unknown": 1}
    wrong += [f"left behind: {count:g} {what}" for what, count in leaks.items() if count]
    for role, found in growth.items():
        memory, descriptors = found["floor_mb"], found["floor_descriptors"]
        if memory["last"] > memory["before"] * _LEVEL_RATIO:
            wrong.append(
                f"memory of {role} grows: its lowest decile is {memory['before']:.1f} MB in the third quarter, "
                f"{memory['last']:.1f} MB in the last"
            )
        if descriptors["last"] > descriptors["before"] * _LEVEL_RATIO:
            wrong.append(
                f"descriptors of {role} grow: their lowest decile is {descriptors['before']:.0f} "
                f"in the third quarter, {descriptors['last']:.0f} in the last"
            )
    return wrong


def evaluate(out: Path, samples: Sequence[Sample], status: int) -> dict[str, Any]:
    """Writes ``soak.json`` and the figure. Returns the content of ``soak.json``: what was served, how memory
    grew, what was left behind, and what is wrong.
    """
    real_s = samples[-1].elapsed_s if samples else 0.0
    warm_up_s = _WARM_UP_RATIO * real_s
    kept = soak_figures.warmed_up(samples, warm_up_s)
    growth = {role: soak_figures.growth(kept, role) for role in soak_figures.roles(kept, 3)}
    try:
        summary = json.loads((out / "run" / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        summary = None
    reported = (
        *(
            "clock",
            "scenario_s",
            "time_scale",
            "network",
            "n_requests",
            "n_completed",
            "n_failed",
            "n_faults",
            "n_replays",
        ),
        *("recovery_s", "recovery_floor_s", "decisions", "leaks", "emulation_error", "overhead_per_hop_s"),
    )
    wrong = judge(summary, growth)
    loads = [entry.load for entry in samples]
    soak = {
        "exit_status": status,
        "real_s": real_s,
        "n_samples": len(samples),
        "warm_up_s": warm_up_s,
        "n_cpus": os.cpu_count(),
        "load": {"mean": sum(loads) / len(loads), "max": max(loads)} if loads else None,
        "run": {key: summary.get(key) for key in reported} if summary else None,
        "growth": growth,
        "wrong": wrong,
    }
    (out / "soak.json").write_text(json.dumps(soak, indent=2) + "\n", encoding="utf-8")
    if samples:
        soak_figures.draw(out / "memory.png", samples, warm_up_s)
    return soak


def report(soak: Mapping[str, Any]) -> str:
    """Returns the figures and the verdict as text."""
    lines = []
    run = soak["run"]
    if run:
        lines.append(
            f"{run['n_requests']} requests in {soak['real_s'] / 60:.1f} minutes, "
            f"{(run['scenario_s'] or 0) / 3600:.1f} hours of scenario time: {run['n_completed']} completed, "
            f"{run['n_failed']} failed; {run['n_faults']} faults, {run['n_replays']} replays; leaks {run['leaks']}"
        )
    for role, found in soak["growth"].items():
        memory, size, floor = found["rss_mb_per_hour"], found["rss_mb"], found["floor_mb"]
        lines.append(
            f"  {role:<13} {size['first']:7.1f} to {size['last']:6.1f} MB, at most {size['max']:.1f}, floor "
            f"{floor['before']:.1f} then {floor['last']:.1f}, {memory['per_hour']:+.2f} MB per hour "
            f"({memory['low']:+.2f} to {memory['high']:+.2f}), descriptors {found['descriptors']['first']:.0f} to "
            f"{found['descriptors']['last']:.0f}"
        )
    lines += [f"WRONG: {reason}" for reason in soak["wrong"]] or ["nothing is known to be wrong"]
    return "\n".join(lines)


def run(arguments: list[str]) -> int:
    """Does a soak. Returns exit code 1 if anything grew, was left behind or got lost, 2 if an option is
    invalid, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--time-scale", type=float, help="default: 20 in real time, 1 in virtual time")
    parser.add_argument("--clock", choices=("real", "virtual"), default="real")
    parser.add_argument("--set", action="append", default=[], dest="sets", help="as for testbed up")
    parser.add_argument("--scenario", default="churn")
    parser.add_argument("--out", type=Path, help="a new folder; default: a temporary one")
    options = parser.parse_args(arguments)
    out = options.out or Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        time_scale = options.time_scale or (20.0 if options.clock == "real" else 1.0)
        words = command(
            options.scenario, options.minutes, time_scale, out / "run", options.clock, options.sets
        )
    except UserError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    print(f"soak in {out}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the run as Ctrl-C does
    with open(out / "up.log", "wb") as log:
        child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            samples = watch(child, out / "samples.csv")
        except KeyboardInterrupt:
            print(f"interrupted: the run up to now is in {out}", file=sys.stderr)
            return EXIT_INTERRUPTED
        finally:
            child.terminate()  # it ends its nodes and its network
            child.wait()
    soak = evaluate(out, samples, child.returncode)
    print(report(soak))
    return 1 if soak["wrong"] else 0
