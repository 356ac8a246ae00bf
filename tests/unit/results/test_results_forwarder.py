"""What the summary of a run says if the forwarder was too slow for it."""

from __future__ import annotations

import pytest

from testbed.records.summary import RunSummary
from testbed.results import finish_run
from testbed.results.text import summary_text
from tests.support.records import changed
from tests.unit.results.conftest import MakeRun

_SENTENCE = "the forwarder could not keep up"


@pytest.fixture
def summary(make_run: MakeRun) -> RunSummary:
    run = make_run()
    run.serve(0, 0.0, [(0, 0, 2), (1, 2, 4)])
    return finish_run(run.path, run.experiment, None)


def _counters(late_p99_s: float, busy_max_ratio: float) -> dict[str, float]:
    return {"packets": 9, "dropped": 0, "late_p99_s": late_p99_s, "busy_max_ratio": busy_max_ratio}


def test_a_run_whose_packets_left_late_says_by_how_much(summary: RunSummary) -> None:
    text = " ".join(summary_text(changed(summary, forwarder=_counters(0.0042, 0.4))).split())
    assert f"{_SENTENCE}: 1 packet in 100 left it 4.2 ms or more (real) after its time" in text
    assert "busy for up to 40% of a second" in text


def test_a_run_whose_forwarder_had_no_time_left_says_so(summary: RunSummary) -> None:
    assert _SENTENCE in summary_text(changed(summary, forwarder=_counters(0.0002, 0.97)))


@pytest.mark.parametrize("forwarder", [None, _counters(0.0002, 0.3), {"packets": 9, "dropped": 0}])
def test_a_run_that_kept_up_or_was_recorded_without_these_counters_says_nothing(
    summary: RunSummary, forwarder: dict[str, float] | None
) -> None:
    assert _SENTENCE not in summary_text(changed(summary, forwarder=forwarder))


def test_a_run_with_links_faster_than_the_forwarder_says_what_long_transfers_get(
    summary: RunSummary,
) -> None:
    counters = _counters(0.0002, 0.3)
    fast, slow = (changed(summary, forwarder=counters | {"asked_max_bps": bps}) for bps in (10e9, 1e9))
    text = " ".join(summary_text(changed(fast, clock="real")).split())
    assert "links of up to 10 Gbit/s (real) were asked: long transfers there run at about 5 Gbit/s" in text
    assert "were asked" not in summary_text(changed(slow, clock="real"))
    assert "were asked" not in summary_text(changed(fast, clock="virtual"))  # which waits for the forwarder
