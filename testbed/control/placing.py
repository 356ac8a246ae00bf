"""Runs the placement policy of an experiment and binds its router, with the user's words for failures."""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from policies.checks import check_placement, check_route, check_waiting
from policies.interfaces import PlacementPolicy, Router, RoutingPolicy
from policies.joining import among, spread
from policies.problem import Hop, Placement, PolicyError, Problem, RequestSpec, Route
from policies.registry import PLACEMENTS, resolve_placement, resolve_routing
from policies.search import search_design_concurrency
from policies.state import SystemState
from testbed.control.fixed import PREFIX, fixed_placement, fixed_routing
from testbed.errors import UserError
from testbed.scenario.experiment import Experiment

_NONE: Mapping[str, RoutingPolicy] = MappingProxyType({})
_SAID: set[str] = set()
"""Policies whose notice is on stderr already."""
_OWN_CODE = Path(__file__).resolve().parents[1]
_DECIDING: list[str] = []
"""Policies whose code runs, the innermost last."""
_MAX_CHECKED = 65536
"""Chains whose check is remembered."""
_MAX_PLACEMENTS = 256


class CheckedRouter:
    """A router that is held to the rules and whose time is taken.

    ``decisions_s`` grows by the real seconds of each decision, ``cpu_s`` by its CPU seconds. ``check_waits`` also holds the expected
    wait to what the state says, for engines that take the policy's word for it.
    """

    def __init__(self, router: Router, problem: Problem, placement: Placement, name: str) -> None:
        self._router = router
        self._problem = problem
        self._placement = placement
        self._name = name
        self._checked: set[tuple[Hop, ...]] = set()
        self.decisions_s: list[float] = []
        self.cpu_s = 0.0
        self.check_waits = False

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Raises ``PolicyError`` naming the policy if it fails or answers a chain that breaks a rule."""
        started_at, cpu_at = time.perf_counter(), time.process_time()
        with policy_code("routing", self._name):
            route = self._router.route(request, state, now_s)
        self.cpu_s += time.process_time() - cpu_at
        self.decisions_s.append(time.perf_counter() - started_at)
        if route is None:
            return None
        if not (isinstance(route, Route) and route.wait_s >= 0 and route.hops in self._checked):
            check_route(self._problem, self._placement, route, self._name)
            if len(self._checked) >= _MAX_CHECKED:
                self._checked.clear()
            self._checked.add(route.hops)
        if self.check_waits:
            check_waiting(self._problem, request, route, state, now_s, self._name)
        return route


@dataclass(frozen=True)
class PlacedExperiment:
    """A checked placement, the router for it, and the real seconds that deciding took; ``cpu_s``: CPU seconds of the placement
    policy, also where it had decided before.

    ``bind`` makes a router for another placement of the same problem, ``bind_to`` for another problem too
    (a part of it, see ``policies.subrange``).
    """

    placement: Placement
    router: CheckedRouter
    decision_s: float
    bind: Callable[[Placement], CheckedRouter]
    bind_to: Callable[[Problem, Placement], CheckedRouter]
    cpu_s: float = 0.0


class PolicyInterrupted(PolicyError):
    """A policy was interrupted as it decided: whoever did that knows why."""


class _Interrupt(BaseException):
    """Gets out of a policy's code, which may catch what it likes of ``Exception``."""


def deciding() -> str | None:
    """Which policy's code runs now; ``None``: none does."""
    return _DECIDING[-1] if _DECIDING else None


def interrupt_policy() -> None:
    """In a signal handler: if a policy's code runs, it ends here, with ``PolicyInterrupted``."""
    if _DECIDING:
        raise _Interrupt


@contextmanager
def policy_code(kind: str, name: str) -> Iterator[None]:
    """Runs a policy's code: whatever it raises becomes a ``PolicyError`` that names it and the place."""
    _DECIDING.append(f"{kind} policy {name}")
    try:
        yield
    except PolicyError:
        raise
    except _Interrupt:
        raise PolicyInterrupted(f"{kind} policy {name} was interrupted as it decided") from None
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, TypeError) and Path(frame.filename).is_relative_to(_OWN_CODE):
            # It has not begun: the call itself does not fit.
            raise PolicyError(
                f"{kind} policy {name} does not take what policies are given: {error}; policies/interfaces.py has the methods"
            ) from error
        raise PolicyError(
            f"{kind} policy {name} failed at {Path(frame.filename).name}:{frame.lineno} with "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    finally:
        _DECIDING.pop()


def place_experiment(
    experiment: Experiment, stand_ins: Mapping[str, RoutingPolicy] = _NONE
) -> PlacedExperiment:
    """Place the blocks. Raises ``UserError`` with the policy's reason.

    ``stand_ins`` are routing policies to take in place of the registered ones of their names.
    """
    try:
        return place(experiment, stand_ins)
    except PolicyError as error:
        raise UserError(str(error)) from error


class Decided(NamedTuple):
    """A placement, and the CPU seconds that deciding it took."""

    placement: Placement
    cpu_s: float


class Placements:
    """Placements that were decided before, for runs that ask for the same ones: policies decide by what they are given.

    The order in which servers join, which every seed draws anew, is for PETALS' placements; of other shipped ones it
    changes nothing.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Any, ...], Decided | PolicyError] = OrderedDict()

    def get(self, experiment: Experiment, problem: Problem, decide: Callable[[], Decided]) -> Decided:
        """The placement of ``problem``, decided now if it was not before; or what its policy raised instead."""
        name, given = experiment.placement, experiment.design_concurrency
        if name in PLACEMENTS and not name.startswith("petals"):
            problem = dataclasses.replace(problem, join_order=())
        key = name, given, experiment.routing if given == "searched" else None, problem
        if key not in self._known:
            try:
                self._known[key] = decide()
            except PolicyInterrupted:
                raise
            except PolicyError as error:
                self._known[key] = error
            if len(self._known) > _MAX_PLACEMENTS:
                self._known.popitem(last=False)
        found = self._known[key]
        if isinstance(found, PolicyError):
            raise found
        return found


def place(
    experiment: Experiment,
    stand_ins: Mapping[str, RoutingPolicy] = _NONE,
    placements: Placements | None = None,
) -> PlacedExperiment:
    """As ``place_experiment``, but raises the ``PolicyError`` itself. ``placements``: taken from there if decided before."""
    problem = experiment.problem
    prepare_users_code(experiment)
    policy = placement_policy(experiment.placement)
    routing = stand_ins.get(experiment.routing) or routing_policy(experiment.routing)
    started_at = time.perf_counter()
    present = [j for j in range(problem.n_servers) if j not in experiment.absent]
    is_whole = len(present) == problem.n_servers or experiment.placement.startswith(PREFIX)
    there = problem if is_whole else among(problem, present)

    def search() -> Placement:
        with policy_code("placement", experiment.placement):
            given = experiment.design_concurrency
            if given != "searched":
                return policy.place(there, given)
            if getattr(policy, "searches", False):
                return policy.place(there)
            return search_design_concurrency(there, policy.place, routing.bind).placement

    def decide() -> Decided:
        began_at = time.process_time()
        return Decided(search(), time.process_time() - began_at)

    placement, cpu_s = decide() if placements is None else placements.get(experiment, there, decide)
    check_placement(there, placement, experiment.placement)
    if not is_whole:
        placement = spread(placement, present, problem.n_servers)
    for j in experiment.absent:
        if placement.ranges[j].n_blocks:
            raise PolicyError(
                f"{experiment.placement} puts blocks on {problem.servers[j].name}, which has present = false and is "
                "not there at the start; give it none"
            )

    def bind_to(problem: Problem, placement: Placement) -> CheckedRouter:
        with policy_code("routing", experiment.routing):
            router = routing.bind(problem, placement)
        if not callable(getattr(router, "route", None)):
            raise PolicyError(
                f"routing policy {experiment.routing} must answer a router with a method route() from bind(), not "
                f"{type(router).__name__}"
            )
        return CheckedRouter(router, problem, placement, experiment.routing)

    bind = partial(bind_to, problem)
    router = bind(placement)
    return PlacedExperiment(placement, router, time.perf_counter() - started_at, bind, bind_to, cpu_s)


def prepare_users_code(experiment: Experiment) -> None:
    """Before policies are looked up: ``module:Class`` may be in the current folder, too.

    A file may come from anybody: that it has code run is said, once, before it does.
    """
    look_here(experiment.placement + experiment.routing + (experiment.online or ""))
    names = [name for name in experiment.code_in_file if name not in _SAID]
    if names:
        _SAID.update(names)
        print(f"notice: the scenario file has code of {', '.join(names)} run as its policy", file=sys.stderr)


def look_here(names: str) -> None:
    """Before policies of these names are looked up: where one is ``module:Class``, its module may be in the current folder, too."""
    if ":" in names and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def placement_data(placement: Placement) -> dict[str, Any]:
    """A placement as ``plan.json`` has it: ranges half-open and 0-based."""
    return {
        "policy": placement.policy,
        "ranges": [list(r) for r in placement.ranges],
        "cache_bytes": list(placement.cache_bytes),
        "design_concurrency": placement.design_concurrency,
        "bounds": dict(placement.bounds),
    }


def placement_policy(name: str) -> PlacementPolicy:
    """The placement policy of a name as scenarios give it. Raises ``PolicyError`` or ``UserError``."""
    return fixed_placement(name) if name.startswith(PREFIX) else resolve_placement(name)


def routing_policy(name: str) -> RoutingPolicy:
    """The routing policy of a name as scenarios give it. Raises ``PolicyError`` or ``UserError``."""
    return fixed_routing(name) if name.startswith(PREFIX) else resolve_routing(name)
