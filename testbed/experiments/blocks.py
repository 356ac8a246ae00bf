"""Resolves ``[model]`` and ``[compute]``: sizes from a checkpoint or a family, and checks for real blocks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from nodes.blocks.memory import amount, prefill_bytes, step_bytes
from nodes.blocks.sizes import SIZES
from testbed.errors import UserError
from testbed.experiments.catalogue import (
    DTYPES,
    MORE,
    OF_REPRESENTATION,
    config_of,
    dtype_of,
    filled,
    sizes_of_table,
)
from testbed.experiments.checkpoints import checkpoint_sizes, find_checkpoint, read_config
from testbed.experiments.compute_tables import CacheTable, ComputeTable
from testbed.experiments.experiment import BlocksSettings
from testbed.experiments.families import MADE, MIXTURES, SIZED, VALUE_BYTES, ModelSizes, sizes_of
from testbed.experiments.model_tables import ModelTable
from testbed.experiments.problems import KeyedError
from testbed.experiments.profiles import profiled
from testbed.experiments.schema import Scenario

_log = logging.getLogger(__name__)


def resolve_blocks(
    scenario: Scenario, folder: Path
) -> tuple[ModelTable, ComputeTable, BlocksSettings | None]:
    """Return ``[model]`` with all sizes, ``[compute]`` with its defaults, and the settings of real blocks.

    Missing sizes come from the checkpoint ``compute.model``, or from the model's family. A relative
    ``compute.model`` is looked for in ``folder`` and then in the current folder. The settings are ``None``
    for the stub. Raises ``KeyedError`` for keys that contradict each other, and if a needed size or
    checkpoint is missing.
    """
    table, compute = scenario.model, scenario.compute
    is_real = compute.backend == "blocks"
    if is_real and scenario.time_scale != 1:
        raise KeyedError(
            ("time_scale",),
            f"is {scenario.time_scale:g}, but real blocks compute in real time; it must be 1 with "
            'compute.backend = "blocks"',
        )
    if compute.model is not None and compute.random_weights:
        raise KeyedError(
            ("compute", "random_weights"),
            "is only for a model without a checkpoint; leave out either this or compute.model",
        )
    full = profiled(table)
    dtype, weights = compute.dtype or "float32", compute.weights or "plain"
    if is_real:
        _check_dtype(table, dtype, weights)
    checkpoint: str | None = None
    config, sizes = None, None
    if compute.model is not None:
        try:
            checkpoint = find_checkpoint(compute.model, folder)
            config = read_config(checkpoint)
            sizes = checkpoint_sizes(config, checkpoint)
        except UserError as error:
            if not scenario.resolved:  # a stored run can be read without its checkpoint
                raise KeyedError(("compute", "model"), str(error)) from None
            checkpoint = compute.model
        else:
            full = _agreeing(full, sizes, checkpoint, scenario.resolved)
            full = full.model_copy(update={"dtype": full.dtype or table.dtype})
    elif is_real and (known := _known_config(full)) is not None:
        config, sizes = known, sizes_of(known)
    elif (made := config_of(full)) is not None:
        _check_heads(full)
        if is_real and full.family not in MADE:
            raise KeyedError(
                ("model", "family"),
                f'is "{full.family}", whose blocks cannot be computed without a checkpoint; use one of {", ".join(MADE)}, '
                'give a checkpoint with --model, or use compute.backend = "stub"',
            )
        _check_mixture(full)
        _check_latent(full)
        config, sizes = made, sizes_of(made, SIZED)
    elif is_real:
        raise KeyedError(
            ("compute",),
            "needs a model for real blocks: give a checkpoint with --model or compute.model, or give family, "
            "n_blocks, hidden_size, heads and vocab in [model] to make one",
        )
    if sizes is not None:
        if is_real:
            # A profile's byte sizes are those of its own dtype, but real blocks have compute.dtype.
            own = {key: getattr(table, key) for key in OF_REPRESENTATION if getattr(full, key) is not None}
            full = full.model_copy(update={**own, "dtype": None})
        held = (dtype, weights) if is_real or full.dtype is None else DTYPES[full.dtype]
        name = Path(checkpoint).name if checkpoint else f"{sizes.family}-{sizes.n_blocks}x{sizes.hidden_size}"
        full = filled(full, sizes, *held, name)
        if not (is_real or scenario.resolved):
            _warn_of_windows(full)
    if not is_real:
        return full, compute.model_copy(update={"model": checkpoint}), None
    if full.value_bytes != VALUE_BYTES[dtype]:
        raise KeyedError(
            ("model", "value_bytes"),
            f"is {full.value_bytes}, but values of compute.dtype {dtype} have {VALUE_BYTES[dtype]} bytes; "
            "leave it out",
        )
    if compute.cuda_graphs:
        _check_graphs(compute, scenario.cache)
    if compute.batching == "continuous":
        _check_batches(compute)
    if not scenario.resolved:
        _warn(compute, dtype)
    device = compute.device or "cpu"
    settings = BlocksSettings(
        checkpoint=checkpoint,
        config=config or {},
        random_weights=bool(compute.random_weights),
        seed=full.seed or 0,
        devices=(device,) if isinstance(device, str) else tuple(device),
        dtype=dtype,
        wire=scenario.network.wire,
        weights=weights,
        n_threads=compute.threads or 1,
        n_streams=compute.streams or 1,
        is_batched=compute.batching == "continuous",
        chunk_tokens=compute.chunk_tokens,
        has_graphs=bool(compute.cuda_graphs),
        verify=compute.verify is not False,
    )
    update = {
        "model": checkpoint,
        "random_weights": settings.random_weights,
        "device": device,
        "dtype": dtype,
        "weights": weights,
        "threads": settings.n_threads,
        "streams": settings.n_streams,
        "cuda_graphs": settings.has_graphs,
        "verify": settings.verify,
    }
    return full, compute.model_copy(update=update), settings


def check_steps(settings: BlocksSettings | None, n_tokens: int) -> None:
    """Raise ``KeyedError`` if a step with ``n_tokens`` cached needs more GPU memory than is set aside for it.

    Nothing is checked for the stub and for the CPU. The device "auto" is checked later, when it is known
    (``testbed.runtime.gpus``).
    """
    if (
        settings is None
        or not settings.config
        or all(device in ("cpu", "auto") for device in settings.devices)
    ):
        return
    sizes = checkpoint_sizes(settings.config, "the model")
    takes_bytes = step_bytes(
        sizes.n_heads, sizes.hidden_size, sizes.feed_forward, n_tokens, VALUE_BYTES[settings.dtype]
    )
    room_bytes = prefill_bytes(sizes.hidden_size, settings.n_streams)
    if takes_bytes > room_bytes:
        raise KeyedError(
            ("workload",),
            f"has a request of {n_tokens} tokens, input and output: one of its steps needs "
            f"{amount(takes_bytes)} of a GPU's memory, but a server sets aside {amount(room_bytes)}; make "
            "requests shorter",
        )


def _check_graphs(compute: ComputeTable, cache: CacheTable) -> None:
    """Raise ``KeyedError`` for streams (graphs share memory) and paged caches (graphs need fixed places)."""
    if (compute.streams or 1) > 1:
        raise KeyedError(
            ("compute", "streams"),
            f"is {compute.streams}, but with cuda_graphs a server computes one step at a time; leave "
            "streams out",
        )
    if cache.mode == "paged":
        raise KeyedError(
            ("compute", "cuda_graphs"),
            'is true, but a cache of mode "paged" moves when it grows, so that graphs would be recorded '
            'again for every page; use cache.mode = "reserved"',
        )


def _check_batches(compute: ComputeTable) -> None:
    """Raise ``KeyedError`` for several streams."""
    if (compute.streams or 1) > 1:
        raise KeyedError(
            ("compute", "streams"),
            f'is {compute.streams}, but with batching = "continuous" all waiting steps become one; leave '
            "streams out",
        )


def _warn(compute: ComputeTable, dtype: str) -> None:
    """Warn of graphs on a CPU, and of 16-bit types, whose tokens may differ in batches."""
    devices = compute.device if isinstance(compute.device, list) else [compute.device]
    if compute.cuda_graphs and all(device in (None, "cpu") for device in devices):
        _log.warning(
            "compute.cuda_graphs: a CPU records no graphs; it computes steps in the form that a GPU would record"
        )
    if compute.batching == "continuous" and dtype != "float32" and compute.verify is not False:
        _log.warning(
            'with compute.batching = "continuous" in %s, rounding depends on which sessions share a step: a '
            "text that differs from the whole model's for this reason is counted as altered; float32 gives "
            "the same tokens",
            dtype,
        )


def _known_config(table: ModelTable) -> dict[str, Any] | None:
    """Return the ``config.json`` data of the known model ``table.name``, with ``table.n_blocks`` blocks.

    ``None`` if no known model has that name, or if the table gives other sizes.
    """
    config = dict(SIZES.get(table.name or "", {}))
    if not config:
        return None
    if table.n_blocks is not None:
        config["n_layer" if "n_layer" in config else "num_hidden_layers"] = table.n_blocks
    return config if all(ours == theirs for _, ours, theirs in _compared(table, sizes_of(config))) else None


def _compared(table: ModelTable, sizes: ModelSizes) -> list[tuple[str, Any, Any]]:
    """Return (key, value in the table, value in ``sizes``) for every size key that the table gives."""
    pairs = {
        "family": sizes.family,
        "n_blocks": sizes.n_blocks,
        "hidden_size": sizes.hidden_size,
        "heads": sizes.n_heads,
        "kv_heads": sizes.n_kv_heads,
        "head_size": sizes.head_size,
        "feed_forward": sizes.feed_forward,
        "vocab": sizes.vocabulary,
        "experts": sizes.largest.n_experts,
        "experts_per_token": sizes.largest.n_chosen,
    }
    return [(key, ours, pairs[key]) for key in pairs if (ours := getattr(table, key)) is not None]


def _agreeing(table: ModelTable, sizes: ModelSizes, checkpoint: str, is_resolved: bool) -> ModelTable:
    """Return ``table`` without the sizes that contradict the checkpoint's; log that the latter are used.

    Raises ``KeyedError`` if the scenario is resolved: a stored run cannot be repeated with another
    checkpoint.
    """
    others = [(key, ours, theirs) for key, ours, theirs in _compared(table, sizes) if ours != theirs]
    if not others:
        return table
    if is_resolved:
        key, ours, theirs = others[0]
        raise KeyedError(
            ("model", key),
            f"is {ours}, but the checkpoint {checkpoint} has {theirs}; a run's own scenario.toml needs the "
            "checkpoint that it ran with",
        )
    said = ", ".join(f"{key} {theirs} (not {ours})" for key, ours, theirs in others)
    _log.warning("%s: the checkpoint's sizes are used: %s", checkpoint, said)
    left_out = [*(key for key, _, _ in others), "name", "profile", "dtype", *OF_REPRESENTATION, *MORE]
    return table.model_copy(update=dict.fromkeys(left_out))


def _check_dtype(table: ModelTable, dtype: str, weights: str) -> None:
    """Raise ``KeyedError`` if ``model.dtype`` contradicts ``compute.dtype`` and ``compute.weights``."""
    if table.dtype not in (None, dtype_of(dtype, weights)):
        raise KeyedError(
            ("model", "dtype"),
            f'is "{table.dtype}", but real blocks are computed in {dtype} with {weights} weights; leave it '
            "out, or change compute.dtype and compute.weights",
        )


def _check_mixture(table: ModelTable) -> None:
    """Raise ``KeyedError`` if a mixture's keys contradict each other, or lack the others."""
    assert table.n_blocks
    if table.experts is None:
        if table.family in MIXTURES:
            raise KeyedError(
                ("model", "experts"),
                f"is missing; give how many experts a block of family {table.family} has",
            )
        keys = ("experts_per_token", "expert_feed_forward", "shared_experts", "dense_blocks", "experts_every")
        for key in keys:
            if getattr(table, key):
                raise KeyedError(("model", key), "is of a mixture of experts; give model.experts, too")
        return
    if table.family not in MIXTURES:
        raise KeyedError(
            ("model", "experts"),
            f"is not for family {table.family}, whose blocks are no mixtures; use one of {', '.join(MIXTURES)}",
        )
    if table.experts_per_token is None:
        raise KeyedError(
            ("model", "experts_per_token"), "is missing; give how many experts a token is sent to"
        )
    if table.experts_per_token > table.experts:
        raise KeyedError(
            ("model", "experts_per_token"),
            f"is {table.experts_per_token}, more than the {table.experts} experts",
        )
    dense, every = table.dense_blocks or 0, table.experts_every or 1
    if dense >= table.n_blocks:
        raise KeyedError(
            ("model", "dense_blocks"),
            f"is {dense}, but must be below n_blocks {table.n_blocks}: at least one block must have experts",
        )
    if table.n_blocks // every * every <= dense:
        raise KeyedError(
            ("model", "experts_every"),
            f"is {every}, but must divide a number from {dense + 1} to {table.n_blocks}: at least one block must have "
            "experts",
        )


def _check_latent(table: ModelTable) -> None:
    """Raise ``KeyedError`` if the sizes of MLA are not all given, or none."""
    sizes = ("kv_rank", "q_rank", "rope_size", "value_size", "head_size")
    if table.kv_rank is None:
        return
    for key in sizes:
        if getattr(table, key) is None:
            raise KeyedError(("model", key), f"is missing; MLA (kv_rank) needs {', '.join(sizes)}")


def _warn_of_windows(table: ModelTable) -> None:
    """Warn that the caches of sliding windows are not limited to them."""
    sizes = sizes_of_table(table)
    assert sizes is not None
    windows = [block.window for block in sizes.blocks if block.window is not None]
    if windows:
        _log.warning(
            "%s of %s blocks of %s attend to the last %s tokens only; their steps read no more, but caches are "
            "kept for all tokens",
            len(windows),
            sizes.n_blocks,
            table.name,
            windows[0],
        )


def _check_heads(table: ModelTable) -> None:
    assert table.heads and table.hidden_size
    if table.family == "bloom":
        if table.kv_heads is not None:
            raise KeyedError(
                ("model", "kv_heads"),
                "is not for family bloom, which has as many key-value heads as heads; leave it out",
            )
        if table.head_size is not None:
            raise KeyedError(
                ("model", "head_size"),
                "is not for family bloom, whose heads have hidden_size / heads values; leave it out",
            )
        if table.feed_forward not in (None, 4 * table.hidden_size):
            raise KeyedError(
                ("model", "feed_forward"),
                f"is {table.feed_forward}, but family bloom has 4 x hidden_size; leave it out",
            )
    if table.head_size is None and table.kv_rank is None and table.hidden_size % table.heads:
        raise KeyedError(
            ("model", "heads"), f"is {table.heads}, but must divide hidden_size {table.hidden_size}"
        )
    if table.kv_heads is not None and table.heads % table.kv_heads:
        raise KeyedError(("model", "kv_heads"), f"is {table.kv_heads}, but must divide heads {table.heads}")
