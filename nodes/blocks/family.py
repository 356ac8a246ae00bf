"""What differs between families of models; all other code is the same for all of them.

Positions and masks (ALiBi, rotary embeddings, causal masks, sliding windows) are computed by the family's own model class
in transformers. A server runs that class with its own blocks only, and without embeddings and final norm.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_MAPPING
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nodes.blocks.files import ALIKE, check_config
from nodes.blocks.text import invalid
from nodes.compute import ComputeError

MODEL_TYPES = (
    *("bloom", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3"),
    *("mixtral", "qwen3_moe", "gpt_oss"),
)
"""Families whose tokens are tested against transformers' own. Others are refused: their blocks may keep a state that is no
attention cache, attend to another sequence, or change what a client computes."""

_OWN = "testbed_"


@dataclass(frozen=True)
class Family:
    """A family's classes, and its parts' names: attributes of the model class, prefixes in checkpoints."""

    model_type: str
    config_class: Any
    model_class: Any
    block_class: Any
    blocks: str = "layers"
    """The attribute with the list of blocks; in checkpoints it is followed by a block's number."""
    embeddings: str = "embed_tokens"
    embeddings_norm: str | None = None
    final_norm: str = "norm"
    prefixes: tuple[str, ...] = ("model.", "")
    """What checkpoints may put before the names of the model class."""
    token_limit: str = "max_position_embeddings"
    """The setting of the configuration with the length of the longest sequence, in tokens."""
    has_head_bias: bool = False

    def shell(self, config: Any) -> Any:
        """Returns a model without blocks and vocabulary, which computes positions and masks.

        Its configuration has as many kinds of blocks as ``config``.
        """
        model = self.model_class(self.without_blocks(config, vocab_size=1))
        for part in (self.embeddings, self.embeddings_norm, self.final_norm):
            if part is not None:
                setattr(model, part, torch.nn.Identity())
        return model.eval()

    def without_blocks(self, config: Any, **others: Any) -> Any:
        """Returns ``config`` for no block, with ``others`` in place of its settings; kinds of blocks are kept."""
        tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        none: dict[str, Any] = {"layer_types": []} if hasattr(config, "layer_types") else {}
        found = self.config_class.from_dict(
            {**config.to_dict(), "num_hidden_layers": 0, **(tokens if others else {}), **none, **others}
        )
        if none:
            found.layer_types = config.layer_types
        return found

    def block_config(self, config: Any) -> Any:
        """Returns the configuration that blocks are made with: they can compute several sessions (``ragged``)."""
        found = self.shell(config).config
        if found._attn_implementation in ("sdpa", "eager") and self.model_type != "bloom":
            _register(found._attn_implementation)
            found._attn_implementation = _OWN + found._attn_implementation
        return found

    def with_blocks(self, config: Any, blocks: Sequence[torch.nn.Module], kinds: Sequence[str]) -> Any:
        """Returns a model of just these blocks, of these ``kinds``: hidden states in, hidden states out.

        It shares their weights.
        """
        model = self.shell(config)
        setattr(model, self.blocks, torch.nn.ModuleList(blocks))
        model.config.num_hidden_layers = len(blocks)
        if hasattr(config, "layer_types"):
            model.config.layer_types = list(kinds)
        return model


@dataclass(frozen=True, eq=False)
class Together:
    """In place of a mask: several sessions, whose tokens are one after the other in a row.

    ``attend`` is called with a block's attention module, its queries, keys and values ``[1, heads, tokens, head size]``, a
    function that computes attention, and that function's other arguments. It returns ``[1, tokens, heads, head size]``.
    """

    attend: Any


@cache
def _register(implementation: str) -> None:
    """Makes an attention function that is transformers' ``implementation``, but for sessions ``Together``."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **others: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
        if isinstance(mask, Together):
            return mask.attend(module, query, key, value, function, others), None
        return function(module, query, key, value, mask, **others)

    ALL_ATTENTION_FUNCTIONS.register(_OWN + implementation, attend)


@cache
def family_named(model_type: str) -> Family:
    """Returns the family, one of ``MODEL_TYPES``."""
    config_class = CONFIG_MAPPING[model_type]
    model_class = MODEL_MAPPING[config_class]
    classes = vars(sys.modules[model_class.__module__])
    if model_type == "bloom":
        return Family(
            model_type,
            config_class,
            model_class,
            classes["BloomBlock"],
            blocks="h",
            embeddings="word_embeddings",
            embeddings_norm="word_embeddings_layernorm",
            final_norm="ln_f",
            prefixes=("transformer.", ""),
            token_limit="seq_length",
        )
    block_class = classes[model_class.__name__.removesuffix("Model").removesuffix("Text") + "DecoderLayer"]
    if model_type == "phi":
        return Family(
            model_type,
            config_class,
            model_class,
            block_class,
            final_norm="final_layernorm",
            has_head_bias=True,
        )
    return Family(model_type, config_class, model_class, block_class)


def family_of(config: Mapping[str, Any]) -> tuple[Family, Any]:
    """Returns the family and the configuration object of a ``config.json``. Raises ``ComputeError``."""
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ComputeError(
            f"models of type {model_type!r} are not supported; supported types: {', '.join(MODEL_TYPES)}"
        )
    check_config(config)
    family = family_named(model_type)
    try:
        parsed = family.config_class.from_dict(dict(config))
        # Settings that contradict each other raise an error when a block is built, even without weights.
        with torch.device("meta"):
            family.block_class(family.shell(parsed).config, 0)
    except Exception as error:  # the settings of an unknown file can cause any error in the model's code
        raise invalid(config, error) from error
    # With what the configuration's class adds, and by the names that it has.
    check_config(
        {"rope_parameters": getattr(parsed, "rope_parameters", None), "layer_types": kinds_of(parsed)}
    )
    return family, parsed


def run_with(cache: Any, model: torch.nn.Module, **inputs: Any) -> Any:
    """Returns what ``model`` computes of ``inputs``; the tokens' keys and values go into ``cache``."""
    return model(**inputs, **{_cache_name(model.__class__): cache}, use_cache=True)


@cache
def _cache_name(model_class: Any) -> str:
    """Returns the name of the argument for the cache: ``past_key_values`` until transformers 5.23."""
    return "cache" if "cache" in inspect.signature(model_class.forward).parameters else "past_key_values"


def kinds_of(config: Any) -> tuple[str, ...]:
    """Returns the kind of every block."""
    return tuple(getattr(config, "layer_types", None) or (ALIKE,) * config.num_hidden_layers)


def window_of(config: Any, kind: str) -> int | None:
    """Returns the number of tokens that blocks of ``kind`` attend to, a token itself included; ``None``: to all."""
    return None if kind == "full_attention" else getattr(config, "sliding_window", None)


def cache_layout(config: Any) -> tuple[int, int]:
    """Returns (heads with keys and values, size of a head).

    A token's cache in one block is twice the product of the two values.
    """
    n_heads = config.num_attention_heads
    n_kv_heads = getattr(config, "num_key_value_heads", None) or n_heads
    return n_kv_heads, getattr(config, "head_dim", None) or config.hidden_size // n_heads
