"""Resolves the policies of a scenario: pairs, their traits, and how ``--set`` changes one half of a pair.

Names of single placement and routing policies are checked later, by the policy registry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.interfaces import (
    PlacementPolicy,
    RoutingPolicy,
    communication_of,
    queue_of,
    session_setup_of,
    trait,
)
from policies.registry import FIXED as FIXED
from policies.registry import PAIRS, shipped_policy
from testbed.experiments.changes import Change
from testbed.experiments.filesread import note_file
from testbed.experiments.problems import KeyedError, unknown
from testbed.experiments.schema import DEFAULT_PAIR, PolicyTable

HALVES = ("placement", "routing")
_ONLINE_TIMES = ("online_period", "online_patience")


LoadPolicy = Callable[[str, str], object]
"""Called with kind and name of a policy that is not shipped; returns it, which runs its code."""


@dataclass(frozen=True)
class PolicyChoice:
    """A policy pair by name, or one or both of its halves; all ``None``: the scenario's own policies."""

    pair: str | None = None
    placement: str | None = None
    routing: str | None = None

    @classmethod
    def of(cls, text: str | None) -> PolicyChoice:
        """Return the choice that ``text`` names: a pair by its name, ``placement+routing``, or both halves by one
        ``module:Class``.
        """
        placement, plus, routing = (text or "").partition("+")
        if plus:
            return cls(None, placement, routing)
        return cls(None, text, text) if ":" in placement else cls(text)

    def overrides(self) -> list[Change]:
        """Return the choice as changes to a scenario."""
        named = {"name": self.pair, "placement": self.placement, "routing": self.routing}
        return [Change(f"policy.{key}", value) for key, value in named.items() if value is not None]

    @property
    def halves(self) -> tuple[str | None, str | None]:
        """Placement and routing by name; ``None``: the scenario's own."""
        return PAIRS.get(self.pair or "", (self.placement, self.routing))


def with_halves(table: PolicyTable) -> PolicyTable:
    """Return ``table`` with placement and routing named, by default those of ``DEFAULT_PAIR``.

    Raises ``KeyedError`` for contradictions.
    """
    halves = {half: getattr(table, half) for half in HALVES}
    if table.name is None and not any(halves.values()):
        halves = dict(zip(HALVES, PAIRS[DEFAULT_PAIR], strict=True))
    elif table.name is None:
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
    return table.model_copy(update={"name": None, **halves})


UNREAD = {
    "queue": RoutingPolicy.queue,
    "communication": RoutingPolicy.communication,
    "session_setup": PlacementPolicy.session_setup,
}
"""What holds for a key that policies decide as long as their traits were not read."""


@dataclass(frozen=True)
class Policies:
    """The policies that a scenario names, whose traits decide what its ``[policy]`` leaves open.

    Each is a class or an object; ``None``: its code is not shipped, and was not to be run.
    """

    placement: object | None
    routing: object | None
    online: object | None

    @classmethod
    def of(cls, table: PolicyTable, load: LoadPolicy | None) -> Policies:
        """Find the policies of a ``table`` without a pair; ``load`` loads those that are not shipped.

        Raises ``PolicyError`` if one cannot be loaded.
        """

        def find(kind: str, name: str | None) -> object | None:
            if name is None or name == "none":
                return None
            return shipped_policy(kind, name) or (load(kind, name) if load is not None else None)

        return cls(
            find("placement", table.placement),
            find("routing", table.routing),
            find("online", table.online),
        )

    def decide(self, table: PolicyTable) -> PolicyTable:
        """Return ``table`` with what the traits of these policies decide, unless it states that itself.

        Keys of a policy that was not loaded stay open. Raises ``PolicyError`` for a trait of no valid value.
        """
        update: dict[str, Any] = {}
        if self.routing is not None:
            update["queue"] = table.queue or queue_of(self.routing)
            update["communication"] = table.communication or communication_of(self.routing)
        if self.placement is not None:
            update["session_setup"] = table.session_setup or session_setup_of(self.placement)
        return table.model_copy(update=update)

    @property
    def need_petals_throughput(self) -> bool:
        """Whether hardware must state PETALS' throughput measurements."""
        found = (self.placement, self.online)
        return any(trait(policy, PlacementPolicy, "needs_petals_throughput") for policy in found)


def unread_policies(table: PolicyTable) -> tuple[str, ...]:
    """Return the policies whose traits must still decide something (``Policies.decide``)."""
    open_halves = {
        table.placement: table.session_setup is None,
        table.routing: table.queue is None or table.communication is None,
    }
    return tuple(name for name, is_open in open_halves.items() if name is not None and is_open)


def with_whole_paths(table: PolicyTable, folder_of: Callable[[str, str], Path]) -> PolicyTable:
    """Make the file of ``fixed:FILE`` an absolute path, so that a resolved scenario works in any folder.

    A relative path starts at ``folder_of(table, key)``.
    """
    update = {}
    for half in HALVES:
        name = getattr(table, half) or ""
        file = Path(name.removeprefix(FIXED))
        if name.startswith(FIXED) and file.suffix == ".json":
            path = note_file(folder_of("policy", half) / file)
            update[half] = f"{FIXED}{path.absolute()}"
    return table.model_copy(update=update)


def settle_overrides(
    policy: dict[str, Any], given: Collection[str], online: Any, *, is_resolved: bool
) -> None:
    """Make ``--set`` win over the file. ``given`` are the keys of ``[policy]`` that options set.

    A new name replaces the file's placement and routing. A new placement or routing replaces that half of the
    file's pair. An online policy other than the file's (``online``) drops the file's times for online
    policies. A new placement drops the session setup that a resolved file states of the old one.
    """
    if is_resolved and {"name", "placement"} & set(given) and "session_setup" not in given:
        policy.pop("session_setup", None)
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
        pair = PAIRS.get(policy.pop("name", DEFAULT_PAIR), (None, None))
        for half, meant in zip(HALVES, pair, strict=True):
            if meant is not None:
                policy.setdefault(half, meant)


def _pairs() -> str:
    return ", ".join(PAIRS)
