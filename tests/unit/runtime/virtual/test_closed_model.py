"""The closed model beside runs in virtual time, in which nothing but what it leaves out can differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.experiments import load_experiment
from testbed.records.summary import RunSummary
from testbed.runs.session import run_quietly

OVERTAKING = "short messages that overtake the parts of long ones"


def summary_of(folder: Path, *options: str) -> RunSummary:
    few = ("network.backend=memory", "workload.n_requests=6", "workload.n_output_tokens=8")
    return run_quietly(load_experiment("clustered", [*few, *options]), folder)


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
def test_every_hop_takes_what_its_bytes_take(communication: str, tmp_path: Path) -> None:
    """Frames' headers alone would be 0.05 to 0.12 % of a hop."""
    summary = summary_of(tmp_path / "run", f"policy.communication={communication}")
    hops = summary.hop_model_error["hop_s"]
    assert hops.max_abs_ratio < 5e-5 and hops.mean_abs_ratio < 1e-6
    assert summary.closed_model_lacks == []


def test_what_it_leaves_out_of_long_prompts_is_said(tmp_path: Path) -> None:
    chats = ("workload.n_input_tokens=200", "workload.rate=2", "policy.design_concurrency=20")
    together = summary_of(tmp_path / "together", *chats)
    assert together.closed_model_lacks == [OVERTAKING]
    assert together.hop_model_error["hop_s"].max_abs_ratio > 5e-4
    alone = summary_of(tmp_path / "alone", *chats, "workload.n_requests=1")
    assert alone.closed_model_lacks == []
