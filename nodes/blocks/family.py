"""What differs between families of models; all other code is the same for all of them.

Positions and masks (ALiBi, rotary embeddings, the causal mask) are computed by the family's own model class
in transformers. A server runs that class with its own blocks only, and without embeddings and final norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import BloomConfig, BloomModel, LlamaConfig, LlamaModel
from transformers.models.bloom.modeling_bloom import BloomBlock
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from nodes.compute import ComputeError

_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""The kinds of rotary embeddings whose frequencies are fixed. Others change them while a session grows, in a
place that all sessions share."""


@dataclass(frozen=True)
class Family:
    """A family's classes, and its parts' names: attributes of the model class, prefixes in checkpoints."""

    model_type: str
    config_class: Any
    model_class: Any
    block_class: Any
    blocks: str
    """The attribute with the list of blocks; in checkpoints it is followed by a block's number."""
    embeddings: str
    embeddings_norm: str | None
    final_norm: str
    prefixes: tuple[str, ...]
    """What checkpoints may put before the names of the model class."""
    token_limit: str
    """The setting of the configuration with the length of the longest sequence, in tokens."""

    def shell(self, config: Any) -> Any:
        """Returns a model without blocks and vocabulary, which computes positions and masks."""
        tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        small = {**config.to_dict(), "num_hidden_layers": 0, "vocab_size": 1, **tokens}
        model = self.model_class(self.config_class.from_dict(small))
        for part in (self.embeddings, self.embeddings_norm, self.final_norm):
            if part is not None:
                setattr(model, part, torch.nn.Identity())
        return model.eval()

    def with_blocks(self, config: Any, blocks: Sequence[torch.nn.Module]) -> Any:
        """Returns a model of just these blocks: hidden states in, hidden states out.

        It shares their weights.
        """
        model = self.shell(config)
        setattr(model, self.blocks, torch.nn.ModuleList(blocks))
        model.config.num_hidden_layers = len(blocks)
        return model


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "bloom",
            BloomConfig,
            BloomModel,
            BloomBlock,
            blocks="h",
            embeddings="word_embeddings",
            embeddings_norm="word_embeddings_layernorm",
            final_norm="ln_f",
            prefixes=("transformer.", ""),
            token_limit="seq_length",
        ),
        Family(
            "llama",
            LlamaConfig,
            LlamaModel,
            LlamaDecoderLayer,
            blocks="layers",
            embeddings="embed_tokens",
            embeddings_norm=None,
            final_norm="norm",
            prefixes=("model.", ""),
            token_limit="max_position_embeddings",
        ),
    )
}


def family_of(config: Mapping[str, Any]) -> tuple[Family, Any]:
    """Returns the family and the configuration object of a ``config.json``. Raises ``ComputeError``."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ComputeError(
            f"models of type {model_type!r} are not supported; supported types: {', '.join(FAMILIES)}"
        )
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ComputeError(
            f"checkpoints that are quantised already ({method}) are not supported: use one of 16 or 32 bits, whose weights "
            "servers can quantise (compute.weights)"
        )
    family = FAMILIES[model_type]
    try:
        parsed = family.config_class.from_dict(dict(config))
        # Settings that contradict each other raise an error when a block is built, even without weights.
        with torch.device("meta"):
            family.block_class(family.shell(parsed).config, 0)
    except Exception as error:  # the settings of an unknown file can cause any error in the model's code
        reason = " ".join(str(error).split())
        raise ComputeError(f"the configuration is invalid for a {model_type} model: {reason}") from error
    rope = (getattr(parsed, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _FIXED_ROPE:
        raise ComputeError(
            f"rotary embeddings of type {rope!r} are not supported; supported types: {', '.join(_FIXED_ROPE)}"
        )
    return family, parsed


def cache_layout(config: Any) -> tuple[int, int]:
    """Returns (heads with keys and values, size of a head).

    A token's cache in one block is twice the product of the two values.
    """
    n_heads = config.num_attention_heads
    n_kv_heads = getattr(config, "num_key_value_heads", None) or n_heads
    return n_kv_heads, getattr(config, "head_dim", None) or config.hidden_size // n_heads
