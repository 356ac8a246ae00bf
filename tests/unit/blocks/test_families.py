"""Every supported family of transformers: a chain's tokens are those of ``generate`` on one machine, one by one.

Checkpoints are as transformers saves them, small, with random weights, and with windows that are shorter than a text.
"""

# ruff: noqa: E402 - what needs torch is imported once it is known to be there
from __future__ import annotations

import asyncio
import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from nodes.blocks.spec import WeightSource
from testbed.experiments.families import sizes_of
from tests.support.blocks import Walk, generated, hub_of, need_blocks, served, source_of

need_blocks()

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

from nodes.blocks import quantised
from nodes.blocks.family import MODEL_TYPES, cache_layout, family_of, kinds_of, run_with, window_of
from nodes.blocks.loading import empty_block, planned_bytes
from nodes.blocks.whole import WholeModel
from nodes.compute import ComputeError

N_BLOCKS, N_TOKENS = 4, 12
PROMPTS = ([5, 250, 13, 99, 7, 31, 8], [200, 3, 77], [9, 9, 150, 22], [41, 260])
"""So many that steps of several sessions wait, and are computed together."""
_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": N_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "mistral, sliding": {"model_type": "mistral", "sliding_window": 5},
    "mistral, full": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, sliding from block 2": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 5,
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 2.0,
        "attn_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 5,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        },
    },
    "phi": {"model_type": "phi", "qk_layernorm": True},
    "phi3, sliding": {"model_type": "phi3", "sliding_window": 5},
    "mixtral": {"model_type": "mixtral", "sliding_window": 6, **_EXPERTS},
    "qwen3_moe, first block dense": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "sliding_window": 5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 16,
        },
        **_EXPERTS,
    },
}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The checkpoint's folder, and the model that transformers loads from it."""
    settings = {**_COMMON, **CONFIGS[request.param]}
    config = CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in made.named_parameters():
        # Larger than at the start of a training, so that texts vary, and biases that matter.
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.data = noise * (0.05 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5)
        else:
            parameter.data += 0.2 * noise
    folder = tmp_path_factory.mktemp("family")
    made.save_pretrained(folder)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    whole.generation_config = GenerationConfig()
    return folder, whole


async def texts(
    source: WeightSource, prompts: Any, ranges: Any = ((0, 1), (1, 3), (3, N_BLOCKS)), **spec: Any
) -> list[list[int]]:
    """What chains of servers say after ``prompts``, all at the same time."""
    hub = hub_of(source)
    servers = [(await served(source, *held, **spec), *held) for held in ranges]
    walks = [Walk(hub, servers, list(prompt), N_TOKENS) for prompt in prompts]
    said = await asyncio.gather(*(walk.go(N_TOKENS) for walk in walks))
    for walk in walks:
        walk.close()
    for server, _, _ in servers:
        server.close()
    hub.close()
    return [list(text) for text in said]


@pytest.mark.parametrize(
    "spec",
    [{}, {"is_batched": True, "chunk_tokens": 4}, {"has_graphs": True}],
    ids=["one by one", "batched", "as graphs"],
)
async def test_a_chain_has_the_whole_models_tokens(spec: dict[str, Any], model: tuple[Path, Any]) -> None:
    folder, whole = model
    expected = [generated(whole, prompt, N_TOKENS) for prompt in PROMPTS]
    assert len({token for text in expected for token in text}) > N_TOKENS / 2, (
        "a text that repeats itself shows little"
    )
    assert await texts(source_of(folder), PROMPTS, **spec) == expected


async def test_random_weights_are_served_as_the_whole_model_has_them(model: tuple[Path, Any]) -> None:
    folder, _ = model
    config = json.loads((folder / "config.json").read_text())
    from nodes.blocks.spec import BlocksSpec

    source = WeightSource(config, None, 5)
    whole = WholeModel(BlocksSpec(source))
    assert await texts(source, PROMPTS[:1]) == [whole.tokens(PROMPTS[0], N_TOKENS)]


def test_all_supported_families_are_tested() -> None:
    tested = {config["model_type"] for config in CONFIGS.values()}
    assert tested | {"bloom", "llama"} == set(MODEL_TYPES)  # tests/support/blocks.py has those two


@pytest.mark.parametrize("model_type", ["mamba", "t5", "jamba", "falcon_mamba", "whisper", "unheard-of"])
def test_other_models_are_refused_by_name(model_type: str) -> None:
    with pytest.raises(
        ComputeError, match=f"models of type '{model_type}' are not supported; supported types: bloom, "
    ):
        family_of({"model_type": model_type})


def test_blocks_whose_state_is_no_cache_are_refused_by_their_kind() -> None:
    kinds = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    with pytest.raises(ComputeError, match="linear_attention"):
        family_of({**_COMMON, "model_type": "qwen3", "layer_types": kinds})


class _Before(torch.nn.Module):
    """As models of transformers until 5.23."""

    def forward(self, tokens: Any, past_key_values: Any = None, **others: Any) -> Any:
        return tokens, past_key_values, others


class _Since(torch.nn.Module):
    """As models of transformers from 5.24 on, where the other name is deprecated."""

    def forward(self, tokens: Any, cache: Any = None, **others: Any) -> Any:
        return tokens, cache, others


@pytest.mark.parametrize("model", [_Before(), _Since()])
def test_a_cache_has_the_name_that_the_installed_transformers_has(model: torch.nn.Module) -> None:
    assert run_with("kept", model, tokens=[1]) == ([1], "kept", {"use_cache": True})


def test_kinds_of_blocks_are_those_of_the_configuration() -> None:
    _, config = family_of({**_COMMON, **CONFIGS["gemma3_text"]})
    assert list(kinds_of(config)) == CONFIGS["gemma3_text"]["layer_types"]


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        (name, weights)
        for name, config in CONFIGS.items()
        for weights in (("plain",) if config["model_type"] == "gpt_oss" else ("plain", "int8", "nf4"))
    ],
)
def test_a_scenario_counts_the_bytes_of_every_block_as_servers_do(name: str, weights: str) -> None:
    config = {**_COMMON, **CONFIGS[name]}
    family, parsed = family_of(config)
    blocks = [empty_block(family, family.block_config(parsed), number) for number in range(N_BLOCKS)]
    planned = [planned_bytes(block, torch.float32, weights) for block in blocks]
    assert planned == list(sizes_of(config).blocks_bytes(weights, 4))
    assert sizes_of(config).cache_values == 2 * math.prod(cache_layout(parsed))


@pytest.mark.parametrize("is_stated", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_scenario_sees_the_windows_that_servers_have(name: str, is_stated: bool) -> None:
    config = {**_COMMON, **CONFIGS[name]}
    if not is_stated:
        config.pop("layer_types", None)
    _, parsed = family_of(config)
    found = [block.window for block in sizes_of(config).blocks]
    assert found == [window_of(parsed, kind) for kind in kinds_of(parsed)]


MIXED = ("mixtral", "qwen3_moe, first block dense")


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("model", MIXED, indirect=True)
async def test_a_quantised_mixture_has_the_tokens_of_the_model_with_rounded_matrices(
    kind: str, model: tuple[Path, Any]
) -> None:
    if kind == "nf4":
        need_blocks("bitsandbytes", "quantised")
    folder, whole = model
    rounded = copy.deepcopy(whole)
    layer = quantised.LAYERS[kind]
    for name, module in rounded.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = layer(module.weight.data).matrix(torch.float32)
        elif name.endswith("experts"):
            for tensor in (module.gate_up_proj, module.down_proj):
                halves = 2 if tensor is module.gate_up_proj else 1
                for number, matrix in enumerate(tensor.data):
                    parts = [layer(part).matrix(torch.float32) for part in matrix.chunk(halves)]
                    tensor.data[number] = torch.cat(parts)
    expected = [generated(rounded, prompt, N_TOKENS) for prompt in PROMPTS]
    assert expected != [generated(whole, prompt, N_TOKENS) for prompt in PROMPTS], "rounding shows"
    spec: dict[str, Any] = {} if kind == "int8" else {"is_batched": True, "chunk_tokens": 4}
    assert await texts(source_of(folder), PROMPTS, weights=kind, **spec) == expected


async def test_what_of_a_mixture_cannot_be_quantised_is_refused() -> None:
    source = WeightSource({**_COMMON, **CONFIGS["gpt_oss"]})
    with pytest.raises(ComputeError, match="experts of a gpt_oss model are not quantised"):
        await served(source, 0, 1, weights="int8")
    source = WeightSource({**_COMMON, **CONFIGS["mixtral"]})
    with pytest.raises(ComputeError, match="quantised experts, of a mixtral model, cannot be recorded"):
        await served(source, 0, 1, weights="int8", has_graphs=True)


@pytest.mark.parametrize("weights", ["plain", "int8", "nf4"])
async def test_a_mixture_accounts_for_every_block(weights: str) -> None:
    if weights == "nf4":
        need_blocks("bitsandbytes", "quantised")
    source = WeightSource({**_COMMON, **CONFIGS["qwen3_moe, first block dense"]})
    server = await served(source, 0, N_BLOCKS, weights=weights)
    held_bytes = server.memory()["blocks_bytes"]
    assert held_bytes == server._account.blocks_bytes > N_BLOCKS * server.block_bytes
    server.close()
    assert sum(sizes_of(source.config).blocks_bytes(weights, 4)) == held_bytes
    with pytest.raises(ComputeError, match="3 would fit"):
        await served(source, 0, N_BLOCKS, weights=weights, memory_bytes=held_bytes - 1)
