"""The progress of a run, as its clients report it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from nodes import records

ENDED = tuple(kind.__struct_config__.tag for kind in records.ENDED)
"""States of a request that has ended."""


@dataclass
class Progress:
    """The numbers that the live view shows."""

    n_requests: int
    phase: str = "starting"
    states: dict[int, str] = field(default_factory=dict)
    """State by request, of those that have not ended; the others are only counted."""
    n_ended: Counter[str] = field(default_factory=Counter)
    n_tokens: dict[str, int] = field(default_factory=dict)
    ttft_s: float = 0.0
    gap_s: float = 0.0
    scenario_s: float = 0.0
    n_told: int = 0
    """Number of state changes of all requests so far."""

    def count(self, *states: str) -> int:
        # A copy, since the view calls this from a thread.
        n_open = sum(state in states for state in list(self.states.values()))
        return n_open + sum(self.n_ended[state] for state in states)

    def notify(self, request: int, state: str) -> None:
        """Record that ``request`` is in ``state`` now."""
        self.n_told += 1
        if state in ENDED:
            self.states.pop(request, None)
            self.n_ended[state] += 1
        else:
            self.states[request] = state
