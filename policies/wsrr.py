"""WS-RR: waiting-penalised shortest-path request routing, on the graph of block positions."""

from __future__ import annotations

import math
from typing import NamedTuple

from policies.positions import PositionGraph
from policies.problem import Hop, Placement, Problem, RequestSpec, Route
from policies.state import SystemState
from policies.waiting import fits, waiting_s

_MAX_KINDS = 4096
"""Kinds of request whose link costs are kept."""


class _Link(NamedTuple):
    """A server entered at position number ``tail``: what that costs and needs for one kind of request."""

    tail: int
    hop: Hop
    service_s: float
    need_bytes: float


class _Kind(NamedTuple):
    """One kind of request (client and lengths): links by the position where they end, and the idle optimum."""

    links: tuple[tuple[_Link, ...], ...]
    idle: Route | None
    idle_links: tuple[_Link, ...]


class WsRr:
    """Cheapest chain for this request, waiting for cache included (WS-RR)."""

    name = "ws-rr"

    def bind(self, problem: Problem, placement: Placement) -> WsRrRouter:
        return WsRrRouter(problem, placement)


class WsRrRouter:
    """Routes on block positions 0..L: server j leads from every position in its range to its end.

    Link cost t^W + (t^I_cj + (l-1) t_cj) + (tau^I_j + (l-1) tau_j) k; the sum over the chain is
    minimised. Equal costs: the server listed first. At most sum m_j links are looked at.
    """

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._problem = problem
        self._cache_bytes = placement.cache_bytes
        self._graph = PositionGraph(placement.ranges, problem.model.n_blocks)
        self._kinds: dict[RequestSpec, _Kind] = {}

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """The cheapest chain; ``Route.cost_s`` contains the sum of its waits, ``wait_s`` their maximum."""
        kind = self._kinds.get(request)
        if kind is None:
            kind = self._prepare(request)
        # Waits only add: if the idle optimum needs none, it is the optimum.
        free_bytes = state.free_bytes
        for link in kind.idle_links:
            if not fits(free_bytes(link.hop.server), link.need_bytes):
                break
        else:
            return kind.idle
        cost_s, chain, waits_s = self._shortest(kind.links, state, now_s)
        if cost_s == math.inf:
            return None
        return Route(tuple(link.hop for link in chain), max(waits_s), cost_s)

    def _prepare(self, request: RequestSpec) -> _Kind:
        """Link costs of one kind of request. Servers that could never hold it are left out."""
        problem, client = self._problem, request.client
        n_in, n_decoded = request.n_input_tokens, request.n_output_tokens - 1
        block_bytes = problem.model.cache_bytes(request.n_tokens)
        groups = []
        for entries in self._graph.into:
            links = []
            for tail, hop in entries:
                server = problem.servers[hop.server]
                need_bytes = hop.n_blocks * block_bytes
                if not fits(self._cache_bytes[hop.server], need_bytes):
                    continue
                network_s = problem.input_rtt_s(client, hop.server, n_in)
                network_s += n_decoded * problem.token_rtt_s[client][hop.server]
                compute_s = server.prefill_s(n_in) + n_decoded * server.decode_s
                links.append(_Link(tail, hop, network_s + compute_s * hop.n_blocks, need_bytes))
            groups.append(tuple(links))
        links_by_end = tuple(groups)
        cost_s, chain, _ = self._shortest(links_by_end, None, 0.0)
        idle = None if cost_s == math.inf else Route(tuple(link.hop for link in chain), 0.0, cost_s)
        kind = _Kind(links_by_end, idle, tuple(chain))
        if len(self._kinds) >= _MAX_KINDS:
            self._kinds.clear()
        self._kinds[request] = kind
        return kind

    @staticmethod
    def _shortest(
        links_by_end: tuple[tuple[_Link, ...], ...], state: SystemState | None, now_s: float
    ) -> tuple[float, list[_Link], list[float]]:
        """(cost, links, waits) of the cheapest chain from position 0 to the last; no state: nobody waits."""
        n = len(links_by_end)
        dist_s = [math.inf] * n
        dist_s[0] = 0.0
        entered: list[tuple[_Link, float] | None] = [None] * n
        for end in range(1, n):
            best_s = math.inf
            for link in links_by_end[end]:
                total_s = dist_s[link.tail] + link.service_s
                if total_s >= best_s:
                    continue
                waited_s = 0.0
                if state is not None:
                    waited_s = waiting_s(state, link.hop.server, link.need_bytes, now_s)
                    total_s += waited_s
                    if total_s >= best_s:
                        continue
                best_s = total_s
                entered[end] = (link, waited_s)
            dist_s[end] = best_s
        chain: list[_Link] = []
        waits_s: list[float] = []
        at = n - 1
        while at and dist_s[at] < math.inf:
            step = entered[at]
            assert step is not None, "a position at finite distance was entered"
            chain.append(step[0])
            waits_s.append(step[1])
            at = step[0].tail
        return dist_s[-1], chain[::-1], waits_s[::-1]
