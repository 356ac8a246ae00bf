"""Chains as paths in a graph: its edges for one kind of request, and the cheapest path.

With hub-spoke the nodes are block positions, because a hop costs the same whatever the previous server:
server j leads from every position in its range to the range's end, at most sum m_j edges in total. With
server-to-server forwarding a hop's delay depends on the previous server, so the nodes are servers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from policies.positions import PositionGraph
from policies.problem import Hop, Placement, Problem, RequestSpec, Route, hop_times_s, returns_s
from policies.remember import remember
from policies.waiting import fits

_MAX_KINDS = 4096
"""Graphs of at most this many kinds of request are kept."""


class Link(NamedTuple):
    """An edge of the graph: a server entered from node ``tail``.

    ``service_s`` is its cost over the whole request in seconds, ``need_bytes`` the cache that it needs.
    ``hop`` is ``None`` for the way back to the client. ``previous`` is the server that sends it the hidden states where
    servers forward; ``None``: the client.
    """

    tail: int
    hop: Hop | None
    service_s: float
    need_bytes: float
    previous: int | None = None


Groups = tuple[tuple[Link, ...], ...]
"""Groups of links with the same two nodes; in each group the cheapest link is first."""


class ChainGraph(NamedTuple):
    """The links for one kind of request. ``into[v]`` are the groups that end at node v, tails ascending.

    Node 0 is the start and the last node the end; links lead to higher nodes. Links to servers whose
    whole cache is too small for the request are left out. ``idle`` is the cheapest chain if all servers are
    idle (``None``: there is no chain), and ``idle_links`` are its links.
    """

    into: tuple[Groups, ...]
    idle: Route | None
    idle_links: tuple[Link, ...]


class Chains:
    """Builds the ``ChainGraph`` of every kind of request for one placement, and keeps it."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._problem = problem
        self._placement = placement
        self._positions = PositionGraph(placement.ranges, problem.model.n_blocks)
        self._kinds: dict[RequestSpec, ChainGraph] = {}

    def of(self, request: RequestSpec) -> ChainGraph:
        graph = self._kinds.get(request)
        if graph is None:
            graph = remember(self._kinds, request, self._build(request), _MAX_KINDS)
        return graph

    def _build(self, request: RequestSpec) -> ChainGraph:
        links = self._by_server(request) if self._problem.forwarding else self._by_position(request)
        into = tuple(_grouped(ending) for ending in links)
        cost_s, chain = cheapest(into)
        route = None if cost_s == math.inf else route_of(chain, 0.0, cost_s)
        return ChainGraph(into, route, tuple(chain))

    def _by_position(self, request: RequestSpec) -> list[list[Link]]:
        links: list[list[Link]] = []
        for entries in self._positions.into:
            links.append([])
            for tail, hop in entries:
                link = self._link(request, tail, hop, None)
                if link:
                    links[-1].append(link)
        return links

    def _by_server(self, request: RequestSpec) -> list[list[Link]]:
        """Returns the links with servers as nodes: node 1 + i is the i-th server in the order of range ends.

        Chains pass servers in this order.
        """
        ranges, n_blocks = self._placement.ranges, self._problem.model.n_blocks
        by_end = sorted((j for j, held in enumerate(ranges) if held.n_blocks), key=lambda j: ranges[j].last)
        links: list[list[Link]] = [[]]
        for j in by_end:
            first, last = ranges[j]
            links.append([])
            tails: list[tuple[int, int, int | None]] = [(0, 0, None)] if first == 0 else []
            for node, i in enumerate(by_end, 1):
                if ranges[i].last >= last:
                    break
                if ranges[i].last >= first:
                    tails.append((node, ranges[i].last, i))
            for tail, position, previous in tails:
                link = self._link(request, tail, Hop(j, position, last), previous)
                if link:
                    links[-1].append(link)
        links.append(
            [
                Link(node, None, returns_s(self._problem, request, j), 0.0, j)
                for node, j in enumerate(by_end, 1)
                if ranges[j].last == n_blocks
            ]
        )
        return links

    def _link(self, request: RequestSpec, tail: int, hop: Hop, previous: int | None) -> Link | None:
        problem = self._problem
        need_bytes = hop.n_blocks * problem.model.cache_bytes(request.cache_tokens)
        if not fits(self._placement.cache_bytes[hop.server], need_bytes):
            return None
        server, n_decoded = problem.servers[hop.server], request.n_output_tokens - 1
        input_s, token_s = hop_times_s(problem, request, previous, hop.server)
        n_input = request.n_input_tokens
        compute_s = server.prefill_of_s(n_input, hop.blocks)
        compute_s += n_decoded * server.mean_decode_of_s(n_input, n_decoded, hop.blocks)
        service_s = input_s + n_decoded * token_s + compute_s
        return Link(tail, hop, service_s, need_bytes, previous)


def _grouped(links: list[Link]) -> Groups:
    by_tail: dict[int, list[Link]] = {}
    for link in links:
        by_tail.setdefault(link.tail, []).append(link)
    return tuple(
        tuple(sorted(group, key=lambda link: link.service_s)) for _, group in sorted(by_tail.items())
    )


def cheapest(
    into: tuple[Groups, ...],
    wait_s: Callable[[Link], float] | None = None,
    keep: Callable[[Link], bool] | None = None,
) -> tuple[float, list[Link]]:
    """Returns (cost in seconds, links) of the cheapest path from node 0 to the last node.

    The cost is infinite, and there are no links, if there is no path. ``wait_s`` of a link is added to its
    cost; links for which ``keep`` is False are left out. Of paths with equal cost, the one whose last server
    is listed first is kept.
    """
    dist_s = [math.inf] * len(into)
    dist_s[0] = 0.0
    entered: list[Link | None] = [None] * len(into)
    for node in range(1, len(into)):
        best_s, best = math.inf, None
        for group in into[node]:
            start_s = dist_s[group[0].tail]
            for link in group:
                total_s = start_s + link.service_s
                if total_s > best_s or total_s == math.inf:
                    break  # the rest of the group is not cheaper
                if keep is not None and not keep(link):
                    continue
                if wait_s is not None:
                    total_s += wait_s(link)
                if total_s < best_s or (total_s == best_s and best and _server(link) < _server(best)):
                    best_s, best = total_s, link
        dist_s[node] = best_s
        entered[node] = best
    chain: list[Link] = []
    step = entered[-1]
    while step is not None:
        chain.append(step)
        step = entered[step.tail]
    return dist_s[-1], chain[::-1]


def _server(link: Link) -> int:
    return -1 if link.hop is None else link.hop.server


def route_of(chain: list[Link], wait_s: float, cost_s: float) -> Route:
    """Returns the route along the links of ``chain``."""
    return Route(tuple(link.hop for link in chain if link.hop is not None), wait_s, cost_s)
