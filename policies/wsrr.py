"""WS-RR: waiting-penalised shortest-path request routing."""

from __future__ import annotations

import math
from typing import ClassVar

from policies.chains import ChainGraph, Chains, Link, cheapest, route_of
from policies.interfaces import RoutingPolicy
from policies.problem import Placement, Problem, RequestSpec, Route
from policies.state import SystemState
from policies.waiting import fits, waiting_s


class WsRr(RoutingPolicy):
    """Cheapest chain for this request, waiting for cache included (WS-RR)."""

    name = "ws-rr"
    counts_drafts = True
    takes_cheapest: ClassVar[bool] = True

    def bind(self, problem: Problem, placement: Placement) -> WsRrRouter:
        return WsRrRouter(problem, placement)


class WsRrRouter:
    """Shortest path with link cost t^W + (t^I_cj + (l-1) t_cj) + (tau^I_j + (l-1) tau_j) k.

    It minimises the sum over the chain, waits included. Of equal costs the server listed first wins.
    """

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._chains = Chains(problem, placement)

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Returns the cheapest chain; ``Route.cost_s`` contains the sum of waits, ``wait_s`` their maximum."""
        graph = self._chains.of(request)
        if has_room(graph, state):  # waits only add to costs: an idle optimum without waits is the optimum
            return graph.idle

        def wait_s(link: Link) -> float:
            return link_wait_s(link, state, now_s)

        cost_s, chain = cheapest(graph.into, wait_s)
        if cost_s == math.inf:
            return None
        return route_of(chain, max(map(wait_s, chain)), cost_s)


class ShortestPath(RoutingPolicy):
    """Cheapest chain as if every server were idle; requests then wait for full servers (offline CG-BPRR)."""

    name = "shortest-path"
    counts_drafts = True
    takes_cheapest: ClassVar[bool] = True

    def bind(self, problem: Problem, placement: Placement) -> ShortestPathRouter:
        return ShortestPathRouter(problem, placement)


class ShortestPathRouter:
    """WS-RR's link costs without t^W."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._chains = Chains(problem, placement)

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Returns the cheapest idle chain, always the same per kind of request; ``wait_s`` is its wait now."""
        graph = self._chains.of(request)
        if graph.idle is None or has_room(graph, state):
            return graph.idle
        wait_s = max(link_wait_s(link, state, now_s) for link in graph.idle_links)
        return graph.idle._replace(wait_s=wait_s)


def has_room(graph: ChainGraph, state: SystemState) -> bool:
    """Whether the cheapest idle chain exists and all of its servers have room for the request's cache now."""
    if graph.idle is None:
        return False
    free_bytes = state.free_bytes
    for link in graph.idle_links:
        if link.hop is not None and not fits(free_bytes(link.hop.server), link.need_bytes):
            return False
    return True


def link_wait_s(link: Link, state: SystemState, now_s: float) -> float:
    """Returns t^W of a link in seconds."""
    return 0.0 if link.hop is None else waiting_s(state, link.hop.server, link.need_bytes, now_s)
