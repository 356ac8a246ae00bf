"""Servers that forward: whatever dies when and where, tokens stay what they are and nothing stays behind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes import wire
from nodes.batching import Composition
from nodes.forwarding_session import ForwardingSession
from tests.property.test_recovery_properties import BASE, MISFORTUNES, one_case, run
from tests.support.effort import n_drawn
from tests.support.forwarding import forwarding_farm


# A connection that a server of this process accepted as it was "killed" is closed by the garbage collector only.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@settings(max_examples=n_drawn(25), deadline=None)
@given(MISFORTUNES, st.permutations(range(len(BASE))), st.integers(1, 3))
def test_no_failure_changes_a_token_of_a_chain_and_every_account_returns_to_zero(
    plan: dict[int, tuple[str, int]], prefer: list[int], n_sessions: int
) -> None:
    run(one_case(plan, prefer, n_sessions, forwarding_farm, ForwardingSession))


INSTANTS = st.floats(allow_nan=False)
SIZE = len(wire.pack_timing(wire.Timing(0.0, 0.0, 0, Composition())))
COUNTS = st.integers(0, 2**32 - 1)
TIMINGS = st.builds(wire.Timing, INSTANTS, INSTANTS, COUNTS, st.builds(Composition, *[COUNTS] * 5, INSTANTS))


@given(st.lists(TIMINGS, max_size=wire.MAX_TIMINGS))
def test_timings_come_out_as_they_went_in(rows: list[wire.Timing]) -> None:
    assert wire.unpack_timings(b"".join(map(wire.pack_timing, rows))) == rows


@given(
    st.binary(max_size=400)
    | st.integers(0, 8).flatmap(lambda n: st.binary(min_size=SIZE * n, max_size=SIZE * n))
)
def test_any_bytes_are_timings_or_a_frame_error(data: bytes) -> None:
    if len(data) % SIZE:
        with pytest.raises(wire.FrameError):
            wire.unpack_timings(data)
    else:
        assert len(wire.unpack_timings(data)) == len(data) // SIZE
