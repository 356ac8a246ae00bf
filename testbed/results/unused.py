"""Finds blocks that servers held although no request used them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from testbed.records.plan import Plan
from testbed.records.requests import RequestRow, hops_of
from testbed.records.summary import UnusedBlocks

_MOST_NAMES = 5


def unused_blocks(plan: Plan, rows: Iterable[RequestRow]) -> UnusedBlocks | None:
    """Return the blocks of the plan's placement that no chain of ``rows`` has; None if no request was served."""
    used: list[set[int]] = [set() for _ in plan.servers]
    for chain in {row.chain for row in rows}:
        for server, first, last in hops_of(chain):
            used[server].update(range(first, last))
    if not any(used):
        return None
    n_held = n_unused = 0
    idle = []
    for name, (first, last), blocks in zip(plan.servers, plan.placement.ranges, used, strict=True):
        n_held += last - first
        n_unused += last - first - len(blocks)
        if last > first and not blocks:
            idle.append(name)
    return UnusedBlocks(n_held=n_held, n_unused=n_unused, servers=idle)


def unused_from(data: dict[str, Any] | None) -> UnusedBlocks | None:
    """Return the record of its data (``data_of``)."""
    return None if data is None else msgspec.convert(data, UnusedBlocks)


def unused_over_runs(found: Sequence[UnusedBlocks | None]) -> UnusedBlocks | None:
    """Average over several runs: means of the counts, and the servers without a used block in all runs."""
    known = [run for run in found if run is not None]
    if not known:
        return None
    return UnusedBlocks(
        n_held=sum(run.n_held for run in known) / len(known),
        n_unused=sum(run.n_unused for run in known) / len(known),
        servers=[name for name in known[0].servers if all(name in run.servers for run in known)],
    )


def unused_text(found: UnusedBlocks | None) -> list[str]:
    """Return a hint if there are unused blocks; else nothing."""
    if found is None or not found.n_unused:
        return []
    n_held, n_unused = found.n_held, found.n_unused
    mean = " on average" if isinstance(n_unused, float) else ""  # over runs
    text = f"hint: servers hold {_count(n_held)} blocks, and requests used {_count(n_held - n_unused)} of them{mean}"
    if idle := found.servers:
        names = ", ".join(idle[:_MOST_NAMES]) + (
            f" and {len(idle) - _MOST_NAMES} more" if len(idle) > _MOST_NAMES else ""
        )
        text += f". No request reached {names}"
    return [f"{text}: fewer servers, another placement or routing may serve this load as well"]


def _count(blocks: float) -> str:
    return f"{round(blocks, 1):,g}" if isinstance(blocks, float) else f"{blocks:,}"
