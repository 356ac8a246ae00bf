"""``testbed clean``: ends what killed runs left running and completes what they measured.

A run's namespaces and devices have no names and vanish with its processes, and those die with the
run's owner; what can be left is a process that the kernel did not get to, a control socket, a file or
a temporary folder, and logs that were never made into tables.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from testbed.errors import TestbedError
from testbed.results import finish_run, load_run
from testbed.rundir import (
    ENDPOINT,
    HALF_WRITTEN,
    OWNER,
    OWNER_VARIABLE,
    PAGE,
    RUN_VARIABLE,
    SEED,
    owner_alive,
    runs,
    scratch_folders,
)

TABLES = ("summary.json", "requests.parquet", "hops.parquet", "trace.json")
_TERM_WAIT_S = 2.0
_KILL_WAIT_S = 20.0


def clean_command(out: Path) -> dict[str, Any]:
    """What was removed, and what was completed; every value is a list, of paths unless said otherwise.

    ``processes`` (``{pid, run}``) that outlived their run, ``sockets``, half-written ``files`` and addresses of pages, temporary
    ``folders``; runs ``completed``: their tables are made; ``problems``, a sentence each. Touches only
    what carries this tool's run variable or lies in a run's folder, and only where the run's owner is gone.
    """
    kinds = ("processes", "sockets", "files", "folders", "completed", "problems")
    answer: dict[str, Any] = {kind: [] for kind in kinds}
    orphans = _orphans()
    answer["processes"] = [{"pid": pid, "run": str(run)} for pid, run in orphans.items()]
    answer["problems"] = [
        f"process {pid} of {orphans[pid]} was killed and has not ended yet: run `testbed clean` again"
        for pid in _end(orphans)
    ]
    for owner in sorted([*out.glob(OWNER), *out.glob(f"*/{OWNER}"), *out.glob(f"*/{SEED}*/{OWNER}")]):
        run = owner.parent
        if owner_alive(run):
            continue
        for socket in sorted(path for path in run.iterdir() if path.is_socket()):
            socket.unlink()
            answer["sockets"].append(str(socket))
        for half in sorted([*run.rglob(f"*{HALF_WRITTEN}"), *run.glob(PAGE), *run.glob(ENDPOINT)]):
            half.unlink()
            answer["files"].append(str(half))
        if any((run / "events").glob("*.log")) and not all((run / name).exists() for name in TABLES):
            try:
                finish_run(run, load_run(run))
                answer["completed"].append(str(run))
            except (TestbedError, OSError) as error:
                answer["problems"].append(f"{run}: {error}")
    for folder in scratch_folders():
        if not owner_alive(folder) and _is_ours(folder):
            shutil.rmtree(folder)
            answer["folders"].append(str(folder))
    return answer


def _is_ours(folder: Path) -> bool:
    """Whether this user may judge a temporary folder: others' runs are theirs to clean."""
    return not folder.is_symlink() and (os.geteuid() == 0 or folder.stat().st_uid == os.geteuid())


def _orphans() -> dict[int, Path]:
    """Run directory by pid of every process of a run whose owner is gone."""
    found: dict[int, Path] = {}
    if not Path("/proc").is_dir():  # a system where all nodes of a run are one process
        return found
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (run := _run_left_by(int(entry.name))) is not None:
            found[int(entry.name)] = run
    return found


def _run_left_by(pid: int) -> Path | None:
    """The run directory of a process whose run's owner is gone; None of any other, and of one that has ended.

    Processes say whose they are: a run's folder may be one that only they see. Those that number processes in
    another way (in a container) are not judged here.
    """
    process = Path("/proc") / str(pid)
    with contextlib.suppress(OSError):  # another user's process, or one that has just ended
        variables = os.fsdecode((process / "environ").read_bytes()).split("\0")
        said = {name: value for name, _, value in (variable.partition("=") for variable in variables)}
        owner, _, started = said.get(OWNER_VARIABLE, "").partition(":")
        if RUN_VARIABLE in said and owner and not runs(int(owner), started) and _numbers_as_we_do(process):
            return Path(said[RUN_VARIABLE])
    return None


def _numbers_as_we_do(process: Path) -> bool:
    return (process / "ns/pid").readlink() == Path("/proc/self/ns/pid").readlink()


def _end(pids: Iterable[int]) -> list[int]:
    """End processes: ask, then kill; gives those that a busy machine has not let end.

    A killed process ends when it next gets a CPU: what keeps CPUs awake has idle priority, and waits for it.
    """
    left = list(pids)
    for number, wait_s in ((signal.SIGTERM, _TERM_WAIT_S), (signal.SIGKILL, _KILL_WAIT_S)):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + wait_s
        while (
            left := [pid for pid in left if _run_left_by(pid) is not None]
        ) and time.monotonic() < deadline:
            time.sleep(0.02)
    return left


def clean_text(answer: dict[str, Any]) -> str:
    """What was done, for the terminal."""
    lines = [f"ended process {p['pid']} of {p['run']}" for p in answer["processes"]]
    lines += [f"removed {path}" for path in answer["sockets"] + answer["files"] + answer["folders"]]
    lines += [f"completed the tables of {path}" for path in answer["completed"]]
    lines += [f"problem: {text}" for text in answer["problems"]]
    return "\n".join(lines) or "nothing was left"
