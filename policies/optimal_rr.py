"""Exact individually optimal routing: the paper's MILP (24), solved by thresholds on the waiting time."""

from __future__ import annotations

import math

from policies.chains import Chains, Link, cheapest, route_of
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

    A session waits for all of its hops at once, so that the longest wait counts. For each distinct
    wait w in ascending order: the shortest path over links that wait at most w. No path can be cheaper
    than the idle optimum, which ends the search early. Equal costs: the smaller threshold.
    """

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._chains = Chains(problem, placement)

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """The optimal chain; ``Route.cost_s`` is its longest wait plus its service time."""
        graph = self._chains.of(request)
        if graph.idle is None or has_room(graph, state):
            return graph.idle
        waits_s: dict[Link, float] = {}
        for groups in graph.into:
            for group in groups:
                for link in group:
                    waits_s[link] = link_wait_s(link, state, now_s)
        best: Route | None = None
        best_s = math.inf
        for threshold_s in sorted(set(waits_s.values())):
            if threshold_s + graph.idle.cost_s >= best_s or threshold_s == math.inf:
                break

            def keep(link: Link, most_s: float = threshold_s) -> bool:
                return waits_s[link] <= most_s

            service_s, chain = cheapest(graph.into, keep=keep)
            if service_s == math.inf:
                continue
            wait_s = max(waits_s[link] for link in chain)
            if wait_s + service_s < best_s:
                best_s = wait_s + service_s
                best = route_of(chain, wait_s, best_s)
        return best
