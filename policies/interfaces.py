"""The protocols of placement and routing policies. Users' own policies implement them."""

from __future__ import annotations

from typing import Protocol

from policies.problem import Placement, Problem, RequestSpec, Route
from policies.state import SystemState


class PlacementPolicy(Protocol):
    """Decides which blocks each server holds.

    ``name`` is its name in scenarios. ``testbed policies`` shows the docstring's first line. A policy
    with an attribute ``searches = True`` chooses |R| itself, by trial.
    """

    name: str

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
        ``Route.wait_s`` is how long the policy expects that, in seconds.
        """
        ...


class RoutingPolicy(Protocol):
    """Makes routers. ``name`` is its name in scenarios."""

    name: str

    def bind(self, problem: Problem, placement: Placement) -> Router: ...
