"""Finds checkpoints and reads their ``config.json``; weights are read by those who compute with them."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from testbed.errors import UserError
from testbed.scenario.families import ConfigError, ModelSizes, sizes_of

_log = logging.getLogger(__name__)
INSTALL = "pip install '.[blocks]' in the checkout"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def find_checkpoint(given: str, folder: Path) -> str:
    """The absolute folder of a checkpoint given relative to ``folder`` or the current one, or a hub's name.

    Raises ``UserError`` if it can be neither.
    """
    for start in (folder, Path()):
        if (start / given).is_dir():
            return str((start / given).absolute())
    if _HUB_NAME.fullmatch(given):
        return given
    raise UserError(
        f"there is no folder {given}; give the folder of a checkpoint, a model's name on the hub "
        "(owner/model), or make one with `testbed model make-tiny`"
    )


def read_config(checkpoint: str) -> dict[str, Any]:
    """The data of a checkpoint's ``config.json``; it is fetched for a hub's name. Raises ``UserError``."""
    folder = Path(checkpoint)
    path = folder / "config.json" if folder.is_absolute() else _fetched_config(checkpoint)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{checkpoint} is no checkpoint: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no configuration of a model")
    return config


def checkpoint_sizes(config: Mapping[str, Any], checkpoint: str) -> ModelSizes:
    """What ``config`` says of sizes. Raises ``UserError`` naming the checkpoint."""
    try:
        return sizes_of(config)
    except ConfigError as error:
        raise UserError(f"{checkpoint}: its config.json {error}") from None


def checkpoint_folder(checkpoint: str) -> Path:
    """The folder that holds the checkpoint, which a name of the hub is downloaded to. Raises ``UserError``."""
    from nodes.blocks.files import resolve_checkpoint

    with _refused():
        return resolve_checkpoint(checkpoint)


def require_weights(folder: str, n_blocks: int) -> None:
    """Raises ``UserError`` if the checkpoint's files do not hold all of its blocks; no tensor is read."""
    from nodes.blocks.files import check_weights

    with _refused():
        check_weights(Path(folder), n_blocks)


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """What a server says of a checkpoint that it cannot use is for the user."""
    from nodes.compute import ComputeError

    try:
        yield
    except ComputeError as error:
        raise UserError(str(error)) from error


def _fetched_config(name: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ImportError:
        raise UserError(f"{name} is no folder here, and fetching it from the hub needs {INSTALL}") from None
    from nodes.blocks.files import downloading

    here = try_to_load_from_cache(name, "config.json")
    if isinstance(here, str):
        return Path(here)
    _log.warning("%s is no folder here: asking the Hugging Face hub for its config.json", name)
    with _refused(), downloading(name):
        return Path(hf_hub_download(name, "config.json"))
