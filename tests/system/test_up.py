"""A run that goes well: what it prints and what it leaves."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import shutil
import termios
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import fork_command
from tests.support.runs import (
    FAST,
    MEMORY,
    PATIENCE_S,
    REAL,
    Outcome,
    Testbed,
    all_namespaces,
    assert_tables_hold_the_whole_log,
    namespaces,
    processes,
    rows_of,
    wait_until,
)

STATISTICS = {"mean", "std", "min", "p50", "p90", "p95", "p99", "max", "n"}
ERROR_FIGURES = {"mean_abs_ratio", "p99_abs_ratio", "max_abs_ratio", "mean_ratio", "mean_abs_s"}
REQUEST_METRICS = {"queue_s", "setup_s", "ttft_s", "tpot_s", "token_gap_s", "per_token_s", "e2e_s"}
SLOWEST_DECODE_S = 16.2488e-3
"""Of one block, on the slower of the two profiles."""
HOP_METRICS = {"hop_compute_s", "hop_network_s", "hop_client_s"}


def summary_of(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "summary.json").read_text(encoding="utf-8")))


def assert_complete(outcome: Outcome, n_requests: int = 3) -> dict[str, Any]:
    """Exit code 0, every request completed, every token in the tables; answers the summary."""
    assert outcome.code == 0, outcome.stderr
    summary = summary_of(outcome.run_dir)
    assert (summary["n_requests"], summary["n_completed"]) == (n_requests, n_requests)
    assert_tables_hold_the_whole_log(outcome.run_dir)
    return summary


@pytest.mark.parametrize("finished", ["fabric"], indirect=True)
def test_a_run_on_fabric_completes_every_request_and_exits_0(finished: Outcome) -> None:
    summary = assert_complete(finished)
    assert (summary["network"], summary["clock"]) == ("fabric", "virtual")
    assert summary["n_failed"] == 0
    assert summary["forwarder"]["packets"] > 0


@pytest.mark.parametrize("finished", ["memory"], indirect=True)
def test_a_run_on_memory_completes_every_request_and_exits_0(finished: Outcome) -> None:
    summary = assert_complete(finished)
    assert (summary["network"], summary["clock"]) == ("memory", "virtual")
    assert summary["n_failed"] == 0
    assert summary["forwarder"] is None


@pytest.mark.usefixtures("fabric")
def test_a_run_on_fabric_in_real_time_completes_every_request_and_exits_0(testbed: Testbed) -> None:
    summary = assert_complete(testbed.up("clustered", "--network", "fabric", *FAST, *REAL))
    assert (summary["network"], summary["clock"], summary["time_scale"]) == ("fabric", "real", 50)
    assert summary["n_failed"] == 0
    assert summary["forwarder"]["packets"] > 0
    assert summary["overhead_per_hop_s"] > 0


def test_json_is_one_object_on_stdout_and_messages_are_on_stderr(finished: Outcome) -> None:
    assert finished.stdout.count("\n") == 1
    assert finished.json() == summary_of(finished.run_dir)
    messages = finished.stderr.splitlines()
    assert len(messages) == 3 and messages[1].startswith("compute.batching is not given")
    assert messages[0] == f"run {finished.run_dir}"
    why = {"fabric": "asked for", "memory": "all nodes in one process"}
    network = finished.json()["network"]
    told = (
        f"clock virtual (nothing here needs real time); network {network} ({why[network]}); 10 nodes up in "
    )
    assert messages[2].startswith(told)


def test_the_run_directory_is_complete(finished: Outcome) -> None:
    run_dir = finished.run_dir
    for name in ("scenario.toml", "plan.json", "events.jsonl", "requests.parquet", "hops.parquet"):
        assert (run_dir / name).stat().st_size > 0
    plan = json.loads((run_dir / "plan.json").read_text())
    nodes = [*plan["servers"], *plan["clients"]]
    assert len(plan["placement"]["ranges"]) == 9
    others = {"fabric", "launcher"} if finished.json()["network"] == "fabric" else set()
    assert {path.stem for path in (run_dir / "logs").iterdir()} == {*nodes, *others}
    assert {path.stem for path in (run_dir / "events").iterdir()} == set(plan["clients"])
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["network", "serving", "stopped"]
    assert not list(run_dir.rglob("*.part")) and not list(run_dir.rglob("*.sock"))


def test_the_summary_holds_what_others_script_against(finished: Outcome) -> None:
    summary = finished.json()
    assert (summary["compute"], summary["time_scale"]) == ("stub", 1)
    assert (summary["clock"], summary["clock_why"]) == ("virtual", "nothing here needs real time")
    assert summary["wall_s"] > 0 < summary["scenario_s"]
    assert summary["policy"]["placement"] == "cg-bp" and summary["policy"]["routing"] == "ws-rr"
    for group, names in (("metrics", REQUEST_METRICS | HOP_METRICS), ("model", REQUEST_METRICS)):
        assert names <= set(summary[group])
        for name in names:
            assert set(summary[group][name]) == STATISTICS
            assert summary[group][name]["n"] > 0
            assert summary[group][name]["min"] <= summary[group][name]["p50"] <= summary[group][name]["max"]
    assert {"decision_s", "schedule_lag_s"} <= set(summary["metrics"])
    requests = {"queue_s", "ttft_s", "tpot_s", "per_token_s", "e2e_s"}
    assert summary["emulation_error_of"] == "closed model"
    assert set(summary["emulation_error"]) == {*requests, "token_gap_s", "hop_s"}
    assert set(summary["hop_model_error"]) == {"token_gap_s", "hop_s"}
    for errors in (*summary["emulation_error"].values(), *summary["hop_model_error"].values()):
        assert set(errors) == ERROR_FIGURES
    assert summary["emulation_error"]["per_token_s"]["max_abs_ratio"] < 1e-3
    assert summary["metrics"]["token_gap_s"]["n"] == 3 * 3
    assert summary["overhead_per_hop_s"] is None, "virtual time has none of it"
    assert summary["metrics"]["schedule_lag_s"]["max"] < 1e-6
    assert summary["startup_s"] > 0
    assert summary["objectives"] == {"ttft": 60.0}
    assert summary["goodput_rps"] > 0


def test_the_trace_is_a_chrome_trace_whose_processes_are_sites(finished: Outcome) -> None:
    trace = json.loads((finished.run_dir / "trace.json").read_text(encoding="utf-8"))
    events = trace["traceEvents"]
    sites = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert sites == {"Cluster0", "Cluster1", "Cluster2"}
    spans = [e for e in events if e["ph"] == "X"]
    assert spans and all(e["dur"] >= 0 and {"name", "pid", "tid", "ts"} <= set(e) for e in spans)
    assert sum(e["name"].startswith("request ") for e in spans) == 3


def test_report_rebuilds_the_same_tables_byte_by_byte(
    finished: Outcome, testbed: Testbed, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished.run_dir, copy)
    tables = ("requests.parquet", "hops.parquet", "trace.json")
    for name in (*tables, "summary.json"):
        (copy / name).unlink()
    outcome = testbed("report", str(copy), "--json")
    assert outcome.code == 0, outcome.stderr
    for name in tables:
        assert (copy / name).read_bytes() == (finished.run_dir / name).read_bytes()
    expected = {**finished.json(), "objectives": {}}
    for client in expected["clients"].values():
        del client["n_met"]  # of the objectives, which were the command's
    assert outcome.json() == {**expected, "goodput_rps": outcome.json()["goodput_rps"]}
    assert (copy / "report.html").stat().st_size > 0


def test_the_same_seed_repeats_arrivals_and_another_changes_them(finished: Outcome, testbed: Testbed) -> None:
    def arrivals(outcome: Outcome) -> list[float]:
        return [row["arrival_at_s"] for row in rows_of(outcome.run_dir / "requests.parquet")]

    same = testbed.up("clustered", *MEMORY, "--seed", "0", *FAST)
    other = testbed.up("clustered", *MEMORY, "--seed", "1", *FAST)
    assert_complete(same)
    assert summary_of(assert_complete(other) and other.run_dir)["seed"] == 1
    assert arrivals(same) == arrivals(finished)
    assert arrivals(other) != arrivals(finished)


@pytest.mark.parametrize("network", ["loopback", "memory"])
def test_plain_output_is_a_table_on_stdout_and_a_report_is_written(network: str, testbed: Testbed) -> None:
    fast = [argument for argument in FAST if argument != "--no-report"]
    clock = REAL if network == "loopback" else ()
    options = ("--policy", "petals", "--network", network, *clock, *fast)
    outcome = testbed.up("clustered", *options, renders=network == "memory")
    summary = assert_complete(outcome)
    assert outcome.stdout.startswith("clustered: 3 of 3 requests completed\n")
    assert "placement petals, routing petals" in outcome.stdout
    assert ("least faithful" in outcome.stdout) == (network == "loopback")
    assert ("error mean" in outcome.stdout) == (network == "memory")
    assert summary["network"] == network
    assert (outcome.run_dir / "report.html").stat().st_size > 0
    assert {path.suffix for path in (outcome.run_dir / "figures").iterdir()} == {".png", ".pdf"}


def test_petals_policies_with_their_published_overheads_run(virtual: str, testbed: Testbed) -> None:
    settings = ("--set", "calibration.set=petals-scattered", "--policy", "petals")
    summary = assert_complete(testbed.up("clustered", "--network", virtual, *settings, *FAST))
    assert summary["policy"]["placement"] == summary["policy"]["routing"] == "petals"
    assert summary["calibration"]["set"] == "petals-scattered"
    assert summary["network"] == virtual


def test_session_setup_is_in_the_first_token_and_reported_without_it_too(testbed: Testbed) -> None:
    settings = ("--set", "calibration.session_setup=true", "--set", "calibration.session_setup_proposed=3 s")
    outcome = testbed.up("clustered", *MEMORY, *settings, *FAST)
    summary = assert_complete(outcome)
    assert summary["calibration"]["session_setup_s"] == 3.0
    assert summary["metrics"]["setup_s"]["min"] >= 3.0
    with_s = summary["metrics"]["ttft_s"]["mean"]
    assert summary["without_session_setup"]["ttft_s"]["mean"] == pytest.approx(with_s - 3.0)
    assert "session_setup adds 3 s to every first token" in outcome.stdout


def test_clients_at_two_sites_share_the_servers_of_both(
    virtual: str, testbed: Testbed, two_sites: str
) -> None:
    outcome = testbed.up(two_sites, "--network", virtual, "--no-report", "--set", "workload.n_requests=8")
    summary = assert_complete(outcome, 8)
    assert summary["scenario"] == "two-sites"
    rows = rows_of(outcome.run_dir / "requests.parquet")
    assert len({row["client"] for row in rows}) == 2
    assert len(list((outcome.run_dir / "events").iterdir())) == 2


def test_a_server_that_computes_serially_serves_gamma_arrivals_of_mixed_lengths(
    virtual: str, testbed: Testbed, two_sites: str
) -> None:
    lengths = '{distribution="choice", values=[2, 5]}'
    settings = [
        "compute.serial=true",
        "workload.arrivals=gamma",
        "workload.shape=0.5",
        "workload.n_requests=8",
    ]
    settings += [f"workload.n_input_tokens={lengths}", f"workload.n_output_tokens={lengths}"]
    options = [part for setting in settings for part in ("--set", setting)]
    outcome = testbed.up(two_sites, "--network", virtual, "--no-report", *options)
    assert_complete(outcome, 8)
    rows = rows_of(outcome.run_dir / "requests.parquet")
    assert {row["n_output_tokens"] for row in rows} == {2, 5}
    assert [row["n_tokens_done"] for row in rows] == [row["n_output_tokens"] for row in rows]
    gaps = {round(b["arrival_at_s"] - a["arrival_at_s"], 6) for a, b in itertools.pairwise(rows)}
    assert len(gaps) == 7
    queued = 0
    for step in rows_of(outcome.run_dir / "hops.parquet"):
        # The model's compute time includes the wait for the steps before; the stub is never early.
        assert step["departed_at_s"] >= step["arrived_at_s"] + step["model_compute_s"] - 1e-6
        decode_s = (step["last_block"] - step["first_block"]) * SLOWEST_DECODE_S
        queued += step["token"] > 0 and step["model_compute_s"] > decode_s + 1e-9
    assert queued, "no step ever waited for another"


@pytest.mark.usefixtures("fabric")
def test_two_runs_at_once_both_succeed_and_their_namespaces_go_with_them(
    testbed: Testbed, two_sites: str
) -> None:
    held_up = ("--network", "fabric", "--no-report", "--hold", "--no-page", *REAL)
    runs = [testbed.start_up(two_sites, *held_up) for _ in range(2)]
    held: list[set[str]] = []
    for run in runs:
        run.says("holding")
        pids = processes(run.run_dir())
        assert sum(name.startswith("tb:") for name in pids.values()) >= 7
        held.append(namespaces(list(pids)) - namespaces([run.process.pid]))
    assert len(held[0]) >= 5 and not held[0] & held[1]
    for run in runs:
        run.interrupt()
    outcomes = [run.wait() for run in runs]
    assert len({outcome.run_dir for outcome in outcomes}) == 2
    for outcome in outcomes:
        assert outcome.code == 0
        assert summary_of(outcome.run_dir)["n_completed"] == 4
    wait_until(lambda: not (held[0] | held[1]) & all_namespaces(), "the end of the runs' namespaces")


def test_progress_is_shown_on_a_terminal(testbed: Testbed, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 150))
    longer = ("--set", "workload.n_output_tokens=100")  # serving lasts for several refreshes
    arguments = ("up", "clustered", "--network", "loopback", *FAST, *REAL, *longer)
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}  # room for all its columns
    with (
        open(os.devnull, "rb") as nothing,
        open(tmp_path / "stdout", "wb") as plain,
        open(theirs, "wb") as terminal,
    ):
        files = (nothing, plain, terminal)
        process = fork_command([*arguments, "--out", str(tmp_path / "run")], tmp_path, env, files)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert process.wait(PATIENCE_S) == 0, shown
    for text in (b"serving", b"/3 done", b"tokens/s", b"TTFT"):
        assert text in shown
    assert (tmp_path / "stdout").read_text().startswith("clustered: 3 of 3 requests completed\n")
