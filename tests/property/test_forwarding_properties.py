"""Servers that forward: whatever dies when and where, tokens stay what they are and nothing stays behind."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes import wire
from nodes.batching import Composition
from nodes.forwarding_session import ForwardingSession
from nodes.request import SessionError
from tests.property.test_recovery_properties import (
    BASE,
    MISFORTUNES,
    N_BLOCKS,
    N_INPUT,
    N_OUTPUT,
    Misfortune,
    run,
)
from tests.property.test_recovery_properties import (
    _revive_when_nothing_is_left as revive_when_nothing_is_left,
)
from tests.support.data_plane import JumpClock, until
from tests.support.farm import Session, expected_tokens
from tests.support.forwarding import forwarding_farm


async def one_case(plan: dict[int, tuple[str, int]], prefer: list[int], n_sessions: int) -> None:
    clock = JumpClock()
    async with forwarding_farm(BASE, clock) as servers:
        misfortune = servers.happens = Misfortune(servers, plan)
        sessions = [
            Session(
                servers,
                clock,
                prefer,
                n_input_tokens=N_INPUT,
                n_output_tokens=N_OUTPUT,
                index=index,
                kind=ForwardingSession,
            )
            for index in range(n_sessions)
        ]
        for session in sessions:
            revive_when_nothing_is_left(session, misfortune)
        ends = await asyncio.gather(*(s.hub.run() for s in sessions), return_exceptions=True)
        await misfortune.settle()
        for index, (session, end) in enumerate(zip(sessions, ends, strict=True)):
            tokens = expected_tokens(N_BLOCKS, N_INPUT, N_OUTPUT, index)
            done = session.log.token_ids
            assert done == tokens[: len(done)], "a token was altered"
            if end is None:
                assert len(done) == N_OUTPUT
            else:
                assert type(end) is SessionError, end
        await until(servers.is_free)
        assert not any(server.sessions.forwarding.n_places for server in servers.all_servers)


# A connection that a server of this process accepted as it was "killed" is closed by the garbage collector only.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@settings(max_examples=60, deadline=None)
@given(MISFORTUNES, st.permutations(range(len(BASE))), st.integers(1, 3))
def test_no_failure_changes_a_token_of_a_chain_and_every_account_returns_to_zero(
    plan: dict[int, tuple[str, int]], prefer: list[int], n_sessions: int
) -> None:
    run(one_case(plan, prefer, n_sessions))


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
