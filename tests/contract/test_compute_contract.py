"""What every compute backend promises to the server, whatever computes inside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nodes.blocks.spec import BlocksSpec, Weights, WeightSource
from nodes.compute import Compute, StubCompute, StubProfile, open_session
from nodes.digest import embed, write_rows
from policies.problem import Batching
from policies.steps import StepTimes
from tests.support.blocks import BLOOM, CONFIGS, LLAMA, N_LAYERS, need_blocks
from tests.support.data_plane import drive
from tests.support.manual_clock import ManualClock

TOKEN_BYTES = 32
Tokens = Sequence[tuple[int, int]]
"""(token, position), whose hidden states a hub would send."""


@dataclass(frozen=True)
class Backend:
    """``make(clock)`` begins without blocks; ``rows`` are inputs; ``same`` compares outputs."""

    make: Callable[[ManualClock], Compute]
    rows: Callable[[Tokens], bytes]
    same: Callable[[bytes, bytes], bool] = bytes.__eq__
    """Up to rounding, where a computation that is split otherwise in time may round otherwise."""
    need: Callable[[], None] = lambda: None


def _stub(batching: Batching) -> Backend:
    profile = StubProfile(TOKEN_BYTES, StepTimes(0.01, 0.1, 0.001), batching=batching)
    return Backend(
        lambda clock: StubCompute(profile, clock),
        lambda tokens: write_rows([embed(*token) for token in tokens], TOKEN_BYTES),
    )


def _blocks(name: str, **spec: Any) -> Backend:
    config = CONFIGS[name]

    def make(clock: ManualClock) -> Compute:
        from nodes.blocks.compute import BlocksCompute

        compute: Compute = BlocksCompute(BlocksSpec(WeightSource(config, seed=2), **spec), clock)
        return compute

    def rows(tokens: Tokens) -> bytes:
        states = [np.random.default_rng(token).standard_normal(config["hidden_size"]) for token in tokens]
        return np.asarray(states, dtype=np.float32).tobytes()

    def same(one: bytes, other: bytes) -> bool:
        return np.allclose(np.frombuffer(one, np.float32), np.frombuffer(other, np.float32), atol=1e-5)

    kind: Weights = spec.get("weights", "plain")
    if kind == "nf4":
        return Backend(make, rows, same, lambda: need_blocks("bitsandbytes", "quantised"))
    return Backend(make, rows, same, need_blocks)


BACKENDS = {
    "stub": _stub("none"),
    "serial stub": _stub("serial"),
    "batching stub": _stub("continuous"),
    "blocks of bloom": _blocks(BLOOM),
    "blocks of llama": _blocks(LLAMA),
    "blocks, two streams": _blocks(BLOOM, n_streams=2),
    "batching blocks": _blocks(LLAMA, is_batched=True),
    "batching blocks, prompts in chunks": _blocks(BLOOM, is_batched=True, chunk_tokens=2),
    "blocks in 8 bits": _blocks(LLAMA, weights="int8"),
    "blocks in 4 bits": _blocks(BLOOM, weights="nf4"),
}


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS.keys())
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    chosen.need()
    return chosen


async def hosting(backend: Backend, clock: ManualClock, first: int = 0, last: int = N_LAYERS) -> Compute:
    compute = backend.make(clock)
    await compute.host(first, last)
    return compute


async def step(
    compute: Compute, clock: ManualClock, session: object, position: int, n_tokens: int, payload: bytes
) -> bytes:
    work = asyncio.ensure_future(compute.step(session, position, n_tokens, payload, clock.now_s()))
    await drive(clock, work)
    return work.result().payload


async def run_session(
    backend: Backend, clock: ManualClock, servers: list[tuple[Compute, int, int]]
) -> list[bytes]:
    """A prefill of three tokens and two decoded ones through ``servers``."""
    sessions = [compute.new_session("c", first, last, 5) for compute, first, last in servers]
    answers = []
    for position, tokens in ((0, (5, 6, 7)), (3, (8,)), (4, (9,))):
        data = backend.rows([(token, position + i) for i, token in enumerate(tokens)])
        for (compute, _, _), session in zip(servers, sessions, strict=True):
            data = await step(compute, clock, session, position, len(tokens), data)
        answers.append(data)
    for (compute, _, _), session in zip(servers, sessions, strict=True):
        compute.close_session(session)
    return answers


async def test_a_session_that_grows_answers_what_one_with_all_its_room_answers(backend: Backend) -> None:
    clock = ManualClock()
    compute = await hosting(backend, clock)
    whole = await run_session(backend, clock, [(compute, 0, 3)])
    session = compute.new_session("c", 0, 3, 3)
    held_bytes = [compute.memory().get("cache_bytes", 0.0)]
    answers = []
    for position, tokens, room in ((0, (5, 6, 7), 3), (3, (8,), 4), (4, (9,), 8)):
        compute.grow(session, room)
        data = backend.rows([(token, position + i) for i, token in enumerate(tokens)])
        answers.append(await step(compute, clock, session, position, len(tokens), data))
        held_bytes.append(compute.memory().get("cache_bytes", 0.0))
    compute.close_session(session)
    assert answers == whole
    assert [n / held_bytes[0] for n in held_bytes if held_bytes[0]] in ([], [1.0, 1.0, 4 / 3, 8 / 3])
    assert compute.memory().get("cache_bytes", 0.0) == 0.0


async def test_a_step_answers_as_many_hidden_states_as_it_was_given(backend: Backend) -> None:
    clock = ManualClock()
    compute = await hosting(backend, clock)
    assert [len(answer) for answer in await run_session(backend, clock, [(compute, 0, 3)])] == [
        3 * compute.token_bytes,
        compute.token_bytes,
        compute.token_bytes,
    ]


async def test_blocks_split_over_servers_answer_what_one_server_with_all_of_them_answers(
    backend: Backend,
) -> None:
    clock = ManualClock()
    whole = await run_session(backend, clock, [(await hosting(backend, clock), 0, 6)])
    servers = [
        (await hosting(backend, clock, 0, 2), 0, 1),
        (await hosting(backend, clock, 1, 4), 1, 4),
        (await hosting(backend, clock, 3, 6), 4, 6),
    ]
    assert await run_session(backend, clock, servers) == whole


async def test_sessions_do_not_see_each_other(backend: Backend) -> None:
    clock = ManualClock()
    alone = await run_session(backend, clock, [(await hosting(backend, clock), 0, 4)])
    compute = await hosting(backend, clock)
    both = await asyncio.gather(*(run_session(backend, clock, [(compute, 0, 4)]) for _ in range(2)))
    # Real blocks that compute two sessions together may round otherwise than one by one.
    for answers in both:
        assert len(answers) == len(alone)
        assert all(map(backend.same, answers, alone))


async def test_replaying_a_sessions_inputs_continues_it_on_another_server(backend: Backend) -> None:
    clock = ManualClock()
    original, replacement = await hosting(backend, clock, 2, 5), await hosting(backend, clock, 0, 6)
    tokens = [(1, 0), (2, 1), (3, 2), (4, 3)]
    before = original.new_session("c", 2, 5, 5)
    await step(original, clock, before, 0, 2, backend.rows(tokens[:2]))
    await step(original, clock, before, 2, 1, backend.rows(tokens[2:3]))
    after = replacement.new_session("c", 2, 5, 5)
    await step(replacement, clock, after, 0, 3, backend.rows(tokens[:3]))
    next_token = backend.rows(tokens[3:])
    assert backend.same(
        await step(replacement, clock, after, 3, 1, next_token),
        await step(original, clock, before, 3, 1, next_token),
    )


async def test_the_answer_depends_on_the_input_and_on_the_history(backend: Backend) -> None:
    clock = ManualClock()
    compute = await hosting(backend, clock)
    answers = set()
    for prompt in (1, 2):
        for token in (3, 4):
            session = compute.new_session("c", 0, 2, 2)
            await step(compute, clock, session, 0, 1, backend.rows([(prompt, 0)]))
            answers.add(await step(compute, clock, session, 1, 1, backend.rows([(token, 1)])))
    assert len(answers) == 4


async def test_a_session_goes_on_while_other_blocks_come_and_go(backend: Backend) -> None:
    clock = ManualClock()
    compute, still = await hosting(backend, clock, 0, 4), await hosting(backend, clock)
    sessions = [(c, c.new_session("c", 2, 4, 5)) for c in (compute, still)]
    first = [await step(c, clock, s, 0, 2, backend.rows([(1, 0), (2, 1)])) for c, s in sessions]
    await compute.host(2, 6)
    second = [await step(c, clock, s, 2, 1, backend.rows([(3, 2)])) for c, s in sessions]
    assert first[0] == first[1]
    assert second[0] == second[1]


async def test_the_memory_of_a_session_is_given_back(backend: Backend) -> None:
    clock = ManualClock()
    compute = await hosting(backend, clock)
    before = compute.memory()
    session = await open_session(compute, "c", 0, 6, 100)
    if before:  # a backend may hold nothing at all
        assert compute.memory()["cache_bytes"] > before["cache_bytes"]
    compute.close_session(session)
    assert compute.memory().get("cache_bytes") == before.get("cache_bytes")
    compute.close()
