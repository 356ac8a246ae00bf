"""Run directories: which files they have, how these are written, and whether a run's owner is still alive."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from testbed.errors import RunError, UserError

OWNER = "owner.json"
NETWORK = "network.json"
"""The nodes of a run in real time: their addresses, and the process that holds their namespaces."""
HOSTS = "hosts"
"""Names and addresses of the nodes, in the format of ``/etc/hosts``, for programs on a node."""
HALF_WRITTEN = ".part"
"""Suffix of files that are still being written."""
NODE_VARIABLE = "TESTBED_NODE"
"""Environment variable of the user's programs: the name of their node."""
RUN_VARIABLE = "TESTBED_RUN"
"""Environment variable of every process of a run: the run's directory."""
OWNER_VARIABLE = "TESTBED_OWNER"
"""Environment variable of every process of a run: the owner's pid, a colon, and the owner's start time."""
TWIN = "twin"
"""Folder of the run's twin, which is a run directory, too."""
SEED = "seed-"
"""Prefix of the folders of several runs of one scenario; each is a run directory."""
PAGE = "page.json"
"""The page of a run, while it is served: ``url``, ``pid``, ``started``."""
ENDPOINT = "endpoint.json"
"""The endpoint of ``testbed serve``, while it serves: ``url``."""
STUDY, STUDY_PAGE = "study.json", "index.html"
"""Files of the folder of a study (`testbed sweep`): what it is about, and the page of its results."""
LEADERBOARD = "leaderboard.parquet"
"""File of the folder of a leaderboard (`testbed score --all`), beside ``STUDY_PAGE``."""
_FIRST_NAMESPACE = "pid:[4026531836]"
"""The pid namespace in which Linux starts, from where all others are seen."""
SCRATCH = ("links", "virtual", "study", "agent", "page")
"""Kinds of temporary folders: of ``testbed links``, of simulations by the engine ``virtual``, of simulated or
measured runs of a study, of agents on other machines, of ``testbed view`` with a page's secret."""


def parquet_path(path: Path) -> Path:
    """Return ``path`` as pyarrow must get it: it mistakes a relative path with a colon for a URI."""
    return path.absolute()


def make_run_dir(out: Path | None, name: str) -> Path:
    """Make the run directory ``out``, or a new ``runs/<name>-<time>``, with its subfolders.

    Returns its absolute path. ``out`` must be new or an empty folder. This process becomes the owner. Raises
    ``UserError`` if the directory cannot be made.
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
    """Check that ``out``, given as ``option``, is new or empty, and can be written; leaves nothing.

    Raises ``UserError``.
    """
    try:
        if out.exists() and any(out.iterdir()):
            raise UserError(f"{out} holds something already; give a new folder as {option}")
    except OSError as error:
        raise UserError(
            f"cannot use the folder {out}: {error.strerror}; choose another as {option}"
        ) from error
    check_writable(out, option)


def check_writable(out: Path, option: str = "--out") -> None:
    """Check that the folder ``out`` can be written or made, before a long measurement begins; leaves nothing.

    Raises ``UserError``.
    """
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise UserError(f"{there} is a file, but a folder belongs there; choose another as {option}")
    try:  # what the permissions say does not hold for root, nor on every file system
        tempfile.TemporaryFile(prefix=".testbed-", dir=there).close()
    except OSError as error:
        raise UserError(
            f"{out}: nothing can be written to {there} ({error.strerror}); choose another as {option}"
        ) from error


@contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """Yield a temporary folder of a ``SCRATCH`` kind; `testbed clean` removes those of killed processes.

    Raises ``RunError`` if it cannot be made.
    """
    assert kind in SCRATCH, kind
    prefix = f"testbed-{kind}-{os.getpid()}-"
    with ExitStack() as stack:
        try:
            made = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(made))
            claim(folder)
        except OSError as error:
            raise RunError(
                f"cannot make a temporary folder: {error.strerror}; make room for it, or name another place in TMPDIR"
            ) from error
        yield folder


def scratch_folders() -> list[Path]:
    """Return the temporary folders of all ``SCRATCH`` kinds on this machine, whoever owns them."""
    folder = Path(tempfile.gettempdir())
    return sorted(path for kind in SCRATCH for path in folder.glob(f"testbed-{kind}-*"))


def claim(run_dir: Path) -> None:
    """Record in ``run_dir`` that this process owns it."""
    since, pid = datetime.now().astimezone().isoformat(timespec="seconds"), os.getpid()
    where = {"pid_namespace": pid_namespace(pid), "host": socket.gethostname(), "boot": _boot()}
    write_json(run_dir / OWNER, {"pid": pid, "started": process_start(pid), "since": since, **where})


def _boot() -> str:
    """Return what this machine's kernel has called itself since it started; empty where it has no such name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def pid_namespace(pid: int) -> str:
    """Return the name of a process's pid namespace; empty if it has ended, or is another user's."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def process_start(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if there is none, or if it has ended (a zombie).

    With the pid it names one process: the kernel uses a pid again, but not with the same start.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def marks(run_dir: Path, owner: int | None = None) -> dict[str, str]:
    """Return the environment variables of every process of a run: its directory and its owner.

    ``owner`` is the owner's pid, by default this process.
    """
    owner = os.getpid() if owner is None else owner
    return {RUN_VARIABLE: str(run_dir), OWNER_VARIABLE: f"{owner}:{process_start(owner)}"}


def runs(pid: int, started: str) -> bool:
    """Whether the process ``pid`` that started at ``started`` (``process_start``) is still running."""
    return bool(started) and process_start(pid) == started


def not_a_run(path: Path, others: str = "") -> UserError:
    """Return the error for a ``path`` that is no run directory: what it is instead, and what to give.

    ``others``: what else the command takes, as the end of a sentence.
    """
    if not path.exists():
        return UserError(f"there is no run {path}; name a run directory, such as those in runs/")
    if not path.is_dir():
        return UserError(
            f"{path} is not a folder; give one that `testbed up` or `testbed simulate --out` has written"
        )
    if (path / STUDY).is_file():
        return UserError(
            f"{path} holds a study, whose runs left only a row each; {path / STUDY_PAGE} shows them"
        )
    runs = sorted(_runs_in(path))
    if len(runs) == 1:
        return UserError(f"{path} holds a run; give {runs[0]}")
    if runs:
        return UserError(f"{path} holds {len(runs)} runs; name one of them, such as {runs[0]}")
    return UserError(
        f"{path} is not a run directory (no plan.json in it); give one that `testbed up` or `testbed simulate "
        f"--out` has written{others}"
    )


def _runs_in(path: Path) -> Iterator[Path]:
    """Yield the run directories at most three levels below ``path``; folders that vanish meanwhile are left out."""
    for folder, below, files in os.walk(path):
        depth = len(Path(folder).relative_to(path).parts)
        if depth and "plan.json" in files:
            yield Path(folder)
        if depth == 3:
            below.clear()


def owner_alive(run_dir: Path) -> bool:
    """Whether the process that owns ``run_dir`` is still running."""
    owner = _owner(run_dir)
    return owner is not None and runs(owner.pid, owner.started)


def is_in_use(folder: Path) -> bool:
    """Whether the process that owns a temporary folder or a run is still running, here, in a container or on another machine.

    Containers and machines can share folders. Only the machine's first pid namespace sees the processes of others, and no machine
    those of another, so elsewhere an owner counts as running. A machine that has started again since keeps its name, but not its
    processes. Until a process has noted that it owns its temporary folder, the folder's name tells its pid.
    """
    owner, here = _owner(folder), pid_namespace(os.getpid())
    if owner is None:
        pid = re.match(r"testbed-[a-z]+-(\d+)-", folder.name)
        return pid is not None and process_start(int(pid[1])) != ""
    if owner.boot not in ("", _boot()):
        return owner.host != socket.gethostname()
    if owner.namespace in ("", here):
        return owner_alive(folder)
    return here != _FIRST_NAMESPACE or any(
        pid_namespace(int(entry.name)) == owner.namespace and _innermost_pid(entry) == owner.pid
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit()
    )


def host_of(run_dir: Path) -> str:
    """Return the name of the machine or the container on which a run was started; empty if that is unknown."""
    owner = _owner(run_dir)
    return owner.host if owner is not None else ""


def _innermost_pid(process: Path) -> int:
    """Return the pid that a process has in its own pid namespace, by its folder in /proc; 0 if it has ended."""
    try:
        found = re.search(
            r"^NSpid:.*\s(\d+)$", (process / "status").read_text(encoding="utf-8"), re.MULTILINE
        )
    except OSError:
        return 0
    return int(found[1]) if found else 0


class _Owner(NamedTuple):
    """A process, by its pid in a pid namespace of a machine and by its start (``process_start``).

    ``namespace``, ``host`` and ``boot`` are empty for folders of earlier versions, which do not say.
    """

    pid: int
    started: str
    namespace: str
    host: str
    boot: str


def _owner(run_dir: Path) -> _Owner | None:
    """Return the process that owns ``run_dir``; ``None`` if that is unknown."""
    path = run_dir / OWNER
    try:
        if not path.is_file():  # reading from a pipe of that name would block
            return None
        owner = json.loads(path.read_text(encoding="utf-8"))
        where = (str(owner.get(key, "")) for key in ("pid_namespace", "host", "boot"))
        return _Owner(int(owner["pid"]), str(owner["started"]), *where)
    except (OSError, ValueError, TypeError, KeyError):  # not a file that the testbed wrote
        return None


def remove_scratch_of(pid: int) -> None:
    """Remove the temporary folders of a process that was killed. They were its own, so that nobody else needs them."""
    for folder in scratch_folders():
        owner = _owner(folder)
        if owner is not None and owner.pid == pid and not is_in_use(folder):
            shutil.rmtree(folder, ignore_errors=True)  # what is left is for `testbed clean`


def half_written(path: Path) -> Path:
    """Return where this process, whose pid is in the name, writes the file or folder ``path`` until it is whole.

    Two commands at once do not share it. What ended processes have left of ``path`` is removed.
    """
    own = path.with_name(f"{path.name}.{os.getpid()}{HALF_WRITTEN}")
    for half in path.parent.glob(f"{glob.escape(path.name)}.*{HALF_WRITTEN}"):
        if half == own or not is_being_written(half):
            with suppress(OSError):  # another command removes it now, or it is for `testbed clean`
                remove(half)
    return own


def is_being_written(half: Path) -> bool:
    """Whether the process of a ``half_written`` path still runs."""
    pid = re.search(rf"\.(\d+){re.escape(HALF_WRITTEN)}$", half.name)
    return pid is not None and process_start(int(pid[1])) != ""


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there; of a link not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, which replaces ``path`` when the body ends without an error.

    If either path is a symbolic link, the link is replaced and its target is not written.
    """
    temporary = half_written(path)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def own_folder(path: Path) -> Path:
    """Make a folder of a run, unless it exists; returns it. Raises ``OSError`` if it is a symbolic link."""
    path.mkdir(exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, and nothing is written through links", str(path))
    return path


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` to ``path`` as JSON, whole or not at all. Raises ``OSError``."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, whole or not at all. Raises ``OSError``."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
