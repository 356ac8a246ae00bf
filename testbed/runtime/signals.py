"""Ends a run from outside: signal handlers for a while, and interrupts from other threads."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


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
