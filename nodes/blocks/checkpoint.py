"""Reads parts of a checkpoint: only the tensors that are asked for, from safetensors files alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from nodes.blocks.family import Family
from nodes.compute import ComputeError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint:
    """A checkpoint folder: one ``model.safetensors``, or shards with ``model.safetensors.index.json``."""

    def __init__(self, folder: Path, family: Family) -> None:
        self.folder = folder
        self._files = _weight_map(folder)
        for prefix in family.prefixes:
            if any(name.startswith(f"{prefix}{family.embeddings}.") for name in self._files):
                self._prefix = prefix
                break
        else:
            raise ComputeError(f"{folder} holds no weights of a {family.model_type} model")

    def has(self, name: str) -> bool:
        return name in self._files

    def part(self, name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All tensors below a module of the model class, by the rest of their names, as ``dtype``.

        Raises ``ComputeError`` when a file or tensor is missing or broken.
        """
        prefix = f"{self._prefix}{name}."
        names = [full for full in self._files if full.startswith(prefix)]
        if not names:
            raise ComputeError(f"{self.folder} has no weights for {name}")
        return {full.removeprefix(prefix): self.tensor(full, dtype) for full in names}

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor by its full name. Raises ``ComputeError``."""
        path = self.folder / self._files[name]
        if not path.is_file():
            raise ComputeError(f"{path} is missing: {_INDEX} says that it holds {name}")
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name).to(dtype)
        except (SafetensorError, OSError) as error:
            raise ComputeError(f"{path} cannot be read: {error}") from error


def _weight_map(folder: Path) -> Mapping[str, str]:
    if (folder / _INDEX).is_file():
        try:
            return dict(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ComputeError(f"{folder / _INDEX} is no index of safetensors files: {error}") from error
    path = folder / _SINGLE
    if not path.is_file():
        raise ComputeError(f"{folder} holds neither {_SINGLE} nor {_INDEX}")
    try:
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), _SINGLE)
    except (SafetensorError, OSError) as error:
        raise ComputeError(f"{path} cannot be read: {error}") from error
