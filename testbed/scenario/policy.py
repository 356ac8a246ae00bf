"""Resolves the policy names of a scenario: pairs, and how ``--set`` changes one half of a pair.

Names of single placement and routing policies are checked later, by the policy registry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.registry import PAIRS, ROUTINGS
from testbed.scenario.changes import Change
from testbed.scenario.problems import KeyedError, unknown
from testbed.scenario.schema import PolicyTable

FIXED = "fixed:"
HALVES = ("placement", "routing")
_ONLINE_TIMES = ("online_period", "online_patience")


@dataclass(frozen=True)
class PolicyChoice:
    """A policy pair by name, or one or both of its halves; all ``None``: the scenario's own policies."""

    pair: str | None = None
    placement: str | None = None
    routing: str | None = None

    def overrides(self) -> list[Change]:
        """Return the choice as changes to a scenario."""
        named = {"name": self.pair, "placement": self.placement, "routing": self.routing}
        return [Change(f"policy.{key}", value) for key, value in named.items() if value is not None]


def resolve_policy(table: PolicyTable) -> PolicyTable:
    """Return ``table`` with placement, routing and queue decided.

    Raises ``KeyedError`` for contradictions.
    """
    halves = {half: getattr(table, half) for half in HALVES}
    if table.name is None:
        for half, name in halves.items():
            if name is None:
                raise KeyedError(("policy", half), f"is missing; give it, or a pair by name ({_pairs()})")
    elif table.name not in PAIRS:
        raise KeyedError(("policy", "name"), unknown("policy pair", table.name, PAIRS))
    else:
        for half, meant in zip(HALVES, PAIRS[table.name], strict=True):
            if halves[half] not in (None, meant):
                raise KeyedError(
                    ("policy", half),
                    f'"{halves[half]}" contradicts policy.name = "{table.name}", which means {half} '
                    f'"{meant}"; '
                    "keep one of the two",
                )
            halves[half] = meant
    queue = table.queue or getattr(ROUTINGS.get(halves["routing"]), "queue", "none")
    return table.model_copy(update={"name": None, **halves, "queue": queue})


def with_whole_paths(table: PolicyTable, folder_of: Callable[[str, str], Path]) -> PolicyTable:
    """Make the file of ``fixed:FILE`` an absolute path, so that a resolved scenario works in any folder.

    A relative path starts at ``folder_of(table, key)``.
    """
    update = {}
    for half in HALVES:
        name = getattr(table, half) or ""
        file = Path(name.removeprefix(FIXED))
        if name.startswith(FIXED) and file.suffix == ".json":
            update[half] = f"{FIXED}{(folder_of('policy', half) / file).absolute()}"
    return table.model_copy(update=update)


def needs_petals_throughput(table: PolicyTable) -> bool:
    """Whether PETALS' throughput measurements are needed: it places blocks, routes, or moves blocks."""
    return any((name or "").startswith("petals") for name in (table.placement, table.routing, table.online))


def has_petals_setup(placement: str) -> bool:
    """Whether the published session setup of PETALS applies, rather than that of the other policies.

    As in the published simulator, this depends on the placement alone.
    """
    return placement.startswith("petals")


def settle_overrides(policy: dict[str, Any], given: Collection[str], online: Any) -> None:
    """Make ``--set`` win over the file. ``given`` are the keys of ``[policy]`` that options set.

    A new name replaces the file's placement and routing. A new placement or routing replaces that half of the
    file's pair. An online policy other than the file's (``online``) drops the file's times for online
    policies.
    """
    if "online" in given and policy.get("online") != online:
        for key in _ONLINE_TIMES:
            if key not in given:
                policy.pop(key, None)
    if "name" in given:
        for half in HALVES:
            if half not in given:
                policy.pop(half, None)
    elif any(half in given for half in HALVES) and (
        "name" in policy or not any(h in policy for h in HALVES if h not in given)
    ):
        pair = PAIRS.get(policy.pop("name", "proposed"), (None, None))
        for half, meant in zip(HALVES, pair, strict=True):
            if meant is not None:
                policy.setdefault(half, meant)


def _pairs() -> str:
    return ", ".join(PAIRS)
