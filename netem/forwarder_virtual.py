"""The forwarder in virtual time. It moves time to the next packet or timer when all processes are idle."""

from __future__ import annotations

import gc
import os
import select
from heapq import heappop
from typing import Protocol

from netem.forwarder import Forwarder

_NS = 1_000_000_000
NEVER = 2**62
"""Stands for an instant in nanoseconds that never comes."""


class TimeKeeper(Protocol):
    """Keeps virtual time and knows which processes are idle (see ``testbed.runtime.virtual.keeper``)."""

    descriptors: tuple[int, int]
    """The first is readable when a process has become idle, the second when a process is new."""

    @property
    def now_ns(self) -> int: ...

    def learn(self) -> None:
        """Registers new processes."""
        ...

    def quiet(self) -> bytes | None:
        """Returns ``None`` while a process is busy, else a value that changes once any was busy again."""
        ...

    def anything_ready(self) -> bool:
        """Whether an idle process has something to read."""
        ...

    def next_timer(self) -> tuple[int, int]:
        """Returns the next instant, in nanoseconds, at which a process wants to be woken, and its slot."""
        ...

    def move(self, at_ns: int) -> None:
        """Sets virtual time to ``at_ns``."""
        ...

    def wake(self, slot: int) -> None:
        """Makes the process in that slot check its timers."""
        ...


class VirtualForwarder(Forwarder):
    """Forwards as ``Forwarder`` does, but each packet exactly on time, and loses none (``Pipe.repairs``)."""

    repairs = True
    keeper: TimeKeeper

    def run(self) -> None:
        """Forwards packets and moves time, for ever."""
        gc.disable()
        keeper, queue = self.keeper, self._queue
        idle, new = keeper.descriptors
        events = select.epoll()
        for fd in (*self._pipes, self._changes.fileno(), new):
            events.register(fd, select.EPOLLIN)
        events.register(idle, select.EPOLLIN | select.EPOLLET)
        while True:
            if self._take_all(events.poll(0), new):
                continue
            before = keeper.quiet()
            if before is None or keeper.anything_ready():
                self._take_all(events.poll(), new)
                continue
            if events.poll(0) or keeper.quiet() != before:  # a process was busy in between
                continue
            timer_ns, slot = keeper.next_timer()
            packet_ns = _nanoseconds(queue[0][0]) if queue else NEVER
            # Publish each time, not at intervals: a run can end in less real time than any interval.
            self._page.write(self.stats, self._lateness)
            if packet_ns <= timer_ns and queue:
                keeper.move(packet_ns)
                self._deliver_one()
            elif timer_ns < NEVER:
                keeper.move(timer_ns)
                keeper.wake(slot)
            else:
                events.poll()

    def _take_all(self, found: list[tuple[int, int]], new: int) -> bool:
        """Reads what nodes have sent, in the nodes' order. Returns whether there was anything to do."""
        took = has_changed = False
        for fd, _ in sorted(found):
            if fd in self._pipes:
                self._take(fd, self.now_s())
                took = True
            elif fd == new:
                self.keeper.learn()
                took = True
            elif fd == self._changes.fileno():
                has_changed = True
        if has_changed:  # after the packets: they were sent before the change
            self._change()
        return took or has_changed

    def now_s(self) -> float:
        return self.keeper.now_ns / _NS

    def _deliver_one(self) -> None:
        """Passes on the next packet, to its receiver or to its next shared link."""
        due_s, _, pipe, packet, transit = heappop(self._queue)
        self.held_bytes -= len(packet)
        if transit is not None:
            self._schedule(transit.enter(due_s), pipe, packet)
            return
        try:
            os.write(pipe.out_fd, packet)
        except OSError:  # the receiving device is gone
            self.stats.dropped += 1
            return
        self.stats.packets += 1


def _nanoseconds(seconds: float) -> int:
    """Returns the whole nanosecond nearest to ``seconds``, as on ``memory``."""
    return round(seconds * _NS)
