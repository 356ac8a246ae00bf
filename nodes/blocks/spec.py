"""What to load and how to compute, as plain data. Nothing here needs torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from policies.decoding import Decoding
from policies.problem import Wire

Weights = Literal["plain", "int8", "nf4"]
"""How blocks store their matrices: in the dtype of the activations, or in 8 or about 4 bits per value."""


@dataclass(frozen=True)
class WeightSource:
    """Where weights come from: a checkpoint ``folder``, or without one a random generator with ``seed``.

    ``config`` is the content of ``config.json``.
    """

    config: Mapping[str, Any]
    folder: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class BlocksSpec:
    """How a server computes. ``dtype`` is that of activations, caches and weights that are not quantised.

    One step on the CPU uses ``n_threads`` threads. ``n_streams`` steps are computed at once (1: one after
    another). With ``is_batched`` the steps that wait are computed together (``nodes.batching``), with at most
    ``chunk_tokens`` tokens of a prompt; ``n_streams`` is 1 then.
    """

    source: WeightSource
    device: str = "cpu"
    dtype: str = "float32"
    weights: Weights = "plain"
    n_threads: int = 1
    memory_bytes: float = 0.0
    """Most bytes for blocks and caches together: ``M_j`` of the performance model; 0: no limit."""
    n_streams: int = 1
    is_batched: bool = False
    chunk_tokens: int | None = None
    wire: Wire | None = None
    """How hidden states are sent and received (``policies.problem``)."""
    has_graphs: bool = False
    """Whether steps of one token are CUDA graphs (``nodes.blocks.graphs``); ``n_streams`` is 1 then."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Without a ``Sampling``, the most probable token is chosen."""

    temperature: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    seed: int = 0

    def wrong(self) -> tuple[str, str] | None:
        """Returns the first invalid field and what it must be; ``None`` if all fields are valid."""
        if not 0 < self.temperature < math.inf:
            return "temperature", "must be a number above 0; 0 takes the most probable token each time"
        if self.top_k < 0:
            return "top_k", "must be 0 (all tokens) or more"
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
    decoding: Decoding | None = None
    wire: Wire | None = None
    """As ``BlocksSpec``."""
    draft_folder: str | None = None
    """The checkpoint of the model that drafts; ``None``: tokens are looked up in the request itself."""
