from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest

from testbed.studies.advise import search
from testbed.studies.advise.candidates import Counts
from testbed.studies.advise.search import Score, Search, combinations, everything, greedy


def found(asking: Search, score: Callable[[Counts], Score]) -> tuple[Counts, set[Counts]]:
    """The answer, and all that was asked for."""
    known: dict[Counts, Score] = {}
    wanted = next(asking)
    while True:
        known |= {counts: score(counts) for counts in wanted}
        try:
            wanted = asking.send(known)
        except StopIteration as end:
            return end.value, set(known)


def value(of: Callable[[Counts], float], limit: float = float("-inf")) -> Callable[[Counts], Score]:
    return lambda counts: Score(of(counts) <= limit, 0.0, 0.0, of(counts))


def exact(costs: list[Fraction], budget: int, score: Callable[[Counts], Score], *, stops: bool) -> Counts:
    paid = combinations(costs, Fraction(budget), 1000)
    assert paid is not None
    return found(everything(costs, paid, stops=stops), score)[0]


def test_all_that_a_budget_pays_is_counted_exactly() -> None:
    costs = [Fraction("3.5"), Fraction("0.5")]
    paid = combinations(costs, Fraction(4), 11)
    assert paid is not None and set(paid) == {(0, n) for n in range(9)} | {(1, 0), (1, 1)}
    assert combinations(costs, Fraction(4), 10) is None
    assert combinations([Fraction("0.1")], Fraction("0.3"), 9) == [(0,), (1,), (2,), (3,)]


def test_of_candidates_for_the_same_link_one_is_chosen_once() -> None:
    costs, once = [Fraction(1)] * 3, ["up", "up", None]
    paid = combinations(costs, Fraction(2), 100, once)
    assert paid is not None and set(paid) == {(0, 0, 0), (0, 0, 1), (0, 0, 2)} | {
        (*link, n) for link in ((1, 0), (0, 1)) for n in (0, 1)
    }
    best, asked = found(greedy(costs, Fraction(3), once), value(lambda counts: -float(sum(counts))))
    assert sum(best) == 3 and best[2] >= 2 and all(sum(counts[:2]) <= 1 for counts in asked)


def test_two_of_the_smaller_kind_beat_one_of_the_larger() -> None:
    """A (cost 3) takes 50 off, B (cost 2) 30: for 4, A leaves 50 of 100, and two B leave 40."""
    costs, score = [Fraction(3), Fraction(2)], value(lambda counts: 100 - 50 * counts[0] - 30 * counts[1])
    assert exact(costs, 4, score, stops=False) == (0, 2)
    assert found(greedy(costs, Fraction(4)), score)[0] == (0, 2)


def pair_or_three(counts: Counts) -> float:
    """A takes 1 off each; the second B takes 50 off; the third C 90."""
    return 100 - counts[0] - 50 * (counts[1] >= 2) - 90 * (counts[2] >= 3)


def test_what_only_helps_in_pairs_takes_a_look_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, score = [Fraction(1)] * 3, value(pair_or_three)
    assert exact(costs, 2, score, stops=False) == (0, 2, 0)
    assert found(greedy(costs, Fraction(2)), score)[0] == (0, 2, 0)
    monkeypatch.setattr(search, "LOOK_AHEAD", 1)
    assert found(greedy(costs, Fraction(2)), score)[0] == (2, 0, 0)


def test_what_only_helps_in_threes_is_found_by_trying_all() -> None:
    costs, score = [Fraction(1)] * 3, value(pair_or_three)
    assert exact(costs, 3, score, stops=False) == (0, 0, 3)
    assert found(greedy(costs, Fraction(3)), score)[0] == (1, 2, 0)


def test_objectives_are_reached_for_the_least_cost_and_nothing_dearer_is_tried() -> None:
    """Needed: 5 of 3 a A (cost 2) and 2 a B (cost 1). B, B, B costs 3, as A, B does; A, A costs 4."""
    costs, score = [Fraction(2), Fraction(1)], value(lambda counts: 5 - 3 * counts[0] - 2 * counts[1], 0)
    paid = combinations(costs, Fraction(6), 100)
    assert paid is not None
    best, asked = found(everything(costs, paid, stops=True), score)
    assert best == (0, 3), "of those that cost as little the lower value: -1 against 0"
    assert asked == {(0, n) for n in range(4)} | {(1, 0), (1, 1)}
    assert found(greedy(costs, Fraction(6)), score)[0] in ((0, 3), (1, 1))


def test_what_is_not_needed_is_taken_away_again() -> None:
    """By gain A (50 off) comes first; B and C, of 60 off together, do without it."""
    costs = [Fraction(3), Fraction(4), Fraction(4)]

    def left(counts: Counts) -> float:
        a, b, c = (min(n, 1) for n in counts)
        return 100 - max(50 * a + 10 * b, 100 * (b and c))

    best, _ = found(greedy(costs, Fraction(11)), value(left, 0))
    assert best == (0, 1, 1)


def test_the_greedy_search_goes_on_where_a_placement_needs_several_servers_more() -> None:
    def score(counts: Counts) -> Score:
        is_placed = counts[0] >= 4
        return Score(False, 0.0 if is_placed else 1.0, 0.0 if is_placed else float("inf"), 1.0)

    assert found(greedy([Fraction(1)], Fraction(9)), score)[0] == (4,)


def test_the_greedy_search_ends_where_nothing_has_a_placement() -> None:
    best, asked = found(
        greedy([Fraction(1)], Fraction(10**9)), lambda counts: Score(False, 1.0, math.inf, math.inf)
    )
    assert best == (0,) and len(asked) < 100


def test_of_equals_the_cheapest_and_rounding_makes_no_difference() -> None:
    assert exact([Fraction(1)], 3, value(lambda counts: 1.0 - 1e-12 * counts[0]), stops=False) == (0,)
    assert found(greedy([Fraction(1)], Fraction(3)), value(lambda counts: 1.0 - 1e-12 * counts[0]))[0] == (0,)
