"""How far a run has come, as its clients report it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from nodes import records

ENDED = tuple(kind.__struct_config__.tag for kind in records.ENDED)
"""States of a request that is over."""


@dataclass
class Progress:
    """What the live view shows."""

    n_requests: int
    phase: str = "starting"
    states: dict[int, str] = field(default_factory=dict)
    """Of requests that have not ended; those that have are only counted."""
    n_ended: Counter[str] = field(default_factory=Counter)
    n_tokens: dict[str, int] = field(default_factory=dict)
    ttft_s: float = 0.0
    gap_s: float = 0.0
    scenario_s: float = 0.0
    n_told: int = 0
    """How often a request has changed its state."""

    def count(self, *states: str) -> int:
        n_open = sum(state in states for state in list(self.states.values()))  # a view may ask from a thread
        return n_open + sum(self.n_ended[state] for state in states)

    def notify(self, request: int, state: str) -> None:
        """``request`` is in ``state`` now."""
        self.n_told += 1
        if state in ENDED:
            self.states.pop(request, None)
            self.n_ended[state] += 1
        else:
            self.states[request] = state
