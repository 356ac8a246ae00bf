"""Resolves ``[[servers]]``: the hardware that they name, their memory, their GPUs and how they store blocks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from policies.problem import ModelSpec, ServerSpec
from testbed.experiments.catalogue import DTYPES, OF_REPRESENTATION, filled, sizes_of_table
from testbed.experiments.families import ModelSizes
from testbed.experiments.model_tables import HardwareTable, ModelTable
from testbed.experiments.network import Node
from testbed.experiments.parallel import parallel
from testbed.experiments.problems import Key, KeyedError
from testbed.experiments.profiles import HardwareShelf, resolve_model, server_spec
from testbed.experiments.roofline import block_of, times_of
from testbed.experiments.schema import Scenario, ServersTable

_log = logging.getLogger(__name__)

MEMORY_RESERVE = 0.1
"""Share of a GPU's memory that blocks and caches do not get: vLLM's ``gpu_memory_utilization`` is 0.9."""
_GIB_PER_GB = 1024**3 / 1e9
"""A card's gigabytes may be of either kind."""


def servers_hardware(
    scenario: Scenario, own: Mapping[str, HardwareTable], model: ModelTable, *, for_petals: bool
) -> tuple[dict[str, HardwareTable], list[ServersTable]]:
    """Return the hardware of all servers by ``profile_key``, and ``[[servers]]`` with their ``memory_reserve``.

    ``own`` is the scenario's hardware. Raises ``KeyedError``, also for a ``memory`` that the card does not have.
    """
    shelves: dict[str | None, HardwareShelf] = {}
    named: dict[str, HardwareTable] = {}
    groups: list[ServersTable] = []
    for index, group in enumerate(scenario.servers):
        key = ("servers", index, "hardware")
        if group.dtype is not None and scenario.compute.backend == "blocks":
            raise KeyedError(
                ("servers", index, "dtype"),
                "is of the timing stub; real blocks are stored as compute.weights says, so leave it out",
            )
        if group.dtype not in shelves:
            shelves[group.dtype] = HardwareShelf(
                own,
                scenario.calibration.set,
                block_of(_stored(model, group, ("servers", index, "dtype"))),
                is_resolved=scenario.resolved,
            )
        shelf = shelves[group.dtype]
        if group.profile_key not in named:
            name = group.profile_key if scenario.resolved else group.hardware
            named[group.profile_key] = shelf.get(name, key, for_petals=for_petals)
        groups.append(group if scenario.resolved else _checked(group, index, shelf))
    return named, groups


def _stored(model: ModelTable, group: ServersTable, key: Key) -> ModelTable:
    """Return the model as the servers of ``group`` store it. Raises ``KeyedError``."""
    if group.dtype is None or group.dtype == model.dtype:
        return model
    sizes = sizes_of_table(model)
    if sizes is None or model.dtype is None:
        raise KeyedError(key, "needs the model's sizes; give [model] a profile, or a family with its sizes")
    left_out = model.model_copy(update={**dict.fromkeys(OF_REPRESENTATION), "dtype": group.dtype})
    stored = filled(left_out, sizes, *DTYPES[group.dtype], model.name or sizes.family)
    if stored.value_bytes != model.value_bytes:
        raise KeyedError(
            key,
            f'is "{group.dtype}", whose hidden states have {stored.value_bytes} bytes per value, and '
            f'those of model.dtype "{model.dtype}" {model.value_bytes}; use a type with as many',
        )
    return stored


def _checked(group: ServersTable, index: int, shelf: HardwareShelf) -> ServersTable:
    """Return ``group`` with its ``memory_reserve``. Raises ``KeyedError`` for memory that the card lacks."""
    card, sold = shelf.card(group.hardware), shelf.sold_as(group.hardware)
    if sold is not None and group.memory is not None:
        most_bytes = group.gpus * sold.memory_bytes * _GIB_PER_GB
        if group.memory > most_bytes:
            raise KeyedError(
                ("servers", index, "memory"),
                f"is {group.memory / 1e9:.4g} GB, and {sold.name} has {sold.memory_bytes / 1e9:.4g} GB"
                + (f" on each of {group.gpus} GPUs" if group.gpus > 1 else "")
                + '; give less, or hardware of your own with base = "'
                + f'{group.hardware}"',
            )
    if group.power_idle is not None and group.power_busy is None:
        if card is None or card.power_w is None:
            raise KeyedError(
                ("servers", index, "power_busy"),
                f"is missing, and no data sheet of {group.hardware} states it; give it",
            )
        if group.gpus * card.power_w < group.power_idle:
            raise KeyedError(
                ("servers", index, "power_idle"),
                f"is more than the {group.gpus * card.power_w:g} W that {card.name} needs at most; give power_busy, too",
            )
        group = group.model_copy(update={"power_busy": group.gpus * card.power_w})
    if group.memory_reserve is not None:
        return group
    is_by_name = group.memory is None and card is not None
    return group.model_copy(update={"memory_reserve": MEMORY_RESERVE if is_by_name else 0.0})


def server_specs(
    groups: Sequence[ServersTable],
    nodes: Sequence[Sequence[Node]],
    hardware: Mapping[str, HardwareTable],
    model: ModelTable,
    spec: ModelSpec,
    lengths: tuple[int, int],
) -> tuple[ServerSpec, ...]:
    """Return all servers; warns of those that cannot hold a block. Raises ``KeyedError`` for GPUs that cannot share the
    model's heads.
    """
    sizes = sizes_of_table(model)
    pattern = () if sizes is None else sizes.pattern
    found = []
    for index, (group, members) in enumerate(zip(groups, nodes, strict=True)):
        table = hardware[group.profile_key]
        assert table.memory
        if group.gpus > 1:
            _check_heads(group, index, sizes)
        memory_bytes = group.memory or group.gpus * table.memory
        is_split = sizes is not None and model.kv_rank is None
        stored = None
        if group.dtype not in (None, model.dtype):
            stored = resolve_model(_stored(model, group, ("servers", index, "dtype")))[1]
        free_bytes = memory_bytes * (1 - (group.memory_reserve or 0.0))
        held = stored or spec
        if members and not held.best_blocks(free_bytes):
            names = members[0].name if len(members) == 1 else f"{members[0].name} to {members[-1].name}"
            own = "its own memory" if len(members) == 1 else "their own memory"
            whose = group.hardware if group.memory is None else own
            block_bytes = min(held.blocks_bytes or (held.block_bytes,))
            _log.warning(
                "servers: %s can hold no block, which takes %.3g GB: %s has %.3g GB for blocks and caches",
                *(names, block_bytes / 1e9, whose, free_bytes / 1e9),
            )
        times = parallel(
            times_of(table),
            group.gpus,
            group.interconnect or "nvlink",
            spec.state_bytes,
            sizes.n_kv_heads if is_split and sizes is not None else None,
        )
        found += [
            server_spec(
                node.name,
                group.hardware,
                table,
                free_bytes,
                lengths,
                spec.state_bytes,
                pattern,
                times,
                stored,
            )
            for node in members
        ]
    return tuple(found)


def _check_heads(group: ServersTable, index: int, sizes: ModelSizes | None) -> None:
    key = ("servers", index, "gpus")
    if sizes is None:
        raise KeyedError(key, "needs the model's heads; give [model] a profile, or a family with its sizes")
    if sizes.n_heads % group.gpus:
        raise KeyedError(key, f"is {group.gpus}, which must divide the model's {sizes.n_heads} heads")
