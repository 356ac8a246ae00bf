"""The protocols of placement and routing policies, with their traits. Users' own policies implement them.

A trait is an attribute of a policy's class that decides how the system around the policy works. A policy that
does not state one has the default of its protocol here. A scenario that states the same thing wins.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, Literal, Protocol, cast, get_args

from policies.outcomes import Outcome
from policies.problem import Placement, PolicyError, Problem, RequestSpec, Route
from policies.state import SystemState

Queue = Literal["none", "fifo", "backfill"]
Communication = Literal["hub-spoke", "server-to-server"]
SessionSetup = Literal["petals", "proposed"]
Want = Literal["places", "seed", "requests", "rehearsal"]
"""What a policy gets only if it wants it:

- ``places``: ``Problem.places``, the sites and regions of servers and clients, and the servers' prices
- ``seed``: ``Problem.seed``, the run's, for draws of its own
- ``requests``: ``SystemState.who``, which request asks (only routings)
- ``rehearsal``: ``Problem.rehearsal``, with which a placement can be tried in the simulator (only placements)
"""


class PlacementPolicy(Protocol):
    """Decides which blocks each server holds.

    ``name`` is its name in scenarios. ``testbed policies`` shows the docstring's first line.
    """

    name: str
    searches: ClassVar[bool] = False
    """Chooses |R| itself, by trial, where a scenario has it searched."""
    session_setup: ClassVar[SessionSetup] = "proposed"
    """Which of the two published session setups (``[calibration]``, in seconds) its sessions have."""
    sees_join_order: ClassVar[bool] = True
    """Depends on ``Problem.join_order``; without, it sees an empty one, and seeds can share its placements."""
    sees_absent_servers: ClassVar[bool] = False
    """Sees servers that are absent at the start, too, and must give them no blocks. Else it sees the others."""
    needs_petals_throughput: ClassVar[bool] = False
    """Hardware must state PETALS' own measurements (tokens per second); else they are computed where missing."""
    counts_drafts: ClassVar[bool] = False
    """Where clients draft tokens, it sees a token's share of a round's times (``Problem.by_token``).

    Else it sees those of steps of one token.
    """
    wants: ClassVar[tuple[Want, ...]] = ()
    """What it gets beside the problem."""

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Returns a placement that covers every block.

        ``design_concurrency`` is |R| if the user fixed it; ``None`` lets the policy choose.
        Raises ``InfeasiblePlacement`` with a sentence that names the missing blocks and memory.
        """
        ...


class Router(Protocol):
    """A routing policy bound to one problem and one placement."""

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Returns the chain for ``request``, or ``None`` if there is none.

        ``state`` has the sessions that hold cache at ``now_s``. The request may have to wait for room:
        ``Route.wait_s`` is how long the policy expects that, in seconds. In a search of |R| nothing waits for a route:
        there, ``None`` says that the placement cannot serve the request.
        """
        ...


class LearningRouter(Router, Protocol):
    """A router that is called with what became of requests."""

    def observe(self, outcome: Outcome) -> None:
        """Learn from a request that has ended, as its client measured it.

        Called before the first decision for which the outcome is known, in the order in which requests ended. A router
        that is bound later, as after a failure, is called with the last outcomes first.
        """
        ...


class RoutingPolicy(Protocol):
    """Makes routers. ``name`` is its name in scenarios."""

    name: str
    queue: ClassVar[Queue] = "none"
    """Where requests without room wait (``policy.queue``)."""
    communication: ClassVar[Communication] = "hub-spoke"
    """Who sends hidden states to the next server, the client or the server before (``policy.communication``)."""
    takes_cheapest: ClassVar[bool] = False
    """With room on all servers it takes the chain of the least service time, so that Theorem 1 is about it."""
    counts_drafts: ClassVar[bool] = False
    """As that of placement policies."""
    wants: ClassVar[tuple[Want, ...]] = ()
    """What it gets beside the problem and the state."""

    def bind(self, problem: Problem, placement: Placement) -> Router: ...


def queue_of(policy: object) -> Queue:
    """Returns a routing policy's ``queue``. Raises ``PolicyError`` for an unknown one."""
    return cast(Queue, _one_of(get_args(Queue), policy, RoutingPolicy, "queue"))


def communication_of(policy: object) -> Communication:
    """Returns a routing policy's ``communication``. Raises ``PolicyError`` for an unknown one."""
    return cast(Communication, _one_of(get_args(Communication), policy, RoutingPolicy, "communication"))


def session_setup_of(policy: object) -> SessionSetup:
    """Returns a placement policy's ``session_setup``. Raises ``PolicyError`` for an unknown one."""
    return cast(SessionSetup, _one_of(get_args(SessionSetup), policy, PlacementPolicy, "session_setup"))


def wants_of(policy: object) -> tuple[Want, ...]:
    """Returns a placement or routing policy's ``wants``. Raises ``PolicyError`` for an unknown one."""
    wants = trait(policy, RoutingPolicy, "wants")
    if not isinstance(wants, Collection) or isinstance(wants, str) or not set(wants) <= set(get_args(Want)):
        of, words = getattr(policy, "name", "a policy"), ", ".join(map(repr, get_args(Want)))
        raise PolicyError(f"the policy {of} has wants = {wants!r}; its class must state a tuple of {words}")
    return cast("tuple[Want, ...]", tuple(wants))


def trait(policy: object, protocol: type, name: str) -> Any:
    """Returns a trait of a policy, or of its class: its own, or else the default of ``protocol``."""
    return getattr(policy, name, getattr(protocol, name))


def _one_of(valid: tuple[str, ...], policy: object, protocol: type, name: str) -> str:
    value = trait(policy, protocol, name)
    if value not in valid:
        of = getattr(policy, "name", "a policy")
        words = ", ".join(map(repr, valid))
        raise PolicyError(f"the policy {of} has {name} = {value!r}; its class must state one of {words}")
    return str(value)
