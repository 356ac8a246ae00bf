"""The paper's own program for placement and routing: MILP (13a)-(13h), with its linearisation (9)-(12).

Variables of server j are a_j, its first block (from 1), and m_j, its number of blocks. For request r, f[r,i,j] = 1 if
it goes from node i to node j. Nodes are servers and the request's client, which counts twice: as a start with a = 0
and m = 1, and as an end with a = L + 1 and m = 1. A session leaves node i with a_i + m_i as its next block, so that
server j computes k = a_j + m_j - a_i - m_i blocks. The products with f are variables, too: alpha = a_j f,
beta = a_i f, gamma = m_j f, delta = m_i f.

- (13a) Minimise sum_r l_r sum_ij (t_ij f + tau_j (alpha - beta + gamma - delta)).
- (13b) Memory: s_m m_j + sum_r s_c(r) sum_i (alpha - beta + gamma - delta) <= M_j.
- (13c) Flow: one unit from the client to itself.
- (13d) a_j + m_j <= L + 1.
- (13e), (13f) A link is used only if a_j <= a_i + m_i <= a_j + m_j - 1: alpha <= a_i + m_i,
  beta + delta <= a_j + m_j - 1.
- (13g), (13h) f is binary, a_j and m_j are whole numbers.
- (9)-(12) A product z = x f with 0 <= x <= U: z <= U f, z <= x, z >= x - U (1 - f). U is L + 1 for alpha, else L.

Its optimum is that of ``policies.milp_model``. Its LP relaxation is much weaker: with f below 1 the four products of
a link are almost free, and alpha - beta + gamma - delta can be negative. It is here to compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations
from typing import NamedTuple

from policies.link_costs import LinkCosts, link_costs
from policies.milp_solver import LinearModel, Solution
from policies.problem import BlockRange, Hop, PolicyError, Problem, RequestSpec
from policies.waiting import ROUNDING_RATIO

MAX_VARIABLES = 1_000
"""Larger models are refused: 500 branches would take minutes and prove next to nothing."""


class _Link(NamedTuple):
    """A link of a request and its variables. ``tail`` and ``head`` are servers; ``None``: the client."""

    tail: int | None
    head: int | None
    used: int
    alpha: int
    beta: int
    gamma: int
    delta: int

    def blocks(self, factor: float) -> dict[int, float]:
        """Returns the terms of ``factor`` times the blocks that the head computes."""
        return {self.alpha: factor, self.beta: -factor, self.gamma: factor, self.delta: -factor}


class PaperModel:
    """The paper's program for ``requests`` on ``problem``; arguments and errors are those of ``BprrModel``.

    The paper has m_j >= 1, which is ``min_blocks`` = 1; a server without memory for a block has m_j = 0.
    """

    def __init__(
        self, problem: Problem, requests: Sequence[RequestSpec], *, decode_only: bool, min_blocks: int
    ) -> None:
        self._problem = problem
        self._requests = tuple(requests)
        self._n_blocks = problem.model.n_blocks
        self._refuse_large()
        self.linear = LinearModel()
        self._memory_bytes = [s.memory_bytes * (1 + ROUNDING_RATIO) for s in problem.servers]
        held = [
            min(min_blocks, 1) if m >= problem.stored(j).block_bytes else 0
            for j, m in enumerate(self._memory_bytes)
        ]
        self._a = [self.linear.variable(0.0, self._n_blocks, lower=1.0) for _ in held]
        self._m = [self.linear.variable(0.0, self._n_blocks, lower=float(least)) for least in held]
        self._links: list[list[_Link]] = []
        for request in self._requests:
            costs = link_costs(problem, request, decode_only=decode_only)
            self._links.append(self._route(request, costs))
        for j in range(problem.n_servers):
            self._limit_memory(j)
            self.linear.row({self._a[j]: 1.0, self._m[j]: 1.0}, 0.0, self._n_blocks + 1.0)  # (13d)

    def _refuse_large(self) -> None:
        n = self._problem.n_servers
        n_variables = 2 * n + 5 * len(self._requests) * n * (n + 1)
        if n_variables > MAX_VARIABLES:
            raise PolicyError(
                f"the paper's program for {n} servers and {len(self._requests)} requests would have {n_variables} "
                f"variables, more than the {MAX_VARIABLES} that are tried; use milp or cg-bp for this size"
            )

    def _route(self, request: RequestSpec, costs: LinkCosts) -> list[_Link]:
        """Adds a request's links with (13c), (13e) and (13f); returns them."""
        servers = range(self._problem.n_servers)
        pairs: list[tuple[int | None, int | None]] = [
            *((None, j) for j in servers),
            *permutations(servers, 2),
        ]
        pairs += [(i, None) for i in servers]
        links = [self._link(request, costs, tail, head) for tail, head in pairs]
        for node in (None, *servers):
            leaving = {link.used: 1.0 for link in links if link.tail == node}
            if node is None:
                self.linear.row(leaving, 1.0, 1.0)
            entering = {link.used: -1.0 for link in links if link.head == node}
            if node is None:
                self.linear.row(entering, -1.0, -1.0)
            else:
                self.linear.row({**leaving, **entering}, 0.0, 0.0)
        return links

    def _link(self, request: RequestSpec, costs: LinkCosts, tail: int | None, head: int | None) -> _Link:
        n_tokens, n_blocks, unlimited = request.n_output_tokens, self._n_blocks, float("inf")
        if head is None:
            assert tail is not None
            way_s, block_s = (costs.return_s[tail] if costs.return_s else 0.0), 0.0
        else:
            way_s = costs.of_hop(Hop(head, 0, 0), tail)
            block_s = costs.block_s[head]
        variable = self.linear.variable
        used = variable(n_tokens * way_s, 1.0)
        alpha, beta, gamma, delta = (
            variable(sign * n_tokens * block_s, upper, integer=False)
            for sign, upper in (
                (1, n_blocks + 1.0),
                (-1, float(n_blocks)),
                (1, float(n_blocks)),
                (-1, float(n_blocks)),
            )
        )
        link = _Link(tail, head, used, alpha, beta, gamma, delta)
        # The client has a = 0 and m = 1 as the start, a = L + 1 and m = 1 as the end.
        a_i, m_i = (None, None) if tail is None else (self._a[tail], self._m[tail])
        a_j, m_j = (None, None) if head is None else (self._a[head], self._m[head])
        self._product(alpha, used, a_j, n_blocks + 1.0, n_blocks + 1)
        self._product(beta, used, a_i, 0.0, n_blocks)
        self._product(gamma, used, m_j, 1.0, n_blocks)
        self._product(delta, used, m_i, 1.0, n_blocks)
        if tail is None:
            self.linear.row({alpha: 1.0}, -unlimited, 1.0)
        else:
            self.linear.row({alpha: 1.0, self._a[tail]: -1.0, self._m[tail]: -1.0}, -unlimited, 0.0)
        if head is None:
            self.linear.row({beta: 1.0, delta: 1.0}, -unlimited, n_blocks + 1.0)
        else:
            terms = {beta: 1.0, delta: 1.0, self._a[head]: -1.0, self._m[head]: -1.0}
            self.linear.row(terms, -unlimited, -1.0)
        return link

    def _product(self, product: int, used: int, factor: int | None, of_client: float, most: int) -> None:
        """Adds (9)-(12): ``product`` = ``used`` times the variable ``factor``, or times ``of_client`` if it is ``None``."""
        row, unlimited = self.linear.row, float("inf")
        value = 0.0 if factor is not None else of_client
        terms = {product: 1.0} if factor is None else {product: 1.0, factor: -1.0}
        row({product: 1.0, used: -float(most)}, -unlimited, 0.0)
        row(terms, -unlimited, value)
        row({**terms, used: -float(most)}, value - most, unlimited)

    def _limit_memory(self, j: int) -> None:
        model, memory_bytes = self._problem.model, self._memory_bytes[j]
        scale = memory_bytes or 1.0
        terms = {self._m[j]: self._problem.stored(j).block_bytes / scale}
        for request, links in zip(self._requests, self._links, strict=True):
            for link in links:
                if link.head == j:
                    terms |= link.blocks(model.cache_bytes(request.n_tokens) / scale)
        self.linear.row(terms, -float("inf"), memory_bytes / scale)

    def ranges(self, solution: Solution) -> tuple[BlockRange, ...]:
        """Returns the range that an integral solution chooses for each server; ``(0, 0)`` for none."""
        ranges = []
        for a, m in zip(self._a, self._m, strict=True):
            first, n_held = round(solution.values[a]) - 1, round(solution.values[m])
            ranges.append(BlockRange(first, first + n_held) if n_held else BlockRange(0, 0))
        return tuple(ranges)

    def chains(self, solution: Solution) -> tuple[tuple[Hop, ...], ...]:
        """Returns a chain per request, from an integral solution."""
        ranges = self.ranges(solution)
        chains = []
        for links in self._links:
            onward = {link.tail: link.head for link in links if solution.values[link.used] > 0.5}
            hops: list[Hop] = []
            position, at = 0, onward[None]
            while at is not None:
                hops.append(Hop(at, position, ranges[at].last))
                position, at = ranges[at].last, onward[at]
            chains.append(tuple(hops))
        return tuple(chains)

    def values(self, ranges: Sequence[BlockRange], chains: Sequence[Sequence[Hop]]) -> list[float]:
        """Returns the values of all variables for a placement and a chain per request."""
        values = [0.0] * self.linear.n_variables
        firsts = [held.first + 1.0 for held in ranges]
        for j, held in enumerate(ranges):
            values[self._a[j]], values[self._m[j]] = firsts[j], float(held.n_blocks)
        for links, chain in zip(self._links, chains, strict=True):
            way = [None, *(hop.server for hop in chain), None]
            passed = set(pairwise(way))
            for link in links:
                tail, head = link.tail, link.head
                if (tail, head) in passed:
                    values[link.used] = 1.0
                    values[link.alpha] = self._n_blocks + 1.0 if head is None else firsts[head]
                    values[link.beta] = 0.0 if tail is None else firsts[tail]
                    values[link.gamma] = 1.0 if head is None else float(ranges[head].n_blocks)
                    values[link.delta] = 1.0 if tail is None else float(ranges[tail].n_blocks)
        return values
