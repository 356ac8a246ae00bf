"""What a simulated run under faults leaves: events, recoveries, counts, and every step."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

MAX_STEPS = 5_000_000
"""Above so many steps ``hops.parquet`` is left out, and no more are kept; ``summary.json`` says so."""

STEP_COLUMNS = 13
"""Request, token, hop, server, first, last, sent, arrived, departed, received, bytes up and down, tokens replayed."""


class Recovery(NamedTuple):
    """A standstill of a session that went on.

    ``recovery_s`` is from the failure (but not before the session needed the hop) until the replacements
    have done the present step; ``floor_s`` is the part of it that no client can avoid: noticing, one
    connection, and the replay of ``n_tokens`` tokens, those of the present step included.
    """

    request: int
    n_tokens: int
    recovery_s: float
    floor_s: float


class Record:
    """Grows while the run goes on. ``events`` are lines of ``events.jsonl``, in the order of time."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.recoveries: list[Recovery] = []
        self.n_decisions = 0
        self.n_stale_decisions = 0
        """Decisions while the view was wrong about a server."""
        self.n_misled_decisions = 0
        """Decisions for a chain with a server that was not there."""
        self.steps = array("d")

    @property
    def n_faults(self) -> int:
        """Those that found something to do."""
        return sum(event["event"] == "fault" and event["applies"] for event in self.events)

    def event(self, event: str, at_s: float, **details: Any) -> None:
        self.events.append({"event": event, "at_s": at_s, **details})

    def step(self, *columns: float) -> None:
        assert len(columns) == STEP_COLUMNS
        if len(self.steps) <= MAX_STEPS * STEP_COLUMNS:
            self.steps.extend(columns)
