"""What Linux knows of a process."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def usage(pid: int) -> tuple[int, float]:
    """Returns a process's parent and the CPU seconds that it has used; raises ``OSError`` if it has ended."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS


def family(pid: int, without: int | None = None) -> dict[int, float]:
    """Returns the CPU seconds of a process and of its descendants, by process id.

    ``without``: one of these, which is left out with its own descendants.
    """
    of: dict[int, tuple[int, float]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                of[int(folder.name)] = usage(int(folder.name))
    inside, new = set[int](), {pid}
    while new:
        inside |= new
        new = {child for child, (parent, _) in of.items() if parent in inside} - inside - {without}
    return {member: of[member][1] for member in inside}


def memory_bytes(pid: int) -> dict[str, int]:
    """Returns the memory of a process by kind (``Rss``, ``Pss``, ``Private_Dirty``, ...); raises ``OSError`` if it
    has ended.
    """
    _, *lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
