"""What a run of the fast engine results in: requests, the servers' moves, steps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.decoding import Seen
from policies.problem import Route
from policies.workload import RequestPlan
from testbed.records.events import FaultEvent, Moved, RecoveryEvent, ServerLeft
from testbed.records.links import LinksUsed
from testbed.records.summary import MoveRow

ServerEvent = FaultEvent | ServerLeft | Moved


@dataclass(slots=True, eq=False)
class Rounds:
    """A request's rounds of speculative decoding so far, on all its chains."""

    n_drafted: int = 0
    seen: Seen = field(default_factory=Seen)
    made: list[int] = field(default_factory=list)
    """Output tokens of each."""


class Disturbed(Exception):
    """A session would be cut, which only the engine ``virtual`` can simulate."""


class SimulatedRequest(NamedTuple):
    """The outcome of a request, in the engines fast and reference. Times count from its arrival; ``None``: the request ended before.

    ``waiting_s`` ends when the attempt that was admitted begins (or with the request), ``setup_s`` from there until
    the prompt is sent. ``route`` is the chain that it was admitted on, ``n_rejections`` how many attempts were refused, without the one
    after which it gave up.
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
    rounds: Rounds | None = None
    """Those of speculative decoding; empty without it."""
    n_done: int = 0
    """Tokens of one that did not complete."""
    n_preemptions: int = 0
    preempted_tokens: int = 0
    preempted_s: float = 0.0
    cost_s: float | None = None
    wait_expected_s: float = 0.0
    n_cached_tokens: int | None = None
    """Both as ``testbed.results.logs.RequestRecord``."""


class FastRun(NamedTuple):
    """Requests in the order of the experiment, and the servers' changes in the order of their ends."""

    requests: list[SimulatedRequest]
    moves: list[MoveRow]
    decisions_s: list[float]
    """Real seconds of every routing decision."""
    why: str
    """Whether it was served in closed form or step by step, and the reason."""
    steps: array[float] | None = None
    """Rows of ``steps.COLUMNS`` of a run step by step; ``None`` if there are more than ``most_steps``."""
    n_steps: int | None = None
    """The number of these rows; ``None`` for a run in closed form."""
    gaps_s: array[float] | None = None
    """Seconds from every token to the next of its request, of all requests of a run step by step."""
    links: LinksUsed | None = None
    """Use of every link that carried hidden states; ``None``: it was not simulated."""
    faults: Sequence[ServerEvent | RecoveryEvent] = ()
    """What happened to servers and to sessions that lost them, in the order of time."""
    is_cut: bool = False
    """Whether sessions lost servers midway."""
