"""Draws small changes of a placement, for local search, that keep to memory and hold every block."""

from __future__ import annotations

import random
from collections.abc import Sequence

from policies.greedy import block_counts
from policies.problem import BlockRange, Problem

Ranges = tuple[BlockRange, ...]


class Neighbours:
    """Draws changed ranges.

    A server holds at most ``most[j]`` blocks; by default as many as leave cache for one session.
    """

    def __init__(self, problem: Problem, rng: random.Random, most: Sequence[int] | None = None) -> None:
        self._rng = rng
        self._n_blocks = problem.model.n_blocks
        self._most = block_counts(problem, 1) if most is None else most
        self._able = [j for j, most in enumerate(self._most) if most]

    def draw(self, ranges: Ranges) -> Ranges | None:
        """Returns changed ranges that still hold every block, or ``None`` if the draw is invalid or no change.

        Half of the draws put one server's range at an end of another one's (so that chains can continue
        there), with its number of blocks or any other. A quarter moves one end of one range, and a quarter
        moves an end that several ranges share.
        """
        rng, new = self._rng, list(ranges)
        kind = rng.random()
        if kind < 0.5:
            j = rng.choice(self._able)
            count = rng.randint(1, self._most[j])
            if ranges[j].n_blocks and rng.random() < 0.5:
                count = ranges[j].n_blocks
            end = rng.choice(self._ends(ranges))
            first = end if rng.random() < 0.5 else end - count
            first = min(max(first, 0), self._n_blocks - count)
            new[j] = BlockRange(first, first + count)
        else:
            end = rng.choice(self._ends(ranges))
            to = end + rng.choice((-3, -2, -1, 1, 2, 3))
            touching = [j for j in self._able if ranges[j].n_blocks and end in ranges[j]]
            for j in [rng.choice(touching)] if kind < 0.75 else touching:
                first, last = ranges[j]
                new[j] = BlockRange(to, last) if first == end else BlockRange(first, to)
        moved = tuple(new)
        return moved if moved != ranges and self._valid(moved) else None

    def with_border(self, ranges: Ranges, left: int, right: int, by: int) -> Ranges | None:
        """Returns ranges in which the server ``right`` begins where ``left`` ends, ``by`` blocks later than it ended.

        ``None``: they would not hold every block, or too many of them.
        """
        new, end = list(ranges), ranges[left].last + by
        new[left], new[right] = BlockRange(ranges[left].first, end), BlockRange(end, ranges[right].last)
        return tuple(new) if self._valid(tuple(new)) else None

    def _ends(self, ranges: Ranges) -> Sequence[int]:
        return sorted({end for held in ranges if held.n_blocks for end in held})

    def _valid(self, ranges: Ranges) -> bool:
        covered: set[int] = set()
        for held, most in zip(ranges, self._most, strict=True):
            if not 0 <= held.first <= held.last <= self._n_blocks or held.n_blocks > most:
                return False
            covered.update(range(held.first, held.last))
        return len(covered) == self._n_blocks
