"""Finds checkpoints and reads their ``config.json``. Weights are read only by the processes that compute."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from testbed.errors import UserError
from testbed.experiments.families import ConfigError, ModelSizes, sizes_of
from testbed.experiments.filesread import note_file

_log = logging.getLogger(__name__)
INSTALL = "pip install '.[blocks]' in the checkout"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def find_checkpoint(given: str, folder: Path) -> str:
    """Return the absolute path of a checkpoint's folder, or its name on the Hugging Face hub.

    A relative path is looked for in ``folder``, then in the current folder. Raises ``UserError`` if ``given``
    is no folder and cannot be a hub's name (owner/model).
    """
    for start in (folder, Path()):
        if (start / given).is_dir():
            return str((start / given).absolute())
    if _HUB_NAME.fullmatch(given):
        return given
    raise UserError(
        f"there is no folder {given}; give the folder of a checkpoint or a model's name on the hub "
        "(owner/model), or make a checkpoint with `testbed model make-tiny`"
    )


def read_config(checkpoint: str) -> dict[str, Any]:
    """Return the data of a checkpoint's ``config.json``, fetched first for a name on the hub.

    Raises ``UserError`` if there is none, or if it cannot be fetched or read.
    """
    folder = Path(checkpoint)
    path = folder / "config.json" if folder.is_absolute() else _fetched_config(checkpoint)
    try:
        config = json.loads(note_file(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "is not a checkpoint: it has no config.json" if folder.is_dir() else "does not exist"
        raise UserError(f"{checkpoint} {what}; give another folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a model's configuration: it must hold a JSON object")
    return config


def checkpoint_sizes(config: Mapping[str, Any], checkpoint: str) -> ModelSizes:
    """Return the sizes in ``config``.

    Raises ``UserError``, naming the checkpoint, if one is missing or wrong.
    """
    try:
        return sizes_of(config)
    except ConfigError as error:
        raise UserError(f"{checkpoint}: its config.json {error}") from None


def checkpoint_folder(checkpoint: str) -> Path:
    """Return the checkpoint's folder; a name on the hub is downloaded first.

    Raises ``UserError`` if that fails.
    """
    from nodes.blocks.files import resolve_checkpoint

    with _refused():
        return resolve_checkpoint(checkpoint)


def require_weights(folder: str, n_blocks: int) -> None:
    """Raise ``UserError`` if the checkpoint's files do not hold all of its blocks. Reads no tensor."""
    from nodes.blocks.files import check_weights

    with _refused():
        check_weights(Path(folder), n_blocks)


def require_computable(config: Mapping[str, Any]) -> None:
    """Raise ``UserError`` if a checkpoint with this ``config.json`` is one whose blocks no server computes."""
    from nodes.blocks.files import check_config

    with _refused():
        check_config(config)


def require_stored(config: Mapping[str, Any], weights: str, *, has_graphs: bool = False) -> None:
    """Raise ``UserError`` if no server stores the model's blocks as ``weights``."""
    from nodes.blocks.files import check_quantised

    with _refused():
        check_quantised(config, weights, has_graphs=has_graphs)


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Turn a ``ComputeError`` about a checkpoint into a ``UserError`` with the same sentence."""
    from nodes.compute import ComputeError

    try:
        yield
    except ComputeError as error:
        raise UserError(str(error)) from error


def _fetched_config(name: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ImportError:
        raise UserError(
            f"there is no folder {name}, and downloading it from the hub needs huggingface_hub: {INSTALL}"
        ) from None
    from nodes.blocks.files import downloading

    here = try_to_load_from_cache(name, "config.json")
    if isinstance(here, str):
        return Path(here)
    _log.warning("there is no folder %s: downloading its config.json from the Hugging Face hub", name)
    with _refused(), downloading(name):
        return Path(hf_hub_download(name, "config.json"))
