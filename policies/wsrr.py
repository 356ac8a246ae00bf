"""WS-RR: waiting-penalised shortest-path request routing."""

from __future__ import annotations

import math

from policies.chains import ChainGraph, Chains, Link, cheapest, route_of
from policies.problem import Placement, Problem, RequestSpec, Route
from policies.state import SystemState
from policies.waiting import fits, waiting_s


class WsRr:
    """Cheapest chain for this request, waiting for cache included (WS-RR)."""

    name = "ws-rr"

    def bind(self, problem: Problem, placement: Placement) -> WsRrRouter:
        return WsRrRouter(problem, placement)


class WsRrRouter:
    """Shortest path with link cost t^W + (t^I_cj + (l-1) t_cj) + (tau^I_j + (l-1) tau_j) k.

    The sum over the chain is minimised, waits included. Equal costs: the server listed first.
    """

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._chains = Chains(problem, placement)

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """The cheapest chain; ``Route.cost_s`` contains the sum of its waits, ``wait_s`` their maximum."""
        graph = self._chains.of(request)
        if has_room(graph, state):  # waits only add: if the idle optimum needs none, it is the optimum
            return graph.idle

        def wait_s(link: Link) -> float:
            return link_wait_s(link, state, now_s)

        cost_s, chain = cheapest(graph.into, wait_s)
        if cost_s == math.inf:
            return None
        return route_of(chain, max(map(wait_s, chain)), cost_s)


class ShortestPath:
    """Cheapest chain as if every server were idle; whoever is full then makes it wait (offline CG-BPRR)."""

    name = "shortest-path"

    def bind(self, problem: Problem, placement: Placement) -> ShortestPathRouter:
        return ShortestPathRouter(problem, placement)


class ShortestPathRouter:
    """WS-RR's link costs without t^W."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._chains = Chains(problem, placement)

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """The same chain for the same kind of request; ``wait_s`` is what it has to wait now."""
        graph = self._chains.of(request)
        if graph.idle is None or has_room(graph, state):
            return graph.idle
        wait_s = max(link_wait_s(link, state, now_s) for link in graph.idle_links)
        return graph.idle._replace(wait_s=wait_s)


def has_room(graph: ChainGraph, state: SystemState) -> bool:
    """Whether the idle optimum exists and has cache now on all of its servers."""
    if graph.idle is None:
        return False
    free_bytes = state.free_bytes
    for link in graph.idle_links:
        if link.hop is not None and not fits(free_bytes(link.hop.server), link.need_bytes):
            return False
    return True


def link_wait_s(link: Link, state: SystemState, now_s: float) -> float:
    """t^W of a link."""
    return 0.0 if link.hop is None else waiting_s(state, link.hop.server, link.need_bytes, now_s)
