"""The forwarder's counters: what it did, and how well it kept up."""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_left
from dataclasses import astuple, dataclass, fields

LATE_BOUNDS_S = tuple(10e-6 * 1.15**i for i in range(90))
"""Bounds of the lateness histogram: 10 us to 2.5 s in steps of 15 %."""

_BINS = struct.Struct(f"<{len(LATE_BOUNDS_S) + 1}Q")


@dataclass
class ForwarderStats:
    """Counters since start.

    ``dropped``: packets that found no room or are broken; ``lost``: segments lost at random, as the links
    say; ``astray``: packets to where no link goes, which only programs of users send. Lateness: how long after its due time a packet was handed to its receiver, in real seconds; its
    ``late_p99_s`` is exact to 15 %. ``cpu_s``: the forwarder's own CPU time, the kernel's work for it
    included; ``spun_s`` of it went by waiting for the next packet's instant. ``busy_max_ratio``: the
    largest share of one CPU that work took over a second. ``asked_max_bps``: the fastest link's rate.

    ``underlay_…``: of what other machines sent to this one (``MachineStats`` has it by machine), summed up;
    of RTT and clock uncertainty the largest.
    """

    packets: int = 0
    wire_bytes: int = 0
    dropped: int = 0
    lost: int = 0
    late_max_s: float = 0.0
    late_total_s: float = 0.0
    late_p99_s: float = 0.0
    cpu_s: float = 0.0
    spun_s: float = 0.0
    busy_max_ratio: float = 0.0
    asked_max_bps: float = 0.0
    astray: int = 0
    underlay_late: int = 0
    underlay_lost: int = 0
    underlay_broken: int = 0
    underlay_refused: int = 0
    underlay_rtt_s: float = 0.0
    clock_uncertainty_s: float = 0.0


@dataclass
class MachineStats:
    """Another machine, as this one's forwarder sees it over the underlay; counters since start.

    ``rtt_s``: between the two forwarders, what they take themselves included, median of the last half minute;
    ``rtt_min_s``: between the machines' kernels, the smallest.
    ``offset_s``, ``drift``, ``uncertainty_s``: its clock (``netem.hostclock``), ``uncertainty_max_s`` is the worst since
    it had samples enough; ``n_forgotten``: how often a clock was found to have been moved. ``heard_at_s``: when it was last heard (``time.monotonic``; 0: never).

    ``late``: packets that came after their instant, the largest lateness in ``late_max_s``; ``lost``: datagrams
    that never came; ``broken``: packets of which only some datagrams did, or that came after a later one was
    delivered. What is not of this run has no sender: ``ForwarderStats.underlay_refused``.
    """

    rtt_s: float = 0.0
    rtt_min_s: float = 0.0
    offset_s: float = 0.0
    drift: float = 0.0
    uncertainty_s: float = 0.0
    uncertainty_max_s: float = 0.0
    n_samples: int = 0
    n_forgotten: int = 0
    heard_at_s: float = 0.0
    packets: int = 0
    late: int = 0
    late_max_s: float = 0.0
    lost: int = 0
    broken: int = 0


def _struct(kind: type[ForwarderStats] | type[MachineStats]) -> struct.Struct:
    return struct.Struct("<" + "".join("Q" if field.type == "int" else "d" for field in fields(kind)))


_STATS = _struct(ForwarderStats)
_MACHINE = _struct(MachineStats)
_MACHINES_AT = _STATS.size + _BINS.size


class Lateness:
    """A histogram over ``LATE_BOUNDS_S``; the last bin holds all that is later."""

    def __init__(self, bins: list[int] | None = None) -> None:
        self.bins = bins or [0] * (len(LATE_BOUNDS_S) + 1)

    def add(self, late_s: float) -> None:
        self.bins[bisect_left(LATE_BOUNDS_S, late_s)] += 1

    def quantile(self, share: float) -> float:
        """An upper bound of that quantile, 15 % wide; infinite beyond the last bound, 0 without packets."""
        wanted = share * sum(self.bins)
        seen = 0
        for bound_s, count in zip((*LATE_BOUNDS_S, float("inf")), self.bins, strict=True):
            seen += count
            if count and seen >= wanted:
                return bound_s
        return 0.0

    def since(self, earlier: Lateness) -> Lateness:
        """What came after ``earlier``, a reading of the same histogram."""
        return Lateness([now - then for now, then in zip(self.bins, earlier.bins, strict=True)])


class StatsPage:
    """The forwarder's counters in memory that its parent shares."""

    def __init__(self, n_machines: int = 0) -> None:
        n_pages = -(-(_MACHINES_AT + n_machines * _MACHINE.size) // mmap.PAGESIZE)
        self._memory = mmap.mmap(-1, n_pages * mmap.PAGESIZE)

    def write(self, stats: ForwarderStats, lateness: Lateness) -> None:
        _STATS.pack_into(self._memory, 0, *vars(stats).values())
        _BINS.pack_into(self._memory, _STATS.size, *lateness.bins)

    def read(self) -> ForwarderStats:
        stats = ForwarderStats(*_STATS.unpack_from(self._memory, 0))
        # The largest is known exactly, its bin only roughly.
        stats.late_p99_s = min(self.lateness().quantile(0.99), stats.late_max_s)
        return stats

    def write_machine(self, number: int, machine: MachineStats) -> None:
        _MACHINE.pack_into(self._memory, _MACHINES_AT + number * _MACHINE.size, *astuple(machine))

    def machine(self, number: int) -> MachineStats:
        return MachineStats(*_MACHINE.unpack_from(self._memory, _MACHINES_AT + number * _MACHINE.size))

    def lateness(self) -> Lateness:
        return Lateness(list(_BINS.unpack_from(self._memory, _STATS.size)))

    def close(self) -> None:
        self._memory.close()
