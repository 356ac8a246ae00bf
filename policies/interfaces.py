"""The two things a policy can be. Users' own policies implement these protocols."""

from __future__ import annotations

from typing import Protocol

from policies.problem import Placement, Problem, RequestSpec, Route
from policies.state import SystemState


class PlacementPolicy(Protocol):
    """Decides which blocks each server holds.

    ``name`` is what scenarios say; the docstring's first line is shown by ``testbed policies``. A policy
    with an attribute ``searches = True`` chooses |R| by trial itself.
    """

    name: str

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Return a placement that covers every block.

        ``design_concurrency`` is |R| if the user fixed it; ``None`` lets the policy choose.
        Raises ``InfeasiblePlacement`` with one sentence that names the missing blocks and memory.
        """
        ...


class Router(Protocol):
    """A routing policy bound to one problem and one placement."""

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """The chain for ``request`` given who holds cache at ``now_s``; ``None`` if there is none.

        A route may need to wait: ``Route.wait_s`` says how long the policy expects that.
        """
        ...


class RoutingPolicy(Protocol):
    """Makes routers. ``name`` is what scenarios say."""

    name: str

    def bind(self, problem: Problem, placement: Placement) -> Router: ...
