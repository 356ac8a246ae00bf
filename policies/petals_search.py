"""The search for PETALS' shortest chain over servers: server by server for few servers, with arrays for many.

Both searches sum costs in milliseconds in the reference simulator's order of addition, so their results are
equal to the last bit. That matters because it can decide between two chains of equal cost. Of equal chains
Dijkstra keeps the one whose predecessor it settled first: smallest distance, then list order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

from policies.problem import BlockRange, Problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int_]

FEW_SERVERS = 48
"""Up to this many servers the search server by server is as fast as with arrays, and needs no numpy."""

_ROUNDING_RATIO = 1e-9
"""Bounds are loosened by this share, because they are summed in another order than the costs."""


class Costs(NamedTuple):
    """Parts of a chain's cost in ms: a hop's overhead, a full server's penalty, and tau of each server."""

    hop_overhead_ms: float
    penalty_ms: float
    decode_ms: tuple[float, ...]


class Search(Protocol):
    """Finds chains for one placement."""

    def shortest(
        self, client: int, entries: Sequence[int], full: bytes, at_most_ms: float = math.inf
    ) -> tuple[list[int], float]:
        """Returns (servers of the cheapest chain, its cost in ms); no servers and infinity if there is none.

        ``entries[j]`` is the lowest block at which server j can be entered: its first block, or a later one
        if its cache is too small for a session over all of its blocks. If it is the end of the range, the
        server is left out. ``full[j]`` is 1 if entering j costs the penalty. ``at_most_ms`` is an upper
        bound: the cost of some chain.
        """
        ...


def make_search(problem: Problem, ranges: Sequence[BlockRange], costs: Costs) -> Search:
    n_holding = sum(1 for held in ranges if held.n_blocks)
    kind = ServerByServer if n_holding <= FEW_SERVERS else Vectorised
    return kind(problem, ranges, costs)


class ServerByServer:
    """Dijkstra, which here is one pass over the servers in the order in which their ranges end."""

    def __init__(self, problem: Problem, ranges: Sequence[BlockRange], costs: Costs) -> None:
        self._ranges = ranges
        self._n_blocks = problem.model.n_blocks
        self._costs = costs
        half_ms = _half_ms(problem)
        self._from_client_ms = [[half_ms[t] for t in row] for row in problem.raw_rtt_s]
        self._from_server_ms = [[half_ms[t] for t in row] for row in problem.server_rtt_s]
        # Ranges end strictly later from hop to hop, so this order settles predecessors first.
        self._by_end = sorted(
            (j for j, held in enumerate(ranges) if held.n_blocks), key=lambda j: ranges[j].last
        )

    def shortest(
        self, client: int, entries: Sequence[int], full: bytes, at_most_ms: float = math.inf
    ) -> tuple[list[int], float]:
        ranges, (overhead_ms, full_ms, decode_ms) = self._ranges, self._costs
        from_client_ms, from_server_ms = self._from_client_ms[client], self._from_server_ms
        dist_ms: dict[int, float] = {}
        settled: list[tuple[int, int]] = []
        before: dict[int, int | None] = {}
        for j in self._by_end:
            last, entry = ranges[j].last, entries[j]
            penalty_ms = full_ms if full[j] else 0.0
            best_ms, best_start_ms, best = math.inf, math.inf, -2
            if entry == 0:
                best_ms = 0.0 + (from_client_ms[j] + overhead_ms + decode_ms[j] * last + penalty_ms)
                best_start_ms, best = 0.0, -1
            for i, end in settled:
                if entry <= end < last:
                    start_ms = dist_ms[i]
                    link_ms = from_server_ms[i][j] + overhead_ms + decode_ms[j] * (last - end)
                    total_ms = start_ms + (link_ms + penalty_ms)
                    if total_ms < best_ms or (total_ms == best_ms and (start_ms, i) < (best_start_ms, best)):
                        best_ms, best_start_ms, best = total_ms, start_ms, i
            if best_ms < math.inf:
                dist_ms[j] = best_ms
                before[j] = None if best == -1 else best
                settled.append((j, last))
        ends = [
            (dist_ms[j] + from_client_ms[j], dist_ms[j], j) for j, end in settled if end == self._n_blocks
        ]
        if not ends:
            return [], math.inf
        cost_ms, _, last_server = min(ends)
        servers: list[int] = []
        at: int | None = last_server
        while at is not None:
            servers.append(at)
            at = before[at]
        return servers[::-1], cost_ms


class Vectorised:
    """The same pass, but for all servers with the same end and lowest entry at once.

    It stores 8 bytes per pair of servers. A search takes time proportional to the pairs that can follow each
    other, among the servers that can be on a chain within the known upper bound.
    """

    def __init__(self, problem: Problem, ranges: Sequence[BlockRange], costs: Costs) -> None:
        import numpy as np

        half_ms = _half_ms(problem)
        self._n_blocks = problem.model.n_blocks
        self._penalty_ms = costs.penalty_ms
        holding = (j for j, held in enumerate(ranges) if held.n_blocks)
        order = sorted(holding, key=lambda j: (ranges[j].last, ranges[j].first))
        ends = np.array([ranges[j].last for j in order])
        decode_ms = np.array([costs.decode_ms[j] for j in order])
        self._order, self._ends = np.array(order), ends
        self._from_client_ms = [np.array([half_ms[row[j]] for j in order]) for row in problem.raw_rtt_s]
        self._first_ms = [way + costs.hop_overhead_ms + decode_ms * ends for way in self._from_client_ms]
        self._firsts = np.array([ranges[j].first for j in order])
        self._through_ms: dict[int, Floats] = {}
        self._link_ms = np.empty((len(order), len(order)))
        for i, j in enumerate(order):
            way_ms = np.array([half_ms[t] for t in problem.server_rtt_s[j]])[self._order]
            self._link_ms[:, i] = way_ms + costs.hop_overhead_ms + decode_ms * (ends - ends[i])

    def shortest(
        self, client: int, entries: Sequence[int], full: bytes, at_most_ms: float = math.inf
    ) -> tuple[list[int], float]:
        import numpy as np

        all_servers = _Servers(
            self._order, self._ends, self._link_ms, self._first_ms[client], self._from_client_ms[client]
        )
        servers = all_servers
        if at_most_ms < math.inf:
            # The cheapest chain is within the servers whose cheapest chain on idle servers costs no more.
            if client not in self._through_ms:
                self._through_ms[client] = self._cheapest_through(all_servers)
            near = np.flatnonzero(self._through_ms[client] <= at_most_ms * (1 + _ROUNDING_RATIO))
            servers = all_servers.only(near)
        entry = np.array(entries)[servers.order]
        penalty_ms = np.frombuffer(full, np.uint8)[servers.order].astype(np.float64) * self._penalty_ms
        first_ms, dist_ms, before = servers.distances(entry, penalty_ms)
        cost_ms = np.where(servers.ends == self._n_blocks, dist_ms + servers.from_client_ms, np.inf)
        least_ms = float(cost_ms.min())
        if least_ms == math.inf:
            return [], math.inf
        at = servers.settled_first(np.flatnonzero(cost_ms == least_ms), dist_ms)
        numbers = [at]
        while first_ms[at] != dist_ms[at]:  # the client is settled before all servers
            low, high = before[0][at], before[1][at]
            total_ms = servers.link_ms[at, low:high] + penalty_ms[at] + dist_ms[low:high]
            at = servers.settled_first(np.flatnonzero(total_ms == dist_ms[at]) + low, dist_ms)
            numbers.append(at)
        return servers.order[numbers[::-1]].tolist(), least_ms

    def _cheapest_through(self, servers: _Servers) -> Floats:
        """Returns the cost of the cheapest chain through each server if all are idle and large enough."""
        import numpy as np

        nothing = np.zeros(len(self._order))
        _, dist_ms, (low, high) = servers.distances(self._firsts, nothing)
        ahead_ms = np.where(servers.ends == self._n_blocks, servers.from_client_ms, np.inf)
        for a, b in reversed(_runs(low, high)):
            if low[a] < high[a]:
                before = slice(low[a], high[a])
                over_ms = (servers.link_ms[a:b, before] + ahead_ms[a:b, None]).min(axis=0)
                np.minimum(ahead_ms[before], over_ms, out=ahead_ms[before])
        return dist_ms + ahead_ms


class _Servers(NamedTuple):
    """Arrays over some servers, in the order of their ranges' ends, for one client."""

    order: Ints
    """The servers' indices."""
    ends: Ints
    link_ms: Floats
    """The cost of a hop to a server (row) from another one (column), without the penalty."""
    first_ms: Floats
    """The cost of a hop to each server from the client, without the penalty."""
    from_client_ms: Floats

    def only(self, numbers: Ints) -> _Servers:
        order, ends, link_ms, first_ms, from_client_ms = self
        links_ms = link_ms[numbers[:, None], numbers]
        return _Servers(order[numbers], ends[numbers], links_ms, first_ms[numbers], from_client_ms[numbers])

    def distances(self, entry: Ints, penalty_ms: Floats) -> tuple[Floats, Floats, tuple[Ints, Ints]]:
        """Returns, for each server, (distance as first server, distance, (low, high)).

        The servers numbered low (included) to high (not included) can come before it.
        """
        import numpy as np

        low, high = np.searchsorted(self.ends, entry), np.searchsorted(self.ends, self.ends)
        first_ms = np.where(entry == 0, self.first_ms + penalty_ms, np.inf)
        dist_ms = first_ms.copy()
        for a, b in _runs(low, high):
            if low[a] < high[a]:
                before = slice(low[a], high[a])
                total_ms = self.link_ms[a:b, before] + penalty_ms[a:b, None]
                total_ms += dist_ms[before]
                np.minimum(dist_ms[a:b], total_ms.min(axis=1), out=dist_ms[a:b])
        return first_ms, dist_ms, (low, high)

    def settled_first(self, candidates: Ints, dist_ms: Floats) -> int:
        return int(min(candidates, key=lambda k: (dist_ms[k], self.order[k])))


def _runs(low: Ints, high: Ints) -> list[tuple[int, int]]:
    """Returns the (first, last) of each run of servers that have the same possible predecessors."""
    changed = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    return list(pairwise([0, *(changed.nonzero()[0] + 1).tolist(), len(low)]))


def _half_ms(problem: Problem) -> dict[float, float]:
    """Returns one-way delays in ms by RTT in s. Networks have few distinct RTTs, so each is converted once."""
    times_s = set(chain.from_iterable((*problem.raw_rtt_s, *problem.server_rtt_s)))
    return {t: milliseconds(t) / 2 for t in times_s}


def milliseconds(time_s: float) -> float:
    """Converts seconds to milliseconds, rounded to 9 decimals to remove the conversion's rounding error."""
    return round(time_s * 1e3, 9)
