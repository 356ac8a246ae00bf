"""What to load and how to compute, as plain data: nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WeightSource:
    """Where weights come from: a checkpoint ``folder``, or random ones of ``seed`` for ``config``.

    ``config`` is the content of ``config.json``.
    """

    config: Mapping[str, Any]
    folder: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class BlocksSpec:
    """A server's compute. ``dtype`` is that of activations, caches and unquantised weights."""

    source: WeightSource
    device: str = "cpu"
    dtype: str = "float32"
    n_threads: int = 1


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Without one: the most probable."""

    temperature: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class HubSpec:
    """The client's part: embeddings, final norm and head. ``stops`` ends a request at the model's end token."""

    source: WeightSource
    device: str = "cpu"
    dtype: str = "float32"
    n_threads: int = 1
    sampling: Sampling | None = None
    stops: bool = False
