"""The one source of time in a node: scenario seconds since the run's origin."""

from __future__ import annotations

import asyncio
import time
from heapq import heappop, heappush
from typing import Protocol

from nodes.timers import DeadlineTimer


class Clock(Protocol):
    """Scenario time. Nothing in ``nodes`` reads any other clock."""

    def now_s(self) -> float: ...

    async def sleep_until_s(self, at_s: float) -> None: ...


class ScaledClock:
    """Scenario time that runs ``scale`` times as fast as the machine's monotonic clock.

    All processes of a run share the machine's clock, so their instants can be compared.
    """

    def __init__(self, origin_at: float = 0.0, scale: float = 1.0) -> None:
        self.origin_at = origin_at
        self.scale = scale
        self._timer: DeadlineTimer | None = None

    def now_s(self) -> float:
        return (time.monotonic() - self.origin_at) * self.scale

    async def sleep_until_s(self, at_s: float) -> None:
        if self._timer is None:
            self._timer = DeadlineTimer()
        await self._timer.at(self.origin_at + at_s / self.scale)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.close()
            self._timer = None


class ManualClock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._sequence = 0

    def now_s(self) -> float:
        return self._now_s

    async def sleep_until_s(self, at_s: float) -> None:
        if at_s <= self._now_s:
            return
        self._sequence += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._sleepers, (at_s, self._sequence, future))
        await future

    async def advance(self, by_s: float) -> None:
        """Move time on, waking every sleeper at its own instant and letting it run."""
        end_s = self._now_s + by_s
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            self._now_s, _, future = heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
            await _settle()
        self._now_s = end_s


async def _settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)
