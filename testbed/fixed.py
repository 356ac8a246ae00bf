"""Reads what stands behind ``fixed:`` where a policy is named: a placement file, or a chain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from policies.fixed import FixedPlacement, FixedRouting
from policies.problem import BlockRange
from testbed.errors import UserError

PREFIX = "fixed:"


def fixed_placement(name: str) -> FixedPlacement:
    """The placement in the file that ``name`` (``fixed:FILE``) points at.

    Two forms: a run's ``plan.json``, and what ``testbed simulate --json`` prints (or just its
    ``placement``, a list of ``[first_block, n_blocks]`` from 1, ``[0, 0]`` for none). Raises ``UserError``.
    """
    path = Path(name.removeprefix(PREFIX))
    document = _read(path)
    placement: Any = document.get("placement") if isinstance(document, dict) else document
    cache = None
    try:
        if isinstance(placement, dict):
            ranges = [BlockRange(*_pair(entry)) for entry in placement["ranges"]]
            if placement.get("cache_bytes") is not None:
                cache = tuple(float(n_bytes) for n_bytes in placement["cache_bytes"])
        else:
            pairs = [_pair(entry) for entry in placement]
            ranges = [BlockRange(a - 1, a - 1 + m) if m else BlockRange(0, 0) for a, m in pairs]
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(
            f"{path}: holds no placement: give a plan.json of a run, or a list of [first_block, n_blocks] "
            "per server, counted from 1, [0, 0] for none"
        ) from error
    return FixedPlacement(tuple(ranges), cache)


def fixed_routing(name: str) -> FixedRouting:
    """The chain in ``name``: ``fixed:SERVER,SERVER,...`` or ``fixed:FILE.json`` of ``{client: [server, ...]}``.

    Raises ``UserError``.
    """
    text = name.removeprefix(PREFIX)
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
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the file after fixed:") from error
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error})") from error


def _pair(entry: Any) -> tuple[int, int]:
    first, second = entry
    if not (isinstance(first, int) and isinstance(second, int)):
        raise TypeError("a pair of whole numbers is needed")
    return first, second
