"""The tables of scenario files about models and hardware: ``[model]`` and ``[hardware.NAME]``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from testbed.experiments.fields import (
    Bytes,
    Name,
    Positive,
    Seconds,
    Table,
    Tokens,
    Weight,
    int_or,
)
from testbed.experiments.limits import (
    MAX_BLOCKS,
    MAX_HIDDEN_SIZE,
)


def _stored_as(value: Any) -> Any:
    return "int4" if value in ("awq", "gptq") else value


Dtype = Annotated[
    Literal["fp32", "fp16", "bf16", "int8", "nf4", "fp8", "mxfp4", "int4"], BeforeValidator(_stored_as)
]
"""How a block's weights are stored: int4 as AWQ and GPTQ do, which are other names of it.

Hidden states and caches are 16 bits wide with quantised weights.
"""


Count = Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)]
CountOrNone = Annotated[int, Field(ge=0, le=MAX_HIDDEN_SIZE)]


class ModelTable(Table):
    """``[model]``: the model that the servers hold, by ``profile`` name, by its sizes, or both.

    Sizes given here replace those of the profile.

    - ``n_blocks``: transformer blocks. ``hidden_size``: values in one token's hidden state.
    - ``value_bytes`` (default 2): bytes of one such value.
    - ``block_size``: weights of one block.
    - ``cache_per_token`` (default ``2 x hidden_size x value_bytes``): attention cache of one token in one
      block.
    - ``petals_cache_tokens`` (default 4096): tokens that PETALS reserves cache for, per block.

    ``family``, ``heads`` and ``vocab`` together with ``n_blocks`` and ``hidden_size`` describe the model
    fully: sizes that are left out are computed from them and ``dtype``, and a model with random weights (from
    ``seed``, default 0) can be made. ``kv_heads`` (default ``heads``), ``head_size`` (default
    ``hidden_size / heads``) and ``feed_forward`` (default: as usual in the family) are needed only where they
    differ from these defaults.

    - Mixtures: every token is sent to ``experts_per_token`` of ``experts``, which have
      ``expert_feed_forward`` (default ``feed_forward``), and to ``shared_experts`` (default 0) more. The first
      ``dense_blocks`` (default 0) are no mixtures; of the others, every ``experts_every``-th is (default 1).
    - MLA: the cache holds ``kv_rank + rope_size`` values per token. Keys have ``head_size`` values beside
      ``rope_size``, values ``value_size``, queries are made from ``q_rank``.
    - Sliding windows: caches hold the last ``window`` tokens, but for every ``full_every``-th block, which may
      have ``full_kv_heads`` and ``full_head_size`` of its own, and values equal to its keys
      (``full_shares_keys``).
    - ``dense_feed_forward`` is for a mixture's dense blocks, where ``feed_forward`` is the experts' (Llama 4).
    - For the bytes of a checkpoint: ``tied`` (the head is the embedding), ``head_norms`` (norms of queries
      and keys in the family glm4_moe), ``next_token_blocks`` (not served, to predict further tokens).
    """

    profile: str | None = None
    name: Name | None = None
    n_blocks: Annotated[int, Field(ge=1, le=MAX_BLOCKS)] | None = None
    hidden_size: Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)] | None = None
    value_bytes: Annotated[int, Field(ge=1, le=1024)] | None = None
    block_size: Bytes | None = None
    cache_per_token: Bytes | None = None
    petals_cache_tokens: Tokens | None = None
    family: (
        Literal[
            "bloom",
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma",
            "gemma2",
            "gemma3",
            "gemma3_text",
            "gemma4",
            "phi",
            "phi3",
            "mixtral",
            "qwen3_moe",
            "gpt_oss",
            "deepseek_v3",
            "glm4_moe",
            "llama4",
        ]
        | None
    ) = None
    dtype: Dtype | None = None
    heads: Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)] | None = None
    kv_heads: Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)] | None = None
    head_size: Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)] | None = None
    feed_forward: Annotated[int, Field(ge=1, le=MAX_HIDDEN_SIZE)] | None = None
    vocab: Annotated[int, Field(ge=2, le=MAX_HIDDEN_SIZE)] | None = None
    experts: Annotated[int, Field(ge=2, le=MAX_HIDDEN_SIZE)] | None = None
    experts_per_token: Count | None = None
    expert_feed_forward: Count | None = None
    shared_experts: CountOrNone | None = None
    dense_blocks: CountOrNone | None = None
    experts_every: Count | None = None
    dense_feed_forward: Count | None = None
    kv_rank: Count | None = None
    q_rank: Count | None = None
    rope_size: Count | None = None
    value_size: Count | None = None
    window: Tokens | None = None
    full_every: Count | None = None
    full_kv_heads: Count | None = None
    full_head_size: Count | None = None
    full_shares_keys: bool | None = None
    tied: bool | None = None
    head_norms: bool | None = None
    next_token_blocks: CountOrNone | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class MeasuredTable(Table):
    """``measured`` of a hardware profile: the model whose block was measured.

    ``block_values`` is the number of values in the matrices of one block, ``heads_width`` the width of all
    its heads together. A scenario whose model differs in one of these or in ``dtype`` gets a warning.
    """

    model: str
    dtype: Dtype
    block_values: Annotated[int, Field(ge=1)]
    heads_width: Annotated[int, Field(ge=1)]


class OtherBlocksTable(Table):
    """A row of ``other_blocks`` of a hardware profile: times of a kind of block that the model also has.

    The keys are those of the profile, which has the times of the model's largest blocks.
    """

    decode: Seconds
    prefill_base: Seconds
    prefill_per_token: Seconds
    context_slope: Seconds | None = None
    prefill_curve: Seconds | None = None
    session_slope: Seconds | None = None
    prefill_least: Seconds | None = None
    experts_read: Seconds | None = None
    experts_share: Annotated[float, Field(ge=0, le=1)] | None = None
    window: Tokens | None = None


class HardwareTable(Table):
    """``[hardware.NAME]``: memory and step times of one kind of server.

    Keys that are left out come from the profile ``base``; a NAME of a shipped profile changes that profile.
    ``memory`` holds blocks and attention caches. ``block_cap`` limits the blocks of one server, for policies
    that honour it; "none" removes the limit of ``base``.

    Step times (``policies.steps.StepLaw`` is the equation):

    - ``decode``: one token in one block, with an empty attention cache. ``context_slope`` more for each
      cached token.
    - Prefill of l tokens in one block: ``prefill_base + prefill_per_token * l + prefill_curve * l**2``, and
      at least ``prefill_least``.
    - ``step_base``: once per step, however many blocks the server holds.
    - ``contention``: while n other sessions compute, a step takes ``1 + n * contention`` times as long.
    - ``session_slope``: what each further session adds to one block of a step with
      ``batching = "continuous"``.
    - ``experts_read``: reading all experts of a block, of which a token chooses the share
      ``experts_share``; ``decode`` reads those of one token, ``prefill_least`` all.
    - ``window``: the block attends to the last so many tokens only.
    - ``other_blocks``: times of the model's other kinds of blocks, in the order of the model; without them
      all blocks take as long.

    ``context_slope``, ``prefill_curve``, ``prefill_least``, ``step_base``, ``contention``, ``session_slope``
    and ``experts_read`` are 0 by default. ``petals_forward_rps`` and ``petals_network_rps`` are the throughput
    that PETALS measures, in tokens per second; they are required only if PETALS places, routes or moves
    blocks. ``measured`` names the model that the times were measured with: a scenario with another model gets
    a warning.
    """

    base: str | None = None
    memory: Bytes | None = None
    decode: Seconds | None = None
    prefill_base: Seconds | None = None
    prefill_per_token: Seconds | None = None
    petals_forward_rps: Positive | None = None
    petals_network_rps: Positive | None = None
    block_cap: Annotated[int | Literal["none"], int_or("none", most=MAX_BLOCKS)] | None = None
    step_base: Seconds | None = None
    context_slope: Seconds | None = None
    prefill_curve: Seconds | None = None
    contention: Weight | None = None
    session_slope: Seconds | None = None
    prefill_least: Seconds | None = None
    experts_read: Seconds | None = None
    experts_share: Annotated[float, Field(ge=0, le=1)] | None = None
    window: Tokens | None = None
    other_blocks: list[OtherBlocksTable] | None = None
    measured: MeasuredTable | None = None
