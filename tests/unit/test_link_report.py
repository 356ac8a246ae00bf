"""The report of ``testbed links``, and which pairs it measures at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testbed.errors import RunError
from testbed.studies.links import report
from testbed.studies.links.check import batches
from testbed.studies.links.plot import draw_links
from testbed.studies.links.report import links_csv, links_markdown, links_text, worst, write_links
from tests.support.full_disk import files_no_longer_than


def times(requested: float, p50: float, p99: float) -> dict[str, float]:
    return {
        "requested": requested,
        "p50": p50,
        "p99": p99,
        "error_p50": p50 - requested,
        "error_p99": p99 - requested,
        "n": 50,
    }


def row(
    source: str, target: str, p50: float = 20.0, p99: float = 20.5, achieved: float = 99.0
) -> dict[str, Any]:
    return {
        "from": source,
        "to": target,
        "rtt_ms": times(20.0, p50, p99),
        "echo_ms": times(24.0, 24.1, 24.2),
        "rate_mbps": {"requested": 100.0, "achieved": achieved, "goodput": 0.96 * achieved},
        "jitter_ms": 0.0,
        "loss_ratio": 0.0,
        "failure": None,
        "under_load": None,
    }


def answer(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "scenario": "some",
        "network": "fabric",
        "why": "asked for",
        "time_scale": 1.0,
        "echo_bytes": 28672,
        "took_s": 1.0,
        "load": None,
        "pairs": list(rows),
    }


def failed(source: str, target: str) -> dict[str, Any]:
    none = {"requested": 20.0, "p50": None, "p99": None, "error_p50": None, "error_p99": None, "n": 0}
    rate = {"requested": 100.0, "achieved": None, "goodput": None}
    new = {"rtt_ms": none, "echo_ms": none, "rate_mbps": rate, "failure": "connecting took too long"}
    return {**row(source, target), **new}


PAIRS = (
    row("c", "near", p50=20.1, achieved=98.0),
    row("near", "c", p50=20.1, achieved=103.0),
    row("c", "far", p99=29.0),
    row("far", "c", p99=29.0),
)


def test_the_worst_of_each_kind_counts_in_either_direction_and_the_first_of_equals() -> None:
    found = {what: (number, pytest.approx(error)) for what, number, error in worst(PAIRS)}
    assert found == {"RTT p50": (0, 0.1), "RTT p99": (2, 9.0), "rate": (1, 3.0)}


def test_the_table_marks_the_worst_pairs() -> None:
    lines = links_text(answer(*PAIRS)).splitlines()
    marked = {tuple(line.split()[:2]): line.partition("<- ")[2] for line in lines if "<-" in line}
    assert marked == {
        ("c", "near"): "worst RTT p50",
        ("near", "c"): "worst rate",
        ("c", "far"): "worst RTT p99",
    }
    assert (
        lines[-1]
        == "largest errors: RTT p50 +0.1 ms (c to near); RTT p99 +9 ms (c to far); rate +3 % (near to c)"
    )


def test_figures_under_load_have_a_table_of_their_own() -> None:
    loaded = {key: row("c", "near", p50=21.0)[key] for key in ("rtt_ms", "echo_ms", "rate_mbps", "failure")}
    both = answer(*({**pair, "under_load": loaded} for pair in PAIRS[:2]))
    both["load"] = {"busy_pairs": 20, "echoes_per_s": 800.0}
    assert "under load: 20 other pairs busy, 800 echoes/s together" in links_text(both)
    assert links_markdown(both).count("| c | near | 20.000 |") == 2
    assert [line.split(",")[2] for line in links_csv(both).splitlines()] == [
        "state",
        "idle",
        "idle",
        "load",
        "load",
    ]


@pytest.mark.renders
def test_a_pair_that_could_not_be_measured_is_shown_and_does_not_count_as_worst(tmp_path: Path) -> None:
    some = answer(*PAIRS[:2], failed("c", "gone"), failed("gone", "c"))
    assert links_text(some).count("<- connecting took too long") == 2
    assert "| c | gone | 20.000 | - | - |" in links_markdown(some)
    assert [number for _, number, _ in worst(some["pairs"])] == [0, 0, 1]
    draw_links(tmp_path, some)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["links.pdf", "links.png"]


@pytest.mark.renders
def test_when_nothing_could_be_measured_the_report_says_so(tmp_path: Path) -> None:
    none = answer(failed("c", "gone"), failed("gone", "c"))
    assert links_text(none).splitlines()[-1] == "no pair could be measured"
    draw_links(tmp_path, none)


def test_a_full_disk_leaves_no_table_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        report, "write_json", lambda *_: None
    )  # longer than the table, so it would fail first
    with (
        files_no_longer_than(300),
        pytest.raises(RunError, match=f"cannot write to {tmp_path} .*; make room"),
    ):
        write_links(tmp_path, answer(*PAIRS))
    assert list(tmp_path.iterdir()) == []


def test_only_few_messages_per_second_are_measured_at_once() -> None:
    rtt_s = {("c", "a"): 0.001, ("c", "b"): 0.02, ("c", "d"): 0.025, ("c", "e"): 0.05}
    assert list(batches(list(rtt_s), rtt_s.__getitem__)) == [
        [("c", "a")],  # a thousand echoes per second: alone
        [("c", "b"), ("c", "d")],
        [("c", "e")],
    ]


def test_at_most_16_pairs_are_measured_at_once() -> None:
    pairs = [("c", str(i)) for i in range(40)]
    assert [len(batch) for batch in batches(pairs, lambda _: 1.0)] == [16, 16, 8]


def test_no_pairs_make_no_batch() -> None:
    assert list(batches([], lambda _: 1.0)) == []
