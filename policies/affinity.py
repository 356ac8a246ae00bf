"""Routings that return to where the beginning of a prompt is kept."""

from __future__ import annotations

from typing import ClassVar

from policies.interfaces import RoutingPolicy
from policies.prefixes import is_held, service_after_s
from policies.problem import Hop, Placement, Problem, RequestSpec, Route
from policies.state import SystemState
from policies.waiting import waited_route
from policies.wsrr import WsRrRouter


class Sticky(RoutingPolicy):
    """The chain of the conversation's last turn while it has room, else the cheapest (session affinity over WS-RR)."""

    name = "sticky"

    def bind(self, problem: Problem, placement: Placement) -> StickyRouter:
        return StickyRouter(problem, placement)


class StickyRouter:
    """WS-RR, but for turns whose conversation has a chain."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._problem, self._placement = problem, placement
        self._otherwise = WsRrRouter(problem, placement)

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Returns the conversation's chain if it has room now, else WS-RR's."""
        asking = state.asking
        if asking is not None and is_held(self._placement, asking.own):
            route = waited_route(self._problem, request, asking.own, state, now_s)
            if route.wait_s == 0:
                return route
        return self._otherwise.route(request, state, now_s)


class PrefixAware(RoutingPolicy):
    """The chain that ends the request first, with what each probably holds of its prompt, unless it is too busy."""

    name = "prefix-aware"
    most_ahead: ClassVar[int] = 8
    """The balance threshold: a chain that holds the prompt is left out if its busiest server has so many sessions more than
    the busiest server of the cheapest chain."""

    def bind(self, problem: Problem, placement: Placement) -> PrefixAwareRouter:
        return PrefixAwareRouter(problem, placement, self.most_ahead)


class PrefixAwareRouter:
    """Compares WS-RR's chain with those that hold the beginning of the prompt: wait, and service without what is kept."""

    def __init__(self, problem: Problem, placement: Placement, most_ahead: int) -> None:
        self._problem, self._placement, self._most_ahead = problem, placement, most_ahead
        self._otherwise = WsRrRouter(problem, placement)

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Returns the chain of the least cost; of equal ones the one that holds most of the prompt."""
        cheapest = self._otherwise.route(request, state, now_s)
        asking = state.asking
        if cheapest is None or asking is None or not asking.chains:
            return cheapest
        held = dict(asking.chains)

        def cost_s(hops: tuple[Hop, ...]) -> Route:
            wait_s = waited_route(self._problem, request, hops, state, now_s).wait_s
            return Route(
                hops, wait_s, wait_s + service_after_s(self._problem, request, hops, held.get(hops, 0))
            )

        most = self._most_ahead + _busiest(state, cheapest.hops)
        chains = [hops for hops in held if is_held(self._placement, hops) and _busiest(state, hops) < most]
        return min(map(cost_s, [*chains, cheapest.hops]), key=lambda route: route.cost_s)


def _busiest(state: SystemState, hops: tuple[Hop, ...]) -> int:
    return max(state.n_active(hop.server) for hop in hops)
