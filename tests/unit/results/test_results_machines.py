"""What the summary of a run over several machines says of their clocks and of the network between them."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.records.summary import RunSummary
from testbed.results import finish_run
from testbed.results.text import summary_text
from tests.support.records import changed
from tests.unit.results.conftest import MakeRun


@pytest.fixture
def summary(make_run: MakeRun) -> RunSummary:
    run = make_run()
    run.serve(0, 0.0, [(0, 0, 2), (1, 2, 4)])
    return finish_run(run.path, run.experiment, None)


def machine(uncertainty_s: float, **more: Any) -> dict[str, Any]:
    found = {"name": "rome", "address": "10.0.0.2", "n_nodes": 3, "rtt_s": 2 * uncertainty_s, "offset_s": 7.0}
    return {**found, "drift": 1e-6, "uncertainty_s": uncertainty_s, "is_lost": False, **more}


def said(summary: RunSummary, **more: Any) -> str:
    return " ".join(summary_text(changed(summary, **more)).split())


def test_a_run_on_one_machine_says_nothing_of_others(summary: RunSummary) -> None:
    assert summary["machines"] == []
    assert "its clock" not in said(summary)


def test_clocks_are_said_and_whether_one_way_can_be_trusted(summary: RunSummary) -> None:
    way_s = summary["metrics"]["hop_network_s"]["p50"] / 2
    text = said(summary, machines=[machine(way_s / 10)])
    assert "machine rome: 3 nodes, its clock known to +-" in text and "trusted" not in text
    text = said(summary, machines=[machine(way_s * 1.1, is_lost=True)])
    assert "it was lost" in text
    assert f"more than the {1e3 * way_s:.3f} ms of one way (p50)" in text and "is not to be trusted" in text


def test_the_real_network_is_not_what_the_model_has(summary: RunSummary) -> None:
    assert "which nothing emulates" in said(summary, network="hosts")


def test_a_network_between_machines_that_is_too_slow_or_loses_packets_is_said(
    summary: RunSummary,
) -> None:
    quiet = {"packets": 10_000, "dropped": 0, "underlay_late": 10, "underlay_lost": 0}
    assert "between the machines" not in said(summary, forwarder=quiet)
    text = said(summary, forwarder=quiet | {"underlay_late": 11, "underlay_lost": 2})
    assert "11 of 10000 packets came over the network between the machines after their time" in text
    assert "the network between the machines lost 2 datagrams" in text
    fast = {"forwarder": quiet | {"asked_max_bps": 4e9}, "clock": "real"}
    assert "2.5 Gbit/s" in said(summary, **fast, machines=[machine(1e-5)])
    assert "Gbit/s (real) were asked" not in said(summary, **fast)
