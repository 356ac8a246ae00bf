"""Servers that come and go and links that change while sessions run, in the fast engine beside the testbed itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.experiments import load_experiment
from testbed.experiments.slo import Objectives
from testbed.records.events import OF_FAULTS, LinksChanged, Moved, ServerLeft
from testbed.simulator.cases import Case
from testbed.simulator.engine import Simulation, simulate
from testbed.simulator.summary import summarize_simulation
from testbed.simulator.tables import write_simulation

BUSY = ("workload.n_requests=14", "workload.rate=0.4", "workload.n_output_tokens=24")
LEAVES = "fault=[{kind='leave', server='a100-0', at='8 s'}, {kind='restart', server='a100-0', at='60 s'}]"
JOINS = (
    "servers=[{hardware='mig-1g', site='Cluster2', count=7}, {hardware='a100', site='Cluster1', count=2}, "
    "{hardware='a100', site='Cluster1', name='late', present=false}]",
    "fault=[{kind='join', server='late', at='12 s'}]",
)
BY_HOURS = (
    "servers=[{hardware='mig-1g', site='Cluster2', count=7}, {hardware='a100', site='Cluster1', count=2}, "
    "{hardware='a100', site='Cluster1', name='late', hours='09:00-17:00', time_zone='+09:00'}, "
    "{hardware='a100', site='Cluster1', name='early', hours='07:00-23:59'}]",
    "begins_at='23:58'",
    "workload.arrivals='constant'",
    "workload.rate=0.05",
)
"""One server leaves after a minute, another one joins after two."""
DIES_IDLE = "fault=[{kind='kill', server='a100-0', at='0.01 s', for='20 s'}, {kind='kill', server='a100-0', at='0.02 s'}]"
SLOWER = (
    "network.event=[{at='6 s', for='20 s', link=['Cluster0', 'Cluster1'], rate='5 Mbit/s', rtt='300 ms'}]"
)
FORWARDING = "policy.communication='server-to-server'"
SLOWER_NOW = ("network.event=[{at='0 s', link=['Cluster0', 'Cluster1'], rate='50 Mbit/s'}]",)
VERY_SLOW_NOW = ("network.event=[{at='0 s', link=['Cluster0', 'Cluster1'], rate='400 kbit/s'}]",)
"""A byte takes 20 us."""
MANY = "servers=[{hardware='mig-1g', site='Cluster2', count=12}, {hardware='a100', site='Cluster1', count=2}]"
ENDS = {"leave": ", for='3 s'", "kill": ", for='3 s'", "restart": ""}
CUT = "network.event=[{at='6 s', for='4 s', link=['Cluster0', 'Cluster2'], down=true}]"
KINDS = {kind.__struct_config__.tag for kind in (*OF_FAULTS, ServerLeft, Moved, LinksChanged)}


def both(*options: str, folder: Path) -> tuple[Simulation, Simulation]:
    case = Case(load_experiment("clustered", [*BUSY, *options]))
    return (
        simulate(case, "testbed", folder=folder / "fast"),
        simulate(case, "testbed", is_virtual=True, folder=folder / "virtual"),
    )


@pytest.mark.parametrize(
    "options",
    [
        (LEAVES,),
        JOINS,
        BY_HOURS,
        (DIES_IDLE,),
        (SLOWER,),
        (CUT,),
        (LEAVES, SLOWER, "compute.batching='continuous'"),
        (*JOINS, FORWARDING),
    ],
    ids=[
        "leave and restart",
        "join",
        "by hours",
        "idle and killed",
        "slower link",
        "cut link",
        "all, in batches",
        "join, forwarding",
    ],
)
def test_what_is_planned_happens_as_in_the_testbed_itself(options: tuple[str, ...], tmp_path: Path) -> None:
    fast, virtual = both(*options, folder=tmp_path)
    assert (fast.engine, virtual.engine) == ("fast", "virtual"), fast.why
    assert [row.chain for row in fast.rows] == [row.chain for row in virtual.rows]
    for name in ("queue_s", "ttft_s", "e2e_s"):
        mean_s, expected_s = (sum(row.times[name] for row in run.rows) / 14 for run in (fast, virtual))
        assert mean_s == pytest.approx(expected_s, rel=0.01, abs=2e-3), name
    counts = [summarize_simulation(run, Objectives()) for run in (fast, virtual)]
    assert counts[0].n_faults == counts[1].n_faults
    assert counts[0].n_faults_without_effect == counts[1].n_faults_without_effect
    assert counts[0].n_faults_never_came == counts[1].n_faults_never_came


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *((kind, more) for kind in ENDS for more in ((), (FORWARDING, *SLOWER_NOW))),
        ("leave", ("compute.batching='continuous'",)),
        ("kill", SLOWER_NOW),
        ("restart", (FORWARDING,)),
        ("kill", ("workload.n_input_tokens=60",)),  # more than a new connection sends at once
        ("kill", (MANY, *VERY_SLOW_NOW)),  # addresses of several lengths
    ],
    ids=str,
)
def test_the_first_session_on_a_server_that_was_away_connects_again(
    kind: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    """Setup takes the handshakes' round trips more, in both engines alike; nobody was on the servers meanwhile."""
    faults = ", ".join(
        f"{{kind='{kind}', server='{server}', at='{at} s'{ENDS[kind]}}}"
        for server, at in (("a100-0", 45), ("a100-1", 45))
    )
    calm = "workload.arrivals='constant'", "workload.rate=0.02", "workload.n_requests=2"
    fast, virtual = both(*calm, *more, f"fault=[{faults}]", folder=tmp_path)
    assert (fast.engine, virtual.engine) == ("fast", "virtual"), fast.why
    setups_s = [[row.times.setup_s for row in run.rows] for run in (fast, virtual)]
    assert setups_s[0][1] > setups_s[0][0] + 0.1
    assert setups_s[0] == pytest.approx(setups_s[1], abs=1e-5)
    assert [row.times.e2e_s for row in fast.rows] == pytest.approx(
        [row.times.e2e_s for row in virtual.rows], rel=1e-4
    )


def test_events_are_those_of_the_testbed_itself(tmp_path: Path) -> None:
    fast, _ = both(LEAVES, SLOWER, folder=tmp_path)
    write_simulation(tmp_path / "fast", fast, summarize_simulation(fast, Objectives()))
    found, expected = (
        [event for event in map(json.loads, path.read_text().splitlines()) if event["event"] in KINDS]
        for path in (tmp_path / "fast" / "events.jsonl", tmp_path / "virtual" / "events.jsonl")
    )
    change = "network-change"
    assert [event["event"] for event in found] == [change, "fault", change, "left", "fault", "begun"]
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            # A process that leaves closes its connections before it ends, which takes two round trips.
            close = pytest.approx(value, abs=0.201) if isinstance(value, float) else value
            assert one[key] == close, key


def test_at_one_instant_a_server_is_back_before_another_one_is_killed(tmp_path: Path) -> None:
    kills = "fault=[{kind='kill', server='a100-0', at='1 s', for='1 s'}, {kind='kill', server='a100-1', at='2 s'}]"
    fast, _ = both("workload.n_requests=1", kills, folder=tmp_path)
    write_simulation(tmp_path / "fast", fast, summarize_simulation(fast, Objectives()))
    for engine in ("fast", "virtual"):
        lines = map(json.loads, (tmp_path / engine / "events.jsonl").read_text().splitlines())
        seen = [(event["event"], event["server"]) for event in lines if event["event"] in ("fault", "begun")]
        assert seen == [("fault", "a100-0"), ("begun", "a100-0"), ("fault", "a100-1")], engine


def test_a_session_that_was_filled_by_its_hub_and_loses_a_server_is_for_the_testbed_itself() -> None:
    kill = "fault=[{kind='kill', server='a100-0', at='9 s'}]"
    kept = ("workload.turns=2", "cache.prefix=shared", "cache.hub_history=1 GB")
    simulation = simulate(Case(load_experiment("clustered", [*BUSY, *kept, kill])), "testbed")
    assert simulation.engine == "virtual"
    assert simulation.why.startswith("request ") and simulation.why.endswith(
        "loses a100-0, which is killed, with inputs that clients keep"
    )
    assert simulation.served.summary is not None and simulation.served.summary.n_replays > 0


def test_a_server_that_leaves_for_longer_than_clients_wait_cuts_its_sessions() -> None:
    options = [*BUSY, LEAVES, "recovery.give_up='2 s'"]
    simulation = simulate(Case(load_experiment("clustered", options)), "testbed")
    assert simulation.engine == "virtual"
    assert simulation.why == "a100-0 cuts the sessions that have not ended 2 s after it began to leave"


def test_an_opening_that_comes_to_a_server_that_has_just_ended_is_tried_elsewhere(tmp_path: Path) -> None:
    one = ("workload.arrivals='listed'", "workload.requests=[[1.0, 20, 8]]", "workload.n_requests=1")
    leaves = "fault=[{kind='leave', server='a100-0', at='1.01 s'}]"
    case = Case(load_experiment("clustered", [*one, leaves]))
    fast, virtual = simulate(case, "testbed"), simulate(case, "testbed", is_virtual=True)
    assert fast.engine == "fast"
    [row], [expected] = fast.rows, virtual.rows
    assert row.n_rejections == expected.n_rejections == 1
    assert row.chain == expected.chain
    # It hears of the end of the connection, and in the testbed tries to connect again.
    assert row.times.e2e_s == pytest.approx(expected.times.e2e_s, abs=0.2)
