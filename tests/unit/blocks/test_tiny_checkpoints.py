"""``testbed model make-tiny``: checkpoints that are like real ones in all but size."""

# ruff: noqa: E402 - what needs torch is imported once it is known to be there
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import UserError
from testbed.experiments.families import make_config, sizes_of
from testbed.inspect.model import make_tiny_command, show_command
from tests.support.blocks import Walk, hub_of, need_blocks, served

need_blocks()

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nodes.blocks.family import family_of
from nodes.blocks.loading import empty_block, planned_bytes
from nodes.blocks.spec import BlocksSpec, WeightSource
from nodes.blocks.text import Text
from nodes.blocks.tiny import make_tiny
from nodes.blocks.whole import WholeModel
from nodes.compute import ComputeError

SIZES: dict[str, Any] = {
    "family": "bloom",
    "n_layers": 3,
    "hidden_size": 64,
    "n_heads": 4,
    "vocabulary": 300,
    "seed": 1,
    "n_kv_heads": None,
    "n_shards": 1,
}
CONFIGS = {"bloom": make_config("bloom", 4, 64, 4, 512), "llama": make_config("llama", 4, 64, 4, 512, 2)}
FAMILIES = sorted(CONFIGS)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_writes_the_same_files_and_another_one_other_weights(
    family: str, tmp_path: Path
) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_tiny(tmp_path / name, CONFIGS[family], seed)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    assert a["model.safetensors"] != c["model.safetensors"]
    assert a["tokenizer.json"] == c["tokenizer.json"]


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_hold_the_same_weights_as_one_file(family: str, tmp_path: Path) -> None:
    make_tiny(tmp_path / "whole", CONFIGS[family], 1)
    make_tiny(tmp_path / "shards", CONFIGS[family], 1, n_shards=5)
    assert len(list((tmp_path / "shards").glob("model-*-of-00005.safetensors"))) == 5
    whole, shards = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "shards")
    )
    assert list(whole) == list(shards)
    assert all(torch.equal(whole[name], shards[name]) for name in whole)


def test_more_shards_than_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ComputeError, match="cannot be split into 1000 shards"):
        make_tiny(tmp_path / "m", CONFIGS["bloom"], 1, n_shards=1000)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_generates_varied_tokens(family: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, CONFIGS[family], 7)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    said = set()
    for seed in range(4):
        prompt = torch.randint(0, 512, (1, 8), generator=torch.Generator().manual_seed(seed))
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False
        )
        said.update(output[0, 8:].tolist())
    assert len(said) >= 16


@pytest.mark.parametrize("text", ["Hello, world", "Grüße, 世界 🙂", "  spaces\nand lines\t"])
@pytest.mark.parametrize("n_tokens", [260, 5000])
def test_the_tokenizer_gives_every_text_back(n_tokens: int, text: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, make_config("bloom", 1, 8, 2, n_tokens), 1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == n_tokens
    ours = Text(tmp_path)
    assert max(ours.encode(text)) < n_tokens
    assert ours.decode(ours.encode(text)) == text


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ComputeError, match="holds no tokenizer"):
        Text(tmp_path)


@pytest.mark.parametrize("weights", ["plain", "int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_scenario_counts_the_bytes_of_a_block_as_servers_do(
    family: str, dtype: torch.dtype, weights: str
) -> None:
    parts, config = family_of(CONFIGS[family])
    block = empty_block(parts, parts.shell(config).config, 0)
    counted = sizes_of(CONFIGS[family]).block_bytes(weights, dtype.itemsize)
    assert counted == planned_bytes(block, dtype, weights)


def test_the_command_answers_what_it_has_written(tmp_path: Path) -> None:
    answer, text = make_tiny_command(
        tmp_path / "m", **{**SIZES, "family": "llama", "n_kv_heads": 2, "n_shards": 2}
    )
    assert (answer["family"], answer["n_blocks"], answer["n_kv_heads"]) == ("llama", 3, 2)
    assert "3 blocks" in text and "2 of keys and values" in text
    shown, lines = show_command(str(tmp_path / "m"), "bfloat16", "plain")
    assert shown["block_bytes"] * 2 == answer["block_bytes"]
    assert shown["cache_bytes_per_token"] == 2 * 2 * 16 * 2
    assert "s_c 128 B" in lines


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"family": "gpt2"}, "bloom, llama"),
        ({"n_heads": 5}, "--heads 5 does not divide --hidden 64"),
        ({"family": "llama", "hidden_size": 12, "n_heads": 4}, "even"),
        ({"n_kv_heads": 2}, "--kv-heads is for --family llama"),
        ({"family": "llama", "n_kv_heads": 3}, "--kv-heads 3 does not divide --heads 4"),
        ({"vocabulary": 259}, "--vocab 259 is too small: 260"),
        ({"hidden_size": 1 << 20}, "does not fit in this machine's memory"),
        ({"n_shards": 1000}, "cannot be split"),
    ],
)
def test_sizes_that_make_no_model_are_refused_in_one_sentence(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        make_tiny_command(tmp_path / "m", **{**SIZES, **change})
    assert not (tmp_path / "m").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UserError, match="holds something already"):
        make_tiny_command(tmp_path, **SIZES)
    assert contents(tmp_path) == {"mine": b"mine"}


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_deep_checkpoint_shows_a_wrong_cache_but_no_rounding(family: str, tmp_path: Path) -> None:
    """One token after another rounds otherwise in 16 bits than the whole model's one pass over a prompt."""
    config = make_config(family, 12, 128, 4, 300, 2 if family == "llama" else None)
    make_tiny(tmp_path / "m", config, 4, is_deep=True)
    source = WeightSource(json.loads((tmp_path / "m" / "config.json").read_text()), str(tmp_path / "m"))
    compute = await served(source, 0, 12, dtype="bfloat16", has_graphs=True)
    whole = WholeModel(BlocksSpec(source, dtype="bfloat16"))
    n_altered = []
    for is_wrong in (False, True):
        walk = Walk(hub_of(source, dtype="bfloat16"), [(compute, 0, 12)], (5, 9, 200, 11, 7, 8), 24)
        ((_, session),) = walk.hops
        for _ in range(24):
            await walk.go(1)
            if is_wrong:
                session.cache.store.normal_(0, 1)
        n_altered.append(len(whole.judge((5, 9, 200, 11, 7, 8), walk.tokens).altered))
        walk.close()
    compute.close()
    assert n_altered[0] == 0 and n_altered[1] > 12
