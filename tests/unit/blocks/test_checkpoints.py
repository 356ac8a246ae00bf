"""What a server reads of a checkpoint, and its errors for one that is not complete."""

# ruff: noqa: E402 - what needs torch is imported once it is known to be there
from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nodes.blocks.files import INDEX
from nodes.compute import ComputeError
from tests.support.blocks import (
    BLOOM,
    CONFIGS,
    LLAMA,
    N_LAYERS,
    Models,
    hub_of,
    need_blocks,
    served,
    source_of,
)

need_blocks()

import torch
from safetensors.torch import load_file, save_file

from nodes.blocks import checkpoint as checkpoint_module
from nodes.blocks.family import family_of


@pytest.fixture
def folder(models: Models, tmp_path: Path) -> Path:
    """A BLOOM checkpoint of three shards, which tests may break."""
    return Path(shutil.copytree(models.folder(BLOOM), tmp_path / "bloom"))


def files(folder: Path) -> dict[str, str]:
    answer: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    return answer


def of_block(folder: Path, number: int) -> dict[str, str]:
    return {name: file for name, file in files(folder).items() if f".h.{number}." in name}


def rewrite(folder: Path, file: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


async def refusal(folder: Path, first: int = 0, last: int = N_LAYERS) -> str:
    with pytest.raises(ComputeError) as caught:
        await served(source_of(folder), first, last)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def single(folder: Path) -> Path:
    """The same checkpoint in one file."""
    shards = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    for shard in [*shards, folder / INDEX]:
        shard.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Opened:
    """Stands in for ``safe_open`` and records what is opened and read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: list[str] = []
        self.tensors: list[str] = []
        really = checkpoint_module.safe_open
        monkeypatch.setattr(checkpoint_module, "safe_open", lambda path, **how: self._open(really, path, how))

    def _open(self, really: Any, path: Path, how: dict[str, Any]) -> Any:
        self.files.append(path.name)
        file, note = really(path, **how), self.tensors.append

        class File:
            def __enter__(self) -> File:
                file.__enter__()
                return self

            def __exit__(self, *error: Any) -> None:
                file.__exit__(*error)

            def get_slice(self, name: str) -> Any:
                return file.get_slice(name)

            def get_tensor(self, name: str) -> torch.Tensor:
                note(name)
                return file.get_tensor(name)

        return File()


async def test_a_server_reads_its_own_blocks_and_opens_each_of_their_files_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened(monkeypatch)
    (await served(source_of(folder), 2, 4)).close()
    own = of_block(folder, 2) | of_block(folder, 3)
    assert sorted(opened.tensors) == sorted(own)
    assert sorted(opened.files) == sorted(set(own.values()))


async def test_a_server_does_not_mind_what_became_of_other_servers_shards(folder: Path) -> None:
    own = set(of_block(folder, 0).values())
    others = sorted(set(files(folder).values()) - own)
    assert len(others) == 2
    (folder / others[0]).unlink()
    (folder / others[1]).write_bytes(b"nonsense")
    (await served(source_of(folder), 0, 1)).close()


async def test_one_file_gives_what_shards_give(folder: Path, models: Models) -> None:
    compute = await served(source_of(single(folder)), 1, 3)
    other = await served(models.source(BLOOM), 1, 3)
    states = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).numpy().tobytes()
    answers = [
        (await c.step(c.new_session("c", 1, 3, 4), 0, 4, states, 0.0)).payload for c in (compute, other)
    ]
    assert answers[0] == answers[1]


async def test_names_may_lack_the_prefix_of_the_whole_model(folder: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    rewrite(single(folder), "model.safetensors", rename)
    (await served(source_of(folder), 0, N_LAYERS)).close()
    hub_of(source_of(folder)).close()


async def test_a_missing_shard_is_named(folder: Path) -> None:
    name, file = next(iter(of_block(folder, 5).items()))
    (folder / file).unlink()
    reason = await refusal(folder, 5, 6)
    assert file in reason
    assert "is missing" in reason
    assert name.partition(".h.5.")[0] in reason


async def test_a_truncated_shard_is_named(folder: Path) -> None:
    file = next(iter(of_block(folder, 0).values()))
    (folder / file).write_bytes((folder / file).read_bytes()[:-100])
    assert f"{file} cannot be read" in await refusal(folder)


async def test_a_missing_tensor_is_named(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    del index["weight_map"]["transformer.h.1.mlp.dense_h_to_4h.bias"]
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    assert "has no tensor transformer.h.1.mlp.dense_h_to_4h.bias" in await refusal(folder)


async def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    name = "transformer.h.0.mlp.dense_h_to_4h.weight"
    rewrite(folder, files(folder)[name], lambda tensors: tensors.update({name: torch.zeros(64, 64)}))
    reason = await refusal(folder)
    assert name in reason
    assert "64 by 64, but 256 by 64 by config.json" in reason


async def test_a_tensor_that_the_configuration_has_no_use_for_is_named(
    models: Models, tmp_path: Path
) -> None:
    name = "llama, scaled positions, tied head, biases"
    folder = Path(shutil.copytree(models.folder(name), tmp_path / "llama"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"attention_bias": False}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert "self_attn.q_proj.bias, which its config.json has no use for" in await refusal(folder)


async def test_weights_of_another_family_are_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIGS[LLAMA]), encoding="utf-8")
    assert "holds no weights of a llama model" in await refusal(folder)


async def test_blocks_that_the_model_does_not_have_are_refused(folder: Path) -> None:
    assert await refusal(folder, 4, 9) == "the model has blocks 0 to 6, not 4 to 9"


async def test_a_family_that_is_not_served_is_refused_with_those_that_are() -> None:
    with pytest.raises(ComputeError, match="'gpt2' are not supported; supported types: bloom, llama"):
        family_of({"model_type": "gpt2"})


@pytest.mark.parametrize(
    "change", [{"hidden_size": 63}, {"hidden_size": "wide"}, {"n_head": 0}], ids=["odd", "a word", "none"]
)
def test_a_configuration_that_makes_no_model_is_refused_in_one_sentence(change: dict[str, Any]) -> None:
    with pytest.raises(ComputeError, match="the configuration is invalid for a bloom model: ") as caught:
        family_of(CONFIGS[BLOOM] | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"])
def test_a_checkpoint_that_is_quantised_already_is_refused_by_its_method(settings: Any) -> None:
    with pytest.raises(ComputeError, match=r"quantised already \(fp8\) are not supported"):
        family_of(CONFIGS[LLAMA] | {"quantization_config": settings})


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
async def test_weights_of_8_bits_without_their_scales_are_refused(folder: Path, dtype: torch.dtype) -> None:
    [(name, file), *_] = of_block(folder, 2).items()
    rewrite(folder, file, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert (
        f"{name} in {folder / file} holds {str(dtype)[6:]}: weights must have 16 or 32 bits"
        in await refusal(folder)
    )


def test_positions_that_depend_on_what_other_sessions_did_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(ComputeError, match="'dynamic' are not supported; supported types: default"):
        family_of(CONFIGS[LLAMA] | {"rope_scaling": rope})


def test_a_head_in_the_file_goes_before_tied_embeddings(models: Models, tmp_path: Path) -> None:
    folder = single(Path(shutil.copytree(models.folder(BLOOM), tmp_path / "bloom")))
    tensors = load_file(folder / "model.safetensors")
    embeddings = next(tensor for name, tensor in tensors.items() if name.endswith("word_embeddings.weight"))
    tensors["lm_head.weight"] = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(hub_of(source_of(folder))._head, tensors["lm_head.weight"])
    assert torch.equal(hub_of(source_of(models.folder(BLOOM)))._head, embeddings)


async def test_a_head_of_its_own_must_be_in_the_checkpoint(models: Models, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(models.folder(LLAMA), tmp_path / "llama"))
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    del index["weight_map"]["lm_head.weight"]
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ComputeError, match=r"has no tensor lm_head\.weight"):
        hub_of(source_of(folder))


def test_the_client_reads_no_block(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened(monkeypatch)
    hub_of(models.source(BLOOM)).close()
    assert sorted(opened.tensors) == [
        "transformer.ln_f.bias",
        "transformer.ln_f.weight",
        "transformer.word_embeddings.weight",
        "transformer.word_embeddings_layernorm.bias",
        "transformer.word_embeddings_layernorm.weight",
    ]
