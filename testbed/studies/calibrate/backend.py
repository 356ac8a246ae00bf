"""The backend that is calibrated: real blocks of a model, opened as a server opens them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nodes.blocks.sizes import SIZES
from nodes.blocks.spec import BlocksSpec, Weights, WeightSource
from nodes.compute import Compute, ComputeError, open_session
from nodes.hub import HubModel
from testbed.errors import UserError
from testbed.experiments.catalogue import config_of
from testbed.experiments.checkpoints import (
    checkpoint_folder,
    checkpoint_sizes,
    find_checkpoint,
    read_config,
    require_computable,
    require_weights,
)
from testbed.experiments.families import FAMILIES, VALUE_BYTES, ModelSizes
from testbed.experiments.model_tables import ModelTable
from testbed.experiments.problems import KeyedError
from testbed.experiments.profiles import profiled
from testbed.runtime.blocks import require_blocks
from testbed.studies.calibrate.measure import CLIENT
from testbed.studies.calibrate.memory import MemorySample
from testbed.studies.calibrate.plan import Plan

WEIGHTS: tuple[Weights, ...] = ("plain", "int8", "nf4")


if TYPE_CHECKING:
    from nodes.blocks.compute import BlocksCompute


@dataclass(frozen=True)
class Source:
    """A model: its name, its ``config.json``, the sizes that this states, and its weights."""

    name: str
    config: Mapping[str, Any]
    sizes: ModelSizes
    weights: WeightSource


def read_source(model: str, *, random_weights: bool) -> Source:
    """Returns the model that ``--model`` names: a checkpoint's folder, or a name on the Hugging Face hub.

    With ``random_weights`` it can also be the name of a shipped model profile. Raises ``UserError`` if there
    is no such model, or if its blocks cannot be computed.
    """
    if random_weights and not Path(model).is_dir() and "/" not in model:
        config: Mapping[str, Any] = _profile_config(model)
        return Source(model, config, checkpoint_sizes(config, model), WeightSource(config))
    checkpoint = find_checkpoint(model, Path())
    config = read_config(checkpoint)
    sizes = checkpoint_sizes(config, checkpoint)
    require_computable(config)
    folder = None if random_weights else str(checkpoint_folder(checkpoint))
    return Source(Path(checkpoint).name, config, sizes, WeightSource(config, folder))


def _profile_config(name: str) -> dict[str, Any]:
    try:
        table = profiled(ModelTable(profile=name))
    except KeyedError as error:
        raise UserError(f"--model {name}: there is no such folder, and {error.what}") from None
    config = dict(SIZES[name]) if name in SIZES else config_of(table)
    if config is None or table.family not in FAMILIES:
        raise UserError(
            f"--model {name}: blocks of the family {table.family} cannot be computed; "
            f"valid families: {', '.join(FAMILIES)}"
        )
    # The classes of some families have a window where the configuration does not say that there is none.
    return {"sliding_window": None, **config}


def default_dtype(config: Mapping[str, Any]) -> str:
    """Returns the model's own dtype if the testbed supports it, else float32."""
    own = config.get("dtype", config.get("torch_dtype"))
    return own if own in VALUE_BYTES else "float32"


@dataclass(frozen=True)
class Device:
    """The device that computes the blocks, and how it does so; the fields are those of ``BlocksSpec``."""

    name: str
    dtype: str
    weights: str
    n_threads: int
    n_streams: int
    has_graphs: bool = False


def open_blocks(source: Source, device: Device, *, is_batched: bool = False) -> tuple[BlocksCompute, float]:
    """Returns the backend, without any blocks yet, and the free memory of its device in bytes (0 if unknown).

    ``is_batched``: steps that wait are computed together, in one stream. Raises ``UserError`` for invalid
    options, and if torch is not installed.
    """
    require_blocks("testbed calibrate")
    if device.dtype not in VALUE_BYTES:
        raise UserError(f'--dtype must be one of {", ".join(VALUE_BYTES)}, not "{device.dtype}"')
    if device.weights not in WEIGHTS:
        raise UserError(f'--weights must be one of {", ".join(WEIGHTS)}, not "{device.weights}"')
    for option, value in (("--threads", device.n_threads), ("--streams", device.n_streams)):
        if value < 1:
            raise UserError(f"{option} must be at least 1, not {value}")
    if device.has_graphs and device.n_streams > 1:
        raise UserError(f"--cuda-graphs computes one step at a time; leave --streams {device.n_streams} out")
    if source.weights.folder is not None:
        require_weights(source.weights.folder, source.sizes.n_blocks)
    from nodes.blocks.compute import BlocksCompute  # imports torch
    from nodes.blocks.device import available_bytes, open_device

    spec = BlocksSpec(
        source.weights,
        device=device.name,
        dtype=device.dtype,
        weights=device.weights,
        n_threads=device.n_threads,
        n_streams=1 if is_batched else device.n_streams,
        is_batched=is_batched,
        has_graphs=device.has_graphs,
    )
    try:
        opened, _ = open_device(device.name, device.dtype)
        memory_bytes = available_bytes(opened)
        return BlocksCompute(spec), memory_bytes if math.isfinite(memory_bytes) else 0.0
    except ComputeError as error:
        raise UserError(str(error)) from None


def open_hub(source: Source, device: Device) -> HubModel:
    """Returns the client's part of the model, on the same device as the loaded blocks.

    Raises ``ComputeError`` if the device has no memory left for it.
    """
    from nodes.blocks.device import available_bytes, open_device  # imports torch
    from nodes.blocks.hub import BlocksHub
    from nodes.blocks.memory import amount
    from nodes.blocks.spec import HubSpec

    opened, _ = open_device(device.name, device.dtype)
    # For embeddings and a separate head. Models that share one matrix for both need half of that.
    needed_bytes = 2 * source.sizes.vocabulary * source.sizes.hidden_size * VALUE_BYTES[device.dtype]
    free_bytes = available_bytes(opened)
    if needed_bytes > free_bytes:
        raise ComputeError(
            f"its embeddings and head may need {amount(needed_bytes)} and {amount(free_bytes)} are free"
        )
    return BlocksHub(HubSpec(source.weights, device.name, device.dtype, device.n_threads))


def hidden_states(n_tokens: int, hidden_size: int, dtype: str) -> bytes:
    """Returns hidden states ``[n_tokens, hidden_size]`` as they are sent over the network.

    They are normally distributed, and the same for the same ``n_tokens``.
    """
    values = np.random.default_rng(n_tokens).standard_normal((n_tokens, hidden_size), dtype=np.float32)
    if dtype == "float32":
        return values.tobytes()
    if dtype == "float16":
        return values.astype(np.float16).tobytes()
    # numpy has no bfloat16: it is the upper half of a float32.
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


async def measure_memory(compute: Compute, plan: Plan) -> list[MemorySample]:
    """Measures memory with different numbers of blocks, and with sessions on ``plan.max_blocks`` blocks.

    Leaves ``plan.max_blocks`` blocks loaded.
    """
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
                sessions.append(await open_session(compute, CLIENT, 0, most, plan.memory_tokens))
            if n_sessions:
                samples.append(_used(compute, most, n_sessions, plan.memory_tokens))
    finally:
        for session in sessions:
            compute.close_session(session)
    return samples


def _used(compute: Compute, n_blocks: int, n_sessions: int, session_tokens: int) -> MemorySample:
    used = compute.memory()
    # A GPU's allocator reports the allocated bytes. On a CPU the blocks' own account is used, since the process's
    # resident memory changes with everything else.
    n_bytes = used.get("device_allocated_bytes", used.get("blocks_bytes", 0.0) + used.get("cache_bytes", 0.0))
    return MemorySample(n_blocks, n_sessions, session_tokens, n_bytes)
