"""The backend that is calibrated: real blocks of a model, opened as a server opens them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nodes.blocks.spec import BlocksSpec, WeightSource
from nodes.compute import Compute, ComputeError
from testbed.calibrate.memory import MemorySample
from testbed.calibrate.plan import Plan
from testbed.errors import UserError

_VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_MAX_TOKENS_KEYS = ("max_position_embeddings", "seq_length", "n_positions")
_BLOCKS_KEYS = ("num_hidden_layers", "n_layer")
_HIDDEN_KEYS = ("hidden_size", "n_embed")
CLIENT = "calibration"


@dataclass(frozen=True)
class Source:
    """A model folder's configuration, as far as a calibration needs it. ``max_tokens`` ``None``: no limit known."""

    folder: Path
    config: Mapping[str, Any]
    family: str
    n_blocks: int
    hidden_size: int
    max_tokens: int | None


def read_source(folder: Path) -> Source:
    """The model in ``folder``. Raises ``UserError``."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({os.strerror(error.errno or 0)}); give a model's folder with --model, "
            "for example one made by `testbed model make-tiny`"
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is no model's configuration: it must be a JSON object")

    def first(keys: tuple[str, ...]) -> int | None:
        found = (config.get(key) for key in keys)
        return next((n for n in found if isinstance(n, int) and not isinstance(n, bool) and n > 0), None)

    n_blocks, hidden_size = first(_BLOCKS_KEYS), first(_HIDDEN_KEYS)
    for value, keys in ((n_blocks, _BLOCKS_KEYS), (hidden_size, _HIDDEN_KEYS)):
        if value is None:
            raise UserError(f"{path} has no {keys[0]}; is it the configuration of a transformer?")
    assert n_blocks is not None and hidden_size is not None
    family = str(config.get("model_type", "unknown"))
    return Source(folder, config, family, n_blocks, hidden_size, first(_MAX_TOKENS_KEYS))


def default_dtype(config: Mapping[str, Any]) -> str:
    """The model's own, where it is one that is served; else float32."""
    own = config.get("dtype", config.get("torch_dtype"))
    return own if own in _VALUE_BYTES else "float32"


def open_blocks(source: Source, device: str, dtype: str, n_threads: int, *, random_weights: bool) -> Compute:
    """The backend without any blocks yet. Raises ``UserError``; without torch it says what to install."""
    if dtype not in _VALUE_BYTES:
        raise UserError(f'--dtype must be one of {", ".join(_VALUE_BYTES)}, not "{dtype}"')
    folder = None if random_weights else str(source.folder)
    spec = BlocksSpec(WeightSource(source.config, folder), device=device, dtype=dtype, n_threads=n_threads)
    try:
        from nodes.blocks.compute import BlocksCompute  # brings torch
    except ModuleNotFoundError as error:
        raise UserError(
            f"real blocks need {error.name}, which is not installed: pip install 'testbed[blocks]'"
        ) from None
    try:
        return BlocksCompute(spec)
    except ComputeError as error:
        raise UserError(str(error)) from None


def hidden_states(n_tokens: int, hidden_size: int, dtype: str) -> bytes:
    """Hidden states ``[n_tokens, hidden_size]`` on the wire: normally distributed, always the same."""
    values = np.random.default_rng(n_tokens).standard_normal((n_tokens, hidden_size), dtype=np.float32)
    if dtype == "float32":
        return values.tobytes()
    if dtype == "float16":
        return values.astype(np.float16).tobytes()
    # numpy has no bfloat16: it is the upper half of a float32.
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


async def measure_memory(compute: Compute, plan: Plan) -> list[MemorySample]:
    """What blocks take, and sessions on the most of them. Leaves ``plan.max_blocks`` blocks loaded."""
    samples = []
    for n_blocks in plan.memory_blocks:
        await compute.host(0, n_blocks)
        samples.append(_used(compute, n_blocks, 0, plan.memory_tokens))
    most = plan.max_blocks
    await compute.host(0, most)
    sessions: list[Any] = []
    try:
        for n_sessions in plan.memory_sessions:
            while len(sessions) < n_sessions:
                sessions.append(compute.new_session(CLIENT, 0, most, plan.memory_tokens))
            if n_sessions:
                samples.append(_used(compute, most, n_sessions, plan.memory_tokens))
    finally:
        for session in sessions:
            compute.close_session(session)
    return samples


def _used(compute: Compute, n_blocks: int, n_sessions: int, session_tokens: int) -> MemorySample:
    used = compute.memory()
    n_bytes = used.get("blocks_bytes", 0.0) + used.get("cache_bytes", 0.0)
    return MemorySample(n_blocks, n_sessions, session_tokens, n_bytes)
