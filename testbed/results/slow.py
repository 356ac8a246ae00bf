"""The slowdowns of servers over time, for the closed model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from testbed.faultkinds import KINDS


class SlowServers:
    """Looks up how many times as long a server's steps took at an instant, from the events of faults."""

    def __init__(self, events: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
        numbers = {name: number for number, name in enumerate(names)}
        self._steps: dict[int, list[tuple[float, float]]] = {}
        for event in events:
            kind = KINDS.get(event.get("kind", ""))
            is_slow = kind is not None and kind.has_factor and event.get("applies", True)
            if event.get("server") not in numbers or not (is_slow or event["event"] == "begun"):
                continue
            factor = event.get("factor", 1.0) if event["event"] == "fault" else 1.0
            self._steps.setdefault(numbers[event["server"]], []).append((event["at_s"], factor))

    def factor(self, server: int, at_s: float) -> float:
        steps = self._steps.get(server)
        if steps is None:
            return 1.0
        number = bisect_right(steps, at_s, key=lambda step: step[0])
        return steps[number - 1][1] if number else 1.0
