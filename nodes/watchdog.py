"""Limits on how long something may take, in scenario time."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nodes.clock import Clock


class Overdue(Exception):
    """What was limited took longer than its limit."""


@dataclass(eq=False)
class Limit:
    """A limit that is watched. If ``since`` is set, it counts from the instant that this returns, when it is due."""

    task: asyncio.Task[Any]
    limit_s: float
    due_at_s: float
    n_cancelling: int
    has_fired: bool = False
    since: Callable[[], float] | None = None

    def is_over(self, now_s: float) -> bool:
        """Whether the time is over. It may turn out to be due later."""
        if self.due_at_s <= now_s and self.since is not None:
            self.due_at_s = max(self.due_at_s, self.since() + self.limit_s)
        return self.due_at_s <= now_s


class Watchdog:
    """Ends what takes longer than its limit. Many limits at once need only one sleeping task."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._limits: set[Limit] = set()
        self._sleeper: asyncio.Task[None] | None = None
        self._wakes_at_s = math.inf

    @contextlib.contextmanager
    def limit(self, limit_s: float) -> Iterator[Limit]:
        """Cancels the body and raises ``Overdue`` if it takes longer than ``limit_s`` (``math.inf``: never)."""
        task = asyncio.current_task()
        assert task is not None, "a limit outside of a task"
        limit = Limit(task, limit_s, self._clock.now_s() + limit_s, task.cancelling())
        if limit_s == math.inf:
            yield limit
            return
        self._limits.add(limit)
        self._wake_at(limit.due_at_s)
        try:
            yield limit
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
            if not limit.has_fired and limit.is_over(now_s):
                limit.has_fired = True
                limit.task.cancel()
        self._wake_at(min((x.due_at_s for x in self._limits if not x.has_fired), default=math.inf))

    def close(self) -> None:
        """Stops watching: bodies that are still running have no limit any more."""
        if self._sleeper is not None:
            self._sleeper.cancel()
        self._sleeper, self._wakes_at_s = None, math.inf
