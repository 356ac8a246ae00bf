"""Payloads that connections have carried stay in nobody's memory."""

from __future__ import annotations

import gc
import tracemalloc

from nodes import connection
from nodes.connection import warm
from tests.support.data_plane import ManualClock, connected, make_server

N_BYTES = 300_000


async def test_neither_end_keeps_what_it_sent_or_got() -> None:
    clock = ManualClock()
    async with connected([make_server(name=name) for name in ("a", "b", "c")], clock) as connections:
        tracemalloc.start()
        try:
            await warm(connections, N_BYTES)
            gc.collect()
            left, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most > 2 * N_BYTES, "the measurement sees the payload"
    assert left < N_BYTES / 2


async def test_connections_are_warmed_few_at_a_time_where_much_goes_over_each() -> None:
    servers = [make_server(name=f"s{number}") for number in range(6)]
    async with connected(servers, ManualClock()) as connections:
        tracemalloc.start()
        try:
            await warm(connections, connection.WARM_BYTES)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert all(server.counters.connections == 1 for server in servers)
    assert most < 10 * connection.WARM_BYTES, "six at once are some thirty times as much, both ends counted"
