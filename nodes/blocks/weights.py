"""Where weights come from: a checkpoint, or a random generator for models without one."""

from __future__ import annotations

import contextlib
import hashlib
import math
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

    def head(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, tied: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def head_bias(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...


_EMBEDDING = 0.05
"""Deviation of an embedding, or the value of the norm after it.

Blocks' outputs must outweigh it. A head that shares its matrix with the embedding would else repeat the token that
came in, whatever the caches hold, and a comparison of tokens would notice nothing.
"""


class RandomWeights:
    """Weights whose output depends on every cached key and value, so that compared tokens show a wrong cache.

    Matrices are normally distributed and neither enlarge nor shrink what they multiply: with larger ones, the
    rounding errors of 16 bits grow from block to block until they alter tokens. Norms are 1, but for that after
    an embedding; biases are 0.

    A tensor depends only on the seed, its name, shape, dtype and kind of device. So all ways to split a model
    over servers have the same weights.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def tensors(
        self, part: str, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        is_embedding = "embed" in part
        for name, shape in shapes.items():
            if len(shape) > 1:
                deviation = _EMBEDDING if is_embedding else 1 / math.sqrt(shape[-1])
                yield name, self._matrix(f"{part}.{name}", shape, deviation, dtype, device)
            else:
                value = 0.0 if name.endswith("bias") else _EMBEDDING if is_embedding else 1.0
                yield name, torch.full(shape, value, dtype=dtype, device=device)

    def head(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, tied: torch.Tensor | None = None
    ) -> torch.Tensor:
        if tied is not None:
            return tied
        return self._matrix("lm_head.weight", shape, 1 / math.sqrt(shape[-1]), dtype, device)

    def head_bias(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def _matrix(
        self, name: str, shape: torch.Size, deviation: float, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7]))
        matrix = torch.empty(shape, dtype=dtype, device=device)
        return matrix.normal_(0.0, deviation, generator=generator)


@contextlib.contextmanager
def opened(source: WeightSource, family: Family, config: Any) -> Iterator[Weights]:
    """Yields the weights of ``source``; its files are closed at the end. Raises ``ComputeError``."""
    if source.folder is None:
        yield RandomWeights(source.seed)
        return
    with Checkpoint(Path(source.folder), family) as checkpoint:
        yield checkpoint
