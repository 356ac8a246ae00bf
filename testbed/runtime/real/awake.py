"""Keeping CPUs awake: waking one takes 0.1 ms on hardware and up to 15 ms in a virtual machine, which would be measured."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path


def spin(cpu: int) -> None:
    """Keep one CPU from sleeping without taking time from anyone."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {cpu})
    while True:
        pass


def cpus_to_keep_awake(
    cpus: Collection[int],
    system: Path = Path("/sys/devices/system/cpu"),
    about: Path = Path("/proc/cpuinfo"),
) -> list[int]:
    """Which of ``cpus`` to spin on: all of them in a virtual machine, else one per core.

    On hardware a core is awake when one of its threads is, and a spinning thread would take a part of the core
    from what works on the other. A virtual machine's host takes each CPU away by itself.
    """
    flags = (line for line in about.read_text().splitlines() if line.startswith("flags"))
    if any("hypervisor" in line.split() for line in flags):
        return sorted(cpus)
    chosen: dict[str, int] = {}
    for cpu in sorted(cpus):
        siblings = system / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        core = siblings.read_text() if siblings.exists() else str(cpu)
        chosen.setdefault(core, cpu)
    return list(chosen.values())
