"""`testbed simulate` of scenarios that disturb sessions: which engine takes them, what is refused, what is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import testbed as tb
from testbed import terminal
from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.experiments.policy import PolicyChoice
from testbed.experiments.slo import Objectives
from testbed.records.requests import Times
from testbed.results.errors import model_errors
from testbed.results.summary import active_sessions
from testbed.simulator.answer import means
from testbed.simulator.cases import Case
from testbed.simulator.command import Options, simulate_command
from testbed.simulator.engine import simulate
from testbed.simulator.summary import summarize_simulation
from testbed.studies.capacity.measures import load_measures
from testbed.studies.sweep.measures import measures_of
from tests.support.effort import EFFORT
from tests.support.own_modules import write_module

Written = Callable[..., Path]

FIRST = "fault=[{kind='kill', server='a100-0', at='60 s', for='20 s'}]"
KILL = "fault=[{kind='kill', server='a100-1', at='12 s', for='20 s'}]"


@pytest.fixture
def written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Written:
    """Simulate the scenario churn, smaller, with options, and answer the folder."""

    def run(name: str, *options: str) -> Path:
        small = (
            "workload.n_requests=12",
            "workload.n_output_tokens=64",
            "churn.until='120 s'",
            FIRST,
            *options,
        )
        folder = tmp_path / name
        assert simulate_command(
            ["churn"], Options((PolicyChoice(),), overrides=small, out=folder), as_json=True
        ) in (0, 1)
        return folder

    return run


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_the_shipped_churn_loses_no_request_and_recovers_near_the_floor() -> None:
    n_requests = 30 * min(EFFORT, 3)
    experiment = load_experiment("churn", [f"workload.n_requests={n_requests}"])
    assert [fault.at_s for fault in experiment.faults.planned[:3]] == [10.0, 20.0, 30.0]
    assert {(fault.kind, fault.for_s) for fault in experiment.faults.planned} == {("kill", 20.0)}
    simulation = simulate(Case(experiment), "testbed")
    assert [r.status for r in simulation.rows] == ["completed"] * n_requests
    assert simulation.engine == "fast"
    summary = summarize_simulation(simulation, Objectives())
    assert summary["n_replays"] >= 0.3 * n_requests
    # Replays share links with others, and the first of them finds a new connection.
    assert summary["recovery_s"]["mean"] < 1.3 * summary["recovery_floor_s"]["mean"]


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
    assert len(hops) > sum(r["n_output_tokens"] for r in requests.values())
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
        ("reference", KILL, r"fault or churn has no meaning in the reference mode"),
        ("reference", "backoff.jitter=0.2", r"backoff\.jitter has no meaning in the reference mode"),
        ("reference", "backoff.give_up='60 s'", r"backoff\.give_up has no meaning in the reference mode"),
        ("reference", "network.jitter='2 ms'", r"jitter of links has no meaning in the reference mode"),
        ("reference", "network.loss=0.01", r"loss of packets has no meaning in the reference mode"),
        ("reference", "membership.kind='announced'", r"has no meaning in the reference mode"),
        (
            "reference",
            "network.event=[{at='1 s', link=['client-0', 'a100-0'], rtt='1 s'}]",
            r"in the reference mode",
        ),
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
    simulation = simulate(Case(load_experiment("churn", options)), "testbed")
    assert [r.status for r in simulation.rows] == ["completed"] * 10


def test_a_link_that_is_cut_for_longer_than_the_timeout_costs_the_hop_and_not_the_request() -> None:
    cut = "network.event=[{at='5 s', for='400 s', link=['client-0', 'a100-0'], down=true}]"
    late = "fault=[{kind='kill', server='mig-1g-0', at='5000 s'}]"
    small = ["workload.arrivals='listed'", "workload.requests=[[0, 20, 60]]"]
    drop = ["churn.until='1 s'", "workload.rate=1", "workload.n_requests=1"]
    options = [*small, *drop, "recovery.request_timeout='10 s'", cut, late]
    simulation = simulate(Case(load_experiment("churn", options)), "testbed")
    [request] = simulation.rows
    assert (request.status, request.n_recoveries) == ("completed", 1)
    assert 9 in {hop.server for hop in request.hops}


UNDISTURBED = "nothing disturbs a session midway"
ALONE = (
    f"{UNDISTURBED}; in closed form, since nobody waits for links; the busiest link, a100-0 to client-0, is used 1% of "
    "the time"
)
WHY = {
    (): ("fast", ALONE),
    (KILL,): ("fast", ALONE),  # no session is there
    ("network.event=[{at='1 s', link=['client-0', 'a100-0'], down=true}]",): (
        "virtual",
        "a link that is cut for more than 5 s can disturb a session midway",
    ),
    ("fault=[{kind='stop', server='a100-1', at='12 s'}]",): (
        "virtual",
        "fault stop can disturb a session midway",
    ),
    ("fault=[{kind='leave', server='a100-1', at='500 s'}]",): ("fast", ALONE),
    ("fault=[{kind='leave', server='a100-1', at='500 s'}]", "cache.mode='paged'"): (
        "virtual",
        "fault leave, where caches grow, can disturb a session midway",
    ),
    (KILL, "cache.mode='paged'", "policy.communication='server-to-server'"): (
        "virtual",
        "fault, where caches grow and servers forward, can disturb a session midway",
    ),
    ("membership.kind='announced'",): ("virtual", "membership can disturb a session midway"),
    ("network.event=[{at='1 s', link=['client-0', 'a100-0'], rtt='1 s'}]",): (
        "fast",
        f"{UNDISTURBED}; step by step, since links change; the busiest link, a100-0 to client-0, is used 1% of the time",
    ),
    ("compute.serial=true",): ("virtual", "compute.batching serial can disturb a session midway"),
    ("policy.online='two-time-scale'",): (
        "fast",
        ALONE,
    ),
    ("workload.rate=10",): (
        "fast",
        f"{UNDISTURBED}; step by step, since sessions can meet on links, as on that from client-0 to a100-0; the "
        "busiest link, a100-0 to client-0, is used 4% of the time",
    ),
    ("policy.online='petals-rebalancing'",): (
        "virtual",
        "policy.online petals-rebalancing, which cuts sessions, can disturb a session midway",
    ),
}


@pytest.mark.parametrize("options", WHY)
def test_the_engine_is_the_fastest_that_knows_all_of_the_scenario(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*options, "workload.n_requests=3", "workload.n_output_tokens=4")
    engine, why = WHY[options]
    monkeypatch.setattr(terminal, "_SAID", set())
    simulate_command(["clustered"], Options((PolicyChoice(),), overrides=settings), as_json=True)
    printed = capsys.readouterr()
    row = json.loads(printed.out)
    assert (row["engine"], row["engine_why"], row["n_failed"]) == (engine, why, 0)
    assert printed.err.splitlines() == [f"engine {engine}: {why}"]


def test_a_fault_that_never_comes_changes_no_request_by_more_than_the_length_of_names() -> None:
    options = ["workload.n_requests=20", "workload.n_output_tokens=32"]
    never = "fault=[{kind='stop', server='a100-0', at='1e8 s'}]"
    fast, system = (
        simulate(Case(load_experiment("clustered", [*options, *more])), "testbed") for more in ([], [never])
    )
    assert (fast.engine, system.engine) == ("fast", "virtual")
    for a, b in zip(fast.rows, system.rows, strict=True):
        assert a.chain == b.chain != ""
        assert a.times.e2e_s == pytest.approx(b.times.e2e_s, rel=1e-5)


def test_an_online_policy_that_does_not_fit_is_one_sentence() -> None:
    options = ["policy.online='petals-rebalancing'", "policy.online_patience='7 s'"]
    with pytest.raises(UserError, match=r"clustered: online policy petals-rebalancing has no patience_s"):
        simulate(Case(load_experiment("clustered", options)), "testbed")


def test_a_users_online_policy_in_the_current_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from policies.online import TwoTimeScale\n\n\nclass Own(TwoTimeScale):\n    name = 'own'\n"
    write_module(tmp_path, monkeypatch, "online_of_my_own", text)
    options = ["policy.online='online_of_my_own:Own'", "workload.n_requests=2"]
    assert simulate(Case(load_experiment("clustered", options)), "testbed").engine == "fast"


def test_why_a_session_could_not_go_on_names_the_server() -> None:
    changes = {
        "recovery.mode": "head",
        "churn.mtbf": "2 s",
        "workload.n_requests": 8,
        "policy.communication": "server-to-server",
    }
    found = tb.simulate(tb.scenario("churn", changes))
    assert found.engine == "fast"
    reasons = [reason for reason in found.requests["reason"].to_pylist() if reason]
    assert reasons
    for reason in reasons:
        assert re.search(r"\((a100|mig-1g)-\d: a new session cannot start at position \d+\)$", reason)


SLOW_FOR_A_WHILE = """
name = "slow-for-a-while"
[model]
profile = "bloom-176b"
[[servers]]
hardware = "a100"
site = "a"
count = 2
[clients]
site = "b"
[network]
kind = "clusters"
pairs = [{ sites = ["a", "a"], rtt = "5 ms", rate = "1 Gbit/s" }, { sites = ["a", "b"], rtt = "100 ms", rate = "100 Mbit/s" }]
[[network.event]]
link = ["a", "b"]
at = "5 s"
for = "20 s"
rate_factor = 0.00001
[workload]
arrivals = "listed"
requests = [[0.0, 20, 60], [6.0, 20, 20]]
"""


@pytest.mark.parametrize("limit_s", [5, 60])
def test_a_server_that_seems_absent_because_its_link_is_slow_is_left_to_the_engine_virtual(
    limit_s: int, tmp_path: Path
) -> None:
    """An opening takes 19 s; within its limit both engines have the same times."""
    scenario = tmp_path / "slow.toml"
    scenario.write_text(SLOW_FOR_A_WHILE)
    case = Case(load_experiment(str(scenario), [f"recovery.connect_timeout={limit_s} s"]))
    chosen, system = (simulate(case, "testbed", is_virtual=is_virtual) for is_virtual in (False, True))
    refusals = sum(row.n_rejections or 0 for row in system.rows)
    assert (chosen.engine, refusals > 0) == (("virtual", True) if limit_s == 5 else ("fast", False))
    for row, other in zip(chosen.rows, system.rows, strict=True):
        assert row.times["ttft_s"] == pytest.approx(other.times["ttft_s"], abs=1e-3)
    if limit_s == 5:
        assert re.match(r"nothing is heard of a100-1 for 19\.\d s while it opens a session", chosen.why)


def test_every_command_has_the_mean_time_to_the_first_token_of_the_completed_requests() -> None:
    faults = (f"{{kind='kill', server='{name}', at='12 s', for='60 s'}}" for name in ("a100-0", "a100-1"))
    options = ("workload.n_requests=12", "workload.rate=2", "recovery.give_up='2 s'", "backoff.give_up='2 s'")
    lengths = "workload.n_output_tokens={distribution='uniform', low=4, high=40}"
    experiment = load_experiment("clustered", [*options, lengths, f"fault=[{', '.join(faults)}]"])
    simulation = simulate(Case(experiment), "testbed")
    done_s = [row.times.ttft_s or 0.0 for row in simulation.rows if row.is_completed]
    assert 0 < len(done_s) < sum(row.times.ttft_s is not None for row in simulation.rows)
    mean_s = pytest.approx(sum(done_s) / len(done_s))
    assert (means(simulation.rows)["ttft_ms"] or 0.0) / 1e3 == mean_s
    assert summarize_simulation(simulation, Objectives()).metrics["ttft_s"].mean == mean_s
    assert measures_of(simulation, Objectives())["ttft_s_mean"] == mean_s
    assert load_measures(simulation, Objectives())["ttft_mean"] == mean_s
    failed = next(row for row in simulation.rows if row.times.ttft_s is not None and not row.is_completed)
    failed.model = Times(ttft_s=2 * (failed.times.ttft_s or 0.0))
    assert model_errors(simulation.rows)["ttft_s"].max_abs_ratio == 0, "errors are of the same requests"


def test_requests_that_failed_were_there_as_well() -> None:
    options = ("policy.name='petals'", "workload.n_requests=100", "workload.rate=20", "backoff.give_up='1 s'")
    simulation = simulate(Case(load_experiment("clustered", options)), "testbed")
    spans = [(row.arrived_at_s or 0.0, row.ended_at_s or 0.0) for row in simulation.rows]
    most = max(sum(since <= at < to for since, to in spans) for at, _ in spans)
    done = [row for row in simulation.rows if row.is_completed]
    assert active_sessions(done, from_arrival=True).max < most
    found = measures_of(simulation, Objectives())
    assert means(simulation.rows)["max_concurrent"] == found["concurrent_max"] == most
    span_s = max(to for _, to in spans) - min(since for since, _ in spans)
    assert found["concurrent_mean"] == pytest.approx(sum(to - since for since, to in spans) / span_s)
