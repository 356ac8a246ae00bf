"""``testbed clean``: ends processes of killed runs, removes their files, and makes their missing tables.

The namespaces and devices of a run have no names and vanish with its processes, and these die with the run's
owner. What can be left is a process that was not killed, a control socket, a half-written file, a temporary
folder, and logs without tables.
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
    host_of,
    is_being_written,
    is_in_use,
    owner_alive,
    pid_namespace,
    remove,
    runs,
    scratch_folders,
)
from testbed.runtime.real.awake import hurry

TABLES = ("summary.json", "requests.parquet", "hops.parquet")
"""What every run has when it has ended. A trace may not be wanted; it is written before the summary."""
_TERM_WAIT_S = 2.0
_KILL_WAIT_S = 20.0


def clean_command(out: Path) -> dict[str, Any]:
    """Remove what killed runs left, and make the tables of those in ``out``; returns what was done, as lists.

    - ``processes``: ``{pid, run}`` of those that outlived their run's owner, and were ended
    - ``sockets``, ``files`` (half-written ones, and addresses of pages and endpoints), ``folders`` (temporary
      ones): paths that were removed
    - ``completed``: run directories whose tables were made
    - ``problems``: sentences

    Touches only processes with this tool's run variable, files in run directories, and temporary folders; and
    only if the run's owner has ended. A run that another machine has started, or a container, is left to that.
    """
    kinds = ("processes", "sockets", "files", "folders", "completed", "problems")
    answer: dict[str, Any] = {kind: [] for kind in kinds}
    orphans = _orphans()
    answer["processes"] = [{"pid": pid, "run": str(run)} for pid, run in orphans.items()]
    answer["problems"] = [
        f"process {pid} of {orphans[pid]} was killed and has not ended yet: run `testbed clean` again"
        for pid in _end(orphans)
    ]
    for unclaimed in _in_runs(out, f"{OWNER}.*{HALF_WRITTEN}"):  # killed while it noted whose the folder is
        if not (unclaimed.parent / OWNER).exists() and not is_being_written(unclaimed):
            remove(unclaimed)
            answer["files"].append(str(unclaimed))
    for owner in _in_runs(out, OWNER):
        run = owner.parent
        if owner_alive(run):
            continue
        sockets = sorted(path for path in run.iterdir() if path.is_socket())
        halves = sorted([*run.rglob(f"*{HALF_WRITTEN}"), *run.glob(PAGE), *run.glob(ENDPOINT)])
        lacks_tables = any((run / "events").glob("*.log")) and not all(
            (run / name).exists() for name in TABLES
        )
        if (sockets or halves or lacks_tables) and is_in_use(run):
            answer["problems"].append(
                f"{run} was started on {host_of(run)}, where it may still run, and is left as it is: run `testbed clean` "
                f"there, or complete it with `testbed report {run}` if it has ended"
            )
            continue
        for socket in sockets:
            socket.unlink(missing_ok=True)
            answer["sockets"].append(str(socket))
        for half in halves:
            if is_being_written(half):  # by `testbed report`
                continue
            remove(half)
            answer["files"].append(str(half))
        if lacks_tables:
            try:
                finish_run(run, load_run(run))
                answer["completed"].append(str(run))
            except (TestbedError, OSError, ValueError, LookupError, TypeError) as error:
                # Whatever is wrong with the files of one run must not keep those of others from being completed.
                answer["problems"].append(f"{run}: {error}")
    for folder in scratch_folders():
        with contextlib.suppress(FileNotFoundError):  # its owner, or another `clean`, removes it now
            if not is_in_use(folder) and _is_ours(folder):
                shutil.rmtree(folder)
                answer["folders"].append(str(folder))
    return answer


def _in_runs(out: Path, name: str) -> list[Path]:
    """Return the files with this name, or of this pattern, in ``out`` and in the folders of runs in it."""
    return sorted([*out.glob(name), *out.glob(f"*/{name}"), *out.glob(f"*/{SEED}*/{name}")])


def _is_ours(folder: Path) -> bool:
    """Whether a temporary folder is this user's; root cleans those of all users."""
    return not folder.is_symlink() and (os.geteuid() == 0 or folder.stat().st_uid == os.geteuid())


def _orphans() -> dict[int, Path]:
    """Return the run directory, by pid, of every process of a run whose owner has ended."""
    found: dict[int, Path] = {}
    if not Path("/proc").is_dir():  # no Linux: all nodes of a run are one process
        return found
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (run := _run_left_by(int(entry.name))) is not None:
            found[int(entry.name)] = run
    return found


def _run_left_by(pid: int) -> Path | None:
    """Return the run directory of a process whose run's owner has ended; None for any other process.

    The owner is read from the process' environment, because only the process may see the run directory.
    For processes in another pid namespace, such as a container, it is None: their pids mean nothing here.
    """
    process = Path("/proc") / str(pid)
    with contextlib.suppress(OSError):  # another user's process, or one that has just ended
        variables = os.fsdecode((process / "environ").read_bytes()).split("\0")
        values = {name: value for name, _, value in (variable.partition("=") for variable in variables)}
        owner, _, started = values.get(OWNER_VARIABLE, "").partition(":")
        is_here = pid_namespace(pid) == pid_namespace(os.getpid())
        if RUN_VARIABLE in values and owner and not runs(int(owner), started) and is_here:
            return Path(values[RUN_VARIABLE])
    return None


def _end(pids: Iterable[int]) -> list[int]:
    """End processes with SIGTERM, then SIGKILL; returns the pids of those that still have not ended.

    A killed process ends when it next gets a CPU, for which those that keep CPUs awake would wait at idle priority.
    """
    left = list(pids)
    for number, wait_s in ((signal.SIGTERM, _TERM_WAIT_S), (signal.SIGKILL, _KILL_WAIT_S)):
        hurry(left)
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
    """Return what was done as lines for the terminal."""
    lines = [f"ended process {p['pid']} of {p['run']}" for p in answer["processes"]]
    lines += [f"removed {path}" for path in answer["sockets"] + answer["files"] + answer["folders"]]
    lines += [f"completed the tables of {path}" for path in answer["completed"]]
    lines += [f"problem: {text}" for text in answer["problems"]]
    return "\n".join(lines) or "nothing was left"
