"""Foresight's routing: the chain that finishes this request first, the steps of the backoff included."""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.chains import ChainGraph, Chains, Link, cheapest, route_of
from policies.problem import Placement, Problem, RequestSpec, Route
from policies.replay import backoff_s
from policies.state import SystemState
from policies.workload import Backoff
from policies.wsrr import has_room, link_wait_s


@dataclass
class ForesightRouting:
    """The chain that finishes this request first, steps of the retry backoff included (own).

    ``backoff`` is what clients wait between attempts to open a session.
    """

    backoff: Backoff = Backoff()  # noqa: RUF009 - frozen
    name: str = "foresight"

    def bind(self, problem: Problem, placement: Placement) -> ForesightRouter:
        return ForesightRouter(problem, placement, self.backoff)


class ForesightRouter:
    """Exact over waits: minimises ``B(max_j t^W_j) + sum_j (service of hop j)`` over all chains.

    B(w) is the first attempt of the backoff series at or after w: what a wait of w really costs. For
    each distinct value v of B over the links, ascending, links with B(t^W) > v are dropped, the
    cheapest chain is taken and the best sum kept; the search ends when v plus the idle optimum cannot
    beat it. So no chain gives this request a smaller time in this state. Equal costs: the shorter
    wait, then the server listed first.
    """

    def __init__(self, problem: Problem, placement: Placement, backoff: Backoff) -> None:
        self._chains = Chains(problem, placement)
        self._backoff = backoff

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """The chain that ends first; ``cost_s`` has the backoff's steps in it, ``wait_s`` is its raw wait."""
        graph = self._chains.of(request)
        if graph.idle is None or has_room(graph, state):  # nothing beats the idle optimum without a wait
            return graph.idle
        waits_s, steps_s = self._waits(graph, state, now_s)
        best: Route | None = None
        best_s = math.inf
        for most_s in sorted({0.0, *steps_s.values()}):
            if most_s + graph.idle.cost_s >= best_s or most_s == math.inf:
                break

            def keep(link: Link, most_s: float = most_s) -> bool:
                return steps_s.get(id(link), 0.0) <= most_s

            service_s, chain = cheapest(graph.into, keep=keep)
            if most_s + service_s < best_s:
                best_s = most_s + service_s
                best = route_of(chain, max(waits_s.get(id(link), 0.0) for link in chain), best_s)
        return best

    def _waits(
        self, graph: ChainGraph, state: SystemState, now_s: float
    ) -> tuple[dict[int, float], dict[int, float]]:
        """(raw wait, wait with the backoff's steps) of the links that wait, by ``id`` of the link."""
        waits_s: dict[int, float] = {}
        steps_s: dict[int, float] = {}
        for groups in graph.into:
            for group in groups:
                for link in group:
                    wait_s = link_wait_s(link, state, now_s)
                    if wait_s:
                        waits_s[id(link)] = wait_s
                        steps_s[id(link)] = backoff_s(wait_s, self._backoff) if wait_s < math.inf else wait_s
        return waits_s, steps_s
