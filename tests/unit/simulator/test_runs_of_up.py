"""``testbed up --runs``: several runs of the system, and the table that simulations have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from testbed.cli.main import app
from testbed.errors import RunError, UserError
from testbed.runs.session import RunSession
from testbed.studies.seeds import command
from tests.support.runs import MEMORY

SMALL = (*MEMORY, "--no-report", "--set", "workload.n_requests=4", "--set", "workload.n_output_tokens=3")


def ran(
    capsys: pytest.CaptureFixture[str], out: Path, *arguments: str, code: int = 0
) -> tuple[dict[str, Any], str]:
    """The object that several runs print, and what they say meanwhile."""
    with pytest.raises(SystemExit) as ended:
        app(["up", "clustered", *SMALL, "--json", "--out", str(out), *arguments])
    said = capsys.readouterr()
    assert ended.value.code == code
    found: dict[str, Any] = json.loads(said.out)
    return found, said.err


def broken_at(seed: int, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The run with this seed ends with ``error``; the others run."""

    run = RunSession.run

    def once(session: RunSession) -> Any:
        if session.experiment.seed == seed:
            raise error
        return run(session)

    monkeypatch.setattr(RunSession, "run", once)


def test_the_means_are_those_of_the_runs_and_of_the_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, said = ran(capsys, tmp_path / "runs", "--runs", "3", "--seed", "5", "--slo", "ttft=10s")
    assert [run["seed"] for run in row["runs"]] == [5, 6, 7]
    assert "seed 7: 4 of 4 requests completed (3 of 3 runs)" in said
    summaries = [
        json.loads((tmp_path / "runs" / f"seed-{seed}" / "summary.json").read_text()) for seed in (5, 6, 7)
    ]
    means_ms = [1e3 * summary["metrics"]["ttft_s"]["mean"] for summary in summaries]
    assert row["mean"]["ttft_ms"] == pytest.approx(sum(means_ms) / 3)
    assert row["mean_ci95"]["per_token_ms"] > 0 and row["goodput_rps"] > 0
    app(["simulate", "clustered", *SMALL[3:], "--runs", "3", "--seed", "5", "--json"], standalone_mode=False)
    simulated = json.loads(capsys.readouterr().out)
    assert row["mean"]["per_token_ms"] == pytest.approx(simulated["mean"]["per_token_ms"], rel=0.01)
    assert row.keys() - simulated.keys() <= {"goodput_rps", "goodput_rps_ci95"}


def test_a_client_s_own_objective_gives_goodput_as_a_simulation_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ("--set", "clients=[{site='Cluster0',name='a',slo='ttft=10s'}]")
    row, _ = ran(capsys, tmp_path / "runs", *own, "--runs", "2")
    app(["simulate", "clustered", *SMALL[3:], *own, "--runs", "2", "--json"], standalone_mode=False)
    simulated = json.loads(capsys.readouterr().out)
    assert row["goodput_rps"] == pytest.approx(simulated["goodput_rps"], rel=1e-3)


def test_a_run_that_breaks_is_told_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_at(1, monkeypatch, RunError("the network is gone"))
    row, said = ran(capsys, tmp_path / "runs", "--runs", "3", code=1)
    assert (row["n_runs"], row["n_feasible"], row["error"]) == (3, 2, "seed 1: the network is gone")
    assert "seed 1: the network is gone (2 of 3 runs)" in said
    assert command.comparison_text([row]).count("has no result in 1 of 3 runs: seed 1: the network") == 1


def test_wrong_tokens_and_right_ones_are_told_of_each_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunSession.run

    def with_blocks(session: RunSession) -> Any:
        ended = run(session)
        assert ended.summary is not None
        checked = {"compute": "blocks", "n_tokens_checked": 12}
        altered = {"n_tokens_altered": 12 if session.experiment.seed else 0}
        return replace(ended, summary=msgspec.structs.replace(ended.summary, **checked, **altered))

    monkeypatch.setattr(RunSession, "run", with_blocks)
    _, said = ran(capsys, tmp_path / "runs", "--runs", "2", code=1)
    assert "seed 0: 4 of 4 requests completed; all 12 tokens are those of the whole model" in said
    assert "seed 1: 4 of 4 requests completed; 12 of 12 tokens are NOT those of the whole model" in said


def test_where_every_run_breaks_there_is_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    async def broken(session: RunSession, launcher: Any) -> Any:
        raise RunError("no network")

    monkeypatch.setattr(RunSession, "serve", broken)
    with pytest.raises(RunError, match="no run came to a result: seed 0: no network; seed 1: no network"):
        app(
            ["up", "clustered", *SMALL, "--runs", "2", "--out", str(tmp_path / "runs")], standalone_mode=False
        )


def test_where_no_seed_has_a_placement_the_scenario_is_to_be_changed(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no run came to a result: seed 0: whole-model needs a server .*; seed 1"
    ):
        app(
            [
                "up",
                "clustered",
                *SMALL,
                "--runs",
                "2",
                "--policy",
                "whole-model",
                "--out",
                str(tmp_path / "r"),
            ],
            standalone_mode=False,
        )


def test_after_an_interruption_the_table_is_of_the_runs_that_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_at(2, monkeypatch, KeyboardInterrupt())
    row, said = ran(capsys, tmp_path / "runs", "--runs", "4", code=130)
    assert row["n_runs"] == 2
    assert "interrupted: 2 of 4 runs came to their end" in said
    assert (tmp_path / "runs" / "seed-1" / "summary.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--hold",), "--hold and --page are for one run"),
        (("--page", "0"), "--hold and --page are for one run"),
        (("--set", "workload.arrivals=constant"), "all 2 runs are the same"),
    ],
)
def test_what_several_runs_cannot_have_is_refused(
    arguments: tuple[str, ...], part: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=part):
        app(
            ["up", "clustered", *SMALL, "--runs", "2", "--out", str(tmp_path / "runs"), *arguments],
            standalone_mode=False,
        )
    assert not (tmp_path / "runs").exists(), "refused before the first run"
