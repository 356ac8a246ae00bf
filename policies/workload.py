"""What arrives when, and how long a refused session waits before it asks again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestPlan:
    """One request of the workload. ``client`` indexes ``problem.clients``."""

    index: int
    client: int
    arrival_at_s: float
    n_input_tokens: int
    n_output_tokens: int


@dataclass(frozen=True)
class Backoff:
    """Waits between attempts to open a session: ``first_s`` doubling up to ``max_s``.

    ``give_up_s`` after arrival without room, the request fails (0: never).
    """

    first_s: float = 1.0
    max_s: float = 60.0
    give_up_s: float = 0.0
