"""The closed model beside runs in virtual time, in which nothing but what it leaves out can differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from testbed.experiments import load_experiment
from testbed.experiments.experiment import Experiment
from testbed.experiments.sources import Document
from testbed.records.summary import ErrorFigures, RunSummary
from testbed.results import finish_run, model_links, read_tables
from testbed.results.errors import ERROR_METRICS, Tables
from testbed.results.text import summary_text
from testbed.runs.session import run_quietly

OVERTAKING = "short messages that overtake the parts of long ones"
SHARED = "links that pairs of nodes share"
CHATS = ("workload.n_input_tokens=200", "workload.rate=2")
UPLINKS = ('sites=[{name="Cluster1", up="40 Mbit/s", down="200 Mbit/s"}]', "workload.rate=2")
"""The two A100 of ``clustered`` share what connects their site."""
_SLOWER = 'link=["Cluster0", "Cluster1"], at="1 s", for="3 s", rate="30 Mbit/s", rtt="60 ms"'
_CUT = 'link=["Cluster0", "Cluster1"], at="5 s", for="1 s", down=true'
CHANGES = (*CHATS, f"network.event=[{{{_SLOWER}}}, {{{_CUT}}}]")

SLOWED = {
    "name": "slowed",
    "model": {"profile": "bloom-176b", "n_blocks": 10},
    "hardware": {
        "g": {"memory": "400 GB", "decode": "10 ms", "prefill_base": "0.1 s", "prefill_per_token": "0 s"}
    },
    "servers": [{"hardware": "g", "site": "A"}],
    "clients": [{"site": "A"}],
    "network": {"kind": "clusters", "pairs": [{"sites": ["A", "A"], "rtt": "0 ms", "rate": "10 Gbit/s"}]},
    "workload": {"arrivals": "listed", "requests": [[number / 10, 1, 1] for number in range(5)]},
    "policy": {"placement": "whole-model", "routing": "ws-rr"},
    "fault": [{"kind": "slow", "server": "g-0", "at": "0.05 s", "for": "0.3 s", "factor": 10}],
}
"""A prompt takes a second. Five come within 0.4 s."""

PAGES = (*CHATS, "cache.prefix=shared")
"""Openings and closings name the prompt's pages."""


def experiment_of(*options: str) -> Experiment:
    few = ("network.backend=memory", "workload.n_requests=6", "workload.n_output_tokens=8")
    return load_experiment("clustered", [*few, *options])


def summary_of(folder: Path, *options: str) -> RunSummary:
    return run_quietly(experiment_of(*options), folder)


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's links carry messages in turn, as if something on them had changed."""
    monkeypatch.setattr(model_links, "_are_known", lambda experiment, records: False)


def worst_of(tables: Tables) -> float:
    hops = tables.hops
    return float(max(abs(hops.measured_s - hops.model_s) / hops.model_s))


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
def test_every_hop_takes_what_its_bytes_take(communication: str, tmp_path: Path) -> None:
    """Frames' headers alone would be 0.05 to 0.12 % of a hop."""
    summary = summary_of(tmp_path / "run", f"policy.communication={communication}")
    hops = summary.hop_model_error["hop_s"]
    assert hops.max_abs_ratio < 5e-5 and hops.mean_abs_ratio < 1e-6
    assert (summary.closed_model_links, summary.closed_model_lacks) == ("in turn", [])


@pytest.mark.parametrize(
    "options", [CHATS, UPLINKS, CHANGES, PAGES], ids=["overtaking", "shared", "changes", "pages"]
)
@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
def test_messages_that_overtake_or_share_links_take_what_the_simulators_links_say(
    communication: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    forwarding = f"policy.communication={communication}"
    summary = summary_of(tmp_path / "run", *options, forwarding, "policy.design_concurrency=20")
    assert (summary.closed_model_links, summary.closed_model_lacks) == ("in parts", [])
    assert summary.model["link_queue_s"].max > 0.01
    assert summary.hop_model_error["hop_s"].max_abs_ratio < 1e-5
    assert summary.emulation_error["ttft_s"].max_abs_ratio < 1e-6
    assert "network memory has the same code" in " ".join(summary_text(summary).split())


@pytest.mark.usefixtures("in_turn")
@pytest.mark.parametrize(
    ("options", "lacks"), [(CHATS, OVERTAKING), (UPLINKS, SHARED)], ids=["overtaking", "shared"]
)
def test_what_links_that_carry_messages_in_turn_leave_out_is_said(
    options: tuple[str, ...], lacks: str, tmp_path: Path
) -> None:
    summary = summary_of(tmp_path / "together", *options, "policy.design_concurrency=20")
    assert lacks in summary.closed_model_lacks
    assert summary.hop_model_error["hop_s"].max_abs_ratio > 5e-4
    alone = summary_of(tmp_path / "alone", *options, "workload.n_requests=1")
    assert OVERTAKING not in alone.closed_model_lacks


def test_refused_attempts_wait_behind_prompts_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = (*CHATS, "policy.design_concurrency=1")
    run = tmp_path / "run"
    summary = summary_of(run, *full)
    rows = read_tables(run, experiment_of(*full)).rows
    assert any(row.n_rejections for row in rows)
    assert summary.emulation_error["queue_s"].max_abs_ratio < 1e-6
    monkeypatch.setattr(model_links, "_are_known", lambda experiment, records: False)
    assert finish_run(run, experiment_of(*full)).emulation_error["queue_s"].max_abs_ratio > 1e-4


@pytest.mark.parametrize("options", [CHATS, UPLINKS], ids=["overtaking", "shared"])
def test_links_that_are_not_those_of_the_scenario_are_an_error(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    """A thousandth of the rate is seen."""
    experiment = experiment_of(*options, "policy.design_concurrency=20")
    run_quietly(experiment, tmp_path / "run")
    assert worst_of(read_tables(tmp_path / "run", experiment)) < 1e-5
    links = {
        pair: replace(link, rate_bps=0.999 * link.rate_bps) for pair, link in experiment.network.links.items()
    }
    shared_bps = {name: 0.999 * rate_bps for name, rate_bps in experiment.network.shared_bps.items()}
    asked_for = replace(experiment, network=replace(experiment.network, links=links, shared_bps=shared_bps))
    assert worst_of(read_tables(tmp_path / "run", asked_for)) > 3e-4


@pytest.mark.parametrize(
    ("kind", "factor", "lacks"), [("slow", ", factor=2", []), ("stop", "", ["halted servers"])]
)
def test_servers_that_are_slow_or_halted_keep_their_connections(
    kind: str, factor: str, lacks: list[str], tmp_path: Path
) -> None:
    """Nobody uses this one."""
    fault = f'fault=[{{kind="{kind}", server="mig-1g-6", at="1 s", for="1 s"{factor}}}]'
    summary = summary_of(tmp_path / "run", *CHATS, "policy.design_concurrency=20", fault)
    assert summary.n_faults == 1
    assert (summary.closed_model_links, summary.closed_model_lacks) == ("in parts", lacks)
    assert summary.hop_model_error["hop_s"].max_abs_ratio < 1e-5


@pytest.mark.parametrize("batching", ["none", "serial", "continuous"])
def test_a_slowed_server_is_slow_for_the_steps_that_begin_meanwhile(batching: str, tmp_path: Path) -> None:
    scenario = {**SLOWED, "compute": {"batching": batching}}
    experiment = load_experiment(Document(scenario), ["network.backend=memory"])
    summary = run_quietly(experiment, tmp_path / "run")
    hops = read_tables(tmp_path / "run", experiment).hops
    took_s = sorted((hops.departed_at_s - hops.arrived_at_s).tolist())
    # Those that wait for another begin when the server is as fast as before.
    expected_s = [1.0, 1.0, 10.0, 10.0, 10.0] if batching == "none" else [1.0, 1.9, 2.8, 3.7, 4.6]
    assert took_s == pytest.approx(expected_s, abs=1e-3)
    assert summary.hop_model_error["hop_s"].max_abs_ratio < 1e-6


def test_a_run_that_was_cut_says_that_its_last_messages_are_not_known(tmp_path: Path) -> None:
    experiment = experiment_of(*CHATS, "policy.design_concurrency=20")
    run = tmp_path / "run"
    run_quietly(experiment, run)
    (log,) = (run / "events").iterdir()
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    summary = finish_run(run, experiment)
    assert summary.closed_model_lacks == ["requests that were under way at the end"]
    lacks = "the closed model has no requests that were under way at the end"
    assert f"{lacks}: most of the errors come from that" in " ".join(summary_text(summary).split())
    summary.emulation_error = dict.fromkeys(
        ERROR_METRICS, ErrorFigures(mean_abs_ratio=1e-9, p99_abs_ratio=1e-9)
    )
    said = " ".join(summary_text(summary).split())
    assert lacks in said and "most of the errors" not in said
