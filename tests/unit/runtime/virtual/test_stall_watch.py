"""A run in which nothing moves ends with a sentence; one that moves is left alone."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from testbed.runtime.virtual.stall import StallWatch


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


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


def test_time_without_a_cpu_is_not_time_without_progress() -> None:
    said: list[str] = []
    began_at_s, looks = time.monotonic(), threading.Semaphore(0)

    def sign() -> int:
        looks.release()
        return 7

    with StallWatch(
        sign, lambda: "x", said.append, patience_s=0.05, waited_s=lambda: time.monotonic() - began_at_s
    ):
        for _ in range(20):
            assert looks.acquire(timeout=30)
    assert said == []


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="the kernel does not count waiting for a CPU"
)
def test_a_thread_that_is_ready_without_a_cpu_waits() -> None:
    """Two threads of processes that share one CPU and never sleep wait half of the time; one that sleeps never does."""
    (cpu,) = sorted(os.sched_getaffinity(0))[:1]
    code = (
        "import os, threading, time\n"
        "from testbed.runtime.virtual.stall import _waited_s\n"
        f"os.sched_setaffinity(0, [{cpu}])\n"
        "other = os.fork()\n"
        "ends_at = time.monotonic() + 0.6\n"
        "while time.monotonic() < ends_at: pass\n"
        "if other == 0: os._exit(0)\n"
        "os.waitpid(other, 0)\n"
        "before_s = _waited_s(threading.get_native_id())\n"
        "print(before_s, _waited_s(-1))\n"
    )
    waited_s, of_none_s = map(float, python(code).stdout.split())
    assert waited_s > 0.1 and of_none_s == 0


def test_a_run_that_cannot_even_be_told_ends_with_its_process() -> None:
    code = (
        "import threading\n"
        "from testbed.runtime.virtual.stall import StallWatch\n"
        "with StallWatch(lambda: 0, lambda: 'x is busy', lambda text: None, 0.05, 0.05):\n"
        "    threading.Event().wait()\n"
    )
    done = python(code)
    assert done.returncode == 1
    assert (
        done.stderr
        == "testbed: the run has made no progress for 0.05 s: x is busy; the record up to then is kept\n"
    )
