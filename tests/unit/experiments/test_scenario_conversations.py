"""Conversations of ``[workload] turns``: lengths, times and clients of their requests."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from policies.workload import Turn
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.experiment import Experiment

Complain = Callable[..., str]
Load = Callable[..., Experiment]
TALK = ("workload.turns=3", "workload.think_time=5 s", "workload.n_further_tokens=7", "workload.n_requests=8")


def test_a_further_prompt_is_the_whole_conversation_and_a_new_message(load: Load) -> None:
    requests = load(*TALK, "workload.n_input_tokens=20", "workload.n_output_tokens=64").workload.requests
    assert [r.n_input_tokens for r in requests] == [20, 91, 162, 20, 91, 162, 20, 91]
    assert [r.turn for r in requests[:4]] == [Turn(0, 0), Turn(0, 1, 0, 5.0), Turn(0, 2, 1, 5.0), Turn(1, 0)]
    assert [r.arrival_at_s for r in requests[:3]] == [0.0, 5.0, 10.0]


def test_a_conversation_is_of_one_client_and_begins_at_an_arrival_of_the_workload(load: Load) -> None:
    options = "clients.count=3", "workload.n_requests=60"
    arrivals = {r.arrival_at_s for r in load(*options).workload.requests}
    requests = load(*TALK, *options).workload.requests
    starts = [r.arrival_at_s for r in requests if r.turn is not None and r.turn.number == 0]
    assert starts == sorted(starts) and len(starts) == 20 and set(starts) < arrivals
    for before, after in pairwise(requests):
        assert after.turn is not None
        assert after.turn.number == 0 or after.client == before.client


def begun_at_s(experiment: Experiment) -> list[float]:
    return [r.arrival_at_s for r in experiment.workload.requests if r.turn is not None and r.turn.number == 0]


def test_conversations_begin_as_the_arrivals_say(load: Load) -> None:
    constant = begun_at_s(load(*TALK, "workload.arrivals=constant", "workload.rate=0.05", "workload.turns=4"))
    assert constant == [0.0, 80.0]
    cut_short = begun_at_s(load(*TALK, "workload.arrivals=constant", "workload.rate=0.05"))
    assert cut_short == pytest.approx([0.0, 8 / 3 * 20, 16 / 3 * 20]), "three of them have eight requests"
    many = "workload.arrivals=gamma", "workload.shape=4", "workload.rate=0.3", "workload.n_requests=3000"
    gaps_s = [after - before for before, after in pairwise(begun_at_s(load(*TALK, *many)))]
    assert fmean(gaps_s) == pytest.approx(10, rel=0.05)
    assert pstdev(gaps_s) / fmean(gaps_s) == pytest.approx(0.5, rel=0.05), (
        "a gamma distribution of that shape"
    )
    changing = "workload.arrivals=constant", "workload.changes=[{at='80 s', rate=0.1}]", "workload.rate=0.05"
    changed = begun_at_s(load(*TALK, *changing, "workload.turns=4", "workload.n_requests=16"))
    assert changed == pytest.approx([0.0, 80.0, 120.0, 160.0])


def test_a_placement_is_designed_for_the_longest_prompt_of_a_conversation(load: Load) -> None:
    experiment = load(*TALK, "workload.turns={distribution='uniform',low=1,high=4}")
    longest = max(r.n_input_tokens for r in experiment.workload.requests)
    assert experiment.problem.n_input_tokens == longest > 20
    assert max(n_input for n_input, _ in experiment.problem.length_samples) > 20


def test_a_resolved_scenario_has_the_same_conversations(load: Load, tmp_path: Path) -> None:
    experiment = load(*TALK, "workload.think_time={mean='30 s'}")
    path = tmp_path / "again.toml"
    path.write_text(dump_toml(experiment))
    assert load_experiment(str(path)).workload.requests == experiment.workload.requests


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["workload.think_time=5 s"],
            "think_time: is of conversations; give workload.turns, or leave this out",
        ),
        (["workload.n_further_tokens=5"], "n_further_tokens: is of conversations; give workload.turns"),
        (["workload.turns=0"], "workload.turns"),
        (
            ["workload.turns=2", "workload.arrivals=listed", "workload.requests=[[0,1,2]]"],
            "turns: needs generated",
        ),
        (
            ["workload.turns=200", "workload.n_requests=200", "workload.n_output_tokens=90000"],
            "turns: makes a conversation of",
        ),
    ],
)
def test_bad_conversations_are_refused_in_a_sentence(
    complaint: Complain, options: list[str], said: str
) -> None:
    assert said in complaint(*options)
