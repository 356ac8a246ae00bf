"""Finding a checkpoint's files, in a folder or on the Hugging Face hub."""

# ruff: noqa: E402 - what needs torch is imported once it is known to be there
from __future__ import annotations

import fnmatch
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from nodes.blocks.files import (
    CONFIG,
    INDEX,
    check_weights,
    downloading,
    read_config,
    resolve_checkpoint,
    weight_files,
)
from nodes.compute import ComputeError
from tests.support.blocks import BLOOM, Models, hub_of, need_blocks, served, source_of

need_blocks("huggingface_hub")

import huggingface_hub
from safetensors.torch import load_file, save_file


class FakeHub:
    """Serves one folder under the name ``someone/model`` and records what is requested."""

    def __init__(self, folder: Path, local: Path) -> None:
        self._folder, self._local = folder, local
        self.came: set[str] = set()

    def __call__(self, name: str, allow_patterns: list[str]) -> str:
        if name != "someone/model":
            raise huggingface_hub.errors.LocalEntryNotFoundError("no such thing\n\nanywhere")
        self._local.mkdir(exist_ok=True)
        for path in self._folder.iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, self._local)
                self.came.add(path.name)
        return str(self._local)


@pytest.fixture
def fake_hub(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    hub = FakeHub(models.folder(BLOOM), tmp_path / "local")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    return hub


def weights(came: set[str]) -> set[str]:
    return {name for name in came if name.endswith(".safetensors")}


def test_a_folder_is_itself(models: Models) -> None:
    assert resolve_checkpoint(str(models.folder(BLOOM))) == models.folder(BLOOM)


async def test_of_a_model_on_the_hub_only_the_shards_of_the_blocks_and_of_the_client_come(
    fake_hub: FakeHub, models: Models
) -> None:
    files = weight_files(models.folder(BLOOM))
    folder = resolve_checkpoint("someone/model", blocks=[0])
    needed = {file for name, file in files.items() if ".h.0." in name or ".h." not in name}
    assert weights(fake_hub.came) == needed
    assert needed < set(files.values())
    (await served(source_of(folder), 0, 1)).close()
    hub_of(source_of(folder)).close()


def test_all_shards_come_if_no_blocks_are_named(fake_hub: FakeHub, models: Models) -> None:
    resolve_checkpoint("someone/model")
    assert weights(fake_hub.came) == set(weight_files(models.folder(BLOOM)).values())
    assert {CONFIG, INDEX, "tokenizer.json"} <= fake_hub.came


def test_a_name_that_is_nowhere_is_refused_in_one_sentence(fake_hub: FakeHub) -> None:
    with pytest.raises(ComputeError) as caught:
        resolve_checkpoint("someone/else")
    assert str(caught.value) == (
        "someone/else is no folder, and no model of that name could be downloaded: the hub cannot be reached"
    )


def test_a_path_that_is_gone_is_looked_for_on_no_hub(fake_hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ComputeError, match=f"^there is no folder {tmp_path / 'gone'}; give the folder of"):
        resolve_checkpoint(str(tmp_path / "gone"))


def test_pickled_weights_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ComputeError, match=r"pickled weights \(pytorch_model.bin\).* `testbed model import"):
        weight_files(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ComputeError, match=r"holds neither model.safetensors nor model.safetensors.index.json"
    ):
        weight_files(tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_maps_nothing_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content, encoding="utf-8")
    with pytest.raises(ComputeError, match='no "weight_map" from tensors to files'):
        weight_files(tmp_path)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ComputeError, match=r"model.safetensors cannot be read"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot be read: No such file"), ("{", "is not JSON"), ("[]", "holds no JSON object")],
)
def test_a_broken_configuration_is_refused(tmp_path: Path, content: Any, reason: str) -> None:
    if content is not None:
        (tmp_path / CONFIG).write_text(content, encoding="utf-8")
    with pytest.raises(ComputeError, match=reason):
        read_config(tmp_path)


def test_a_configuration_is_what_its_file_says(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "bloom"}), encoding="utf-8")
    assert read_config(tmp_path) == {"model_type": "bloom"}


def test_whole_weights_are_taken_and_a_block_or_a_file_that_is_missing_is_named(
    models: Models, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(models.folder(BLOOM), folder)
    n_blocks = read_config(folder)["n_layer"]
    check_weights(folder, n_blocks)
    with pytest.raises(
        ComputeError, match=f"has {n_blocks + 2} blocks, .* hold {n_blocks} of them: block {n_blocks} "
    ):
        check_weights(folder, n_blocks + 2)
    lost = sorted(set(weight_files(folder).values()))[-1]
    (folder / lost).unlink()
    with pytest.raises(ComputeError, match=f"lacks {lost}, which model.safetensors.index.json names"):
        check_weights(folder, n_blocks)


def test_a_hub_that_cannot_be_reached_is_said_without_its_retries(caplog: pytest.LogCaptureFixture) -> None:
    with (
        pytest.raises(ComputeError, match=r"could be downloaded: the hub cannot be reached$"),
        downloading("a/b"),
    ):
        logging.getLogger("huggingface_hub").warning("Retrying in 1s [Retry 1/5].")
        raise huggingface_hub.errors.LocalEntryNotFoundError(
            "An error happened\nwhile trying to locate the file"
        )
    assert not caplog.records


def test_weights_of_too_few_bits_are_refused_before_any_is_loaded(models: Models, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(models.folder(BLOOM), folder)
    files = weight_files(folder)
    name = next(name for name in files if ".0." in name and name.endswith("query_key_value.weight"))
    weights = load_file(folder / files[name])
    save_file({**weights, name: weights[name].char()}, folder / files[name])
    with pytest.raises(ComputeError, match=rf"{name} in .* holds I8: weights must have 16 or 32 bits"):
        check_weights(folder, read_config(folder)["n_layer"])
