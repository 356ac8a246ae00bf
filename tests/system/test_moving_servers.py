"""Whole runs whose servers change their blocks while they serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import Testbed, assert_one_sentence, assert_tables_hold_the_whole_log, rows_of
from tests.system.test_recovery import NOTHING_LEFT, REAL, SCENARIO, events, fault

ROOT = Path(__file__).parents[2]
ENV = {"PYTHONPATH": str(ROOT)}
DRAINING, CUTTING = "tests.support.wandering:Draining", "tests.support.wandering:Cutting"


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "moving.toml"
    path.write_text(SCENARIO % 1000.0)
    return str(path)


def online(policy: str) -> tuple[str, ...]:
    return ("--set", f"policy.online={policy}", "--set", "policy.load_rate=40 Gbit/s")


def assert_moves_are_told(run_dir: Path, summary: dict[str, Any]) -> None:
    """Summary and events agree, the phases of a move follow each other, and no block was ever left out."""
    told = events(run_dir, "moved")
    servers = json.loads((run_dir / "plan.json").read_text())["servers"]
    assert [servers[move["server"]] for move in summary["moves"]] == [event["server"] for event in told]
    assert len(events(run_dir, "moving")) >= len(told)
    for move in summary["moves"]:
        assert move["decided_at_s"] <= move["closed_at_s"] <= move["drained_at_s"] <= move["open_at_s"]
        assert move["old"] != move["new"]
    ranges = dict(
        zip(
            servers,
            json.loads((run_dir / "plan.json").read_text())["placement"]["ranges"],
            strict=True,
        )
    )
    for event in events(run_dir, "moving", "moved"):
        ranges[event["server"]] = event["keeps"] if event["event"] == "moving" else event["new"]
        assert {b for first, last in ranges.values() for b in range(first, last)} == set(range(8))


@pytest.mark.parametrize("network", ["loopback", "fabric", "memory"])
def test_servers_that_drain_move_without_cutting_a_session(
    network: str, testbed: Testbed, scenario: str, request: pytest.FixtureRequest
) -> None:
    if network == "fabric":
        request.getfixturevalue(network)
    # Sessions that come later keep the run going until a server has drained, also on a busy machine.
    options = ("--set", "workload.n_requests=8", *(REAL if network == "loopback" else ()))
    outcome = testbed.up(scenario, "--network", network, "--json", *options, *online(DRAINING), env=ENV)
    assert outcome.code == 0, outcome.stderr
    summary = outcome.json()
    assert (summary["n_completed"], summary["n_replays"], summary["n_cuts"]) == (8, 0, 0)
    assert summary["moves"]
    assert summary["leaks"] == NOTHING_LEFT
    assert_moves_are_told(outcome.run_dir, summary)
    assert_tables_hold_the_whole_log(outcome.run_dir)
    assert "Violet: a server drains" in (outcome.run_dir / "report.html").read_text()


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
def test_sessions_that_a_moving_server_cuts_replay_elsewhere(
    communication: str, virtual: str, testbed: Testbed, scenario: str
) -> None:
    options = (
        "--network",
        virtual,
        "--json",
        "--no-report",
        "--set",
        f"policy.communication={communication}",
    )
    outcome = testbed.up(scenario, *options, *online(CUTTING), env=ENV)
    assert outcome.code == 0, outcome.stderr
    summary = outcome.json()
    assert summary["n_completed"] == 4
    assert summary["n_replays"] >= 1 <= summary["n_cuts"]
    assert summary["leaks"] == NOTHING_LEFT
    assert_moves_are_told(outcome.run_dir, summary)
    reasons = {event["reason"].split(":")[0] for event in events(outcome.run_dir, "detected")}
    assert "session-moved" in reasons
    rows = rows_of(outcome.run_dir / "requests.parquet")
    assert sum(row["n_recoveries"] for row in rows) == summary["n_replays"]


def test_servers_die_and_come_back_while_others_move(virtual: str, testbed: Testbed, scenario: str) -> None:
    Path(scenario).write_text(
        SCENARIO % 2.0
        + fault("kill", 'at = "2.2 s"', **{"for": '"2 s"'})
        + fault("kill", 'at = "4 s"', **{"for": '"1 s"', "server": '"a100-1"'})
        + fault("stop", 'at = "5 s"', **{"for": '"2 s"', "server": '"a100-2"'})
    )
    options = ("--network", virtual, "--json", "--no-report")
    outcome = testbed.up(scenario, *options, *online(DRAINING), env=ENV)
    assert outcome.code == 0, outcome.stderr
    assert {event["server"] for event in events(outcome.run_dir, "begun")} >= {"a100-0", "a100-1"}
    assert [event["server"] for event in events(outcome.run_dir, "fault-over")] == ["a100-2"]
    summary = outcome.json()
    assert summary["n_completed"] == 4
    assert summary["leaks"] == NOTHING_LEFT
    assert summary["moves"]


@pytest.mark.parametrize(("policy", "spared"), [("two-time-scale", {2}), ("petals-rebalancing", {0, 2})])
def test_a_dead_servers_blocks_are_taken_over_by_one_that_can_be_spared(
    policy: str, spared: set[int], virtual: str, testbed: Testbed, scenario: str
) -> None:
    # Three servers of four blocks each: the second alone holds the last four, and dies for good.
    after = "after = { request = 0, tokens = 3 }"
    Path(scenario).write_text(SCENARIO % 1000.0 + fault("kill", after, server='"a100-1"'))
    servers = (
        "--set",
        "servers.0.count=3",
        "--set",
        "servers.0.memory=6 GB",
        "--set",
        "policy.name=proposed",
    )
    online = (f"policy.online={policy}", "policy.online_period=1 s", "policy.load_rate=100 Gbit/s")
    settings = [argument for setting in online for argument in ("--set", setting)]
    outcome = testbed.up(scenario, "--network", virtual, "--json", "--no-report", *servers, *settings)
    assert outcome.code == 0, outcome.stderr
    summary = outcome.json()
    assert summary["n_completed"] == 4
    [move] = summary["moves"]
    assert (move["server"] in spared, move["old"], move["new"]) == (True, [0, 4], [4, 8])
    assert summary["n_replays"] >= 1
    assert summary["leaks"] == NOTHING_LEFT


def test_a_policy_that_does_not_suit_the_placement_is_refused_before_anything_starts(
    testbed: Testbed, scenario: str
) -> None:
    outcome = testbed.up(scenario, "--network", "memory", "--set", "policy.online=two-time-scale")
    assert_one_sentence(
        outcome, "two-time-scale needs a placement that was designed for a number of sessions"
    )
