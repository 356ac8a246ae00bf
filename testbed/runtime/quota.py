"""CPU limits of this process's control groups.

In a limited container, keeping CPUs awake costs the run CPU time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path


def cpu_quota(mounts: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the number of CPUs that the tightest quota allows; ``None`` without one.

    Reads both versions of control groups.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:  # a system without control groups
        return None
    quotas = [
        quota for line in lines if line.count(":") >= 2 for quota in _quotas(mounts, *line.split(":", 2)[1:])
    ]
    return min(quotas, default=None)


def why_cpus_may_sleep() -> str | None:
    """Return why CPUs are not kept awake in this container; ``None`` if there is no CPU limit."""
    quota = cpu_quota()
    return None if quota is None else f"CPUs may sleep: this container has a quota of {quota:g} CPUs"


def _quotas(mounts: Path, controllers: str, path: str) -> Iterator[float]:
    """Yield the quotas (CPUs) of one line of ``/proc/self/cgroup``, from the innermost group outwards."""
    if controllers and "cpu" not in controllers.split(","):
        return
    tops = (mounts / controllers, mounts / "cpu", mounts) if controllers else (mounts,)
    top = next(folder for folder in tops if folder.is_dir() or folder == mounts)
    group = top / path.strip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(top):
            return
        quota = _quota(folder)
        if quota is not None:
            yield quota


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").is_file():
            allowed, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            allowed = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        quota = math.inf if allowed in ("max", "-1") else float(allowed) / float(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such controller here
        return None
    return quota if math.isfinite(quota) else None
