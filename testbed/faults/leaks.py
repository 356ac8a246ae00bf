"""What is left of sessions when all clients have ended: it should be nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from testbed.handle import RUN_VARIABLE

_PATIENCE_S = 2.0
"""Real seconds that the last messages may take to arrive."""
_POLL_S = 0.05

Status = Callable[[], Awaitable[list[Mapping[str, Any]]]]
"""The status of every server that answers."""


async def held_by_servers(status: Status) -> tuple[int, float]:
    """Sessions that servers still hold, and bytes of attention cache, once nothing changes any more."""
    tries = round(_PATIENCE_S / _POLL_S)
    for remaining in range(tries, -1, -1):
        found = await status()
        n_sessions = sum(int(server["n_sessions"]) for server in found)
        cache_bytes = float(sum(server["cache_used_bytes"] for server in found))
        if not (n_sessions or cache_bytes) or not remaining:
            break
        await asyncio.sleep(_POLL_S)
    return n_sessions, cache_bytes


def open_descriptors(pids: Mapping[str, int]) -> dict[str, int]:
    """Open descriptors by node; without those that have ended."""
    found = {}
    for name, pid in pids.items():
        with contextlib.suppress(OSError):
            found[name] = len(os.listdir(f"/proc/{pid}/fd"))
    return found


def namespaces_left(run_dir: Path) -> int:
    """Network namespaces other than ours that processes of the run still live in."""
    ours = _namespace(Path("/proc/self"))
    return len({space for space in map(_namespace, _processes(run_dir)) if space != ours} - {None})


def _processes(run_dir: Path) -> Iterable[Path]:
    mark = f"{RUN_VARIABLE}={run_dir}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended, or is not ours
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield entry


def _namespace(process: Path) -> Path | None:
    try:
        return (process / "ns/net").readlink()
    except OSError:
        return None
