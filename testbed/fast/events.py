"""The event queue of the fast engine: what happens when, in one order that never depends on chance."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

from nodes.clock import NS, on_tick

_Event = tuple[float, int, Callable[..., object], tuple[Any, ...]]
_FIRST = 1 << 60
"""More than there are events."""


class EventQueue:
    """Calls functions at instants of whole nanoseconds.

    At one instant those planned with ``free_at`` come first; otherwise the order is that of planning.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.number = 0
        """The present event's: of those of one instant, the lower ones come first."""
        self._heap: list[_Event] = []
        self.next_number: Callable[[], int] = count().__next__
        """Returns the number of an event that is planned now; ``in_turn`` may add it later."""
        self._until_s = math.inf

    def at(self, at_s: float, call: Callable[..., object], *args: Any) -> float:
        """Call ``call(*args)`` at ``at_s``, which must not lie in the past; returns the instant."""
        at_s = round(at_s * NS) / NS  # ``on_tick``, without the time of a call
        assert at_s >= self.now_s, f"an event for {at_s} s was planned at {self.now_s} s"
        heappush(self._heap, (at_s, self.next_number(), call, args))
        return at_s

    def on_tick(self, tick_s: float, call: Callable[..., object], *args: Any) -> None:
        """As ``at``, for an instant that is a whole nanosecond already."""
        heappush(self._heap, (tick_s, self.next_number(), call, args))

    def in_turn(self, tick_s: float, number: int, call: Callable[..., object], *args: Any) -> None:
        """As ``on_tick``, in the order of a ``next_number`` from before."""
        heappush(self._heap, (tick_s, number, call, args))

    def free_at(self, at_s: float, call: Callable[..., object], *args: Any) -> float:
        """As ``at``, before all of that instant that was planned with ``at``."""
        at_s = on_tick(at_s)
        assert at_s >= self.now_s, f"an event for {at_s} s was planned at {self.now_s} s"
        heappush(self._heap, (at_s, self.next_number() - _FIRST, call, args))
        return at_s

    def one_by_one(self, coming: deque[tuple[float, Callable[[], object]]]) -> None:
        """Call those that are due, by ascending times in seconds, and plan the next one: each when the one before has come."""
        while coming and on_tick(coming[0][0]) <= self.now_s:
            coming.popleft()[1]()
        if coming:
            self.at(coming[0][0], self.one_by_one, coming)

    def run(self, until_s: float = math.inf) -> None:
        """Carry out all events, one after another, until ``stop`` is called or one was carried out after ``until_s``."""
        heap, self._until_s = self._heap, until_s
        while self.now_s <= self._until_s:
            self.now_s, self.number, call, args = heappop(heap)
            call(*args)

    def stop(self) -> None:
        """Have ``run`` return after the present event."""
        self._until_s = -math.inf
