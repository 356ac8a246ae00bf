"""How many seeds an interval needs, where their spread is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from testbed.results.intervals import mean_of, t_quantile
from testbed.studies.capacity import seeds
from testbed.studies.capacity.search import RateTrial, SearchResult, search
from testbed.studies.capacity.seeds import WIDE_RATIO, is_wide, runs_needed
from testbed.studies.capacity.verdict import Verdict

EDGE, WIDTH = 2.5, 0.02
DEVIATION = 0.5
"""Standard deviation over seeds of the excess, which is the logarithm of rate / ``EDGE``."""


def judged_by(noise: Sequence[float], share: float = 0.0) -> Callable[[RateTrial], Verdict]:
    def judge(trial: RateTrial) -> Verdict:
        over = mean_of([math.log(trial.rate / EDGE) + each for each in noise], share)
        assert over is not None
        return Verdict(*trial, {"ttft_p95": over}, ratios={"ttft_p95": over.mean}, recorded_share=share)

    return judge


def found_by(judge: Callable[[RateTrial], Verdict]) -> SearchResult:
    steps = search(1.0, 100, 100, WIDTH, True)
    trial = next(steps)
    while True:
        try:
            trial = steps.send(judge(trial))
        except StopIteration as end:
            found: SearchResult = end.value
            return found


def even(n: int) -> list[float]:
    """Noise whose mean is 0 and whose deviation over ``n`` seeds is ``DEVIATION``, exactly."""
    noise = np.linspace(-1, 1, n)
    return list(DEVIATION * noise / np.std(noise, ddof=1))


def least() -> int:
    """The seeds with which EDGE x exp(-h) to EDGE x exp(h) is a third of EDGE, by the interval's formula."""
    h_most = math.asinh(WIDE_RATIO / 2)
    return next(n for n in range(2, 999) if t_quantile(n - 1) * DEVIATION / math.sqrt(n) <= h_most)


@pytest.mark.parametrize("n", [2, 5])
def test_the_seeds_that_a_known_spread_needs_make_the_interval_narrow(n: int) -> None:
    few = found_by(judged_by(even(n)))
    needed = runs_needed(few, n)
    assert needed is not None and is_wide(few)
    assert not is_wide(found_by(judged_by(even(needed))))
    unlucky = {2: 3.95, 5: 1.56}[n]
    """The factor by which a deviation over n seeds is too small in one of five cases."""
    assert least() == 38 and needed == pytest.approx(38 * unlucky**2, rel=0.1)


def test_a_spread_that_is_estimated_by_chance_is_enough_in_four_of_five_cases() -> None:
    rng, enough = np.random.default_rng(0), 0
    for _ in range(100):
        noise = list(rng.normal(0, DEVIATION, 600))
        few = found_by(judged_by(noise[:5]))
        needed = runs_needed(few, 5) if is_wide(few) else 5
        assert needed is not None and 5 <= needed <= 600
        enough += not is_wide(found_by(judged_by(noise[:needed])))
    assert 75 <= enough <= 97


def test_a_narrow_interval_needs_no_more_seeds_and_one_seed_has_none() -> None:
    noise = even(1000)
    assert runs_needed(found_by(judged_by(noise)), 1000) is None
    same = found_by(judged_by([0.0, 0.0]))
    assert not is_wide(same) and runs_needed(same, 2) is None
    assert runs_needed(found_by(judged_by(even(5))), 1) is None


def test_an_end_beyond_the_rates_that_are_tried_is_wide() -> None:
    few = found_by(judged_by([-2.0, 2.0]))
    assert few.low is None and few.high is None and is_wide(few)
    assert runs_needed(few, 2) is not None


def test_seeds_that_draw_from_one_short_recording_are_never_enough() -> None:
    few = found_by(judged_by(even(5), 0.5))
    assert is_wide(few) and runs_needed(few, 5) is None


def test_the_estimate_is_no_more_than_what_makes_it_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "_surely", lambda n: 1.0)
    needed = runs_needed(found_by(judged_by(even(5))), 5)
    assert needed == pytest.approx(least(), abs=2)
