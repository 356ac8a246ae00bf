"""The user-space router of the ``fabric`` backend: TUN devices in, delay and rate, TUN devices out.

One process reads every node's TUN device. A packet from a to b leaves the pair's link when the link
is free and its bytes are through at the link's rate, and reaches b after the link's delay. Links are
FIFO and independent of each other. Super-packets (TCP segmentation offload) pass whole: they count as
the segments that a real wire would carry, headers included, and arrive when their last byte does.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from netem.spec import LinkProfile
from netem.syscalls import set_timer_slack
from netem.tun import VNET_HEADER_BYTES

_READ_BYTES = 65536 + VNET_HEADER_BYTES
_MAX_BACKLOG_S = 30.0
_SPIN_S = 60e-6
_PACKETS_PER_TURN = 16
_STATS = struct.Struct("<QQQdd")


@dataclass
class ForwarderStats:
    """Counters since start. ``late_max_s``: the latest that a packet left after its due time."""

    packets: int = 0
    wire_bytes: int = 0
    dropped: int = 0
    late_max_s: float = 0.0
    late_total_s: float = 0.0


class StatsPage:
    """The forwarder's counters in memory that its parent shares."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def write(self, stats: ForwarderStats) -> None:
        _STATS.pack_into(
            self._memory,
            0,
            stats.packets,
            stats.wire_bytes,
            stats.dropped,
            stats.late_max_s,
            stats.late_total_s,
        )

    def read(self) -> ForwarderStats:
        return ForwarderStats(*_STATS.unpack_from(self._memory, 0))

    def close(self) -> None:
        self._memory.close()


class _Pipe:
    """The state of one link: where it ends, and until when it is busy."""

    __slots__ = ("delay_s", "free_at_s", "out_fd", "s_per_byte")

    def __init__(self, out_fd: int, profile: LinkProfile, early_s: float) -> None:
        self.out_fd = out_fd
        self.delay_s = profile.delay_s - early_s
        self.s_per_byte = 8 / profile.rate_bps
        self.free_at_s = 0.0


def wire_bytes(packet: bytes) -> int:
    """Bytes that ``packet`` (with its vnet header) takes on a wire, headers of all segments included."""
    size = len(packet) - VNET_HEADER_BYTES
    segment_bytes = packet[4] | packet[5] << 8
    if not packet[1] or not segment_bytes:
        return size
    header = (packet[10] & 15) * 4
    header += (packet[VNET_HEADER_BYTES + header + 12] >> 4) * 4
    return size + (-(-(size - header) // segment_bytes) - 1) * header


class Forwarder:
    """Forwards between TUN devices until its process ends.

    ``devices`` maps a node to its TUN descriptor, ``addresses`` to its IPv4 address as 4 bytes.
    ``early_s`` is subtracted from every delay: what the kernel and this process are known to add.
    """

    def __init__(
        self,
        devices: Mapping[str, int],
        addresses: Mapping[str, bytes],
        links: Mapping[tuple[str, str], LinkProfile],
        page: StatsPage,
        early_s: float = 0.0,
    ) -> None:
        self._page = page
        self._pipes: dict[int, dict[bytes, _Pipe]] = {fd: {} for fd in devices.values()}
        for (source, target), profile in links.items():
            pipe = _Pipe(devices[target], profile, early_s)
            self._pipes[devices[source]][addresses[target]] = pipe

    def run(self) -> None:
        """Forward for ever. Uses real-time priority where the system grants it."""
        set_timer_slack(1)
        with contextlib.suppress(PermissionError):  # rootless: runs at normal priority
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        stats = ForwarderStats()
        pipes_of = self._pipes
        queue: list[tuple[float, int, int, bytes]] = []
        poller = select.epoll()
        for fd in pipes_of:
            poller.register(fd, select.EPOLLIN)
        waiter = [poller.fileno()]
        now_of, wait, read, write = time.monotonic, select.select, os.read, os.write
        sequence = 0
        report_at_s = 0.0
        while True:
            now = now_of()
            timeout = queue[0][0] - now - _SPIN_S if queue else 0.5
            if timeout > 0:
                wait(waiter, (), (), timeout)
            for fd, _ in poller.poll(0):
                pipes = pipes_of[fd]
                for _ in range(_PACKETS_PER_TURN):
                    try:
                        packet = read(fd, _READ_BYTES)
                    except BlockingIOError:
                        break
                    now = now_of()
                    pipe = pipes.get(packet[26:30])
                    if pipe is None or packet[10] >> 4 != 4:
                        stats.dropped += 1
                        continue
                    size = wire_bytes(packet)
                    start = max(now, pipe.free_at_s)
                    if start - now > _MAX_BACKLOG_S:
                        stats.dropped += 1
                        continue
                    pipe.free_at_s = free = start + size * pipe.s_per_byte
                    sequence += 1
                    heappush(queue, (free + pipe.delay_s, sequence, pipe.out_fd, packet))
                    stats.wire_bytes += size
            now = now_of()
            while queue and queue[0][0] <= now:
                due, _, out_fd, packet = heappop(queue)
                try:
                    write(out_fd, packet)
                except OSError:  # the receiving device is full or gone: a lost packet
                    stats.dropped += 1
                late = now - due
                stats.late_total_s += late
                if late > stats.late_max_s:
                    stats.late_max_s = late
                stats.packets += 1
                now = now_of()
            if now > report_at_s:
                self._page.write(stats)
                report_at_s = now + 0.1
