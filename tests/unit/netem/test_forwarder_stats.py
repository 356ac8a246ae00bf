"""Counters: the lateness histogram, and the page that the forwarder's parent reads."""

from __future__ import annotations

import pytest

from netem.forwarder_stats import ForwarderStats, Lateness, StatsPage


def test_quantiles_of_lateness_are_upper_bounds_no_more_than_a_bin_wide() -> None:
    lateness = Lateness()
    for i in range(1, 1001):
        lateness.add(i * 1e-5)
    assert 0.005 <= lateness.quantile(0.5) <= 0.005 * 1.16
    assert 0.0099 <= lateness.quantile(0.99) <= 0.0099 * 1.16


def test_without_packets_nothing_is_late() -> None:
    assert Lateness().quantile(0.99) == 0


def test_lateness_since_an_earlier_reading_leaves_out_what_came_before() -> None:
    lateness = Lateness()
    lateness.add(1.0)
    before = Lateness(list(lateness.bins))
    lateness.add(0.001)
    assert lateness.since(before).quantile(1.0) < 0.0012


def test_the_page_gives_back_what_was_written_with_the_99th_percentile() -> None:
    page = StatsPage()
    stats = ForwarderStats(
        200, 300_000, 1, 2, late_max_s=9.0, late_total_s=9.2, cpu_s=0.5, busy_max_ratio=0.25
    )
    lateness = Lateness()
    for _ in range(199):
        lateness.add(0.001)
    lateness.add(9.0)
    page.write(stats, lateness)
    read = page.read()
    assert 0.001 <= read.late_p99_s <= 0.00116
    read.late_p99_s = 0.0
    assert read == stats
    page.close()


def test_the_99th_percentile_is_never_above_the_maximum_not_even_beyond_the_last_bin() -> None:
    page = StatsPage()
    lateness = Lateness()
    lateness.add(100.0)
    page.write(ForwarderStats(packets=1, late_max_s=100.0), lateness)
    assert page.read().late_p99_s == pytest.approx(100.0)
    page.close()
