"""Sessions that come and go while blocks compute, change, or run out of memory."""

# ruff: noqa: E402 - what needs torch is imported once it is known to be there
from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from nodes import wire
from nodes.admission import HostedBlocks
from nodes.blocks.spec import BlocksSpec
from nodes.compute import ComputeError, open_session
from nodes.server import Server
from tests.support.blocks import BLOOM, LLAMA, N_LAYERS, Models, Walk, generated, hub_of, need_blocks, served
from tests.support.data_plane import raw_client, raw_frame, serving, until
from tests.support.manual_clock import ManualClock

need_blocks()

import torch

from nodes.blocks import compute as module
from nodes.blocks.cache import SessionCache
from nodes.blocks.compute import BlocksCompute
from nodes.blocks.memory import MemoryAccount

PROMPT = (5, 9, 200, 11, 7, 8)
STATES = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).numpy().tobytes()
CACHE_BYTES_PER_TOKEN = 2 * 64 * 4
"""Of the tiny BLOOM in float32, for one block."""


class Gate:
    """Holds back a backend's steps while they compute, until it is opened."""

    def __init__(self, compute: BlocksCompute, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_inside = 0
        self.opened = threading.Event()
        self._really = compute._compute
        monkeypatch.setattr(compute, "_compute", self._compute)

    def _compute(self, *arguments: Any) -> bytes:
        self.n_inside += 1
        assert self.opened.wait(20)
        return self._really(*arguments)


def out_of_memory(*_: Any) -> bytes:
    raise torch.OutOfMemoryError("CUDA out of memory")


async def test_a_session_closed_while_it_computes_keeps_its_memory_until_then(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = await served(models.source(BLOOM), 0, 3)
    gate = Gate(compute, monkeypatch)
    session = await open_session(compute, "c", 0, 3, 4)
    step = asyncio.ensure_future(compute.step(session, 0, 4, STATES, 0.0))
    await until(lambda: gate.n_inside == 1)
    compute.close_session(session)
    assert compute.memory()["cache_bytes"] == 3 * 4 * CACHE_BYTES_PER_TOKEN
    gate.opened.set()
    assert len((await step).payload) == len(STATES)
    assert compute.memory()["cache_bytes"] == 0
    assert session.cache is None
    compute.close()


@pytest.mark.parametrize("is_batched", [False, True])
async def test_a_step_waits_for_one_that_a_slow_server_began_before(
    models: Models, monkeypatch: pytest.MonkeyPatch, is_batched: bool
) -> None:
    compute = await served(models.source(BLOOM), 0, 3, is_batched=is_batched)
    computed: list[float] = []
    really = compute._compute

    def takes_time(*arguments: Any) -> bytes:
        time.sleep(0.01)
        computed.append(time.monotonic())
        return really(*arguments)

    monkeypatch.setattr(compute, "_compute", takes_time)
    first, second = [await open_session(compute, "c", 0, 3, 4) for _ in range(2)]
    compute.factor = 20.0
    steps = [asyncio.ensure_future(compute.step(first, 0, 4, STATES, 0.0))]
    await until(lambda: len(computed) == 1)
    compute.factor = 1.0  # for what begins from now on
    steps.append(asyncio.ensure_future(compute.step(second, 0, 4, STATES, 0.0)))
    assert [len(done.payload) for done in await asyncio.gather(*steps)] == [len(STATES)] * 2
    assert computed[1] - computed[0] > 19 * 0.01
    compute.close()


async def test_a_slow_server_that_ends_waits_for_no_step(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_batched in (False, True):
        compute = await served(models.source(BLOOM), 0, 3, is_batched=is_batched)
        gate = Gate(compute, monkeypatch)
        gate.opened.set()
        session = await open_session(compute, "c", 0, 3, 4)
        compute.factor = 1e9
        step = asyncio.ensure_future(compute.step(session, 0, 4, STATES, 0.0))
        await until(lambda gate=gate: gate.n_inside == 1)
        step.cancel()
        compute.close()
        await asyncio.wait_for(asyncio.to_thread(compute._queue.shutdown), 10)


async def test_a_session_closed_before_its_step_began_is_not_computed(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = await served(models.source(BLOOM), 0, 3)
    gate = Gate(compute, monkeypatch)
    first, second = [await open_session(compute, "c", 0, 3, 4) for _ in range(2)]
    steps = [asyncio.ensure_future(compute.step(s, 0, 4, STATES, 0.0)) for s in (first, second)]
    await until(lambda: gate.n_inside == 1)
    compute.close_session(second)
    compute.close_session(second)
    assert compute.memory()["cache_bytes"] == 3 * 4 * CACHE_BYTES_PER_TOKEN
    gate.opened.set()
    await steps[0]
    with pytest.raises(ComputeError, match="the session cannot go on: it was closed"):
        await steps[1]
    compute.close()


async def test_with_two_streams_two_sessions_compute_at_once(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = await served(models.source(BLOOM), 0, 3, n_streams=2)
    gate = Gate(compute, monkeypatch)
    sessions = [await open_session(compute, "c", 0, 3, 4) for _ in range(2)]
    steps = [asyncio.ensure_future(compute.step(s, 0, 4, STATES, 0.0)) for s in sessions]
    await until(lambda: gate.n_inside == 2)
    gate.opened.set()
    first, second = await asyncio.gather(*steps)
    assert first == second
    compute.close()


@pytest.mark.parametrize("name", [BLOOM, LLAMA])
async def test_sessions_on_blocks_that_stay_go_on_while_others_change(models: Models, name: str) -> None:
    source = models.source(name)
    compute = await served(source, 0, 4)
    others = await served(source, 4, N_LAYERS)
    front = await served(source, 0, 2)
    walk = Walk(hub_of(source), [(front, 0, 2), (compute, 2, 4), (others, 4, N_LAYERS)], PROMPT, 12)
    await walk.go(4)
    moving = asyncio.ensure_future(compute.host(2, N_LAYERS))
    await walk.go(4)
    await moving
    tokens = await walk.go(4)
    assert tokens == generated(models.whole(name, "float32"), PROMPT, 12)
    assert compute.memory()["blocks_bytes"] == 4 * compute.block_bytes
    after = Walk(hub_of(source), [(front, 0, 2), (compute, 2, N_LAYERS)], PROMPT, 5)
    assert await after.go(5) == tokens[:5]


async def test_blocks_that_stay_are_not_loaded_again(models: Models) -> None:
    compute = await served(models.source(BLOOM), 0, 4)
    kept = compute._blocks[2]
    await compute.host(2, N_LAYERS)
    assert compute._blocks[2] is kept
    assert sorted(compute._blocks) == [2, 3, 4, 5]


async def test_sessions_on_blocks_that_go_end_with_the_reason(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = await served(models.source(BLOOM), 0, 3)
    gate = Gate(compute, monkeypatch)
    idle, busy = [await open_session(compute, "c", 0, 3, 5) for _ in range(2)]
    step = asyncio.ensure_future(compute.step(busy, 0, 4, STATES, 0.0))
    await until(lambda: gate.n_inside == 1)
    moving = asyncio.ensure_future(compute.host(1, 3))
    await until(lambda: compute.memory()["cache_bytes"] == 3 * 5 * CACHE_BYTES_PER_TOKEN)
    assert not moving.done(), "a step still computes with the block that goes"
    gate.opened.set()
    await asyncio.gather(step, moving)
    assert compute.memory()["cache_bytes"] == 0
    assert compute.memory()["blocks_bytes"] == 2 * compute.block_bytes
    for session in (idle, busy):
        with pytest.raises(ComputeError, match="its blocks are no longer here"):
            await compute.step(session, 0, 1, STATES[:256], 0.0)
    with pytest.raises(ComputeError, match="block 0 is not here"):
        await open_session(compute, "c", 0, 3, 5)


async def test_blocks_that_cannot_be_loaded_leave_those_that_stay(models: Models) -> None:
    compute = await served(models.source(BLOOM), 0, 2)
    limit = compute._account.limit_bytes = 3.5 * compute.block_bytes
    with pytest.raises(ComputeError, match="4 blocks of 200 kB need 800 kB and 500 kB are free: 2 would fit"):
        await compute.host(1, N_LAYERS)
    assert compute.memory()["blocks_bytes"] == compute.block_bytes < limit
    await open_session(compute, "c", 1, 2, 4)


async def test_more_blocks_than_fit_are_refused_with_how_many_would(models: Models) -> None:
    spec = BlocksSpec(models.source(BLOOM), memory_bytes=700e3)
    compute = BlocksCompute(spec)
    with pytest.raises(ComputeError) as caught:
        await compute.host(0, N_LAYERS)
    assert str(caught.value) == "6 blocks of 200 kB need 1.2 MB and 700 kB are free: 3 would fit"
    await compute.host(0, 3)
    assert compute.memory()["limit_bytes"] == 700e3


async def test_memory_that_runs_out_while_loading_is_said_and_given_back(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nodes.blocks import compute as module

    really, n_loaded = module.load_block, 0

    def load(*arguments: Any) -> torch.nn.Module:
        nonlocal n_loaded
        n_loaded += 1
        if n_loaded == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return really(*arguments)

    monkeypatch.setattr(module, "load_block", load)
    compute = BlocksCompute(BlocksSpec(models.source(BLOOM)))
    with pytest.raises(ComputeError, match="ran out while loading: 3 of 6 blocks fitted"):
        await compute.host(0, N_LAYERS)
    assert compute.memory()["blocks_bytes"] == 0
    await compute.host(0, 3)


async def test_a_session_without_room_is_refused_and_others_go_on(models: Models) -> None:
    source = models.source(BLOOM)
    probe = BlocksCompute(BlocksSpec(source))
    room = N_LAYERS * 20 * CACHE_BYTES_PER_TOKEN
    compute = await served(source, 0, N_LAYERS, memory_bytes=N_LAYERS * probe.block_bytes + room)
    walk = Walk(hub_of(source), [(compute, 0, N_LAYERS)], PROMPT, 10)
    await walk.go(2)
    with pytest.raises(ComputeError, match=r"a cache of 15\.4 kB is needed and 12\.3 kB are free"):
        await open_session(compute, "d", 0, N_LAYERS, 5)
    assert await walk.go(8) == generated(models.whole(BLOOM, "float32"), PROMPT, 10)
    walk.close()
    compute.close_session(await open_session(compute, "d", 0, N_LAYERS, 20))
    assert compute.memory()["cache_bytes"] == 0


async def test_a_step_that_runs_out_of_memory_ends_its_session_and_no_other(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = await served(models.source(BLOOM), 0, 3)
    hosted = HostedBlocks(0, 3, 1e9, CACHE_BYTES_PER_TOKEN)
    server = Server("s", hosted, compute, ManualClock())
    async with serving(server) as url, raw_client(url) as client:
        for key in ("a", "b"):
            assert (await client.ask("open", 1, key, "c", 0, 3, 8))[0] == "ok"
        monkeypatch.setattr(compute, "_compute", out_of_memory)
        answer = await client.ask("step", 2, "a", 0, 4, STATES)
        assert answer[:3] == ["error", 2, wire.COMPUTE_FAILED]
        assert answer[3] == "memory ran out while computing 4 tokens: CUDA out of memory"
        monkeypatch.undo()
        assert compute.memory()["cache_bytes"] == 3 * 8 * CACHE_BYTES_PER_TOKEN
        assert (await client.ask("step", 3, "b", 0, 4, STATES))[0] == "out"


async def test_a_server_without_memory_for_a_session_answers_that_it_has_no_capacity(models: Models) -> None:
    compute = await served(models.source(BLOOM), 0, 3)
    compute._account.limit_bytes = compute.memory()["blocks_bytes"]
    hosted = HostedBlocks(0, 3, 1e9, CACHE_BYTES_PER_TOKEN)
    async with serving(Server("s", hosted, compute, ManualClock())) as url, raw_client(url) as client:
        answer = await client.ask("open", 1, "a", "c", 0, 3, 8)
        assert answer[:3] == ["error", 1, wire.NO_CAPACITY]
        assert "0 B are free" in answer[3]


async def test_another_failure_of_a_step_ends_its_session_too(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = await served(models.source(BLOOM), 0, 3)
    session = await open_session(compute, "c", 0, 3, 4)
    monkeypatch.setattr(compute, "_compute", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        await compute.step(session, 0, 4, STATES, 0.0)
    monkeypatch.undo()
    with pytest.raises(ComputeError, match="the session cannot go on: an earlier step failed"):
        await compute.step(session, 0, 4, STATES, 0.0)
    assert compute.memory()["cache_bytes"] == 0


class Hold:
    """Holds back the allocation of sessions' memory until it is opened; with ``fails`` it then fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> None:
        self.n_inside = 0
        self.opened = threading.Event()
        self._really, self._fails = module.SessionCache, fails
        monkeypatch.setattr(module, "SessionCache", self._make)

    def _make(self, *arguments: Any) -> Any:
        self.n_inside += 1
        assert self.opened.wait(20)
        return out_of_memory() if self._fails else self._really(*arguments)


async def test_while_a_session_waits_for_its_memory_others_open_close_and_compute(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same connection, too. Requests sent right behind the opening are carried out after it."""
    compute = await served(models.source(BLOOM), 0, 3)
    server = Server("s", HostedBlocks(0, 3, 1e9, CACHE_BYTES_PER_TOKEN), compute, ManualClock())
    async with serving(server) as url, raw_client(url) as client:
        assert (await client.ask("open", 1, "a", "c", 0, 3, 8))[0] == "ok"
        hold = Hold(monkeypatch)
        await client.send(raw_frame("open", 2, "b", "c", 0, 3, 8))
        await until(lambda: hold.n_inside == 1)
        await client.send(raw_frame("step", 3, "b", 0, 4, STATES))
        assert (await client.ask("step", 4, "a", 0, 4, STATES))[:2] == ["out", 4]
        assert (await client.ask("close", 5, "a"))[:2] == ["ok", 5]
        assert server.counters.opened == 1
        hold.opened.set()
        assert [(await client.answer())[:2] for _ in range(2)] == [["ok", 2], ["out", 3]]
        assert server.counters.opened == 2
        assert compute.memory()["cache_bytes"] == 3 * 8 * CACHE_BYTES_PER_TOKEN
    assert compute.memory()["cache_bytes"] == compute._account.cache_bytes == 0


async def test_memory_that_is_not_there_after_all_refuses_the_session_and_is_given_back(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = await served(models.source(BLOOM), 0, 3)
    server = Server("s", HostedBlocks(0, 3, 1e9, CACHE_BYTES_PER_TOKEN), compute, ManualClock())
    async with serving(server) as url, raw_client(url) as client:
        hold = Hold(monkeypatch, fails=True)
        hold.opened.set()
        answer = await client.ask("open", 1, "a", "c", 0, 3, 8)
        assert answer[:3] == ["error", 1, wire.NO_CAPACITY]
        assert answer[3] == "no memory for a session's cache: CUDA out of memory"
        assert (server.counters.opened, server.counters.refused, len(server.sessions.admission.account)) == (
            0,
            1,
            0,
        )
        assert (compute._account.cache_bytes, compute._sessions) == (0, set())
        monkeypatch.undo()
        assert (await client.ask("open", 2, "a", "c", 0, 3, 8))[:2] == ["ok", 2]


@pytest.mark.parametrize("fails", [False, True], ids=["there", "not-there"])
async def test_a_session_closed_before_it_is_open_leaves_nothing(
    fails: bool, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = await served(models.source(BLOOM), 0, 3)
    server = Server("s", HostedBlocks(0, 3, 1e9, CACHE_BYTES_PER_TOKEN), compute, ManualClock())
    async with serving(server) as url, raw_client(url) as client:
        hold = Hold(monkeypatch, fails=fails)
        await client.send(raw_frame("open", 1, "a", "c", 0, 3, 8))
        await until(lambda: hold.n_inside == 1)
        assert (await client.ask("close", 2, "a"))[:2] == ["ok", 2]
        assert compute._account.cache_bytes == 3 * 8 * CACHE_BYTES_PER_TOKEN, "the device may be giving it"
        hold.opened.set()
        assert (await client.answer())[:3] == ["error", 1, wire.NO_CAPACITY]
        assert (compute._account.cache_bytes, compute._sessions, len(server.sessions.admission.account)) == (
            0,
            set(),
            0,
        )


async def test_a_client_that_leaves_while_its_session_opens_leaves_nothing(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = await served(models.source(BLOOM), 0, 3)
    server = Server("s", HostedBlocks(0, 3, 1e9, CACHE_BYTES_PER_TOKEN), compute, ManualClock())
    async with serving(server) as url:
        hold = Hold(monkeypatch)
        async with raw_client(url) as client:
            await client.send(raw_frame("open", 1, "a", "c", 0, 3, 8))
            await client.send(raw_frame("open", 2, "b", "c", 0, 3, 8))  # which nobody has begun
            await until(lambda: hold.n_inside == 1)
        await until(lambda: not server.sessions.live)
        assert len(server.sessions.admission.account) == 0
        hold.opened.set()
        await until(lambda: compute._account.cache_bytes == 0)
        assert compute._sessions == set()


async def test_blocks_that_go_wait_for_a_session_that_opens_on_them(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = await served(models.source(BLOOM), 0, 3)
    hold = Hold(monkeypatch)
    session = compute.new_session("c", 0, 3, 5)
    await until(lambda: hold.n_inside == 1)
    moving = asyncio.ensure_future(compute.host(1, 3))
    await until(lambda: bool(session.closed_by))
    assert not moving.done()
    hold.opened.set()
    await moving
    assert (compute._account.cache_bytes, compute._models) == (0, {})
    with pytest.raises(ComputeError, match="its blocks are no longer here"):
        await compute.step(session, 0, 4, STATES, 0.0)


async def test_a_session_that_is_to_grow_before_it_is_open_grows_with_its_first_step(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = await served(models.source(BLOOM), 0, 3)
    hold = Hold(monkeypatch)
    session = compute.new_session("c", 0, 3, 2)
    compute.grow(session, 4)
    hold.opened.set()
    assert len((await compute.step(session, 0, 4, STATES, 0.0)).payload) == len(STATES)
    assert compute.memory()["cache_bytes"] == 3 * 4 * CACHE_BYTES_PER_TOKEN
    compute.close()


async def test_a_cache_grows_in_the_thread_that_computes_and_not_on_the_event_loop(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = await served(models.source(BLOOM), 0, 3)
    session = await open_session(compute, "c", 0, 3, 4)
    await compute.step(session, 0, 4, STATES, 0.0)
    threads: list[str] = []
    really = SessionCache.grow

    def grow(cache: SessionCache, max_tokens: int) -> None:
        threads.append(threading.current_thread().name)
        really(cache, max_tokens)

    monkeypatch.setattr(SessionCache, "grow", grow)
    compute.grow(session, 6)
    assert not threads
    assert compute._account.cache_bytes == 3 * 6 * CACHE_BYTES_PER_TOKEN, "reserved at once"
    await compute.step(session, 4, 1, STATES[:256], 0.0)
    await compute.step(session, 5, 1, STATES[:256], 0.0)
    assert [name.split("_")[0] for name in threads] == ["blocks"]
    compute.close()


async def test_a_session_whose_cache_cannot_grow_ends_and_gives_its_room_back(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = await served(models.source(BLOOM), 0, 3)
    session = await open_session(compute, "c", 0, 3, 4)
    await compute.step(session, 0, 4, STATES, 0.0)
    compute.grow(session, 6)

    def grow(cache: SessionCache, max_tokens: int) -> None:
        raise torch.OutOfMemoryError("the device is full")

    monkeypatch.setattr(SessionCache, "grow", grow)
    with pytest.raises(ComputeError, match="no memory for a session's cache: the device is full"):
        await compute.step(session, 4, 1, STATES[:256], 0.0)
    assert compute._account.cache_bytes == 0
    with pytest.raises(ComputeError, match="cannot go on: its cache could not grow"):
        await compute.step(session, 4, 1, STATES[:256], 0.0)
    compute.close()


async def test_steps_that_do_not_follow_one_another_are_refused(models: Models) -> None:
    compute = await served(models.source(BLOOM), 0, 3)
    session = await open_session(compute, "c", 0, 3, 5)
    await compute.step(session, 0, 4, STATES, 0.0)
    for position, n_tokens in ((5, 1), (4, 2), (0, 6)):
        with pytest.raises(ComputeError, match=f"{n_tokens} tokens at {position} do not follow .* 4 of 5"):
            await compute.step(session, position, n_tokens, (2 * STATES)[: 256 * n_tokens], 0.0)
    await compute.step(session, 4, 1, STATES[:256], 0.0)


async def test_a_step_that_begins_before_the_end_takes_the_place_of_what_was_there(models: Models) -> None:
    compute = await served(models.source(BLOOM), 0, 3)
    session, other = [await open_session(compute, "c", 0, 3, 5) for _ in range(2)]
    whole = (await compute.step(session, 0, 4, STATES, 0.0)).payload
    await compute.step(other, 0, 3, STATES[:768][::-1], 0.0)
    again = (await compute.step(other, 0, 4, STATES, 0.0)).payload
    assert again == whole
    await compute.step(session, 2, 1, STATES[:256], 0.0)
    changed = (await compute.step(session, 2, 2, STATES[512:], 0.0)).payload
    one, two = (torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (changed, whole[512:]))
    assert torch.allclose(one, two, atol=1e-5)


async def test_real_memory_is_what_the_model_says(models: Models) -> None:
    compute = await served(models.source(BLOOM), 0, 4, dtype="bfloat16")
    sessions = [
        await open_session(compute, "c", first, 4, tokens) for first, tokens in ((0, 10), (1, 20), (3, 7))
    ]
    modelled = sum((4 - first) * tokens for first, tokens in ((0, 10), (1, 20), (3, 7))) * 2 * 64 * 2
    memory = compute.memory()
    assert memory["cache_bytes"] == modelled
    stored = sum(s.cache.layers[i].keys.nbytes * 2 for s in sessions for i in range(s.last - s.first))
    assert stored == modelled
    assert memory["resident_bytes"] > memory["blocks_bytes"]
    sessions[0].cache.store.untyped_storage().resize_(0)  # memory that has been released is not counted
    assert compute.memory()["cache_bytes"] == modelled - 4 * 10 * 2 * 64 * 2


def test_what_is_refused_takes_nothing_of_the_account() -> None:
    account = MemoryAccount(6e9)
    account.take_cache(int(2e9))
    with pytest.raises(ComputeError) as caught:
        account.take_blocks(5, 1_323_397_667, 100e9)
    assert str(caught.value) == "5 blocks of 1.32 GB need 6.62 GB and 4 GB are free: 3 would fit"
    with pytest.raises(ComputeError, match="and 1 GB are free: 1 would fit"):
        account.take_blocks(2, int(1e9), available_bytes=1e9)
    assert (account.blocks_bytes, account.cache_bytes) == (0, 2e9)


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        ("cuda", "float32", 'the device "cuda" cannot be used: '),
        ("abacus", "float32", 'the device "abacus" cannot be used: '),
        ("meta", "float32", 'the device "meta" is not supported; supported devices: cpu, cuda'),
        ("cpu", "float8", 'unknown dtype "float8"; supported dtypes: float32, bfloat16, float16'),
    ],
)
def test_a_device_or_dtype_that_cannot_be_used_is_refused_in_one_sentence(
    models: Models, device: str, dtype: str, reason: str
) -> None:
    if device == "cuda" and torch.cuda.is_available():
        device, reason = "cuda:99", 'the device "cuda:99" cannot be used: '
    with pytest.raises(ComputeError) as caught:
        BlocksCompute(BlocksSpec(models.source(BLOOM), device=device, dtype=dtype))
    assert str(caught.value).startswith(reason)
    assert "\n" not in str(caught.value)
