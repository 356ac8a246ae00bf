"""Which recorded requests a seed takes, and lengths of a trace for arrivals that are generated."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from testbed.errors import ScenarioError
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.draws import drawn
from testbed.experiments.experiment import Experiment

ROWS: list[list[int | float]] = [
    [at_s, 10 + i, 1] for i, at_s in enumerate((5.0, 6.0, 8.0, 11.0, 15.0, 20.0, 26.0))
]


def traced(draw: str, seed: int, *more: str) -> Experiment:
    return load_experiment("trace-replay", [f"workload.draw={draw}", f"seed={seed}", *more])


def came(experiment: Experiment) -> list[tuple[float, int, int]]:
    return [(r.arrival_at_s, r.n_input_tokens, r.n_output_tokens) for r in experiment.workload.requests]


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
    taken, said, others = drawn(ROWS, 7, "bootstrap", 0, random.Random(3))
    assert said == "7 of 7 requests drawn in blocks of 3" and taken[0][0] == 0.0 and len(taken) == 7
    came_in, left = ({row[1] for row in rows} for rows in (taken, others))
    assert came_in | left == set(range(10, 17)) and not came_in & left
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
    assert petals.workload.requests == proposed.workload.requests


@pytest.mark.parametrize("draw", ["windows", "bootstrap"])
def test_the_resolved_scenario_of_a_draw_gives_the_same_requests_without_the_trace(
    draw: str, tmp_path: Path
) -> None:
    experiment = traced(draw, 3, "workload.n_requests=20", "workload.rate=0.2")
    (tmp_path / "again.toml").write_text(dump_toml(experiment), encoding="utf-8")
    again = load_experiment(str(tmp_path / "again.toml"))
    assert again == experiment and "stretched to 0.2 per second, " in again.workload.source


def test_a_rate_is_that_of_the_whole_recording_and_windows_keep_their_own() -> None:
    windows = [traced("windows", seed, "workload.n_requests=20", "workload.rate=1") for seed in range(5)]
    rates = [19 / w.workload.requests[-1].arrival_at_s for w in windows]
    assert min(rates) < 1 < max(rates)
    assert [w.problem.request_rate for w in windows] == pytest.approx(rates)


def test_without_a_draw_the_first_requests_are_taken_whatever_the_seed() -> None:
    first = [load_experiment("trace-replay", ["workload.n_requests=20", f"seed={seed}"]) for seed in (0, 1)]
    assert came(first[0]) == came(first[1])


def test_generated_arrivals_have_nothing_to_draw_from() -> None:
    with pytest.raises(ScenarioError, match=r'workload.draw: is only for arrivals = "trace" or "listed"'):
        load_experiment("clustered", ["workload.draw=windows"])


POISSON = ("workload.arrivals=poisson", "workload.rate=0.5", "workload.n_requests=40")


def test_generated_arrivals_take_the_lengths_of_recorded_requests_pair_by_pair() -> None:
    recorded = {
        (r.n_input_tokens, r.n_output_tokens) for r in load_experiment("trace-replay").workload.requests
    }
    experiment = load_experiment("trace-replay", POISSON)
    pairs = [(r.n_input_tokens, r.n_output_tokens) for r in experiment.workload.requests]
    assert set(pairs) <= recorded and len(set(pairs)) > 20
    assert (
        experiment.workload.sample is None
        and "lengths drawn from the 100 requests of Azure trace" in experiment.workload.source
    )
    assert experiment.problem.request_rate == 0.5
    assert experiment.problem.n_output_tokens == max(n_out for _, n_out in pairs)


def test_a_traces_lengths_do_not_move_generated_arrivals_and_follow_the_seed() -> None:
    fixed = [f"workload.{key}=9" for key in ("n_input_tokens", "n_output_tokens")]
    without = load_experiment("clustered", [*POISSON, *fixed])
    taken = load_experiment("trace-replay", POISSON)
    assert [r.arrival_at_s for r in taken.workload.requests] == [
        r.arrival_at_s for r in without.workload.requests
    ]
    assert came(taken) == came(load_experiment("trace-replay", POISSON))
    other = load_experiment("trace-replay", [*POISSON, "seed=1"])
    assert [r.n_input_tokens for r in other.workload.requests] != [
        r.n_input_tokens for r in taken.workload.requests
    ]


def test_one_length_may_be_the_traces_and_the_other_not() -> None:
    both = load_experiment("trace-replay", POISSON)
    one = load_experiment(
        "trace-replay", [*POISSON, "workload.n_input_tokens=trace", "workload.n_output_tokens=5"]
    )
    assert [r.n_input_tokens for r in one.workload.requests] == [
        r.n_input_tokens for r in both.workload.requests
    ]
    assert {r.n_output_tokens for r in one.workload.requests} == {5}


def test_the_arrivals_of_a_trace_may_have_other_lengths() -> None:
    drawn_lengths = 'workload.n_output_tokens={distribution="uniform",low=3,high=4}'
    plain = load_experiment("trace-replay")
    other = load_experiment("trace-replay", ["workload.n_input_tokens=8", drawn_lengths])
    assert [r.arrival_at_s for r in other.workload.requests] == [
        r.arrival_at_s for r in plain.workload.requests
    ]
    assert {r.n_input_tokens for r in other.workload.requests} == {8} and {
        r.n_output_tokens for r in other.workload.requests
    } == {3, 4}


@pytest.mark.parametrize("more", [(), ("workload.n_output_tokens=5",), ("workload.lengths=hidden",)])
def test_the_resolved_scenario_lists_a_traces_lengths(more: tuple[str, ...], tmp_path: Path) -> None:
    experiment = load_experiment("trace-replay", [*POISSON, *more])
    (tmp_path / "again.toml").write_text(dump_toml(experiment), encoding="utf-8")
    assert load_experiment(str(tmp_path / "again.toml")) == experiment


LISTED = "workload.request_lengths=[[3, 4], [5, 6]]"


def test_lengths_may_be_listed_for_generated_arrivals() -> None:
    trace = [f"workload.{key}=trace" for key in ("n_input_tokens", "n_output_tokens")]
    experiment = load_experiment("clustered", [LISTED, "workload.n_requests=2", *trace])
    assert [(r.n_input_tokens, r.n_output_tokens) for r in experiment.workload.requests] == [(3, 4), (5, 6)]
    assert experiment.workload.requests[1].arrival_at_s > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ("workload.n_input_tokens=trace",),
            'n_input_tokens: is "trace", but there is no trace; name its file in workload.file',
        ),
        (("workload.rate=trace",), 'rate: may only be "trace" with arrivals = "trace" or "listed"'),
        (
            (LISTED,),
            "request_lengths: is only for generated arrivals that leave out a length and have no workload.file",
        ),
        (
            (LISTED, "workload.n_input_tokens=trace"),
            "n_requests: is 100, but there are only 2 request_lengths",
        ),
        (
            ("workload.request_lengths=[[1, 0]]", "workload.n_input_tokens=trace", "workload.n_requests=1"),
            "request_lengths.0: must be [input tokens, output tokens], 1 to",
        ),
        (
            ("workload.file=x.csv",),
            'file: is only for arrivals = "trace", or for a length that is "trace"; leave it out',
        ),
    ],
)
def test_lengths_from_nowhere_are_refused(changes: tuple[str, ...], said: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_experiment("clustered", changes)
    assert said in str(caught.value)
