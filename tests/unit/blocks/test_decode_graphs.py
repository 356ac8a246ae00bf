"""Steps of one token as they are recorded for a GPU: their results, and the calls to CUDA."""

# ruff: noqa: E402 - what needs torch is imported once it is known to be there
from __future__ import annotations

import asyncio
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import pytest

from nodes.blocks.spec import BlocksSpec, Weights
from nodes.compute import open_session
from tests.support.blocks import (
    BLOOM,
    CONFIGS,
    DTYPES,
    N_LAYERS,
    TOLERANCES,
    Models,
    Walk,
    hub_of,
    need_blocks,
    served,
)

need_blocks()

import torch

from nodes.blocks.compute import BlocksCompute
from nodes.blocks.graphs import Apart, Decoder, Pool
from nodes.blocks.whole import WholeModel
from tests.support.fake_cuda import FakeCuda

PROMPT = (5, 9, 200, 11, 7, 8)
SPLIT = ((0, 1), (1, 4), (4, N_LAYERS))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes fresh memory full of NaN, as a device's memory may be."""
    with torch.device("meta"):
        torch.empty(0)  # torch notes once which functions "meta" is for: not the one that replaces this
    empty = torch.empty

    def full_of_nan(*size: Any, **given: Any) -> torch.Tensor:
        tensor = empty(*size, **given)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", full_of_nan)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
async def test_a_chain_of_recorded_steps_says_the_whole_models_tokens(
    models: Models, name: str, dtype: str
) -> None:
    source = models.source(name)
    chain = [(await served(source, *cut, dtype=dtype, has_graphs=True), *cut) for cut in SPLIT]
    tokens = await Walk(hub_of(source, dtype=dtype), chain, PROMPT, 24).go(24)
    found = WholeModel(BlocksSpec(source, dtype=dtype)).judge(PROMPT, tokens)
    assert not found.altered
    assert len(found.tied) <= (0 if dtype == "float32" else 3), (
        "on some processors the order of additions changes results"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
async def test_hidden_states_are_those_of_steps_that_are_not_recorded(
    models: Models, name: str, dtype: str
) -> None:
    """Attention over empty room adds zeros: only the order of additions may differ."""
    rows = torch.randn(9, CONFIGS[name]["hidden_size"], generator=torch.Generator().manual_seed(3))
    rows = rows.to(getattr(torch, dtype))
    found = []
    for has_graphs in (False, True):
        compute = await served(models.source(name), 1, 4, dtype=dtype, has_graphs=has_graphs)
        session = await open_session(compute, "c", 1, 4, 40)
        answers = [await step(compute, session, 0, rows[:5])]
        answers += [await step(compute, session, i, rows[i : i + 1]) for i in range(5, 9)]
        found.append(torch.cat(answers).float())
        compute.close()
    largest = found[0].abs().max()
    assert (found[1] - found[0]).abs().max() <= TOLERANCES[dtype] * largest
    assert torch.isfinite(found[1]).all()


async def step(compute: BlocksCompute, session: Any, position: int, rows: torch.Tensor) -> torch.Tensor:
    payload = rows.contiguous().view(torch.uint8).numpy().tobytes()
    answer = (await compute.step(session, position, len(rows), payload, 0.0)).payload
    return torch.frombuffer(bytearray(answer), dtype=rows.dtype).reshape(rows.shape)


@pytest.mark.parametrize("weights", ["plain", "int8"])
async def test_recorded_and_batched_steps_of_a_session_follow_each_other(
    models: Models, weights: Weights
) -> None:
    """With other sessions a step is part of a batch, alone it is recorded; both use the same cache."""
    source = models.source(BLOOM)
    plain = await served(source, 0, N_LAYERS, weights=weights)
    expected = [
        await Walk(hub_of(source), [(plain, 0, N_LAYERS)], prompt, 20).go(20) for prompt in (PROMPT, (3, 4))
    ]
    compute = await served(source, 0, N_LAYERS, weights=weights, is_batched=True, has_graphs=True)
    long, short = (Walk(hub_of(source), [(compute, 0, N_LAYERS)], prompt, 20) for prompt in (PROMPT, (3, 4)))
    await long.go(4)
    await asyncio.gather(long.go(6), short.go(6))
    assert [await long.go(10), await short.go(14)] == expected


async def test_a_session_whose_cache_has_grown_gets_another_decoder(models: Models) -> None:
    compute = await served(models.source(BLOOM), 0, 3, has_graphs=True)
    session = await open_session(compute, "c", 0, 3, 4)
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    await step(compute, session, 0, rows[:3])
    await step(compute, session, 3, rows[3:4])
    before = session.decoder
    compute.grow(session, 8)
    grown = [await step(compute, session, i, rows[i : i + 1]) for i in range(4, 6)]
    assert session.decoder is not before
    plain = await served(models.source(BLOOM), 0, 3)
    session = await open_session(plain, "c", 0, 3, 8)
    await step(plain, session, 0, rows[:4])
    torch.testing.assert_close(grown, [await step(plain, session, i, rows[i : i + 1]) for i in range(4, 6)])


@dataclass
class OnFake:
    """A server whose decoders record on a fake of CUDA. Its first recording has been made, with what comes before that."""

    cuda: FakeCuda
    compute: BlocksCompute
    apart: Apart
    pool: Pool

    async def decoder(self) -> Decoder:
        session = await open_session(self.compute, "c", 0, 3, 12)
        await step(self.compute, session, 0, torch.randn(3, 64))
        assert self.compute._ragged is not None and session.cache is not None
        states = torch.randn(1, 1, 64)
        return Decoder(self.compute._ragged, session.cache, 0, session.model.h, states, self.apart, self.pool)


@pytest.fixture
async def on_fake(models: Models, monkeypatch: pytest.MonkeyPatch) -> OnFake:
    compute = await served(models.source(BLOOM), 0, 3, has_graphs=True)
    cuda = FakeCuda(monkeypatch)
    pool = Pool(torch.device("cpu"))
    assert pool.record(lambda: torch.zeros(1)) is not None
    cuda.calls.clear()
    return OnFake(cuda, compute, Apart(), pool)


async def test_the_second_step_is_recorded_and_played_and_so_are_those_after_it(
    on_fake: OnFake,
) -> None:
    cuda, decoder = on_fake.cuda, await on_fake.decoder()
    states = torch.randn(3, 1, 1, 64)
    order: list[list[str]] = []
    for number in range(3):
        decoder.step(states[number])
        order.append([call[0] for call in cuda.calls])
        cuda.calls.clear()
        assert int(decoder._position) == 3 + number
        assert torch.equal(decoder._states, states[number])
    assert order == [[], ["capture_begin", "capture_end", "replay"], ["replay"]]


async def test_a_recording_minds_other_threads_no_more_than_it_must(on_fake: OnFake) -> None:
    """Of others, who open sessions and load blocks, it forbids nothing: ``Apart`` sees to that."""
    decoder = await on_fake.decoder()
    for _ in range(2):
        decoder.step(torch.randn(1, 1, 64))
    assert on_fake.cuda.of("capture_begin") == [("capture_begin", {"capture_error_mode": "thread_local"})]


async def test_a_session_that_ends_leaves_the_recorded_steps_of_others_whole(on_fake: OnFake) -> None:
    """torch frees cuBLAS' workspace of a stream with any graph that was recorded there."""
    first, second = await on_fake.decoder(), await on_fake.decoder()
    for decoder in (first, second):
        for _ in range(3):
            decoder.step(torch.randn(1, 1, 64))
    del first
    on_fake.cuda.calls.clear()
    second.step(torch.randn(1, 1, 64))
    assert [call[0] for call in on_fake.cuda.calls] == ["replay"]


async def test_a_recording_without_memory_is_tried_again_without_what_the_allocator_keeps(
    on_fake: OnFake,
) -> None:
    cuda, decoder = on_fake.cuda, await on_fake.decoder()
    cuda.fails_in, cuda.fails_with = "capture_end", torch.OutOfMemoryError("CUDA out of memory")
    states = torch.randn(1, 1, 64)
    decoder.step(states)

    def there_is_room_now() -> None:
        cuda.fails_in = "" if cuda.of("empty_cache") else "capture_end"

    cuda.then["capture_begin"] = there_is_room_now
    decoder.step(states)
    order = [call[0] for call in cuda.calls]
    again = ["capture_begin", "capture_end", "replay"]
    assert order == ["capture_begin", "capture_end", "empty_cache", *again]


async def test_a_recording_is_tried_again_when_the_failed_ones_tensors_are_gone(on_fake: OnFake) -> None:
    cuda, pool = on_fake.cuda, on_fake.pool
    made: list[weakref.ref[torch.Tensor]] = []
    are_there: list[bool] = []

    def work() -> torch.Tensor:
        are_there.append(any(one() is not None for one in made))
        states = torch.zeros(4)
        made.append(weakref.ref(states))
        if len(made) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return states

    assert pool.record(work) is not None
    assert are_there == [False, False] and len(cuda.of("empty_cache")) == 1


def test_a_pools_first_kernel_has_run_before_it_is_recorded(
    on_fake: OnFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros

    def noted(*size: Any, **given: Any) -> torch.Tensor:
        on_fake.cuda.calls.append(("zeros",))
        return zeros(*size, **given)

    monkeypatch.setattr(torch, "zeros", noted)
    Pool(torch.device("cpu")).record(lambda: zeros(1))
    order = [call[0] for call in on_fake.cuda.of("zeros", "capture_begin", "capture_end")]
    assert order == ["zeros", "capture_begin", "zeros", "capture_end", "capture_begin", "capture_end"]


@pytest.mark.parametrize("what", ["another server records", "another server's session ends"])
async def test_servers_of_one_process_record_and_drop_graphs_one_at_a_time(
    on_fake: OnFake, what: str
) -> None:
    cuda, other = on_fake.cuda, await on_fake.decoder()
    for _ in range(2):
        other.step(torch.randn(1, 1, 64))
    assert other._graph is not None
    cuda.calls.clear()
    order: list[str] = []

    def intervene() -> None:
        if what == "another server records":
            Pool(torch.device("cpu")).record(lambda: torch.zeros(1))
        else:
            other.drop()
        order.append("the other")

    thread = threading.Thread(target=intervene)

    def recording() -> torch.Tensor:
        thread.start()
        thread.join(0.2)  # enough time to get through, if nothing held it back
        order.append("recorded")
        return torch.zeros(1)

    assert on_fake.pool.record(recording) is not None
    thread.join(20)
    assert order == ["recorded", "the other"]


async def test_a_session_that_ends_gives_its_recording_up(on_fake: OnFake) -> None:
    compute = on_fake.compute
    session = await open_session(compute, "c", 0, 3, 12)
    session.decoder = decoder = await on_fake.decoder()
    for _ in range(2):
        decoder.step(torch.randn(1, 1, 64))
    assert decoder._graph is not None
    compute.close_session(session)
    assert decoder._graph is None


async def test_nothing_is_recorded_while_others_ask_the_device_for_memory(
    on_fake: OnFake,
) -> None:
    cuda, apart, decoder = on_fake.cuda, on_fake.apart, await on_fake.decoder()
    states = torch.randn(1, 1, 64)
    decoder.step(states)
    with apart.allocating(), apart.allocating():
        decoder.step(states)
        assert not cuda.calls
    decoder.step(states)
    assert [call[0] for call in cuda.calls] == ["capture_begin", "capture_end", "replay"]


async def test_who_asks_for_memory_waits_for_a_recording(
    on_fake: OnFake,
) -> None:
    cuda, apart, decoder = on_fake.cuda, on_fake.apart, await on_fake.decoder()
    states = torch.randn(1, 1, 64)
    decoder.step(states)
    order: list[str] = []

    def allocate() -> None:
        with apart.allocating():
            order.append("allocated")

    other = threading.Thread(target=allocate)

    def replayed() -> None:
        other.start()
        other.join(0.2)  # enough time to begin, if nothing held it back
        order.append("recorded")

    cuda.then["capture_end"] = replayed
    decoder.step(states)
    other.join(20)
    assert order == ["recorded", "allocated"]


async def test_a_step_that_cannot_be_recorded_is_computed_and_the_server_goes_on_without(
    on_fake: OnFake, caplog: pytest.LogCaptureFixture
) -> None:
    cuda, decoder = on_fake.cuda, await on_fake.decoder()
    cuda.fails_in = "capture_end"
    states = torch.randn(1, 1, 64)
    for _ in range(3):
        answer = decoder.step(states)
        assert torch.isfinite(answer).all()
    assert [call[0] for call in cuda.calls] == ["capture_begin", "capture_end"]
    assert (
        "not recorded as CUDA graphs from here on; if memory runs out later, restart this server: the device says no"
        in caplog.text
    )
    other = await on_fake.decoder()
    for _ in range(3):
        other.step(states)
    assert cuda.of("capture_begin") == [cuda.calls[0]], "no other session tries again"


async def test_sessions_are_recorded_when_all_that_were_before_have_gone(on_fake: OnFake) -> None:
    for _ in range(2):
        decoder = await on_fake.decoder()
        for _ in range(2):
            decoder.step(torch.randn(1, 1, 64))
        assert decoder._graph is not None
        del decoder
    assert list(on_fake.cuda.graphs_of.values()) == [1]
