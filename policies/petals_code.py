"""PETALS' client-side routing as in its code (``petals_routing``: as the reference simulator has it)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from policies.interfaces import RoutingPolicy
from policies.problem import Hop, Placement, PolicyError, Problem, RequestSpec, Route
from policies.remember import remember
from policies.state import SystemState
from policies.waiting import fits, waiting_s

_MAX_KINDS = 4096
"""At most this many kinds of request, and chains per kind, are kept."""


@dataclass
class PetalsCodeRouting(RoutingPolicy):
    """Shortest chain over (server, block) by pings and compute, as PETALS' code finds it.

    Entering a server costs d(rtt) + ``hop_overhead_s``, plus ``shortage_penalty_s`` if the session's
    cache for *all* of the server's blocks does not fit now. Each block costs 1 / inference_rps, which
    is tau_j. Returning to the client costs d(rtt). d = min(rtt / 2, ``max_delay_s``), or
    ``unknown_delay_s`` for a server that the client has not pinged.

    ``client_pings`` is how many middle servers, and how many last ones, a client has pinged. Middle servers
    have a block other than the first and the last one; last servers have the last block. They are drawn once
    per client from ``seed``. PETALS pings 3 and 3. ``None``: the client has pinged all, as after many
    refreshes.

    Not modelled: the smoothing and 60 s refresh of pings, limits on the servers' own pings, the age
    of announced cache (the router sees the present state), bans after failures, and 300
    tokens/s for servers that announce no inference speed (every server here has one). A server whose
    whole cache is too small for a hop is left out; PETALS would try it, fail and ban it.
    """

    hop_overhead_s: float = 0.018
    shortage_penalty_s: float = 10.0
    max_delay_s: float = 5.0
    unknown_delay_s: float = 0.15
    client_pings: int | None = None
    seed: int = 0
    name: str = "petals-code"

    def bind(self, problem: Problem, placement: Placement) -> PetalsCodeRouter:
        """Returns the router. Raises ``PolicyError`` if ``client_pings`` is negative."""
        if self.client_pings is not None and self.client_pings < 0:
            raise PolicyError(
                f"{self.name} cannot ping {self.client_pings} servers; set client_pings >= 0, or None for all"
            )
        return PetalsCodeRouter(problem, placement, self)


class _Link(NamedTuple):
    """A hop to a server from ``before`` (``None``: the client), without the shortage penalty in its cost."""

    before: int | None
    cost_s: float
    hop: Hop


class _Kind(NamedTuple):
    """Requests of one client and one total length: the links that can serve them, and the chains found."""

    block_bytes: float
    links: tuple[tuple[int, tuple[_Link, ...]], ...]
    """(server, links into it), in the order of the ranges' ends."""
    chains: dict[tuple[int, ...], tuple[tuple[Hop, ...], float]]
    """(hops, cost in seconds) by the servers that had too little free cache."""


class PetalsCodeRouter:
    """Dijkstra over (server, block), which here is one pass in the order of the ranges' ends.

    A server may be entered at any block but is left only at its range's end, so only its last state has
    successors. Of equal chains the one with the servers listed first is kept, compared from the chain's end.

    PETALS counts cache in tokens of one block's keys *or* values. A server is sufficient
    if ``max_length * 2 * span_length <= cache_tokens_left``. ``cache_bytes_per_token`` contains keys
    and values, so the same rule in bytes is: s_c * m_j <= free bytes on the server.
    """

    def __init__(self, problem: Problem, placement: Placement, policy: PetalsCodeRouting) -> None:
        self._problem = problem
        self._placement = placement
        self._policy = policy
        ranges = placement.ranges
        self._holders = [j for j, held in enumerate(ranges) if held.n_blocks]
        self._entries = {j: self._from_servers(j) for j in self._holders}
        self._client_delays_s = [self._delays_s(client) for client in range(len(problem.clients))]
        self._kinds: dict[tuple[int, int], _Kind] = {}

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Returns the cheapest chain. ``wait_s`` is not in its cost: it is the longest wait of its hops."""
        key = (request.client, request.cache_tokens)
        kind = self._kinds.get(key)
        if kind is None:
            kind = remember(self._kinds, key, self._prepare(request), _MAX_KINDS)
        ranges, block_bytes, free_bytes = self._placement.ranges, kind.block_bytes, state.free_bytes
        short = tuple(j for j in self._holders if not fits(free_bytes(j), ranges[j].n_blocks * block_bytes))
        found = kind.chains.get(short)
        if found is None:
            found = self._shortest(request.client, kind, short)
            remember(kind.chains, short, found, _MAX_KINDS)
        hops, cost_s = found
        if not hops:
            return None
        waits_s = [waiting_s(state, hop.server, hop.n_blocks * block_bytes, now_s) for hop in hops]
        return Route(hops, max(waits_s), cost_s)

    def _delay_s(self, rtt_s: float) -> float:
        return min(rtt_s / 2, self._policy.max_delay_s)

    def _from_servers(self, j: int) -> tuple[_Link, ...]:
        """Returns the links to ``j`` from every server that ends within the range of ``j``, in list order."""
        ranges, decode_s = self._placement.ranges, self._problem.servers[j].decode_s
        links = []
        for i in self._holders:
            if ranges[j].first <= ranges[i].last < ranges[j].last:
                hop = Hop(j, ranges[i].last, ranges[j].last)
                enter_s = self._delay_s(self._problem.server_rtt_s[i][j]) + self._policy.hop_overhead_s
                links.append(_Link(i, enter_s + decode_s * hop.n_blocks, hop))
        return tuple(links)

    def _delays_s(self, client: int) -> list[float]:
        """Returns d from ``client`` to every server; servers that it has not pinged have the unknown delay."""
        rtt_s, n_pings = self._problem.raw_rtt_s[client], self._policy.client_pings
        delays_s = [self._delay_s(rtt) for rtt in rtt_s]
        if n_pings is None:
            return delays_s
        last_block = self._problem.model.n_blocks - 1
        ranges = self._placement.ranges
        middle = [j for j in self._holders if max(ranges[j].first, 1) < min(ranges[j].last, last_block)]
        last = [j for j in self._holders if ranges[j].last > last_block]
        draw = Random(f"petals-code pings {self._policy.seed} {client}")
        pinged = {j for group in (middle, last) for j in draw.sample(group, min(n_pings, len(group)))}
        return [
            delay_s if j in pinged else self._policy.unknown_delay_s for j, delay_s in enumerate(delays_s)
        ]

    def _prepare(self, request: RequestSpec) -> _Kind:
        ranges, delays_s = self._placement.ranges, self._client_delays_s[request.client]
        block_bytes = self._problem.model.cache_bytes(request.cache_tokens)
        links = []
        for j in sorted(self._holders, key=lambda j: ranges[j].last):
            first, last = ranges[j]
            into = self._entries[j]
            if first == 0:
                enter_s = delays_s[j] + self._policy.hop_overhead_s
                compute_s = self._problem.servers[j].decode_s * last
                into = (_Link(None, enter_s + compute_s, Hop(j, 0, last)), *into)
            room_bytes = self._placement.cache_bytes[j]
            links.append((j, tuple(k for k in into if fits(room_bytes, k.hop.n_blocks * block_bytes))))
        return _Kind(block_bytes, tuple(links), {})

    def _shortest(self, client: int, kind: _Kind, short: tuple[int, ...]) -> tuple[tuple[Hop, ...], float]:
        """Returns (hops, cost) of the cheapest chain if servers ``short`` lack cache; no hops without one."""
        lacking = set(short)
        dist_s: dict[int | None, float] = {None: 0.0}
        entered: dict[int, _Link] = {}
        for j, links in kind.links:
            best_s = math.inf
            for link in links:
                total_s = dist_s.get(link.before, math.inf) + link.cost_s
                if total_s < best_s:
                    best_s, entered[j] = total_s, link
            if best_s < math.inf:
                dist_s[j] = best_s + (self._policy.shortage_penalty_s if j in lacking else 0.0)
        delays_s, n_blocks = self._client_delays_s[client], self._problem.model.n_blocks
        ends = [(dist_s[j] + delays_s[j], j) for j, link in entered.items() if link.hop.last == n_blocks]
        if not ends:
            return (), math.inf
        cost_s, at = min(ends)
        hops: list[Hop] = []
        before: int | None = at
        while before is not None:
            link = entered[before]
            hops.append(link.hop)
            before = link.before
        return tuple(reversed(hops)), cost_s
