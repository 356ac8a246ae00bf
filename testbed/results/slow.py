"""When servers were slow, and when they were halted, from the events of faults."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from testbed.faultkinds import KINDS
from testbed.records.events import FaultEvent, FaultHappened, FaultOver, ServerBegun

HALTING = frozenset(name for name, kind in KINDS.items() if kind.state == "halted")
"""Kinds of fault that halt a server."""


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


class HaltedServers:
    """Looks up how long a server was halted within a span of time."""

    def __init__(self, events: Sequence[FaultEvent]) -> None:
        self._spans: dict[str, list[list[float]]] = {}
        for event in events:
            assert event.at_s is not None, "faults have instants"
            spans = self._spans.setdefault(event.server, [])
            is_halted = bool(spans) and spans[-1][1] == math.inf
            if isinstance(event, FaultHappened) and event.applies and event.kind in HALTING:
                if not is_halted:
                    spans.append([event.at_s, math.inf])
            elif is_halted and (isinstance(event, ServerBegun) or _ends_halt(event)):
                spans[-1][1] = event.at_s

    def within_s(self, server: str, since_s: float, until_s: float) -> float:
        """Returns the seconds of the span in which ``server`` was halted."""
        return sum(
            max(0.0, min(end_s, until_s) - max(begin_s, since_s))
            for begin_s, end_s in self._spans.get(server, ())
        )


def _ends_halt(event: FaultHappened | FaultOver) -> bool:
    """Whether a halted server goes on, or its process has ended: whatever applies but another speed."""
    return event.applies and not (event.kind in KINDS and KINDS[event.kind].has_factor)
