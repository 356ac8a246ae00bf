"""Exact individually optimal routing: the paper's MILP (24), solved by thresholds on the waiting time."""

from __future__ import annotations

import math
from collections.abc import Callable

from policies.chains import ChainGraph, Chains, Link, cheapest, route_of
from policies.problem import Placement, Problem, RequestSpec, Route
from policies.state import SystemState
from policies.wsrr import has_room, link_wait_s


class OptimalRr:
    """Chain with the least longest wait plus service time, exactly (the paper's Optimized RR)."""

    name = "optimal-rr"

    def bind(self, problem: Problem, placement: Placement) -> OptimalRrRouter:
        return OptimalRrRouter(problem, placement)


class OptimalRrRouter:
    """Minimises max over links of t^W plus the sum of (t^I + (l-1) t) + (tau^I + (l-1) tau) k.

    A session waits for all of its hops at once, so that the longest wait counts. Equal costs: the
    shorter wait.
    """

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._chains = Chains(problem, placement)

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """The optimal chain; ``Route.cost_s`` is its longest wait plus its service time."""
        graph = self._chains.of(request)
        if graph.idle is None or has_room(graph, state):
            return graph.idle

        def wait_s(link: Link) -> float:
            return link_wait_s(link, state, now_s)

        return least_longest_wait(graph, wait_s)


def least_longest_wait(graph: ChainGraph, wait_s: Callable[[Link], float]) -> Route | None:
    """The chain with the least longest wait plus service time; ``None`` if every chain waits for ever.

    ``wait_s`` of a link is at least 0 and asked at most once. ``Route.wait_s`` is the chain's longest.

    For thresholds w from 0: the shortest path over links that wait at most w. A search that refused
    no link with a wait up to w' answers the same for w', so the next threshold is the least wait that
    it refused. No path can be cheaper than the idle optimum, which ends the search early.
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
