"""``[[node]]`` tables and ``testbed net``: programs of the user's that a scenario brings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.records.events import ProgramBegun, ProgramEnded, read_events
from tests.support.runs import Outcome, Running, Testbed, assert_one_sentence, processes, wait_until
from tests.system.conftest import TWO_SITES
from tests.system.test_programs import HELD

NODES = """
[[node]]
name = "web"
site = "There"
command = "python3 -u -m http.server 8080"

[[node]]
name = "once"
site = "Here"
command = ["sh", "-c", "echo $GREETING from $TESTBED_NODE; getent hosts web; exit 3"]
environment = { GREETING = "hello" }

[[node]]
name = "stubborn"
site = "Here"
command = ["sh", "-c", "trap '' TERM; sleep 1000 & while :; do wait; done"]

[[node]]
name = "again"
site = "Here"
restart = "on-failure"
command = ["sh", "-c", "[ -e $TESTBED_RUN/logs/second ] && exit 0; touch $TESTBED_RUN/logs/second; exit 1"]
"""
GET = "import urllib.request as u; print(u.urlopen('http://web:8080/').status)"

pytestmark = pytest.mark.usefixtures("fabric")


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "nodes.toml"
    path.write_text(TWO_SITES + NODES, encoding="utf-8")
    return str(path)


def ended(run_dir: Path) -> list[tuple[str, int]]:
    return [(event.node, event.status) for event in read_events(run_dir, ProgramEnded)]


def get(testbed: Testbed, run_dir: Path, node: str) -> Outcome:
    """Ask the web server, which may still be starting."""

    def found() -> Outcome | None:
        outcome = testbed("exec", node, "--run", str(run_dir), "--", "python3", "-c", GET)
        return outcome if outcome.code == 0 else None

    outcome = wait_until(found, "an answer of the web server")
    assert isinstance(outcome, Outcome)
    return outcome


def net(testbed: Testbed, scenario: str, *options: str) -> tuple[Running, Path]:
    out = testbed.folder / "net"
    running = testbed.start("net", scenario, "--network", "fabric", "--out", str(out), *options)
    running.says("is up")
    return running, out


def test_the_network_alone_runs_the_programs_of_a_scenario_until_interrupted(
    testbed: Testbed, scenario: str
) -> None:
    running, run_dir = net(testbed, scenario)
    assert get(testbed, run_dir, "mig-1g-0").stdout == "200\n"
    wait_until(lambda: ("again", 0) in ended(run_dir), "the second try")
    [listed] = [row for row in testbed("ps", "--json").json()["testbeds"] if row["run"] == str(run_dir)]
    assert (listed["phase"], listed["network"], listed["scenario"]) == ("holding", "fabric", "nodes")
    assert testbed("link", "cut", "Here", "There", "--run", str(run_dir)).code == 0
    refused = testbed("fault", "kill", "a100-0", "--run", str(run_dir))
    assert_one_sentence(refused, "there is no server a100-0: this testbed has only the network")
    assert not any(name.startswith("tb:a100") for name in processes(run_dir).values())
    running.interrupt()
    outcome = running.wait()
    assert outcome.code == 0, outcome.stderr
    assert "the program of once ended with status 3 and is not begun again" in outcome.stderr
    assert sorted(ended(run_dir)) == [("again", 0), ("again", 1), ("once", 3), ("stubborn", -9), ("web", -15)]
    lines = (run_dir / "logs" / "once.log").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "hello from once" and lines[1].endswith("web")
    assert "GET / HTTP/1.1" in (run_dir / "logs" / "web.log").read_text(encoding="utf-8")
    assert_one_sentence(testbed("report", str(run_dir)), "is not a run directory")


def test_programs_run_beside_the_servers_of_a_run(testbed: Testbed, scenario: str) -> None:
    running = testbed.start_up(scenario, "--network", "fabric", *HELD)
    run_dir = running.run_dir()
    running.says("holding the testbed up")
    assert "node web will run python3 -u -m http.server 8080" in running.stderr
    assert get(testbed, run_dir, "a100-0").stdout == "200\n"
    running.interrupt()
    assert running.wait().code == 0
    assert ("web", -15) in ended(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    assert (summary["n_completed"], summary["leaks"]["namespaces"]) == (1, 0)


def test_the_twin_of_a_run_with_programs_is_made_without_them(testbed: Testbed, scenario: str) -> None:
    options = ("--network", "fabric", "--no-report", "--set", "workload.n_requests=1")
    outcome = testbed.up(scenario, *options)
    assert outcome.code == 0, outcome.stderr
    assert (outcome.run_dir / "twin" / "summary.json").is_file()
    assert read_events(outcome.run_dir / "twin", ProgramBegun) == []


@pytest.mark.usefixtures("orphans")
def test_a_killed_network_leaves_no_program(testbed: Testbed, scenario: str) -> None:
    running, run_dir = net(testbed, scenario)
    wait_until(lambda: "sleep" in processes(run_dir).values(), "what a program has begun")
    running.kill()
    testbed("clean", "--out", str(run_dir))
    wait_until(lambda: not processes(run_dir), "the end of all")


def test_a_network_alone_on_several_machines_is_refused(testbed: Testbed, scenario: str) -> None:
    refused = testbed("net", scenario, "--set", "hosts=[{address='10.0.0.1'}]")
    assert_one_sentence(refused, "on this machine only", "testbed up --hold")


@pytest.mark.parametrize("network", ["loopback", "memory"])
def test_where_nodes_have_no_namespaces_programs_are_refused(
    network: str, testbed: Testbed, scenario: str
) -> None:
    assert_one_sentence(testbed("net", scenario, "--network", network), network, "--network fabric")
    refused = testbed.up(scenario, "--network", network)
    assert refused.code == 2
    assert "[[node]]" in refused.stderr.splitlines()[-1] or "need" in refused.stderr.splitlines()[-1]
