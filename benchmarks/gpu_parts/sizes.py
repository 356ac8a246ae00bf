"""The models whose blocks are measured: BLOOM-176B, at small size a tiny one, and others by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.record import Job
from nodes.blocks.device import available_bytes, open_device
from nodes.blocks.files import read_config
from nodes.blocks.sizes import config_of_size
from nodes.blocks.spec import Weights
from testbed.experiments.families import VALUE_BYTES, make_config, sizes_of


@dataclass(frozen=True)
class Model:
    """A model. ``config``: its ``config.json``; ``table``: ``[model]`` of a scenario; ``dtype``: of
    activations and caches.
    """

    name: str
    config: Mapping[str, Any]
    table: Mapping[str, Any]
    dtype: str

    @property
    def hidden_size(self) -> int:
        return sizes_of(self.config).hidden_size

    @property
    def n_blocks(self) -> int:
        return sizes_of(self.config).n_blocks

    def block_bytes(self, weights: str) -> float:
        """Returns the size of a block in bytes (s_m)."""
        return sizes_of(self.config).block_bytes(weights, VALUE_BYTES[self.dtype])

    def cache_bytes(self, n_tokens: int) -> float:
        """Returns the size of the cache of ``n_tokens`` tokens in one block, in bytes (s_c per session)."""
        return float(sizes_of(self.config).cache_values * VALUE_BYTES[self.dtype] * n_tokens)

    @property
    def client_bytes(self) -> float:
        """Size of the client's part in bytes: the embeddings, which are also the head."""
        return float(sizes_of(self.config).vocabulary * self.hidden_size * VALUE_BYTES[self.dtype])


def model_of(job: Job) -> Model:
    if not job.is_small:
        return Model("bloom-176b", config_of_size("bloom-176b"), {"profile": "bloom-176b"}, "bfloat16")
    sizes = {"n_blocks": 8, "hidden_size": 64, "heads": 4, "vocab": 512}
    table = {"family": "bloom", "name": "bloom-small", **sizes}
    return Model("bloom-small", make_config("bloom", *sizes.values()), table, "float32")


def named_model(name: str, dtype: str = "bfloat16") -> Model:
    """Returns a model of ``nodes.blocks.sizes``, which must be of the family BLOOM."""
    config = config_of_size(name)
    sizes = {"n_blocks": config["n_layer"], "hidden_size": config["hidden_size"], "heads": config["n_head"]}
    table = {"family": "bloom", "name": name, **sizes, "vocab": config["vocab_size"]}
    return Model(name, config, table, dtype)


def model_in(checkpoint: Path, dtype: str = "bfloat16") -> Model:
    """Returns the model of a checkpoint, which a scenario reads from there: its ``[model]`` is empty."""
    return Model(checkpoint.name, read_config(checkpoint), {}, dtype)


def launch_bound_model() -> Model:
    """Returns BLOOM-560m: its kernels are so short that the time to launch them bounds a step."""
    return named_model("bloom-560m")


def blocks_within(job: Job, model: Model, weights: Weights, ratio: float, n_cached: int = 0) -> int:
    """Returns how many blocks of ``model`` fit into ``ratio`` of the device's free memory, each with a cache of
    ``n_cached`` tokens; no more than the model has.
    """
    device, _ = open_device(job.device, model.dtype)
    each_bytes = model.block_bytes(weights) + model.cache_bytes(n_cached)
    return min(model.n_blocks, int(ratio * available_bytes(device) / each_bytes))


def quantised_here() -> bool:
    """Whether weights in nf4 can be used: they need bitsandbytes."""
    return importlib.util.find_spec("bitsandbytes") is not None
