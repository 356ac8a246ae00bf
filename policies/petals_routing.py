"""PETALS' client-side routing, as in the reference simulator."""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass
from operator import eq
from typing import NamedTuple

from policies.greedy import whole
from policies.interfaces import RoutingPolicy
from policies.petals_search import Costs, make_search, milliseconds
from policies.problem import Hop, Placement, Problem, RequestSpec, Route
from policies.remember import remember
from policies.state import SystemState
from policies.waiting import fits, waiting_s

_MAX_KINDS = 4096
"""At most this many kinds of request, and chains per kind, are kept."""
_MAX_UNPENALISED = 256
"""At most this many chains per kind of request are kept to bound the cost of others."""


@dataclass
class PetalsRouting(RoutingPolicy):
    """Shortest chain by round-trip times between servers, without waiting (PETALS).

    ``hop_overhead_s`` is added to every hop, ``shortage_penalty_s`` to each hop to a full server.
    """

    hop_overhead_s: float = 0.018
    shortage_penalty_s: float = 10.0
    name: str = "petals"

    def bind(self, problem: Problem, placement: Placement) -> PetalsRouter:
        return PetalsRouter(problem, placement, self)


class _Kind(NamedTuple):
    """Requests of one client and one total length: how many fit on servers, and the chains found so far."""

    sessions: tuple[int, ...]
    """How many such sessions each server's whole cache holds; -1 for servers without blocks."""
    entries: tuple[int, ...]
    """The lowest block of each server's range from which a session's cache for the rest fits the server."""
    block_bytes: float
    chains: dict[bytes, tuple[tuple[Hop, ...], float]]
    """(hops, cost in seconds) by which servers were full: a byte per server, 1 or 0, in list order."""
    unpenalised: list[tuple[float, list[int]]]
    """(cost in milliseconds, servers) of chains found without a full server, cheapest first."""


class PetalsRouter:
    """The router of ``PetalsRouting``, which finds the cheapest chain.

    The first hop costs raw_RTT(c,i)/2 + overhead + tau_i m_i. A hop from i to j costs raw_RTT(i,j)/2 +
    overhead + tau_j k. The penalty is added for a server that is exactly full: the number of its sessions
    equals the number that fit. The way back costs raw_RTT(c,i)/2.

    ``policies.petals_search`` contains the search and the rule for chains of equal cost. There is one search
    for each set of full servers.
    """

    def __init__(self, problem: Problem, placement: Placement, policy: PetalsRouting) -> None:
        self._problem = problem
        self._placement = placement
        self._kinds: dict[tuple[int, int], _Kind] = {}
        costs = Costs(
            milliseconds(policy.hop_overhead_s),
            milliseconds(policy.shortage_penalty_s),
            tuple(milliseconds(server.decode_s) for server in problem.servers),
        )
        self._search = make_search(problem, placement.ranges, costs)

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Returns the cheapest chain. ``wait_s`` is not in its cost: it is the longest wait of its hops."""
        key = (request.client, request.cache_tokens)
        kind = self._kinds.get(key)
        if kind is None:
            kind = remember(self._kinds, key, self._prepare(request), _MAX_KINDS)
        full = bytes(map(eq, state.all_active(), kind.sessions))
        found = kind.chains.get(full)
        if found is None:
            found = self._shortest(request.client, kind, full)
            remember(kind.chains, full, found, _MAX_KINDS)
        hops, cost_s = found
        if not hops:
            return None
        waits_s = [waiting_s(state, hop.server, hop.n_blocks * kind.block_bytes, now_s) for hop in hops]
        return Route(hops, max(waits_s), cost_s)

    def _prepare(self, request: RequestSpec) -> _Kind:
        block_bytes = self._problem.model.cache_bytes(request.cache_tokens)
        sessions, entries = [], []
        for held, cache_bytes in zip(self._placement.ranges, self._placement.cache_bytes, strict=True):
            sessions.append(whole(cache_bytes, held.n_blocks * block_bytes) if held.n_blocks else -1)
            entry = held.first
            while entry < held.last and not fits(cache_bytes, (held.last - entry) * block_bytes):
                entry += 1
            entries.append(entry)
        return _Kind(tuple(sessions), tuple(entries), block_bytes, {}, [])

    def _shortest(self, client: int, kind: _Kind, full: bytes) -> tuple[tuple[Hop, ...], float]:
        """Returns (hops, cost in seconds) of the cheapest chain if these servers are ``full``."""
        known = kind.unpenalised
        at_most_ms = next((ms for ms, servers in known if not any(full[j] for j in servers)), math.inf)
        servers, cost_ms = self._search.shortest(client, kind.entries, full, at_most_ms)
        if cost_ms < at_most_ms and not any(full[j] for j in servers):
            if len(known) >= _MAX_UNPENALISED:
                known.pop()
            insort(known, (cost_ms, servers))
        hops: list[Hop] = []
        for j in servers:
            hops.append(Hop(j, hops[-1].last if hops else 0, self._placement.ranges[j].last))
        return tuple(hops), cost_ms / 1e3
