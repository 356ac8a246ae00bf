from __future__ import annotations

import itertools
import math

import pytest

from policies.ablations import OptimizedNumber, OptimizedOrder
from policies.cgbp import CgBp
from policies.design import choose_design_concurrency
from policies.interfaces import PlacementPolicy
from policies.petals import PetalsPlacement
from testbed.results.intervals import mean_of, t_quantile
from testbed.studies.reproduce.breakdown import break_down, shapley
from testbed.studies.reproduce.runs import Results, changed, run_task, task_of
from testbed.studies.reproduce.settings import CLOSEST, PLACES, STATED, SWEEPS, TOPOLOGIES, settings_of
from testbed.studies.reproduce.sweeps import run_time_lines
from testbed.studies.reproduce.windows import place_with
from testbed.studies.sweep.runs import Measures, Record, Setup, case_of


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (19, 2.093), (120, 1.980)]
)
def test_quantiles_of_students_t_are_those_of_the_printed_tables(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=5e-4)


def test_the_confidence_interval_is_what_a_hand_computes() -> None:
    mean = mean_of([1.0, 2.0, 4.0, 5.0])
    assert mean is not None
    # squares of deviations 4 + 1 + 1 + 4; t with 3 degrees of freedom is 3.1824
    assert mean.mean == 3.0
    assert mean.half_width == pytest.approx(3.182446 * math.sqrt(10 / 3) / 2, rel=1e-6)
    assert mean.n == 4


def test_one_run_has_no_interval_and_no_run_no_mean() -> None:
    alone = mean_of([2.0])
    assert alone is not None and alone.mean == 2.0 and math.isnan(alone.half_width)
    assert mean_of([]) is None


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("steps", "policy"),
    [
        ((), PetalsPlacement()),
        (("order",), OptimizedOrder()),
        (("number",), OptimizedNumber()),
        (("order", "number", "windows"), CgBp()),
    ],
    ids=["petals", "order", "number", "all"],
)
def test_the_steps_from_petals_to_cg_bp_pass_through_the_policies_of_that_name(
    place: str, steps: tuple[str, ...], policy: PlacementPolicy
) -> None:
    for seed in range(3):
        problem = case_of(Setup(""), STATED.cells[place, 3].run(seed)).experiment.problem
        concurrency = choose_design_concurrency(problem).value
        ours, theirs = place_with(problem, steps, concurrency), policy.place(problem)
        assert ours.ranges == theirs.ranges
        assert ours.cache_bytes == theirs.cache_bytes


def test_a_run_with_all_changes_is_the_proposed_policy_and_with_none_petals(one_result: Measures) -> None:
    for policy, on, setup in (
        ("petals", (), "petals"),
        ("proposed", ("order", "number", "windows", "routing"), "proposed"),
    ):
        for own, of_policy in ((setup, "reference"), ("none", "none")):
            time_s = one_result[f"{changed(on)}/{own}/per_token_s"]
            assert time_s == one_result[f"{policy}/{of_policy}/per_token_s"]


def test_a_run_is_the_same_every_time_but_for_the_time_that_deciding_takes(one_result: Measures) -> None:
    again = run_task(task_of(CLOSEST.cells["Cluster0", 0], 1)).measures
    assert list(again) == list(one_result)
    for name, value in again.items():
        if name.endswith("/decision_s"):
            assert value is not None and value > 0
        else:
            assert value == one_result[name]


def test_the_best_design_concurrency_in_hindsight_is_no_worse_than_any_other_choice(
    one_result: Measures,
) -> None:
    for setup in ("reference", "none"):
        times_s = [
            one_result[f"{choice}/{setup}/per_token_s"] or 0.0
            for choice in ("formula", "formula+setup", "one", "bound", "searched", "hindsight")
        ]
        assert times_s[-1] == min(times_s) > 0


def test_shares_of_two_changes_are_what_a_hand_computes() -> None:
    worth_s = {
        frozenset[str](): 10.0,
        frozenset("a"): 7.0,
        frozenset("b"): 9.0,
        frozenset("ab"): 2.0,
    }
    shares = shapley("ab", worth_s.__getitem__)
    assert shares["a"] == ((3.0 + 7.0) / 2, 3.0, 7.0)
    assert shares["b"] == ((1.0 + 5.0) / 2, 1.0, 5.0)


def test_shares_add_up_to_the_whole_gain_whatever_the_numbers() -> None:
    factors = "abcd"
    subsets = [frozenset(c) for n in range(5) for c in itertools.combinations(factors, n)]
    worth_s = {on: math.sin(7 * i) for i, on in enumerate(subsets)}
    total = sum(share.mean_s for share in shapley(factors, worth_s.__getitem__).values())
    assert total == pytest.approx(worth_s[frozenset()] - worth_s[frozenset(factors)])


def test_every_order_of_changes_leads_from_petals_to_proposed(one_result: Measures) -> None:
    for with_setup in (True, False):
        breakdown = break_down([one_result], with_setup=with_setup)
        assert breakdown is not None
        gain_s = breakdown.before_s - breakdown.after_s
        assert gain_s > 0
        for saved in breakdown.paths.values():
            assert sum(saved) == pytest.approx(gain_s)
        assert ("setup" in breakdown.shares) is with_setup


def test_runs_without_every_placement_do_not_count_in_a_breakdown(one_result: Measures) -> None:
    without = {name: value for name, value in one_result.items() if not name.startswith("changed+order/")}
    breakdown = break_down([one_result, without], with_setup=True)
    assert breakdown is not None and (breakdown.n_runs, breakdown.n_all) == (1, 2)
    assert break_down([without], with_setup=True) is None


def test_the_run_times_of_every_policy_stand_along_every_sweep(one_result: Measures) -> None:
    settings = settings_of("figures")
    keys = [task_of(setting, seed).key for setting in settings for seed in (0, 1)]
    results = Results({key: Record(key, measures=one_result) for key in keys}, settings, (0, 1))
    text = "\n".join(run_time_lines(results)).splitlines()
    assert [line for line in text if line.startswith("## ")] == [f"## {sweep.title}" for sweep in SWEEPS]
    rows = [line for line in text if line.startswith(tuple(f"| {place} |" for place in TOPOLOGIES))]
    assert len(rows) == sum(len(points) for sweep in SWEEPS for points in sweep.points.values())
    took_s = one_result["proposed/reference/decision_s"]
    assert took_s is not None
    took_ms = took_s * 1e3
    assert all(f"{took_ms:.1f}" in row for row in rows)
