"""The files of a checkpoint: finds, downloads and reads them. Nothing here needs torch."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from nodes.compute import ComputeError

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model")
"""Configurations, tokenizers, and chat templates."""
_FIXED_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
"""The kinds of rotary embeddings whose frequencies are fixed. Others change them while a session grows, in a
place that all sessions share."""
_LAYERS = ("full_attention", "sliding_attention")
"""The kinds of blocks whose state is a cache of keys and values."""
ALIKE = ""
"""The kind of all blocks of a model that does not name kinds."""
_QUANTISED_EXPERTS = {"mixtral": True, "qwen3_moe": True, "gpt_oss": False}
"""Whether the experts of a mixture can be quantised, by its family."""
_KINDS = ("F16", "BF16", "F32", "F64")
"""Types that weights may be stored in, by safetensors' names."""


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of a checkpoint's ``config.json``. Raises ``ComputeError``."""
    return _read_object(folder / CONFIG)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Returns the content of ``generation_config.json``, empty if there is none. Raises ``ComputeError``."""
    path = folder / "generation_config.json"
    return _read_object(path) if path.exists() else {}


def check_config(config: Mapping[str, Any]) -> None:
    """Raises ``ComputeError`` for settings of a ``config.json`` with which no server computes blocks."""
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ComputeError(
            f"checkpoints that are quantised already ({method}) are not supported: use one of 16 or 32 bits, whose weights "
            "servers can quantise (compute.weights)"
        )
    for rope in _ropes(config.get("rope_parameters") or config.get("rope_scaling")):
        if rope not in _FIXED_ROPE:
            raise ComputeError(
                f"rotary embeddings of type {rope!r} are not supported; supported types: {', '.join(_FIXED_ROPE)}"
            )
    for kind in config.get("layer_types") or ():
        if kind not in (*_LAYERS, ALIKE):
            raise ComputeError(
                f"blocks of the kind {kind!r} are not supported; supported kinds: {', '.join(_LAYERS)}"
            )


def check_quantised(config: Mapping[str, Any], weights: str, *, has_graphs: bool = False) -> None:
    """Raises ``ComputeError`` for quantised experts that would stay as they are, or in CUDA graphs: which experts a
    token has is known on the host only once its step has got there."""
    family = config.get("model_type")
    if weights == "plain" or family not in _QUANTISED_EXPERTS:
        return
    if not _QUANTISED_EXPERTS[family]:
        raise ComputeError(f'the experts of a {family} model are not quantised: give weights = "plain"')
    if has_graphs:
        raise ComputeError(
            f"quantised experts, of a {family} model, cannot be recorded: leave graphs out, or give "
            'weights = "plain"'
        )


def _ropes(parameters: Any) -> list[Any]:
    """Returns the types of rotary embeddings: of all blocks, or by their kind."""
    if not isinstance(parameters, Mapping):
        return []
    tables = [table for table in parameters.values() if isinstance(table, Mapping)] or [parameters]
    return [table.get("rope_type") or table.get("type") or "default" for table in tables]


def weight_files(folder: Path) -> Mapping[str, str]:
    """Returns the file name of every tensor in ``folder``, without reading a tensor.

    Raises ``ComputeError``, also for pickled weights: loading such a file runs the code in it.
    """
    if (folder / INDEX).is_file():
        files = _read_object(folder / INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise ComputeError(f'{folder / INDEX} has no "weight_map" from tensors to files')
        return files
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_kinds(folder / SINGLE), SINGLE)
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        raise ComputeError(
            f"{folder} holds pickled weights ({pickled[0]}), which are not loaded because a pickle can run "
            f"any code: convert them with `testbed model import {folder} DIR`"
        )
    raise ComputeError(f"{folder} holds neither {SINGLE} nor {INDEX}")


def resolve_checkpoint(name_or_folder: str, blocks: Collection[int] | None = None) -> Path:
    """Returns the folder of a checkpoint; downloads it if the name is of a model on the Hugging Face hub.

    Only safetensors are downloaded, and only shards with ``blocks`` (default: all) or with the client's part
    of the model, which belongs to no block. Raises ``ComputeError``.
    """
    folder = Path(name_or_folder).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute():
        raise ComputeError(f"there is no folder {folder}; give the folder of a checkpoint")
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise ComputeError(
            f"{name_or_folder} is no folder, and downloading a model of that name needs huggingface_hub: "
            "pip install '.[blocks]' in the checkout"
        ) from None
    with downloading(name_or_folder):
        folder = Path(snapshot_download(name_or_folder, allow_patterns=list(_SMALL_FILES)))
        files = _needed(weight_files(folder), blocks) if (folder / INDEX).is_file() else [SINGLE]
        return Path(snapshot_download(name_or_folder, allow_patterns=[*_SMALL_FILES, *files]))


@contextlib.contextmanager
def downloading(name: str) -> Iterator[None]:
    """Turns errors of huggingface_hub in the body into a ``ComputeError`` of one sentence; hides its log."""
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, RepositoryNotFoundError):
            reason = "the hub has no public model of that name"
        elif isinstance(error, LocalEntryNotFoundError):
            reason = "the hub cannot be reached"
        else:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ComputeError(
            f"{name} is no folder, and no model of that name could be downloaded: {reason}"
        ) from error
    finally:
        log.setLevel(level)


def check_weights(folder: Path, n_blocks: int) -> None:
    """Raises ``ComputeError`` if a weight file is missing, any of ``n_blocks`` blocks has no tensor, or one has too few bits."""
    files = weight_files(folder)
    missing = [name for name in sorted(set(files.values())) if not (folder / name).is_file()]
    if missing:
        raise ComputeError(f"{folder} lacks {missing[0]}, which {INDEX} names")
    lacking = sorted(set(range(n_blocks)) - {_block_of(tensor) for tensor in files})
    if lacking:
        raise ComputeError(
            f"{folder}: {CONFIG} has {n_blocks} blocks, but the weight files hold {n_blocks - len(lacking)} "
            f"of them: block {lacking[0]} is missing"
        )
    for name in sorted(set(files.values())):
        for tensor, kind in _kinds(folder / name).items():
            if tensor.endswith("weight") and _block_of(tensor) is not None and kind not in _KINDS:
                raise ComputeError(
                    f"{tensor} in {folder / name} holds {kind}: weights must have 16 or 32 bits"
                )


def _kinds(path: Path) -> dict[str, str]:
    """Returns the type of every tensor in a file, by safetensors' names. Reads no tensor. Raises ``ComputeError``."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise ComputeError(
            f"reading {path} needs safetensors: pip install '.[blocks]' in the checkout"
        ) from None
    try:
        with safe_open(path, framework="np") as file:
            return {tensor: file.get_slice(tensor).get_dtype() for tensor in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise ComputeError(f"{path} cannot be read: {error}") from error


def _needed(files: Mapping[str, str], blocks: Collection[int] | None) -> list[str]:
    """Returns the files with tensors of ``blocks`` or of no block."""
    numbers = {name: _block_of(name) for name in files}
    return sorted({files[n] for n, block in numbers.items() if blocks is None or block in (None, *blocks)})


def _block_of(tensor: str) -> int | None:
    """Returns the block's number in a tensor's name (``transformer.h.3.mlp...``); ``None`` if it has none."""
    return next((int(part) for part in tensor.split(".") if part.isdecimal()), None)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ComputeError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ComputeError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ComputeError(f"{path} holds no JSON object")
    return content
