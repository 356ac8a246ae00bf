"""The model whose blocks are timed: BLOOM-176B, or at small size a tiny one."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_parts.record import Job
from nodes.blocks.sizes import config_of_size
from testbed.scenario.families import VALUE_BYTES, make_config, sizes_of


@dataclass(frozen=True)
class Model:
    """``table`` is ``[model]`` of a scenario; ``dtype`` that of activations and caches."""

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
        """s_m."""
        return sizes_of(self.config).block_bytes(weights, VALUE_BYTES[self.dtype])

    def cache_bytes(self, n_tokens: int) -> float:
        """s_c k of one session in one block."""
        return float(sizes_of(self.config).cache_values * VALUE_BYTES[self.dtype] * n_tokens)

    @property
    def client_bytes(self) -> float:
        """Embeddings, which are the head too."""
        return float(sizes_of(self.config).vocabulary * self.hidden_size * VALUE_BYTES[self.dtype])


def model_of(job: Job) -> Model:
    if not job.is_small:
        return Model("bloom-176b", config_of_size("bloom-176b"), {"profile": "bloom-176b"}, "bfloat16")
    sizes = {"n_blocks": 8, "hidden_size": 64, "heads": 4, "vocab": 512}
    table = {"family": "bloom", "name": "bloom-small", **sizes}
    return Model("bloom-small", make_config("bloom", *sizes.values()), table, "float32")


def named_model(name: str, dtype: str = "bfloat16") -> Model:
    """One of ``nodes.blocks.sizes``, of BLOOM's family."""
    config = config_of_size(name)
    sizes = {"n_blocks": config["n_layer"], "hidden_size": config["hidden_size"], "heads": config["n_head"]}
    table = {"family": "bloom", "name": name, **sizes, "vocab": config["vocab_size"]}
    return Model(name, config, table, dtype)


def launch_bound_model() -> Model:
    """BLOOM-560m: its kernels are so short that launching them is what a step waits for."""
    return named_model("bloom-560m")


def quantised_here() -> bool:
    """Whether weights in 4 bits can be computed."""
    return importlib.util.find_spec("bitsandbytes") is not None
