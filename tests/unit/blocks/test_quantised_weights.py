"""Weights in 8 and in about 4 bits: their size, their error, and that chains agree on them."""

# ruff: noqa: E402 - what needs torch is imported once it is known to be there
from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from nodes.blocks.spec import BlocksSpec, Weights
from nodes.compute import ComputeError
from tests.support.blocks import (
    BLOOM,
    CONFIGS,
    DTYPES,
    LLAMA,
    N_LAYERS,
    Models,
    Walk,
    generated,
    hub_of,
    need_blocks,
    served,
)

need_blocks("bitsandbytes", "quantised")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nodes.blocks import compute as compute_module
from nodes.blocks import quantised
from nodes.blocks.family import family_of
from nodes.blocks.loading import empty_block, fill, planned_bytes, real_bytes
from nodes.blocks.quantised import Int8Linear, Nf4Linear
from nodes.blocks.sizes import SIZES

KINDS: tuple[Weights, ...] = ("int8", "nf4")
BITS = {"int8": 8, "nf4": 4.25}
"""Bits per value in the performance model."""
PROMPT = (5, 9, 200, 11, 7, 8)


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(whole: Any, blocks: str, layer: Any) -> Any:
    """Returns the whole model with the matrices of its blocks rounded as ``layer`` holds them."""
    model = copy.deepcopy(whole)
    for module in model.base_model.get_submodule(blocks).modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = layer(module.weight.data).matrix(module.weight.dtype)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "blocks"), [(BLOOM, "h"), (LLAMA, "layers")])
async def test_a_chain_says_the_tokens_of_the_whole_model_with_the_same_rounded_weights(
    models: Models, name: str, blocks: str, dtype: str, kind: Weights
) -> None:
    source = models.source(name)
    hub = hub_of(source, dtype=dtype)
    split = ((0, 1), (1, 4), (4, N_LAYERS))
    chain = [(await served(source, *cut, dtype=dtype, weights=kind), *cut) for cut in split]
    tokens = await Walk(hub, chain, PROMPT, 16).go(16)
    whole = rounded(models.whole(name, dtype), blocks, quantised.LAYERS[kind])
    assert tokens == generated(whole, PROMPT, 16)


@pytest.mark.parametrize(("kind", "ratio"), [("int8", 0.02), ("nf4", 0.4)])
@pytest.mark.parametrize("name", [BLOOM, LLAMA])
async def test_hidden_states_stay_close_to_those_of_plain_weights(
    models: Models, name: str, kind: Weights, ratio: float
) -> None:
    states = matrix(6, 64).numpy().tobytes()
    answers = []
    for weights in ("plain", kind):
        compute = await served(models.source(name), 0, 1, weights=weights)
        payload = (await compute.step(compute.new_session("c", 0, 1, 6), 0, 6, states, 0.0)).payload
        answers.append(torch.frombuffer(bytearray(payload), dtype=torch.float32))
    plain, other = answers
    assert 0 < (other - plain).norm() / plain.norm() < ratio


def test_8_bits_err_by_at_most_half_a_step_of_their_row() -> None:
    weight = matrix(50, 40) * torch.logspace(-3, 3, 50)[:, None]
    error = (Int8Linear(weight).matrix(torch.float32) - weight).abs()
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert (error <= step * 0.5001).all()


def test_a_row_of_zeros_stays_zero() -> None:
    weight = matrix(3, 8)
    weight[1] = 0
    assert not Int8Linear(weight).matrix(torch.float32)[1].any()


def test_the_int8_kernel_gets_its_tokens_row_after_row(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, seen = Int8Linear(matrix(5, 8)), []
    kernel = torch._weight_int8pack_mm

    def watched(tokens: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.stride())
        return kernel(tokens, *rest)

    monkeypatch.setattr(torch, "_weight_int8pack_mm", watched)
    tokens = matrix(8, 2).T
    torch.testing.assert_close(layer(tokens), tokens @ layer.matrix(torch.float32).T)
    assert seen == [(8, 1)]


def largest_bytes(work: Callable[[], object]) -> int:
    """Returns the size of the largest tensor that ``work`` makes."""
    sizes = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            answer = func(*args, **(kwargs or {}))
            inputs = {given.data_ptr() for given in args if isinstance(given, torch.Tensor)}
            if isinstance(answer, torch.Tensor) and answer.data_ptr() not in inputs:  # else a view
                sizes.append(answer.nbytes)
            return answer

    with Watch():
        work()
    return max(sizes)


def test_a_matrix_is_coded_slice_by_slice_and_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(50, 40)
    whole, before = Int8Linear(weight), weight.clone()
    monkeypatch.setattr(quantised, "_SLICE_VALUES", 7 * 40)
    assert largest_bytes(lambda: Int8Linear(weight)) == 50 * 40, "the codes; a slice in float32 takes 1120"
    assert torch.equal(weight, before)
    assert torch.equal(Int8Linear(weight).codes, whole.codes)


@pytest.mark.parametrize("n_tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_matrix_is_made_again_in_its_own_numbers_alone(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, n_tokens: int
) -> None:
    """In slices, and never in float32 on the way to 16 bits. A token or two in float32 need no matrix."""
    monkeypatch.setattr(quantised, "_SLICE_VALUES", 7 * 400)
    layer, x = Int8Linear(matrix(50, 400).to(dtype)), matrix(n_tokens, 400, seed=1).to(dtype)
    found = largest_bytes(lambda: layer(x))
    has_kernel = n_tokens == 1 and dtype == torch.float32
    assert found == (50 * 4 if has_kernel else 7 * 400 * dtype.itemsize)


@pytest.mark.parametrize("n_tokens", [1, 4, 5])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_few_tokens_and_many_are_multiplied_by_the_same_matrix(
    monkeypatch: pytest.MonkeyPatch, n_tokens: int, has_bias: bool
) -> None:
    layer, x = Int8Linear(matrix(50, 40)), matrix(1, n_tokens, 40, seed=1)
    if has_bias:
        layer.bias = torch.nn.Parameter(matrix(50, seed=2))
    expected = torch.nn.functional.linear(x, layer.matrix(torch.float32), layer.bias)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected)
        monkeypatch.setattr(quantised, "_SLICE_VALUES", 7 * 40)
        torch.testing.assert_close(layer(x), expected)
        monkeypatch.setattr(quantised, "FEW_TOKENS", 0)
        torch.testing.assert_close(layer(x), expected)


def test_4_bits_err_by_less_than_the_widest_gap_between_their_values() -> None:
    weight = matrix(64, 128)
    error = (Nf4Linear(weight).matrix(torch.float32) - weight).abs().reshape(-1, 64)
    largest = weight.abs().reshape(-1, 64).amax(dim=1, keepdim=True)
    assert (error <= 0.16 * largest).all()


@pytest.mark.parametrize("kind", ["plain", *KINDS])
@pytest.mark.parametrize("name", [BLOOM, LLAMA])
async def test_blocks_take_the_bytes_that_were_planned(models: Models, name: str, kind: Weights) -> None:
    source = models.source(name)
    compute = await served(source, 1, 4, weights=kind, dtype="bfloat16")
    family, config = family_of(source.config)
    block = empty_block(family, family.shell(config).config, 0)
    planned = planned_bytes(block, torch.bfloat16, kind)
    assert compute.memory()["blocks_bytes"] == 3 * planned == 3 * compute.block_bytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bloom-176b", "llama-2-70b"])
def test_a_block_of_a_real_size_takes_what_the_model_reckons(name: str, kind: Weights) -> None:
    """``s_m``: parameters times bytes per value times 1.01; the scales of NF4 are held in 8 bits, not 16."""
    family, config = family_of(SIZES[name])
    block = empty_block(family, family.shell(config).config, 0)
    n_parameters = sum(parameter.numel() for parameter in block.parameters())
    planned = planned_bytes(block, torch.bfloat16, kind)
    assert 0.96 < planned / (n_parameters * BITS[kind] / 8 * 1.01) <= 1


def test_a_quantised_block_holds_no_full_matrix() -> None:
    layer = Nf4Linear(matrix(64, 64))
    assert layer.n_bytes < 0.7 * 64 * 64 + 2000
    assert real_bytes(torch.nn.Sequential(layer)) == layer.n_bytes


def test_weights_that_are_not_known_are_refused_with_those_that_are(models: Models) -> None:
    spec = BlocksSpec(models.source(BLOOM), weights="int3")  # type: ignore[arg-type]
    with pytest.raises(ComputeError, match='unknown weights "int3"; supported kinds: plain, int8, nf4'):
        compute_module.BlocksCompute(spec)


def test_4_bits_without_their_library_say_what_to_install(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(
        ComputeError, match=r"need bitsandbytes, .* pip install '\.\[quantised\]' in the checkout"
    ):
        compute_module.BlocksCompute(BlocksSpec(models.source(BLOOM), weights="nf4"))


def test_a_full_matrix_is_gone_before_the_next_one_is_made() -> None:
    """A server's memory has room for only one full matrix beside what it keeps."""
    family, config = family_of(CONFIGS[BLOOM])
    made: list[weakref.ref[torch.Tensor]] = []

    class Weights:
        def tensors(
            self, part: str, shapes: Mapping[str, torch.Size], *_: Any
        ) -> Iterator[tuple[str, torch.Tensor]]:
            for name, shape in shapes.items():
                assert all(earlier() is None for earlier in made)
                tensor = torch.ones(shape)
                if len(shape) > 1:
                    made.append(weakref.ref(tensor))
                yield name, tensor
                del tensor

        def head(self, *_: Any) -> torch.Tensor:
            raise AssertionError("no block has one")

    block = empty_block(family, family.shell(config).config, 0)
    fill(block, "h.0", Weights(), torch.float32, torch.device("cpu"), "int8")
    assert len(made) == 4
