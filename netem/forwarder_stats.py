"""The forwarder's counters: how many packets it forwarded, and how late."""

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
    """Counters since the forwarder's start.

    ``packets``: handed to receivers; ``wire_bytes``: sent and not lost at random, all segments' headers
    included. ``dropped``: packets without room or with invalid headers. ``lost``: segments lost at random by
    the links' loss ratios. ``astray``: packets to an address without a link, which only programs of users
    send.

    ``late_…``: how long after its due time a packet was delivered, in real seconds. ``late_p99_s`` is exact
    to 15 %. ``cpu_s``: the forwarder's CPU time, the kernel's work for it included; ``spun_s``: the part of
    it that was spent in busy waiting. ``busy_max_ratio``: the largest share of one CPU that the rest used
    during one second. ``asked_max_bps``: the fastest link's rate.

    ``underlay_…``, ``clock_uncertainty_s``: about packets from other machines. Counts are sums over
    ``MachineStats``; RTT and clock uncertainty are the largest.
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
    """Another machine, as observed by this one's forwarder over the underlay; counters since start.

    ``rtt_s``: between the two forwarders, their own processing included; the median of about the last half
    minute. ``rtt_min_s``: the smallest RTT between the machines' kernels. ``offset_s``, ``drift``,
    ``uncertainty_s``: its clock (see ``netem.hostclock``). ``uncertainty_max_s``: the worst uncertainty since
    there are enough samples. ``n_samples``, ``n_forgotten``: see ``HostClock``; there are not enough samples
    until a long datagram was answered. ``heard_at_s``: when a datagram of it last arrived (``time.monotonic``; 0: never).

    ``packets``: received from it. ``late``: packets that arrived after their instant; ``late_max_s``: the
    largest lateness. ``lost``: datagrams that never arrived. ``broken``: packets that were incomplete or
    changed, or that arrived after a later one was delivered. Datagrams of other runs have no known sender:
    they are only counted in ``ForwarderStats.underlay_refused``.
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
    """A histogram over ``LATE_BOUNDS_S``; the last bin counts everything later than the last bound."""

    def __init__(self, bins: list[int] | None = None) -> None:
        self.bins = bins or [0] * (len(LATE_BOUNDS_S) + 1)

    def add(self, late_s: float) -> None:
        self.bins[bisect_left(LATE_BOUNDS_S, late_s)] += 1

    def quantile(self, share: float) -> float:
        """Returns an upper bound in seconds of that quantile (``share`` from 0 to 1).

        It is the bound of a bin that is 15 % wide; infinite beyond the last bound, 0 without packets.
        """
        wanted = share * sum(self.bins)
        seen = 0
        for bound_s, count in zip((*LATE_BOUNDS_S, float("inf")), self.bins, strict=True):
            seen += count
            if count and seen >= wanted:
                return bound_s
        return 0.0

    def since(self, earlier: Lateness) -> Lateness:
        """Returns the packets counted since ``earlier``, an earlier copy of the same histogram."""
        return Lateness([now - then for now, then in zip(self.bins, earlier.bins, strict=True)])


class StatsPage:
    """The forwarder's counters, in memory that it shares with its parent."""

    def __init__(self, n_machines: int = 0) -> None:
        n_pages = -(-(_MACHINES_AT + n_machines * _MACHINE.size) // mmap.PAGESIZE)
        self._memory = mmap.mmap(-1, n_pages * mmap.PAGESIZE)

    def write(self, stats: ForwarderStats, lateness: Lateness) -> None:
        _STATS.pack_into(self._memory, 0, *vars(stats).values())
        _BINS.pack_into(self._memory, _STATS.size, *lateness.bins)

    def read(self) -> ForwarderStats:
        stats = ForwarderStats(*_STATS.unpack_from(self._memory, 0))
        # The maximum is exact, while a quantile is the upper bound of its bin.
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
