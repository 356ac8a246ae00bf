"""Which calls CUDA gets, and in which order: on a fake that records calls, so that no GPU is needed."""

# ruff: noqa: E402 - what needs torch is imported once it is known to be there
from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from nodes.blocks.spec import BlocksSpec
from nodes.compute import ComputeError, open_session
from tests.support.blocks import BLOOM, LLAMA, N_LAYERS, Models, Walk, generated, hub_of, need_blocks, served

need_blocks()

import torch

from nodes.blocks import compute as module
from nodes.blocks.compute import BlocksCompute
from nodes.blocks.device import open_device, to_bytes
from nodes.blocks.memory import prefill_bytes, states_bytes, step_bytes, workspace_bytes
from tests.support.fake_cuda import TOTAL_BYTES, FakeCuda, on_device


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_what_leaves_a_device_is_awaited_on_that_devices_stream(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread's current device is another one: its stream knows nothing of the copy."""
    pinned: list[bool] = []
    empty = torch.empty

    def unpinned(*size: Any, pin_memory: bool = False, **given: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(*size, **given)

    monkeypatch.setattr(torch, "empty", unpinned)
    states = torch.arange(6.0).reshape(2, 3)
    assert to_bytes(on_device(states)) == states.numpy().tobytes()
    assert pinned == [True]
    assert cuda.calls == [
        ("Event", {"blocking": True}),
        ("event.record", torch.device("cuda", 1)),
        ("event.synchronize",),
    ]


@pytest.mark.parametrize("n_streams", [1, 8])
def test_the_limit_of_a_tiny_models_server_has_room_for_each_streams_workspace(
    models: Models, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, n_streams: int
) -> None:
    """A product takes 32 MiB for cuBLAS and as much for cuBLASLt on Hopper, in every stream, whatever its size."""
    monkeypatch.setattr(module, "open_device", lambda *_: (torch.device("cuda", 1), torch.float32))
    spec = BlocksSpec(models.source(BLOOM), device="cuda:1", memory_bytes=20e6, n_streams=n_streams)
    BlocksCompute(spec).close()
    [(_, ratio, device)] = cuda.of("set_per_process_memory_fraction")
    assert device == torch.device("cuda", 1)
    assert ratio * TOTAL_BYTES > 20e6 + n_streams * (32 + 32) * 1024**2


async def test_what_loading_took_for_a_moment_is_given_back_before_the_first_step(
    models: Models, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams have pools of their own. A load that fails gives it back, too."""
    really = module.load_block

    def load(*arguments: Any) -> torch.nn.Module:
        cuda.calls.append(("load",))
        return really(*arguments[:5], torch.device("cpu"), *arguments[6:])

    compute = BlocksCompute(BlocksSpec(models.source(BLOOM)))
    monkeypatch.setattr(module, "load_block", load)
    monkeypatch.setattr(compute, "_device", torch.device("cuda", 1))
    await compute.host(0, 2)
    order = [call[0] for call in cuda.of("load", "synchronize", "empty_cache")]
    assert order == ["load", "load", "synchronize", "empty_cache"]
    assert not cuda.of("set_stream"), "bitsandbytes quantises in the default stream, so all of loading must"
    cuda.calls.clear()
    monkeypatch.setattr(module, "load_block", out_of_memory)
    with pytest.raises(ComputeError, match="ran out while loading"):
        await compute.host(0, 3)
    assert cuda.of("empty_cache") == [("empty_cache",)]
    compute.close()


async def test_a_sessions_cache_is_free_of_earlier_work_before_its_first_step(
    models: Models, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is opened in the default stream, where temporaries of loading may still be in use."""
    compute = await served(models.source(BLOOM), 0, 2)
    device = torch.device("cuda", 1)

    def cache(*_: Any) -> Any:
        cuda.calls.append(("cache",))
        return SimpleNamespace(held_bytes=0)

    monkeypatch.setattr(module, "SessionCache", cache)
    monkeypatch.setattr(compute, "_model", lambda *_: None)
    monkeypatch.setattr(compute, "_device", device)
    await open_session(compute, "c", 0, 2, 8)
    assert cuda.of("cache", "stream.synchronize") == [("cache",), ("stream.synchronize", device)]
    compute.close()


def test_threads_that_compute_have_the_servers_device_and_a_stream_of_their_own(
    models: Models, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording must not be in the default stream; the threads that load and open must be."""
    device = torch.device("cuda", 1)
    monkeypatch.setattr(module, "open_device", lambda *_: (device, torch.float32))
    compute = BlocksCompute(BlocksSpec(models.source(BLOOM), device="cuda:1"))
    for pool, begins in ((compute._queue, True), (compute._loader, False), (compute._opener, False)):
        cuda.calls.clear()
        pool.submit(lambda: None).result(20)
        assert cuda.of("set_device") == [("set_device", device)]
        streams = [call[1].device for call in cuda.of("set_stream")]
        assert streams == ([device] if begins else [])
    compute.close()


async def test_a_device_that_refuses_everything_holds_nobody_up(
    models: Models, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some errors even waiting for the device fails: sessions end and blocks are dropped anyway."""
    compute = await served(models.source(BLOOM), 0, 2)
    session = await open_session(compute, "c", 0, 2, 8)

    def refuse(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(compute, "_compute", refuse)
    monkeypatch.setattr(compute, "_device", torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "current_stream", refuse)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await compute.step(session, 0, 1, b"", 0.0)
    assert compute.memory()["cache_bytes"] == 0
    async with asyncio.timeout(20):
        await compute.host(0, 0)
    compute.close()


@pytest.mark.parametrize("n_streams", [1, 8])
def test_the_limit_has_room_for_the_steps_of_all_streams_at_once(n_streams: int) -> None:
    matrix_bytes = 4 * 14336**2 * 2
    steps_bytes = n_streams * (prefill_bytes(14336, n_streams) + matrix_bytes)
    assert workspace_bytes(14336, matrix_bytes, n_streams) > steps_bytes


@pytest.mark.parametrize(("major", "is_refused"), [(7, True), (8, False)])
def test_bfloat16_is_asked_of_the_device_that_is_opened(
    monkeypatch: pytest.MonkeyPatch, major: int, is_refused: bool
) -> None:
    cards = [SimpleNamespace(major=15 - major, name="other"), SimpleNamespace(major=major, name="T4")]
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cards[device.index])
    with pytest.raises(ComputeError, match="T4 does not") if is_refused else contextlib.nullcontext():
        assert open_device("cuda:1", "bfloat16") == (torch.device("cuda", 1), torch.bfloat16)


def test_gpus_have_the_numbers_that_the_driver_gives_them() -> None:
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_torch_is_imported_without_operators_that_need_a_compiler() -> None:
    pytest.importorskip("torch._native", reason="this torch has no such operators")
    program = (
        "import nodes.blocks.device, torch._native.common_utils as c; print(c.check_native_jit_disabled())"
    )
    env = {name: value for name, value in os.environ.items() if name != "TORCH_DISABLE_NATIVE_JIT"}
    assert subprocess.check_output([sys.executable, "-c", program], text=True, env=env) == "True\n"


def out_of_memory(*_: Any) -> torch.nn.Module:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("name", [BLOOM, LLAMA])
async def test_a_prompt_that_does_not_fit_at_once_is_computed_in_chunks_and_says_the_same(
    models: Models, name: str, is_batched: bool
) -> None:
    source = models.source(name)
    compute = await served(source, 0, N_LAYERS, is_batched=is_batched)
    prompts = [5, 9, 200, 11, 7, 8, 1, 4, 3], [8, 250, 3, 77, 9, 0, 6, 2, 30]
    compute._prefill_bytes = 3.5 * step_bytes(4, 64, 256 if name == BLOOM else 96, 9, 4)
    sizes: list[int] = []
    compute._blocks[0].register_forward_pre_hook(lambda _, given: sizes.append(given[0].shape[1]))
    walks = [Walk(hub_of(source), [(compute, 0, N_LAYERS)], prompt, 8) for prompt in prompts]
    said = await asyncio.gather(*(walk.go(8) for walk in walks))
    assert said == [generated(models.whole(name, "float32"), prompt, 8) for prompt in prompts]
    chunks = [size for size in sizes if size > len(walks)]  # tokens of both walks may be computed together
    assert chunks == [3] * 6
    compute.close()


def test_a_prompt_of_blooms_longest_takes_no_more_than_is_set_aside_for_it() -> None:
    """112 heads, 2048 tokens: in one piece, eager attention takes more than twice what PETALS reserves."""
    per_token = step_bytes(112, 14336, 4 * 14336, 2048, 2)
    assert 2048 * per_token > 2 * states_bytes(14336)
    assert 256 * per_token < prefill_bytes(14336, 1) < states_bytes(14336)


@pytest.mark.parametrize("uuid", ["GPU-5e1f", "MIG-07ab"])
def test_a_process_that_opens_a_uuid_sees_that_device_alone_before_cuda_begins(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, uuid: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    seen: list[tuple[str | None, Any]] = []

    def first_use(*_: Any, device: torch.device) -> None:
        seen.append((os.environ.get("CUDA_VISIBLE_DEVICES"), device))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch, "empty", first_use)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cuda.matmul.allow_tf32 = True
    assert open_device(uuid, "float32") == (torch.device("cuda", 0), torch.float32)
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "cuDNN would plan anew for every step of a session"
    assert not torch.backends.cuda.matmul.allow_tf32, "float32 must not depend on the environment"
    assert open_device(uuid, "float32") == (torch.device("cuda", 0), torch.float32)
    assert seen == [(uuid, torch.device("cuda", 0))] * 2
    with pytest.raises(
        ComputeError, match='"GPU-ffff" cannot be used: this process has begun CUDA with others'
    ):
        open_device("GPU-ffff", "float32")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == uuid


def test_a_uuid_that_cannot_be_opened_is_said_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def refuse(*_: Any, device: torch.device) -> None:
        raise RuntimeError("CUDA error: invalid device ordinal")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(
        ComputeError, match='the device "MIG-07ab" cannot be used: CUDA error: invalid device'
    ):
        open_device("MIG-07ab", "float32")
