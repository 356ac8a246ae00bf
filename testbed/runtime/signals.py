"""Signals, threads and running event loops around a run: how it is ended from outside."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from types import FrameType
from typing import TypeVar

R = TypeVar("R")

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that interrupt a run."""


@contextmanager
def handling(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    """Handle the signals ``numbers`` with ``handler`` while the body runs; restores the handlers before.

    Outside of the main thread, which alone gets signals, nothing is installed.
    """
    if not in_main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def held_back() -> Iterator[None]:
    """Keep ``STOPS`` pending while the body runs, until ``let_through`` is called in it.

    For the time before a run or a worker handles them: wherever Ctrl-C hits an event loop that begins, it leaves tasks
    behind.
    """
    if not in_main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_through() -> None:
    """End ``held_back`` early: pending signals arrive now."""
    if in_main_thread():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class Interruption:
    """Interrupts a run from any thread, also before the run has an event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_requested = False
        self._interrupt: Callable[[], object] | None = None

    def request(self) -> None:
        """Interrupt what runs, and all that begins later with this interruption."""
        with self._lock:
            self._is_requested = True
            if self._interrupt is not None:
                self._interrupt()

    @contextmanager
    def calling(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """Call ``interrupt`` if the interruption is requested before or while the body runs."""
        with self._lock:
            self._interrupt = interrupt
            if self._is_requested:
                interrupt()
        try:
            yield
        finally:
            with self._lock:
                self._interrupt = None


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def outside_loop(function: Callable[[], R], interrupt: Callable[[], object]) -> R:
    """Call ``function``: in another thread if an event loop runs in this one, as in a notebook.

    ``interrupt`` is called if Ctrl-C arrives here meanwhile; it must end the function.
    """
    if not _has_running_loop():
        return function()
    with ThreadPoolExecutor(1, "run") as thread:
        running = thread.submit(copy_context().run, function)
        try:
            # The loop's own handler only tells the loop, which waits here.
            with handling(signal.default_int_handler, signal.SIGINT):
                return running.result()
        except BaseException:
            interrupt()
            raise
