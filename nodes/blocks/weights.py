"""Where weights come from: a checkpoint, or a random generator for models without one."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from nodes.blocks.checkpoint import Checkpoint
from nodes.blocks.family import Family
from nodes.blocks.spec import WeightSource


class Weights(Protocol):
    """Returns tensors of a model by the names of its parts, on ``device`` and in ``dtype``."""

    def tensors(
        self, part: str, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]: ...

    def head(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...


class RandomWeights:
    """Weights as before training: matrices are normally distributed, norms are 1, biases 0.

    A tensor depends only on the seed, its name, shape, dtype and kind of device. So all ways to split a model
    over servers have the same weights.
    """

    def __init__(self, seed: int, deviation: float) -> None:
        self._seed = seed
        self._deviation = deviation

    def tensors(
        self, part: str, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in shapes.items():
            if len(shape) > 1:
                yield name, self._matrix(f"{part}.{name}", shape, dtype, device)
            else:
                value = 0.0 if name.endswith("bias") else 1.0
                yield name, torch.full(shape, value, dtype=dtype, device=device)

    def head(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._matrix("lm_head.weight", shape, dtype, device)

    def _matrix(self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7]))
        matrix = torch.empty(shape, dtype=dtype, device=device)
        return matrix.normal_(0.0, self._deviation, generator=generator)


@contextlib.contextmanager
def opened(source: WeightSource, family: Family, config: Any) -> Iterator[Weights]:
    """Yields the weights of ``source``; its files are closed at the end. Raises ``ComputeError``."""
    if source.folder is None:
        yield RandomWeights(source.seed, getattr(config, "initializer_range", 0.02))
        return
    with Checkpoint(Path(source.folder), family) as checkpoint:
        yield checkpoint
