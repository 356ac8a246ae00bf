"""Several sessions in one forward: each has the same tokens as alone."""

# ruff: noqa: E402 - what needs torch is imported once it is known to be there
from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from nodes import wire
from nodes.admission import HostedBlocks
from nodes.compute import Computed, ComputeError, open_session
from nodes.server import Server
from policies.rules import PagingRules
from tests.support.blocks import (
    BLOOM,
    CONFIGS,
    DTYPES,
    LLAMA,
    N_LAYERS,
    TOLERANCES,
    Models,
    Walk,
    generated,
    hub_of,
    need_blocks,
    served,
)
from tests.support.data_plane import raw_client, raw_frame, serving, until
from tests.support.manual_clock import ManualClock

need_blocks()

import torch

from nodes.blocks import ragged
from nodes.blocks.compute import BlocksCompute

PROMPTS = ((5, 9, 200, 11, 7, 8), (3,), (250, 4, 4, 19, 77, 0, 130, 12, 61), (42, 43), (7, 7, 7, 7, 7))
RANGES = (
    ((0, 6),),
    ((0, 2), (2, 6)),
    ((0, 4), (4, 6)),
    ((0, 6),),
    ((0, 1), (1, 5), (5, 6)),
)
"""Of the chain of each of ``PROMPTS``, all on one server."""
STATES = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).numpy().tobytes()
TOKEN_BYTES = 64 * 4
CACHE_BYTES_PER_TOKEN = 2 * 64 * 4
"""Of the tiny BLOOM in float32, per block."""


async def batching(models: Models, name: str, **spec: Any) -> Any:
    return await served(models.source(name), 0, N_LAYERS, is_batched=True, **spec)


class Door:
    """Holds back the steps of ``compute`` until it is opened."""

    def __init__(self, compute: BlocksCompute) -> None:
        self._opened = threading.Event()
        compute._queue.submit(self._opened.wait, 20)

    def open(self) -> None:
        self._opened.set()


def begin(compute: BlocksCompute, *steps: tuple[Any, int, int]) -> list[asyncio.Task[Computed]]:
    """A task per (session, position, number of tokens); all of the session's inputs are ``STATES`` over and over."""
    return [
        asyncio.ensure_future(
            compute.step(session, position, n_tokens, inputs(position, n_tokens), arrived_at_s=0.0)
        )
        for session, position, n_tokens in steps
    ]


def inputs(position: int, n_tokens: int) -> bytes:
    long = STATES * (1 + (position + n_tokens) // 4)
    return long[position * TOKEN_BYTES : (position + n_tokens) * TOKEN_BYTES]


def states_of(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.float32)


async def warmed(compute: BlocksCompute, n: int, room: int = 12) -> list[Any]:
    """``n`` sessions on blocks 0 to 6 with a prompt of as many tokens as their number and one more; a server that has been busy."""
    sessions = [await open_session(compute, "c", 0, N_LAYERS, room) for _ in range(n)]
    for number, session in enumerate(sessions):
        await asyncio.gather(*begin(compute, (session, 0, 1 + number)))
    return sessions


async def alone(models: Models, name: str, number: int) -> torch.Tensor:
    """Returns the result of the first decode of session ``number`` of ``warmed`` when it is alone."""
    compute = await served(models.source(name), 0, N_LAYERS)
    session = await open_session(compute, "c", 0, N_LAYERS, 12)
    await asyncio.gather(*begin(compute, (session, 0, 1 + number)))
    (computed,) = await asyncio.gather(*begin(compute, (session, 1 + number, 1)))
    compute.close()
    return states_of(computed.payload)


@pytest.mark.parametrize("chunk_tokens", [None, 4])
@pytest.mark.parametrize("name", CONFIGS)
async def test_sessions_of_all_lengths_and_ranges_say_together_what_transformers_says_of_each(
    models: Models, name: str, chunk_tokens: int | None
) -> None:
    compute, hub = (
        await batching(models, name, chunk_tokens=chunk_tokens),
        hub_of(models.source(name)),
    )
    largest = 0
    really = compute.step

    async def step(*arguments: Any) -> Computed:
        nonlocal largest
        computed: Computed = await really(*arguments)
        largest = max(largest, computed.together.steps)
        return computed

    compute.step = step

    async def text(number: int) -> list[int]:
        walk = Walk(hub, [(compute, *blocks) for blocks in RANGES[number]], PROMPTS[number], 20)
        try:
            # Some begin while others are at their tokens, and end before them.
            return [*(await walk.go(20 - 3 * number))]
        finally:
            walk.close()

    texts = await asyncio.gather(*(text(number) for number in range(len(PROMPTS))))
    whole = models.whole(name, "float32")
    assert texts == [generated(whole, prompt, 20 - 3 * n) for n, prompt in enumerate(PROMPTS)]
    assert largest > 1, "nothing was computed together"
    assert compute.memory()["cache_bytes"] == 0
    compute.close()
    hub.close()


@pytest.mark.parametrize("weights", ["int8", "nf4"])
@pytest.mark.parametrize("name", [BLOOM, LLAMA])
async def test_quantised_blocks_say_together_what_they_say_of_each_alone(
    models: Models, name: str, weights: str
) -> None:
    if weights == "nf4":
        need_blocks("bitsandbytes", "quantised")
    hub, alone = hub_of(models.source(name)), await served(models.source(name), 0, N_LAYERS, weights=weights)
    compute = await batching(models, name, weights=weights)

    async def text(server: Any, prompt: tuple[int, ...]) -> list[int]:
        walk = Walk(hub, [(server, 0, N_LAYERS)], prompt, 16)
        try:
            return [*(await walk.go(16))]
        finally:
            walk.close()

    together = await asyncio.gather(*(text(compute, prompt) for prompt in PROMPTS))
    assert together == [await text(alone, prompt) for prompt in PROMPTS]
    for one in (compute, alone, hub):
        one.close()


@pytest.mark.parametrize("weights", ["plain", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [BLOOM, LLAMA])
async def test_hidden_states_of_a_batch_are_those_of_each_session_alone_up_to_rounding(
    models: Models, name: str, dtype: str, weights: str
) -> None:
    """A decode, a prompt, a replay and other ranges in one batch."""
    source, kind = models.source(name), getattr(torch, dtype)
    states = torch.randn(24, 64, generator=torch.Generator().manual_seed(1)).to(kind)
    steps = ((0, 6, 0, 5), (0, 6, 7, 1), (2, 5, 3, 1), (1, 6, 4, 6))
    parts, expected = [], []
    compute = await served(source, 0, N_LAYERS, dtype=dtype, weights=weights)
    for first, last, position, n_tokens in steps:
        sessions = [await open_session(compute, "c", first, last, 16) for _ in range(2)]
        history, new = (
            tensor.view(torch.uint8).numpy().tobytes()
            for tensor in (states[:position], states[position : position + n_tokens])
        )
        if position:
            for session in sessions:
                await compute.step(session, 0, position, history, 0.0)
        expected.append((await compute.step(sessions[0], position, n_tokens, new, 0.0)).payload)
        blocks = getattr(sessions[1].model, compute._family.blocks)
        own = states[None, position : position + n_tokens]
        parts.append(ragged.Part(own, sessions[1].cache, first, blocks))
    joint = ragged.Ragged(compute._family, compute._config, torch.device("cpu"))
    with torch.inference_mode():
        answers = joint.forward(parts)
    for part, answer, payload in zip(parts, answers, expected, strict=True):
        one = torch.frombuffer(bytearray(payload), dtype=kind).reshape(answer.shape)
        torch.testing.assert_close(answer, one, rtol=0.0, atol=TOLERANCES[dtype])
        assert {layer.length for layer in part.cache.layers} == {part.cache.get_seq_length()}
    compute.close()


async def test_all_decodes_that_wait_and_one_prompt_are_computed_in_one_forward(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = await batching(models, BLOOM)
    sessions = await warmed(compute, 3)
    prompts = [await open_session(compute, "c", 0, N_LAYERS, 12) for _ in range(2)]
    sizes: list[list[int]] = []
    really = compute._ragged.forward

    def forward(parts: list[ragged.Part]) -> list[torch.Tensor]:
        sizes.append([part.states.shape[1] for part in parts])
        answer: list[torch.Tensor] = really(parts)
        return answer

    monkeypatch.setattr(compute._ragged, "forward", forward)
    door = Door(compute)
    tasks = begin(compute, (sessions[0], 1, 1), (prompts[0], 0, 4), (sessions[1], 2, 1), (prompts[1], 0, 3))
    tasks += begin(compute, (sessions[2], 3, 1))
    door.open()
    computed = await asyncio.gather(*tasks)
    assert sizes == [[1, 1, 1, 4]], "the second prompt is in the next batch, alone"
    assert [(one.together.steps, one.together.tokens) for one in computed] == [
        (4, 7),
        (4, 7),
        (4, 7),
        (1, 3),
        (4, 7),
    ]
    for number, place in ((0, 0), (1, 2), (2, 4)):
        expected = await alone(models, BLOOM, number)
        torch.testing.assert_close(states_of(computed[place].payload), expected, rtol=0, atol=1e-4)
    compute.close()


@pytest.mark.parametrize("name", [BLOOM, LLAMA])
async def test_a_forward_that_breaks_midway_is_made_again_session_by_session(
    models: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caches had the tokens already in some blocks; one session fails by itself, too."""
    compute = await batching(models, name)
    sessions = await warmed(compute, 3)
    really, n_done = compute._ragged._through, 0

    def through(*arguments: Any) -> torch.Tensor:
        nonlocal n_done
        n_done += 1
        if n_done == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        answer: torch.Tensor = really(*arguments)
        return answer

    one_by_one = compute._compute

    def compute_one(session: Any, n_tokens: int, payload: bytes) -> bytes:
        if session is sessions[1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return one_by_one(session, n_tokens, payload)

    with monkeypatch.context() as broken:
        broken.setattr(compute._ragged, "_through", through)
        broken.setattr(compute, "_compute", compute_one)
        door = Door(compute)
        tasks = begin(compute, *((session, 1 + number, 1) for number, session in enumerate(sessions)))
        door.open()
        first, second, third = await asyncio.gather(*tasks, return_exceptions=True)
    assert n_done == 4 + 2 * N_LAYERS, "the other two, each by itself"
    assert isinstance(second, ComputeError) and "memory ran out while computing 1 tokens" in str(second)
    for number, computed in ((0, first), (2, third)):
        assert isinstance(computed, Computed)
        expected = await alone(models, name, number)
        torch.testing.assert_close(states_of(computed.payload), expected, rtol=0, atol=1e-4)
    assert sessions[1].cache is None
    with pytest.raises(ComputeError, match="an earlier step failed"):
        await compute.step(sessions[1], 3, 1, inputs(3, 1), 0.0)
    again = await asyncio.gather(*begin(compute, (sessions[0], 2, 1), (sessions[2], 4, 1)))
    assert [one.together.steps for one in again] == [2, 2]
    compute.close()


async def test_a_batch_that_breaks_altogether_fails_all_its_steps_and_the_next_one_is_computed(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = await batching(models, BLOOM, chunk_tokens=2)
    sessions = await warmed(compute, 2)
    prompt = await open_session(compute, "c", 0, N_LAYERS, 12)

    def broken(*_: Any) -> None:
        raise RuntimeError("the device has gone")

    with monkeypatch.context() as patched:
        patched.setattr(compute, "_batch", broken)
        tasks = begin(compute, (sessions[0], 1, 1), (prompt, 0, 5))
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(answer) for answer in answers] == ["the device has gone"] * 2
    (after,) = await asyncio.gather(*begin(compute, (sessions[1], 2, 1)))
    assert after.together.steps == 1, "nothing is left of the prompt"
    compute.close()


async def test_a_step_that_cannot_follow_fails_alone(models: Models) -> None:
    compute = await batching(models, BLOOM)
    sessions = await warmed(compute, 3)
    tasks = begin(compute, (sessions[0], 1, 1), (sessions[1], 9, 1), (sessions[2], 3, 1))
    first, second, third = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(second, ComputeError)
    assert str(second) == "1 tokens at 9 do not follow the session's 2 of 12"
    for number, computed in ((0, first), (2, third)):
        assert isinstance(computed, Computed) and computed.together.steps == 3
        torch.testing.assert_close(
            states_of(computed.payload), await alone(models, BLOOM, number), rtol=0, atol=1e-4
        )
    compute.close()


async def test_sessions_that_end_while_they_wait_or_compute_trouble_nobody(models: Models) -> None:
    compute = await batching(models, BLOOM)
    sessions = await warmed(compute, 4)
    door = Door(compute)
    tasks = begin(compute, *((session, 1 + number, 1) for number, session in enumerate(sessions)))
    await until(lambda: compute._batcher._batches.start_at_s() is None)  # all steps are in batches
    late = await open_session(compute, "c", 0, N_LAYERS, 12)
    waiting = begin(compute, (late, 0, 4))
    await until(lambda: len(compute._jobs) == 5)
    compute.close_session(sessions[0])  # before the thread has begun with it
    tasks[1].cancel()  # its client has gone
    compute.close_session(sessions[1])
    waiting[0].cancel()
    compute.close_session(late)
    door.open()
    answers = await asyncio.gather(*tasks, *waiting, return_exceptions=True)
    assert isinstance(answers[0], ComputeError) and "it was closed" in str(answers[0])
    assert isinstance(answers[1], asyncio.CancelledError) and isinstance(answers[4], asyncio.CancelledError)
    for number in (2, 3):
        computed = answers[number]
        assert isinstance(computed, Computed)
        torch.testing.assert_close(
            states_of(computed.payload), await alone(models, BLOOM, number), rtol=0, atol=1e-4
        )
    assert compute.memory()["cache_bytes"] == 2 * 12 * N_LAYERS * CACHE_BYTES_PER_TOKEN
    assert not compute._jobs
    compute.close()


async def test_a_session_that_ends_between_chunks_of_its_prompt_leaves_the_rest_uncomputed(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = await batching(models, BLOOM, chunk_tokens=2)
    (session,) = await warmed(compute, 1)
    long = await open_session(compute, "c", 0, N_LAYERS, 12)
    n_chunks, really = 0, compute._compute

    def compute_one(one: Any, n_tokens: int, payload: bytes) -> bytes:
        nonlocal n_chunks
        if one is long:
            n_chunks += 1
            compute.close_session(long)
        return really(one, n_tokens, payload)

    monkeypatch.setattr(compute, "_compute", compute_one)
    (prompt,) = await asyncio.gather(*begin(compute, (long, 0, 7)), return_exceptions=True)
    assert isinstance(prompt, ComputeError) and "it was closed" in str(prompt)
    assert n_chunks == 1
    (after,) = await asyncio.gather(*begin(compute, (session, 1, 1)))
    assert after.together.steps == 1
    compute.close()


async def test_a_cache_grows_once_a_preempted_session_has_ended_its_step(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server reserves the preempted session's room for another at once, but its step still computes."""
    probe = await served(models.source(BLOOM), 0, N_LAYERS)
    room_bytes = 8 * N_LAYERS * CACHE_BYTES_PER_TOKEN
    compute = await batching(models, BLOOM, memory_bytes=N_LAYERS * probe.block_bytes + room_bytes)
    old, young = await warmed(compute, 2, room=4)
    really, opened = compute._compute, threading.Event()

    def compute_one(*arguments: Any) -> bytes:
        assert opened.wait(20)
        return really(*arguments)

    monkeypatch.setattr(compute, "_compute", compute_one)
    (preempted,) = begin(compute, (young, 2, 1))
    await until(lambda: young.running)
    compute.close_session(young)
    with pytest.raises(ComputeError, match="is needed and 0 B are free"):
        await open_session(compute, "c", 0, N_LAYERS, 4)
    compute.grow(old, 8)
    (grown,) = begin(compute, (old, 1, 4))
    opened.set()
    answers = await asyncio.gather(preempted, grown)
    assert [len(one.payload) for one in answers] == [TOKEN_BYTES, 4 * TOKEN_BYTES]
    assert compute.memory()["cache_bytes"] == room_bytes
    compute.close()


async def test_a_waiting_step_of_a_preempted_session_says_that_it_was_preempted(models: Models) -> None:
    compute = await batching(models, BLOOM)
    hosted = HostedBlocks(0, 3, 20 * 3 * CACHE_BYTES_PER_TOKEN, CACHE_BYTES_PER_TOKEN, PagingRules(4, 1.0))
    server = Server("s", hosted, compute, ManualClock())
    async with serving(server) as url, raw_client(url) as client:
        assert (await client.ask("open", 1, "old", "c", 0, 3, 20, 4, 0.0))[0] == "ok"
        assert (await client.ask("open", 2, "young", "c", 0, 3, 20, 12, 1.0))[0] == "ok"
        door = Door(compute)
        await client.send(raw_frame("step", 3, "young", 0, 12, inputs(0, 12)))
        await until(lambda: len(compute._jobs) == 1)
        await client.send(raw_frame("step", 4, "old", 0, 12, inputs(0, 12)))
        await until(lambda: len(compute._jobs) == 2)
        door.open()
        answers = {answer[1]: answer for answer in [await client.answer(), await client.answer()]}
        assert answers[3][:3] == ["error", 3, wire.PREEMPTED]
        assert answers[4][0] == "out"


@pytest.mark.parametrize("name", [BLOOM, LLAMA])
async def test_decode_steps_ask_the_model_class_for_nothing_however_long_they_get(
    models: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the model class would compute for each step costs more than a block's own kernels."""
    monkeypatch.setattr(ragged, "_LEAST_PLACES", 8)
    compute = await batching(models, name)
    walks = [
        Walk(hub_of(models.source(name)), [(compute, 0, N_LAYERS)], prompt, 20) for prompt in PROMPTS[:3]
    ]
    await asyncio.gather(*(walk.go(1) for walk in walks))
    assert compute._ragged is not None
    monkeypatch.setattr(compute._ragged._shell, "forward", None)
    said = await asyncio.gather(*(walk.go(19) for walk in walks))
    assert said == [generated(models.whole(name, "float32"), prompt, 20) for prompt in PROMPTS[:3]]
    assert compute._ragged._n_places == 32, "made again twice"
    compute.close()
