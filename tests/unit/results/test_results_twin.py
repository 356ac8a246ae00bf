"""The errors of a run in real time against its twin, of requests or of distributions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nodes.records import Cancelled, Completed, Failed
from testbed.records.summary import ErrorFigures
from testbed.results import read_tables
from testbed.results.errors import DISTRIBUTIONS, REQUESTS, error, twin_errors, twin_metrics
from testbed.results.served import compared
from tests.unit.results.conftest import SyntheticRun, make_experiment, perfect_hop

CHAIN = [(0, 0, 4)]


def tables(
    path: Path, waits_s: Sequence[float], slow_s: float = 0.0, order: Sequence[int] | None = None
) -> Any:
    """Requests that arrive at 0, 1, ... s, wait as long as given, and take ``slow_s`` longer per token.

    ``order``: their numbers, in the order of arrival.
    """
    experiment = make_experiment([(2, 2)] * len(waits_s))
    run = SyntheticRun(path, experiment)
    for place, (index, wait_s) in enumerate(zip(order or range(len(waits_s)), waits_s, strict=True)):
        at_s = place + wait_s
        run.arrive(index, float(place))
        run.admit(index, CHAIN, at_s, at_s + 0.1)
        first = perfect_hop(0, 0, 4, at_s + 0.1, 2, prompt=True)
        ready_s = run.token(index, 0, at_s + 0.1, [first], first[6] + slow_s)
        last = perfect_hop(0, 0, 4, ready_s)
        run.log(Completed(index, run.token(index, 1, ready_s, [last], last[6] + slow_s)))
    return read_tables(path, experiment)


def test_a_run_like_its_twin_has_no_error(tmp_path: Path) -> None:
    errors, pairing = twin_errors(tables(tmp_path / "a", [0, 3]), tables(tmp_path / "b", [0, 3]))
    assert pairing == REQUESTS
    assert all(set(dict(found).values()) == {0.0} for found in errors.values())


def test_a_late_token_is_an_error_of_token_hop_and_request(tmp_path: Path) -> None:
    errors, _ = twin_errors(tables(tmp_path / "a", [0, 3], slow_s=0.034), tables(tmp_path / "b", [0, 3]))
    assert errors["token_gap_s"]["mean_abs_ratio"] == pytest.approx(0.1)  # of 0.34
    assert errors["token_gap_s"]["mean_ratio"] == pytest.approx(0.1)
    assert errors["hop_s"]["max_abs_ratio"] == pytest.approx(0.1)
    assert errors["e2e_s"]["mean_abs_s"] == pytest.approx(0.068)
    assert errors["queue_s"]["mean_abs_ratio"] == 0


def test_a_queue_that_lateness_made_is_an_error_although_the_run_itself_measured_it(tmp_path: Path) -> None:
    errors, pairing = twin_errors(tables(tmp_path / "a", [0, 4]), tables(tmp_path / "b", [0, 3]))
    assert pairing == REQUESTS
    assert errors["queue_s"]["mean_ratio"] == pytest.approx(1 / 3)  # 4 s where it should have been 3
    assert errors["queue_s"]["mean_abs_s"] == pytest.approx(0.5)
    assert errors["ttft_s"]["mean_abs_ratio"] > 0.1
    assert errors["tpot_s"]["mean_abs_ratio"] == pytest.approx(0, abs=1e-9)


def test_a_queue_where_the_twin_has_none_has_no_ratio_but_seconds(tmp_path: Path) -> None:
    errors, _ = twin_errors(tables(tmp_path / "a", [0, 0.5]), tables(tmp_path / "b", [0, 0]))
    assert errors["queue_s"]["mean_abs_ratio"] is None
    assert errors["queue_s"]["mean_abs_s"] == pytest.approx(0.25)


def test_admissions_in_another_order_are_compared_as_distributions(tmp_path: Path) -> None:
    """Request 1 overtakes request 0: each has the other's queue, and nobody waits longer than in the twin."""
    errors, pairing = twin_errors(tables(tmp_path / "a", [4, 0]), tables(tmp_path / "b", [0, 4]))
    assert pairing == DISTRIBUTIONS
    assert errors["queue_s"]["mean_abs_ratio"] == 0
    assert errors["e2e_s"]["mean_abs_ratio"] == pytest.approx(0, abs=1e-9)


def test_a_request_from_outside_is_compared_with_itself_although_the_twin_numbers_by_arrival(
    tmp_path: Path,
) -> None:
    """The last of the run's three came from outside, before the workload's second."""
    run = tables(tmp_path / "a", [0, 3, 0], slow_s=0.034, order=[0, 2, 1])
    errors, pairing = twin_errors(run, tables(tmp_path / "b", [0, 3, 0]))
    assert pairing == REQUESTS
    assert errors["queue_s"]["mean_abs_s"] == 0
    assert errors["token_gap_s"]["mean_ratio"] == pytest.approx(0.1)


def test_a_request_from_outside_that_did_not_complete_is_in_neither_mean(tmp_path: Path) -> None:
    """One was refused, and one was cancelled after a token: the twin has none of the one, and one token of the other."""
    run = SyntheticRun(tmp_path / "a", make_experiment([(2, 2)] * 4))
    run.serve(0, 0.0, CHAIN)
    run.arrive(1, 1.0)
    run.reject(1, 1.0)
    run.log(Failed(1, 1.5, "there is no room"))
    run.log(Cancelled(2, run.serve(2, 2.0, CHAIN, 1)))
    run.serve(3, 3.0, CHAIN)
    twin = SyntheticRun(tmp_path / "b", make_experiment([(2, 2), (2, 1), (2, 2)]))
    for number, at_s in enumerate((0.0, 2.0, 3.0)):
        twin.serve(number, at_s, CHAIN)
    both = [read_tables(tmp_path / name, each.experiment) for name, each in (("a", run), ("b", twin))]
    alike = compared(*both)
    for tables_ in alike:
        assert [row.status for row in tables_.rows] == ["completed"] * 2
    errors, pairing = twin_errors(*alike)
    assert pairing == REQUESTS
    assert all(dict(found)["mean_abs_s"] == pytest.approx(0, abs=1e-9) for found in errors.values())
    assert twin_metrics(alike[1])["per_token_s"].n == 2


def test_distributions_of_different_sizes_are_compared_at_the_same_shares(tmp_path: Path) -> None:
    short = tables(tmp_path / "a", [4, 0])
    long = tables(tmp_path / "b", [0, 4, 0, 4])
    errors, pairing = twin_errors(short, long)
    assert pairing == DISTRIBUTIONS
    assert errors["tpot_s"]["mean_abs_ratio"] == pytest.approx(0, abs=1e-9)
    assert errors["queue_s"]["mean_abs_ratio"] == pytest.approx(0, abs=1e-9)


def test_errors_have_their_sign_and_no_ratio_to_nothing() -> None:
    assert error([1.1, 0.9], [1.0, 1.0])["mean_ratio"] == pytest.approx(0)
    assert error([1.1, 0.9], [1.0, 1.0])["mean_abs_ratio"] == pytest.approx(0.1)
    assert error([0.9], [1.0])["mean_ratio"] == pytest.approx(-0.1)
    assert error([0.0], [0.0])["mean_abs_ratio"] == 0
    assert error([], []) == ErrorFigures()
