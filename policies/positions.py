"""Block positions that chains can stand at, and the hops between them."""

from __future__ import annotations

from collections.abc import Sequence

from policies.problem import BlockRange, Hop


class PositionGraph:
    """Chains as paths over block positions: server j leads from each position of its range to its end.

    Only positions that a chain from block 0 can reach count, and they are 0 and ends of ranges.
    ``positions`` is ascending, its last is ``n_blocks``. ``into[p]`` are the hops that end at
    ``positions[p]`` as (number of the position they start at, hop), servers in list order.
    If no chain covers all blocks, the last position has no hops into it.
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
