from __future__ import annotations

import math

import pytest

from testbed.results.intervals import Mean, mean_of
from testbed.studies.sweep.axes import parse_over
from testbed.studies.sweep.contrast import Cell, Difference, holm, p_value
from testbed.studies.sweep.documents import _in_latex, difference, markdown, number, rounded
from testbed.studies.sweep.figures import _undominated
from testbed.studies.sweep.runs import Record
from testbed.studies.sweep.table import Row, typed


def cell(policy: str, values: list[float], measure: str = "ttft_s_mean", share: float = 0.0) -> Cell:
    rows = [
        Row({}, policy, seed, Record("k", measures={measure: value}, recorded_share=share))
        for seed, value in enumerate(values)
    ]
    return Cell({}, policy, rows)


def test_differences_are_paired_seed_by_seed() -> None:
    base = cell("a", [10.0, 20.0, 30.0])
    found = cell("b", [9.0, 19.1, 28.9]).against(base, "ttft_s_mean")
    assert found is not None and found.mean == pytest.approx(-1.0)
    assert found.half_width == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-3)
    assert found.ratio == pytest.approx(-0.05) and found.verdict == "better"
    assert difference(found) == "-1.00 ± 0.25 (-5.0 %), better"


@pytest.mark.parametrize(
    ("values", "measure", "verdict"),
    [
        ([11.0, 21.1, 30.9], "ttft_s_mean", "worse"),
        ([11.0, 21.1, 30.9], "tokens_per_s", "better"),
        ([11.0, 21.1, 30.9], "length_fairness_ratio", "more"),
        ([9.0, 18.9, 29.1], "length_fairness_ratio", "less"),
        ([9.0, 21.0, 30.0], "ttft_s_mean", "unresolved"),
        ([10.0, 20.0, 30.0], "ttft_s_mean", "equal"),
    ],
)
def test_a_difference_has_a_verdict_by_its_interval(values: list[float], measure: str, verdict: str) -> None:
    found = cell("b", values, measure).against(cell("a", [10.0, 20.0, 30.0], measure), measure)
    assert found is not None and found.verdict == verdict


def test_rounding_is_no_difference() -> None:
    found = cell("b", [10.0, 20.0 + 4e-15, 30.0]).against(cell("a", [10.0, 20.0, 30.0]), "ttft_s_mean")
    assert difference(found) == "equal"


def test_only_seeds_that_both_have_count_and_one_alone_has_no_interval() -> None:
    found = cell("b", [9.0]).against(cell("a", [10.0, 20.0]), "ttft_s_mean")
    assert found is not None and (found.n, found.mean, found.verdict) == (1, -1.0, None)
    assert math.isnan(found.half_width)
    assert cell("b", []).against(cell("a", [1.0]), "ttft_s_mean") is None


def test_runs_over_one_recording_come_no_closer_than_the_recording() -> None:
    plain, shared = (cell("a", [1.0, 2.0, 3.0], share=share).mean("ttft_s_mean") for share in (0.0, 1.0))
    assert plain is not None and shared is not None
    assert shared.half_width == pytest.approx(2 * plain.half_width)


@pytest.mark.parametrize(
    ("mean", "text"),
    [
        (Mean(12.3456, 0.123, 5), "12.35 ± 0.12"),
        (Mean(1234.5, 120.0, 5), "1234 ± 120"),
        (Mean(0.0123456, 0.00012, 5), "0.01235 ± 0.00012"),
        (Mean(3.0, math.nan, 1), "3"),
        (Mean(3.0, 0.0, 4), "3 ± 0"),
        (Mean(3.0, 1e-7, 4), "3.000 ± 1e-07"),
        (Mean(3.0, 1e-9, 4), "3 ± 0"),
        (None, "-"),
    ],
)
def test_a_number_has_as_many_digits_as_its_interval_gives_a_meaning(mean: Mean | None, text: str) -> None:
    assert number(mean) == text


def test_cells_are_escaped() -> None:
    assert markdown(["|R|"], [["a|b"]]).splitlines() == ["| \\|R\\| |", "| --- |", "| a\\|b |"]


def test_holms_correction_rejects_the_smallest_first_and_ends_at_the_first_that_is_too_large() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == 2  # 0.005 < 0.05 / 4, 0.01 < 0.05 / 3, 0.03 > 0.05 / 2
    assert holm([0.2, 0.001]) == 1 and holm([]) == 0 and holm([0.01, 0.02]) == 2


def test_a_p_value_is_that_of_the_interval() -> None:
    values = [1.0, 2.0, 4.0, 3.5]
    mean = mean_of(values)
    assert mean is not None
    from scipy.stats import ttest_1samp  # here: it takes seconds, and every worker imports every file

    expected = ttest_1samp(values, 0.0).pvalue
    assert p_value(Difference(*mean, None, "better")) == pytest.approx(expected)
    at_the_edge = Difference(1.0, 1.0, 5, None, "unresolved")
    assert p_value(at_the_edge) == pytest.approx(0.05)
    assert p_value(Difference(1.0, math.nan, 1, None, None)) is None


def test_a_column_has_one_type() -> None:
    assert typed([parse_over("a=1,2")])["a"] == {"1": 1, "2": 2}
    assert typed([parse_over("a=1,2.5")])["a"] == {"1": 1.0, "2.5": 2.5}
    assert typed([parse_over("a=1,auto")])["a"] == {"1": "1", "auto": "auto"}
    assert typed([parse_over('a="x",y')])["a"] == {'"x"': "x", "y": "y"}
    assert typed([parse_over("a=true,false")])["a"] == {"true": True, "false": False}


def test_the_front_has_what_no_other_beats() -> None:
    points = [(1.0, 5.0), (2.0, 4.0), (2.0, 6.0), (3.0, 4.5), (3.0, 1.0)]
    assert _undominated(points, ("ttft_s_mean", "tpot_s_mean")) == [(1.0, 5.0), (2.0, 4.0), (3.0, 1.0)]
    assert _undominated(points, ("tokens_per_s", "tpot_s_mean")) == [(3.0, 1.0)]


@pytest.mark.parametrize(
    ("half_width", "text"),
    [(0.03, "2.90 ± 0.03"), (0.00085, "2.90 ± 0.0008"), (0.0, "2.90 ± 0.00"), (math.nan, "2.90")],
)
def test_no_interval_is_rounded_to_nothing_by_the_digits_of_a_study(half_width: float, text: str) -> None:
    assert rounded(Mean(2.9, half_width, 3), 3) == text


@pytest.mark.parametrize(
    ("mean", "text"),
    [
        (Mean(3.0, 1e-7, 4), r"3.000 $\pm$ $1\cdot10^{-7}$"),
        (Mean(3.0, 4e-4, 4), r"3.000 $\pm$ 0.0004"),
        (Mean(-123456.0, math.nan, 1), r"$-1.235\cdot10^{5}$"),
    ],
)
def test_numbers_with_exponents_are_powers_of_ten_in_latex(mean: Mean, text: str) -> None:
    assert _in_latex(number(mean)) == text


def test_a_minus_is_no_hyphen_in_latex() -> None:
    found = Difference(-2.7, 3.1, 4, -0.476, "unresolved")
    assert _in_latex(difference(found)) == r"$-$2.7 $\pm$ 3.1 ($-$47.6 \%), unresolved"
