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


_STATS = struct.Struct("<" + "".join("Q" if field.type == "int" else "d" for field in fields(ForwarderStats)))


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

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def write(self, stats: ForwarderStats, lateness: Lateness) -> None:
        _STATS.pack_into(self._memory, 0, *astuple(stats))
        _BINS.pack_into(self._memory, _STATS.size, *lateness.bins)

    def read(self) -> ForwarderStats:
        stats = ForwarderStats(*_STATS.unpack_from(self._memory, 0))
        # The largest is known exactly, its bin only roughly.
        stats.late_p99_s = min(self.lateness().quantile(0.99), stats.late_max_s)
        return stats

    def lateness(self) -> Lateness:
        return Lateness(list(_BINS.unpack_from(self._memory, _STATS.size)))

    def close(self) -> None:
        self._memory.close()
