"""Sizes of a model from its ``config.json``, for the model families that are known here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from testbed.experiments.limits import MAX_BLOCKS, MAX_HIDDEN_SIZE

MADE = ("bloom", "llama")
"""Families of which small checkpoints and random weights are made from sizes alone."""
FAMILIES = (
    *(*MADE, "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3"),
    *("mixtral", "qwen3_moe", "gpt_oss"),
)
"""Families whose blocks can be computed (``nodes.blocks.family``)."""
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "llama4")
"""Families whose blocks may be mixtures of experts."""
SIZED = tuple(dict.fromkeys((*FAMILIES, "gemma3", "gemma4", *MIXTURES)))
"""Families whose sizes are known. All but BLOOM and Phi are built like Llama."""
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MAX_TOKENS = 2048
_SCALED_ROWS = 128
"""FP8 has a scale for each square of so many rows and columns, int4 one for so many values of a row."""
_MXFP4_VALUES = 32
"""Values with one scale in MXFP4."""
_EVERY_FULL = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2}
"""Every how many-th block attends to all tokens where a configuration with a window does not say (transformers 5.23)."""

Matrices = tuple[tuple[int, int], ...]


class ConfigError(Exception):
    """A needed size in ``config.json`` is missing or wrong.

    The message is a sentence that follows the file's name.
    """


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of one transformer block.

    ``matrices`` are the shapes (outputs, inputs) of the matrices that every token is multiplied with,
    ``other_values`` the number of its other weights. ``cache_values`` is the number of values that one token
    has in the attention cache: 2 x key-value heads x head size, or the latent vector of MLA. The cache holds
    no more than ``window`` tokens, if that is given.

    A mixture has ``n_experts`` experts with the matrices ``expert``, and ``expert_values`` other weights
    each. A token is multiplied with ``n_chosen`` of them, which the matrix ``router`` chooses.
    ``float32_values`` are weights in 32 bits, whatever the type of the others. ``head_size`` is given where
    it is not the model's.
    """

    matrices: Matrices
    other_values: int
    cache_values: int
    window: int | None = None
    router: tuple[int, int] = (0, 0)
    n_experts: int = 0
    n_chosen: int = 0
    expert: Matrices = ()
    expert_values: int = 0
    float32_values: int = 0
    head_size: int | None = None

    @property
    def active_values(self) -> int:
        """The number of values in the matrices that one token is multiplied with."""
        return _n_values(self.matrices) + _n_values((self.router,)) + self.n_chosen * _n_values(self.expert)

    @property
    def matrix_values(self) -> int:
        """The number of values in all matrices."""
        return _n_values(self.matrices) + _n_values((self.router,)) + self.n_experts * _n_values(self.expert)

    def n_bytes(self, weights: str, value_bytes: int) -> float:
        """Return the bytes of the block: matrices stored as ``weights``, the rest in ``value_bytes``.

        The router is not quantised, nor is anything but the experts of a mixture in MXFP4.
        """
        experts_bytes = self.n_experts * self.expert_bytes(weights, value_bytes)
        return self.shared_bytes(weights, value_bytes) + experts_bytes

    def active_bytes(self, weights: str, value_bytes: int) -> float:
        """Return the bytes that one token reads: all but the experts that it does not choose."""
        chosen_bytes = self.n_chosen * self.expert_bytes(weights, value_bytes)
        return self.shared_bytes(weights, value_bytes) + chosen_bytes

    def shared_bytes(self, weights: str, value_bytes: int) -> float:
        """Return the bytes of all but the experts."""
        stored = "plain" if weights == "mxfp4" and self.n_experts else weights
        matrices = sum(_matrix_bytes(stored, *matrix, value_bytes) for matrix in self.matrices)
        n_others = self.other_values + _n_values((self.router,))
        return float(matrices + n_others * value_bytes + 4 * self.float32_values)

    def expert_bytes(self, weights: str, value_bytes: int) -> float:
        """Return the bytes of one expert."""
        matrices = sum(_matrix_bytes(weights, *matrix, value_bytes) for matrix in self.expert)
        return float(matrices + self.expert_values * value_bytes)


def _n_values(matrices: Matrices) -> int:
    return sum(rows * columns for rows, columns in matrices)


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model.

    ``blocks`` has the sizes of every block. ``value_size`` is the size of a head's values, which MLA has
    beside ``head_size`` of its keys. ``is_tied``: the head is the embedding. ``outer_values`` are the weights
    outside blocks that are neither embedding nor head. ``next_token_values`` are those of the blocks that a
    checkpoint carries to predict further tokens, which are not served: (stored like the last block, others).
    ``max_tokens`` is the longest sequence that the model was made for, ``None`` if unknown.
    """

    family: str
    n_blocks: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    value_size: int
    feed_forward: int
    vocabulary: int
    blocks: tuple[BlockSizes, ...]
    max_tokens: int | None
    is_tied: bool = False
    outer_values: int = 0
    n_next_token_blocks: int = 0

    @property
    def largest(self) -> BlockSizes:
        """The block with the most bytes; of several, the first whose cache is not limited by a window."""
        return max(self.blocks, key=lambda block: (block.matrix_values, block.window is None))

    @property
    def kinds(self) -> tuple[BlockSizes, ...]:
        """The different blocks: the largest, then the others in the order of the model."""
        return tuple(dict.fromkeys((self.largest, *self.blocks)))

    @property
    def pattern(self) -> tuple[int, ...]:
        """For every block its index in ``kinds``; empty if all are alike."""
        numbers = {block: number for number, block in enumerate(self.kinds)}
        return () if self.are_alike else tuple(numbers[block] for block in self.blocks)

    @property
    def are_alike(self) -> bool:
        """Whether all blocks have the same sizes."""
        return len(set(self.blocks)) == 1

    @property
    def matrices(self) -> Matrices:
        return self.largest.matrices

    @property
    def cache_values(self) -> int:
        """The number of values that a token has in the attention cache of a block, the most of any block."""
        return max(block.cache_values for block in self.blocks)

    def block_bytes(self, weights: str, value_bytes: int) -> float:
        """Return s_m, the bytes of the largest block."""
        return max(block.n_bytes(weights, value_bytes) for block in set(self.blocks))

    def blocks_bytes(self, weights: str, value_bytes: int) -> tuple[float, ...]:
        """Return the bytes of every block."""
        known = {block: block.n_bytes(weights, value_bytes) for block in set(self.blocks)}
        return tuple(known[block] for block in self.blocks)

    def checkpoint_bytes(self, weights: str, value_bytes: int) -> float:
        """Return the bytes of all tensors of a checkpoint whose blocks are stored as ``weights``."""
        vocabulary = self.vocabulary * self.hidden_size
        n_others = vocabulary * (1 if self.is_tied else 2) + self.outer_values
        next_token_bytes = 0.0
        if self.n_next_token_blocks:
            # Each also has an embedding and a head of its own, a matrix for two hidden states, and 3 norms.
            own = 2 * vocabulary + 2 * self.hidden_size**2 + 3 * self.hidden_size
            next_token_bytes = self.blocks[-1].n_bytes(weights, value_bytes) + own * value_bytes
        return (
            sum(self.blocks_bytes(weights, value_bytes))
            + n_others * value_bytes
            + self.n_next_token_blocks * next_token_bytes
        )

    def active_bytes(self, weights: str, value_bytes: int) -> float:
        """Return the bytes of weights that the decode of one token reads: of all blocks, and the head."""
        known = {block: block.active_bytes(weights, value_bytes) for block in set(self.blocks)}
        return sum(known[block] for block in self.blocks) + self.vocabulary * self.hidden_size * value_bytes


def _matrix_bytes(weights: str, n_rows: int, n_columns: int, value_bytes: int) -> int:
    """Return the bytes of a matrix; ``nodes.blocks.quantised`` (it imports torch) stores int8 and nf4 so."""
    n_values = n_rows * n_columns
    if weights == "int8":  # a scale per row
        return n_values + 4 * n_rows
    if weights == "nf4":  # a scale per 64 values in 8 bits, one of these per 256, and three tables
        n_scales = -(-n_values // 64)
        return -(-n_values // 2) + n_scales + 4 * -(-n_scales // 256) + 4 * (16 + 256 + 1)
    if weights == "fp8":  # a scale in 32 bits per 128 x 128 values
        return n_values + 4 * -(-n_rows // _SCALED_ROWS) * -(-n_columns // _SCALED_ROWS)
    if weights == "mxfp4":  # a scale in 8 bits per 32 values
        return n_rows * -(-n_columns // _MXFP4_VALUES) * (_MXFP4_VALUES // 2 + 1)
    if weights == "int4":  # a scale in 16 bits and a zero point in 4 bits per 128 values
        n_groups = n_rows * -(-n_columns // _SCALED_ROWS)
        return -(-n_values // 2) + 2 * n_groups + -(-n_groups // 2)
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
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return ``config.json`` data for these sizes; ``more`` are further keys of it.

    BLOOM ignores the last four, since its sizes follow from the others.
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
        **(more or {}),
    }


class _Config:
    """Reads whole numbers from the data of a ``config.json``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def number(self, *names: str, default: int | None = None, most: int = MAX_HIDDEN_SIZE) -> int:
        """Return the first of ``names`` that is there, else ``default``.

        Raises ``ConfigError``, also for a number above ``most``.
        """
        for name in names:
            value = self._config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most:
                return value
            if value is not None and not (value == 0 and default == 0 and not isinstance(value, bool)):
                raise ConfigError(f"has {name} = {value!r}, which must be a whole number from 1 to {most:,}")
        if default is None:
            raise ConfigError(f"does not have {names[0]}")
        return default

    def has(self, name: str, default: bool = False) -> bool:
        return bool(self._config.get(name, default))

    def window(self, number: int) -> int | None:
        """Return how many tokens block ``number`` attends to; ``None`` for all."""
        window = self.number("sliding_window", default=0) or None
        kinds = self._config.get("layer_types")
        if isinstance(kinds, list) and number < len(kinds):
            return window if kinds[number] == "sliding_attention" else None
        usual = _EVERY_FULL.get(str(self._config.get("model_type")), 0)
        pattern = self.number("sliding_window_pattern", default=usual)
        is_full = number < self.number("max_window_layers", default=0) or (
            pattern and (number + 1) % pattern == 0
        )
        return window if self.has("use_sliding_window", True) and not is_full else None

    def is_mixture(self, number: int) -> bool:
        """Return whether block ``number`` of a model with experts has them."""
        every = self.number("interleave_moe_layer_step", "decoder_sparse_step", default=1)
        dense = self._config.get("mlp_only_layers")
        is_listed = isinstance(dense, list) and number in dense
        return (
            number >= self.number("first_k_dense_replace", default=0)
            and (number + 1) % every == 0
            and not is_listed
        )


def sizes_of(config: Mapping[str, Any], families: tuple[str, ...] = FAMILIES) -> ModelSizes:
    """Return the sizes in ``config``, under any of their usual names.

    Raises ``ConfigError`` for a size that is missing or wrong, and for a model of none of the ``families``.
    """
    family = config.get("model_type")
    if family not in families:
        raise ConfigError(
            f"has model_type {family!r}, which is not supported; it must be {' or '.join(families)}"
        )
    read = _Config(config)
    n_blocks = read.number("num_hidden_layers", "n_layer", most=MAX_BLOCKS)
    kinds = config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) >= n_blocks):
        raise ConfigError(
            f"has layer_types = {kinds!r}, which must list the kind of each of its {n_blocks} blocks"
        )
    hidden = read.number("hidden_size", "n_embed")
    heads = read.number("num_attention_heads", "n_head")
    kv_heads = read.number("num_key_value_heads", default=heads) if family != "bloom" else heads
    head = read.number("head_dim", default=hidden // heads) if family != "bloom" else hidden // heads
    if heads % kv_heads:
        raise ConfigError(f"has num_key_value_heads = {kv_heads}, which must divide its {heads} heads")
    inner = 4 * hidden if family == "bloom" else read.number("intermediate_size")
    longest = config.get("max_position_embeddings", config.get("seq_length"))
    value_size = read.number("v_head_dim", default=head)
    if read.has("kv_lora_rank"):
        head = read.number("qk_nope_head_dim") + read.number("qk_rope_head_dim")
    if family == "bloom":
        matrices = ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden))
        blocks = (BlockSizes(matrices, 13 * hidden, 2 * hidden),) * n_blocks
    else:
        blocks = tuple(_block(read, str(family), number) for number in range(n_blocks))
    return ModelSizes(
        family=family,
        n_blocks=n_blocks,
        hidden_size=hidden,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_size=head,
        value_size=value_size,
        feed_forward=inner,
        vocabulary=read.number("vocab_size"),
        blocks=blocks,
        max_tokens=longest if isinstance(longest, int) else None,
        is_tied=family == "bloom" or read.has("tie_word_embeddings"),
        outer_values=4 * hidden if family == "bloom" else hidden,
        n_next_token_blocks=read.number("num_nextn_predict_layers", default=0),
    )


def _block(read: _Config, family: str, number: int) -> BlockSizes:
    """Return the sizes of block ``number`` of a model that is built like Llama. Raises ``ConfigError``."""
    hidden = read.number("hidden_size")
    window = read.window(number)
    is_full = window is None
    attention, others, cache_values = _attention(read, family, is_full)
    n_norms = 4 if family in ("gemma2", "gemma3", "gemma3_text", "gemma4") else 2  # Phi's one norm has a bias
    others += n_norms * hidden + (family == "gemma4")  # Gemma 4 scales the block's output by one value
    if read.has("mlp_bias"):
        others += 2 * read.number("intermediate_size") + hidden
    wide = read.number("global_head_dim", default=0) if is_full else 0
    if family == "phi":
        others += read.number("intermediate_size") + hidden
    sizes = BlockSizes(attention, others, cache_values, window, head_size=wide or None)
    n_experts = read.number("num_experts", "num_local_experts", "n_routed_experts", default=0)
    if not n_experts or not read.is_mixture(number):
        inner = read.number("intermediate_size_mlp", "intermediate_size")
        return replace(sizes, matrices=(*attention, *_feed_forward(hidden, inner, family)))
    n_chosen = read.number("num_experts_per_tok")
    if n_chosen > n_experts:
        raise ConfigError(f"has num_experts_per_tok = {n_chosen}, more than its {n_experts} experts")
    inner = read.number("moe_intermediate_size", "intermediate_size")
    n_shared = read.number("n_shared_experts", default=0)
    has_biases = family == "gpt_oss"
    return replace(
        sizes,
        matrices=(*attention, *(_feed_forward(hidden, n_shared * inner) if n_shared else ())),
        other_values=others + (n_experts if has_biases else 0),
        router=(n_experts, hidden),
        n_experts=n_experts,
        n_chosen=n_chosen,
        expert=_feed_forward(hidden, inner),
        expert_values=2 * inner + hidden if has_biases else 0,
        # What corrects the router's choice, for each expert.
        float32_values=n_experts if family in ("deepseek_v3", "glm4_moe") else 0,
    )


def _feed_forward(hidden: int, inner: int, family: str = "llama") -> Matrices:
    if family == "phi":
        return (inner, hidden), (hidden, inner)
    if family == "phi3":  # gate and up from one matrix
        return (2 * inner, hidden), (hidden, inner)
    return (inner, hidden), (inner, hidden), (hidden, inner)


def _attention(read: _Config, family: str, is_full: bool) -> tuple[Matrices, int, int]:
    """Return the attention's matrices, the number of its other weights, and its values in the cache."""
    hidden, heads = read.number("hidden_size"), read.number("num_attention_heads")
    if read.has("kv_lora_rank"):
        latent, rope = read.number("kv_lora_rank"), read.number("qk_rope_head_dim")
        query, nope, value = (read.number(n) for n in ("q_lora_rank", "qk_nope_head_dim", "v_head_dim"))
        matrices: Matrices = (
            (query, hidden),
            (heads * (nope + rope), query),
            (latent + rope, hidden),
            (heads * (nope + value), latent),
            (hidden, heads * value),
        )
        return matrices, query + latent, latent + rope
    kv_heads = read.number("num_key_value_heads", default=heads)
    head = read.number("head_dim", default=hidden // heads)
    n_projected = 2
    if is_full and read.has("global_head_dim"):
        head = read.number("global_head_dim")
        kv_heads = read.number("num_global_key_value_heads", default=kv_heads)
        n_projected = 1 if read.has("attention_k_eq_v") else 2  # values are the projected keys
    matrices = ((heads * head, hidden), *n_projected * [(kv_heads * head, hidden)], (hidden, heads * head))
    if family == "phi3":  # queries, keys and values from one matrix
        matrices = (((heads + 2 * kv_heads) * head, hidden), (hidden, heads * head))
    others = 0
    has_biases = family == "phi" or read.has("attention_bias", family == "gpt_oss")
    if has_biases and family != "glm4_moe":
        others += head * (heads + 2 * kv_heads) + hidden
    if family in ("qwen2", "glm4_moe"):  # biases of queries, keys and values
        others += head * (heads + 2 * kv_heads)
    if family == "gpt_oss":  # a sink for each head
        others += heads
    if family == "phi" and read.has("qk_layernorm"):
        others += 4 * head
    if family in ("qwen3", "qwen3_moe", "gemma3", "gemma3_text", "gemma4") or (
        family == "glm4_moe" and read.has("use_qk_norm")
    ):
        others += 2 * head  # norms of queries and keys
    return matrices, others, 2 * kv_heads * head
