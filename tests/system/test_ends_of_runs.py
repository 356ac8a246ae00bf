"""Ctrl-C at each phase, and kill -9: the record is complete up to that moment and nothing stays."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.runs import (
    FAST,
    LONG,
    REAL,
    Testbed,
    all_namespaces,
    assert_tables_hold_the_whole_log,
    cleaned,
    logged_tokens,
    namespaces,
    processes,
    rows_of,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("fabric")


def event_names(run_dir: Path) -> list[str]:
    lines = (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["event"] for line in lines]


def statuses(run_dir: Path) -> list[str]:
    return [row["status"] for row in rows_of(run_dir / "requests.parquet")]


def test_an_interrupt_right_after_the_start_exits_130(testbed: Testbed) -> None:
    run = testbed.start_up("clustered", *LONG)
    run_dir = run.run_dir()
    run.interrupt()
    outcome = run.wait()
    assert outcome.code == 130
    assert "Traceback" not in outcome.stderr
    assert outcome.stdout == ""
    assert not (run_dir / "summary.json").exists()


def test_an_interrupt_while_nodes_start_exits_130_and_ends_them(testbed: Testbed) -> None:
    run = testbed.start_up("clustered", *LONG)
    run_dir = run.run_dir()
    wait_until(lambda: "tb:fabric" in processes(run_dir).values(), "the network")
    run.interrupt()
    outcome = run.wait()
    assert outcome.code == 130
    assert "Traceback" not in outcome.stderr
    assert event_names(run_dir)[-2:] == ["interrupted", "stopped"]


def test_an_interrupt_while_serving_keeps_the_record_up_to_that_moment(testbed: Testbed) -> None:
    run = testbed.start_up("clustered", "--network", "fabric", *LONG)
    run_dir = run.serving()
    before = logged_tokens(run_dir)
    run.interrupt()
    outcome = run.wait()
    assert outcome.code == 130
    assert "interrupted" in outcome.stdout and "Traceback" not in outcome.stderr
    assert f"interrupted: the record up to now is in {run_dir}" in outcome.stderr
    assert_tables_hold_the_whole_log(run_dir)
    assert set(before) <= set(logged_tokens(run_dir))
    found = statuses(run_dir)
    assert len(found) == 60
    assert "interrupted" in found and "not-started" in found
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["n_requests"] == 60
    assert summary["n_completed"] == found.count("completed") < 60
    assert summary["n_failed"] == 0
    assert summary["n_interrupted"] == found.count("interrupted")
    assert summary["n_not_started"] == found.count("not-started")


def test_hold_keeps_the_testbed_up_until_an_interrupt(testbed: Testbed) -> None:
    run = testbed.start_up("clustered", "--hold", "--no-page", "--json", *FAST, *REAL)
    run.says("holding the testbed up")
    run_dir = run.run_dir()
    assert sum(name.startswith("tb:") for name in processes(run_dir).values()) >= 11
    held = namespaces(list(processes(run_dir))) - namespaces([run.process.pid])
    run.interrupt()
    outcome = run.wait()
    assert outcome.code == 0
    assert outcome.json()["n_completed"] == 3
    assert "interrupted" not in outcome.stderr and "interrupted" not in event_names(run_dir)
    assert statuses(run_dir) == ["completed"] * 3
    wait_until(lambda: not held & all_namespaces(), "the end of the run's namespaces")


@pytest.mark.usefixtures("orphans")
def test_kill_9_leaves_no_process_and_clean_completes_the_tables(testbed: Testbed) -> None:
    run = testbed.start_up("clustered", "--network", "fabric", *LONG)
    run_dir = run.serving()
    held = namespaces(list(processes(run_dir))) - namespaces([run.process.pid])
    run.kill()
    wait_until(lambda: not processes(run_dir), "the end of all processes by their death signal")
    wait_until(lambda: not held & all_namespaces(), "the end of the run's namespaces")
    assert not (run_dir / "summary.json").exists()
    first = testbed("clean", "--out", str(testbed.runs), "--json")
    assert first.code == 0, first.stderr
    assert first.json()["completed"] == [str(run_dir)]
    assert first.json()["problems"] == []
    assert_tables_hold_the_whole_log(run_dir)
    found = set(statuses(run_dir))
    assert "not-started" in found
    assert found & {"unfinished", "interrupted"}  # a client may see its run end before it is killed itself
    second = testbed("clean", "--out", str(testbed.runs))
    assert (second.code, cleaned(second.stdout, testbed.folder)) == (0, "nothing was left")


def test_kill_9_of_the_launcher_ends_the_run_with_a_message(testbed: Testbed) -> None:
    run = testbed.start_up("clustered", *LONG)
    run_dir = run.serving()
    launcher = next(pid for pid, name in processes(run_dir).items() if name == "tb:launcher")
    os.kill(launcher, 9)
    outcome = run.wait()
    assert outcome.code == 1
    assert "launcher ended unexpectedly (status -9)" in outcome.stderr and "Traceback" not in outcome.stderr
    assert_tables_hold_the_whole_log(run_dir)


@pytest.mark.usefixtures("orphans")
def test_clean_does_not_touch_a_live_run(testbed: Testbed) -> None:
    run = testbed.start_up("clustered", "--hold", "--no-page", *FAST, *REAL)
    run.says("holding the testbed up")
    run_dir = run.run_dir()
    alive, elsewhere = processes(run_dir), run_dir.with_name("elsewhere")

    def clean_finds_nothing() -> None:
        outcome = testbed("clean", "--out", str(testbed.runs))
        assert (outcome.code, outcome.stdout) == (0, "nothing was left\n")
        assert processes(run_dir) == alive

    clean_finds_nothing()
    run_dir.rename(elsewhere)  # as for a run on a disk that only its own processes see
    clean_finds_nothing()
    elsewhere.rename(run_dir)
    run.interrupt()
    assert run.wait().code == 0
