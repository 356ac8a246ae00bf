"""What to load and how to compute, as plain data: nothing here needs torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Weights = Literal["plain", "int8", "nf4"]
"""How blocks hold their matrices: in the dtype of the activations, or in 8 or about 4 bits per value."""


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
    """A server's compute. ``dtype`` is that of activations, caches and weights that are not quantised.

    ``n_threads`` is for one step on the CPU; ``n_streams`` steps are computed at once (1: one after another).
    With ``is_batched`` those that wait are one step (``nodes.batching``), with ``chunk_tokens`` of a prompt at most;
    there is one stream then.
    """

    source: WeightSource
    device: str = "cpu"
    dtype: str = "float32"
    weights: Weights = "plain"
    n_threads: int = 1
    memory_bytes: float = 0.0
    """Blocks and caches take no more than this, M_j of the model; 0: as much as there is."""
    n_streams: int = 1
    is_batched: bool = False
    chunk_tokens: int | None = None
    has_graphs: bool = False
    """Steps of one token are CUDA graphs (``nodes.blocks.graphs``); there is one stream then."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Without one: the most probable."""

    temperature: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    seed: int = 0

    def wrong(self) -> tuple[str, str] | None:
        """Which field makes no sense, and what it must be."""
        if not 0 < self.temperature < math.inf:
            return "temperature", "must be a number above 0; 0 takes the most probable token each time"
        if self.top_k < 0:
            return "top_k", "must be 0, which takes all tokens, or more"
        if not 0 < self.top_p <= 1:
            return "top_p", "must be above 0 and at most 1"
        return None


@dataclass(frozen=True)
class HubSpec:
    """The client's part: embeddings, final norm and head."""

    source: WeightSource
    device: str = "cpu"
    dtype: str = "float32"
    n_threads: int = 1
