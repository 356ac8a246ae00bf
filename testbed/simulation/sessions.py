"""What the simulation of failing servers keeps of a request, and of an attempt to open hops for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from policies.problem import Hop, RequestSpec
from policies.workload import RequestPlan
from testbed.simulation.servers import Key


@dataclass(slots=True, eq=False)
class Held:
    """A hop that a server has admitted. ``epoch`` is the server's then, ``n_cached`` the tokens in its cache."""

    hop: Hop
    key: Key
    epoch: int
    n_cached: int = 0


@dataclass(slots=True, eq=False)
class Repair:
    """A standstill, from a failure until its replacements have caught up: the hops ``[first, last)`` are lost.

    ``failed_at_s`` to ``detected_at_s`` is the noticing; ``keys`` are those of the replacements.
    """

    failed_at_s: float
    detected_at_s: float
    first: int
    last: int
    attempt: int = 0
    """Attempts since the latest failure."""
    n_attempts: int = 0
    keys: set[Key] = field(default_factory=set)

    def is_waiting_for(self, held: Held, n_inputs: int) -> bool:
        """Whether a hop is a replacement that has yet to be sent all of ``n_inputs`` tokens."""
        return held.key in self.keys and held.n_cached < n_inputs


@dataclass(slots=True, eq=False)
class Session:
    """A request on its way. ``turn`` numbers what it waits for: answers to anything earlier are void."""

    number: int
    plan: RequestPlan
    waits_s: Iterator[float]
    """Between one attempt to open it and the next."""
    turn: int = 0
    n_keys: int = 0
    n_attempts: int = 0
    hops: list[Held] = field(default_factory=list)
    n_done: int = 0
    """Output tokens that are there."""
    at: int = 0
    """The hop whose answer to the present step is next."""
    awaits: bool = False
    """Whether that answer is awaited, since ``sent_at_s``."""
    sent_at_s: float = 0.0
    is_accepted: bool = False
    """With forwarding: whether the hop has the step that was pushed to it."""
    is_asking: bool = False
    """With forwarding: whether the client asks all hops who is there, and hears nothing else meanwhile."""
    passed: list[tuple[Hop, float, float, float]] = field(default_factory=list)
    """With forwarding: hop, and when a step was sent to it, arrived and was done, of the hops that are through."""
    is_watched: bool = False
    has_ended: bool = False
    repair: Repair | None = None
    n_replays: int = 0
    wait_s: float = 0.0
    waiting_s: float | None = None
    setup_s: float | None = None
    ttft_s: float | None = None

    @property
    def n_history(self) -> int:
        """Tokens in the caches of the hops that are through with everything before the present step."""
        return self.plan.n_input_tokens + self.n_done - 1 if self.n_done else 0

    @property
    def n_inputs(self) -> int:
        """Tokens that a hop has been sent when it is through with the present step."""
        return self.plan.n_input_tokens + self.n_done

    @property
    def left(self) -> RequestSpec:
        """What routing is asked for: tokens that are there are part of the prompt."""
        plan, n_done = self.plan, self.n_done
        return RequestSpec(plan.client, plan.n_input_tokens + n_done, plan.n_output_tokens - n_done)

    def lacks(self, n_blocks: int) -> tuple[int, int]:
        """The blocks, of ``n_blocks``, for which it has no hop."""
        repair = self.repair
        if repair is None:
            return 0, n_blocks
        return self.hops[repair.first].hop.first, self.hops[repair.last - 1].hop.last

    def holds(self) -> tuple[Hop, ...]:
        """The hops that are not lost."""
        lost = range(self.repair.first, self.repair.last) if self.repair else range(0)
        return tuple(held.hop for i, held in enumerate(self.hops) if i not in lost)


@dataclass(slots=True, eq=False)
class Opening:
    """One attempt to open hops over the blocks that a session lacks."""

    session: Session
    asked_at_s: float
    was_idle: bool
    """Whether the router saw no session at all."""
    hops: tuple[Hop, ...] = ()
    unanswered: dict[int, int] = field(default_factory=dict)
    """Server by number of the key of what it was sent."""
    held: list[Held] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    """Servers without connection."""
    refusal: str = ""
    is_hopeless: bool = False
    is_over: bool = False
