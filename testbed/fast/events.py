"""The event queue of the fast engine: what happens when, in one order that never depends on chance."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

_Event = tuple[float, int, int, Callable[..., None], tuple[Any, ...]]


class EventQueue:
    """Calls functions at instants.

    At one instant, those that free something come first, then in order of planning.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[_Event] = []
        self._numbers = count()

    def at(self, at_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call ``call(*args)`` at ``at_s``, which must not lie in the past."""
        self._plan(at_s, 1, call, args)

    def free_at(self, at_s: float, call: Callable[..., None], *args: Any) -> None:
        """As ``at``, but before all calls of that instant that were planned with ``at``."""
        self._plan(at_s, 0, call, args)

    def _plan(self, at_s: float, rank: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        assert at_s >= self.now_s, f"an event for {at_s} s was planned at {self.now_s} s"
        heappush(self._heap, (at_s, rank, next(self._numbers), call, args))

    def step(self) -> None:
        """Go on to the next event and carry it out."""
        self.now_s, _, _, call, args = heappop(self._heap)
        call(*args)
