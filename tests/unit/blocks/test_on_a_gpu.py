"""What only a GPU can show. ``TESTBED_REQUIRE=gpu python -m pytest -m gpu`` fails where there is none."""

# ruff: noqa: E402 - what needs torch is imported once it is known to be there
from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from nodes.blocks.spec import BlocksSpec, Weights
from nodes.compute import open_session
from tests.support.blocks import (
    BLOOM,
    CONFIGS,
    DTYPES,
    LLAMA,
    N_LAYERS,
    Models,
    Walk,
    hub_of,
    need_blocks,
    served,
)

need_blocks()

import torch

from nodes.blocks import attention, kernels
from nodes.blocks.quantised import Int8Linear, Nf4Linear
from nodes.blocks.whole import WholeModel

if not torch.cuda.is_available():
    if "gpu" in os.environ.get("TESTBED_REQUIRE", "").split(","):
        pytest.fail("gpu must work here: torch finds no CUDA device")
    pytest.skip("gpu: torch finds no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
PROMPT = (5, 9, 200, 11, 7, 8)


@pytest.mark.parametrize("device", [f"cuda:{number}" for number in range(min(2, torch.cuda.device_count()))])
@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [BLOOM, LLAMA])
async def test_a_chain_says_what_transformers_says_on_the_same_device(
    models: Models, name: str, dtype: str, has_graphs: bool, device: str
) -> None:
    """On the second device, where there is one, too: the current device of every thread is the first."""
    source = models.source(name)
    chain = [
        (await served(source, *cut, dtype=dtype, device=device, has_graphs=has_graphs), *cut)
        for cut in ((0, 1), (1, 4), (4, N_LAYERS))
    ]
    walk = Walk(hub_of(source, dtype=dtype, device=device), chain, PROMPT, 24)
    found = WholeModel(BlocksSpec(source, device, dtype)).judge(PROMPT, await walk.go(24))
    assert not found.altered
    assert len(found.tied) <= (0 if dtype == "float32" else 3)
    assert [compute.n_recorded for compute, _, _ in chain] == [int(has_graphs)] * 3
    for compute, _, _ in chain:  # a server that is not closed keeps its memory until the process ends
        compute.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [BLOOM, LLAMA])
async def test_sessions_that_are_computed_together_say_what_transformers_says(
    models: Models, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their single tokens by the kernel, beside prompts of sessions that begin later."""
    source, n_launched = models.source(name), 0
    really = attention.Singles.attend

    def counted(*arguments: Any, **others: Any) -> torch.Tensor:
        nonlocal n_launched
        n_launched += 1
        return really(*arguments, **others)

    monkeypatch.setattr(attention.Singles, "attend", counted)
    assert attention.usable(CUDA, getattr(torch, dtype))
    whole = WholeModel(BlocksSpec(source, "cuda", dtype))
    compute = await served(source, 0, N_LAYERS, device="cuda", dtype=dtype, is_batched=True)
    hub = hub_of(source, device="cuda", dtype=dtype)

    async def text(number: int) -> tuple[list[int], list[int]]:
        prompt = [*PROMPT, 20 + number][number % 5 :]
        walk = Walk(hub, [(compute, 0, N_LAYERS)], prompt, 24 - number)
        tokens = await walk.go(24 - number)
        walk.close()
        return prompt, tokens

    found = [whole.judge(*one) for one in await asyncio.gather(*map(text, range(8)))]
    assert n_launched > N_LAYERS
    assert not any(one.altered for one in found)
    assert sum(len(one.tied) for one in found) <= (0 if dtype == "float32" else 8)
    compute.close()


async def test_a_session_that_ends_leaves_the_recorded_steps_of_others_right(models: Models) -> None:
    """torch frees cuBLAS' workspace of a stream with any graph of that stream."""
    source, whole = models.source(BLOOM), WholeModel(BlocksSpec(models.source(BLOOM), "cuda"))
    compute = await served(source, 0, N_LAYERS, device="cuda", has_graphs=True)
    hub = hub_of(source, device="cuda")
    walks = [Walk(hub, [(compute, 0, N_LAYERS)], PROMPT, 24) for _ in range(3)]
    for walk in walks:
        await walk.go(4)
    for walk in walks:
        tokens = await walk.go(24 - len(walk.tokens))
        torch.cuda.empty_cache()
        assert not whole.judge(PROMPT, tokens).altered
        walk.close()
    assert compute.n_recorded == 3
    compute.close()


@pytest.mark.parametrize("weights", ["plain", "int8"])
async def test_a_sessions_second_step_is_recorded_and_played(models: Models, weights: Weights) -> None:
    compute = await served(models.source(BLOOM), 0, 3, device="cuda", weights=weights, has_graphs=True)
    session = await open_session(compute, "c", 0, 3, 12)
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    await compute.step(session, 0, 4, rows[:4].numpy().tobytes(), 0.0)
    recorded = []
    for i in range(4, 8):
        await compute.step(session, i, 1, rows[i].numpy().tobytes(), 0.0)
        recorded.append(session.decoder._graph is not None)
    assert recorded == [False, True, True, True]
    compute.close()


async def test_sessions_are_recorded_when_all_that_were_before_have_gone(models: Models) -> None:
    """torch gives a pool of graphs up with its last one."""
    compute = await served(models.source(BLOOM), 0, 3, device="cuda", has_graphs=True)
    for _ in range(3):
        session = await open_session(compute, "c", 0, 3, 12)
        for i in range(4):
            await compute.step(session, i, 1, torch.randn(1, 64).numpy().tobytes(), 0.0)
        assert session.decoder._graph is not None
        compute.close_session(session)
    compute.close()


@pytest.mark.parametrize("n_tokens", [1, 3, 16, 17, kernels.MOST_TOKENS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Int8Linear, Nf4Linear])
def test_tritons_products_are_those_of_the_restored_matrix(
    kind: type[Int8Linear | Nf4Linear], dtype: torch.dtype, n_tokens: int
) -> None:
    assert kernels.usable(CUDA)
    chance = torch.Generator().manual_seed(0)
    layer = kind(torch.randn(300, 320, generator=chance).to(CUDA, dtype))
    x = torch.randn(n_tokens, 320, generator=chance).to(CUDA, dtype)
    product = x.double() @ layer.matrix(dtype).double().T
    error = (layer.by_triton(x).double() - product).norm() / product.norm()
    assert error <= 4 * torch.finfo(dtype).eps, "single values near 0 may differ by more"


async def test_what_a_server_held_is_free_again(models: Models) -> None:
    allocated = []
    for _ in range(2):  # what libraries keep for ever, they have after the first time
        compute = await served(models.source(BLOOM), 0, N_LAYERS, device="cuda", has_graphs=True)
        walk = Walk(hub_of(models.source(BLOOM), device="cuda"), [(compute, 0, N_LAYERS)], PROMPT, 8)
        await walk.go(8)
        walk.close()
        await compute.host(0, 0)
        compute.close()
        del walk, compute
        gc.collect()
        torch.cuda.empty_cache()
        allocated.append(torch.cuda.memory_allocated(CUDA))
    assert allocated[1] <= allocated[0] + 1024**2


LIMITED = """
import asyncio, json, sys
from nodes.blocks.compute import BlocksCompute
from nodes.blocks.spec import BlocksSpec, WeightSource
from nodes.compute import ComputeError, open_session

async def main():
    source = WeightSource(json.loads(sys.argv[1]))
    compute = BlocksCompute(BlocksSpec(source, device="cuda", memory_bytes=2e6))
    await compute.host(0, 1)
    n_sessions = 0
    try:
        while True:
            await open_session(compute, "c", 0, 1, 64)
            n_sessions += 1
    except ComputeError as error:
        print(json.dumps([n_sessions, str(error)]))
    compute.close()

asyncio.run(main())
"""


def test_a_server_takes_no_more_of_the_device_than_it_may() -> None:
    """In a process of its own, all of whose memory the limit counts."""
    command = [sys.executable, "-c", LIMITED, json.dumps(CONFIGS[BLOOM])]
    n_sessions, error = json.loads(subprocess.check_output(command, text=True))
    assert "is needed and" in error
    assert 0 < n_sessions * 64 * 2 * 64 * 4 <= 2e6
