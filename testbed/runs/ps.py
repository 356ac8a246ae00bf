"""``testbed ps``: lists the testbeds that run on this machine.

A running testbed has its ``events.jsonl`` open, and ``/proc`` lists the open files of every process. Only
root sees those of other users.
"""

from __future__ import annotations

import contextlib
import json
import tomllib
from pathlib import Path
from typing import Any

from testbed.records.events import (
    EVENTS,
    Broken,
    Event,
    Holding,
    Interrupted,
    NetworkOpened,
    Serving,
    Stopped,
    read_events,
)
from testbed.records.plan import find_plan
from testbed.rundir import ENDPOINT, NETWORK, OWNER, PAGE, owner_alive
from testbed.terminal import columns

_PHASES: dict[type[Event], str] = {
    NetworkOpened: "starting",
    Serving: "serving",
    Holding: "holding",
    Interrupted: "ending",
    Broken: "ending",
    Stopped: "ending",
}
"""The phase of a testbed, by the last of these events that it has written."""


def ps_command(proc: Path = Path("/proc")) -> dict[str, Any]:
    """Return ``testbeds``, ordered by their start, and ``share_cpus``, whether there are several.

    A testbed has ``run``, ``scenario``, ``phase``, ``network``, ``clock``, ``pid``, ``since``, and the URLs
    ``endpoint`` and ``page``; a value is None if there is none or it is not known yet.
    """
    found = [_described(run_dir) for run_dir in sorted(_running(proc))]
    testbeds = sorted(found, key=lambda testbed: (str(testbed["since"]), testbed["pid"]))
    return {"testbeds": testbeds, "share_cpus": len(testbeds) > 1}


def _running(proc: Path) -> set[Path]:
    """Return the run directories whose owners have ``events.jsonl`` open."""
    found = set()
    for process in proc.iterdir() if proc.is_dir() else ():
        if process.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                for descriptor in (process / "fd").iterdir():
                    path = descriptor.readlink()
                    if path.name == EVENTS and _read(path.parent / OWNER).get("pid") == int(process.name):
                        found.add(path.parent)
    return {run_dir for run_dir in found if owner_alive(run_dir)}


def _described(run_dir: Path) -> dict[str, Any]:
    owner, network = (_read(run_dir / name) for name in (OWNER, NETWORK))
    plan = find_plan(run_dir)  # `testbed net` writes none
    events = read_events(run_dir, tuple(_PHASES))
    clock = None if plan is None else plan.clock
    return {
        "run": str(run_dir),
        "scenario": _scenario(run_dir),
        "phase": _PHASES[type(events[-1])] if events else "starting",
        "network": network.get("name", None if plan is None else plan.network),
        "clock": clock.name if clock is not None else "real" if network else None,
        "pid": owner.get("pid"),
        "since": owner.get("since"),
        "endpoint": _read(run_dir / ENDPOINT).get("url"),
        "page": _read(run_dir / PAGE).get("url"),
    }


def _scenario(run_dir: Path) -> str | None:
    try:
        name = tomllib.loads((run_dir / "scenario.toml").read_text(encoding="utf-8")).get("name")
    except (OSError, ValueError):  # it is not written yet
        return None
    return str(name)


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a run; empty if there is no such file, or no object in it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def ps_text(answer: dict[str, Any]) -> str:
    """Return the testbeds as a table for the terminal, with the addresses of their pages and endpoints."""
    testbeds = answer["testbeds"]
    if not testbeds:
        return "no testbed is running"
    keys = ("run", "scenario", "phase", "network", "pid", "since")
    rows = [keys, *(tuple(str(testbed[key] or "-") for key in keys) for testbed in testbeds)]
    lines = columns(rows)
    for testbed in testbeds:
        lines += [f"{testbed['run']}: {key} {testbed[key]}" for key in ("endpoint", "page") if testbed[key]]
    if answer["share_cpus"]:
        lines.append(
            f"{len(testbeds)} testbeds share this machine's CPUs: in real time each disturbs what the "
            "others measure"
        )
    return "\n".join(lines)
