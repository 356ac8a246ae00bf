"""PETALS' client-side routing, in the form of the reference simulator."""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass
from operator import eq
from typing import NamedTuple

from policies.greedy import whole
from policies.petals_search import Costs, make_search, milliseconds
from policies.problem import Hop, Placement, Problem, RequestSpec, Route
from policies.state import SystemState
from policies.waiting import fits, waiting_s

_MAX_KINDS = 4096
"""Kinds of request, and chains per kind, that are kept."""
_MAX_UNPENALISED = 256
"""Chains per kind of request that bound the cost of others."""


@dataclass
class PetalsRouting:
    """Shortest chain by round-trip times between servers, without waiting (PETALS).

    ``hop_overhead_s`` is added to every hop, ``shortage_penalty_s`` to entering a full server.
    """

    hop_overhead_s: float = 0.018
    shortage_penalty_s: float = 10.0
    name: str = "petals"

    def bind(self, problem: Problem, placement: Placement) -> PetalsRouter:
        return PetalsRouter(problem, placement, self)


class _Kind(NamedTuple):
    """Requests of one client and total length: what servers can hold of them, and the chains found so far."""

    sessions: tuple[int, ...]
    """Sessions that each server's cache holds; -1 where there are no blocks, which is never reached."""
    entries: tuple[int, ...]
    """Lowest block at which a session's cache for the rest of the range fits each server at all."""
    block_bytes: float
    chains: dict[bytes, tuple[tuple[Hop, ...], float]]
    """(hops, cost in seconds) by the servers that were full: 1 or 0 each, in list order."""
    unpenalised: list[tuple[float, list[int]]]
    """(cost in milliseconds, servers) of different chains without a full server, cheapest first."""


class PetalsRouter:
    """First hop raw_RTT(c,i)/2 + overhead + tau_i m_i; hop i to j raw_RTT(i,j)/2 + overhead + tau_j k;
    plus the penalty where exactly no session more fits; last hop raw_RTT(c,i)/2.

    ``policies.petals_search`` has the search and the rule for chains of equal cost. Each set of full
    servers is searched once.
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
        """The cheapest chain. Its ``wait_s`` is what its hops then make the session wait."""
        key = (request.client, request.n_tokens)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._prepare(request)
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            self._kinds[key] = kind
        full = bytes(map(eq, state.all_active(), kind.sessions))
        found = kind.chains.get(full)
        if found is None:
            found = self._shortest(request.client, kind, full)
            if len(kind.chains) >= _MAX_KINDS:
                kind.chains.clear()
            kind.chains[full] = found
        hops, cost_s = found
        if not hops:
            return None
        waits_s = [waiting_s(state, hop.server, hop.n_blocks * kind.block_bytes, now_s) for hop in hops]
        return Route(hops, max(waits_s), cost_s)

    def _prepare(self, request: RequestSpec) -> _Kind:
        block_bytes = self._problem.model.cache_bytes(request.n_tokens)
        sessions, entries = [], []
        for held, cache_bytes in zip(self._placement.ranges, self._placement.cache_bytes, strict=True):
            sessions.append(whole(cache_bytes, held.n_blocks * block_bytes) if held.n_blocks else -1)
            entry = held.first
            while entry < held.last and not fits(cache_bytes, (held.last - entry) * block_bytes):
                entry += 1
            entries.append(entry)
        return _Kind(tuple(sessions), tuple(entries), block_bytes, {}, [])

    def _shortest(self, client: int, kind: _Kind, full: bytes) -> tuple[tuple[Hop, ...], float]:
        """(hops, cost in seconds) of the cheapest chain when the servers ``full`` are; no hops if there is none."""
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
