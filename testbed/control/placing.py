"""Runs the placement policy of an experiment and binds its router, with error messages for the user."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from types import MappingProxyType
from typing import Any, NamedTuple

from policies.checks import check_placement, check_route, check_times, check_waiting, plain
from policies.interfaces import PlacementPolicy, Router, RoutingPolicy, Want, trait, wants_of
from policies.joining import among, spread
from policies.outcomes import Outcome
from policies.problem import Hop, Placement, PolicyError, Problem, RequestSpec, Route
from policies.registry import (
    OBJECT,
    ROUTINGS,
    PrintsToStderr,
    how_failed,
    resolve,
    resolve_placement,
    resolve_routing,
)
from policies.rehearsal import Rehearsal
from policies.search import search_design_concurrency
from policies.state import SystemState
from testbed.control.fixed import fixed_placement, fixed_routing
from testbed.errors import UserError
from testbed.experiments import Override, Target, load_experiment
from testbed.experiments.experiment import Experiment
from testbed.experiments.filesread import note_policy
from testbed.experiments.policy import FIXED, UNREAD, Policies
from testbed.experiments.schema import PolicyTable
from testbed.terminal import told_if_long, unsaid

log = logging.getLogger(__name__)

_NONE: Mapping[str, RoutingPolicy] = MappingProxyType({})
_OWN_CODE = Path(__file__).resolve().parents[1]
_DECIDING: list[tuple[int, str]] = []
"""Policies whose code is running and the threads that run it, the innermost last. One list for the process: the
thread of ``StallWatch`` reads it, too, and would see no context variable of another thread.
"""
_MAX_CHECKED = 65536
"""Most chains that are remembered as checked."""
_MAX_PLACEMENTS = 256


def used_cpu_s() -> float:
    """Return the CPU seconds that this process has used, and its children that have ended: policies may begin programs."""
    of_children = getrusage(RUSAGE_CHILDREN)
    return time.process_time() + of_children.ru_utime + of_children.ru_stime


class CheckedRouter:
    """A router whose chains are checked by the rules, and whose decisions are timed.

    ``decisions_s`` gets the real seconds of each decision, ``cpu_s`` is their CPU seconds in total.
    ``check_waits``: also check the expected wait against the state, for engines that rely on it.
    """

    def __init__(self, router: Router, problem: Problem, placement: Placement, name: str) -> None:
        self._router = router
        self._problem = problem
        self._placement = placement
        self._name = name
        self._checked: dict[tuple[Hop, ...], tuple[Hop, ...]] = {}
        self._observe: Callable[[Outcome], None] | None = getattr(router, "observe", None)
        self._n_observed = 0
        self.decisions_s: list[float] = []
        self.cpu_s = 0.0
        self.check_waits = False

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """As ``Router.route``.

        Raises ``PolicyError`` if the policy fails or returns a chain that breaks a rule.
        """
        started_at, cpu_at = time.perf_counter(), used_cpu_s()
        with policy_code("routing", self._name):
            if self._observe is not None and state.outcomes is not None:
                for outcome in state.outcomes.since(self._n_observed):
                    self._observe(outcome)
                self._n_observed = state.outcomes.n_known
            route = self._router.route(request, state, now_s)
        self.cpu_s += used_cpu_s() - cpu_at
        self.decisions_s.append(time.perf_counter() - started_at)
        if route is None:
            return None
        route = self._in_order(route)
        if self.check_waits:
            check_waiting(self._problem, request, route, state, now_s, self._name)
        return route

    @property
    def observes(self) -> bool:
        """Whether the policy learns from what became of requests."""
        return self._observe is not None

    def _in_order(self, route: Route) -> Route:
        """Returns the route with its chain as it was checked, and Python's own numbers. Raises ``PolicyError``."""
        try:
            hops = self._checked.get(route.hops)
        except (AttributeError, TypeError):  # not a route, or no tuple of hops: ``check_route`` says so
            hops = None
        if hops is None:
            check_route(self._problem, self._placement, route, self._name)
            if len(self._checked) >= _MAX_CHECKED:
                self._checked.clear()
            hops = self._checked[route.hops] = route.hops
        else:
            check_times(route, self._name)
        return Route(hops, plain(route.wait_s), plain(route.cost_s))


class _BrokenInTrial(BaseException):
    """A router broke in a trial of placements; no ``Exception``, because a search takes those for placements that serve nothing."""

    def __init__(self, error: PolicyError) -> None:
        self.error = error


class _RouterInTrial(CheckedRouter):
    """A user's router in a search: where it breaks, it says so, and not the placement policy."""

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        try:
            return super().route(request, state, now_s)
        except PolicyError as error:
            raise _BrokenInTrial(error) from None


@dataclass(frozen=True)
class PlacedExperiment:
    """A checked placement and its router.

    ``decision_s`` are the real seconds that both took. ``cpu_s`` are the CPU seconds of the placement policy,
    also if its placement was known before. ``bind`` makes a router for another placement of the same problem,
    ``bind_to`` one for another problem, too (a part of it, see ``policies.subrange``). ``observes``: whether the router
    learns from what became of requests; ``names_requests``: whether it wants to know which request asks.
    """

    placement: Placement
    router: CheckedRouter
    decision_s: float
    bind: Callable[[Placement], CheckedRouter]
    bind_to: Callable[[Problem, Placement], CheckedRouter]
    cpu_s: float = 0.0
    observes: bool = False
    names_requests: bool = False


class PolicyInterrupted(PolicyError):
    """A policy was interrupted by ``interrupt_policy`` while it decided."""


class _Interrupt(BaseException):
    """Ends a policy's code, for a reason if it has one; no ``Exception``, because that code may catch those."""


def deciding() -> str | None:
    """Returns the kind and name of the policy whose code is running now; ``None`` if none is."""
    return _DECIDING[-1][1] if _DECIDING else None


def interrupt_policy(why: str = "") -> None:
    """End the policy's code that this thread runs, if any, with ``PolicyInterrupted``, which says ``why``. For signal handlers."""
    if any(thread == threading.get_ident() for thread, _ in _DECIDING):
        raise _Interrupt(f": {why}" if why else "")


@contextmanager
def policy_code(kind: str, name: str) -> Iterator[None]:
    """Run a policy's code in the body: its exceptions become a ``PolicyError`` with its name and line."""
    deciding = threading.get_ident(), f"{kind} policy {name}"
    _DECIDING.append(deciding)
    try:
        with PrintsToStderr():
            yield
    except PolicyError as error:
        if not str(error).strip():
            error.args = (
                f"{kind} policy {name} raises {type(error).__name__} without a text; have it name the reason",
            )
        raise
    except _Interrupt as why:
        raise PolicyInterrupted(f"{kind} policy {name} was interrupted while it decided{why}") from None
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, TypeError) and Path(frame.filename).is_relative_to(_OWN_CODE):
            # The policy's code has not begun: its parameters do not match the call.
            raise PolicyError(
                f"{kind} policy {name} cannot be called as policies are: {error}; "
                "policies/interfaces.py has the methods"
            ) from error
        raise PolicyError(f"{kind} policy {name} {how_failed(error)}") from error
    finally:
        _DECIDING.remove(deciding)


def load_to_run(target: Target, overrides: Sequence[Override] = ()) -> Experiment:
    """Load a scenario whose policies are to run: as ``load_experiment``, with the traits of users' policies.

    This runs the code of policies that are not shipped, those of the file after a notice. Raises
    ``ScenarioError``, also if one cannot be loaded.
    """
    return load_experiment(target, overrides, users_policy)


def users_policy(kind: str, name: str, is_of_file: bool = False) -> object:
    """Load a policy that is not shipped; ``is_of_file``: only a file names it. Raises ``PolicyError``."""
    import_from_here(name)
    note_policy(name)
    if is_of_file:
        _give_notice([name])
    return resolve(kind, name)


Rehearse = Callable[[Experiment, Mapping[str, RoutingPolicy], Sequence[int]], Rehearsal | None]
"""See ``testbed.fast.rehearsal.rehearsal``."""


def place_experiment(experiment: Experiment, rehearse: Rehearse | None = None) -> PlacedExperiment:
    """Place the blocks; ``rehearse``: as in ``place``. Raises ``UserError`` with the policy's reason."""
    try:
        return place(experiment, rehearse=rehearse)
    except PolicyError as error:
        raise UserError(str(error)) from error


class Decided(NamedTuple):
    """A placement, and the CPU seconds that deciding it took."""

    placement: Placement
    cpu_s: float


class RememberedPlacements:
    """Remembers placements, for runs that need the same ones: policies depend only on their arguments."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Any, ...], Decided | PolicyError] = OrderedDict()

    def get(self, experiment: Experiment, problem: Problem, decide: Callable[[], Decided]) -> Decided:
        """Returns the placement of ``problem``; calls ``decide`` unless it is known.

        Raises the ``PolicyError`` of ``decide``, which is remembered, too.
        """
        given = experiment.policy.design_concurrency
        key = (
            experiment.policy.placement,
            given,
            experiment.policy.routing if given == "searched" else None,
            problem,
        )
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
    placements: RememberedPlacements | None = None,
    *,
    as_reference: bool = False,
    rehearse: Rehearse | None = None,
    decided: Placement | None = None,
) -> PlacedExperiment:
    """As ``place_experiment``, but raises the ``PolicyError`` itself.

    - ``stand_ins``: routing policies to use instead of those registered under their names
    - ``placements``: remembers placements
    - ``as_reference``: policies do not see the links' rates, since in the reference no message waits for another, and
      choose |R| as the reference does, whatever block caps leave room for
    - ``rehearse``: makes what policies try placements with; ``None``: they cannot
    - ``decided``: a placement as the policy returns it, to use without asking the policy
    """
    problem = experiment.problem
    if as_reference:
        problem = dataclasses.replace(problem, links=None, caps_limit_concurrency=False)
    prepare_users_code(experiment)
    policy = placement_policy(experiment.policy.placement)
    routing = stand_ins.get(experiment.policy.routing) or routing_policy(experiment.policy.routing)
    if experiment.policy.unread:
        _check_nothing_was_missed(experiment, policy, routing)
    started_at = time.perf_counter()
    problem_of_placing = problem.as_seen(counts_drafts=trait(policy, PlacementPolicy, "counts_drafts"))
    present = [j for j in range(problem.n_servers) if j not in experiment.faults.absent]
    is_whole = len(present) == problem.n_servers or trait(policy, PlacementPolicy, "sees_absent_servers")
    seen = range(problem.n_servers) if is_whole else present
    there = problem_of_placing if is_whole else among(problem_of_placing, present)
    if not trait(policy, PlacementPolicy, "sees_join_order"):  # every seed draws another one
        there = dataclasses.replace(there, join_order=())
    wanted = wants_of(policy)
    there = _with_wanted(experiment, there, wanted, seen)
    if rehearse is not None and decided is None and "rehearsal" in wanted:
        there = dataclasses.replace(there, rehearsal=rehearse(experiment, stand_ins, seen))
    wants = wants_of(routing)
    if "rehearsal" in wants and not hasattr(routing, "place"):
        raise PolicyError(
            f"routing policy {experiment.policy.routing} wants a rehearsal, which only placement policies get; leave it out"
        )

    def search() -> Placement:
        with policy_code("placement", experiment.policy.placement):
            given = experiment.policy.design_concurrency
            if given != "searched":
                return policy.place(there, given)
            if trait(policy, PlacementPolicy, "searches"):
                return policy.place(there)
            try:
                return search_design_concurrency(there, place_in_trial, bind_in_trial).placement
            except _BrokenInTrial as broken:
                raise broken.error from None

    def place_in_trial(problem: Problem, concurrency: int | None) -> Placement:
        placement = policy.place(problem, concurrency)
        return check_placement(problem, placement, experiment.policy.placement)

    def bind_in_trial(problem: Problem, placement: Placement) -> Router:
        name = experiment.policy.routing
        with policy_code("routing", name):
            router = routing.bind(_with_wanted(experiment, problem, wants, seen), placement)
        return router if name in ROUTINGS else _RouterInTrial(router, problem, placement, name)

    def decide() -> Decided:
        if decided is not None:
            return Decided(decided, 0.0)
        name, began_at = experiment.policy.placement, used_cpu_s()
        with told_if_long(f"placement policy {name} decides which blocks go where; Ctrl-C stops it"):
            return Decided(search(), used_cpu_s() - began_at)

    placement, cpu_s = decide() if placements is None else placements.get(experiment, there, decide)
    placement = check_placement(there, placement, experiment.policy.placement)
    if not is_whole:
        placement = spread(placement, present, problem.n_servers)
    for j in experiment.faults.absent:
        if placement.ranges[j].n_blocks:
            raise PolicyError(
                f"{experiment.policy.placement} puts blocks on {problem.servers[j].name}, which has present = false, or "
                "hours that begin later, and is not there at the start; give it none"
            )

    counts_drafts = trait(routing, RoutingPolicy, "counts_drafts")

    def bind_to(problem: Problem, placement: Placement) -> CheckedRouter:
        problem = _with_wanted(experiment, problem.as_seen(counts_drafts=counts_drafts), wants)
        with policy_code("routing", experiment.policy.routing):
            router = routing.bind(problem, placement)
        if not callable(getattr(router, "route", None)):
            raise PolicyError(
                f"routing policy {experiment.policy.routing} must return a router with a method route() from "
                f"bind(), not {type(router).__name__}"
            )
        return CheckedRouter(router, problem, placement, experiment.policy.routing)

    bind = partial(bind_to, problem)
    router = bind(placement)
    took_s = time.perf_counter() - started_at
    learns = router.observes, "requests" in wants
    return PlacedExperiment(placement, router, took_s, bind, bind_to, cpu_s, *learns)


def _with_wanted(
    experiment: Experiment, problem: Problem, wants: Collection[Want], servers: Sequence[int] | None = None
) -> Problem:
    """Return the problem with what a policy ``wants``, and without what it does not; ``servers``: those of the problem.

    It has no rehearsals: only placements get them.
    """
    places = None
    if "places" in wants:
        places = experiment.places
        places = places if servers is None else places.among(servers)
    seed = experiment.seed if "seed" in wants else None
    if (places, seed, None) == (problem.places, problem.seed, problem.rehearsal):
        return problem
    return dataclasses.replace(problem, places=places, seed=seed, rehearsal=None)


def _check_nothing_was_missed(
    experiment: Experiment, placement: PlacementPolicy, routing: RoutingPolicy
) -> None:
    """Raise ``PolicyError`` if traits that were not read would have changed what is about to run."""
    decided = Policies(placement, routing, None).decide(PolicyTable())
    for key in ("queue", "communication", "session_setup"):
        value = getattr(decided, key)
        if key not in experiment.document["policy"] and value != UNREAD[key]:
            raise PolicyError(f"a policy states {key} = {value!r}, which was not read: use load_to_run()")


def prepare_users_code(experiment: Experiment) -> None:
    """Prepare the lookup of policies: lets ``module:Class`` be found in the current folder, too.

    If the scenario file names code to run, logs a notice, once for each policy: files may come from
    strangers.
    """
    import_from_here(
        experiment.policy.placement + experiment.policy.routing + (experiment.policy.online or "")
    )
    _give_notice(experiment.policy.code_in_file)


def _give_notice(of_file: Iterable[str]) -> None:
    """Log which policies' code runs because the scenario file names it, once for each."""
    names = unsaid(of_file)
    if names:
        log.warning(f"notice: the scenario file runs code of {', '.join(names)} as its policy")


def import_from_here(names: str) -> None:
    """If a policy name is ``module:Class``, let modules be found in the current folder, too.

    For as long as the process lives: the module may import others of that folder when its policy decides.
    """
    if ":" in names.replace(OBJECT, "") and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def placement_policy(name: str) -> PlacementPolicy:
    """Returns the placement policy for a name in a scenario. Raises ``PolicyError`` or ``UserError``."""
    return fixed_placement(name) if name.startswith(FIXED) else resolve_placement(name)


def routing_policy(name: str) -> RoutingPolicy:
    """Returns the routing policy for a name in a scenario. Raises ``PolicyError`` or ``UserError``."""
    return fixed_routing(name) if name.startswith(FIXED) else resolve_routing(name)


def followers(placement: Placement, server: int) -> Iterator[int]:
    """Yield the servers that can follow ``server`` in a chain: those that hold the block after its last."""
    last = placement.ranges[server].last
    for number, blocks in enumerate(placement.ranges):
        if number != server and placement.ranges[server].n_blocks and blocks.first <= last < blocks.last:
            yield number
