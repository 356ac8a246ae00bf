"""PETALS' client-side routing, in the form of the reference simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from policies.greedy import whole
from policies.problem import Hop, Placement, Problem, RequestSpec, Route
from policies.state import SystemState
from policies.waiting import fits, waiting_s

_MAX_KINDS = 4096
"""Kinds of request, and chains per kind, that are kept."""


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
    """Requests of one client and total length: who can serve them, and the chains found so far."""

    sessions: tuple[tuple[int, int], ...]
    """(server, sessions that its cache holds) of every server that can serve such a request."""
    block_bytes: float
    chains: dict[tuple[int, ...], tuple[tuple[Hop, ...], float]]
    """(hops, cost in seconds) by the servers that were full."""


class PetalsRouter:
    """Dijkstra over servers, which here is one pass in the order of the ranges' ends.

    Costs are summed in milliseconds in the reference simulator's order of addition: which of two chains
    of equal cost it takes hinges on the last bit of these sums.

    First hop raw_RTT(c,i)/2 + overhead + tau_i m_i; hop i to j raw_RTT(i,j)/2 + overhead + tau_j k;
    plus the penalty where exactly no session more fits; last hop raw_RTT(c,i)/2. Of equal chains,
    Dijkstra keeps the one whose predecessor it settled first: smallest distance, then list order.
    """

    def __init__(self, problem: Problem, placement: Placement, policy: PetalsRouting) -> None:
        self._problem = problem
        self._placement = placement
        self._policy = policy
        self._kinds: dict[tuple[int, int], _Kind] = {}
        self._hop_overhead_ms = _ms(policy.hop_overhead_s)
        self._penalty_ms = _ms(policy.shortage_penalty_s)
        self._decode_ms = [_ms(server.decode_s) for server in problem.servers]
        # One-way delays. Networks have few distinct ones: each is converted once.
        half_ms = {t: _ms(t) / 2 for row in (*problem.raw_rtt_s, *problem.server_rtt_s) for t in row}
        self._from_client_ms = [[half_ms[t] for t in row] for row in problem.raw_rtt_s]
        self._from_server_ms = [[half_ms[t] for t in row] for row in problem.server_rtt_s]

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """The cheapest chain. Its ``wait_s`` is what its hops then make the session wait."""
        key = (request.client, request.n_tokens)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._prepare(request)
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            self._kinds[key] = kind
        n_active = state.n_active
        full = tuple(j for j, sessions in kind.sessions if n_active(j) == sessions)
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
        rooms = zip(self._placement.ranges, self._placement.cache_bytes, strict=True)
        sessions = tuple(
            (j, whole(cache_bytes, held.n_blocks * block_bytes))
            for j, (held, cache_bytes) in enumerate(rooms)
            if held.n_blocks
        )
        return _Kind(sessions, block_bytes, {})

    def _shortest(self, client: int, kind: _Kind, full: tuple[int, ...]) -> tuple[tuple[Hop, ...], float]:
        """(hops, cost) of the cheapest chain when the servers ``full`` are; no hops if there is none.

        Links over which a server's whole cache is too small for the session are left out.
        """
        ranges, cache_bytes = self._placement.ranges, self._placement.cache_bytes
        from_client_ms = self._from_client_ms[client]
        # Ranges end strictly later from hop to hop, so that this order settles predecessors first.
        by_end = sorted((j for j, _ in kind.sessions), key=lambda j: ranges[j].last)
        dist_ms: dict[int, float] = {}
        before: dict[int, int | None] = {}
        for j in by_end:
            held, decode_ms = ranges[j], self._decode_ms[j]
            penalty_ms = self._penalty_ms if j in full else 0.0
            offers: list[tuple[float, float, int, int | None]] = []
            entries: list[tuple[float, int, float, int | None]] = [
                (dist_ms[i], ranges[i].last, self._from_server_ms[i][j], i)
                for i in dist_ms
                if held.first <= ranges[i].last < held.last
            ]
            if held.first == 0:
                entries.append((0.0, 0, from_client_ms[j], None))
            for start_ms, position, way_ms, i in entries:
                n_blocks = held.last - position
                if fits(cache_bytes[j], n_blocks * kind.block_bytes):
                    link_ms = way_ms + self._hop_overhead_ms + decode_ms * n_blocks
                    offers.append((start_ms + (link_ms + penalty_ms), start_ms, -1 if i is None else i, i))
            if offers:
                dist_ms[j], _, _, before[j] = min(offers, key=lambda o: o[:3])
        ends = [
            (dist_ms[j] + from_client_ms[j], dist_ms[j], j)
            for j in dist_ms
            if ranges[j].last == self._problem.model.n_blocks
        ]
        if not ends:
            return (), math.inf
        cost_ms, _, last = min(ends)
        chain: list[int] = []
        at: int | None = last
        while at is not None:
            chain.append(at)
            at = before[at]
        hops: list[Hop] = []
        for j in reversed(chain):
            hops.append(Hop(j, hops[-1].last if hops else 0, ranges[j].last))
        return tuple(hops), cost_ms / 1e3


def _ms(time_s: float) -> float:
    """Milliseconds as a person would write them: rid of the conversion's own rounding."""
    return round(time_s * 1e3, 9)
