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

import torch

from nodes.blocks.hub import prompt_of
from nodes.blocks.whole import Comparison, WholeModel, compare

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
        "n_tokens_tied": 0,
        "altered": [{"request": 1, "token": 2, "is": wrong[2], "should_be": right[2]}],
    }


def test_a_request_without_a_prompt_is_compared_with_the_one_that_its_client_makes_up(models: Models) -> None:
    prompt = prompt_of(Request(4, 0.0, 5, 3), 300)
    tokens = generated(models.whole(BLOOM, "float32"), prompt, 3)
    entry = {"index": 4, "generation": {}, "n_input_tokens": 5, "tokens": tokens}
    assert compare(job(models, [entry]))["n_tokens_altered"] == 0


def test_a_token_whose_logit_is_as_large_is_a_tie_and_the_model_goes_on_from_it(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = WholeModel(BlocksSpec(models.source(BLOOM)))
    right = whole.tokens(PROMPT, 8)
    with torch.inference_mode():
        logits = whole.model(torch.tensor([[*PROMPT, *right[:2]]])).logits[0, -1]
    first, second = logits.topk(2)[1].tolist()
    assert first == right[2]
    other = [*right[:2], second, *whole.tokens([*PROMPT, *right[:2], second], 5)]
    gap = float((logits[first] - logits[second]) / logits.abs().max())
    monkeypatch.setattr(whole, "_tie_ratio", 1.01 * gap)
    choices = [*right[:3], *other[3:]]
    assert whole.judge(PROMPT, other) == Comparison(choices, [], [2])
    wrong = [*other[:5], (other[5] + 1) % 300, *other[6:]]
    assert whole.judge(PROMPT, wrong) == Comparison(choices, [5], [2])
    monkeypatch.setattr(whole, "_tie_ratio", 0.99 * gap)
    found = whole.judge(PROMPT, other)
    assert (found.altered[0], found.tied, found.should_be) == (2, [], right)
    monkeypatch.setattr(whole, "_tie_ratio", 10.0)
    sampled = whole.judge(PROMPT, other, SAMPLING)
    assert sampled.altered and not sampled.tied, "what is sampled has no ties"


def test_a_text_that_ends_before_or_after_the_whole_models_is_no_tie(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = WholeModel(BlocksSpec(models.source(BLOOM)))
    monkeypatch.setattr(whole, "_tie_ratio", 10.0)
    right = whole.tokens(PROMPT, 8)
    end = next(token for token in right if token != right[0])
    n_tokens = right.index(end) + 1
    longer = whole.judge(PROMPT, right, ends=[end])
    assert longer.altered == list(range(n_tokens, 8)) and longer.should_be[n_tokens:] == [-1] * (8 - n_tokens)
    too_early = [*right[:n_tokens], *whole.tokens([*PROMPT, *right[:n_tokens]], 8 - n_tokens)]
    assert n_tokens - 1 in whole.judge(PROMPT, too_early, min_tokens=8, ends=[end]).altered
