"""Routing over a part of the model and some of the servers, with any routing policy as it is.

A lost range of blocks is a smaller problem of the same kind: its model has only these blocks, and every
server holds of them what its range has in common with them. Servers keep their numbers, so that the same
``SystemState`` serves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import replace

from policies.interfaces import Router
from policies.problem import BlockRange, Hop, Placement, PolicyError, Problem, RequestSpec, Route
from policies.state import SystemState

_MAX_KNOWN = 128
"""Routers that are kept; each holds the chains of one part of the model on one set of servers."""


def restrict(
    problem: Problem, placement: Placement, first: int, last: int, alive: Container[int]
) -> tuple[Problem, Placement]:
    """The problem and the placement of the blocks ``[first, last)``, counted from ``first``, on ``alive``.

    Servers that are not in ``alive`` hold nothing. Cache rooms stay: they belong to the whole server.
    """
    assert 0 <= first < last <= problem.model.n_blocks, f"[{first}, {last}) is no part of the model"
    part = replace(problem, model=replace(problem.model, n_blocks=last - first))
    ranges = []
    for j, held in enumerate(placement.ranges):
        low, high = max(held.first, first), min(held.last, last)
        ranges.append(
            BlockRange(low - first, high - first) if low < high and j in alive else BlockRange(0, 0)
        )
    return part, replace(placement, ranges=tuple(ranges))


class SubrangeRouter:
    """Routes over any blocks among any servers with one routing policy.

    ``bind`` makes the policy's router for a problem and a placement. The last hop may stop before its
    server's range ends: at the end of what was asked for.
    """

    def __init__(
        self, bind: Callable[[Problem, Placement], Router], problem: Problem, placement: Placement
    ) -> None:
        self._bind = bind
        self._problem = problem
        self._placement = placement
        self._known: OrderedDict[tuple[int, int, frozenset[int]], Router | None] = OrderedDict()

    @property
    def placement(self) -> Placement:
        return self._placement

    def replace(self, placement: Placement) -> None:
        """Servers hold other blocks from now on."""
        if placement != self._placement:
            self._placement = placement
            self._known.clear()

    def route(
        self,
        request: RequestSpec,
        state: SystemState,
        now_s: float,
        alive: frozenset[int],
        first: int = 0,
        last: int | None = None,
    ) -> Route | None:
        """The chain over exactly ``[first, last)`` (default: all blocks) among ``alive``; ``None`` if there is none.

        Raises ``PolicyError`` when the policy fails.
        """
        if last is None:
            last = self._problem.model.n_blocks
        router = self._router(first, last, alive)
        if router is None:
            return None
        route = router.route(request, state, now_s)
        if route is None or not first:
            return route
        return route._replace(hops=tuple(Hop(j, a + first, b + first) for j, a, b in route.hops))

    def _router(self, first: int, last: int, alive: frozenset[int]) -> Router | None:
        """The policy bound to a part; ``None`` if it has no chain there."""
        key = first, last, alive
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        part, placement = restrict(self._problem, self._placement, first, last, alive)
        router: Router | None = None
        if not placement.uncovered(last - first):
            try:
                router = self._bind(part, placement)
            except PolicyError:
                # A policy that took the whole placement and does not take this part (a fixed chain whose
                # server is away) has no chain here; it is asked again when the servers are others.
                router = None
        self._known[key] = router
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return router
