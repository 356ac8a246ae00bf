"""Which testbeds run on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.runs import Testbed
from tests.support.serving import serving
from tests.system.test_programs import HELD, hold


def listed(testbed: Testbed, *run_dirs: Path) -> list[dict[str, Any]]:
    """What ``testbed ps`` says of these runs; others may run beside."""
    answer = testbed("ps", "--json").json()
    wanted = {str(run_dir) for run_dir in run_dirs}
    return [row for row in answer["testbeds"] if row["run"] in wanted]


def test_running_testbeds_are_listed_until_they_end(testbed: Testbed, two_sites: str) -> None:
    first = hold(testbed, two_sites, "loopback")
    second = hold(testbed, two_sites, "loopback")
    one, two = first.run_dir(), second.run_dir()
    rows = listed(testbed, one, two)
    assert [(row["run"], row["pid"]) for row in rows] == [
        (str(one), first.process.pid),
        (str(two), second.process.pid),
    ]
    for row in rows:
        assert (row["scenario"], row["phase"]) == ("two-sites", "holding")
        assert (row["network"], row["clock"]) == ("loopback", "real")
        assert row["since"] and row["endpoint"] is None and row["page"] is None
    assert "testbeds share this machine's CPUs" in testbed("ps").stdout
    first.interrupt()
    assert first.wait().code == 0
    assert [row["run"] for row in listed(testbed, one, two)] == [str(two)]


def test_an_endpoint_is_listed_while_it_can_be_used(testbed: Testbed, two_sites: str, tmp_path: Path) -> None:
    with serving(tmp_path / "served", two_sites, "--network", "loopback") as serves:
        [row] = listed(testbed, serves.run_dir)
        assert (row["page"], row["endpoint"]) == (None, serves.url)
        assert f"endpoint {serves.url}" in testbed("ps").stdout
        serves.end()
    assert not (serves.run_dir / "endpoint.json").exists()


def test_a_run_in_virtual_time_is_listed_too(testbed: Testbed, two_sites: str) -> None:
    long = ("--clock", "virtual", "--network", "memory", "--set", "workload.n_output_tokens=20000", *HELD[5:])
    running = testbed.start_up(two_sites, *long)
    run_dir = running.serving()
    [row] = listed(testbed, run_dir)
    assert (row["phase"], row["clock"], row["network"]) == ("serving", "virtual", "memory")
    running.interrupt()
    running.wait()


def test_nothing_is_said_in_one_line_where_nothing_runs(testbed: Testbed, tmp_path: Path) -> None:
    from testbed.runs.ps import ps_command, ps_text

    answer = ps_command(tmp_path)
    assert answer == {"testbeds": [], "share_cpus": False}
    assert ps_text(answer) == "no testbed is running"
