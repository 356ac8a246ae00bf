"""The client's computing per token, in the model and as measured. A step is 0.32 s, as in conftest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from numpy.testing import assert_allclose

from nodes.records import Completed
from testbed.results import finish_run
from testbed.results.logs import read_logs
from testbed.results.model import hop_table
from tests.unit.results.conftest import SyntheticRun, make_experiment, perfect_hop

CHAIN = [(0, 0, 2), (1, 2, 4)]


def run_of(path: Path, hub_token_s: float, measured_s: float) -> SyntheticRun:
    """One request on two hops; every token is finished ``measured_s`` after its last hop was received."""
    experiment = make_experiment([(2, 3)])
    experiment = replace(experiment, problem=replace(experiment.problem, hub_token_s=hub_token_s))
    run = SyntheticRun(path, experiment)
    run.arrive(0, 0.0)
    run.admit(0, CHAIN, 0.0, 0.1)
    now_s = 0.1
    for token in range(3):
        hops, sent_s = [], now_s
        for server, first, last in CHAIN:
            hops.append(perfect_hop(server, first, last, sent_s, 1 if token else 2, not token))
            sent_s = hops[-1][6]
        now_s = run.token(0, token, now_s, hops, sent_s + measured_s)
    run.log(Completed(0, now_s))
    return run


def finished(run: SyntheticRun) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Return the summary, the row of the one request, and the rows of its hops."""
    finish_run(run.path, run.experiment)
    summary: dict[str, Any] = json.loads((run.path / "summary.json").read_text())
    [request] = pq.read_table(run.path / "requests.parquet").to_pylist()
    return summary, request, pq.read_table(run.path / "hops.parquet").to_pylist()


def test_the_model_counts_the_client_once_per_token_at_its_last_hop(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 0.04, 0.04)
    table = hop_table(run.experiment, read_logs(run.path))
    assert_allclose(table.model_client_s, [0.0, 0.04] * 3)
    assert_allclose(table.model_s, table.measured_s)


def test_a_client_that_takes_what_the_model_says_leaves_no_error(tmp_path: Path) -> None:
    summary, request, hops = finished(run_of(tmp_path / "run", 0.04, 0.04))
    for name in ("ttft_s", "tpot_s", "e2e_s", "per_token_s"):
        assert request[f"model_{name}"] == pytest.approx(request[name]), name
        assert request[f"unqueued_{name}"] == pytest.approx(request[name]), name
    assert request["tpot_s"] == pytest.approx(0.64 + 0.04)
    error = summary["emulation_error"]
    assert max(error[name]["mean_abs_ratio"] for name in ("token_gap_s", "hop_s", "tpot_s")) < 1e-9
    assert summary["model_unqueued"]["token_gap_s"]["mean"] == pytest.approx(0.68)
    assert summary["model"]["hop_client_s"]["mean"] == pytest.approx(0.02)
    assert [row["model_client_s"] for row in hops] == [0.0, 0.04] * 3
    assert summary["metrics"]["hop_overhead_s"]["p50"] == pytest.approx(0.0, abs=1e-9)


def test_a_client_that_the_model_does_not_know_is_an_error_of_the_token(tmp_path: Path) -> None:
    summary, _, hops = finished(run_of(tmp_path / "run", 0.0, 0.04))
    assert summary["emulation_error"]["token_gap_s"]["mean_abs_ratio"] == pytest.approx(0.04 / 0.64)
    assert "hop_client_s" not in summary["model"] and "model_client_s" not in hops[0]


def test_of_a_replay_the_client_counts_once_too(tmp_path: Path) -> None:
    experiment = make_experiment([(2, 3)])
    experiment = replace(experiment, problem=replace(experiment.problem, hub_token_s=0.04))
    run = SyntheticRun(tmp_path / "run", experiment)
    run.arrive(0, 0.0)
    # The second hop was replaced by two: the first of these and the last one were sent everything.
    hops = [perfect_hop(0, 0, 2, 1.0)]
    for server, first, last in ((1, 2, 3), (0, 3, 4)):
        hops.append((*perfect_hop(server, first, last, hops[-1][6], 3, True), 3))  # type: ignore[arg-type]
    run.token(0, 1, 1.0, hops, hops[-1][6] + 0.04)
    table = hop_table(run.experiment, read_logs(run.path))
    assert_allclose(table.model_client_s, [0.0, 0.0, 0.04])
