"""Routing over a part of the model among some of the servers, with any routing policy.

A lost range of blocks makes a smaller problem of the same kind: its model has only these blocks, and every
server holds those of them that are in its range. Servers keep their numbers, so the same ``SystemState``
can be used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import replace

from policies.interfaces import Router
from policies.problem import BlockRange, Hop, Placement, PolicyError, Problem, RequestSpec, Route
from policies.state import SystemState

_MAX_KNOWN = 128
"""At most this many routers are kept; each has the chains of one part of the model on one set of servers."""


def restrict(
    problem: Problem, placement: Placement, first: int, last: int, alive: Container[int]
) -> tuple[Problem, Placement]:
    """Returns the problem and the placement of the blocks ``[first, last)``, renumbered from 0, on ``alive``.

    Servers that are not in ``alive`` hold nothing. The cache rooms stay the same: they belong to the whole
    server.
    """
    assert 0 <= first < last <= problem.model.n_blocks, f"[{first}, {last}) is not part of the model"
    part = replace(problem, model=replace(problem.model, n_blocks=last - first))
    ranges = []
    for j, held in enumerate(placement.ranges):
        low, high = max(held.first, first), min(held.last, last)
        ranges.append(
            BlockRange(low - first, high - first) if low < high and j in alive else BlockRange(0, 0)
        )
    return part, replace(placement, ranges=tuple(ranges))


class SubrangeRouter:
    """Routes over any range of blocks among any servers with one routing policy.

    ``bind`` makes the policy's router for a problem and a placement. The last hop ends where the wanted range
    ends, even if its server holds more blocks.
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
        """Uses another placement from now on."""
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
        """Returns the chain over exactly ``[first, last)`` among the servers ``alive``; ``None`` without one.

        By default it is over all blocks. Raises ``PolicyError`` if the policy fails.
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
        """Returns the policy bound to a part of the model, or ``None`` if there is no chain."""
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
                # A policy that accepted the whole placement may refuse a part (a fixed chain whose
                # server is away): then it has no chain here. It is tried again with other servers.
                router = None
        self._known[key] = router
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return router
