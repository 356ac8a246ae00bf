"""The clients' part of a model: how long embedding, head and the choice of a token take (docs/hardware.md)."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.experiments.catalogue import gpu_named, gpus, shipped, sizes_of_table
from testbed.experiments.compute_tables import ComputeTable
from testbed.experiments.model_tables import ModelTable
from testbed.experiments.problems import Key, KeyedError, unknown
from testbed.experiments.roofline import BLOCK_OVERHEAD_S, MEMORY_EFFICIENCY
from testbed.experiments.schema import ClientsTable

_LOGIT_BYTES = 4


def hub_token_s(hardware: str, model: ModelTable, key: Key) -> float:
    """Return the seconds per output token of a client: the head's values are read once, and then the logits.

    The head has ``value_bytes`` per value, however blocks are stored. Raises ``KeyedError``.
    """
    sizes = sizes_of_table(model)
    if sizes is None or model.value_bytes is None:
        raise KeyedError(
            key, "needs the model's vocabulary; give [model] a profile, or a family with its sizes"
        )
    n_values = sizes.vocabulary * sizes.hidden_size
    n_bytes = n_values * model.value_bytes + sizes.vocabulary * _LOGIT_BYTES
    gpu, cpus = gpu_named(hardware), shipped("cpus")
    if gpu is not None:
        read_s = n_bytes / (MEMORY_EFFICIENCY * gpu.bandwidth_bytes_per_s)
    elif hardware in cpus:
        row = cpus[hardware]
        read_s = n_bytes / (MEMORY_EFFICIENCY * 1e9 * row["bandwidth_gbps"])
        if "gvalues_16bit" in row and model.value_bytes == 2:
            read_s = max(read_s, n_values / (1e9 * row["gvalues_16bit"]))
    else:
        raise KeyedError(key, unknown("hardware", hardware, [*cpus, *gpus()]))
    return float(f"{BLOCK_OVERHEAD_S + read_s:.6g}")


def with_hub_tokens(
    groups: Sequence[ClientsTable], compute: ComputeTable, model: ModelTable, *, is_resolved: bool
) -> list[ClientsTable]:
    """Return ``[[clients]]`` with the ``hub_token`` that follows from their ``hardware``.

    Raises ``KeyedError`` for hardware that is unknown, or given beside another time.
    """
    found = []
    for index, group in enumerate(groups):
        key = ("clients", index, "hardware")
        if group.hardware is None or is_resolved:
            found.append(group)
            continue
        seconds = hub_token_s(group.hardware, model, key)
        if group.hub_token not in (None, seconds) or compute.hub_token is not None:
            other = "compute.hub_token" if compute.hub_token is not None else "clients.hub_token"
            raise KeyedError(key, f"gives the client's time per token, and so does {other}; keep one of them")
        found.append(group.model_copy(update={"hub_token": seconds}))
    return found


def hub_tokens_s(groups: Sequence[ClientsTable], compute: ComputeTable) -> tuple[float, ...]:
    """Return the seconds per output token of every client; empty if none has a time of its own."""
    if all(group.hub_token is None for group in groups):
        return ()
    own = ((group, group.hub_token) for group in groups)
    return tuple(
        (compute.hub_token or 0.0) if seconds is None else seconds
        for group, seconds in own
        for _ in range(group.count)
    )
