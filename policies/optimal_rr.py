"""Routing that is exactly optimal for each request: the paper's MILP (24), by thresholds on the wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from policies.chains import ChainGraph, Chains, Link, cheapest, route_of
from policies.interfaces import RoutingPolicy
from policies.problem import Placement, Problem, RequestSpec, Route
from policies.state import SystemState
from policies.wsrr import has_room, link_wait_s


class OptimalRr(RoutingPolicy):
    """Chain with the smallest sum of its longest wait and its service time, exactly (Optimized RR)."""

    name = "optimal-rr"
    counts_drafts = True
    takes_cheapest: ClassVar[bool] = True

    def bind(self, problem: Problem, placement: Placement) -> OptimalRrRouter:
        return OptimalRrRouter(problem, placement)


class OptimalRrRouter:
    """Minimises max over links of t^W plus the sum of (t^I + (l-1) t) + (tau^I + (l-1) tau) k.

    A session waits for all of its hops at the same time, so only the longest wait counts. Of equal costs the
    shorter wait wins.
    """

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._chains = Chains(problem, placement)

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Returns the optimal chain; ``Route.cost_s`` is its longest wait plus its service time."""
        graph = self._chains.of(request)
        if graph.idle is None or has_room(graph, state):
            return graph.idle

        def wait_s(link: Link) -> float:
            return link_wait_s(link, state, now_s)

        return least_longest_wait(graph, wait_s)


def least_longest_wait(graph: ChainGraph, wait_s: Callable[[Link], float]) -> Route | None:
    """Returns the chain with the smallest sum of longest wait and service time; ``None`` if all wait for ever.

    ``wait_s`` of a link must be at least 0, and is called at most once per link. ``Route.wait_s`` is the
    longest.

    For thresholds w from 0 on, find the shortest path over links that wait at most w. The result is the same
    for any threshold below the shortest wait that the search refused, so that wait is the next threshold. The
    search ends early because no path can be cheaper than the cheapest idle chain.
    """
    if graph.idle is None:
        return None
    waits_s: dict[int, float] = {}
    best: Route | None = None
    best_s = math.inf
    threshold_s, refused_s = 0.0, math.inf

    def keep(link: Link) -> bool:
        nonlocal refused_s
        link_s = waits_s.get(id(link))
        if link_s is None:
            link_s = waits_s[id(link)] = wait_s(link)
        if link_s > threshold_s:
            refused_s = min(refused_s, link_s)
        return link_s <= threshold_s

    while threshold_s < math.inf and threshold_s + graph.idle.cost_s < best_s:
        service_s, chain = cheapest(graph.into, keep=keep)
        if service_s < math.inf:
            longest_s = max(waits_s[id(link)] for link in chain)
            if longest_s + service_s < best_s:
                best_s = longest_s + service_s
                best = route_of(chain, longest_s, best_s)
        threshold_s, refused_s = refused_s, math.inf
    return best
