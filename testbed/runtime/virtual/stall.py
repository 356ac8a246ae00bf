"""Ends a run in virtual time that makes no progress: a process stays busy for ever, or all of them wait."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

PATIENCE_S = 30.0
_LAST_PATIENCE_S = 10.0
_LOOK_EVERY_S = 0.5


class StallWatch:
    """Watches a run from a thread while the body of its ``with`` runs.

    ``sign()`` returns another value whenever the run has made progress. After ``patience_s`` real seconds
    without progress, ``stalled(text)`` is called in the thread; the text contains that of ``busy()``. Seconds in which the
    body's thread waited for a CPU, of which ``waited_s`` returns the sum, do not count: on a busy machine a run is only slow. If
    the body does not end within ``last_patience_s`` then, the thread ends the whole process, if it ``may_exit``.
    """

    def __init__(
        self,
        sign: Callable[[], object],
        busy: Callable[[], str],
        stalled: Callable[[str], None],
        patience_s: float = PATIENCE_S,
        last_patience_s: float = _LAST_PATIENCE_S,
        *,
        may_exit: bool = True,
        waited_s: Callable[[], float] | None = None,
    ) -> None:
        self._sign, self._busy, self._stalled = sign, busy, stalled
        self._waited_s = waited_s or partial(_waited_s, threading.get_native_id())
        self._patience_s, self._last_patience_s = patience_s, last_patience_s
        self._may_exit = may_exit
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall watch", daemon=True)

    def __enter__(self) -> StallWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        seen, since = self._sign(), time.monotonic() - self._waited_s()
        while not self._over.wait(min(_LOOK_EVERY_S, self._patience_s / 4)):
            sign, now = self._sign(), time.monotonic() - self._waited_s()
            if sign != seen:
                seen, since = sign, now
            elif now - since >= self._patience_s:
                text = f"the run has made no progress for {self._patience_s:g} s: {self._busy()}"
                self._stalled(text)
                if self._may_exit and not self._over.wait(
                    self._last_patience_s
                ):  # code that no signal interrupts
                    print(f"testbed: {text}; the record up to then is kept", file=sys.stderr, flush=True)
                    os._exit(1)
                return


def _waited_s(thread: int) -> float:
    """Return for how many seconds a thread of this process was ready to run without a CPU; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
