"""Finds blocks that servers held although no request used them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_MOST_NAMES = 5


def unused_blocks(
    servers: Sequence[str], held: Iterable[tuple[int, int]], hops: Iterable[tuple[int, int, int]]
) -> dict[str, Any] | None:
    """Return ``{n_held, n_unused, servers}``: held blocks, unused ones, and servers with only unused ones.

    ``held`` is [first, last) of each server, ``hops`` are (server, first, last) of all requests that were
    served. None if no request was served.
    """
    used: list[set[int]] = [set() for _ in servers]
    is_any = False
    for server, first, last in set(hops):
        used[server].update(range(first, last))
        is_any = True
    if not is_any:
        return None
    n_held = n_unused = 0
    idle = []
    for name, (first, last), blocks in zip(servers, held, used, strict=True):
        n_held += last - first
        n_unused += last - first - len(blocks)
        if last > first and not blocks:
            idle.append(name)
    return {"n_held": n_held, "n_unused": n_unused, "servers": idle}


def unused_over_runs(found: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Average over several runs: means of the counts, and the servers without a used block in all runs."""
    known = [run for run in found if run is not None]
    if not known:
        return None
    idle = [name for name in known[0]["servers"] if all(name in run["servers"] for run in known)]
    counts = {key: sum(run[key] for run in known) / len(known) for key in ("n_held", "n_unused")}
    return {**counts, "servers": idle}


def unused_text(found: Mapping[str, Any] | None) -> list[str]:
    """Return a hint if there are unused blocks; else nothing."""
    if found is None or not found["n_unused"]:
        return []
    n_held, n_unused = found["n_held"], found["n_unused"]
    mean = " on average" if isinstance(n_unused, float) else ""  # over runs
    text = f"hint: servers hold {_count(n_held)} blocks, and requests used {_count(n_held - n_unused)} of them{mean}"
    if idle := found["servers"]:
        names = ", ".join(idle[:_MOST_NAMES]) + (
            f" and {len(idle) - _MOST_NAMES} more" if len(idle) > _MOST_NAMES else ""
        )
        text += f". No request reached {names}"
    return [f"{text}: fewer servers, another placement or routing may serve this load as well"]


def _count(blocks: float) -> str:
    return f"{round(blocks, 1):,g}" if isinstance(blocks, float) else f"{blocks:,}"
