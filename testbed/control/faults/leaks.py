"""What sessions have left behind when all clients have ended: it should be nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

from nodes.messages import ServerStatus
from testbed.rundir import RUN_VARIABLE

_PATIENCE_S = 2.0
"""Seconds to wait until nothing is left: the event loop's, real or virtual; for namespaces real ones."""
_POLL_S = 0.05

Left = TypeVar("Left", tuple[int, float], dict[str, int])
Status = Callable[[], Awaitable[list[ServerStatus]]]
"""The status of every server that answers."""


async def held_by_servers(status: Status) -> tuple[int, float]:
    """Returns the sessions and the bytes of attention cache that servers still hold after a while."""

    async def held() -> tuple[int, float]:
        found = await status()
        return sum(server.n_sessions for server in found), sum(server.cache_used_bytes for server in found)

    return await _once_nothing_is_left(held)


async def left_open(count: Callable[[], dict[str, int]]) -> dict[str, int]:
    """Returns ``count()`` as soon as it is empty, or after a while: a server may still be reading weights."""

    async def counted() -> dict[str, int]:
        return count()

    return await _once_nothing_is_left(counted)


async def _once_nothing_is_left(look: Callable[[], Awaitable[Left]]) -> Left:
    """Returns what ``look`` finds, as soon as that is nothing, or after ``_PATIENCE_S``."""
    for _ in range(round(_PATIENCE_S / _POLL_S)):
        if not any(found := await look()):
            return found
        await asyncio.sleep(_POLL_S)
    return await look()


def namespaces_left(run_dir: Path, proc: Path = Path("/proc")) -> int:
    """Returns how many network namespaces other than ours the run's processes are in or hold open.

    Waits for processes that have been killed but have not ended yet. ``proc`` is the mount point of procfs.
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
    """Yields the run's processes: each has the whole path of the run directory in its environment."""
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
