"""Agreeing on time zero: it is still to come when all nodes know it."""

from __future__ import annotations

import asyncio
import time

from nodes.clock import ScaledClock
from nodes.messages import Start
from testbed.runtime.nodeset import agree_on_zero


class Node:
    """A node whose first answer takes its time."""

    def __init__(self, first_takes_s: float) -> None:
        self._takes_s = first_takes_s
        self.origins_at: list[float] = []

    async def ask(self, message: Start) -> None:
        self.origins_at.append(message.origin_at)
        await asyncio.sleep(self._takes_s)
        self._takes_s = 0.0


async def test_all_nodes_know_time_zero_before_it_comes() -> None:
    nodes = [Node(0.0), Node(0.15), Node(0.0)]
    clock = ScaledClock()
    await agree_on_zero(nodes, clock)  # type: ignore[arg-type]
    assert time.monotonic() < clock.origin_at
    assert [node.origins_at[-1] for node in nodes] == [clock.origin_at] * 3
    assert len(nodes[0].origins_at) >= 2
