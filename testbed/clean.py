"""``testbed clean``: ends what killed runs left running and completes what they measured.

A run's namespaces and devices have no names and vanish with its processes, and those die with the
run's owner; what can be left is a process that the kernel did not get to, a control socket, and logs
that were never made into tables.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from testbed.errors import TestbedError
from testbed.handle import RUN_VARIABLE
from testbed.results import finish_run, load_run
from testbed.rundir import LINKS_PREFIX, OWNER, owner_alive

_TERM_WAIT_S = 2.0


def clean_command(out: Path) -> dict[str, Any]:
    """Answers ``{processes: [{pid, run}], sockets: [...], folders: [...], completed: [...], problems: [...]}``.

    Touches only processes that carry this tool's run variable and whose run has no living owner.
    """
    answer: dict[str, Any] = {"processes": [], "sockets": [], "folders": [], "completed": [], "problems": []}
    for pid, run in _orphans():
        _end(pid)
        answer["processes"].append({"pid": pid, "run": str(run)})
    for owner in sorted([*out.glob(OWNER), *out.glob(f"*/{OWNER}")]):
        run = owner.parent
        if owner_alive(run):
            continue
        socket = run / "control.sock"
        if socket.exists():
            socket.unlink()
            answer["sockets"].append(str(socket))
        if not (run / "summary.json").exists() and any((run / "events").glob("*.log")):
            try:
                finish_run(run, load_run(run))
                answer["completed"].append(str(run))
            except (TestbedError, OSError) as error:
                answer["problems"].append(f"{run}: {error}")
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{LINKS_PREFIX}*")):
        if not owner_alive(folder):
            shutil.rmtree(folder)
            answer["folders"].append(str(folder))
    return answer


def _orphans() -> list[tuple[int, Path]]:
    """(pid, run directory) of every process of a run whose owner is gone."""
    marker = f"{RUN_VARIABLE}=".encode()
    found: list[tuple[int, Path]] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # another user's process, or one that has just ended
            for variable in (entry / "environ").read_bytes().split(b"\0"):
                if variable.startswith(marker):
                    run = Path(os.fsdecode(variable[len(marker) :]))
                    if not owner_alive(run):
                        found.append((int(entry.name), run))
    return found


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _TERM_WAIT_S
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)


def clean_text(answer: dict[str, Any]) -> str:
    """What was done, for the terminal."""
    lines = [f"ended process {p['pid']} of {p['run']}" for p in answer["processes"]]
    lines += [f"removed {path}" for path in answer["sockets"] + answer["folders"]]
    lines += [f"completed the tables of {path}" for path in answer["completed"]]
    lines += [f"problem: {text}" for text in answer["problems"]]
    return "\n".join(lines) or "nothing was left"
