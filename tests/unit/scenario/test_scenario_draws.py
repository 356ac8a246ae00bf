"""Which recorded requests a seed takes."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from testbed.errors import ScenarioError
from testbed.scenario import dump_toml, load_experiment
from testbed.scenario.draws import drawn
from testbed.scenario.experiment import Experiment

ROWS: list[list[int | float]] = [
    [at_s, 10 + i, 1] for i, at_s in enumerate((5.0, 6.0, 8.0, 11.0, 15.0, 20.0, 26.0))
]


def traced(draw: str, seed: int, *more: str) -> Experiment:
    return load_experiment("trace-replay", [f"workload.draw={draw}", f"seed={seed}", *more])


def came(experiment: Experiment) -> list[tuple[float, int, int]]:
    return [(r.arrival_at_s, r.n_input_tokens, r.n_output_tokens) for r in experiment.requests]


def test_windows_of_seeds_in_a_row_share_no_request_and_begin_at_zero() -> None:
    windows = [drawn(ROWS, 2, "windows", seed, random.Random(0))[0] for seed in (40, 41, 42)]
    assert sorted(row[1] for window in windows for row in window) == [10, 11, 12, 13, 14, 15]
    assert all(window[0][0] == 0.0 for window in windows)
    (two,) = [window for window in windows if window[0][1] == 12]
    assert two == [[0.0, 12, 1], [3.0, 13, 1]]


def test_a_window_says_which_requests_it_is() -> None:
    found = {drawn(ROWS, 3, "windows", seed, random.Random(0))[1] for seed in (0, 1)}
    assert found == {"requests 1 to 3 of 7", "requests 4 to 6 of 7"}


def test_a_bootstrap_keeps_what_follows_each_other_within_its_blocks() -> None:
    taken, said = drawn(ROWS, 7, "bootstrap", 0, random.Random(3))
    assert said == "7 of 7 requests drawn in blocks of 3" and taken[0][0] == 0.0 and len(taken) == 7
    gap_before = {10: 3.5, 11: 1.0, 12: 2.0, 13: 3.0, 14: 4.0, 15: 5.0, 16: 6.0}
    for index, (before, now) in enumerate(pairwise(taken), 1):
        assert now[0] - before[0] == pytest.approx(gap_before[int(now[1])])
        if index % 3:
            assert now[1] == (before[1] + 1 if before[1] < 16 else 10)


def test_bootstraps_of_two_seeds_differ_and_of_one_seed_do_not() -> None:
    assert came(traced("bootstrap", 1)) == came(traced("bootstrap", 1)) != came(traced("bootstrap", 2))


@pytest.mark.parametrize("draw", ["windows", "bootstrap"])
def test_what_a_seed_takes_is_the_same_under_every_policy(draw: str) -> None:
    petals, proposed = (
        traced(draw, 7, "workload.n_requests=20", f"policy.name={p}") for p in ("petals", "proposed")
    )
    assert petals.requests == proposed.requests


@pytest.mark.parametrize("draw", ["windows", "bootstrap"])
def test_the_resolved_scenario_of_a_draw_gives_the_same_requests_without_the_trace(
    draw: str, tmp_path: Path
) -> None:
    experiment = traced(draw, 3, "workload.n_requests=20", "workload.rate=0.2")
    (tmp_path / "again.toml").write_text(dump_toml(experiment), encoding="utf-8")
    again = load_experiment(str(tmp_path / "again.toml"))
    assert again == experiment and "stretched to 0.2 per second, " in again.workload


def test_a_rate_is_that_of_the_whole_recording_and_windows_keep_their_own() -> None:
    windows = [traced("windows", seed, "workload.n_requests=20", "workload.rate=1") for seed in range(5)]
    rates = [19 / w.requests[-1].arrival_at_s for w in windows]
    assert min(rates) < 1 < max(rates)
    assert [w.problem.request_rate for w in windows] == pytest.approx(rates)


def test_without_a_draw_the_first_requests_are_taken_whatever_the_seed() -> None:
    first = [load_experiment("trace-replay", ["workload.n_requests=20", f"seed={seed}"]) for seed in (0, 1)]
    assert came(first[0]) == came(first[1])


def test_generated_arrivals_have_nothing_to_draw_from() -> None:
    with pytest.raises(ScenarioError, match=r'workload.draw: is only for arrivals = "trace" or "listed"'):
        load_experiment("clustered", ["workload.draw=windows"])
