"""Programs of the user's on the nodes of a running testbed: what they reach, and that they end with it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import (
    Outcome,
    Running,
    Testbed,
    assert_one_sentence,
    has_ended,
    processes,
    require,
    wait_until,
)
from tests.system.conftest import TWO_SITES

HELD = (
    "--hold",
    "--no-page",
    "--clock",
    "real",
    "--no-twin",
    "--no-report",
    "--set",
    "workload.n_requests=1",
)


def hold(testbed: Testbed, scenario: str, network: str = "fabric", *options: str) -> Running:
    running = testbed.start_up(scenario, "--network", network, *HELD, *options)
    running.says("holding the testbed up")
    return running


@pytest.fixture(scope="module")
def held(fabric: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Testbed, str]]:
    """A held testbed of two sites for all tests here that leave it as it is, and its run directory."""
    folder = tmp_path_factory.mktemp("held")
    (folder / "two-sites.toml").write_text(TWO_SITES, encoding="utf-8")
    testbed = Testbed(folder)
    running = hold(testbed, str(folder / "two-sites.toml"), "fabric", "--set", "network.subnet=10.77.0.0/16")
    yield testbed, str(running.run_dir())
    running.interrupt()
    assert running.wait().code == 0
    assert not processes(folder)


def execute(held: tuple[Testbed, str], node: str, *command: str) -> Outcome:
    testbed, run = held
    return testbed("exec", node, "--run", run, "--", *command)


def need(program: str) -> None:
    require(program, None if shutil.which(program) else f"{program} is not installed")


def test_a_program_finds_all_nodes_by_name_and_its_own_as_the_machines(held: tuple[Testbed, str]) -> None:
    nodes = ("client-0", "client-1", "mig-1g-0", "mig-1g-1", "a100-0")
    code = (
        "import socket, os, sys; print(socket.gethostname(), os.environ['TESTBED_NODE'], "
        f"*sorted({{socket.gethostbyname(name) for name in {nodes}}}))"
    )
    outcome = execute(held, "a100-0", "python3", "-c", code)
    assert outcome.code == 0, outcome.stderr
    hostname, node, *addresses = outcome.stdout.split()
    assert (hostname, node) == ("a100-0", "a100-0")
    document = json.loads((Path(held[1]) / "network.json").read_text(encoding="utf-8"))
    assert all(address.startswith("10.77.0.") for address in addresses)
    assert addresses == sorted(entry["address"] for entry in document["nodes"].values())


def test_the_exit_code_is_the_programs_and_a_signals_number_comes_on_top_of_128(
    held: tuple[Testbed, str],
) -> None:
    outcome = execute(held, "client-0", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (outcome.code, outcome.stdout, outcome.stderr) == (7, "out\n", "err\n")
    assert execute(held, "client-0", "sh", "-c", "kill -KILL $$").code == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("source", "target", "rtt_ms"),
    [
        ("client-0", "a100-0", 60.0),
        ("a100-0", "mig-1g-1", 60.0),
        ("mig-1g-0", "mig-1g-1", 5.0),
        ("client-0", "client-1", 60.0),
    ],
)
def test_ping_shows_the_scenarios_round_trip_between_any_two_nodes(
    held: tuple[Testbed, str], source: str, target: str, rtt_ms: float
) -> None:
    need("ping")
    outcome = execute(held, source, "ping", "-c", "3", "-i", "0.2", target)
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    found = re.search(r"= ([\d.]+)/", outcome.stdout)
    assert found is not None and float(found[1]) > 0.98 * rtt_ms


def test_iperf3_gets_no_more_than_the_scenarios_rate_and_tcpdump_sees_the_packets(
    held: tuple[Testbed, str],
) -> None:
    need("iperf3")
    need("tcpdump")
    testbed, run = held
    dump = testbed.start(
        "exec", "a100-0", "--run", run, "--", "tcpdump", "-l", "-n", "-c", "5", "tcp", "port", "5201"
    )
    dump.says("listening on")
    assert execute(held, "a100-0", "iperf3", "-s", "-1", "-D").code == 0
    outcome = execute(held, "mig-1g-0", "iperf3", "-c", "a100-0", "-t", "2", "-J")
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    received_bps = outcome.json()["end"]["sum_received"]["bits_per_second"]
    assert 0 < received_bps < 1.02 * 100e6
    seen = dump.wait()
    assert seen.code == 0 and len(seen.stdout.splitlines()) == 5


def test_links_changed_by_hand_are_what_programs_find(held: tuple[Testbed, str]) -> None:
    need("ping")
    testbed, run = held
    pair = ("mig-1g-0", "mig-1g-1")

    def ping() -> Outcome:
        return execute(held, pair[0], "ping", "-c", "2", "-i", "0.2", "-W", "1", pair[1])

    changed = testbed("link", "set", *pair, "--rtt", "200 ms", "--run", run, "--json")
    assert (changed.code, changed.json()["n_links"]) == (0, 2), changed.stderr
    found = re.search(r"= ([\d.]+)/", ping().stdout)
    assert found is not None and float(found[1]) > 199
    assert testbed("link", "cut", *pair, "--run", run).code == 0
    assert "100% packet loss" in ping().stdout
    assert testbed("link", "restore", *pair, "--run", run).code == 0
    assert ping().code == 0
    assert_one_sentence(testbed("link", "cut", "mig-1g-0", "nobody", "--run", run), "nobody")
    assert_one_sentence(testbed("link", "set", *pair, "--run", run), "--rtt")


def test_a_shell_is_a_program_with_the_terminals_streams(held: tuple[Testbed, str]) -> None:
    testbed, run = held
    outcome = testbed("shell", "client-1", "--run", run, env={"SHELL": "/bin/sh"})
    assert outcome.code == 0, outcome.stderr


def test_what_cannot_be_run_is_said_in_one_sentence(held: tuple[Testbed, str]) -> None:
    testbed, run = held
    assert_one_sentence(testbed("exec", "a100-9", "--run", run, "--", "true"), "a100-9", "valid: client-0")
    assert_one_sentence(execute(held, "a100-0", "no-such-program"), "no-such-program")
    assert_one_sentence(testbed("exec", "a100-0", "--", "true"), "no testbed is running below runs/")
    assert_one_sentence(testbed("shell", "a100-0"), "no testbed is running below runs/")


def test_on_loopback_there_is_no_namespace_to_run_in(testbed: Testbed, two_sites: str) -> None:
    run = str(hold(testbed, two_sites, "loopback").run_dir())
    assert_one_sentence(testbed("exec", "a100-0", "--run", run, "--", "true"), "loopback", "--network fabric")


@pytest.mark.usefixtures("fabric")
def test_programs_end_with_the_testbed_also_those_that_were_left_in_the_background(
    testbed: Testbed, two_sites: str
) -> None:
    running = hold(testbed, two_sites)
    run = str(running.run_dir())
    waiting = testbed.start("exec", "a100-0", "--run", run, "--", "sleep", "1000")
    left = testbed(
        "exec",
        "client-0",
        "--run",
        run,
        "--",
        "sh",
        "-c",
        "env -i setsid sleep 1000 >/dev/null 2>&1 & echo $!",
    )
    assert left.code == 0, left.stderr
    wait_until(lambda: "sleep" in processes(Path(run)).values(), "the program")
    running.interrupt()
    assert running.wait().code == 0
    assert waiting.wait().code == 128 + signal.SIGTERM
    wait_until(lambda: has_ended(int(left.stdout)), "the end of what was left")


@pytest.mark.usefixtures("orphans", "fabric")
def test_after_kill_9_programs_end_and_clean_ends_what_was_left_in_the_background(
    testbed: Testbed, two_sites: str
) -> None:
    running = hold(testbed, two_sites)
    run_dir = running.run_dir()
    waiting = testbed.start("exec", "a100-0", "--run", str(run_dir), "--", "sleep", "1000")
    left = testbed(
        "exec",
        "client-0",
        "--run",
        str(run_dir),
        "--",
        "sh",
        "-c",
        "setsid sleep 1000 >/dev/null 2>&1 & echo $!",
    )
    wait_until(lambda: list(processes(run_dir).values()).count("sleep") == 2, "both programs")
    # It hears of its owner's end just before it is killed with it, and sometimes has the time to end programs.
    (launcher,) = (pid for pid, name in processes(run_dir).items() if name == "tb:launcher")
    os.kill(launcher, signal.SIGSTOP)
    running.kill()
    assert waiting.wait().code == 128 + signal.SIGTERM
    assert "has ended, and with it a100-0" in waiting.stderr
    assert int(left.stdout) in processes(run_dir)
    cleaned = testbed("clean", "--out", str(run_dir), "--json")
    assert int(left.stdout) in [entry["pid"] for entry in cleaned.json()["processes"]]
    assert not processes(run_dir)
