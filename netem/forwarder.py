"""The forwarder of the ``fabric`` backend: reads packets from TUN devices, delays them, passes them on.

One process reads every node's TUN device. A packet from a to b waits until the pair's link is free. It leaves
the link when its bytes are transmitted at the link's rate, and reaches b after the link's delay. Links are
FIFO and independent of each other, except shared ones (``netem.spec.NetworkSpec``). Super-packets (TCP
segmentation offload) pass whole: they count as the segments that a real wire would carry, headers included,
and arrive when their last byte does. Segments lost at random are cut out of them.

- ``forwarder_links``: when a packet arrives; ``forwarder_packets``: its size and its segments
- ``forwarder_changes``: changes of links while it runs; ``forwarder_stats``: the counters
- ``forwarder_virtual``: the forwarder in virtual time
- ``forwarder_far`` (with ``forwarder_underlay``, ``forwarder_datagrams``): nodes on other machines
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import time
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import ClassVar

from netem.forwarder_changes import ChangeChannel
from netem.forwarder_links import Pipe, SharedLink, Transit
from netem.forwarder_packets import is_whole, segments, wire_bytes
from netem.forwarder_stats import ForwarderStats, Lateness, StatsPage
from netem.spec import NO_COURSE, Course, NetworkError, NetworkSpec, draws_name
from netem.syscalls import set_timer_slack
from netem.tun import VNET_HEADER_BYTES
from policies.links import Link

_READ_BYTES = 65536 + VNET_HEADER_BYTES
_SPIN_S = 60e-6
_PACKETS_PER_TURN = 16
_REPORT_EVERY_S = 0.1
_WAKE_S = 0.5
_BARE_BYTES = 60
"""Packets up to this size carry no payload. Where losses are repaired, these are never lost."""
_BUSY_WINDOW_S = 1.0
MAX_HELD_BYTES = 2 * 1024**3
"""While more bytes than this are on their way, new packets are dropped: all are in this process's memory."""


class Forwarder:
    """Forwards between TUN devices until its process ends.

    ``devices`` maps a node to its TUN descriptor, ``addresses`` maps it to its IPv4 address as 4 bytes. Links
    whose sender has no device here are another forwarder's; ``changes`` numbers only the others.
    ``early_s`` is subtracted from every delay: the seconds that the kernel and this process are known to add.
    """

    repairs: ClassVar[bool] = False
    """``repairs`` of its pipes; see ``Pipe``."""

    def __init__(
        self,
        spec: NetworkSpec,
        devices: Mapping[str, int],
        addresses: Mapping[str, bytes],
        page: StatsPage,
        changes: ChangeChannel,
        early_s: float = 0.0,
    ) -> None:
        self._page = page
        self._changes = changes
        self._seed = spec.seed
        self._owners = {fd: node for node, fd in devices.items()}
        self._by_number: list[Pipe] = []
        self._pipes: dict[int, dict[bytes, Pipe]] = {fd: {} for fd in devices.values()}
        shared = {name: SharedLink(rate_bps) for name, rate_bps in spec.shared.items()}
        for pair, profile in spec.links.items():
            source, target = pair
            if source in devices:
                route = tuple(shared[name] for name in spec.paths.get(pair, ()))
                pipe = self._pipe(pair, devices, profile, early_s, route, spec.courses.get(pair, NO_COURSE))
                self._by_number.append(pipe)
                self._pipes[devices[source]][addresses[target]] = pipe
        self._others: dict[int, Callable[[], None]] = {}
        """Further descriptors to read, each with the function that reads it."""
        self._queue: list[tuple[float, int, Pipe, bytes, Transit | None]] = []
        self._sequence = 0
        self.held_bytes = 0
        """Bytes of all packets on their way."""
        fastest_bps = max((link.rate_bps for link in spec.links.values()), default=0.0)
        self.stats = ForwarderStats(asked_max_bps=fastest_bps)
        self._lateness = Lateness()
        self._meter = _Meter()
        self._wake_s = _WAKE_S
        """The longest sleep in seconds."""

    def _pipe(
        self,
        pair: tuple[str, str],
        devices: Mapping[str, int],
        profile: Link,
        early_s: float,
        route: tuple[SharedLink, ...],
        course: Course,
    ) -> Pipe:
        name, out_fd = draws_name(self._seed, pair), devices[pair[1]]
        return Pipe(name, out_fd, profile, early_s, route, self.repairs, course)

    def run(self) -> None:
        """Forwards packets for ever. Uses real-time priority if the system grants it."""
        set_timer_slack(1)
        with contextlib.suppress(PermissionError):  # rootless: runs at normal priority
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        gc.disable()  # this code makes no cycles, and a collection would delay packets by milliseconds
        poller = select.epoll()
        for fd in (*self._pipes, self._changes.fileno(), *self._others):
            poller.register(fd, select.EPOLLIN)
        waiter = [poller.fileno()]
        queue, stats, now_of, wait = self._queue, self.stats, time.monotonic, select.select
        next_at_s = 0.0
        self._meter = _Meter()
        while True:
            began = now_of()
            timeout = queue[0][0] - began - _SPIN_S if queue else self._wake_s
            if timeout > 0:
                wait(waiter, (), (), min(timeout, self._wake_s))
            ready = poller.poll(0)
            # All waiting packets came before this instant, so the time they wait for this loop adds to no
            # delay.
            now = now_of()
            if timeout <= 0 and not ready and queue[0][0] > now:
                stats.spun_s += now - began
                continue
            changed = False
            for fd, _ in ready:
                if fd in self._pipes:
                    self._take(fd, now)
                elif fd in self._others:
                    self._others[fd]()
                else:
                    changed = True
            if changed:  # after the packets: they were sent before the change, or at least with it
                self._change()
            self._deliver()
            if now > next_at_s:
                next_at_s = self._regularly(now)

    def _regularly(self, now: float) -> float:
        """Updates the meter and publishes the counters; returns the instant at which to call this again."""
        self._meter.read(now, self.stats)
        self._page.write(self.stats, self._lateness)
        return now + _REPORT_EVERY_S

    def _change(self) -> None:
        for number, profile in self._changes.receive():
            self._by_number[number].change(profile, self.now_s())
            self._by_number[number].release()

    def _take(self, fd: int, now: float) -> None:
        """Reads what a node has sent, at most ``_PACKETS_PER_TURN`` packets, and puts it on its links.

        Raises ``NetworkError`` if the node's device is gone.
        """
        pipes, stats = self._pipes[fd], self.stats
        for _ in range(_PACKETS_PER_TURN):
            try:
                packet = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:  # a program deleted the device inside its namespace
                raise NetworkError(
                    f"the network device of {self._owners[fd]} is gone: {error.strerror}"
                ) from error
            pipe = pipes.get(packet[26:30])
            if pipe is None or packet[10] >> 4 != 4:
                stats.astray += 1
            elif packet[1] and not is_whole(packet):
                stats.dropped += 1
            elif pipe.loses:
                survivors, n_lost = pipe.survivors(packet)
                stats.lost += n_lost
                for part in survivors:
                    size = wire_bytes(part)
                    stats.wire_bytes += size
                    self._enter(now, pipe, part, size)
            else:
                size = wire_bytes(packet)
                stats.wire_bytes += size
                self._enter(now, pipe, packet, size)

    def now_s(self) -> float:
        """Returns the time that counts for packets."""
        return time.monotonic()

    def _enter(self, now: float, pipe: Pipe, packet: bytes, size: int) -> None:
        if pipe.holds:
            pipe.held.append(lambda: self._enter(self.now_s(), pipe, packet, size))
            return
        n_segments, segment_bytes = segments(packet) if pipe.counts else (1, 0)
        if size <= _BARE_BYTES:
            n_segments = 0
        self._schedule(pipe.enter(now, size, n_segments, segment_bytes), pipe, packet)

    def _schedule(self, entered: tuple[float, Transit | None] | None, pipe: Pipe, packet: bytes) -> None:
        if entered is None or self.held_bytes > MAX_HELD_BYTES:
            self.stats.dropped += 1
            return
        at_s, transit = entered
        self._sequence += 1
        self.held_bytes += len(packet)
        heappush(self._queue, (at_s, self._sequence, pipe, packet, transit))

    def _deliver(self) -> None:
        """Passes on every packet that is due, to its receiver or to its next shared link."""
        queue, stats, lateness = self._queue, self.stats, self._lateness
        now = time.monotonic()
        while queue and queue[0][0] <= now:
            due, _, pipe, packet, transit = heappop(queue)
            self.held_bytes -= len(packet)
            if transit is not None:
                self._schedule(transit.enter(due), pipe, packet)
                continue
            try:
                os.write(pipe.out_fd, packet)
            except OSError:  # the receiving device is full or gone: a lost packet
                stats.dropped += 1
                continue
            late = now - due
            lateness.add(late)
            stats.late_total_s += late
            if late > stats.late_max_s:
                stats.late_max_s = late
            stats.packets += 1
            now = time.monotonic()


class _Meter:
    """Reads this process's CPU time into the counters."""

    def __init__(self) -> None:
        self._at_s = time.monotonic()
        self._started_s = time.process_time()
        self._worked_s = 0.0

    def read(self, now: float, stats: ForwarderStats) -> None:
        stats.cpu_s = time.process_time() - self._started_s
        if now - self._at_s >= _BUSY_WINDOW_S:
            worked_s = stats.cpu_s - stats.spun_s
            share = (worked_s - self._worked_s) / (now - self._at_s)
            stats.busy_max_ratio = max(stats.busy_max_ratio, share)
            self._at_s, self._worked_s = now, worked_s
