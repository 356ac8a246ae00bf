"""Event loops that follow virtual time.

Only two parts of asyncio are replaced. Timers are in a heap with whole nanoseconds; those of the same instant
run in the order in which they were set. The selector, which asyncio calls to wait when nothing is ready,
makes time jump instead.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from asyncio import events
from collections.abc import Callable
from contextvars import Context
from heapq import heapify, heappop, heappush
from typing import Any, TypeVarTuple, Unpack

from nodes.clock import NS, nanoseconds
from testbed.runtime.virtual.processes import CURRENT, Process

Ts = TypeVarTuple("Ts")

_LOOK_EVERY_S = 0.005
"""Real seconds between two checks of file descriptors, such as signals and the run's live socket."""
_WAIT_S = 1.0
_MANY_CANCELLED = 1000


class TimerLoop(asyncio.SelectorEventLoop):
    """An event loop with timers in virtual time. Subclasses have the time, and move it."""

    now_ns: int

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._timers: list[tuple[int, int, asyncio.TimerHandle]] = []
        self._n_set = self._n_cancelled = 0
        super().__init__(selector)

    def time(self) -> float:
        return self.now_ns / NS

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at_ns(self.now_ns + nanoseconds(max(delay, 0.0)), callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at_ns(nanoseconds(when), callback, *args, context=context)

    def call_at_ns(
        self,
        at_ns: int,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Like ``call_at``, at an exact instant in nanoseconds."""
        handle = self._timer(at_ns / NS, callback, args, context)
        self._n_set += 1
        heappush(self._timers, (at_ns, self._n_set, handle))
        return handle

    def _timer(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        return asyncio.TimerHandle(when, callback, args, self, context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._n_cancelled += 1
        if self._n_cancelled > _MANY_CANCELLED and 2 * self._n_cancelled > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapify(self._timers)
            self._n_cancelled = 0

    def next_timer_ns(self) -> int | None:
        """Return when the next timer is due, in ns; ``None`` if there is none."""
        timers = self._timers
        while timers:
            if not timers[0][2].cancelled():
                return timers[0][0]
            heappop(timers)
        return None

    def fire(self) -> None:
        """Make the callback of the first due timer ready.

        Other due timers wait until everything that follows from it is done.
        """
        timers, now_ns, ready = self._timers, self.now_ns, self._ready  # type: ignore[attr-defined]
        while timers and timers[0][0] <= now_ns:
            handle = heappop(timers)[2]
            if not handle.cancelled():
                ready.append(handle)
                return


class _Handle(events.Handle):
    __slots__ = ()

    def _run(self) -> None:
        if _may_run(self):
            super()._run()


class _TimerHandle(events.TimerHandle):
    __slots__ = ()

    def _run(self) -> None:
        if _may_run(self):
            super()._run()


def _may_run(handle: Any) -> bool:
    """Whether a callback's process runs. If it is stopped, the callback is kept until it continues."""
    process = handle._context.get(CURRENT)
    handle._loop.running = process
    if process is None or process.parked is None:
        return True
    process.parked.append(handle)
    return False


class MemoryLoop(TimerLoop):
    """The loop of a run in one process. When nothing is ready, time jumps to the next timer."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.running: Process | None = None
        """The process whose callback runs, or ran last; ``None``: the orchestrator's."""
        super().__init__(_Selector(self))
        self.set_task_factory(_make_task)

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def _timer(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        return _TimerHandle(when, callback, args, self, context)

    def resume(self, process: Process) -> None:
        """Continue a stopped process, with all callbacks that were kept."""
        parked, process.parked = process.parked or [], None
        self._ready.extend(parked)  # type: ignore[attr-defined]

    def jump(self) -> bool:
        """Move time to the next timer and run it. Returns False if there is none."""
        at_ns = self.next_timer_ns()
        if at_ns is None:
            return False
        if at_ns > self.now_ns:
            self.now_ns = at_ns
        self.fire()
        return True


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, context: Context | None = None, **options: Any
) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, context=context, **options)
    process = CURRENT.get() if context is None else context.get(CURRENT)
    if process is not None:
        process.tasks.add(task)
    return task


class _Selector(selectors.DefaultSelector):
    """Checks file descriptors now and then; never waits while a timer is set."""

    def __init__(self, loop: MemoryLoop) -> None:
        super().__init__()
        self._loop = loop
        self._look_at = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        is_idle = timeout is None or timeout > 0
        if is_idle and not self._loop.jump():
            return super().select(_WAIT_S)
        now = time.monotonic()
        if now < self._look_at:
            return []
        self._look_at = now + _LOOK_EVERY_S
        return super().select(0)
