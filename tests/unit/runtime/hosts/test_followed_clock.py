"""Nodes on another machine: their instants are off by no more than is stated, of the whole run."""

from __future__ import annotations

from testbed.runtime.hosts.following import FollowedClock

AHEAD_S = 1000.0


def ask(clock: FollowedClock, at_s: float, way_s: float, drift: float = 0.0) -> None:
    """One question that takes ``way_s`` to the other machine, and nothing back: the estimate is off by half of it."""
    clock.add(at_s, AHEAD_S + (1 + drift) * (at_s + way_s), at_s + way_s)


def test_a_better_estimate_does_not_undo_what_nodes_had_before() -> None:
    clock = FollowedClock()
    ask(clock, 0.0, 2e-3)
    origin_at = clock.instant_for("server", 5.0)
    off_s = abs(origin_at - 5.0 - AHEAD_S)
    assert off_s > 0.9e-3
    ask(clock, 1.0, 0.1e-3)
    clock.instant_for("server", 5.0)
    for n in range(100):
        ask(clock, 1.1 + 0.1 * n, 0.1e-3)
    assert clock.uncertainty_s < off_s - 1e-9 < clock.uncertainty_of_nodes_s < 5e-3


def test_a_node_follows_a_clock_that_drifts() -> None:
    """10 ppm for 100 s would be 1 ms; a node that is told each second is off by 10 us, and what it was off is stated."""
    clock, drift, worst_s = FollowedClock(), 1e-5, 0.0
    for n in range(20):
        ask(clock, n * 0.005, 1e-6, drift)
    origin_at = clock.instant_for("server", 0.1)
    for n in range(1, 1000):
        at_s = 0.1 * n + 0.1
        ask(clock, at_s, 1e-6, drift)
        says_s = AHEAD_S + (1 + drift) * at_s - origin_at
        worst_s = max(worst_s, abs(says_s - (at_s - 0.1)))
        if n % 10 == 0:
            origin_at = clock.instant_for("server", 0.1)
    assert 9e-6 < worst_s < 13e-6
    assert worst_s <= clock.uncertainty_of_nodes_s < 20e-6


def test_what_a_node_was_told_that_has_ended_counts_no_more() -> None:
    clock = FollowedClock()
    ask(clock, 0.0, 1e-6, 1e-5)
    clock.instant_for("server", 0.0)
    clock.forget("server")
    for n in range(1, 100):
        ask(clock, float(n), 1e-6, 1e-5)
    assert clock.uncertainty_of_nodes_s == clock.uncertainty_s < 1e-4
