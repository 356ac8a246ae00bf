"""``testbed model``: writes small checkpoints to try things with, and shows the sizes of models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testbed.errors import UserError
from testbed.experiments.checkpoints import (
    checkpoint_sizes,
    find_checkpoint,
    read_config,
    require_computable,
    require_stored,
    require_weights,
)
from testbed.experiments.families import MADE, VALUE_BYTES, make_config, sizes_of
from testbed.experiments.problems import unknown
from testbed.experiments.profiles import model_names
from testbed.experiments.units import counted
from testbed.inspect.hardware import model_command, of_blocks, one_or_all
from testbed.rundir import check_new_folder
from testbed.runtime.blocks import available_bytes, make_checkpoint, require_blocks

MIN_VOCABULARY = 260
"""A token for each of 256 bytes, and four special tokens."""


def make_tiny_command(
    folder: Path,
    family: str,
    n_layers: int,
    hidden_size: int,
    n_heads: int,
    vocabulary: int,
    seed: int,
    *,
    n_kv_heads: int | None,
    n_shards: int,
) -> tuple[dict[str, Any], str]:
    """Write a checkpoint to ``folder``; returns its sizes as JSON data and text. Raises ``UserError``."""
    require_blocks("testbed model make-tiny")
    if family not in MADE:
        raise UserError(f"--family {family}: choose one of {', '.join(MADE)}")
    if hidden_size % n_heads:
        raise UserError(f"--heads {n_heads} does not divide --hidden {hidden_size}: choose numbers that do")
    if family == "llama" and hidden_size // n_heads % 2:
        raise UserError(
            f"--heads {n_heads} with --hidden {hidden_size} makes heads of size {hidden_size // n_heads}; a "
            "llama needs an even size"
        )
    if n_kv_heads is not None and family != "llama":
        raise UserError(f"--kv-heads is for --family llama: leave it out (a {family} has as many as --heads)")
    if n_kv_heads is not None and n_heads % n_kv_heads:
        raise UserError(f"--kv-heads {n_kv_heads} does not divide --heads {n_heads}")
    if vocabulary < MIN_VOCABULARY:
        raise UserError(
            f"--vocab {vocabulary} is too small: {MIN_VOCABULARY} is the least, for 256 bytes and 4 "
            "special tokens"
        )
    config = make_config(family, n_layers, hidden_size, n_heads, vocabulary, n_kv_heads)
    sizes = sizes_of(config)
    n_bytes = n_layers * sizes.block_bytes("plain", 4) + 8.0 * vocabulary * hidden_size
    if n_bytes > available_bytes():
        raise UserError(
            f"a model of {n_bytes / 1e9:.3g} GB does not fit in this machine's memory: make it smaller, or "
            "run without a checkpoint (`testbed up --random-weights`)"
        )
    check_new_folder(folder, "DIR")
    make_checkpoint(folder, config, seed, n_shards)
    answer = show_answer(str(folder.absolute()), "float32", "plain")
    return answer, f"{folder}: {_line(answer)}"


def show_command(checkpoint: str, dtype: str | None, weights: str | None) -> tuple[dict[str, Any], str]:
    """Return the sizes of a checkpoint, or of a model by name, and the bytes of its blocks and caches.

    Returns the answer for ``--json`` and the text for people. Raises ``UserError``.
    """
    if not Path(checkpoint).is_dir() and "/" not in checkpoint:
        if checkpoint not in model_names():
            raise UserError(f"{unknown('model', checkpoint, model_names())}; or give a checkpoint's folder")
        if weights is not None:
            raise UserError(
                "--weights is for checkpoints; for a model by name give --dtype int8 or --dtype nf4"
            )
        return model_command(checkpoint, dtype)
    dtype, weights = dtype or "float32", weights or "plain"
    if dtype not in VALUE_BYTES:
        raise UserError(f"--dtype {dtype}: choose one of {', '.join(VALUE_BYTES)}")
    if weights not in ("plain", "int8", "nf4"):
        raise UserError(f"--weights {weights}: choose one of plain, int8, nf4")
    answer = show_answer(find_checkpoint(checkpoint, Path()), dtype, weights)
    lines = [f"{answer['checkpoint']}: {_line(answer)}"]
    if answer["problem"]:
        lines.append(f"its blocks cannot be loaded: {answer['problem']}")
    lines.append(f"per block, {dtype}, weights {weights}: {of_blocks(answer)}")
    return answer, "\n".join(lines)


def show_answer(checkpoint: str, dtype: str, weights: str) -> dict[str, Any]:
    """Return a checkpoint's sizes; ``block_bytes`` and ``cache_bytes_per_token`` as those of ``model_answer``.

    Raises ``UserError`` if the checkpoint cannot be read.
    """
    config = read_config(checkpoint)
    sizes = checkpoint_sizes(config, checkpoint)
    require_stored(config, weights)
    value_bytes = VALUE_BYTES[dtype]
    return {
        "checkpoint": checkpoint,
        "family": sizes.family,
        "n_blocks": sizes.n_blocks,
        "hidden_size": sizes.hidden_size,
        "n_heads": sizes.n_heads,
        "n_kv_heads": sizes.n_kv_heads,
        "vocabulary": sizes.vocabulary,
        "max_tokens": sizes.max_tokens,
        "dtype": dtype,
        "weights": weights,
        "block_bytes": one_or_all(sizes.blocks_bytes(weights, value_bytes)),
        "cache_bytes_per_token": one_or_all([block.cache_values * value_bytes for block in sizes.blocks]),
        "problem": _problem(checkpoint, config, sizes.n_blocks),
    }


def _problem(checkpoint: str, config: Mapping[str, Any], n_blocks: int) -> str | None:
    """Return why no server can hold the checkpoint's blocks, or None. Weights on the hub are not checked."""
    try:
        require_computable(config)
        if Path(checkpoint).is_absolute():
            require_weights(checkpoint, n_blocks)
    except UserError as error:
        return str(error)
    return None


def _line(answer: dict[str, Any]) -> str:
    heads = f"{answer['n_heads']} heads"
    if answer["n_kv_heads"] != answer["n_heads"]:
        heads += f" ({answer['n_kv_heads']} of keys and values)"
    return (
        f"{answer['family']}, {counted(answer['n_blocks'], 'blocks')}, hidden size {answer['hidden_size']}, "
        f"{heads}, {answer['vocabulary']} tokens"
    )
