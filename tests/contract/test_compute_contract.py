"""What every compute backend promises to the server, whatever computes inside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from nodes.clock import ManualClock
from nodes.compute import Compute, StubCompute, StubProfile
from nodes.digest import embed, write_rows
from tests.support.data_plane import drive

TOKEN_BYTES = 32
MakeCompute = Callable[[ManualClock], Compute]


def _stub(serial: bool) -> MakeCompute:
    profile = StubProfile(TOKEN_BYTES, 0.01, 0.1, 0.001, serial=serial)
    return lambda clock: StubCompute(profile, clock)


def _refined_stub() -> MakeCompute:
    profile = StubProfile(
        TOKEN_BYTES, 0.01, 0.1, 0.001, step_base_s=0.02, context_slope_s=1e-4, contention_ratio=0.3
    )
    return lambda clock: StubCompute(profile, clock)


BACKENDS = {
    "stub": _stub(serial=False),
    "serial stub": _stub(serial=True),
    "stub with step base, context slope and contention": _refined_stub(),
}


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS.keys())
def make_compute(request: pytest.FixtureRequest) -> MakeCompute:
    make: MakeCompute = request.param
    return make


def rows(*tokens: int, position: int = 0) -> bytes:
    return write_rows([embed(token, position + i) for i, token in enumerate(tokens)], TOKEN_BYTES)


async def step(
    compute: Compute, clock: ManualClock, session: object, position: int, n_tokens: int, payload: bytes
) -> bytes:
    work = asyncio.ensure_future(compute.step(session, position, n_tokens, payload, clock.now_s()))
    await drive(clock, work)
    return work.result()


async def run_session(compute: Compute, clock: ManualClock, ranges: list[tuple[int, int]]) -> list[bytes]:
    """A prefill of three tokens and two decoded ones through ``ranges`` on one machine."""
    sessions = [compute.new_session("c", first, last, 5) for first, last in ranges]
    answers = []
    for position, tokens in ((0, (5, 6, 7)), (3, (8,)), (4, (9,))):
        data = rows(*tokens, position=position)
        for session in sessions:
            data = await step(compute, clock, session, position, len(tokens), data)
        answers.append(data)
    return answers


async def test_a_step_answers_as_many_hidden_states_as_it_was_given(make_compute: MakeCompute) -> None:
    clock = ManualClock()
    compute = make_compute(clock)
    assert [len(answer) for answer in await run_session(compute, clock, [(0, 3)])] == [
        3 * compute.token_bytes,
        compute.token_bytes,
        compute.token_bytes,
    ]


async def test_blocks_split_over_servers_answer_what_one_server_with_all_of_them_answers(
    make_compute: MakeCompute,
) -> None:
    clock = ManualClock()
    whole = await run_session(make_compute(clock), clock, [(0, 6)])
    assert await run_session(make_compute(clock), clock, [(0, 1), (1, 4), (4, 6)]) == whole


async def test_sessions_do_not_see_each_other(make_compute: MakeCompute) -> None:
    clock = ManualClock()
    compute = make_compute(clock)
    alone = await run_session(make_compute(clock), clock, [(0, 4)])
    both = await asyncio.gather(
        *(run_session(compute, clock, [(0, 4)]) for _ in range(2)),
    )
    assert both == [alone, alone]


async def test_replaying_a_sessions_inputs_continues_it_on_another_server(make_compute: MakeCompute) -> None:
    clock = ManualClock()
    original, replacement = make_compute(clock), make_compute(clock)
    before = original.new_session("c", 2, 5, 5)
    await step(original, clock, before, 0, 2, rows(1, 2))
    await step(original, clock, before, 2, 1, rows(3, position=2))
    after = replacement.new_session("c", 2, 5, 5)
    await step(replacement, clock, after, 0, 3, rows(1, 2, 3))
    next_token = rows(4, position=3)
    assert await step(replacement, clock, after, 3, 1, next_token) == await step(
        original, clock, before, 3, 1, next_token
    )


async def test_the_answer_depends_on_the_input_and_on_the_history(make_compute: MakeCompute) -> None:
    clock = ManualClock()
    compute = make_compute(clock)
    answers = set()
    for prompt in (1, 2):
        for token in (3, 4):
            session = compute.new_session("c", 0, 2, 2)
            await step(compute, clock, session, 0, 1, rows(prompt))
            answers.add(await step(compute, clock, session, 1, 1, rows(token, position=1)))
    assert len(answers) == 4
