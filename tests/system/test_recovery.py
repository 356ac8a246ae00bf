"""Whole runs in which servers die, halt, come and go: requests complete with the right tokens, nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import (
    Testbed,
    assert_one_sentence,
    assert_tables_hold_the_whole_log,
    links,
    logged_tokens,
    node_pid,
    rows_of,
    wait_until,
)

SCENARIO = """
name = "recovery"
seed = 1
model = { profile = "bloom-176b", n_blocks = 8 }
clients = { site = "a" }
workload = { arrivals = "constant", rate = 1, n_requests = 4, n_input_tokens = 20, n_output_tokens = 60 }
policy = { name = "petals" }

[[servers]]
hardware = "a100"
site = "b"
count = 4
memory = "12 GB"

[[servers]]
hardware = "a100"
name = "late"
site = "b"
memory = "12 GB"
present = false

[network]
kind = "clusters"
pairs = [
    { sites = ["b", "b"], rtt = "5 ms", rate = "1 Gbit/s" },
    { sites = ["a", "b"], rtt = "50 ms", rate = "1 Gbit/s" },
]

[[fault]]
kind = "join"
server = "late"
at = "%s s"
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Any:
    """Writes a scenario of four servers, of which any one can be spared, with these faults."""

    def write(faults: str = "", joins_at_s: float = 1000.0) -> str:
        path = tmp_path / "recovery.toml"
        path.write_text(SCENARIO % joins_at_s + faults)
        return str(path)

    return write


def fault(kind: str, when: str, **more: str) -> str:
    keys = {"kind": f'"{kind}"', "server": '"a100-0"', **more}
    return "\n[[fault]]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items()) + f"{when}\n"


REAL = ("--clock", "real", "--time-scale", "10", "--no-twin")
DECODE = "after = { request = 1, tokens = 8 }"
NOTHING_LEFT = {"sessions": 0, "cache_bytes": 0, "descriptors": 0, "namespaces": 0}


def events(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] in kinds]


def assert_all_live_on(outcome: Any, n_requests: int = 4) -> dict[str, Any]:
    """Every request completed (the stub's hub checks every token), and nothing is left of any session."""
    assert outcome.code == 0, outcome.stderr
    summary: dict[str, Any] = outcome.json()
    assert summary["n_completed"] == n_requests
    assert summary["leaks"] == NOTHING_LEFT
    assert_tables_hold_the_whole_log(outcome.run_dir)
    return summary


@pytest.mark.parametrize("network", ["loopback", "fabric", "memory"])
def test_sessions_live_on_when_a_server_is_killed_and_it_serves_again_later(
    network: str, testbed: Testbed, scenario: Any, request: pytest.FixtureRequest
) -> None:
    if network == "fabric":
        request.getfixturevalue(network)
    faults = fault("kill", DECODE, **{"for": '"2 s"'})
    before = links()
    # The server is back before the end on any machine, also if the fault comes late in real time.
    n_requests, n_tokens, real = (2, 400, REAL) if network == "loopback" else (4, 40, ())
    size = ("--set", f"workload.n_requests={n_requests}", "--set", f"workload.n_output_tokens={n_tokens}")
    options = ("--network", network, "--json", "--no-report", *size, *real)
    outcome = testbed.up(scenario(faults), *options)
    summary = assert_all_live_on(outcome, n_requests)
    assert links() == before
    replays = events(outcome.run_dir, "replayed")
    assert summary["n_replays"] == len(replays) >= 1
    assert summary["recovery_s"]["n"] == len(replays)
    [killed] = events(outcome.run_dir, "fault")
    for replay in replays:
        assert replay["recovery_s"] > 0 < replay["floor_s"]
        assert killed["at_s"] <= replay["failed_at_s"] <= replay["detected_at_s"]
    if network != "loopback":
        assert summary["recovery_s"]["min"] >= summary["recovery_floor_s"]["min"]
        [begun] = events(outcome.run_dir, "begun")
        assert begun["at_s"] >= killed["at_s"] + 2.0
    assert [e["server"] for e in events(outcome.run_dir, "begun")] == ["a100-0"]
    replayed = [row for row in rows_of(outcome.run_dir / "hops.parquet") if row["replayed_tokens"]]
    assert {row["request"] for row in replayed} == {replay["request"] for replay in replays}
    rows = {row["request"]: row["n_recoveries"] for row in rows_of(outcome.run_dir / "requests.parquet")}
    assert sum(rows.values()) == len(replays)


def test_servers_stop_slow_down_leave_and_join_while_requests_are_served(
    virtual: str, testbed: Testbed, scenario: Any
) -> None:
    faults = (
        fault("stop", DECODE, **{"for": '"8 s"'})
        + fault("slow", 'at = "1 s"', server='"a100-1"', factor="3", **{"for": '"1 s"'})
        + fault("leave", 'at = "2 s"', server='"a100-2"')
        + '\n[recovery]\nrequest_timeout = "3 s"\n'
    )
    longer = ("--set", "workload.n_requests=12")  # the server has left before the last request is done
    options = ("--network", virtual, "--json", "--no-report", *longer)
    outcome = testbed.up(scenario(faults, joins_at_s=0.5), *options)
    summary = assert_all_live_on(outcome, n_requests=12)
    done = [(e["kind"], e["server"], e["applies"]) for e in events(outcome.run_dir, "fault")]
    assert sorted(done) == [
        ("join", "late", True),
        ("leave", "a100-2", True),
        ("slow", "a100-1", True),
        ("stop", "a100-0", True),
    ]
    at_s = {e["kind"]: e["at_s"] for e in events(outcome.run_dir, "fault")}
    assert (at_s["join"], at_s["slow"], at_s["leave"]) == pytest.approx((0.5, 1.0, 2.0), abs=1e-6)
    assert [e["server"] for e in events(outcome.run_dir, "begun")] == ["late"]
    (joined,) = events(outcome.run_dir, "moved")
    (moved,) = summary["moves"]
    assert (joined["server"], moved["old"], moved["new"]) == ("late", [0, 0], joined["new"])
    trace = json.loads((outcome.run_dir / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert [e["args"]["new"] for e in trace if e["name"] == "load"] == [joined["new"]]
    reasons = {e["reason"] for e in events(outcome.run_dir, "detected")}
    # A prompt has a little more time than a token.
    assert reasons and all(re.fullmatch(r"no answer for 3(\.[0-9]+)? s", reason) for reason in reasons)
    assert summary["recovery_s"]["min"] >= 3.0
    (left,) = events(outcome.run_dir, "left")
    assert (left["server"], left["n_sessions"]) == ("a100-2", 0)


@pytest.mark.usefixtures("fabric")
def test_a_server_that_dies_by_itself_is_a_fault_and_the_run_goes_on(testbed: Testbed, scenario: Any) -> None:
    run = testbed.start_up(scenario(), "--network", "fabric", "--json", "--no-report", *REAL)
    # Looked for before it serves: the run is short, and may be over when a busy machine has found it.
    pid = node_pid(run.run_dir(), "a100-0")
    run_dir = run.serving()
    os.kill(pid, signal.SIGKILL)
    assert_all_live_on(run.wait())
    (found,) = events(run_dir, "fault")
    assert (found["kind"], found["server"], found["status"]) == ("died", "a100-0", -9)


def test_without_recovery_a_kill_fails_the_sessions_on_that_server_with_the_reason(
    virtual: str, testbed: Testbed, scenario: Any
) -> None:
    faults = fault("kill", DECODE) + '\n[recovery]\nmode = "off"\n'
    outcome = testbed.up(scenario(faults), "--network", virtual, "--json", "--no-report")
    assert outcome.code == 1, outcome.stderr
    summary = outcome.json()
    assert summary["n_failed"] >= 1
    assert summary["leaks"] == NOTHING_LEFT
    reasons = {row["reason"] for row in rows_of(outcome.run_dir / "requests.parquet") if row["reason"]}
    assert all(reason.startswith("a100-0: ") for reason in reasons) and reasons


def test_decisions_that_rely_on_the_announcement_of_a_dead_server_are_counted(
    virtual: str, testbed: Testbed, scenario: Any
) -> None:
    faults = fault("kill", 'at = "0.5 s"') + '\n[membership]\nkind = "announced"\n'
    outcome = testbed.up(scenario(faults), "--network", virtual, "--json", "--no-report")
    summary = assert_all_live_on(outcome)
    assert summary["n_stale_decisions"] >= 3, "every decision from then on"


@pytest.mark.usefixtures("fabric")
def test_a_running_testbed_takes_faults_by_hand_from_its_owner_only(testbed: Testbed, scenario: Any) -> None:
    run = testbed.start_up(scenario(), "--network", "fabric", "--hold", "--no-page", "--no-report", *REAL)
    run_dir = run.serving()
    where = ("--run", str(run_dir))
    assert stat.S_IMODE((run_dir / "live.sock").stat().st_mode) & 0o077 == 0
    killed = testbed("fault", "kill", "a100-0", *where, "--json")
    assert (killed.code, killed.json()["server"]) == (0, "a100-0"), killed.stderr
    assert_one_sentence(testbed("fault", "kill", "a100-0", *where), "a100-0 is dead already")
    assert_one_sentence(testbed("fault", "kill", "a100-9", *where), "a100-9", "valid: a100-0")
    assert_one_sentence(testbed("fault", "slow", "a100-1", *where), "--factor")
    assert_one_sentence(testbed("fault", "cont", "a100-1", *where), "a100-1 is not stopped")
    assert_one_sentence(testbed("fault", "hit", "a100-1", *where), "hit", "kill")
    for arguments in (("slow", "a100-1", "--factor", "2"), ("stop", "a100-2"), ("cont", "a100-2")):
        assert testbed("fault", *arguments, *where).code == 0
    run.says("holding")
    assert testbed("fault", "restart", "a100-0", *where).code == 0
    assert testbed("fault", "join", "late", *where).code == 0
    assert testbed("fault", "leave", "a100-1", *where).code == 0
    wait_until(lambda: events(run_dir, "left"), "the server that leaves")
    run.interrupt()
    assert run.wait().code == 0
    assert_one_sentence(testbed("fault", "kill", "a100-1", *where), "no testbed is running")
    assert_one_sentence(testbed("fault", "kill", "a100-1"), "no testbed is running below runs/")
    begun = [e["server"] for e in events(run_dir, "begun")]
    assert begun == ["a100-0", "late"]
    assert len({request for request, _ in logged_tokens(run_dir)}) == 4
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["n_completed"], summary["leaks"]) == (4, NOTHING_LEFT)
