"""Limits on how long something may take, in scenario time."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nodes.clock import Clock


class Overdue(Exception):
    """What was limited took longer than its limit."""


@dataclass(eq=False)
class _Limit:
    task: asyncio.Task[Any]
    due_at_s: float
    n_cancelling: int
    has_fired: bool = False


class Watchdog:
    """Ends what takes longer than its limit. Many limits at once need only one sleeping task."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._limits: set[_Limit] = set()
        self._sleeper: asyncio.Task[None] | None = None
        self._wakes_at_s = math.inf

    @contextlib.contextmanager
    def limit(self, limit_s: float) -> Iterator[None]:
        """Cancels the body and raises ``Overdue`` if it takes longer than ``limit_s`` (``math.inf``: never)."""
        if limit_s == math.inf:
            yield
            return
        task = asyncio.current_task()
        assert task is not None, "a limit outside of a task"
        limit = _Limit(task, self._clock.now_s() + limit_s, task.cancelling())
        self._limits.add(limit)
        self._wake_at(limit.due_at_s)
        try:
            yield
        except asyncio.CancelledError:
            # If something else cancelled the task as well, the task must end: that comes before the limit.
            if limit.has_fired and task.uncancel() <= limit.n_cancelling:
                raise Overdue from None
            raise
        finally:
            self._limits.discard(limit)

    def _wake_at(self, at_s: float) -> None:
        if at_s >= self._wakes_at_s:
            return
        self.close()
        self._wakes_at_s = at_s
        self._sleeper = asyncio.ensure_future(self._watch(at_s))

    async def _watch(self, at_s: float) -> None:
        await self._clock.sleep_until_s(at_s)
        self._sleeper, self._wakes_at_s = None, math.inf
        now_s = self._clock.now_s()
        for limit in list(self._limits):
            if not limit.has_fired and limit.due_at_s <= now_s:
                limit.has_fired = True
                limit.task.cancel()
        self._wake_at(min((x.due_at_s for x in self._limits if not x.has_fired), default=math.inf))

    def close(self) -> None:
        """Stops watching: bodies that are still running have no limit any more."""
        if self._sleeper is not None:
            self._sleeper.cancel()
        self._sleeper, self._wakes_at_s = None, math.inf
