"""Payloads that connections have carried stay in nobody's memory."""

from __future__ import annotations

import gc
import tracemalloc

from nodes.connection import warm
from nodes.framesizes import WARM_AT_ONCE_BYTES, WARM_BYTES
from tests.support.data_plane import ManualClock, connected, make_server

N_BYTES = 300_000


async def test_neither_end_keeps_what_it_sent_or_got() -> None:
    clock = ManualClock()
    async with connected([make_server(name=name) for name in ("a", "b", "c")], clock) as connections:
        tracemalloc.start()
        try:
            await warm(connections, N_BYTES, WARM_AT_ONCE_BYTES)
            gc.collect()
            left, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most > 2 * N_BYTES, "the measurement sees the payload"
    assert left < N_BYTES / 2


async def test_a_connection_is_warmed_without_holding_all_that_goes_over_it() -> None:
    async with connected([make_server()], ManualClock()) as connections:
        tracemalloc.start()
        try:
            await warm(connections, 100 * WARM_BYTES, WARM_AT_ONCE_BYTES)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert most < 1.5 * WARM_BYTES, "both ends counted"
