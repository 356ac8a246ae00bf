"""Names of policies in a scenario: pairs, and how ``--set`` changes half of one.

Whether a placement or routing policy of that name exists is for the policy registry to say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.registry import PAIRS, ROUTINGS
from testbed.scenario.problems import KeyedError, unknown
from testbed.scenario.schema import PolicyTable

FIXED = "fixed:"
HALVES = ("placement", "routing")
_ONLINE_TIMES = ("online_period", "online_patience")


@dataclass(frozen=True)
class PolicyChoice:
    """A pair's name, or halves of a pair; all ``None``: what the scenario says."""

    pair: str | None = None
    placement: str | None = None
    routing: str | None = None

    def overrides(self) -> list[str]:
        """The same as ``--set`` options of a scenario."""
        named = {"name": self.pair, "placement": self.placement, "routing": self.routing}
        return [f'policy.{key}="{value}"' for key, value in named.items() if value is not None]


def resolve_policy(table: PolicyTable) -> PolicyTable:
    """Placement, routing and queue by their own names. Raises ``KeyedError`` if the keys contradict each other."""
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
                    f'"{halves[half]}" contradicts policy.name = "{table.name}", which means {half} "{meant}"; '
                    "keep one of the two",
                )
            halves[half] = meant
    queue = table.queue or getattr(ROUTINGS.get(halves["routing"]), "queue", "none")
    return table.model_copy(update={"name": None, **halves, "queue": queue})


def with_whole_paths(table: PolicyTable, folder_of: Callable[[str, str], Path]) -> PolicyTable:
    """``fixed:FILE`` with the file's whole path, so that a resolved scenario means the same in any folder.

    Relative paths start at ``folder_of`` the key that has them.
    """
    update = {}
    for half in HALVES:
        name = getattr(table, half) or ""
        file = Path(name.removeprefix(FIXED))
        if name.startswith(FIXED) and file.suffix == ".json":
            update[half] = f"{FIXED}{(folder_of('policy', half) / file).absolute()}"
    return table.model_copy(update=update)


def needs_petals_throughput(table: PolicyTable) -> bool:
    """Whether PETALS' own measurements decide: it places blocks, or moves them."""
    return any((name or "").startswith("petals") for name in (table.placement, table.routing, table.online))


def has_petals_setup(placement: str) -> bool:
    """Whether the published session setup of PETALS and its variants applies, or that of the others.

    The published simulator tells them apart by the placement.
    """
    return placement.startswith("petals")


def settle_overrides(policy: dict[str, Any], given: Collection[str], online: Any) -> None:
    """Make ``--set`` win over the file: ``given`` are the keys of ``[policy]`` that options set.

    A new name replaces the file's placement and routing; a new placement or routing replaces one
    half of the file's pair; another online policy than ``online``, the file's, goes without that one's times.
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
