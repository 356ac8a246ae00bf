"""The block positions that chains can reach, and the hops between them."""

from __future__ import annotations

from collections.abc import Sequence

from policies.problem import BlockRange, Hop, Placement, Problem
from policies.remember import remember
from policies.waiting import fits

_MAX_KINDS = 4096
"""Results for at most this many different request lengths are kept."""


class PositionGraph:
    """Chains as paths over block positions: server j leads from each position in its range to its end.

    ``positions`` contains those that a chain from block 0 can reach (0 and ends of ranges), ascending, and
    ends with ``n_blocks``. ``into[p]`` are the hops that end at ``positions[p]``, as (index of the position
    at which the hop starts, hop), servers in list order. If no chain covers all blocks, no hop leads to the
    last position.
    """

    def __init__(self, ranges: Sequence[BlockRange], n_blocks: int) -> None:
        reachable = {0}
        for held in sorted(ranges, key=lambda r: r.last):
            if held.n_blocks and any(held.first <= p < held.last for p in reachable):
                reachable.add(held.last)
        self.positions = sorted(reachable | {n_blocks})
        into: list[list[tuple[int, Hop]]] = [[] for _ in self.positions]
        number = {p: i for i, p in enumerate(self.positions)}
        for j, held in enumerate(ranges):
            for p in self.positions:
                if held.first <= p < held.last:
                    into[number[held.last]].append((number[p], Hop(j, p, held.last)))
        self.into: tuple[tuple[tuple[int, Hop], ...], ...] = tuple(map(tuple, into))


class Onward:
    """The hops from each position from which a request can reach the end, over servers that can hold it.

    A server can hold it if its whole cache is large enough, whatever sessions use it now.
    """

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._problem = problem
        self._placement = placement
        self._positions = PositionGraph(placement.ranges, problem.model.n_blocks).positions
        self._known: dict[int, dict[int, list[Hop]]] = {}

    def of(self, n_tokens: int) -> dict[int, list[Hop]]:
        """Returns the hops of a request of ``n_tokens`` tokens by position, servers in list order.

        Positions without hops are left out. If 0 is not in it, the request has no chain.
        """
        onward = self._known.get(n_tokens)
        if onward is None:
            onward = remember(self._known, n_tokens, self._build(n_tokens), _MAX_KINDS)
        return onward

    def _build(self, n_tokens: int) -> dict[int, list[Hop]]:
        n_blocks, ranges = self._problem.model.n_blocks, self._placement.ranges
        token_bytes = self._problem.model.cache_bytes(n_tokens)
        onward: dict[int, list[Hop]] = {}
        for position in reversed(self._positions[:-1]):
            hops = [
                Hop(j, position, held.last)
                for j, held in enumerate(ranges)
                if held.first <= position < held.last
                and (held.last == n_blocks or held.last in onward)
                and fits(self._placement.cache_bytes[j], (held.last - position) * token_bytes)
            ]
            if hops:
                onward[position] = hops
        return onward
