"""Agreement on time zero: it lies in the future when all nodes know it."""

from __future__ import annotations

import asyncio
import time

import pytest

from nodes.clock import ScaledClock
from nodes.messages import Start
from testbed.runtime.nodeset import agree_on_zero

AHEAD_S = 1e3


class _Machines:
    """A launcher on whose other machine the clock shows a later time."""

    def instant_at(self, node: str, instant: float) -> float:
        return instant + AHEAD_S if node == "there" else instant


class Node:
    """A node whose first reply is slow."""

    def __init__(self, first_takes_s: float) -> None:
        self._takes_s = first_takes_s
        self.origins_at: list[float] = []

    async def ask(self, message: Start) -> None:
        self.origins_at.append(message.origin_at)
        await asyncio.sleep(self._takes_s)
        self._takes_s = 0.0


async def test_all_nodes_know_time_zero_before_it_comes() -> None:
    nodes = {"here": Node(0.0), "slow": Node(0.15), "there": Node(0.0)}
    clock = ScaledClock()
    await agree_on_zero(nodes, clock, _Machines())  # type: ignore[arg-type]
    assert time.monotonic() < clock.origin_at
    ahead_s = [node.origins_at[-1] - clock.origin_at for node in nodes.values()]
    assert ahead_s == pytest.approx([0.0, 0.0, AHEAD_S], abs=1e-9)
    assert len(nodes["here"].origins_at) >= 2
