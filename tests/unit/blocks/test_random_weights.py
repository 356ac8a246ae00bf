"""Models of a size without a checkpoint."""

# ruff: noqa: E402 - what needs torch is imported once it is known to be there
from __future__ import annotations

import pytest

from nodes.blocks.sizes import SIZES, config_of_size
from nodes.blocks.spec import BlocksSpec, WeightSource
from nodes.compute import ComputeError
from tests.support.blocks import BLOOM, CONFIGS, DTYPES, LLAMA, N_LAYERS, Walk, hub_of, need_blocks, served

need_blocks()

import torch

from nodes.blocks.family import cache_layout, family_of
from nodes.blocks.loading import empty_block
from nodes.blocks.whole import WholeModel

PROMPT = (5, 9, 200, 11, 7, 8)
STATES = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))


async def tokens(source: WeightSource, split: list[tuple[int, int]], dtype: str = "float32") -> list[int]:
    chain = [(await served(source, *cut, dtype=dtype), *cut) for cut in split]
    return await Walk(hub_of(source, dtype=dtype), chain, PROMPT, 8).go(8)


async def hidden(source: WeightSource) -> bytes:
    compute = await served(source, 0, N_LAYERS)
    states = STATES.numpy().tobytes()
    answer: bytes = (await compute.step(compute.new_session("c", 0, N_LAYERS, 3), 0, 3, states, 0.0)).payload
    return answer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [BLOOM, LLAMA])
async def test_all_splits_of_a_random_model_say_the_same(name: str, dtype: str) -> None:
    source = WeightSource(CONFIGS[name], seed=3)
    whole = await tokens(source, [(0, N_LAYERS)], dtype)
    assert await tokens(source, [(0, 2), (2, 3), (3, N_LAYERS)], dtype) == whole


@pytest.mark.parametrize("name", [BLOOM, LLAMA])
async def test_random_weights_differ_between_seeds(name: str) -> None:
    states = [await hidden(WeightSource(CONFIGS[name], seed=seed)) for seed in (1, 1, 2)]
    assert states[0] == states[1] != states[2]


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("name", [BLOOM, LLAMA])
@pytest.mark.parametrize("damage", ["none", "noise everywhere", "one position of one block"])
async def test_tokens_show_a_wrong_cache(name: str, is_tied: bool, damage: str) -> None:
    source = WeightSource({**CONFIGS[name], "tie_word_embeddings": is_tied})
    compute = await served(source, 0, N_LAYERS)
    whole = WholeModel(BlocksSpec(source))
    chance = torch.Generator().manual_seed(1)
    altered = []
    for prompt in (PROMPT, (17, 4, 99, 250, 8, 31)):
        walk = Walk(hub_of(source), [(compute, 0, N_LAYERS)], prompt, 16)
        ((_, session),) = walk.hops
        for step in range(16):
            await walk.go(1)
            if damage == "noise everywhere":
                session.cache.store.normal_(0, 1, generator=chance)
            elif damage == "one position of one block" and not step:
                session.cache.store[2, :, :, :, 3] = 0
        found = whole.judge(prompt, walk.tokens)
        assert not found.tied
        altered.append(len(found.altered))
        walk.close()
    compute.close()
    assert sum(altered) == 0 if damage == "none" else max(altered) > 0
    assert damage != "noise everywhere" or min(altered) > 8, "of 16 tokens each"


async def test_no_two_blocks_are_the_same() -> None:
    source = WeightSource(CONFIGS[BLOOM])
    states = STATES.numpy().tobytes()
    answers = set()
    for number in range(N_LAYERS):
        compute = await served(source, number, number + 1)
        session = compute.new_session("c", number, number + 1, 3)
        answers.add((await compute.step(session, 0, 3, states, 0.0)).payload)
    assert len(answers) == N_LAYERS


@pytest.mark.parametrize(
    ("name", "n_blocks", "n_parameters", "n_cache_values"),
    [
        ("bloom-560m", 24, 12_596_224, 2 * 1024),
        ("bloom-176b", 70, 2_466_437_120, 2 * 14336),
        ("llama-2-7b", 32, 202_383_360, 2 * 4096),
        ("llama-2-70b", 80, 855_654_400, 2 * 1024),
    ],
)
def test_real_sizes_have_the_blocks_of_real_models(
    name: str, n_blocks: int, n_parameters: int, n_cache_values: int
) -> None:
    family, config = family_of(config_of_size(name))
    block = empty_block(family, family.shell(config).config, 0)
    assert config.num_hidden_layers == n_blocks
    assert sum(parameter.numel() for parameter in block.parameters()) == n_parameters
    n_heads, head_size = cache_layout(config)
    assert 2 * n_heads * head_size == n_cache_values


@pytest.mark.parametrize("name", SIZES)
def test_every_size_makes_a_model(name: str) -> None:
    _, config = family_of(SIZES[name])
    assert config.hidden_size % config.num_attention_heads == 0


def test_a_size_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(ComputeError, match='unknown size "bloom"; known sizes: bloom-560m, '):
        config_of_size("bloom")
