"""Reads policies that are named ``fixed:...``: a placement from a file, or a chain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policies.fixed import FixedPlacement, FixedRouting
from policies.problem import BlockRange
from testbed.errors import UserError
from testbed.experiments.json_files import read_json
from testbed.experiments.limits import MAX_SIZE_BYTES
from testbed.experiments.policy import FIXED


def fixed_placement(name: str) -> FixedPlacement:
    """Returns the placement in the file of ``name`` (``fixed:FILE``). Raises ``UserError``.

    The file is a run's ``plan.json``, or the output of ``testbed simulate --json``, or only its
    ``placement``: a list of ``[first_block, n_blocks]`` with blocks counted from 1, ``[0, 0]`` for none.
    ``cache_bytes`` beside or in it is the room for caches per server; without it, the room is all memory that
    the blocks leave.
    """
    path = Path(name.removeprefix(FIXED))
    document = _read(path)
    placement: Any = document.get("placement") if isinstance(document, dict) else document
    try:
        if isinstance(placement, dict):
            ranges = [BlockRange(*_pair(entry)) for entry in placement["ranges"]]
            cache = placement.get("cache_bytes")
        else:
            pairs = [_pair(entry) for entry in placement]
            ranges = [BlockRange(a - 1, a - 1 + m) if m else BlockRange(0, 0) for a, m in pairs]
            cache = document.get("cache_bytes") if isinstance(document, dict) else None
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(
            f"{path}: holds no placement: give a plan.json of a run, or a list of [first_block, n_blocks] "
            "per server, counted from 1, [0, 0] for none"
        ) from error
    room = None if cache is None else _cache_bytes(path, cache, len(ranges))
    return FixedPlacement(tuple(ranges), room, from_one=not isinstance(placement, dict))


def _cache_bytes(path: Path, values: Any, n_servers: int) -> tuple[float, ...]:
    whole = isinstance(values, list) and len(values) == n_servers
    if not whole or not all(_is_size(value) for value in values):
        raise UserError(
            f"{path}: cache_bytes must be {n_servers} numbers of at least 0, one per server of the placement; "
            "or leave it out"
        )
    return tuple(float(value) for value in values)


def _is_size(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value <= MAX_SIZE_BYTES


def fixed_routing(name: str) -> FixedRouting:
    """Returns the chain of ``name``: ``fixed:SERVER,SERVER,...`` or ``fixed:FILE.json``.

    The file has ``{client: [server, ...]}``, or one list for all clients. Raises ``UserError``.
    """
    text = name.removeprefix(FIXED)
    if not text.endswith(".json"):
        servers = [part.strip() for part in text.split(",") if part.strip()]
        if not servers:
            raise UserError(
                f"routing {name!r} names no server; write fixed:SERVER,SERVER,... or fixed:FILE.json"
            )
        return FixedRouting({"": [int(s) if s.isdigit() else s for s in servers]})
    document = _read(Path(text))
    chains = document if isinstance(document, dict) else {"": document}
    for client, chain in chains.items():
        if not (isinstance(chain, list) and chain and all(isinstance(s, str | int) for s in chain)):
            raise UserError(f"{text}: {client or 'the file'} must be a list of servers, by name or number")
    return FixedRouting(chains)


def _read(path: Path) -> Any:
    return read_json(path, "give after fixed: a file as docs/policies.md describes it")


def _pair(entry: Any) -> tuple[int, int]:
    first, second = entry
    if not (isinstance(first, int) and isinstance(second, int)):
        raise TypeError("a pair of whole numbers is needed")
    return first, second
