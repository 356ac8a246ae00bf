"""The client's part of a model: what it refuses, when it ends."""

# ruff: noqa: E402 - what needs torch is imported once it is known to be there
from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nodes.blocks.spec import BlocksSpec, Sampling
from nodes.request import Generation, Request, SessionError
from tests.support.blocks import (
    BLOOM,
    LLAMA,
    N_LAYERS,
    Models,
    Walk,
    generated,
    hub_of,
    need_blocks,
    served,
    source_of,
)

need_blocks()

from nodes.blocks.hub import prompt_of
from nodes.blocks.whole import WholeModel


@pytest.mark.parametrize("name", [BLOOM, LLAMA])
def test_a_prompt_beyond_the_models_limit_is_refused_in_one_sentence(models: Models, name: str) -> None:
    hub = hub_of(models.source(name))
    hub.sequence(Request(0, 0.0, 60, 4))
    with pytest.raises(SessionError) as caught:
        hub.sequence(Request(0, 0.0, 60, 5))
    assert str(caught.value) == "a prompt of 60 tokens and 5 more exceed the model's limit of 64"


@pytest.mark.parametrize("token", [300, -1])
def test_a_prompt_with_a_token_that_the_model_does_not_have_is_refused(models: Models, token: int) -> None:
    with pytest.raises(SessionError, match=f"the prompt has token {token}, but the model's are 0 to 299"):
        hub_of(models.source(BLOOM)).sequence(Request(0, 0.0, 2, 4, Generation((5, token))))


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(top_k=-1), Sampling(top_p=1.5)])
def test_sampling_that_makes_no_sense_is_refused(models: Models, sampling: Sampling) -> None:
    assert sampling.wrong() is not None
    with pytest.raises(SessionError) as caught:
        hub_of(models.source(BLOOM)).sequence(Request(0, 0.0, 2, 4, Generation((5, 9), sampling)))
    assert "\n" not in str(caught.value)


async def test_a_text_goes_on_past_the_end_token_until_it_is_long_enough(
    models: Models, tmp_path: Path
) -> None:
    prompt = (5, 9, 200, 11, 7, 8)
    end = generated(models.whole(BLOOM, "float32"), prompt, 1)[0]
    folder = Path(shutil.copytree(models.folder(BLOOM), tmp_path / "bloom"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}), encoding="utf-8")
    source = source_of(folder)
    compute = await served(source, 0, N_LAYERS)
    how = Generation(prompt, stops=True, min_tokens=4)
    walk = Walk(hub_of(source), [(compute, 0, N_LAYERS)], prompt, 12, how)
    while not walk.ended and len(walk.tokens) < 12:
        await walk.go(1)
    assert end not in walk.tokens[:4]
    assert walk.tokens == WholeModel(BlocksSpec(source)).tokens(prompt, 12, None, 4, [end])


def test_a_made_up_prompt_is_the_same_for_the_same_request() -> None:
    prompts = [prompt_of(Request(index, 0.0, 8, 1), 300) for index in (1, 1, 2)]
    assert prompts[0] == prompts[1] != prompts[2]
    assert all(0 <= token < 300 for token in prompts[0])


async def test_a_text_ends_where_the_checkpoint_says_that_one_does(models: Models, tmp_path: Path) -> None:
    prompt = (5, 9, 200, 11, 7, 8)
    expected = generated(models.whole(LLAMA, "float32"), prompt, 12)
    end = next(token for i, token in enumerate(expected) if i > 2 and token not in expected[:i])
    folder = Path(shutil.copytree(models.folder(LLAMA), tmp_path / "llama"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}), encoding="utf-8")
    compute = await served(source_of(folder), 0, N_LAYERS)
    how = Generation(prompt, stops=True)
    walk = Walk(hub_of(source_of(folder)), [(compute, 0, N_LAYERS)], prompt, 12, how)
    while not walk.ended:
        await walk.go(1)
    assert walk.tokens == expected[: expected.index(end) + 1]
