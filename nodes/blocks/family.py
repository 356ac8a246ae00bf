"""What a family of models supplies, so that everything else is the same for all of them.

A family's own model class of transformers computes positions and masks (ALiBi, rotary embeddings, the
causal mask): a server runs it with only its blocks, and without embeddings and final norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import BloomConfig, BloomModel, LlamaConfig, LlamaModel
from transformers.models.bloom.modeling_bloom import BloomBlock
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from nodes.compute import ComputeError


@dataclass(frozen=True)
class Family:
    """Names of a family's parts: attributes of its model class, and prefixes in its checkpoints."""

    model_type: str
    config_class: Any
    model_class: Any
    block_class: Any
    blocks: str
    """The list of blocks; in checkpoints followed by a block's number."""
    embeddings: str
    embeddings_norm: str | None
    final_norm: str
    prefixes: tuple[str, ...]
    """What checkpoints put before the names of the model class."""

    def skeleton(self, config: Any) -> Any:
        """The model class without blocks and vocabulary: what computes positions and masks."""
        small = self.config_class.from_dict({**config.to_dict(), "num_hidden_layers": 0, "vocab_size": 1})
        small.pad_token_id = None
        model = self.model_class(small)
        setattr(model, self.embeddings, torch.nn.Identity())
        if self.embeddings_norm is not None:
            setattr(model, self.embeddings_norm, torch.nn.Identity())
        setattr(model, self.final_norm, torch.nn.Identity())
        return model.eval()

    def with_blocks(self, skeleton: Any, config: Any, blocks: list[torch.nn.Module]) -> Any:
        """A model of just these blocks: hidden states in, hidden states out."""
        model = self.model_class.__new__(self.model_class)
        torch.nn.Module.__init__(model)
        model.__dict__.update({k: v for k, v in skeleton.__dict__.items() if k != "_modules"})
        model._modules = {**skeleton._modules, self.blocks: torch.nn.ModuleList(blocks)}
        model.config = self.config_class.from_dict({**config.to_dict(), "num_hidden_layers": len(blocks)})
        model.config._attn_implementation = skeleton.config._attn_implementation
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
        ),
    )
}


def family_of(config: Mapping[str, Any]) -> tuple[Family, Any]:
    """The family and configuration object of a ``config.json``. Raises ``ComputeError``."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ComputeError(
            f"models of type {model_type!r} are not supported; those of these are: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    return family, family.config_class.from_dict(dict(config))


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
