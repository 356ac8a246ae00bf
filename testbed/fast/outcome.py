"""What the simulation of a run results in: requests, the servers' moves, steps. Also for the engine ``virtual``."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from policies.problem import BlockRange, Route
from policies.workload import RequestPlan

COMPLETED, FAILED = "completed", "failed"
"""The last states of requests: with all tokens, or without: there was no room in time, or no chain at all."""


class CompletedMove(NamedTuple):
    """One server's change.

    From ``closed_at_s`` it took new sessions only on blocks that it keeps (none if it does not drain),
    at ``drained_at_s`` it began to load, and from ``open_at_s`` it served its new range.
    """

    server: int
    old: BlockRange
    new: BlockRange
    decided_at_s: float
    closed_at_s: float
    drained_at_s: float
    open_at_s: float


class SimulatedRequest(NamedTuple):
    """The outcome of a request. Times count from its arrival; ``None``: the request ended before.

    ``waiting_s`` ends when the attempt that was admitted begins (or with the request), ``setup_s`` from there until
    the prompt is sent. ``route`` is the chain that it was admitted on, ``n_rejections`` how often it asked again.
    """

    plan: RequestPlan
    status: str
    route: Route | None
    n_rejections: int
    waiting_s: float
    setup_s: float | None
    ttft_s: float | None
    time_s: float | None
    ended_s: float
    """``time_s``, or when one that did not complete gave up."""
    reason: str = ""
    n_replays: int = 0
    n_done: int = 0
    """Tokens of one that did not complete."""
    n_preemptions: int = 0
    preempted_tokens: int = 0
    preempted_s: float = 0.0
    """As ``testbed.results.logs.RequestRecord``."""


class FastRun(NamedTuple):
    """Requests in the order of the experiment, and the servers' changes in the order of their ends."""

    requests: list[SimulatedRequest]
    moves: list[CompletedMove]
    decisions_s: list[float]
    """Real seconds of every routing decision."""
    steps: array[float] | None = None
    """Rows of ``steps.COLUMNS`` of a run step by step; ``None`` if there are more than ``most_steps``."""
    n_steps: int | None = None
    """The number of these rows; ``None`` for a run in closed form."""
    gaps_s: array[float] | None = None
    """Seconds from every token to the next of its request, of all requests of a run step by step."""


def move_of(line: dict[str, Any], names: list[str]) -> CompletedMove:
    """Returns the move in a line ``MOVED`` of ``events.jsonl``."""
    times = (line[name] for name in ("decided_at_s", "closed_at_s", "drained_at_s", "open_at_s"))
    server = names.index(line["server"])
    return CompletedMove(server, BlockRange(*line["old"]), BlockRange(*line["new"]), *times)
