"""Chains as paths in a graph: its edges for one kind of request, and the cheapest path.

With hub-spoke the nodes are block positions, because a hop costs the same whatever the previous server:
server j leads from every position in its range to the range's end, at most sum m_j edges in total. With
server-to-server forwarding a hop's delay depends on the previous server, so the nodes are servers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from policies.positions import PositionGraph
from policies.problem import Hop, Placement, Problem, RequestSpec, Route, hop_input_s, hop_token_s, returns_s
from policies.remember import remember
from policies.waiting import fits

_SERVICE_S = attrgetter("service_s")
_MAX_KINDS = 4096
"""Graphs of at most this many kinds of request are kept."""


_Ends = tuple[int | None, int | None]
"""The server that sends the hidden states, where servers forward, and the one that receives them; ``None``: the client."""


@dataclass(slots=True, eq=False)
class Link:
    """An edge of the graph: a server entered from node ``tail``.

    ``service_s`` is its cost over the whole request in seconds, ``need_bytes`` the cache that it needs.
    ``hop`` is ``None`` for the way back to the client.
    """

    tail: int
    hop: Hop | None
    service_s: float
    need_bytes: float
    ends: _Ends
    server: int
    """That of the hop; -1 for the way back."""


_Entry = tuple[int, Hop | None, int | None]
"""An edge without what depends on the request: its tail, its hop, and the server that sends."""


class Edge(NamedTuple):
    """An entry with what is the same for all requests.

    ``group`` counts the tails of its node. Edges with the same ``computed`` compute as long: servers with the same times need as
    long for as many blocks, or for the same ones where these differ.
    """

    group: int
    tail: int
    hop: Hop | None
    ends: _Ends
    computed: tuple[int, ...]
    n_blocks: int
    cache_bytes: float


Groups = tuple[tuple[Link, ...], ...]
"""Groups of links with the same two nodes; in each group the cheapest link is first."""


class ChainGraph(NamedTuple):
    """The links for one kind of request. ``into[v]`` are the groups that end at node v, tails ascending.

    Node 0 is the start and the last node the end; links lead to higher nodes. Links to servers whose
    whole cache is too small for the request are left out. ``idle`` is the cheapest chain if all servers are
    idle (``None``: there is no chain), and ``idle_links`` are its links. ``of_servers`` has for each server
    the largest ``need_bytes`` of its links, and these.
    """

    into: tuple[Groups, ...]
    idle: Route | None
    idle_links: tuple[Link, ...]
    of_servers: tuple[tuple[int, float, tuple[Link, ...]], ...]


class ByEnds(dict[_Ends, float]):
    """Seconds of hops by their ends, computed when they are first asked for."""

    def __init__(self, of: Callable[[int | None, int], float]) -> None:
        self._of = of

    def __missing__(self, ends: _Ends) -> float:
        previous, server = ends
        assert server is not None, "a hop leads to a server"
        found_s = self[ends] = self._of(previous, server)
        return found_s


class HopTimes:
    """What hops take whatever the placement (``hop_times_s``)."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.tokens_s = [
            ByEnds(partial(hop_token_s, problem, client)) for client in range(len(problem.clients))
        ]
        """Per further token, by client."""
        self._prompts_s: dict[tuple[int, int], ByEnds] = {}

    def prompts_s(self, request: RequestSpec) -> ByEnds:
        """Returns those for the prompts of such requests."""
        key = request.client, request.n_input_tokens
        if (found := self._prompts_s.get(key)) is None:
            found = ByEnds(partial(hop_input_s, self._problem, request))
            remember(self._prompts_s, key, found, _MAX_KINDS)
        return found


class Chains:
    """Builds the ``ChainGraph`` of every kind of request for one placement, and keeps it.

    ``times`` are those of ``problem``, which several placements share.
    """

    def __init__(self, problem: Problem, placement: Placement, times: HopTimes | None = None) -> None:
        self._problem = problem
        self._placement = placement
        self._kinds: dict[RequestSpec, ChainGraph] = {}
        entries = self._by_server() if problem.forwarding else self._by_position()
        self.nodes = [self._edges(of_node) for of_node in entries]
        """By node: how many tails its edges have, and these."""
        self._times = times or HopTimes(problem)

    def of(self, request: RequestSpec) -> ChainGraph:
        graph = self._kinds.get(request)
        if graph is None:
            graph = remember(self._kinds, request, self._build(request), _MAX_KINDS)
        return graph

    def _edges(self, entries: list[_Entry]) -> tuple[int, list[Edge]]:
        problem, cache_bytes = self._problem, self._placement.cache_bytes
        group_of = {tail: i for i, tail in enumerate(sorted({tail for tail, _, _ in entries}))}
        edges = []
        for tail, hop, previous in entries:
            if hop is None:
                edges.append(Edge(group_of[tail], tail, None, (previous, None), (), 0, math.inf))
                continue
            alike = problem.alike[hop.server]
            computed = (alike, *hop[1:]) if problem.servers[alike].others else (alike, hop.n_blocks)
            ends, room = (previous, hop.server), cache_bytes[hop.server]
            edges.append(Edge(group_of[tail], tail, hop, ends, computed, hop.n_blocks, room))
        return len(group_of), edges

    def _build(self, request: RequestSpec) -> ChainGraph:
        token_bytes = self._problem.model.cache_bytes(request.cache_tokens)
        computed_s: dict[tuple[int, ...], float] = {}
        tokens_s, prompts_s = self._times.tokens_s[request.client], self._times.prompts_s(request)
        by_server: dict[int, list[Link]] = {}
        into: list[Groups] = []
        for n_groups, edges in self.nodes:
            groups: list[list[Link]] = [[] for _ in range(n_groups)]
            for group, tail, hop, ends, computed, n_blocks, room in edges:
                if hop is None:
                    assert ends[0] is not None, "the last server sends the result"
                    way_s = returns_s(self._problem, request, ends[0])
                    groups[group].append(Link(tail, None, way_s, 0.0, ends, -1))
                elif fits(room, need_bytes := n_blocks * token_bytes):
                    if (compute_s := computed_s.get(computed)) is None:
                        computed_s[computed] = compute_s = self._compute_s(request, hop)
                    service_s = prompts_s[ends] + (request.n_output_tokens - 1) * tokens_s[ends] + compute_s
                    link = Link(tail, hop, service_s, need_bytes, ends, hop.server)
                    groups[group].append(link)
                    by_server.setdefault(hop.server, []).append(link)
            into.append(tuple(_ordered(links) for links in groups if links))
        cost_s, chain = cheapest(tuple(into))
        route = None if cost_s == math.inf else route_of(chain, 0.0, cost_s)
        of_servers = (
            (server, max([link.need_bytes for link in links]), tuple(links))
            for server, links in by_server.items()
        )
        return ChainGraph(tuple(into), route, tuple(chain), tuple(of_servers))

    def _compute_s(self, request: RequestSpec, hop: Hop) -> float:
        """Returns the seconds that a server computes for a request alone."""
        server, n_input, n_decoded = (
            self._problem.servers[hop.server],
            request.n_input_tokens,
            request.n_output_tokens - 1,
        )
        prefill_s = server.prefill_of_s(n_input, hop.blocks)
        return prefill_s + n_decoded * server.mean_decode_of_s(n_input, n_decoded, hop.blocks)

    def _by_position(self) -> list[list[_Entry]]:
        graph = PositionGraph(self._placement.ranges, self._problem.model.n_blocks)
        return [[(tail, hop, None) for tail, hop in entries] for entries in graph.into]

    def _by_server(self) -> list[list[_Entry]]:
        """Returns the edges with servers as nodes: node 1 + i is the i-th server in the order of range ends.

        Chains pass servers in this order.
        """
        ranges, n_blocks = self._placement.ranges, self._problem.model.n_blocks
        by_end = sorted((j for j, held in enumerate(ranges) if held.n_blocks), key=lambda j: ranges[j].last)
        found: list[list[_Entry]] = [[]]
        for j in by_end:
            first, last = ranges[j]
            entries: list[_Entry] = [(0, Hop(j, 0, last), None)] if first == 0 else []
            for node, i in enumerate(by_end, 1):
                if ranges[i].last >= last:
                    break
                if ranges[i].last >= first:
                    entries.append((node, Hop(j, ranges[i].last, last), i))
            found.append(entries)
        found.append([(node, None, j) for node, j in enumerate(by_end, 1) if ranges[j].last == n_blocks])
        return found


def _ordered(links: list[Link]) -> tuple[Link, ...]:
    return tuple(links if len(links) == 1 else sorted(links, key=_SERVICE_S))


def cheapest(
    into: tuple[Groups, ...],
    wait_s: Callable[[Link], float] | None = None,
    keep: Callable[[Link], bool] | None = None,
    added_s: Sequence[float] | None = None,
    without: Collection[int] = (),
) -> tuple[float, list[Link]]:
    """Returns (cost in seconds, links) of the cheapest path from node 0 to the last node.

    The cost is infinite, and there are no links, if there is no path. What is added to a link's cost, none of it negative:
    ``wait_s`` of it, and that of its server in ``added_s``, the last of which is for the way back. Links for which ``keep`` is
    False, or whose ``id`` is in ``without``, are left out. Of paths with equal cost, the one whose last server is listed first is kept.
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
                if (without and id(link) in without) or (keep is not None and not keep(link)):
                    continue
                if added_s is not None:
                    total_s += added_s[link.server]
                if wait_s is not None:
                    total_s += wait_s(link)
                if total_s < best_s or (total_s == best_s and best and link.server < best.server):
                    best_s, best = total_s, link
        dist_s[node] = best_s
        entered[node] = best
    chain: list[Link] = []
    step = entered[-1]
    while step is not None:
        chain.append(step)
        step = entered[step.tail]
    return dist_s[-1], chain[::-1]


def route_of(chain: list[Link], wait_s: float, cost_s: float) -> Route:
    """Returns the route along the links of ``chain``."""
    return Route(tuple(link.hop for link in chain if link.hop is not None), wait_s, cost_s)
