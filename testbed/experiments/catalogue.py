"""GPUs and models by name: ``scenarios/profiles/{gpus,sizes}.toml`` and ``nodes.blocks.sizes``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from nodes.blocks.sizes import SIZES
from testbed.experiments.families import SIZED, VALUE_BYTES, ModelSizes, make_config, sizes_of
from testbed.experiments.model_tables import Dtype, ModelTable
from testbed.experiments.units import SIZE

DTYPES: Mapping[Dtype, tuple[str, str]] = {
    "fp32": ("float32", "plain"),
    "fp16": ("float16", "plain"),
    "bf16": ("bfloat16", "plain"),
    "int8": ("bfloat16", "int8"),
    "nf4": ("bfloat16", "nf4"),
    "fp8": ("bfloat16", "fp8"),
    "mxfp4": ("bfloat16", "mxfp4"),
    "int4": ("bfloat16", "int4"),
}
"""For each ``dtype`` of a model: (type of hidden states and caches, how matrices are stored)."""
OF_REPRESENTATION = ("value_bytes", "block_size", "cache_per_token")
"""The sizes in ``[model]`` that depend on ``dtype``."""


@dataclass(frozen=True)
class Gpu:
    """A GPU's data sheet. ``flops`` are dense operations per second by type (fp32, fp16, bf16).

    ``power_w`` is the most power that it needs; a slice of a GPU has none of its own.
    """

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops: Mapping[str, float]
    source: str
    power_w: float | None = None


@cache
def shipped(kind: str) -> dict[str, dict[str, Any]]:
    """Return the data of ``scenarios/profiles/KIND.toml``."""
    text = (resources.files("scenarios") / "profiles" / f"{kind}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def gpus() -> Mapping[str, Gpu]:
    """Return every GPU, and every MIG slice of one, by name."""
    found: dict[str, Gpu] = {}
    for name, row in shipped("gpus").items():
        if "of" not in row:
            flops = {t: row[f"{t}_tflops"] * 1e12 for t in ("fp32", "fp16", "bf16") if f"{t}_tflops" in row}
            memory = SIZE.parse(row["memory"])
            found[name] = Gpu(
                name, memory, row["bandwidth_gbps"] * 1e9, flops, row["source"], row.get("power_w")
            )
            continue
        whole, share = found[row["of"]], row["eighths"] / 8
        found[name] = Gpu(
            name,
            whole.memory_bytes * share,
            whole.bandwidth_bytes_per_s * share,
            {t: rate * row["sms"] / row["of_sms"] for t, rate in whole.flops.items()},
            f"{row['source']}, of {whole.source}",
        )
    return found


_WITH_MEMORY = re.compile(r"(?P<gpu>.+?)-(?P<gigabytes>\d+)gb(?P<form>-.+)?")


def gpu_named(name: str) -> Gpu | None:
    """Return a GPU by name, also by one that adds the memory that it has (``h100-80gb``); ``None`` if unknown."""
    if name in gpus():
        return gpus()[name]
    parts = _WITH_MEMORY.fullmatch(name)
    gpu = None if parts is None else gpus().get(parts["gpu"] + (parts["form"] or ""))
    is_same = parts is not None and gpu is not None and gpu.memory_bytes == 1e9 * int(parts["gigabytes"])
    return gpu if is_same else None


@cache
def models() -> Mapping[str, ModelTable]:
    """Return every model of known sizes by name, with the ``dtype`` that it was published in."""
    tables = shipped("sizes")
    found = {name: _table(SIZES[name], dtype) for name, dtype in tables["published"].items()}
    for name, row in tables["sizes"].items():
        found[name] = ModelTable.model_validate(row)
    return {name: _as_petals(found[name]) for name in sorted(found)}


def _table(config: Mapping[str, Any], dtype: Any) -> ModelTable:
    return ModelTable(dtype=dtype, **_keys_of(sizes_of(config)))


def _as_petals(table: ModelTable) -> ModelTable:
    """Set PETALS' cache reservation to 16,384 tokens where heads share keys and values (else 4,096)."""
    return table if table.kv_heads is None else table.model_copy(update={"petals_cache_tokens": 16384})


def _keys_of(sizes: ModelSizes) -> dict[str, Any]:
    """Return ``sizes`` as keys of ``[model]``; a key that follows from others is ``None``."""
    is_even = sizes.head_size * sizes.n_heads == sizes.hidden_size
    # MLA's head size in [model] is without the part of the position.
    is_even = is_even or sizes.value_size != sizes.head_size
    block = sizes.largest
    inner = block.expert[0][0] if block.expert else sizes.feed_forward
    experts_every = _every([one.n_experts > 0 for one in sizes.blocks])
    windows = {one.window for one in sizes.blocks if one.window}
    full_every = _every([one.window is None for one in sizes.blocks])
    has_windows = windows and (full_every or block.window)
    return {
        "family": sizes.family,
        "n_blocks": sizes.n_blocks,
        "hidden_size": sizes.hidden_size,
        "heads": sizes.n_heads,
        "kv_heads": sizes.n_kv_heads if sizes.n_kv_heads != sizes.n_heads else None,
        "head_size": None if is_even else sizes.head_size,
        "feed_forward": sizes.feed_forward,
        "vocab": sizes.vocabulary,
        # A pattern that no key states is left out: all blocks are as the largest.
        "experts": block.n_experts or None,
        "experts_per_token": block.n_chosen or None,
        "expert_feed_forward": inner if inner != sizes.feed_forward else None,
        "experts_every": experts_every if experts_every != 1 else None,
        "window": max(windows) if has_windows else None,
        "full_every": full_every if has_windows else None,
    }


def _every(marks: Sequence[bool]) -> int | None:
    """Return the n of which every n-th block, and no other, is marked; ``None`` if there is none."""
    every = marks.index(True) + 1 if True in marks else 0
    return every if every and all(mark == (not n % every) for n, mark in enumerate(marks, 1)) else None


MORE = {
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_feed_forward": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
    "dense_blocks": "first_k_dense_replace",
    "experts_every": "interleave_moe_layer_step",
    "dense_feed_forward": "intermediate_size_mlp",
    "kv_rank": "kv_lora_rank",
    "q_rank": "q_lora_rank",
    "rope_size": "qk_rope_head_dim",
    "value_size": "v_head_dim",
    "window": "sliding_window",
    "full_every": "sliding_window_pattern",
    "full_kv_heads": "num_global_key_value_heads",
    "full_head_size": "global_head_dim",
    "full_shares_keys": "attention_k_eq_v",
    "tied": "tie_word_embeddings",
    "head_norms": "use_qk_norm",
    "next_token_blocks": "num_nextn_predict_layers",
}
"""The names in ``config.json`` of keys of ``[model]`` that not every model has."""


def config_of(table: ModelTable) -> dict[str, Any] | None:
    """Return the data of a ``config.json`` with the table's sizes; ``None`` if a needed size is missing."""
    if not (table.family and table.n_blocks and table.hidden_size and table.heads and table.vocab):
        return None
    more = {theirs: value for ours, theirs in MORE.items() if (value := getattr(table, ours)) is not None}
    if table.kv_rank is not None and table.head_size is not None:
        more["qk_nope_head_dim"] = table.head_size
    return make_config(
        table.family,
        table.n_blocks,
        table.hidden_size,
        table.heads,
        table.vocab,
        table.kv_heads,
        feed_forward=table.feed_forward,
        head_size=table.head_size,
        more=more,
    )


def sizes_of_table(table: ModelTable) -> ModelSizes | None:
    """Return all sizes that follow from a table; ``None`` if a needed size is missing."""
    config = config_of(table)
    return None if config is None else sizes_of(config, SIZED)


def dtype_of(values: str, weights: str) -> Dtype:
    """Return ``model.dtype`` for hidden states of type ``values`` and matrices stored as ``weights``."""
    plain: dict[str, Dtype] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    quantised: dict[str, Dtype] = {
        "int8": "int8",
        "nf4": "nf4",
        "fp8": "fp8",
        "mxfp4": "mxfp4",
        "int4": "int4",
    }
    return plain[values] if weights == "plain" else quantised[weights]


def filled(table: ModelTable, sizes: ModelSizes, values: str, weights: str, name: str) -> ModelTable:
    """Return ``table`` with missing keys filled in from ``sizes``, byte sizes included.

    ``values`` is the type of hidden states and caches ("float32", ...), ``weights`` how matrices are stored.
    """
    value_bytes = VALUE_BYTES[values]
    keys = {
        "name": name,
        **_keys_of(sizes),
        "dtype": dtype_of(values, weights),
        "value_bytes": value_bytes,
        "block_size": sizes.block_bytes(weights, value_bytes),
        "cache_per_token": float(sizes.cache_values * value_bytes),
    }
    left_out = {key: value for key, value in keys.items() if getattr(table, key) is None}
    return table.model_copy(update={"profile": None, **left_out})
