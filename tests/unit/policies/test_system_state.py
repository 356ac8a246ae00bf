"""What ``SystemState`` keeps, and for how long."""

from __future__ import annotations

from policies.problem import Hop
from policies.state import SystemState


def test_sessions_that_are_closed_before_their_time_leave_nothing_behind() -> None:
    state = SystemState([100.0])
    for number in range(10_000):
        state.open(number, [Hop(0, 0, 2)], 1.0, 1e6 + number)
        state.close(number)
    assert state.free_bytes(0) == 100.0
    assert len(state._ends) <= 1024


def test_sessions_that_are_still_open_end_at_their_time_though_many_others_were_closed() -> None:
    state = SystemState([1e6])
    kept = range(0, 10_000, 100)
    for number in range(10_000):
        state.open(number, [Hop(0, 0, 1)], 1.0, 1000.0 + number)
        if number not in kept:
            state.close(number)
    assert state.n_active(0) == len(kept)
    state.advance(1000.0 + kept[49])
    assert state.n_active(0) == len(kept) - 50
    state.advance(20_000.0)
    assert state.n_active(0) == 0
    assert state.free_bytes(0) == 1e6
