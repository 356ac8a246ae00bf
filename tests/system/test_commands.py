"""The other commands: what they print for people and for scripts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.runs import FAST, MEMORY, REAL, Testbed, below, rows_of, wait_until

COMMANDS = ("up", "show", "validate", "scenarios", "policies", "links", "doctor", "clean", "report")


@pytest.mark.parametrize("command", ("", *COMMANDS))
def test_help_is_on_stdout_with_exit_code_0(command: str, testbed: Testbed) -> None:
    outcome = testbed(*command.split(), "--help")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "Usage: testbed" in outcome.stdout
    if not command:
        assert all(name in outcome.stdout for name in COMMANDS)


def test_without_arguments_the_help_is_printed(testbed: Testbed) -> None:
    outcome = testbed()
    assert (outcome.code, outcome.stderr) == (0, "")
    assert outcome.stdout == testbed("--help").stdout


def test_show_prints_a_scenario_that_loads_again_to_the_same(testbed: Testbed, tmp_path: Path) -> None:
    first = testbed("show", "clustered", "--set", "workload.rate=0.5")
    assert first.code == 0, first.stderr
    path = tmp_path / "clustered.toml"
    path.write_text(first.stdout, encoding="utf-8")
    assert testbed("show", str(path)).stdout == first.stdout
    document = testbed("show", str(path), "--json").json()
    assert document["workload"]["rate"] == 0.5
    assert document["resolved"] is True


def test_a_run_and_a_simulation_leave_the_version_that_the_command_prints(
    testbed: Testbed, tmp_path: Path
) -> None:
    asked = testbed("--version")
    assert (asked.code, asked.stderr) == (0, "")
    simulated = testbed("simulate", "clustered", "--out", str(tmp_path / "simulated"))
    emulated = testbed.up("clustered", *MEMORY, *FAST)
    assert (simulated.code, emulated.code) == (0, 0), emulated.stderr
    for folder, command in ((tmp_path / "simulated", "simulate"), (emulated.run_dir, "up")):
        provenance = json.loads((folder / "provenance.json").read_text())
        summary = json.loads((folder / "summary.json").read_text())
        assert asked.stdout.startswith(provenance["code"])
        assert provenance["code"] == summary["code"]
        assert f"{command} clustered" in provenance["command"]


def test_a_stored_scenario_repeats_its_run(testbed: Testbed) -> None:
    first = testbed.up("clustered", *MEMORY, *FAST)
    again = testbed.up(str(first.run_dir / "scenario.toml"), "--no-report")
    assert (first.code, again.code) == (0, 0), again.stderr
    for name in ("requests.parquet", "hops.parquet", "scenario.toml"):
        assert (first.run_dir / name).read_bytes() == (again.run_dir / name).read_bytes()


def test_a_stored_scenario_of_a_run_in_real_time_repeats_what_it_decided(testbed: Testbed) -> None:
    first = testbed.up("clustered", "--network", "loopback", *FAST, *REAL)
    again = testbed.up(str(first.run_dir / "scenario.toml"), "--no-report", "--no-twin")
    assert (first.code, again.code) == (0, 0), again.stderr
    requests = [rows_of(outcome.run_dir / "requests.parquet") for outcome in (first, again)]
    for name in ("arrival_at_s", "n_output_tokens", "chain"):
        assert [row[name] for row in requests[0]] == [row[name] for row in requests[1]]


def test_validate_checks_a_scenario_and_its_placement(testbed: Testbed) -> None:
    outcome = testbed("validate", "clustered", "--json")
    assert outcome.code == 0, outcome.stderr
    answer = outcome.json()
    assert (answer["valid"], answer["n_servers"], answer["n_clients"]) == (True, 9, 1)
    assert answer["n_requests"] == 100
    assert testbed("validate", "clustered").stdout.startswith("clustered: valid; 9 servers")


def test_scenarios_and_policies_are_listed_with_a_line_each(testbed: Testbed) -> None:
    scenarios = testbed("scenarios", "--json").json()["scenarios"]
    assert "clustered" in {row["name"] for row in scenarios}
    policies = testbed("policies", "--json").json()["policies"]
    named = {(row["kind"], row["name"]) for row in policies}
    assert {("pair", "petals"), ("pair", "proposed"), ("placement", "cg-bp"), ("routing", "ws-rr")} <= named
    assert all(row["summary"] for row in policies)
    assert len(testbed("policies").stdout.splitlines()) == len(policies)


def test_doctor_says_what_works_and_how_to_get_the_rest(testbed: Testbed) -> None:
    rows = testbed("doctor", "--json").json()["capabilities"]
    names = {row["name"] for row in rows}
    assert {"root", "namespaces", "rootless", "tun", "htb", "netem-qdisc", "blocks", "gpu"} <= names
    assert {f"network {name}" for name in ("netem", "fabric", "loopback", "memory")} <= names
    assert {"virtual time", "real time"} <= names
    assert all(row["detail"] for row in rows)
    text = testbed("doctor").stdout
    assert len(text.splitlines()) == len(rows) and "`testbed doctor`" not in text


@pytest.mark.parametrize("network", ["fabric", "loopback"])
def test_links_measures_both_directions_of_a_pair(network: str, testbed: Testbed, fabric: None) -> None:
    outcome = testbed(
        *("links", "clustered", "--network", network, "--pairs", "1", "--echoes", "5", "--json"),
        *("--time-scale", "10", "--set", "servers.0.count=3", "--set", "network.pairs.4.rate=20 Mbit/s"),
    )
    assert outcome.code == 0, outcome.stderr
    answer = outcome.json()
    assert answer["network"] == network
    there, back = answer["pairs"]
    assert (there["from"], there["to"]) == (back["to"], back["from"])
    for row in (there, back):
        assert row["rtt_ms"]["requested"] == pytest.approx(100)
        assert 95 < row["rtt_ms"]["p50"] <= row["rtt_ms"]["p99"]
        assert row["rate_mbps"]["requested"] == pytest.approx(20)
        assert 0 < row["rate_mbps"]["achieved"] < 22


def test_links_prints_a_table_for_people_and_leaves_no_folder(testbed: Testbed, tmp_path: Path) -> None:
    outcome = testbed(
        *(
            "links",
            "clustered",
            "--network",
            "loopback",
            "--pairs",
            "1",
            "--echoes",
            "2",
            "--time-scale",
            "20",
        ),
        env={"TMPDIR": str(tmp_path)},
    )
    assert outcome.code == 0, outcome.stderr
    assert "Mbit/s asked" in outcome.stdout
    assert not list(tmp_path.glob("testbed-links-*"))


def test_links_interrupted_exits_130_and_leaves_no_folder(testbed: Testbed, tmp_path: Path) -> None:
    run = testbed.start("links", "clustered", "--network", "loopback", env={"TMPDIR": str(tmp_path)})
    wait_until(lambda: list(tmp_path.glob("testbed-links-*/control.sock")), "the measurement")
    run.interrupt()
    outcome = run.wait()
    assert outcome.code == 130
    assert "Traceback" not in outcome.stderr
    assert not list(tmp_path.glob("testbed-links-*"))


def test_a_study_interrupted_says_that_it_stopped(testbed: Testbed) -> None:
    run = testbed.start("capacity", "clustered", "--slo", "ttft_p95=5s", "--runs", "500")
    wait_until(lambda: below(run.process.pid), "a worker")
    run.interrupt()
    outcome = run.wait()
    assert (outcome.code, outcome.stdout) == (130, "")
    assert outcome.stderr.startswith("testbed: stopped; ") and outcome.stderr.count("\n") == 1


def test_page_and_no_page_are_not_both(testbed: Testbed) -> None:
    for command in ("up", "serve"):
        outcome = testbed(command, "clustered", "--page", "--no-page")
        assert (outcome.code, outcome.stdout) == (2, "")
        assert outcome.stderr == "testbed: --page and --no-page cannot both be given; leave one out\n"


def test_auto_takes_what_the_doctor_promises_to_a_process_without_capabilities(testbed: Testbed) -> None:
    # The kernel lets root without capabilities make no user namespace that maps root.
    drop = (
        ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"] if os.geteuid() == 0 else []
    )
    rows = {row["name"]: row for row in testbed("doctor", "--json", wrapper=drop).json()["capabilities"]}
    for time, clock in (("virtual time", ()), ("real time", REAL)):
        outcome = testbed.up("clustered", "--json", *FAST, *clock, wrapper=drop)
        assert outcome.code == 0, outcome.stderr
        assert outcome.json()["n_completed"] == 3
        assert time.startswith(outcome.json()["clock"])
        chosen = outcome.json()["network"]
        assert rows[time]["detail"].startswith(f"network auto takes {chosen}")
        assert rows[f"network {chosen}"]["works"]
    events = (outcome.run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    why = json.loads(events[0])["why"]
    assert f"network {chosen} ({why})" in outcome.stderr
    assert all(
        f"no {name} because " in why for name in ("netem", "fabric") if not rows[f"network {name}"]["works"]
    )
