"""Waiting for an instant with sub-millisecond precision on any asyncio loop.

The loops' own timers have steps of 1 ms (libuv fires early, the selector loop late), so all deadlines
of a process share one timerfd and a heap. The last ``SPIN_S`` seconds are spent in a busy loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from heapq import heappop, heappush

SPIN_S = 60e-6
_TFD_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000
_TFD_TIMER_ABSTIME = 1
_CLOCK_MONOTONIC = 1

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class DeadlineTimer:
    """Futures that resolve at absolute ``time.monotonic()`` instants, in order.

    Belongs to the loop that is running when it is made.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop.add_reader(self._fd, self._fire)
        self._heap: list[tuple[float, int, asyncio.Future[None]]] = []
        self._sequence = 0
        self._spec = _TimerSpec()

    def at(self, instant_s: float) -> asyncio.Future[None]:
        """Returns a future that resolves at ``instant_s``, or at once if that has passed."""
        future = self._loop.create_future()
        if instant_s <= time.monotonic():
            future.set_result(None)
            return future
        self._sequence += 1
        heappush(self._heap, (instant_s, self._sequence, future))
        if self._heap[0][2] is future:
            self._arm(instant_s)
        return future

    def _arm(self, instant_s: float) -> None:
        early = max(instant_s - SPIN_S, 1e-9)
        value = self._spec.value
        value.seconds = int(early)
        value.nanoseconds = int((early - value.seconds) * 1e9)
        if _libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(self._spec), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _fire(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # re-armed between the wake-up and this read
            return
        heap = self._heap
        while heap:
            instant, _, future = heap[0]
            if not future.done():
                if instant - time.monotonic() > SPIN_S:
                    break
                while time.monotonic() < instant:
                    continue
                future.set_result(None)
            heappop(heap)
        if heap:
            self._arm(heap[0][0])

    def close(self) -> None:
        """Stops; pending futures are cancelled."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        for _, _, future in self._heap:
            future.cancel()
        self._heap.clear()
