"""Programs of the user's in the network of a node: how they get there, and how those left there are ended.

A program sees the machine's files, with an ``/etc/hosts`` of its own in which every node has a name, and the node's
name as the machine's. Both need a mount and a UTS namespace, which end with the program.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from netem.syscalls import CLONE_NEWNS, CLONE_NEWUTS, bind_mount, make_mounts_private, unshare

HOSTS = Path("/etc/hosts")
_TERM_WAIT_S = 2.0
_POLL_S = 0.02


def live_as(node: str, hosts: Path) -> None:
    """Give the calling process, which is single-threaded and root, the name of ``node`` and the names in ``hosts``.

    A machine without an ``/etc/hosts`` has nowhere to put them. Raises ``OSError``.
    """
    unshare(CLONE_NEWNS | CLONE_NEWUTS)
    make_mounts_private()
    if HOSTS.exists():
        bind_mount(str(hosts), str(HOSTS))
    socket.sethostname(node)


def become(node: str, hosts: Path, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become the program ``command`` in the network that this process is in; what it starts has the same.

    Returns only by ``OSError``.
    """
    live_as(node, hosts)
    for number in (
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores some, its callers others
    os.execvpe(command[0], list(command), dict(environment))


def end_all_in(namespaces: Iterable[int]) -> list[int]:
    """End every process but this one in the network namespaces of these descriptors; returns their numbers.

    SIGTERM, then after two seconds SIGKILL. The descriptors keep the namespaces, so no other can have their numbers.
    """
    found = _processes_in(namespaces)
    _signal(found, signal.SIGTERM)
    deadline = time.monotonic() + _TERM_WAIT_S
    while (left := _processes_in(namespaces)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    _signal(left, signal.SIGKILL)
    return found


def _signal(processes: Iterable[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(
            ProcessLookupError, PermissionError
        ):  # it has just ended, or is another user's
            os.kill(process, number)


def _processes_in(namespaces: Iterable[int]) -> list[int]:
    wanted = {f"net:[{os.fstat(namespace).st_ino}]" for namespace in namespaces}
    if not wanted:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                # A process that waits to be reaped has no namespace any more.
                if str((entry / "ns/net").readlink()) in wanted:
                    found.append(int(entry.name))
    return found
