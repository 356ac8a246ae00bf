"""Real blocks with drafted tokens: the tokens are transformers' own, however many agree and whatever computes them."""

# ruff: noqa: E402 - what needs torch is imported once it is known to be there
from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from nodes.blocks.spec import Sampling
from nodes.request import Generation, Request
from policies.decoding import Decoding, Seen
from tests.support.blocks import BLOOM, CONFIGS, LLAMA, Models, generated, hub_of, need_blocks, served

need_blocks()

from safetensors.torch import load_file, save_file

from nodes.blocks.tiny import make_tiny
from nodes.compute import ComputeError

PROMPT = (5, 9, 200, 11, 7, 5, 9, 200, 11)
SPLIT = ((0, 3), (3, 4), (4, 6))
N = 24


async def tokens_of(
    models: Models,
    name: str,
    decoding: Decoding | None,
    draft: Path | None = None,
    sampling: Sampling | None = None,
    **spec: Any,
) -> tuple[list[int], int, int]:
    """Returns the tokens of a walk with drafts, and how many were drafted and accepted."""
    source = models.source(name)
    async with contextlib.AsyncExitStack() as stack:
        folder = None if draft is None else str(draft)
        hub = stack.enter_context(contextlib.closing(hub_of(source, decoding=decoding, draft_folder=folder)))
        chain = []
        for first, last in SPLIT:
            compute = await served(source, first, last, **spec)
            stack.enter_context(contextlib.closing(compute))
            chain.append((compute, compute.new_session("c", first, last, len(PROMPT) + N)))
        sequence = hub.sequence(Request(0, 0.0, len(PROMPT), N, Generation(PROMPT, sampling)))
        tokens: list[int] = []
        position = n_drafted = n_accepted = 0
        while len(tokens) < N:
            if position and decoding is not None:
                most = decoding.n_drafted(N - len(tokens), (), Seen())
                n_drafted += await sequence.draft(most)
            states = await sequence.embed()
            n_tokens = len(states) // hub.token_bytes
            for compute, session in chain:
                states = (await compute.step(session, position, n_tokens, states, 0.0)).payload
            new = await sequence.take(states)
            position += len(new) if position else n_tokens
            tokens += new
            n_accepted += sequence.n_accepted
    return tokens, n_drafted, n_accepted


async def tokens_with_rounds_ahead(
    models: Models, name: str, drafter: str, draft: Path | None
) -> tuple[list[int], int, int]:
    """Returns the tokens of a walk in which a round is sent behind every other, and how many of those were right and wrong."""
    source, decoding = models.source(name), Decoding(drafter, 3, 0.5, in_flight=2)
    async with contextlib.AsyncExitStack() as stack:
        folder = None if draft is None else str(draft)
        hub = stack.enter_context(contextlib.closing(hub_of(source, decoding=decoding, draft_folder=folder)))
        compute = stack.enter_context(contextlib.closing(await served(source, 0, 6)))
        session = compute.new_session("c", 0, 6, len(PROMPT) + N)
        sequence = hub.sequence(Request(0, 0.0, len(PROMPT), N, Generation(PROMPT)))

        async def sent() -> tuple[bytes, int]:
            states = await sequence.embed()
            n_tokens = len(states) // hub.token_bytes
            return (await compute.step(session, position, n_tokens, states, 0.0)).payload, n_tokens

        position, n_right, n_wrong = 0, 0, 0
        (answer, n_tokens), ahead = await sent(), None
        tokens: list[int] = []
        while True:
            start, position = position, position + n_tokens
            n_left = N - len(tokens) - n_tokens
            if tokens and n_left > 0 and await sequence.draft_ahead(min(3, n_left - 1)) is not None:
                ahead = await sent()
            new = await sequence.take(answer)
            tokens += new
            if len(tokens) == N:
                return tokens, n_right, n_wrong
            if ahead is not None and len(new) == n_tokens and sequence.goes_on():
                (answer, n_tokens), ahead, n_right = ahead, None, n_right + 1
                continue
            n_wrong += ahead is not None
            sequence.forget(0)
            position, ahead = (start + len(new) if start else len(PROMPT)), None
            await sequence.draft(min(3, N - len(tokens) - 1))
            answer, n_tokens = await sent()


@pytest.mark.parametrize("drafter", ["ngram", "model", "another model"])
@pytest.mark.parametrize("name", [BLOOM, LLAMA])
async def test_rounds_that_are_drafted_ahead_change_nothing(
    models: Models, tmp_path: Path, name: str, drafter: str
) -> None:
    draft = None if drafter == "ngram" else models.folder(name)
    if drafter == "another model":
        drafter, draft = "model", tmp_path / "draft"
        make_tiny(draft, CONFIGS[name], seed=5, n_shards=1)
    tokens, n_right, n_wrong = await tokens_with_rounds_ahead(models, name, drafter, draft)
    assert tokens == generated(models.whole(name, "float32"), PROMPT, N)
    assert n_right if draft == models.folder(name) else n_wrong


@pytest.mark.parametrize(
    "how", [{}, {"is_batched": True}, {"has_graphs": True}], ids=["alone", "batched", "graphs"]
)
@pytest.mark.parametrize("drafter", ["ngram", "model", "petals", "another model"])
@pytest.mark.parametrize("name", [BLOOM, LLAMA])
async def test_drafted_tokens_change_nothing(
    models: Models, tmp_path: Path, name: str, drafter: str, how: dict[str, bool]
) -> None:
    expected = generated(models.whole(name, "float32"), PROMPT, N)
    draft = None if drafter == "ngram" else models.folder(name)
    if drafter == "another model":
        drafter, draft = "model", tmp_path / "draft"
        make_tiny(draft, CONFIGS[name], seed=5, n_shards=1)
    decoding = Decoding(drafter, 4, 0.5)
    tokens, n_drafted, n_accepted = await tokens_of(models, name, decoding, draft, **how)
    assert tokens == expected
    assert n_drafted
    if draft == models.folder(name):
        assert n_accepted == n_drafted, "the model agrees with itself"
    else:
        assert n_accepted < n_drafted, "servers must go back"


@pytest.mark.parametrize("name", [BLOOM, LLAMA])
@pytest.mark.parametrize("drafter", ["ngram", "model"])
async def test_sampled_tokens_are_those_that_are_sampled_without_drafts(
    models: Models, name: str, drafter: str
) -> None:
    """Rejection sampling where a draft is certain: its tokens have the model's distribution, since they are the same."""
    sampling = Sampling(temperature=0.3, top_k=20, seed=7)
    draft = models.folder(name) if drafter == "model" else None
    drafts = await tokens_of(models, name, Decoding(drafter, 3, 0.5), draft, sampling)
    assert drafts[0] == generated(models.whole(name, "float32"), PROMPT, N, sampling)
    assert drafts[1] > 0


def test_a_draft_model_with_another_vocabulary_is_refused(models: Models, tmp_path: Path) -> None:
    make_tiny(tmp_path / "draft", CONFIGS[LLAMA] | {"vocab_size": 200}, seed=5, n_shards=1)
    with pytest.raises(ComputeError, match="has a vocabulary of 200 tokens, the model of 300"):
        hub_of(
            models.source(LLAMA),
            decoding=Decoding("model", 4, 0.5),
            draft_folder=str(tmp_path / "draft"),
        )


def test_a_draft_model_that_is_not_whole_is_refused_by_its_tensor(models: Models, tmp_path: Path) -> None:
    make_tiny(tmp_path, CONFIGS[LLAMA], seed=5, n_shards=1)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    whole = load_file(path)

    def refusal() -> str:
        with pytest.raises(ComputeError) as caught:
            hub_of(
                models.source(LLAMA), decoding=Decoding("model", 4, 0.5), draft_folder=str(tmp_path)
            ).close()
        return str(caught.value)

    save_file({key: tensor for key, tensor in whole.items() if key != name}, path, {"format": "pt"})
    assert refusal() == f"the draft model {tmp_path} has no tensor {name}"
    save_file(whole | {name: whole[name][:8].clone()}, path, {"format": "pt"})
    assert f"{name} in the draft model {tmp_path} is 8 by 64, but " in refusal()
    path.write_bytes(path.read_bytes()[:2000])
    assert refusal().startswith(f"the draft model {tmp_path} cannot be loaded: ")
