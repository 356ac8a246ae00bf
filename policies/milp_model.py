"""Block placement and request routing (BPRR) as a mixed-integer linear program.

It is the paper's problem in another exact form than its eqs. 13a-13h. There a_j and m_j are integers,
connected with the routes by products that are linearised with big-M rows. Here binaries choose whole ranges,
and requests flow over block positions:

- y[j,a,e] = 1: server j holds the blocks [a, e). At most one range per server.
- f[q,j,p,e] = number of requests of kind q (same client and lengths) that enter server j at position
  p and leave it at the end e of its range, k = e - p blocks. Flow of n_q from position 0 to L.
- A hop needs its range, whose room for caches holds only so many such sessions, for every q, j, p, e:
  sum_{p'<=p} f[q,j,p',e] <= sum_{a<=p} min(n_q, floor(room[j,a,e] / (s_c(q) (e - p)))) y[j,a,e].
- Memory, for every j, e: sum s_c(q) (e - p) f[q,j,p,e] <= sum_a room[j,a,e] y[j,a,e], where
  room[j,a,e] = M_j - s_m (e - a). One range is chosen, so that this is the server's memory.
- Objective: sum l_q (hop_s + block_s (e - p)) f, the time of all tokens of all requests. l_q is the number of
  output tokens of a request (the paper's App. B.2).
- Where servers forward to each other, a hop's time depends on the server before. x[q,i,j,p] = number of
  requests that go from server i to server j at position p, at hop_s[i][j]. Flow is then conserved at every
  server: what leaves i at p goes to some j, and what enters j at p comes from some i.

There is no big-M, so the LP relaxation is tighter than the paper's. Requests of one kind share a flow. That
is exact, because an integral flow is a set of chains, and it leaves no symmetric solutions to search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, permutations
from typing import NamedTuple

from policies.greedy import whole
from policies.link_costs import LinkCosts, link_costs
from policies.milp_solver import LinearModel, Solution
from policies.problem import BlockRange, Hop, PolicyError, Problem, RequestSpec
from policies.waiting import ROUNDING_RATIO, fits

MAX_VARIABLES = 25_000
"""Larger models are refused: HiGHS would need hours, if it found any solution."""


class Pass(NamedTuple):
    """A session's way from server ``previous`` to ``server``, with the blocks before ``position`` done."""

    previous: int
    server: int
    position: int


class BprrModel:
    """The program for ``requests`` on ``problem``.

    ``min_blocks`` = 1 makes every server hold a block if it has room for one. Raises ``PolicyError``
    if the program would have more than ``MAX_VARIABLES`` variables.
    """

    def __init__(
        self, problem: Problem, requests: Sequence[RequestSpec], *, decode_only: bool, min_blocks: int
    ) -> None:
        self._problem = problem
        self._requests = tuple(requests)
        self._kinds = Counter(self._requests)
        self._n_blocks = problem.model.n_blocks
        self._cache_bytes = {q: problem.model.cache_bytes(q.n_tokens) for q in self._kinds}
        self.linear = LinearModel()
        self._ranges: list[dict[BlockRange, int]] = [{} for _ in problem.servers]
        self._flows: dict[RequestSpec, dict[Hop, int]] = {q: {} for q in self._kinds}
        self._passes: dict[RequestSpec, dict[Pass, int]] = {q: {} for q in self._kinds}
        self._refuse_large()
        costs = {q: link_costs(problem, q, decode_only=decode_only) for q in self._kinds}
        for j in range(problem.n_servers):
            self._choose_range(j, min_blocks)
            for kind in self._kinds:
                self._offer_hops(j, kind, costs[kind])
            self._limit_memory(j)
        for kind in self._kinds:
            if problem.forwarding:
                self._pass_on(kind, costs[kind])
            self._conserve(kind)

    def _refuse_large(self) -> None:
        n_variables = 0
        for held in self._most_held():
            n_variables += sum(self._n_blocks - m + 1 for m in range(1, held + 1)) * (1 + len(self._kinds))
        if self._problem.forwarding:
            n_pairs = self._problem.n_servers * (self._problem.n_servers - 1)
            n_variables += n_pairs * (self._n_blocks - 1) * len(self._kinds)
        if n_variables > MAX_VARIABLES:
            kinds = f"{len(self._kinds)} kind{'s' if len(self._kinds) > 1 else ''} of request"
            raise PolicyError(
                f"the exact program for {self._n_blocks} blocks, {self._problem.n_servers} servers and {kinds} "
                f"would have up to {n_variables} variables, more than the {MAX_VARIABLES} that are tried; "
                "use cg-bp for this size"
            )

    def _most_held(self) -> list[int]:
        """Returns how many blocks fit on each server, at most L."""
        problem = self._problem
        return [problem.stored(j).best_blocks(s.memory_bytes) for j, s in enumerate(problem.servers)]

    def _choose_range(self, j: int, min_blocks: int) -> None:
        ranges = self._ranges[j]
        held = self._most_held()[j]
        for first in range(self._n_blocks):
            for last in range(first + 1, min(first + held, self._n_blocks) + 1):
                if self._fits(j, BlockRange(first, last)):
                    ranges[BlockRange(first, last)] = self.linear.variable(0.0, 1.0)
        if ranges:
            self.linear.row(dict.fromkeys(ranges.values(), 1.0), float(min(min_blocks, 1)), 1.0)

    def _fits(self, j: int, held: BlockRange) -> bool:
        """Whether server j has memory for these very blocks; those of a number that fits anywhere are alike."""
        stored = self._problem.stored(j)
        return not stored.blocks_bytes or fits(
            self._problem.servers[j].memory_bytes, stored.range_bytes(held)
        )

    def _offer_hops(self, j: int, kind: RequestSpec, costs: LinkCosts) -> None:
        """Adds the hops of ``kind`` on server j; each is possible only if j's range allows it."""
        n_requests = self._kinds[kind]
        memory_bytes = self._problem.servers[j].memory_bytes
        longest = self._problem.stored(j).best_blocks(memory_bytes, self._cache_bytes[kind])
        ranges = self._ranges_by_end(j)
        for last in range(1, self._n_blocks + 1):
            entered: dict[int, float] = {}
            for first in range(max(last - longest, 0), last):
                hop = Hop(j, first, last)
                flow = self.linear.variable(self._hop_s(hop, kind, costs), float(n_requests))
                self._flows[kind][hop] = flow
                entered[flow] = 1.0
                # Every session that entered at or before ``first`` holds cache for at least hop.n_blocks
                # blocks.
                needed = {
                    y: -float(min(n_requests, self._most_sessions(j, held, kind, hop.n_blocks)))
                    for held, y in ranges[last].items()
                    if held.first <= first
                }
                self.linear.row({**entered, **needed}, -float("inf"), 0.0)

    def _hop_s(self, hop: Hop, kind: RequestSpec, costs: LinkCosts) -> float:
        """Returns the seconds of a hop over all tokens, without the way to it if a server forwards to it."""
        per_token_s = costs.block_s[hop.server] * hop.n_blocks
        if costs.across_s is None or hop.first == 0:
            per_token_s += costs.hop_s[hop.server]
        if costs.return_s is not None and hop.last == self._n_blocks:
            per_token_s += costs.return_s[hop.server]
        return kind.n_output_tokens * per_token_s

    def _pass_on(self, kind: RequestSpec, costs: LinkCosts) -> None:
        """Adds the ways from server to server, and rows so that every session continues from where it is."""
        assert costs.across_s is not None
        servers = range(self._problem.n_servers)
        for position in range(1, self._n_blocks):
            leaving: list[dict[int, float]] = [{} for _ in servers]
            entering: list[dict[int, float]] = [{} for _ in servers]
            for hop, flow in self._flows[kind].items():
                if hop.last == position:
                    leaving[hop.server][flow] = 1.0
                elif hop.first == position:
                    entering[hop.server][flow] = 1.0
            here: dict[Pass, int] = {}
            for i, j in permutations(servers, 2):
                if leaving[i] and entering[j]:
                    cost_s = kind.n_output_tokens * costs.across_s[i][j]
                    here[Pass(i, j, position)] = self.linear.variable(cost_s, float(self._kinds[kind]))
            self._passes[kind] |= here
            for j in servers:
                out = {x: -1.0 for way, x in here.items() if way.previous == j}
                into = {x: -1.0 for way, x in here.items() if way.server == j}
                for terms in ({**leaving[j], **out}, {**entering[j], **into}):
                    if terms:
                        self.linear.row(terms, 0.0, 0.0)

    def _most_sessions(self, j: int, held: BlockRange, kind: RequestSpec, n_blocks: int) -> int:
        """Returns how many sessions of ``kind``, each on ``n_blocks`` blocks, fit beside ``held`` on j."""
        return whole(self._room_bytes(j, held), self._cache_bytes[kind] * n_blocks)

    def _room_bytes(self, j: int, held: BlockRange) -> float:
        """Returns the bytes for caches beside the range ``held`` on server j."""
        memory_bytes = self._problem.servers[j].memory_bytes * (1.0 + ROUNDING_RATIO)
        return max(memory_bytes - self._problem.stored(j).range_bytes(held), 0.0)

    def _ranges_by_end(self, j: int) -> dict[int, dict[BlockRange, int]]:
        by_end: dict[int, dict[BlockRange, int]] = {last: {} for last in range(1, self._n_blocks + 1)}
        for held, y in self._ranges[j].items():
            by_end[held.last][held] = y
        return by_end

    def _limit_memory(self, j: int) -> None:
        """Adds rows for every end e: caches of sessions that leave at e fit beside the ranges that end there.

        One row for each e, instead of one for all, prevents that parts of ranges in relaxed solutions use
        each other's memory.
        """
        memory_bytes = self._problem.servers[j].memory_bytes
        for last, ranges in self._ranges_by_end(j).items():
            terms = {y: -self._room_bytes(j, held) / memory_bytes for held, y in ranges.items()}
            for kind, flows in self._flows.items():
                for first in range(last):
                    hop = Hop(j, first, last)
                    if hop in flows:
                        terms[flows[hop]] = self._cache_bytes[kind] * hop.n_blocks / memory_bytes
            if terms:
                self.linear.row(terms, -float("inf"), 0.0)

    def _conserve(self, kind: RequestSpec) -> None:
        """Adds rows so that every chain starts at position 0, continues where it arrives, and ends at L."""
        n_requests = self._kinds[kind]
        for position in range(self._n_blocks + 1):
            terms = {}
            for hop, flow in self._flows[kind].items():
                if hop.first == position:
                    terms[flow] = 1.0
                elif hop.last == position:
                    terms[flow] = -1.0
            surplus = float(n_requests if position == 0 else -n_requests if position == self._n_blocks else 0)
            self.linear.row(terms, surplus, surplus)

    def ranges(self, solution: Solution) -> tuple[BlockRange, ...]:
        """Returns the range that an integral solution chooses for each server; ``(0, 0)`` for none."""
        return tuple(
            next((held for held, y in ranges.items() if solution.values[y] > 0.5), BlockRange(0, 0))
            for ranges in self._ranges
        )

    def chains(self, solution: Solution) -> tuple[tuple[Hop, ...], ...]:
        """Returns a chain per request, from the flows of an integral solution."""
        left = {
            kind: {hop: round(solution.values[flow]) for hop, flow in flows.items()}
            for kind, flows in self._flows.items()
        }
        passed = {
            kind: {way: round(solution.values[x]) for way, x in passes.items()}
            for kind, passes in self._passes.items()
        }
        return tuple(self._take_chain(left[request], passed[request]) for request in self._requests)

    def _take_chain(self, left: dict[Hop, int], passed: dict[Pass, int]) -> tuple[Hop, ...]:
        chain: list[Hop] = []
        position, server = 0, None
        while position < self._n_blocks:
            if chain and self._problem.forwarding:
                at = chain[-1].server
                way = next(
                    w for w, n in passed.items() if n > 0 and (w.previous, w.position) == (at, position)
                )
                passed[way] -= 1
                server = way.server
            hop = next(
                h for h, n in left.items() if n > 0 and h.first == position and server in (None, h.server)
            )
            left[hop] -= 1
            chain.append(hop)
            position = hop.last
        return tuple(chain)

    def values(self, ranges: Sequence[BlockRange], chains: Sequence[Sequence[Hop]]) -> list[float]:
        """Returns the values of all variables for a placement and a chain per request."""
        values = [0.0] * self.linear.n_variables
        for chosen, held in zip(self._ranges, ranges, strict=True):
            if held.n_blocks:
                values[chosen[held]] = 1.0
        for request, chain in zip(self._requests, chains, strict=True):
            for hop in chain:
                values[self._flows[request][hop]] += 1.0
            for before, hop in pairwise(chain) if self._problem.forwarding else ():
                values[self._passes[request][Pass(before.server, hop.server, hop.first)]] += 1.0
        return values

    def mean_ranges(self, solution: Solution) -> list[tuple[float, float]]:
        """Returns (first block, number of blocks) of each server in a relaxed solution, as real numbers.

        They are the paper's a_j - 1, as the weighted mean over the ranges chosen in part, and m_j, as their
        weighted sum.
        """
        means = []
        for ranges in self._ranges:
            chosen = {held: solution.values[y] for held, y in ranges.items()}
            weight = sum(chosen.values())
            first = sum(part * held.first for held, part in chosen.items())
            blocks = sum(part * held.n_blocks for held, part in chosen.items())
            means.append((first / weight if weight > 0 else 0.0, blocks))
        return means
