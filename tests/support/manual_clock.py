"""A clock for tests of nodes."""

from __future__ import annotations

import asyncio
from heapq import heappop, heappush


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
        """Moves time on, waking every sleeper at its own instant and letting it run."""
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
