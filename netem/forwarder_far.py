"""The forwarder on one of several machines: it sends packets for nodes on other machines in UDP.

The sender's forwarder plays the whole link (loss, rate, queue, jitter, shared links), and so knows when a
packet has to arrive. It sends the packet with that instant, once the packet has passed its link or at most
``LEAD_S`` before. So the links' rates also pace the traffic on the underlay. The receiver's forwarder holds
the packet until that instant, on its own clock. A packet that comes after its instant is delivered at once
and counts as late.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from netem.forwarder import Forwarder
from netem.forwarder_changes import ChangeChannel
from netem.forwarder_links import Pipe, SharedLink, Transit
from netem.forwarder_stats import StatsPage
from netem.forwarder_underlay import Underlay
from netem.spec import Course, NetworkSpec, draws_name
from policies.links import Link

LEAD_S = 0.005
_FAR = -1
"""Stands for the descriptor of a receiver on another machine."""


class _FarPipe(Pipe):
    """A pair whose receiver is on another machine."""

    __slots__ = ("leaves_at_s", "machine", "n_waiting", "numbers")

    machine: int
    numbers: tuple[int, int]
    """The numbers of the pair's two nodes."""
    leaves_at_s: float
    """When the last packet that had to wait is sent; later packets are not sent before it."""
    n_waiting: int
    """How many packets wait to be sent."""


class _Leaving(Transit):
    """Holds a packet for another machine back until it has passed its link."""

    __slots__ = ("_at_s",)

    def __init__(self, at_s: float) -> None:
        self._at_s = at_s

    def enter(self, now_s: float) -> tuple[float, Transit | None]:
        return self._at_s, self


class _Arrivals(Pipe):
    """A pair whose sender is on another machine: only the packets' order is kept here."""

    __slots__ = ("due_s", "number")

    def __init__(self, out_fd: int) -> None:
        self.out_fd = out_fd
        self.number = -1
        """The number of the newest packet's first datagram."""
        self.due_s = 0.0
        """When the newest packet is due."""


class FarForwarder(Forwarder):
    """Forwards for the nodes in ``devices``. ``numbers`` maps every node to the number of its machine."""

    def __init__(
        self,
        spec: NetworkSpec,
        devices: Mapping[str, int],
        addresses: Mapping[str, bytes],
        page: StatsPage,
        changes: ChangeChannel,
        early_s: float,
        underlay: Underlay,
        numbers: Mapping[str, int],
    ) -> None:
        self._underlay = underlay
        self._numbers = numbers
        self._node_numbers = {node: i for i, node in enumerate(spec.nodes)}
        self._arrivals: dict[tuple[int, int], _Arrivals] = {}
        super().__init__(spec, devices, addresses, page, changes, early_s)
        for source, target in spec.links:
            if source not in devices and target in devices:
                pair = self._node_numbers[source], self._node_numbers[target]
                self._arrivals[pair] = _Arrivals(devices[target])
        self._others[underlay.fileno()] = self._hear
        self._report_at_s = 0.0

    def _pipe(
        self,
        pair: tuple[str, str],
        devices: Mapping[str, int],
        profile: Link,
        early_s: float,
        route: tuple[SharedLink, ...],
        course: Course,
    ) -> Pipe:
        source, target = pair
        if target in devices:
            return super()._pipe(pair, devices, profile, early_s, route, course)
        pipe = _FarPipe(draws_name(self._seed, pair), _FAR, profile, early_s, route, course=course)
        pipe.machine = self._numbers[target]
        pipe.numbers = self._node_numbers[source], self._node_numbers[target]
        pipe.leaves_at_s, pipe.n_waiting = 0.0, 0
        return pipe

    def _schedule(self, entered: tuple[float, Transit | None] | None, pipe: Pipe, packet: bytes) -> None:
        if entered is None or not isinstance(pipe, _FarPipe):
            super()._schedule(entered, pipe, packet)
            return
        at_s, transit = entered
        if transit is None:
            leaves_at_s = max(at_s - pipe.delay_s - LEAD_S, pipe.leaves_at_s)
            if pipe.n_waiting or leaves_at_s > time.monotonic():
                pipe.leaves_at_s = leaves_at_s
                n_dropped = self.stats.dropped
                super()._schedule((leaves_at_s, _Leaving(at_s)), pipe, packet)
                pipe.n_waiting += self.stats.dropped == n_dropped
                return
        elif isinstance(transit, _Leaving):
            pipe.n_waiting -= 1
        else:  # to its next shared link
            super()._schedule(entered, pipe, packet)
            return
        if not self._underlay.send(pipe.machine, pipe.numbers, at_s, packet):
            self.stats.dropped += 1

    def _hear(self) -> None:
        """Receives what other machines have sent, and queues it for delivery."""
        for head, due_s, packet in self._underlay.receive():
            arrivals = self._arrivals.get((head.source, head.target))
            if arrivals is None:
                self.stats.astray += 1
                continue
            if head.number > arrivals.number:
                due_s = max(due_s, arrivals.due_s)
                arrivals.number, arrivals.due_s = head.number, due_s
            elif due_s <= time.monotonic():  # overtaken: a packet sent later may have been delivered already
                self._underlay.broke(head.sender)
                continue
            elif due_s >= arrivals.due_s:
                due_s = math.nextafter(arrivals.due_s, 0.0)
            super()._schedule((due_s, None), arrivals, packet)

    def _regularly(self, now: float) -> float:
        wait_s = self._underlay.ask()
        if now >= self._report_at_s:
            stats = self.stats
            stats.underlay_late = stats.underlay_lost = stats.underlay_broken = 0
            stats.underlay_rtt_s = stats.clock_uncertainty_s = 0.0
            for number, machine in self._underlay.report():
                self._page.write_machine(number, machine)
                stats.underlay_late += machine.late
                stats.underlay_lost += machine.lost
                stats.underlay_broken += machine.broken
                stats.underlay_rtt_s = max(stats.underlay_rtt_s, machine.rtt_s)
                stats.clock_uncertainty_s = max(stats.clock_uncertainty_s, machine.uncertainty_max_s)
            stats.underlay_refused = self._underlay.n_all_refused
            self._report_at_s = super()._regularly(now)
        self._wake_s = wait_s
        return now + wait_s
