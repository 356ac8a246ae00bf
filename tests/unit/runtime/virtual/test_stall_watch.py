"""A run in which nothing moves ends with a sentence; one that moves is left alone."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading

from testbed.runtime.virtual.stall import StallWatch


def test_a_run_that_stands_still_is_told_who_is_busy() -> None:
    said: list[str] = []
    told = threading.Event()

    def stalled(text: str) -> None:
        said.append(text)
        told.set()

    with StallWatch(lambda: 7, lambda: "a100-0 is busy", stalled, patience_s=0.05, last_patience_s=60):
        assert told.wait(30)
    assert said == ["the run has made no progress for 0.05 s: a100-0 is busy"]


def test_a_run_that_moves_is_left_alone() -> None:
    said: list[str] = []
    steps, looks = itertools.count(), threading.Semaphore(0)

    def sign() -> int:
        looks.release()
        return next(steps)

    with StallWatch(sign, lambda: "nobody", said.append, patience_s=0.01):
        for _ in range(20):
            assert looks.acquire(timeout=30)
    assert said == []


def test_a_run_that_cannot_even_be_told_ends_with_its_process() -> None:
    code = (
        "import threading\n"
        "from testbed.runtime.virtual.stall import StallWatch\n"
        "with StallWatch(lambda: 0, lambda: 'x is busy', lambda text: None, 0.05, 0.05):\n"
        "    threading.Event().wait()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert (
        done.stderr
        == "testbed: the run has made no progress for 0.05 s: x is busy; the record up to then is kept\n"
    )
