"""The slowdowns of servers over time, for the closed model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from testbed.faultkinds import KINDS
from testbed.records.events import FaultEvent, FaultHappened, FaultOver


class SlowServers:
    """Looks up how many times as long a server's steps took at an instant, from the events of faults."""

    def __init__(self, events: Sequence[FaultEvent], names: Sequence[str]) -> None:
        numbers = {name: number for number, name in enumerate(names)}
        self._steps: dict[int, list[tuple[float, float]]] = {}
        for event in events:
            factor = 1.0
            if isinstance(event, FaultHappened):
                if not event.factor or not event.applies:
                    continue
                factor = event.factor
            elif isinstance(event, FaultOver) and not KINDS[event.kind].has_factor:
                continue
            assert event.at_s is not None, "faults have instants"
            self._steps.setdefault(numbers[event.server], []).append((event.at_s, factor))

    def factor(self, server: int, at_s: float) -> float:
        steps = self._steps.get(server)
        if steps is None:
            return 1.0
        number = bisect_right(steps, at_s, key=lambda step: step[0])
        return steps[number - 1][1] if number else 1.0
