"""What is left of sessions when all clients have ended: it should be nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from nodes.messages import ServerStatus
from testbed.rundir import RUN_VARIABLE

_PATIENCE_S = 2.0
"""Seconds of the event loop's time, real or virtual, that the last messages may take to arrive."""
_POLL_S = 0.05

Status = Callable[[], Awaitable[list[ServerStatus]]]
"""The status of every server that answers."""


async def held_by_servers(status: Status) -> tuple[int, float]:
    """Sessions that servers still hold, and bytes of attention cache, once nothing changes any more."""
    tries = round(_PATIENCE_S / _POLL_S)
    for remaining in range(tries, -1, -1):
        found = await status()
        n_sessions = sum(server.n_sessions for server in found)
        cache_bytes = sum(server.cache_used_bytes for server in found)
        if not (n_sessions or cache_bytes) or not remaining:
            break
        await asyncio.sleep(_POLL_S)
    return n_sessions, cache_bytes


def namespaces_left(run_dir: Path, proc: Path = Path("/proc")) -> int:
    """Network namespaces other than ours that processes of the run at ``run_dir`` still live in or hold open.

    A process that has been killed but did not yet get to end is waited for. ``proc`` is where the kernel
    tells of processes.
    """
    if not proc.is_dir():  # a system without namespaces
        return 0
    ours = _link(proc / "self/ns/net")
    for remaining in range(round(_PATIENCE_S / _POLL_S), -1, -1):
        found = {space for process in _processes(run_dir, proc) for space in _namespaces(process)} - {ours}
        if not (found and remaining):
            break
        time.sleep(_POLL_S)
    return len(found)


def _processes(run_dir: Path, proc: Path) -> Iterable[Path]:
    """Only those of this very run: each carries its directory, whole, in its environment."""
    mark = os.fsencode(f"{RUN_VARIABLE}={run_dir}")
    for entry in proc.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended, or is not ours
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield entry


def _namespaces(process: Path) -> Iterable[str]:
    names = [process / "ns/net"]
    with contextlib.suppress(OSError):  # it has just ended
        names += (process / "fd").iterdir()
    return {link for link in map(_link, names) if link is not None and link.startswith("net:[")}


def _link(name: Path) -> str | None:
    try:
        return str(name.readlink())
    except OSError:
        return None
