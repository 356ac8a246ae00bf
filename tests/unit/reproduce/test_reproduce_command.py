from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import UserError
from testbed.studies.reproduce import runs
from testbed.studies.reproduce.command import RESULTS, reproduce_command
from testbed.studies.reproduce.runs import Task, task_of
from testbed.studies.reproduce.settings import DRAWN, settings_of
from testbed.studies.reproduce.tables import HEADER
from testbed.studies.sweep.pool import Local
from testbed.studies.sweep.runs import Measures, Record
from testbed.studies.sweep.store import Lines, read_records
from tests.support.runs import Running, below, wait_until
from tests.support.sketches import sketch

N_TABLES = len(settings_of("tables"))


def tables(out: Path, n_runs: int = 2, seed: int = 0) -> dict[str, Any]:
    return reproduce_command("tables", n_runs, seed, out, 1)[0]


def test_runs_that_are_recorded_are_not_run_again(tmp_path: Path, quick_runs: list[str]) -> None:
    assert tables(tmp_path)["n_computed"] == 2 * N_TABLES
    again = tables(tmp_path)
    assert (again["n_computed"], again["n_found"]) == (0, 2 * N_TABLES)
    assert tables(tmp_path, n_runs=3)["n_computed"] == N_TABLES
    assert len(quick_runs) == len(set(quick_runs)) == 3 * N_TABLES


def test_a_line_that_a_kill_cut_short_is_run_again(tmp_path: Path, quick_runs: list[str]) -> None:
    tables(tmp_path)
    path, before = tmp_path / RESULTS, (tmp_path / "tables.md").read_bytes()
    path.write_bytes(path.read_bytes()[:-10])
    assert tables(tmp_path)["n_computed"] == 1
    assert (tmp_path / "tables.md").read_bytes() == before
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert quick_runs[-1] in quick_runs[:-1]


@pytest.mark.renders
def test_the_same_seed_gives_the_same_tables_and_another_seed_others(
    tmp_path: Path, quick_runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, other = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    tables(first)
    sketch(monkeypatch.setattr)  # figures are looked at once
    tables(second), tables(other, seed=7)
    assert (first / "tables.md").read_bytes() == (second / "tables.md").read_bytes()
    assert (first / "tables.md").read_bytes() != (other / "tables.md").read_bytes()
    assert {path.name for path in (first / "figures").iterdir()} == {"breakdown.png", "breakdown.pdf"}


def test_a_table_shows_the_printed_number_ours_and_the_deviation(
    tmp_path: Path, quick_runs: list[str]
) -> None:
    answer = tables(tmp_path)
    cell = next(
        c
        for c in answer["deviations"]["closest"]
        if (c["metric"], c["place"], c["policy"], c["column"]) == ("per_token_s", "Cluster0", "proposed", 0)
    )
    assert cell["printed_s"] == 1.59
    assert cell["ratio"] == pytest.approx(cell["ours_s"] / 1.59 - 1)
    text = (tmp_path / "tables.md").read_text(encoding="utf-8")
    shown = f"1.59 → {cell['ours_s']:.3f} ± {cell['half_width_s']:.3f} ({cell['ratio']:+.1%})"
    assert f"| Cluster0 | proposed | {shown} |" in text
    assert all(column in text for column in HEADER)


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(
    tmp_path: Path,
    quick_runs: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = runs.run_task

    def stop_at_the_fifth(task: Task) -> Record:
        if len(quick_runs) == 4:
            raise KeyboardInterrupt
        return run(task)

    monkeypatch.setattr(runs, "run_task", stop_at_the_fifth)
    with pytest.raises(KeyboardInterrupt, match=f"{2 * N_TABLES - 4} runs are left"):
        tables(tmp_path)
    monkeypatch.setattr(runs, "run_task", run)
    answer = tables(tmp_path)
    assert (answer["n_found"], answer["n_computed"]) == (4, 2 * N_TABLES - 4)


def test_results_of_another_version_of_the_code_are_not_used(
    tmp_path: Path, quick_runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables(tmp_path)
    monkeypatch.setattr(runs, "_inputs_digest", lambda: "another version")
    assert tables(tmp_path)["n_computed"] == 2 * N_TABLES
    assert len(quick_runs) == len(set(quick_runs)) == 4 * N_TABLES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("table", 20, 0), "--only.*valid: tables, figures"),
        ((None, 1, 0), "--runs must be at least 2"),
        ((None, 10**12, 0), "--runs must be at most 1000, not 1000000000000"),
        ((None, 20, -1), "--seed must not be negative"),
    ],
)
def test_options_that_make_no_sense_get_one_sentence(
    tmp_path: Path, arguments: tuple[str | None, int, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        reproduce_command(*arguments, tmp_path, 1)
    with pytest.raises(UserError, match="--jobs must be at least 1"):
        reproduce_command(None, 20, 0, tmp_path, 0)
    assert not list(tmp_path.iterdir())


def test_worker_processes_give_what_this_process_gives() -> None:
    tasks = [task_of(setting, 1) for setting in DRAWN.settings[:3]]

    def without_times(jobs: int) -> dict[str, Measures]:
        return {
            task.key: {name: value for name, value in record.measures.items() if "decision" not in name}
            for task, record in Local(jobs).results(runs.begin_runs, None, [[task] for task in tasks])
        }

    assert without_times(2) == without_times(1)


@pytest.mark.parametrize(
    ("number", "to_workers_too"),
    [(signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGTERM, False)],
    ids=["ctrl-c", "sigterm-to-all", "sigterm"],
)
def test_ctrl_c_and_sigterm_on_the_command_end_it_with_130_and_one_line(
    tmp_path: Path, number: signal.Signals, to_workers_too: bool
) -> None:
    out = tmp_path / "out"
    command = Running(["reproduce", "paper", "--out", str(out), "--jobs", "2"], tmp_path / "said")
    try:
        results = out / RESULTS
        wait_until(lambda: results.exists() and results.stat().st_size > 0, "the first result")
        workers = below(command.process.pid)
        assert len(workers) >= 2
        for pid in (command.process.pid, *(workers if to_workers_too else ())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        ended = command.wait()
    finally:
        command.kill()
    assert ended.code == 130, ended.stderr
    said = ended.stderr
    assert ended.stdout == "" and said.count("\n") == 1 and "the same command goes on" in said
    assert read_records(Lines(results))


def test_a_log_gets_plain_lines_of_progress_instead_of_a_bar(
    tmp_path: Path, quick_runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    tables(tmp_path)
    said = capsys.readouterr().err
    assert f"{2 * N_TABLES} of {2 * N_TABLES} runs (100%)" in said
    assert "\x1b" not in said and "\r" not in said


def test_a_second_sigterm_changes_nothing_about_the_first(
    tmp_path: Path, quick_runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminate(task: Task) -> Record:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
        raise AssertionError("SIGTERM stops the run")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(runs, "run_task", terminate)
    with pytest.raises(KeyboardInterrupt):
        tables(tmp_path)
    assert signal.getsignal(signal.SIGTERM) == before
