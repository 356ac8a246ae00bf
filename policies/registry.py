"""Finds policies by name: shipped ones, installed ones (entry points), and ``module:Class``.

An installed package offers its policies in the entry point groups ``testbed.placement``, ``testbed.routing``
and ``testbed.online``.
"""

from __future__ import annotations

import difflib
import importlib
import re
import sys
import threading
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from types import ModuleType
from typing import Any, cast

from policies.ablations import OptimizedNumber, OptimizedOrder
from policies.affinity import PrefixAware, Sticky
from policies.cgbp import CgBp
from policies.composition import ChainComposition, Jffc
from policies.fixed import FixedPlacement, FixedRouting
from policies.foresight import ForesightPlacement
from policies.foresight_routing import ForesightRouting
from policies.helix import Helix
from policies.interfaces import PlacementPolicy, RoutingPolicy
from policies.iwrr import Iwrr
from policies.learning import Bandit, RegionFirst
from policies.milp import LpRounding, MilpPaperPlacement, MilpPlacement
from policies.online import OnlinePolicy, TwoTimeScale
from policies.optimal_rr import OptimalRr
from policies.parallax import Parallax, ShortestByLayer
from policies.petals import PetalsPlacement
from policies.petals_code import PetalsCodeRouting
from policies.petals_rebalancing import PetalsRebalancing
from policies.petals_routing import PetalsRouting
from policies.pipelines import Exo, RoundRobin, SeparatePipelines, Swarm, WholeModel
from policies.problem import PolicyError
from policies.rehearsed import RehearsedForesight
from policies.swarm_routing import SwarmRouting
from policies.wsrr import ShortestPath, WsRr

PLACEMENTS: dict[str, type[PlacementPolicy]] = {
    p.name: p
    for p in (
        PetalsPlacement,
        OptimizedOrder,
        OptimizedNumber,
        CgBp,
        ForesightPlacement,
        RehearsedForesight,
        MilpPlacement,
        MilpPaperPlacement,
        LpRounding,
        Exo,
        Helix,
        Parallax,
        SeparatePipelines,
        Swarm,
        WholeModel,
        ChainComposition,
    )
}
ROUTINGS: dict[str, type[RoutingPolicy]] = {
    r.name: r
    for r in (
        PetalsRouting,
        PetalsCodeRouting,
        WsRr,
        OptimalRr,
        ShortestPath,
        ForesightRouting,
        RoundRobin,
        Jffc,
        ShortestByLayer,
        Iwrr,
        SwarmRouting,
        Sticky,
        PrefixAware,
        Bandit,
        RegionFirst,
    )
}
PAIRS: dict[str, tuple[str, str]] = {
    "petals": ("petals", "petals"),
    "petals-optimized-order": ("petals-optimized-order", "petals"),
    "petals-optimized-number": ("petals-optimized-number", "petals"),
    "petals-optimized-rr": ("petals", "optimal-rr"),
    "proposed": ("cg-bp", "ws-rr"),
    "foresight": ("foresight", "foresight"),
    "foresight-rehearsed": ("foresight-rehearsed", "foresight"),
    "cg-bprr": ("cg-bp", "shortest-path"),
    "milp": ("milp", "optimal-rr"),
    "milp-paper": ("milp-paper", "optimal-rr"),
    "exo": ("exo", "rr"),
    "helix": ("helix", "iwrr"),
    "separate-pipelines": ("separate-pipelines", "rr"),
    "parallax": ("parallax", "rr"),
    "parallax-dp": ("parallax", "dp"),
    "swarm": ("swarm", "swarm"),
    "swarm-ws-rr": ("swarm", "ws-rr"),
    "whole-model": ("whole-model", "jffc"),
    "chain-composition": ("chain-composition", "jffc"),
}
ONLINE: dict[str, type[OnlinePolicy]] = {p.name: p for p in (TwoTimeScale, PetalsRebalancing)}

_SHIPPED: dict[str, dict[str, Any]] = {
    "placement": {**PLACEMENTS},
    "routing": {**ROUTINGS},
    "online": {**ONLINE},
}
FIXED = "fixed:"
"""Policies whose names begin so are read from the rest of the name."""
_FIXED: dict[str, type] = {"placement": FixedPlacement, "routing": FixedRouting}
_FORMS = (
    (
        "placement",
        "fixed:FILE",
        "The blocks per server that a file gives: a run's plan.json, or simulate --json.",
    ),
    ("routing", "fixed:SERVER,...", "One chain for every request, or per client from a .json file."),
)
"""Forms that the command line accepts besides the policies' names: (kind, form, summary)."""
OBJECT = "object:"
"""Policies whose names begin so are objects of this process (``offering``)."""
_OFFERED: dict[tuple[str, str], list[Any]] = {}
"""(kind, name) -> the object once per ``offering`` that has not ended."""
_OFFERING = threading.Lock()
_METHODS = {"placement": "place", "routing": "bind", "online": "bind"}


class PrintsToStderr:
    """What the body, a policy's code, prints goes to stderr: it is no part of a command's answer.

    Several threads may be in it at a time: only one that finds another stdout puts that back.
    """

    def __enter__(self) -> None:
        self._before = sys.stdout
        sys.stdout = sys.stderr

    def __exit__(self, *_: object) -> None:
        if self._before is not sys.stderr:
            sys.stdout = self._before


def resolve_placement(name: str) -> PlacementPolicy:
    """Returns the placement policy of that name. Raises ``PolicyError`` with the nearest valid names."""
    return cast(PlacementPolicy, resolve("placement", name))


def resolve_routing(name: str) -> RoutingPolicy:
    """Returns the routing policy of that name. Raises ``PolicyError`` with the nearest valid names."""
    return cast(RoutingPolicy, resolve("routing", name))


def resolve_online(name: str) -> OnlinePolicy:
    """Returns the online policy of that name. Raises ``PolicyError`` with the nearest valid names."""
    return cast(OnlinePolicy, resolve("online", name))


def resolve(kind: str, name: str) -> Any:
    """Returns the policy of a kind ("placement", "routing", "online") by name. This may run a user's code.

    Raises ``PolicyError`` with the nearest valid names.
    """
    shipped = _SHIPPED[kind]
    if name in shipped:
        return shipped[name]()
    if name.startswith(OBJECT):
        if not _OFFERED.get((kind, name)):
            raise PolicyError(
                f"{kind} policy {name} was an object of the program that used it, and is not in this one; give "
                "another policy"
            )
        return _OFFERED[kind, name][-1]
    if ":" in name:
        return _load(kind, name, name)
    installed = _installed(kind)
    if name in installed:
        return _load(kind, name, installed[name].value)
    raise PolicyError(_unknown(f"{kind} policy", name, [*shipped, *installed]))


@contextmanager
def offering(policies: Iterable[tuple[str, object]]) -> Iterator[dict[tuple[str, int], str]]:
    """Let ``resolve`` find objects while the body runs; yields their names by kind and ``id``.

    ``policies``: pairs (kind, object). The attribute ``name`` of an object tells its name; another object that has the
    same one gets a number, also if another thread offers it. Raises ``PolicyError`` if an object is no policy of its kind.
    """
    names: dict[tuple[str, int], str] = {}
    try:
        for kind, policy in policies:
            _check_is_policy(kind, f"the {kind} policy {policy!r}", policy)
            word = re.sub(r"[^\w.-]+", "-", policy.name)  # type: ignore[attr-defined]
            with _OFFERING:
                if (kind, id(policy)) not in names:
                    names[kind, id(policy)] = name = _free_name(kind, f"{OBJECT}{word}", policy)
                    _OFFERED.setdefault((kind, name), []).append(policy)
        yield names
    finally:
        with _OFFERING:
            for (kind, _), name in names.items():
                _OFFERED[kind, name].pop()


def offer(policies: Mapping[tuple[str, str], object]) -> None:
    """In a process of its own: let ``resolve`` find objects under the names (by kind) that they have in another one.

    Where ``offering`` has named them, nothing is left to do.
    """
    for key, policy in policies.items():
        if not _OFFERED.get(key):
            _OFFERED[key] = [policy]


def _free_name(kind: str, wanted: str, policy: object) -> str:
    number, name = 1, wanted
    while any(other is not policy for other in _OFFERED.get((kind, name), ())):
        number += 1
        name = f"{wanted}-{number}"
    return name


def shipped_policy(kind: str, name: str) -> type | None:
    """Returns the class of a shipped policy, ``fixed:...`` included; ``None``: its code is not shipped."""
    return _FIXED.get(kind) if name.startswith(FIXED) else _SHIPPED[kind].get(name)


def resolve_pair(name: str) -> tuple[str, str]:
    """Returns the (placement, routing) names of a pair such as ``proposed``. Raises ``PolicyError``."""
    if name not in PAIRS:
        raise PolicyError(_unknown("policy pair", name, PAIRS))
    return PAIRS[name]


def pair_name(placement: str, routing: str) -> str:
    """Returns the name of the pair, or ``placement+routing`` if it has none."""
    halves = (placement, routing)
    return next((name for name, pair in PAIRS.items() if pair == halves), "+".join(halves))


def list_policies() -> list[dict[str, str]]:
    """Returns ``{kind, name, summary}`` of all policies; the summary is the error if one fails to load."""
    rows = [
        {"kind": "pair", "name": name, "summary": f"placement {placement} with routing {routing}"}
        for name, (placement, routing) in PAIRS.items()
    ]
    for kind, shipped in _SHIPPED.items():
        for name, policy in shipped.items():
            rows.append({"kind": kind, "name": name, "summary": _summary(policy)})
        for name, point in _installed(kind).items():
            try:
                summary = _summary(_load(kind, name, point.value)) or f"installed: {point.value}"
            except PolicyError as error:
                summary = str(error)
            rows.append({"kind": kind, "name": name, "summary": summary})
    for kind, form, summary in _FORMS:
        rows.append({"kind": kind, "name": form, "summary": summary})
    return rows


def _installed(kind: str) -> dict[str, EntryPoint]:
    """Returns installed policies by name, without those that have the name of a shipped one."""
    points = entry_points(group=f"testbed.{kind}")
    return {point.name: point for point in points if point.name not in _SHIPPED[kind]}


def _summary(policy: Any) -> str:
    return next(iter((policy.__doc__ or "").strip().splitlines()), "")


def _load(kind: str, name: str, target: str) -> Any:
    """Returns the policy at ``module:Class`` (or ``module:object``). Raises ``PolicyError``."""
    module_name, _, attribute = target.partition(":")
    who = f"{kind} policy {name} cannot be loaded"
    if not module_name or not attribute:
        raise PolicyError(f"{who}: write module:Class")
    if module_name.endswith(".py") or "/" in module_name:
        name_of_file = module_name.rpartition("/")[2].removesuffix(".py")
        raise PolicyError(
            f"{who}: {module_name} is a file; name its module, {name_of_file}:{attribute}, and begin the command in the file's "
            "folder, or have that on PYTHONPATH"
        )
    try:
        with PrintsToStderr():
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # users' code can fail in any way; the message shows the reason
        raise PolicyError(f"{who}: {_not_imported(module_name, error)}") from error
    try:
        found = attrgetter(attribute)(module)
    except AttributeError as error:
        raise PolicyError(f"{who}: {_not_found(module, attribute)}") from error
    try:
        with PrintsToStderr():
            policy = found() if isinstance(found, type) else found
    except (Exception, SystemExit) as error:
        raise PolicyError(
            f"{who}: making a {attribute} without arguments {how_failed(error)}; correct its constructor"
        ) from error
    _check_is_policy(kind, f"{kind} policy {name}", policy)
    return policy


def _check_is_policy(kind: str, who: str, policy: object) -> None:
    method = _METHODS[kind]
    if not callable(getattr(policy, method, None)):
        raise PolicyError(f"{who} has no method {method}(); {_a(kind)} policy needs one")
    name = getattr(policy, "name", None)
    if not isinstance(name, str) or not name:
        raise PolicyError(f"{who} has no name; give its class an attribute name = '...'")


def how_failed(error: BaseException) -> str:
    """Returns where a user's code raised ``error``, and what: "failed at mine.py:8 with ValueError: no room"."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (__file__, importlib.__file__)
    own = [f for f in frames if f.filename not in ours and not f.filename.startswith("<frozen ")]
    where = f" at {own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}" if own else ""
    text = " ".join(str(error).split())
    return f"failed{where} with {type(error).__name__}{f': {text}' if text else ', which has no text'}"


def _not_imported(module: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return f"there is no module {error.name} in the current folder or on PYTHONPATH"
    remedy = (
        "install that, or correct the import" if isinstance(error, ModuleNotFoundError) else "correct that"
    )
    return f"its module {how_failed(error)}; {remedy}"


def _not_found(module: ModuleType, attribute: str) -> str:
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    classes = ", ".join(key for key in own if isinstance(vars(module)[key], type))
    there = f"its classes are {classes}" if classes else "it has no class of its own"
    return f"there is no {attribute} in {getattr(module, '__file__', None) or module.__name__}; {there}"


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _unknown(what: str, name: str, valid: Iterable[str]) -> str:
    names = list(valid)
    near = difflib.get_close_matches(name.lower(), names, 2)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    own = ", or module:Class"
    if what == "policy pair":
        own = ", or PLACEMENT+ROUTING, each a name or module:Class"
    kinds: dict[str, Collection[str]] = {"policy": PAIRS, "placement": PLACEMENTS, "routing": ROUTINGS}
    if elsewhere := [f"--{option} {name}" for option, known in kinds.items() if name in known]:
        hint = f"did you mean {' or '.join(elsewhere)}? "
    return f"there is no {what} {name!r}; {hint}valid: {', '.join(names)}{own}"
