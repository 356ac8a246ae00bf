"""Configurations of models by name, to build their blocks with random weights without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nodes.compute import ComputeError


def _bloom(hidden_size: int, n_layer: int, n_head: int) -> dict[str, Any]:
    return {
        "model_type": "bloom",
        "hidden_size": hidden_size,
        "n_layer": n_layer,
        "n_head": n_head,
        "vocab_size": 250880,
        "seq_length": 2048,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
    }


def _llama(
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    **others: Any,
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        **others,
    }


_LLAMA_3 = {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

SIZES: Mapping[str, Mapping[str, Any]] = {
    "bloom-560m": _bloom(1024, 24, 16),
    "bloom-1b1": _bloom(1536, 24, 16),
    "bloom-1b7": _bloom(2048, 24, 16),
    "bloom-3b": _bloom(2560, 30, 32),
    "bloom-7b1": _bloom(4096, 30, 32),
    "bloom-176b": _bloom(14336, 70, 112),
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 40),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, **_LLAMA_3),
    "llama-3-70b": _llama(8192, 28672, 80, 64, 8, **_LLAMA_3),
}
"""The content of ``config.json`` by the model's name."""


def config_of_size(name: str) -> Mapping[str, Any]:
    """Returns the configuration of a model by name.

    Raises ``ComputeError`` for a name that is not in ``SIZES``.
    """
    if name not in SIZES:
        raise ComputeError(f'unknown size "{name}"; known sizes: {", ".join(SIZES)}')
    return SIZES[name]
