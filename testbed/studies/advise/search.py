"""Searches for the best combination of candidates within a budget: exhaustive, or greedy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations_with_replacement, groupby
from typing import NamedTuple

from testbed.studies.advise.candidates import Counts

LOOK_AHEAD = 2
"""A step of the greedy search adds at most so many servers."""
MOST_BLIND = 20
"""While no placement exists, the greedy search makes at most so many steps that improve nothing."""


class Score(NamedTuple):
    """The score of a combination; lower numbers are better. ``is_reached``: it keeps all objectives.

    ``n_without``: share of the seeds that have no placement. ``n_failed``: number of requests that fail, mean
    over seeds. ``value``: the metric to lower, in seconds, or the largest ratio by which an objective exceeds
    its limit.
    """

    is_reached: bool
    n_without: float
    n_failed: float
    value: float

    @property
    def badness(self) -> tuple[float, float, float]:
        """The numbers in the order of their weight. ``value`` has nine digits, so that rounding errors do not
        count.
        """
        return self.n_without, self.n_failed, float(f"{self.value:.9g}")


Search = Generator[Sequence[Counts], Mapping[Counts, Score], Counts]
"""A generator: it yields combinations to judge, is sent the scores of all judged so far, and returns the best
one.
"""


def cost_of(costs: Sequence[Fraction], counts: Counts) -> Fraction:
    return sum((cost * n for cost, n in zip(costs, counts, strict=True)), Fraction(0))


def combinations(
    costs: Sequence[Fraction], budget: Fraction, most: int, once: Sequence[Hashable] = ()
) -> list[Counts] | None:
    """Returns all combinations that the budget pays, sorted by cost, the first without additions.

    Returns None if they are more than ``most``. ``once``: of all candidates with the same value only one can
    be chosen, and only once; None, or nothing at all, for candidates of which there may be any number.
    """
    found = []
    for counts in _paid(costs, budget, tuple(once) or (None,) * len(costs)):
        found.append(counts)
        if len(found) > most:
            return None
    return sorted(found, key=lambda counts: (cost_of(costs, counts), counts))


def _paid(costs: Sequence[Fraction], budget: Fraction, once: tuple[Hashable, ...]) -> Iterator[Counts]:
    if not costs:
        yield ()
        return
    n_most = budget // costs[0]
    for n in range((n_most if once[0] is None else min(n_most, 1)) + 1):
        for others in _paid(costs[1:], budget - n * costs[0], once[1:]):
            counts = (n, *others)
            if _can_be(counts, once):
                yield counts


def _can_be(counts: Counts, once: Sequence[Hashable]) -> bool:
    """Returns whether nothing is chosen more than once that can be chosen only ``once``."""
    chosen = Counter[Hashable]()
    for key, n in zip(once, counts, strict=True):
        if key is not None:
            chosen[key] += n
    return all(n <= 1 for n in chosen.values())


def everything(costs: Sequence[Fraction], all_paid: Sequence[Counts], *, stops: bool) -> Search:
    """The exhaustive search: judges all combinations.

    ``stops``: they are judged in the order of their cost, and the search ends at the first cost for which one
    keeps all objectives.
    """
    levels = [list(level) for _, level in groupby(all_paid, key=lambda counts: cost_of(costs, counts))]
    known: Mapping[Counts, Score] = {}
    for asked in levels if stops else [all_paid]:
        known = yield asked
        if any(known[counts].is_reached for counts in asked):
            break
    return best_of(costs, {counts: known[counts] for counts in all_paid if counts in known})


def greedy(costs: Sequence[Fraction], budget: Fraction, once: Sequence[Hashable] = ()) -> Search:
    """The greedy search: adds the one or two candidates that improve most, until nothing improves.

    It does this twice, by gain per cost and by gain. Then it tries to remove them again, one by one. It
    returns the best of all combinations that were judged. ``once``: as in ``combinations``.
    """
    once = tuple(once) or (None,) * len(costs)
    none: Counts = (0,) * len(costs)
    known = yield [none]
    for is_per_cost in (True, False):
        at, n_blind = none, 0
        while not known[at].is_reached:
            more = [
                counts
                for counts in _extensions(at)
                if cost_of(costs, counts) <= budget and _can_be(counts, once)
            ]
            if more:
                known = yield more
            better = [counts for counts in more if _is_better(known[counts], known[at])]
            if not better and known[at].n_without and n_blind < MOST_BLIND:
                better, n_blind = more, n_blind + 1  # several servers may be needed for a first placement
            if not better:
                break
            at = max(better, key=lambda counts: _gain(costs, known, at, counts, is_per_cost))
    while True:
        best = best_of(costs, {c: score for c, score in known.items() if cost_of(costs, c) <= budget})
        fewer = [counts for counts in without_one(best) if counts not in known]
        if not fewer:
            return best
        known = yield fewer


def best_of(costs: Sequence[Fraction], known: Mapping[Counts, Score]) -> Counts:
    """Returns the cheapest combination that keeps all objectives, or else the least bad one; of equals the
    cheapest.
    """

    def rank(counts: Counts) -> tuple[object, ...]:
        score, cost = known[counts], cost_of(costs, counts)
        return (0, cost, score.badness, counts) if score.is_reached else (1, score.badness, cost, counts)

    return min(known, key=rank)


def without_one(counts: Counts) -> list[Counts]:
    """Returns the combinations with one server less."""
    return [one_less(counts, i) for i, n in enumerate(counts) if n]


def one_less(counts: Counts, i: int) -> Counts:
    return (*counts[:i], counts[i] - 1, *counts[i + 1 :])


def _extensions(at: Counts) -> Iterator[Counts]:
    for n_more in range(1, LOOK_AHEAD + 1):
        for added in combinations_with_replacement(range(len(at)), n_more):
            yield tuple(n + added.count(i) for i, n in enumerate(at))


def _is_better(one: Score, other: Score) -> bool:
    return one.is_reached or one.badness < other.badness


def _gain(
    costs: Sequence[Fraction], known: Mapping[Counts, Score], at: Counts, to: Counts, is_per_cost: bool
) -> tuple[object, ...]:
    """Returns a key by which steps from ``at`` to ``to`` are compared; the best step has the largest one.

    Of steps with equal gains the cheapest is best if ``is_per_cost``, else the dearest: dearer servers can do
    more.
    """
    cost = cost_of(costs, to) - cost_of(costs, at)
    by = float(cost) if is_per_cost else 1.0
    gains = [_less(a, b) / by for a, b in zip(known[at].badness, known[to].badness, strict=True)]
    return known[to].is_reached, *gains, -cost if is_per_cost else cost


def _less(before: float, after: float) -> float:
    return 0.0 if math.isinf(before) and math.isinf(after) else before - after
