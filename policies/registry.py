"""Policies by name: the shipped ones, installed ones (entry points), and ``module:Class``."""

from __future__ import annotations

import difflib
import importlib
from importlib.metadata import entry_points
from typing import Any, cast

from policies.cgbp import CgBp
from policies.interfaces import PlacementPolicy, RoutingPolicy
from policies.petals import PetalsPlacement, PetalsRouting
from policies.problem import PolicyError
from policies.wsrr import WsRr

PLACEMENTS: dict[str, type[PlacementPolicy]] = {p.name: p for p in (PetalsPlacement, CgBp)}
ROUTINGS: dict[str, type[RoutingPolicy]] = {r.name: r for r in (PetalsRouting, WsRr)}
PAIRS: dict[str, tuple[str, str]] = {"petals": ("petals", "petals"), "proposed": ("cg-bp", "ws-rr")}

_GROUPS = {"placement": "testbed.placement", "routing": "testbed.routing"}
_METHODS = {"placement": "place", "routing": "bind"}


def resolve_placement(name: str) -> PlacementPolicy:
    """The placement policy of that name. Raises ``PolicyError`` with the nearest valid names."""
    return cast(PlacementPolicy, _resolve("placement", name, dict(PLACEMENTS)))


def resolve_routing(name: str) -> RoutingPolicy:
    """The routing policy of that name. Raises ``PolicyError`` with the nearest valid names."""
    return cast(RoutingPolicy, _resolve("routing", name, dict(ROUTINGS)))


def resolve_pair(name: str) -> tuple[str, str]:
    """(placement, routing) names of a pair such as ``proposed``."""
    if name not in PAIRS:
        raise PolicyError(_unknown("policy pair", name, list(PAIRS)))
    return PAIRS[name]


def list_policies() -> list[dict[str, str]]:
    """Every policy that can be named: ``{kind, name, summary}``."""
    rows = [
        {"kind": "pair", "name": name, "summary": f"placement {placement} with routing {routing}"}
        for name, (placement, routing) in PAIRS.items()
    ]
    for kind, shipped in (("placement", PLACEMENTS), ("routing", ROUTINGS)):
        for name, policy in shipped.items():
            rows.append({"kind": kind, "name": name, "summary": _summary(policy)})
        for point in entry_points(group=_GROUPS[kind]):
            rows.append({"kind": kind, "name": point.name, "summary": f"installed: {point.value}"})
    return rows


def _summary(policy: type) -> str:
    return (policy.__doc__ or "").strip().splitlines()[0] if policy.__doc__ else ""


def _resolve(kind: str, name: str, shipped: dict[str, Any]) -> Any:
    if name in shipped:
        return shipped[name]()
    if ":" in name:
        return _load(kind, name)
    installed = {point.name: point for point in entry_points(group=_GROUPS[kind])}
    if name in installed:
        return _check(kind, name, installed[name].load())
    raise PolicyError(_unknown(f"{kind} policy", name, [*shipped, *installed]))


def _load(kind: str, name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise PolicyError(f"{kind} policy {name} cannot be loaded: {error}") from error
    return _check(kind, name, found)


def _check(kind: str, name: str, found: Any) -> Any:
    policy = found() if isinstance(found, type) else found
    if not callable(getattr(policy, _METHODS[kind], None)):
        raise PolicyError(f"{kind} policy {name} has no method {_METHODS[kind]}()")
    return policy


def _unknown(what: str, name: str, valid: list[str]) -> str:
    near = difflib.get_close_matches(name, valid, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"there is no {what} {name!r}; {hint}valid: {', '.join(valid)}, or module:Class"
