"""An experiment is a function of its tables: whatever a command changes is in the file that it saves."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from nodes.prefixes import page_ids
from testbed.errors import UserError
from testbed.experiments import Change, Override, changed, dump_toml, load_experiment
from testbed.experiments.experiment import Experiment
from testbed.experiments.policy import PolicyChoice
from testbed.experiments.sources import shipped_files
from testbed.experiments.stub import kept_tokens
from testbed.results.logs import RequestRecord, TokenTimes
from testbed.results.served import as_replay
from testbed.runs.generate import request_of
from testbed.runs.serve import ServeOptions, experiment_to_serve
from testbed.runs.twin import twin_of
from testbed.simulator.cases import Case, without_setup
from testbed.studies.advise.candidates import Fleet, parse_candidates
from tests.support.effort import n_drawn

QUICK = ("bloom-tiny", "chain-7b", "churn", "clustered", "gts-ce", "helix-24", "load-shift", "trace-replay")
"""Without the two large topologies and what needs another emulator."""
SERVE = ServeOptions("127.0.0.1", 0, None, True, "none", "wait", 9, None, None, None)

serve_options = st.builds(
    lambda admission, workload, most: replace(
        SERVE, admission=admission, workload=workload, max_model_len=most
    ),
    st.sampled_from(["wait", "reject"]),
    st.sampled_from(["none", "also"]),
    st.sampled_from([None, 64, 4096]),
)
rates = st.floats(0.01, 50)
policies = st.sampled_from(["petals", "proposed", "foresight", "chain-composition"])
overrides = st.lists(
    st.one_of(
        st.builds(Change, st.just("seed"), st.integers(0, 99)),
        st.builds(Change, st.just("workload.rate"), rates),
        st.builds(Change, st.just("workload.n_requests"), st.integers(2, 40)),
        st.builds(Change, st.just("policy.queue"), st.sampled_from(["none", "fifo", "backfill"])),
        st.builds(Change, st.just("policy.design_concurrency"), st.integers(1, 9)),
        st.builds(Change, st.just("compute.batching"), st.sampled_from(["serial", "continuous"])),
        st.builds(Change, st.just("calibration.session_setup"), st.booleans()),
        st.builds(Change, st.just("churn"), st.just({"mtbf": "3.7 s", "mttr": "1.23 s"})),
        st.just("cache.mode=paged"),
    ),
    max_size=3,
    unique_by=lambda change: str(change).partition("=")[0],
)
guests = st.lists(
    st.tuples(st.floats(0, 1e4), st.integers(1, 90), st.integers(1, 90), st.integers(0, 9)),
    min_size=1,
    max_size=4,
)


def with_guests(experiment: Experiment, guests: Sequence[tuple[float, int, int, int]]) -> Experiment:
    """What ``testbed serve`` has after these requests (arrival, input, output, client) came from outside."""
    first = len(experiment.workload.requests)
    rows = [
        [first + number, at_s, n_input, n_output, client % len(experiment.problem.clients)]
        for number, (at_s, n_input, n_output, client) in enumerate(guests)
    ]
    return changed(experiment, {"endpoint.requests": rows})


def replayed(experiment: Experiment, n_tokens: Sequence[int] | None = None) -> Experiment:
    """The workload that the twin of ``testbed serve`` has: each request got so many tokens, by default all but one."""
    size = kept_tokens(experiment) or 1
    requests = experiment.workload.requests
    got = n_tokens or [max(plan.n_output_tokens - 1, 1) for plan in requests]
    records = [
        RequestRecord(
            plan.index,
            experiment.problem.clients[plan.client],
            plan.arrival_at_s,
            plan.arrival_at_s,
            plan.n_input_tokens,
            plan.n_output_tokens,
            tokens=[TokenTimes(n, 0.0, 0.0, 0) for n in range(n_got)],
            pages=page_ids(range(plan.n_input_tokens + n_got - 1), size) if n_got else b"",
        )
        for plan, n_got in zip(requests, got, strict=True)
    ]
    return changed(experiment, as_replay(experiment, records))


def with_other_servers(experiment: Experiment, lost: int | None) -> list[Change]:
    """What ``testbed advise`` judges: one more server like the first, perhaps without another."""
    fleet = Fleet.of(experiment)
    name = experiment.problem.servers[0].name
    candidates = parse_candidates(f"{name}@{experiment.sites[name]}=1")
    return list(fleet.changes(candidates, (1,), lost))


def assert_survives(experiment: Experiment) -> None:
    """Its file gives it again, and so do its tables."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "saved.toml")
        path.write_text(dump_toml(experiment), encoding="utf-8")
        again = load_experiment(str(path))
    for part in vars(experiment).keys() - {"document", "program_nodes"}:
        assert getattr(again, part) == getattr(experiment, part), part
    assert again.document == experiment.document
    assert changed(experiment, {}) == experiment


@pytest.mark.parametrize("name", shipped_files())
def test_every_shipped_scenario_survives_being_saved(name: str) -> None:
    assert_survives(load_experiment(name))


@settings(max_examples=n_drawn(20))
@given(data=st.data(), name=st.sampled_from(QUICK), more=overrides, policy=st.none() | policies)
def test_a_change_that_a_command_makes_survives_being_saved(
    data: st.DataObject, name: str, more: list[Override], policy: str | None
) -> None:
    choice = PolicyChoice(policy).overrides()
    command = data.draw(st.sampled_from(["show", "serve", "generate", "simulate", "advise", "capacity"]))
    try:
        if command == "serve":
            experiment = experiment_to_serve(name, [*more, *choice], data.draw(serve_options))
        elif command == "generate":
            experiment = load_experiment(name, [*more, *choice, request_of(data.draw(st.integers(1, 99)), 7)])
        elif command == "advise":
            fleet = load_experiment(name, more)
            changes = with_other_servers(fleet, data.draw(st.sampled_from([None, 1])))
            experiment = load_experiment(name, [*more, *choice, *changes])
        elif command == "capacity":
            rate = Change("workload.rate", data.draw(rates))
            experiment = load_experiment(name, [*more, *choice, rate])
        else:
            experiment = load_experiment(name, [*more, *choice])
    except UserError:
        reject()  # one that the command refuses
    if command == "serve":
        assert_survives(experiment)
        experiment = with_guests(experiment, data.draw(guests))
    elif command == "simulate":
        experiment = without_setup(Case(experiment)).experiment
    assert_survives(experiment)
    twin = twin_of(replayed(experiment) if command == "serve" else experiment, Path("unused"))
    assert_survives(twin)
    assert (twin.policy, twin.faults) == (experiment.policy, experiment.faults)


def test_who_is_rejected_without_room_has_no_queue_in_the_twin_either() -> None:
    fifo = ["policy.queue=fifo", "workload.n_requests=3"]
    for admission, has_queue in (("wait", True), ("reject", False)):
        options = replace(SERVE, admission=admission)
        experiment = with_guests(experiment_to_serve("clustered", fifo, options), [(1.0, 20, 8, 0)])
        twin = twin_of(replayed(experiment), Path("unused"))
        for each in (experiment, twin):
            assert (each.policy.queue is not None) == has_queue
            assert each.document["policy"]["queue"] == ("fifo" if has_queue else "none")


def test_the_twin_has_requests_from_outside_as_far_as_they_got_and_none_of_those_that_got_nothing() -> None:
    asked = [(at_s, 20, 8, 0) for at_s in (1.0, 2.0, 3.0)]
    served = with_guests(experiment_to_serve("clustered", [], SERVE), asked)
    twin = twin_of(replayed(served, [8, 0, 3]), Path("unused"))
    assert [(r.arrival_at_s, r.n_output_tokens) for r in twin.workload.requests] == [(1.0, 8), (3.0, 3)]
    with pytest.raises(UserError, match="no request got a token"):
        replayed(served, [0, 0, 0])


def test_an_experiment_that_changed_keeps_how_its_requests_were_chosen() -> None:
    drawn = load_experiment("trace-replay", ["workload.draw=bootstrap"])
    assert drawn.workload.sample is not None
    assert changed(drawn, {"clock": "virtual"}).workload.sample == drawn.workload.sample


def test_a_change_that_does_not_fit_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r'^clustered: workload\.rate: must be a number, not "fast"$'):
        changed(load_experiment("clustered"), {"workload.rate": "fast"})
