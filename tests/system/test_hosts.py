"""Runs over three machines of a Ray cluster whose clocks are 1,000 s apart: namespaces, each with processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from testbed.rundir import is_in_use, scratch_folders
from tests.support.ray_cluster import Machine, cluster, need_ray
from tests.support.runs import (
    PATIENCE_S,
    Running,
    Testbed,
    assert_tables_hold_the_whole_log,
    rows_of,
    wait_until,
)

need_ray()
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("fabric")]

AHEAD_S = 1000
SERVERS = ("a100-0", "a100-1", "a100-2", "a100-3")
SCENARIO = """
name = "machines"
seed = 1
model = { profile = "bloom-176b", n_blocks = 8 }
clients = { site = "a" }
workload = { arrivals = "constant", rate = 2, n_requests = 4, n_input_tokens = 20, n_output_tokens = 40 }
policy = { name = "petals" }

[[servers]]
hardware = "a100"
site = "b"
count = 4
memory = "12 GB"

[network]
kind = "clusters"
keep_cpus_awake = false
pairs = [
    { sites = ["b", "b"], rtt = "5 ms", rate = "1 Gbit/s" },
    { sites = ["a", "b"], rtt = "50 ms", rate = "1 Gbit/s" },
]

[[hosts]]
name = "here"
address = "10.77.0.1"
servers = ["a100-3"]

[[hosts]]
name = "second"
address = "10.77.0.2"
servers = ["a100-1", "a100-2"]

[[hosts]]
name = "third"
address = "10.77.0.3"
"""
"""Four servers, of which any one can be spared."""


def assert_clean_removes_the_rest(testbed: Testbed, run_dir: Path) -> None:
    """Programs that were killed could not remove their temporary folders."""
    assert [folder for folder in scratch_folders() if not is_in_use(folder)]
    assert testbed("clean", "--out", str(run_dir.parent)).code == 0
    assert all(map(is_in_use, scratch_folders()))


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        cluster(Path(folder), n_machines=3, ahead_s=AHEAD_S) as found,
    ):
        yield found


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "machines.toml"
    path.write_text(SCENARIO, encoding="utf-8")
    return str(path)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def begin(testbed: Testbed, head: Machine, scenario: str, run_dir: Path, *options: str) -> Running:
    """``testbed up`` on the first machine, which ends with the test."""
    quiet = ("--no-page", "--no-report", "--json", "--out", str(run_dir))
    return testbed.start("up", scenario, *quiet, *options, wrapper=head.inside([]), forker=head.forker)


def left_on(machine: Machine) -> list[str]:
    """What there is of a run on a machine: processes and network devices."""
    # The first process of these machines waits for no children but its own.
    names = (
        "ps -e -o stat=,comm= | grep -v ^Z | grep -o tb:.* ; ip -o link | cut -d: -f2 | grep testbed; true"
    )
    asked = [*machine.inside(["sh", "-c", names])]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()


def assert_nothing_left(machines: Sequence[Machine]) -> None:
    for machine in machines:
        wait_until(lambda machine=machine: not left_on(machine), f"nothing on {machine.address}")


def assert_instants_are_in_order(summary: dict[str, Any], run_dir: Path) -> None:
    """A step arrives after it was sent and departs before it is received, as far as the clocks are known."""
    known_s = max(machine["uncertainty_s"] for machine in summary["machines"])
    assert known_s < 0.1
    hops = rows_of(run_dir / "hops.parquet")
    assert {hop["server"] for hop in hops} >= {"a100-0", "a100-2"}
    for hop in hops:
        assert hop["sent_at_s"] <= hop["arrived_at_s"] + known_s
        assert hop["arrived_at_s"] <= hop["departed_at_s"] <= hop["received_at_s"] + known_s


def assert_clocks_are_known(summary: dict[str, Any]) -> None:
    assert [machine["name"] for machine in summary["machines"]] == ["second", "third"]
    assert [machine["n_nodes"] for machine in summary["machines"]] == [2, 1]
    for number, machine in enumerate(summary["machines"], 1):
        assert abs(machine["offset_s"] - number * AHEAD_S) <= machine["uncertainty_s"] < 0.1


_ASK = """
import re, subprocess, urllib.error, urllib.request as u
said = subprocess.run(["ss", "-ltnHp"], capture_output=True, text=True).stdout
for port in sorted({int(p) for p in re.findall(r"10\\.77\\.0\\.2:(\\d+)", said)}):
    for headers in ({}, {"Authorization": "Bearer 0123"}):
        try: u.urlopen(u.Request(f"http://10.77.0.2:{port}/v1/sessions", headers=headers), timeout=2)
        except urllib.error.HTTPError as e: print(e.code)
        except OSError: pass
"""


def answers_to_a_stranger(machine: Machine) -> list[str]:
    """What the ports of the second machine answer to a program that is not of the run."""
    command = machine.inside([sys.executable, "-c", _ASK])
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S).stdout.split()


@pytest.mark.parametrize("network", ["hosts", "fabric"])
def test_a_run_over_three_machines(
    testbed: Testbed, machines: list[Machine], scenario: str, run_dir: Path, network: str
) -> None:
    is_real = network == "hosts"
    longer = ("--set", "workload.n_output_tokens=150") if is_real else ()
    running = begin(testbed, machines[0], scenario, run_dir, "--network", network, *longer)
    if is_real:
        running.serving(10)
        assert answers_to_a_stranger(machines[1]).count("401") == 4
    run = running.wait()
    assert run.code == 0, run.stderr
    summary = run.json()
    assert summary["n_completed"] == 4
    assert summary["network"] == network
    assert summary["leaks"] == {"sessions": 0, "cache_bytes": 0, "descriptors": 0, "namespaces": 0}
    assert_clocks_are_known(summary)
    assert_instants_are_in_order(summary, run_dir)
    assert_tables_hold_the_whole_log(run_dir)
    assert {f"{server}.log" for server in SERVERS} <= {path.name for path in (run_dir / "logs").iterdir()}
    assert (run_dir / "twin").exists() == (network == "fabric")
    if network == "fabric":
        ways_s = [hop["arrived_at_s"] - hop["sent_at_s"] for hop in rows_of(run_dir / "hops.parquet")]
        known_s = sum(machine["uncertainty_s"] for machine in summary["machines"])
        assert 0.0245 - known_s < min(ways_s) < 0.050 + known_s, "a link's 25 ms, as far as clocks are known"
    assert_nothing_left(machines)


def test_an_interrupted_run_states_how_well_clocks_are_known(
    testbed: Testbed, machines: list[Machine], scenario: str, run_dir: Path
) -> None:
    longer = ("--set", "workload.n_output_tokens=500")
    running = begin(testbed, machines[0], scenario, run_dir, "--network", "hosts", *longer)
    running.serving(10)
    driver = json.loads((run_dir / "owner.json").read_text())["pid"]
    subprocess.run(machines[0].inside(["kill", "-INT", str(driver)]), check=True)
    run = running.wait()
    assert run.code == 130, run.stderr
    assert_clocks_are_known(run.json())
    assert_nothing_left(machines)


def test_a_link_that_is_shorter_than_the_real_one_is_refused(
    testbed: Testbed, machines: list[Machine], scenario: str, run_dir: Path
) -> None:
    short = ("--network", "fabric", "--set", "network.pairs.1.rtt=10 us")
    run = begin(testbed, machines[0], scenario, run_dir, *short).wait()
    assert run.code == 2, run.stderr
    assert "give the link a longer delay" in run.stderr and "Traceback" not in run.stderr
    assert_nothing_left(machines)


@pytest.mark.usefixtures("orphans")
def test_a_kill_9_of_the_command_ends_everything_on_all_machines(
    testbed: Testbed, machines: list[Machine], scenario: str, run_dir: Path
) -> None:
    longer = ("--set", "workload.n_output_tokens=500", "--set", "network.keep_cpus_awake=true")
    running = begin(testbed, machines[0], scenario, run_dir, "--network", "fabric", *longer)
    running.serving(10)
    assert all(left_on(machine) for machine in machines)
    driver = json.loads((run_dir / "owner.json").read_text())["pid"]
    subprocess.run(machines[0].inside(["kill", "-9", str(driver)]), check=True)
    running.wait()
    assert_nothing_left(machines)
    assert_clean_removes_the_rest(testbed, run_dir)


def test_what_the_cluster_does_not_have_is_one_sentence(
    testbed: Testbed, machines: list[Machine], scenario: str, run_dir: Path
) -> None:
    other = Path(scenario).read_text(encoding="utf-8").replace("10.77.0.3", "10.77.0.9")
    Path(scenario).write_text(other, encoding="utf-8")
    run = begin(testbed, machines[0], scenario, run_dir).wait()
    assert (
        run.code == 2
        and "no machine of the Ray cluster has the resources of third: 1 CPU, 0.001 node" in run.stderr
    )


@pytest.mark.usefixtures("orphans")
def test_sessions_recover_from_the_loss_of_a_machine(
    testbed: Testbed, machines: list[Machine], scenario: str, run_dir: Path
) -> None:
    """The last one here: the machine does not come back."""
    longer = ("--set", "workload.n_output_tokens=60", "--no-twin")
    soon = ("--set", "recovery.request_timeout=5 s")  # nobody is left to reset the clients' connections
    running = begin(testbed, machines[0], scenario, run_dir, "--network", "fabric", *longer, *soon)
    running.serving(40)
    machines[1].kill()
    run = running.wait()
    assert run.code == 0, run.stderr
    summary = run.json()
    assert summary["n_completed"] == 4
    assert summary["n_replays"] >= 1
    assert run.stderr.count("the machine second (10.77.0.2) is lost") == 1
    assert [machine["is_lost"] for machine in summary["machines"]] == [True, False]
    events = map(json.loads, (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines())
    died = {event["server"] for event in events if event["event"] == "fault"}
    assert died == {"a100-1", "a100-2"}
    assert_nothing_left([machines[0], machines[2]])
    assert_clean_removes_the_rest(testbed, run_dir)
