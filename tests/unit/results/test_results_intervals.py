"""Intervals over runs: calculated by hand; and how often they contain the true mean, with a fixed seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from testbed.experiments.draws import Draw, drawn
from testbed.results.intervals import mean_of

N_RECORDINGS, N_RECORDED, N_RUNS, TRUE_MEAN = 300, 400, 20, 100.0


def recording(rng: random.Random, n: int, correlation: float) -> list[list[int | float]]:
    """Requests whose lengths depend on each other: an AR(1) process around the true mean; ``correlation`` is of neighbours."""
    rows: list[list[int | float]] = []
    off = rng.gauss(0, 10)
    for index in range(n):
        off = correlation * off + rng.gauss(0, 10 * math.sqrt(1 - correlation**2))
        rows.append([float(index), TRUE_MEAN + off])
    return rows


def coverage(n: int, n_runs: int, draw: Draw, share: float, correlation: float = 0.5) -> float:
    """In how many of the recordings the interval over runs, each the mean of ``n`` requests, holds the true mean."""
    rng = random.Random(11)
    n_held = 0
    for _ in range(N_RECORDINGS):
        rows = recording(rng, N_RECORDED, correlation)
        values = []
        for seed in range(n_runs):
            taken, *_ = drawn(rows, n, draw, seed, rng)
            values.append(math.fsum(row[1] for row in taken) / n)
        found = mean_of(values, share)
        assert found is not None
        n_held += abs(found.mean - TRUE_MEAN) <= found.half_width
    return n_held / N_RECORDINGS


def test_three_values_have_the_interval_of_a_hand_calculation() -> None:
    found = mean_of([1.0, 2.0, 6.0])
    # s^2 = (4 + 1 + 9) / 2 = 7; t of 2 degrees is 4.30265; 4.30265 * sqrt(7 / 3) = 6.5724
    assert found is not None and found.mean == 3.0 and found.half_width == pytest.approx(6.5724, abs=1e-4)


def test_runs_that_share_a_recording_count_for_no_more_than_it() -> None:
    wide, narrow = mean_of([1.0, 2.0, 6.0], 1.0), mean_of([1.0, 2.0, 6.0])
    # s^2 (1/3 + 1) in place of s^2 / 3: twice as wide
    assert wide is not None and narrow is not None
    assert wide.half_width == pytest.approx(2 * narrow.half_width)


def test_intervals_over_windows_hold_the_true_mean_as_often_as_they_say() -> None:
    assert 0.92 <= coverage(40, 10, "windows", 0.0) <= 0.98


@pytest.mark.parametrize("n", [100, 400])
def test_intervals_over_a_bootstrap_hold_the_true_mean_as_often_as_they_say(n: int) -> None:
    assert 0.90 <= coverage(n, N_RUNS, "bootstrap", n / N_RECORDED) <= 0.98


@pytest.mark.parametrize(("correlation", "lowest", "highest"), [(0.0, 0.93, 0.97), (0.9, 0.70, 0.82)])
def test_intervals_over_a_bootstrap_hold_the_true_mean_less_often_the_further_requests_depend_on_each_other(
    correlation: float, lowest: float, highest: float
) -> None:
    assert lowest <= coverage(40, N_RUNS, "bootstrap", 40 / N_RECORDED, correlation) <= highest


def test_an_interval_that_takes_draws_from_one_recording_for_samples_does_not_hold() -> None:
    assert coverage(400, N_RUNS, "bootstrap", 0.0) < 0.5


@pytest.mark.parametrize(
    ("draw", "true_mean", "expected"),
    [
        (lambda rng: rng.gauss(1, 1), 1.0, 0.95),
        (lambda rng: rng.expovariate(1), 1.0, 0.90),
        (lambda rng: rng.lognormvariate(0, 1), math.exp(0.5), 0.81),
        (lambda rng: float(rng.random() < 0.1), 0.1, 0.41),
    ],
    ids=["normal", "exponential", "lognormal", "rare"],
)
def test_intervals_over_five_runs_hold_the_true_mean_as_often_as_the_page_on_statistics_says(
    draw: Callable[[random.Random], float], true_mean: float, expected: float
) -> None:
    rng, n_held = random.Random(3), 0
    for _ in range(2000):
        found = mean_of([draw(rng) for _ in range(5)])
        assert found is not None
        n_held += abs(found.mean - true_mean) <= found.half_width
    assert n_held / 2000 == pytest.approx(expected, abs=0.03)
