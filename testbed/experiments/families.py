"""Sizes of a model from its ``config.json``, for the model families that are known here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MADE = ("bloom", "llama")
"""Families of which small checkpoints and random weights are made from sizes alone."""
FAMILIES = (*MADE, "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3")
"""Families whose blocks can be computed (``nodes.blocks.family``), and whose sizes are known."""
SIZED = FAMILIES
"""Families whose sizes are known. All but BLOOM and Phi are built like Llama."""
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MAX_TOKENS = 2048


class ConfigError(Exception):
    """A needed size in ``config.json`` is missing or wrong.

    The message is a sentence that follows the file's name.
    """


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model.

    ``matrices`` are the shapes (outputs, inputs) of one block's matrices, ``other_values`` the number of its
    other weights. ``cache_values`` is the number of values that one token has in the attention cache of one
    block: 2 x key-value heads x head size. ``max_tokens`` is the longest sequence that the model was made
    for, ``None`` if unknown.
    """

    family: str
    n_blocks: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    matrices: tuple[tuple[int, int], ...]
    other_values: int
    cache_values: int
    max_tokens: int | None

    def block_bytes(self, weights: str, value_bytes: int) -> float:
        """Return s_m, the bytes of a block: matrices stored as ``weights``, the rest in ``value_bytes``."""
        matrices = sum(_matrix_bytes(weights, *matrix, value_bytes) for matrix in self.matrices)
        return float(matrices + self.other_values * value_bytes)


def _matrix_bytes(weights: str, n_rows: int, n_columns: int, value_bytes: int) -> int:
    """Return the bytes of a matrix as ``nodes.blocks.quantised`` stores it. (That module imports torch.)"""
    n_values = n_rows * n_columns
    if weights == "int8":  # a scale per row
        return n_values + 4 * n_rows
    if weights == "nf4":  # a scale per 64 values in 8 bits, one of these per 256, and three tables
        n_scales = -(-n_values // 64)
        return -(-n_values // 2) + n_scales + 4 * -(-n_scales // 256) + 4 * (16 + 256 + 1)
    return n_values * value_bytes


def make_config(
    family: str,
    n_blocks: int,
    hidden_size: int,
    n_heads: int,
    vocabulary: int,
    n_kv_heads: int | None = None,
    *,
    feed_forward: int | None = None,
    head_size: int | None = None,
) -> dict[str, Any]:
    """Return ``config.json`` data for these sizes.

    BLOOM ignores the last three, which follow from the others.
    """
    config: dict[str, Any] = {"model_type": family, "vocab_size": vocabulary, "hidden_size": hidden_size}
    if family == "bloom":
        return {**config, "n_layer": n_blocks, "n_head": n_heads, "seq_length": _MAX_TOKENS}
    return {
        **config,
        "num_hidden_layers": n_blocks,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads or n_heads,
        # 8/3 of the hidden size, rounded up to a multiple of 8, as in Llama
        "intermediate_size": feed_forward or -(-8 * hidden_size // 24) * 8,
        **({"head_dim": head_size} if head_size else {}),
        "max_position_embeddings": _MAX_TOKENS,
    }


def sizes_of(config: Mapping[str, Any], families: tuple[str, ...] = FAMILIES) -> ModelSizes:
    """Return the sizes in ``config``, under any of their usual names.

    Raises ``ConfigError`` for a size that is missing or wrong, and for a model of none of the ``families``.
    """
    family = config.get("model_type")
    if family not in families:
        raise ConfigError(
            f"has model_type {family!r}, which is not supported; it must be {' or '.join(families)}"
        )

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
            if value is not None:
                raise ConfigError(f"has {name} = {value!r}, which must be a whole number of at least 1")
        if default is None:
            raise ConfigError(f"does not have {names[0]}")
        return default

    n_blocks = number("num_hidden_layers", "n_layer")
    hidden = number("hidden_size", "n_embed")
    heads = number("num_attention_heads", "n_head")
    kv_heads = number("num_key_value_heads", default=heads) if family != "bloom" else heads
    head = number("head_dim", default=hidden // heads) if family != "bloom" else hidden // heads
    inner = 4 * hidden if family == "bloom" else number("intermediate_size")
    if family == "bloom":
        matrices = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
        rest = 13 * hidden
    elif family == "phi":  # one norm, biases everywhere, and a feed-forward part of two matrices
        matrices = [(heads * head, hidden), *2 * [(kv_heads * head, hidden)], (hidden, heads * head)]
        matrices += [(inner, hidden), (hidden, inner)]
        rest = 2 * hidden + head * (heads + 2 * kv_heads) + hidden + inner + hidden
        if config.get("qk_layernorm"):
            rest += 4 * head
    elif family == "phi3":  # queries, keys and values from one matrix, as gate and up are
        matrices = [((heads + 2 * kv_heads) * head, hidden), (hidden, heads * head)]
        matrices += [(2 * inner, hidden), (hidden, inner)]
        rest = 2 * hidden
    else:
        matrices = [(heads * head, hidden), *2 * [(kv_heads * head, hidden)], (hidden, heads * head)]
        matrices += [*2 * [(inner, hidden)], (hidden, inner)]
        rest = (4 if family in ("gemma2", "gemma3_text") else 2) * hidden
        if config.get("attention_bias"):
            rest += head * (heads + 2 * kv_heads) + hidden
        if family == "qwen2":  # biases of queries, keys and values
            rest += head * (heads + 2 * kv_heads)
        if family in ("qwen3", "gemma3_text"):  # norms of queries and keys
            rest += 2 * head
        if config.get("mlp_bias"):
            rest += 2 * inner + hidden
    longest = config.get("max_position_embeddings", config.get("seq_length"))
    return ModelSizes(
        family=family,
        n_blocks=n_blocks,
        hidden_size=hidden,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_size=head,
        feed_forward=inner,
        vocabulary=number("vocab_size"),
        matrices=tuple(matrices),
        other_values=rest,
        cache_values=2 * kv_heads * head,
        max_tokens=longest if isinstance(longest, int) else None,
    )
