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
from testbed.scenario import load_experiment
from testbed.studies.reproduce.breakdown import break_down, shapley
from testbed.studies.reproduce.runs import problem_of, run_setting
from testbed.studies.reproduce.settings import CLOSEST, PLACES, STATED
from testbed.studies.reproduce.windows import place_with


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
        setting = STATED.cells[place, 3]
        problem = problem_of(setting, load_experiment(setting.scenario, setting.changes(seed)))
        concurrency = choose_design_concurrency(problem).value
        ours, theirs = place_with(problem, steps, concurrency), policy.place(problem)
        assert ours.ranges == theirs.ranges
        assert ours.cache_bytes == theirs.cache_bytes


def test_a_run_with_all_changes_is_the_proposed_policy_and_with_none_petals(one_result: dict) -> None:
    times_s = {(tuple(row["on"]), row["setup"]): row["per_token_s"] for row in one_result["factors"]}
    policies_s = {(row["policy"], row["setup"]): row["per_token_s"] for row in one_result["policies"]}
    everything = ("order", "number", "windows", "routing")
    assert times_s[(), "petals"] == policies_s["petals", "reference"]
    assert times_s[(), "none"] == policies_s["petals", "none"]
    assert times_s[everything, "proposed"] == policies_s["proposed", "reference"]
    assert times_s[everything, "none"] == policies_s["proposed", "none"]


def test_a_run_is_the_same_every_time_but_for_the_time_that_deciding_takes(one_result: dict) -> None:
    again = run_setting(CLOSEST.cells["Cluster0", 0], 1)
    for result in (one_result, again):
        assert all(row["decision_s"] > 0 for row in result["policies"])
    for kind in one_result:
        pairs = zip(one_result[kind], again[kind], strict=True)
        assert all({**a, "decision_s": 0} == {**b, "decision_s": 0} for a, b in pairs)


def test_the_best_design_concurrency_in_hindsight_is_no_worse_than_any_other_choice(one_result: dict) -> None:
    for setup in ("reference", "none"):
        rows = {r["choice"]: r["per_token_s"] for r in one_result["concurrencies"] if r["setup"] == setup}
        assert set(rows) == {"formula", "formula+setup", "one", "bound", "searched", "hindsight"}
        assert rows["hindsight"] == min(rows.values())


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


def test_every_order_of_changes_leads_from_petals_to_proposed(one_result: dict) -> None:
    for with_setup in (True, False):
        breakdown = break_down([one_result], with_setup=with_setup)
        assert breakdown is not None
        gain_s = breakdown.before_s - breakdown.after_s
        assert gain_s > 0
        for saved in breakdown.paths.values():
            assert sum(saved) == pytest.approx(gain_s)
        assert ("setup" in breakdown.shares) is with_setup


def test_runs_without_every_placement_do_not_count_in_a_breakdown(one_result: dict) -> None:
    without = {"factors": [*one_result["factors"][:-1], {"on": ["order"], "infeasible": "no room"}]}
    breakdown = break_down([one_result, without], with_setup=True)
    assert breakdown is not None and (breakdown.n_runs, breakdown.n_all) == (1, 2)
    assert break_down([without], with_setup=True) is None
