"""Run directories, and what tells a live run from a dead one."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from testbed.errors import UserError

EVENTS = "events.jsonl"
NETWORK_CHANGE = "network-change"
"""The event of links that change."""
MOVED = "moved"
"""The event of a server that has changed its blocks."""
BY_HAND, BY_SCENARIO = "hand", "scenario"
"""Whose doing a fault or a change of links was."""
OWNER = "owner.json"
NETWORK = "network.json"
"""Where the nodes of a run in real time are: addresses, and who holds their namespaces."""
HOSTS = "hosts"
"""Their names, as ``/etc/hosts`` has them for programs on a node."""
HALF_WRITTEN = ".part"
"""Ending of files that are being written."""
NODE_VARIABLE = "TESTBED_NODE"
"""Programs of the user's find the name of their node in this environment variable."""
RUN_VARIABLE = "TESTBED_RUN"
"""Every process of a run carries the run's directory in this environment variable."""
OWNER_VARIABLE = "TESTBED_OWNER"
"""And in this one whose run it is: the owner's pid, a colon, and when it started."""
TWIN = "twin"
"""Folder of the same run in virtual time: a run directory of its own."""
SEED = "seed-"
"""How the folders of several runs of one scenario begin: each is a run directory."""
PAGE = "page.json"
"""Where the page of a run is served while it runs: ``url``, ``pid``."""
ENDPOINT = "endpoint.json"
"""Where a run takes requests from outside while it serves: ``url``."""
SCRATCH = ("links", "virtual", "sweep", "agent")
"""What makes temporary folders: ``testbed links``, simulations by the system itself, runs of a sweep in real time, agents."""


def make_run_dir(out: Path | None, name: str) -> Path:
    """``out``, which must be new or empty, or else a new ``runs/<name>-<time>``; with its subfolders.

    Raises ``UserError`` when it cannot be made.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1000):
        path = out or Path("runs") / (f"{name}-{stamp}" if not number else f"{name}-{stamp}-{number}")
        try:
            if path.is_dir() and not any(path.iterdir()):
                pass
            else:
                path.mkdir(parents=True)
            for folder in ("events", "logs"):
                (path / folder).mkdir()
            claim(path)
        except FileExistsError:
            if out is not None:
                raise UserError(f"{out} holds something already; give a new folder with --out") from None
            continue
        except OSError as error:
            raise UserError(
                f"cannot make the run directory {path}: {error.strerror}; choose another with --out"
            ) from error
        return path.resolve()
    raise UserError("cannot find a free name for a run directory in runs/")


def check_new_folder(out: Path, option: str = "--out") -> None:
    """``out``, given as ``option``, must be new or empty, and writable; nothing is made. Raises ``UserError``."""
    try:
        if out.exists() and any(out.iterdir()):
            raise UserError(f"{out} holds something already; give a new folder as {option}")
    except OSError as error:
        raise UserError(
            f"cannot use the folder {out}: {error.strerror}; choose another as {option}"
        ) from error
    check_writable(out, option)


def check_writable(out: Path, option: str = "--out") -> None:
    """Nobody should measure for a folder that cannot be written; nothing is made. Raises ``UserError``."""
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise UserError(f"{there} is a file, but a folder belongs there; choose another as {option}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"{out}: nothing can be written to {there} (read-only, or not yours); choose another as {option}"
        )


@contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """A temporary folder of a ``SCRATCH`` kind, which `testbed clean` removes if this process is killed."""
    assert kind in SCRATCH, kind
    with tempfile.TemporaryDirectory(prefix=f"testbed-{kind}-") as folder:
        claim(Path(folder))
        yield Path(folder)


def scratch_folders() -> list[Path]:
    """All that are there, whoever owns them."""
    folder = Path(tempfile.gettempdir())
    return sorted(path for kind in SCRATCH for path in folder.glob(f"testbed-{kind}-*"))


def claim(run_dir: Path) -> None:
    """Note in ``run_dir`` that this process owns it."""
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    write_json(run_dir / OWNER, {"pid": os.getpid(), "started": process_start(os.getpid()), "since": since})


def process_start(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty if there is none. Tells pids apart."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


def marks(run_dir: Path, owner: int | None = None) -> dict[str, str]:
    """What the environment of every process of a run says: which run it is, and that it is its owner's (this process's)."""
    owner = os.getpid() if owner is None else owner
    return {RUN_VARIABLE: str(run_dir), OWNER_VARIABLE: f"{owner}:{process_start(owner)}"}


def runs(pid: int, started: str) -> bool:
    """Whether the process that had this number and start is still running."""
    return bool(started) and process_start(pid) == started


def owner_alive(run_dir: Path) -> bool:
    """Whether the ``testbed up`` that made ``run_dir`` is still running."""
    path = run_dir / OWNER
    try:
        if not path.is_file():  # a pipe of that name would be waited for
            return False
        owner = json.loads(path.read_text(encoding="utf-8"))
        return runs(int(owner["pid"]), str(owner["started"]))
    except (OSError, ValueError, TypeError, KeyError):  # nobody of ours has written that
        return False


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the body ends without an error.

    Nothing is written through a link that stands at either path.
    """
    temporary = path.with_name(path.name + HALF_WRITTEN)
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def own_folder(path: Path) -> Path:
    """Make a folder of a run, unless it is there. Raises ``OSError`` if it is a link to somewhere else."""
    path.mkdir(exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, and nothing is written through links", str(path))
    return path


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_events(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    """The whole lines of ``events.jsonl`` of these kinds, in order; none where there is no such file."""
    try:
        lines = (run_dir / EVENTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:  # cut short by a kill or a full disk
            continue
        if isinstance(event, dict) and event.get("event") in kinds:
            found.append(event)
    return found


class EventWriter:
    """``events.jsonl``: one line per thing that happened to the run, written as it happens.

    A full disk does not stop the run: ``failure`` then holds the reason.
    """

    def __init__(self, run_dir: Path) -> None:
        self._fd = os.open(run_dir / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.failure: str | None = None

    def write(self, event: str, at_s: float | None = None, **details: Any) -> None:
        line = json.dumps({"event": event, "at_s": at_s, **details}) + "\n"
        try:
            os.write(self._fd, line.encode())
        except OSError as error:
            self.failure = f"cannot write {EVENTS}: {error.strerror}"

    def close(self) -> None:
        os.close(self._fd)
