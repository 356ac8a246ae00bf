"""Notices stalls: moments when a virtual machine's host takes all its CPUs away at once.

A thread on each of a few CPUs repeatedly sleeps for a short time. When all of them wake up late together,
hardly any process of this machine can have run. The stalls are written to memory that is shared with the
parent process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence

Span = tuple[float, float]
"""(begin, end) by ``time.monotonic``."""

_TICK_S = 0.01
STILL_S = 0.03
"""Shortest stall in seconds. Shorter ones happen on every machine, and are part of a run's stated error."""
_MAX_SPANS = 1000
_MOST_CPUS = 4
_COUNT, _SPAN = struct.Struct("<q"), struct.Struct("<dd")


class Spans:
    """Spans in memory shared with a forked process: one process writes, the other reads.

    Keeps the first 1,000.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _COUNT.size + _MAX_SPANS * _SPAN.size)

    def add(self, span: Span) -> None:
        (count,) = _COUNT.unpack_from(self._memory)
        if count < _MAX_SPANS:
            _SPAN.pack_into(self._memory, _COUNT.size + count * _SPAN.size, *span)
            _COUNT.pack_into(self._memory, 0, count + 1)

    def read(self) -> list[Span]:
        (count,) = _COUNT.unpack_from(self._memory)
        return [_SPAN.unpack_from(self._memory, _COUNT.size + i * _SPAN.size) for i in range(count)]


def in_common(gaps: Sequence[Sequence[Span]]) -> list[Span]:
    """Return the spans of at least ``STILL_S`` in which all CPUs stood still; ``gaps`` has those of each."""
    common = list(gaps[0])
    for others in gaps[1:]:
        common = [(max(a, c), min(b, d)) for a, b in common for c, d in others if max(a, c) < min(b, d)]
    return [(begin, end) for begin, end in common if end - begin >= STILL_S]


def watch(spans: Spans) -> None:
    """Write stalls to ``spans`` until this process is killed.

    As root its threads have priority over all others: then only a missing CPU can delay them.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    cpus = sorted(os.sched_getaffinity(0))
    cpus = cpus[:: -(-len(cpus) // _MOST_CPUS)]
    gaps: list[deque[Span]] = [deque(maxlen=100) for _ in cpus]
    for cpu, found in zip(cpus, gaps, strict=True):
        threading.Thread(target=_tick, args=(cpu, found), daemon=True).start()
    written_until = 0.0
    while True:
        time.sleep(10 * STILL_S)
        for begin, end in sorted(in_common([list(found) for found in gaps])):
            if begin >= written_until:
                spans.add((begin, end))
                written_until = end


def _tick(cpu: int, found: deque[Span]) -> None:
    os.sched_setaffinity(threading.get_native_id(), {cpu})
    slept_at = time.monotonic()
    while True:
        time.sleep(_TICK_S)
        woke_at = time.monotonic()
        if woke_at - slept_at >= STILL_S:
            found.append((slept_at + _TICK_S, woke_at))
        slept_at = woke_at
