"""Runs a user's programs in the network of a node, and ends those that are left there.

A program sees the machine's files, but an ``/etc/hosts`` of its own that names every node, and the node's
name as host name. For this it has a mount namespace and a UTS namespace, which end with it.
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


def adopt_host_name(node: str, hosts: Path) -> None:
    """Sets the calling process's host name to ``node``, and mounts the file ``hosts`` as its ``/etc/hosts``.

    The process must be single-threaded and root. If the machine has no ``/etc/hosts``, only the host name is
    set. Raises ``OSError``.
    """
    unshare(CLONE_NEWNS | CLONE_NEWUTS)
    make_mounts_private()
    if HOSTS.exists():
        bind_mount(str(hosts), str(HOSTS))
    socket.sethostname(node)


def exec_program(node: str, hosts: Path, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replaces this process by the program ``command``, in the network that the process is in.

    ``node`` and ``hosts`` are as in ``adopt_host_name``; programs that ``command`` starts inherit all of it. Never
    returns; raises ``OSError`` if the program cannot be started.
    """
    adopt_host_name(node, hosts)
    for number in (
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores some of them, the calling code others
    os.execvpe(command[0], list(command), dict(environment))


def end_all_in(namespaces: Iterable[int]) -> list[int]:
    """Ends every process but this one in the network namespaces of these descriptors; returns their ids.

    Sends SIGTERM, and SIGKILL to those that still run after two seconds. The open descriptors keep the
    namespaces alive, so no other namespace can get their inode numbers meanwhile.
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
        ):  # the process has just ended, or belongs to another user
            os.kill(process, number)


def _processes_in(namespaces: Iterable[int]) -> list[int]:
    wanted = {f"net:[{os.fstat(namespace).st_ino}]" for namespace in namespaces}
    if not wanted:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # the process has just ended, or belongs to another user
                # A zombie is in no namespace any more.
                if str((entry / "ns/net").readlink()) in wanted:
                    found.append(int(entry.name))
    return found
