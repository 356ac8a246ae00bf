"""The one source of time in a node: scenario seconds since the run's origin.

- ``ScaledClock``: real time, or a multiple of it
- ``VirtualClock``: the virtual time of an event loop (``VirtualLoop``)

``run_clock`` makes the one that fits the running loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol, runtime_checkable

from nodes.timers import DeadlineTimer

NS = 1_000_000_000


class Clock(Protocol):
    """Scenario time.

    Nothing in ``nodes`` reads another clock, except ``probe``, which measures real seconds.
    """

    def now_s(self) -> float: ...

    async def sleep_until_s(self, at_s: float) -> None: ...


class RunClock(Clock, Protocol):
    """The clock of a run. Its processes agree on the clock's zero once all of them have started.

    Below it lies a clock that all these processes share: the machine's monotonic clock, or virtual time.
    An ``instant`` is a time of that shared clock, in seconds.
    """

    is_virtual: bool
    origin_at: float
    """The clock's zero, as an instant; 0 until it is agreed on."""

    def instant(self) -> float:
        """Returns the present instant of the shared clock."""
        ...

    def scenario_s(self, instant: float) -> float:
        """Returns ``instant`` in scenario seconds."""
        ...

    def known_s(self) -> float | None:
        """As ``now_s``; returns ``None`` until the zero is agreed on."""
        ...

    def close(self) -> None: ...


class ScaledClock:
    """Scenario time that runs ``scale`` times as fast as the machine's monotonic clock.

    All processes of a run share the machine's clock, so their instants can be compared.
    """

    is_virtual = False

    def __init__(self, origin_at: float = 0.0, scale: float = 1.0) -> None:
        self.origin_at = origin_at
        self.scale = scale
        self._timer: DeadlineTimer | None = None

    def instant(self) -> float:
        return time.monotonic()

    def scenario_s(self, instant: float) -> float:
        return (instant - self.origin_at) * self.scale

    def now_s(self) -> float:
        return (time.monotonic() - self.origin_at) * self.scale

    def known_s(self) -> float | None:
        return self.now_s() if self.origin_at else None

    async def sleep_until_s(self, at_s: float) -> None:
        if self._timer is None:
            self._timer = DeadlineTimer()
        await self._timer.at(self.origin_at + at_s / self.scale)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.close()
            self._timer = None


@runtime_checkable
class VirtualLoop(Protocol):
    """An event loop in virtual time: time stands still while work is left, then jumps to the next timer."""

    now_ns: int

    def call_at_ns(self, at_ns: int, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        """As ``call_at``, with the time in nanoseconds."""
        ...


def nanoseconds(seconds: float) -> int:
    """Returns ``seconds`` in whole nanoseconds, never less, so that a sleeper never wakes early."""
    ns = round(seconds * NS)
    return ns if ns / NS >= seconds else ns + 1


def on_tick(at_s: float) -> float:
    """The whole nanosecond nearest to ``at_s``.

    Instants that a run's times add up to are put on it wherever they are formed. So the same times added in another order
    are the same instant, and who is first does not depend on rounding.
    """
    return round(at_s * NS) / NS


class VirtualClock:
    """Scenario time of the virtual loop that is running: whole nanoseconds, exact, and the same in every run."""

    is_virtual = True

    def __init__(self) -> None:
        loop: Any = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "a virtual clock needs a virtual event loop"
        self._virtual: VirtualLoop = loop
        self._loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._origin_ns = 0

    @property
    def origin_at(self) -> float:
        return self._origin_ns / NS

    @origin_at.setter
    def origin_at(self, instant: float) -> None:
        self._origin_ns = round(instant * NS)

    def instant(self) -> float:
        return self._virtual.now_ns / NS

    def scenario_s(self, instant: float) -> float:
        return (round(instant * NS) - self._origin_ns) / NS

    def now_s(self) -> float:
        return (self._virtual.now_ns - self._origin_ns) / NS

    def known_s(self) -> float | None:
        return self.now_s() if self._origin_ns else None

    async def sleep_until_s(self, at_s: float) -> None:
        at_ns = self._origin_ns + nanoseconds(at_s)
        if at_ns <= self._virtual.now_ns:
            return
        woken: asyncio.Future[None] = self._loop.create_future()
        timer = self._virtual.call_at_ns(at_ns, _wake, woken)
        try:
            await woken
        except asyncio.CancelledError:
            timer.cancel()
            raise

    def close(self) -> None:
        """Does nothing: this clock holds no resources."""


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


def run_clock(scale: float) -> RunClock:
    """Returns the clock that fits the running loop. Only real time can run ``scale`` times as fast."""
    if isinstance(asyncio.get_running_loop(), VirtualLoop):
        assert scale == 1, "virtual time has no scale"
        return VirtualClock()
    return ScaledClock(0.0, scale)
