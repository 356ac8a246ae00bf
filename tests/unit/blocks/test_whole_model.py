"""The whole model on one machine, with which a run's tokens are compared."""

# ruff: noqa: E402 - what needs torch is imported once it is known to be there
from __future__ import annotations

from typing import Any

import pytest

from nodes.blocks.spec import BlocksSpec, Sampling, WeightSource
from nodes.request import Request
from tests.support.blocks import (
    BLOOM,
    CONFIGS,
    LLAMA,
    N_LAYERS,
    Models,
    Walk,
    generated,
    hub_of,
    need_blocks,
    served,
)

need_blocks()

from nodes.blocks.hub import prompt_of
from nodes.blocks.whole import WholeModel, compare

PROMPT = (5, 9, 200, 11, 3, 8)  # 3 is the padding token, which must not be taken for padding
SAMPLING = Sampling(temperature=0.8, top_k=40, top_p=0.9, seed=3)


@pytest.mark.parametrize("sampling", [None, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_checkpoint_says_what_transformers_says(
    name: str, sampling: Sampling | None, models: Models
) -> None:
    whole = WholeModel(BlocksSpec(models.source(name)))
    expected = generated(models.whole(name, "float32"), PROMPT, 10, sampling)
    assert whole.tokens(PROMPT, 10, sampling) == expected


@pytest.mark.parametrize(
    ("weights", "name"), [("plain", BLOOM), ("plain", LLAMA), ("int8", BLOOM), ("int8", LLAMA)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_random_and_quantised_weights_say_what_a_chain_of_servers_says(
    name: str, weights: str, dtype: str
) -> None:
    source = WeightSource(CONFIGS[name], seed=5)
    whole = WholeModel(BlocksSpec(source, dtype=dtype, weights=weights))  # type: ignore[arg-type]
    cuts = [(0, 2), (2, N_LAYERS)]
    chain = [(await served(source, *cut, dtype=dtype, weights=weights), *cut) for cut in cuts]
    said = await Walk(hub_of(source, dtype=dtype), chain, PROMPT, 8).go(8)
    assert whole.tokens(PROMPT, 8) == said


def job(models: Models, requests: list[dict[str, Any]]) -> dict[str, Any]:
    source = models.source(BLOOM)
    spec = {"source": {"config": source.config, "folder": source.folder, "seed": 0}, "dtype": "float32"}
    return {"spec": spec, "requests": requests}


def test_every_altered_token_is_counted_and_the_first_of_a_request_is_named(models: Models) -> None:
    whole = models.whole(BLOOM, "float32")
    right = generated(whole, PROMPT, 6)
    wrong = [*right[:2], (right[2] + 1) % 300, right[3], (right[4] + 1) % 300, right[5]]
    entries = [
        {"index": 0, "generation": {"prompt": PROMPT}, "n_input_tokens": 6, "tokens": right},
        {"index": 1, "generation": {"prompt": PROMPT}, "n_input_tokens": 6, "tokens": wrong},
    ]
    assert compare(job(models, entries)) == {
        "n_tokens_checked": 12,
        "n_tokens_altered": 2,
        "altered": [{"request": 1, "token": 2, "is": wrong[2], "should_be": right[2]}],
    }


def test_a_request_without_a_prompt_is_compared_with_the_one_that_its_client_makes_up(models: Models) -> None:
    prompt = prompt_of(Request(4, 0.0, 5, 3), 300)
    tokens = generated(models.whole(BLOOM, "float32"), prompt, 3)
    entry = {"index": 4, "generation": {}, "n_input_tokens": 5, "tokens": tokens}
    assert compare(job(models, [entry]))["n_tokens_altered"] == 0
