"""``testbed links`` on real networks: idle and under load, its report, and pairs that carry nothing."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from testbed.experiments import load_experiment
from testbed.experiments.experiment import Experiment
from testbed.studies.links import check as linkcheck
from tests.support.runs import Outcome, Testbed, assert_one_sentence

pytestmark = pytest.mark.usefixtures("fabric")

FIVE = ("servers.0.count=3", "network.pairs.4.rate=20 Mbit/s")
"""Five servers, three of them behind links that take little time to fill."""
SHORT = ("--echoes", "3", "--time-scale", "20", "--set", FIVE[0], "--set", FIVE[1])


@pytest.fixture(scope="module", params=["fabric", "loopback"])
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Outcome, Path]:
    """Two pairs, idle and under load, and the folder with the report; not to be changed."""
    testbed = Testbed(tmp_path_factory.mktemp("measured"))
    out = testbed.folder / "report"
    options = ("--network", request.param, "--pairs", "2", "--load", "--out", str(out), "--json", *SHORT)
    return testbed("links", "clustered", *options, renders=request.param == "fabric"), out


def test_every_pair_is_measured_idle_and_while_others_are_busy(measured: tuple[Outcome, Path]) -> None:
    outcome, _ = measured
    assert outcome.code == 0, outcome.stderr
    answer = outcome.json()
    assert answer["load"]["busy_pairs"] == 4  # all five servers are there, though two are measured
    assert answer["load"]["echoes_per_s"] > 0
    assert [(row["from"], row["to"]) for row in answer["pairs"][::2]] == [
        ("client-0", f"mig-1g-{i}") for i in range(2)
    ]
    for row in answer["pairs"]:
        for state in (row, row["under_load"]):
            assert state["failure"] is None
            assert state["rtt_ms"]["requested"] == pytest.approx(100)
            assert state["rtt_ms"]["n"] == 3
            assert 95 < state["rtt_ms"]["p50"] <= state["rtt_ms"]["p99"]
            assert state["rate_mbps"]["requested"] == pytest.approx(20)
            assert 0 < state["rate_mbps"]["achieved"] < 22


def test_without_load_there_are_no_figures_under_load(testbed: Testbed) -> None:
    answer = testbed("links", "clustered", "--network", "loopback", "--pairs", "1", "--json", *SHORT).json()
    assert answer["load"] is None
    assert [row["under_load"] for row in answer["pairs"]] == [None, None]


def test_out_holds_the_answer_tables_and_a_plot(measured: tuple[Outcome, Path], testbed: Testbed) -> None:
    outcome, out = measured
    assert sorted(path.name for path in out.iterdir()) == [
        *("links.csv", "links.json", "links.md", "links.pdf", "links.png")
    ]
    with open(out / "links.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["idle"] * 4 + ["load"] * 4
    pairs = outcome.json()["pairs"]
    assert [float(row["rtt_ms_p50"]) for row in rows[:4]] == [pair["rtt_ms"]["p50"] for pair in pairs]
    markdown = (out / "links.md").read_text(encoding="utf-8")
    assert markdown.count("| client-0 | mig-1g-1 |") == 2
    assert "## Idle" in markdown and "## Under load: 4 other pairs busy" in markdown
    assert (out / "links.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "links.pdf").read_bytes().startswith(b"%PDF")
    again = testbed("links", "clustered", "--network", "loopback", "--out", str(out))
    assert_one_sentence(again, f"{out} holds something already", "--out")


@pytest.fixture
def experiment() -> Experiment:
    return load_experiment("clustered", ["network.backend=fabric", "time_scale=20", *FIVE])


def test_a_pair_without_connection_is_a_row_that_says_so(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linkcheck, "_ECHO_LIMIT_S", 1.0)
    pair = ("client-0", "mig-1g-1")
    cut = dataclasses.replace(experiment.network.links[pair], loss_ratio=1.0)
    experiment = dataclasses.replace(
        experiment,
        network=dataclasses.replace(experiment.network, links={**experiment.network.links, pair: cut}),
    )
    answer, text = linkcheck.links_command(experiment, 3, 3)
    good, there, back = answer["pairs"][1:4]
    assert good["failure"] is None
    for row in (there, back):
        assert row["failure"] == "connecting took too long"
        assert (row["rtt_ms"]["n"], row["rtt_ms"]["p50"]) == (0, None)
        assert row["rate_mbps"]["achieved"] is None
    assert (there["loss_ratio"], back["loss_ratio"]) == (1.0, 0.0)
    assert text.count("<- connecting took too long") == 2


def test_a_transfer_that_takes_too_long_is_left_out_and_the_rest_kept(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linkcheck, "_BULK_SLACK_S", -1.0)  # less than no time
    answer, _ = linkcheck.links_command(experiment, 1, 3)
    for row in answer["pairs"]:
        assert row["failure"] == "the transfer there took too long"
        assert row["rate_mbps"]["achieved"] is None
        assert row["rtt_ms"]["n"] == row["echo_ms"]["n"] == 3
