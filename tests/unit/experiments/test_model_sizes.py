"""Sizes of real models as scenarios see them: from a family's numbers, or a checkpoint's configuration."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.experiments.families import SIZED, ConfigError, make_config, sizes_of


def test_a_block_of_bloom_176b_has_as_many_values_as_the_paper_says() -> None:
    sizes = sizes_of({"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "n_head": 112, "vocab_size": 9})
    assert sizes.block_bytes("plain", 1) == 2_466_437_120
    assert (sizes.n_blocks, sizes.hidden_size, sizes.cache_values) == (70, 14336, 2 * 14336)


def test_grouped_heads_take_less_cache_than_as_many_as_there_are_queries() -> None:
    whole, grouped = (sizes_of(make_config("llama", 4, 64, 8, 300, kv)) for kv in (None, 2))
    assert whole.cache_values == 2 * 64
    assert grouped.cache_values == 2 * 2 * 8
    assert grouped.block_bytes("plain", 4) < whole.block_bytes("plain", 4)


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("gemma2", [64, None, 64, None, 64, None, 64]),
        ("gpt_oss", [64, None, 64, None, 64, None, 64]),
        ("gemma3_text", 5 * [64] + [None, 64]),
        ("mistral", 7 * [64]),
    ],
)
def test_a_configuration_that_does_not_say_which_blocks_have_a_window_has_those_of_its_family(
    family: str, windows: list[int | None]
) -> None:
    config = make_config(family, 7, 64, 4, 300, more={"sliding_window": 64})
    assert [block.window for block in sizes_of(config, SIZED).blocks] == windows
    config["layer_types"] = 7 * ["full_attention"]
    assert {block.window for block in sizes_of(config, SIZED).blocks} == {None}


LLAMA = make_config("llama", 4, 64, 8, 300)
MIXTURE = make_config("qwen3_moe", 4, 64, 8, 300, more={"num_experts": 8, "num_experts_per_tok": 2})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({}, "None"),
        ({"model_type": "bloom", "n_layer": 2, "n_head": 2, "vocab_size": 9}, "hidden_size"),
        ({"model_type": "bloom", "n_layer": -2}, "n_layer = -2"),
        ({"model_type": "llama", "num_hidden_layers": "2"}, "num_hidden_layers = '2'"),
        (
            LLAMA | {"hidden_size": 10**30},
            r"hidden_size = 10+, which must be a whole number from 1 to 10,000,000",
        ),
        (LLAMA | {"num_hidden_layers": 10_001}, "num_hidden_layers = 10001, .* from 1 to 10,000"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads = 3, which must divide its 8 heads"),
        (
            LLAMA | {"layer_types": ["full_attention"]},
            "layer_types = .* must list the kind of each of its 4 blocks",
        ),
        (MIXTURE | {"num_experts_per_tok": 9}, "num_experts_per_tok = 9, more than its 8 experts"),
    ],
)
def test_a_configuration_that_does_not_say_what_is_needed_is_refused(
    config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        sizes_of(config)
