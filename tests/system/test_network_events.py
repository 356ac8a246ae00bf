"""Runs in which links change as the scenario says."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import (
    Outcome,
    Testbed,
    assert_tables_hold_the_whole_log,
    clean_testbed,
    logged_tokens,
    rows_of,
)

SCENARIO = """
seed = 3
model = { profile = "bloom-176b", n_blocks = 6 }
servers = [{ hardware = "mig-1g", site = "Here", count = 2 }, { hardware = "a100", site = "There" }]
clients = [{ site = "Here" }]
workload = { arrivals = "constant", rate = 1, n_requests = 2, n_input_tokens = 5, n_output_tokens = 100 }

[network]
kind = "clusters"
pairs = [
    { sites = ["Here", "Here"], rtt = "5 ms", rate = "1 Gbit/s" },
    { sites = ["There", "There"], rtt = "5 ms", rate = "1 Gbit/s" },
    { sites = ["Here", "There"], rtt = "60 ms", rate = "100 Mbit/s" },
]

[[network.event]]
at = "4 s"
for = "8 s"
partition = ["There"]
"""

REAL = ("--clock", "real", "--time-scale", "3", "--no-twin")
SLOWER = (*REAL, "--time-scale", "2")
"""Half of the outage is two seconds: a busy machine holds no other token up for so long."""


@pytest.fixture
def outage(tmp_path: Path) -> str:
    """The one chain that policies choose is cut off for 8 s while two requests decode."""
    path = tmp_path / "outage.toml"
    path.write_text(SCENARIO, encoding="utf-8")
    return str(path)


def lines(outcome: Outcome, event: str) -> list[dict[str, Any]]:
    text = (outcome.run_dir / "events.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, text.splitlines()) if line["event"] == event]


def assert_the_outage_delays_exactly_the_tokens_in_it(outcome: Outcome, late_s: float = math.inf) -> None:
    """Each of the two requests has one token that lasts as long as the outage, and it ends after it.

    ``late_s``: how late the change of a link may be.
    """
    assert outcome.code == 0, outcome.stderr
    assert_tables_hold_the_whole_log(outcome.run_dir)
    cut, mended = lines(outcome, "network-change")
    assert (cut["planned_at_s"], mended["planned_at_s"]) == (4.0, 12.0)
    assert cut["late_s"] == pytest.approx(cut["at_s"] - 4.0)
    assert 0 <= cut["late_s"] <= late_s and 0 <= mended["late_s"] <= late_s
    assert cut["why"] == "There cut from the rest"
    middle_s = (cut["at_s"] + mended["at_s"]) / 2  # a busy machine may carry out either late
    hops = rows_of(outcome.run_dir / "hops.parquet")
    finished_at_s = {(row["request"], row["token"]): row["received_at_s"] for row in hops}
    delayed = {key: s for key, (s, _) in logged_tokens(outcome.run_dir).items() if s > middle_s - cut["at_s"]}
    ends = {key: finished_at_s[key] for key in delayed}
    assert sorted(request for request, _ in delayed) == [0, 1], (delayed, ends, cut["at_s"], mended["at_s"])
    assert all(
        token > 0 and finished_at_s[request, token] > mended["planned_at_s"] for request, token in delayed
    )
    # What was on its way when the link was cut has arrived long before the middle of the outage.
    assert not [s for s in finished_at_s.values() if middle_s < s < mended["planned_at_s"]]
    assert [row["n_tokens_done"] for row in rows_of(outcome.run_dir / "requests.parquet")] == [100, 100]
    trace = json.loads((outcome.run_dir / "trace.json").read_text(encoding="utf-8"))
    instants = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert [event["name"] for event in instants] == [cut["why"], mended["why"]]


def test_an_outage_during_decode_delays_exactly_the_tokens_in_it_and_the_request_completes(
    testbed: Testbed, outage: str
) -> None:
    outcome = testbed.up(outage, "--network", "loopback", "--no-report", *SLOWER)
    assert_the_outage_delays_exactly_the_tokens_in_it(outcome)
    # The model knows of the outage: the longest modelled token has it too.
    summary = json.loads((outcome.run_dir / "summary.json").read_text(encoding="utf-8"))
    cut, mended = lines(outcome, "network-change")
    assert summary["model"]["token_gap_s"]["max"] > (mended["at_s"] - cut["at_s"]) / 2


@pytest.mark.usefixtures("fabric")
def test_tcp_brings_the_delayed_tokens_through_an_outage_on_fabric(testbed: Testbed, outage: str) -> None:
    outcome = testbed.up(outage, "--network", "fabric", "--no-report", *SLOWER)
    assert_the_outage_delays_exactly_the_tokens_in_it(outcome)


@pytest.mark.parametrize("network", ["loopback", "fabric"])
def test_an_outage_by_hand_is_in_the_record_the_trace_and_the_model(
    network: str, testbed: Testbed, outage: str, request: pytest.FixtureRequest
) -> None:
    """Cut and restored by hand while the requests decode, to what the scenario has changed before."""
    if network == "fabric":
        request.getfixturevalue(network)
    event = "network.event=[{at='0.1 s', link=['Here','There'], rtt='80 ms'}]"
    longer = ("--set", "workload.n_output_tokens=200")  # while a link is cut, nothing goes on
    running = testbed.start_up(outage, "--network", network, "--no-report", "--set", event, *longer, *REAL)
    run_dir = running.serving(20)
    assert testbed("link", "cut", "Here", "There", "--run", str(run_dir)).code == 0
    assert testbed("link", "restore", "Here", "There", "--run", str(run_dir)).code == 0
    outcome = running.wait()
    assert outcome.code == 0, outcome.stderr
    assert "2 changes of links by hand: the closed model has them" in outcome.stdout
    cut, up, planned = sorted(lines(outcome, "network-change"), key=lambda line: line["by"])
    assert [line["by"] for line in (cut, up, planned)] == ["hand", "hand", "scenario"]
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["n_link_changes_by_hand"] == 2
    assert summary["model"]["token_gap_s"]["max"] > (up["at_s"] - cut["at_s"]) / 2
    assert {tuple(row[:2]): row[2] for row in up["links"]}["client-0", "a100-0"] == 0.04
    trace = json.loads((run_dir / "trace.json").read_text(encoding="utf-8"))
    instants = [event["name"] for event in trace["traceEvents"] if event["ph"] == "i"]
    assert sorted(instants) == sorted(line["why"] for line in (cut, up, planned))
    tables = {name: (run_dir / name).read_bytes() for name in ("hops.parquet", "requests.parquet")}
    assert testbed("report", str(run_dir)).code == 0
    assert {name: (run_dir / name).read_bytes() for name in tables} == tables


@pytest.fixture(scope="module", params=["fabric", "memory"])
def interrupted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Outcome]:
    """The outage in virtual time; not to be changed."""
    if request.param == "fabric":
        request.getfixturevalue("fabric")
    folder = tmp_path_factory.mktemp("interrupted")
    (folder / "outage.toml").write_text(SCENARIO, encoding="utf-8")
    with clean_testbed(folder) as testbed:
        yield testbed.up(str(folder / "outage.toml"), "--network", request.param, "--no-report")


def test_the_delayed_tokens_come_through_an_outage_in_virtual_time(interrupted: Outcome) -> None:
    assert_the_outage_delays_exactly_the_tokens_in_it(interrupted, late_s=1e-6)


def test_report_rebuilds_the_same_tables_of_a_run_with_changes(
    interrupted: Outcome, testbed: Testbed, tmp_path: Path
) -> None:
    copy = shutil.copytree(interrupted.run_dir, tmp_path / "copy")
    tables = ("hops.parquet", "requests.parquet", "trace.json")
    for name in tables:
        (copy / name).unlink()
    assert testbed("report", str(copy)).code == 0
    for name in tables:
        assert (copy / name).read_bytes() == (interrupted.run_dir / name).read_bytes()


@pytest.mark.parametrize("network", ["loopback", "fabric", "memory"])
def test_jitter_and_loss_do_not_change_the_tokens(
    network: str, testbed: Testbed, outage: str, request: pytest.FixtureRequest
) -> None:
    if network == "fabric":
        request.getfixturevalue(network)
    real = ("--time-scale", "50", "--no-twin") if network == "loopback" else ()
    options = ("--set", "network.jitter=20 ms", "--set", "network.loss=5 %", "--set", "network.event=[]")
    outcome = testbed.up(outage, "--network", network, "--no-report", *real, *options)
    assert outcome.code == 0, outcome.stderr
    assert [row["n_tokens_done"] for row in rows_of(outcome.run_dir / "requests.parquet")] == [100, 100]


def test_an_interrupt_ends_a_run_whose_changes_are_still_to_come(testbed: Testbed, outage: str) -> None:
    option = 'network.event=[{at="0 s",link=["Here","There"],jitter="9 ms"},{at="9 h",site="Here",down=true}]'
    running = testbed.start_up(outage, "--network", "loopback", "--no-report", "--set", option, *REAL)
    running.serving(5)
    running.interrupt()
    outcome = running.wait()
    assert outcome.code == 130, outcome.stderr
    assert len(lines(outcome, "network-change")) == 1


def test_a_network_that_cannot_share_links_says_so(testbed: Testbed) -> None:
    options = ("--set", "network.share_links=true", "--set", "workload.n_requests=1", "--time-scale", "50")
    options += ("--set", "workload.n_output_tokens=2", "--no-report", "--no-twin")
    outcome = testbed.up("abovenet", "--network", "loopback", *options)
    assert outcome.code == 0, outcome.stderr
    assert "network loopback (asked for), where every pair has the whole rate of its path" in outcome.stderr
    assert lines(outcome, "network")[0]["shares_links"] is False
