"""Blocks on several servers compute what transformers computes with the whole model."""

# ruff: noqa: E402 - what needs torch is imported once it is known to be there
from __future__ import annotations

import contextlib

import pytest

from nodes.blocks.spec import Sampling
from nodes.request import Generation
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

need_blocks()

import torch

PROMPT = (5, 9, 200, 11, 7, 8)
SAMPLED = Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=7)
SPLIT = ((0, 3), (3, 4), (4, 6))


async def walk(models: Models, name: str, dtype: str, sampling: Sampling | None, n_tokens: int) -> list[int]:
    source = models.source(name)
    async with contextlib.AsyncExitStack() as stack:
        hub = stack.enter_context(contextlib.closing(hub_of(source, dtype=dtype)))
        chain = []
        for first, last in SPLIT:
            compute = await served(source, first, last, dtype=dtype)
            stack.enter_context(contextlib.closing(compute))
            chain.append((compute, first, last))
        return await Walk(hub, chain, PROMPT, n_tokens, Generation(PROMPT, sampling)).go(n_tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
async def test_three_servers_say_the_tokens_of_the_whole_model(models: Models, name: str, dtype: str) -> None:
    tokens = await walk(models, name, dtype, None, 24)
    assert tokens == generated(models.whole(name, dtype), PROMPT, 24)
    assert len(set(tokens)) > 1, "a model that repeats itself proves little"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [BLOOM, LLAMA])
@pytest.mark.parametrize(
    "sampling",
    [SAMPLED, Sampling(temperature=1.5, seed=3), Sampling(top_k=5, seed=4), Sampling(top_p=0.5, seed=5)],
    ids=["all", "temperature", "top k", "top p"],
)
async def test_sampled_tokens_are_those_of_transformers_with_the_same_seed(
    models: Models, name: str, dtype: str, sampling: Sampling
) -> None:
    tokens = await walk(models, name, dtype, sampling, 16)
    assert tokens == generated(models.whole(name, dtype), PROMPT, 16, sampling)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
async def test_hidden_states_between_servers_are_those_inside_the_whole_model(
    models: Models, name: str, dtype: str
) -> None:
    source, whole = models.source(name), models.whole(name, dtype)
    hub = hub_of(source, dtype=dtype)
    with torch.inference_mode():
        inside = whole(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    states = hub.embed(list(PROMPT))
    for number in range(N_LAYERS):
        got = torch.frombuffer(bytearray(states), dtype=whole.dtype).reshape(len(PROMPT), -1)
        torch.testing.assert_close(got, inside[number][0], rtol=0.0, atol=TOLERANCES[dtype])
        compute = await served(source, number, number + 1, dtype=dtype)
        session = compute.new_session("c", number, number + 1, len(PROMPT))
        states = (await compute.step(session, 0, len(PROMPT), states, 0.0)).payload
        compute.close()
    hub.close()
