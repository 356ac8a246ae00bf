"""The arithmetic of a score."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.studies.score.marks import (
    MOST_RATIO,
    Best,
    Figures,
    best_of,
    percentile,
    score_of,
)

BEST = Best(met_ratio=0.8, given_up_ratio=0.0, ttft_rate=0.5, tpot_rate=4.0)


def figures(
    met: float = 0.8, given_up: float = 0.0, ttft: float | None = 2.0, tpot: float | None = 0.25
) -> Figures:
    return Figures(met, met, given_up, ttft, tpot, tpot)


def test_a_policy_as_good_as_the_best_in_everything_has_the_score_1() -> None:
    assert score_of(figures(), BEST) == pytest.approx(1)


def test_goodput_counts_half_and_each_percentile_a_quarter() -> None:
    assert score_of(figures(met=0.4), BEST) == pytest.approx(0.75)
    assert score_of(figures(ttft=4.0), BEST) == pytest.approx(0.875)
    assert score_of(figures(tpot=0.5), BEST) == pytest.approx(0.875)


def test_times_that_more_than_one_request_in_twenty_does_not_have_count_nothing() -> None:
    assert score_of(figures(given_up=0.1, ttft=None, tpot=None), BEST) == pytest.approx(0.5)


def test_requests_that_are_given_up_cost_of_the_part_for_times_what_no_percentile_sees() -> None:
    assert score_of(figures(given_up=0.01), BEST) == pytest.approx(0.5 + 0.5 * 0.8)
    assert score_of(figures(given_up=0.05), BEST) == pytest.approx(0.5)
    allowed = Best(0.8, 0.05, 0.5, 4.0)
    assert score_of(figures(given_up=0.05), allowed) == pytest.approx(1), "the references gave up as many"


def test_one_figure_counts_at_most_twice() -> None:
    assert score_of(figures(ttft=1e-6), BEST) == pytest.approx(0.75 + 0.25 * MOST_RATIO)


def test_where_no_reference_meets_the_objective_none_is_enough() -> None:
    nobody = Best(0.0, 0.0, 0.5, 4.0)
    assert score_of(figures(met=0.0), nobody) == pytest.approx(1)
    assert score_of(figures(met=0.1), nobody) == pytest.approx(1 + 0.5 * (MOST_RATIO - 1))


def test_the_best_is_taken_figure_by_figure_over_means_of_seeds() -> None:
    best = best_of(
        {
            "a": [figures(0.9, 0.0, 4.0, 0.5), figures(0.7, 0.02, 4.0, 0.5)],
            "b": [figures(0.1, 0.2, None, None), figures(0.2, 0.0, 1.0, 0.1)],
            "cannot": [],
        }
    )
    assert best.met_ratio == pytest.approx(0.8)
    assert best.given_up_ratio == pytest.approx(0.01)
    assert best.ttft_rate == pytest.approx(0.5)
    assert best.tpot_rate == pytest.approx(5.0)


@given(
    st.lists(st.floats(0.001, 1000), max_size=60),
    st.integers(0, 20),
    st.sampled_from([0.5, 0.9, 0.95, 0.99]),
)
def test_a_percentile_is_the_smallest_value_that_its_share_does_not_exceed(
    values: list[float], n_missing: int, share: float
) -> None:
    found = percentile(values, n_missing, share)
    all_values = [*values, *([inf] * n_missing)]
    if not all_values:
        assert found is None
        return
    limit = inf if found is None else found
    n = len(all_values)
    assert sum(value <= limit for value in all_values) >= share * n - 1e-9
    assert sum(value < limit for value in all_values) < share * n


@given(
    st.lists(st.floats(0.01, 100), min_size=20, max_size=80),
    st.integers(1, 20),
    st.floats(1, 50),
)
def test_giving_up_requests_never_raises_a_score_unless_others_gain(
    ttfts_s: list[float], n_given_up: int, limit_s: float
) -> None:
    """With the times of the others as they are, a policy loses by every request that it does not serve."""

    def score(given_up: int) -> float:
        # The latest are given up: those that a cheat would choose.
        served = sorted(ttfts_s)[: len(ttfts_s) - given_up]
        p95_s = percentile(served, given_up, 0.95)
        met = sum(value <= limit_s for value in served) / len(ttfts_s)
        return score_of(Figures(met, met, given_up / len(ttfts_s), p95_s, p95_s, p95_s), BEST)

    n_given_up = min(n_given_up, len(ttfts_s))
    assert score(n_given_up) <= score(0) + 1e-12
