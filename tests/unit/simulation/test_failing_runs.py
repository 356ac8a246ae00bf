"""`testbed simulate` of scenarios whose servers fail: what is refused, what is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from testbed.errors import UserError
from testbed.scenario import load_experiment
from testbed.scenario.policy import PolicyChoice
from testbed.simulation.cases import Case
from testbed.simulation.command import Options, simulate_command
from testbed.simulation.engine import simulate

Written = Callable[..., Path]

FIRST = "fault=[{kind='kill', server='a100-0', at='60 s', for='20 s'}]"
KILL = "fault=[{kind='kill', server='a100-1', at='12 s', for='20 s'}]"


@pytest.fixture
def written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Written:
    """Simulate the scenario churn, smaller, with options, and answer the folder."""

    def run(name: str, *options: str) -> Path:
        small = ("workload.n_requests=16", "churn.until='150 s'", FIRST, *options)
        folder = tmp_path / name
        assert simulate_command(
            ["churn"], Options((PolicyChoice(),), overrides=small, out=folder), as_json=True
        ) in (0, 1)
        return folder

    return run


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_the_shipped_churn_loses_no_request_and_recovers_near_the_floor() -> None:
    experiment = load_experiment("churn")
    assert [fault.at_s for fault in experiment.faults[:3]] == [10.0, 20.0, 30.0]
    assert {(fault.kind, fault.for_s) for fault in experiment.faults} == {("kill", 20.0)}
    simulation = simulate(Case(experiment), "real")
    assert [r.status for r in simulation.requests] == ["completed"] * 100
    record = simulation.record
    assert record is not None
    assert len(record.recoveries) >= 30
    assert sum(r.recovery_s for r in record.recoveries) < 1.1 * sum(r.floor_s for r in record.recoveries)


def test_a_run_writes_what_happened_and_sums_it_up(written: Written) -> None:
    folder = written("run")
    summary = json.loads((folder / "summary.json").read_text())
    events = lines(folder)
    replayed = [e for e in events if e["event"] == "replayed"]
    assert summary["n_faults"] == sum(e["event"] == "fault" for e in events) > 9
    assert summary["n_replays"] == len(replayed) == summary["recovery_s"]["n"] > 0
    assert summary["recovery_s"]["max"] == max(e["recovery_s"] for e in replayed)
    assert summary["recovery_floor_s"]["max"] == max(e["floor_s"] for e in replayed)
    assert all({"event", "at_s"} <= e.keys() for e in events)


def test_hops_are_the_steps_that_were_made(written: Written) -> None:
    folder = written("run", "calibration.set='petals-clustered'")
    hops = pq.read_table(folder / "hops.parquet").to_pylist()
    requests = {r["request"]: r for r in pq.read_table(folder / "requests.parquet").to_pylist()}
    assert len(hops) == json.loads((folder / "summary.json").read_text())["n_hop_rows"]
    for hop in hops:
        assert hop["sent_at_s"] < hop["arrived_at_s"] < hop["departed_at_s"] < hop["received_at_s"]
    last = {hop["request"]: hop["received_at_s"] for hop in hops}
    for number, request in requests.items():
        assert request["status"] == "completed"
        assert last[number] == pytest.approx(request["arrival_at_s"] + request["e2e_s"])


def test_the_same_seed_gives_the_same_bytes_and_a_resolved_scenario_too(
    written: Written, tmp_path: Path
) -> None:
    first, second = written("first"), written("second")
    again = tmp_path / "again"
    options = Options((PolicyChoice(),), out=again)
    simulate_command([str(first / "scenario.toml")], options, as_json=True)
    for folder in (second, again):
        for name in ("events.jsonl", "requests.parquet", "hops.parquet"):
            assert (folder / name).read_bytes() == (first / name).read_bytes(), name


def test_a_run_without_faults_has_no_events_and_says_that_nothing_was_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plain"
    simulate_command(["clustered"], Options((PolicyChoice(),), out=folder), as_json=True)
    assert not (folder / "events.jsonl").exists()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["n_replays"], summary["n_faults"], summary["recovery_s"]["n"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("mode", "option", "sentence"),
    [
        ("reference", KILL, r"what happens to servers \(fault, .* has no meaning in the reference mode"),
        ("reference", "backoff.jitter=0.2", r"backoff\.jitter has no meaning in the reference mode"),
        ("reference", "membership.kind='announced'", r"has no meaning in the reference mode"),
    ],
)
def test_what_faults_do_not_go_together_with_is_refused_in_one_sentence(
    mode: str, option: str, sentence: str
) -> None:
    options = [option] if option.startswith("fault") else [KILL, option]
    with pytest.raises(UserError, match=sentence):
        simulate(Case(load_experiment("clustered", options)), mode)


@pytest.mark.parametrize("policy", ["petals", "petals-optimized-rr", "foresight", "cg-bprr"])
def test_every_policy_recovers_unmodified(policy: str) -> None:
    options = [f"policy.name='{policy}'", "workload.n_requests=10"]
    simulation = simulate(Case(load_experiment("churn", options)), "real")
    assert [r.status for r in simulation.requests] == ["completed"] * 10


def test_a_link_that_is_cut_for_longer_than_the_timeout_costs_the_hop_and_not_the_request() -> None:
    cut = "network.event=[{at='5 s', for='400 s', link=['client-0', 'a100-0'], down=true}]"
    late = "fault=[{kind='kill', server='mig-1g-0', at='5000 s'}]"
    small = ["workload.arrivals='listed'", "workload.requests=[[0, 20, 60]]"]
    drop = ["churn.until='1 s'", "workload.rate=1", "workload.n_requests=1"]
    options = [*small, *drop, "recovery.request_timeout='10 s'", cut, late]
    simulation = simulate(Case(load_experiment("churn", options)), "real")
    [request] = simulation.requests
    record = simulation.record
    assert record is not None
    [detected] = [e for e in record.events if e["event"] == "detected"]
    assert (detected["servers"], detected["reason"]) == (["a100-0"], "no answer for 10 s")
    assert request.status == "completed"
    assert 0 not in {hop.server - 9 for hop in request.hops}
