"""Reads parts of a checkpoint: only the tensors that are needed, and only from safetensors files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nodes.blocks.family import Family
from nodes.blocks.files import INDEX, weight_files
from nodes.compute import ComputeError

_NOT_WEIGHTS = ("rotary_emb.inv_freq",)
"""Tensors of old checkpoints that the model's code computes."""
_LEAST_VALUE_BYTES = 2
_HEAD, _HEAD_BIAS = "lm_head.weight", "lm_head.bias"
_OF_EXPERTS = re.compile(r"\.experts\.\d+\.")
_EXPERTS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "mlp.experts.gate_up_proj": (
        ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
        ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    ),
    "mlp.experts.down_proj": (
        ("mlp.experts.{}.down_proj.weight",),
        ("block_sparse_moe.experts.{}.w2.weight",),
    ),
}
"""The experts of a block, which transformers computes from one tensor: the tensors of each expert in checkpoints, under
their usual names, one below the other."""
_RENAMED = {"mlp.gate.weight": "block_sparse_moe.gate.weight"}
"""Other names of tensors in checkpoints of Mixtral."""


class Checkpoint:
    """A checkpoint folder: one ``model.safetensors``, or shards with ``model.safetensors.index.json``.

    A context manager: every file is opened at its first use, and stays open until the end. Raises
    ``ComputeError`` if the folder holds no weights of ``family``.
    """

    def __init__(self, folder: Path, family: Family) -> None:
        self.folder = folder
        self._names = weight_files(folder)
        self._open: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()
        for prefix in family.prefixes:
            if any(name.startswith(f"{prefix}{family.blocks}.") for name in self._names):
                self._prefix = prefix
                break
        else:
            raise ComputeError(f"{folder} holds no weights of a {family.model_type} model")

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def tensors(
        self, part: str, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of one module of the model class, by name, in the order of ``shapes``.

        Raises ``ComputeError`` when a file or tensor is missing, broken or of another shape, or when the
        checkpoint has a tensor that the module lacks.
        """
        prefix = f"{self._prefix}{part}."
        for name in self._names:
            rest = name.removeprefix(prefix)
            is_known = rest in shapes or rest in _RENAMED.values() or _OF_EXPERTS.search(rest) is not None
            if rest != name and not is_known and not rest.endswith(_NOT_WEIGHTS):
                raise ComputeError(f"{self.folder} has a tensor {name}, which its config.json has no use for")
        for name, shape in shapes.items():
            yield name, self._part(prefix, name, shape, dtype, device)

    def head(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, tied: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the matrix from hidden states to logits.

        ``tied``: the embeddings, if the configuration says that the head is theirs. A head in the file goes before, as in
        transformers: fine-tuned models have one without saying so.
        """
        if tied is not None and _HEAD not in self._names:
            return tied
        return self._read(_HEAD, shape, dtype, device)

    def head_bias(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns what is added to the logits."""
        return self._read(_HEAD_BIAS, shape, dtype, device)

    def _part(
        self, prefix: str, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns a tensor of a module, which the file may have under another name, or in parts for each expert."""
        if prefix + name in self._names:
            return self._read(prefix + name, shape, dtype, device)
        if prefix + _RENAMED.get(name, name) in self._names:
            return self._read(prefix + _RENAMED[name], shape, dtype, device)
        for parts in _EXPERTS.get(name, ()):
            if prefix + parts[0].format(0) in self._names:
                _, n_rows, n_columns = shape
                whole = torch.empty(shape, dtype=dtype, device=device)
                own = torch.Size((n_rows // len(parts), n_columns))
                for expert, rows in enumerate(whole):
                    for part, target in zip(parts, rows.chunk(len(parts)), strict=True):
                        target.copy_(self._read(prefix + part.format(expert), own, dtype, device))
                return whole
        return self._read(prefix + name, shape, dtype, device)

    def _read(self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if name not in self._names:
            raise ComputeError(f"{self.folder} has no tensor {name}")
        path = self.folder / self._names[name]
        if not path.is_file():
            raise ComputeError(f"{path} is missing: {INDEX} says that it holds {name}")
        try:
            file = self._file(path)
            stored = torch.Size(file.get_slice(name).get_shape())
            if stored != shape:
                raise ComputeError(f"{name} in {path} is {by(stored)}, but {by(shape)} by config.json")
            # A copy: the tensor from safetensors may be mapped from the file, and vanish when that is closed.
            as_stored: torch.Tensor = file.get_tensor(name)
            if not as_stored.is_floating_point() or as_stored.itemsize < _LEAST_VALUE_BYTES:
                raise ComputeError(
                    f"{name} in {path} holds {str(as_stored.dtype).removeprefix('torch.')}: weights must have 16 or 32 bits"
                )
            tensor = as_stored.to(device, dtype, copy=True)
        except (SafetensorError, OSError) as error:
            raise ComputeError(f"{path} cannot be read: {error}") from error
        return tensor

    def _file(self, path: Path) -> Any:
        if path.name not in self._open:
            self._open[path.name] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._open[path.name]


def by(shape: torch.Size) -> str:
    return " by ".join(map(str, shape)) or "a single number"
