"""One Monte-Carlo run of one setting: all policies with the same places of nodes, join order and arrivals.

Its measures are named ``SUBJECT/SETUP/METRIC``. Subjects are policies, sets of changes between PETALS and the
proposed policy, and ways to choose |R|; setups are how session setups count.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import chain, combinations
from typing import NamedTuple

import msgspec

from policies.cgbp import CgBp
from policies.design import choose_design_concurrency, memory_bound
from policies.interfaces import Router
from policies.petals_routing import PetalsRouting
from policies.problem import Placement, PolicyError, Problem, RequestSpec, Route
from policies.registry import resolve_pair, resolve_placement, resolve_routing
from policies.replay import ReplayedRequest, replay
from policies.search import candidate_concurrencies, search_design_concurrency
from policies.state import SystemState
from policies.workload import RequestPlan
from policies.wsrr import WsRr
from testbed.codeversion import rules_digest
from testbed.experiments import Change
from testbed.experiments.compute_tables import CalibrationTable
from testbed.experiments.sources import shipped_files
from testbed.records.plan import REFERENCE
from testbed.results.intervals import Mean, mean_of
from testbed.results.requests import values_of
from testbed.simulator.engine import FAST, TESTBED, simulate
from testbed.studies.reproduce.paper import PRINTED_POLICIES
from testbed.studies.reproduce.settings import Setting
from testbed.studies.reproduce.windows import STEPS, place_with
from testbed.studies.sweep.runs import Measures, Record, Run, Setup, case_of

FACTORS = (*STEPS, "routing", "setup")
"""The differences between PETALS and the proposed policy in the paper's experiments."""
EMULATED_EVERY = 5
"""The testbed serves runs whose seed is a multiple of this: it takes longer than all simulations of a run."""
N_CONCURRENCIES = 16
"""How many values of |R| are tried to find the best one."""

Measured = Iterator[tuple[str, float]]
"""Measures with their names."""


class Task(NamedTuple):
    """A run of a setting. ``key``: of its result in the store. ``emulated``: policies that the testbed serves, too."""

    key: str
    run: Run
    policies: tuple[str, ...]
    explained: bool
    emulated: tuple[str, ...] = ()


def task_of(setting: Setting, seed: int) -> Task:
    study, run = setting.study, setting.run(seed)
    policies = tuple(policy for policy in study.policies if study.seeds(policy, [seed]))
    emulated = PRINTED_POLICIES if setting.emulated and not seed % EMULATED_EVERY else ()
    about = [_inputs_digest(), run, policies, setting.explained, emulated]
    key = hashlib.sha256(msgspec.json.encode(about)).hexdigest()[:32]
    return Task(key, run, policies, setting.explained, emulated)


@cache
def _inputs_digest() -> str:
    """Returns a digest of the code and the files that decide results."""
    digest = hashlib.sha256(rules_digest().encode())
    own = resources.files("testbed.studies.reproduce")
    profiles = resources.files("scenarios") / "profiles"
    files = [own / "runs.py", own / "windows.py", *shipped_files().values()]
    for file in [*files, *sorted(profiles.iterdir(), key=lambda entry: entry.name)]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


@dataclass
class _Timed:
    """A router that adds up the processor time of its decisions, in seconds."""

    router: Router
    total_s: float = field(default=0.0)

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        began_s = time.thread_time()
        route = self.router.route(request, state, now_s)
        self.total_s += time.thread_time() - began_s
        return route


@dataclass(frozen=True)
class _Trial:
    """The inputs that all policies of one run share, and the session setups in seconds."""

    problem: Problem
    requests: tuple[RequestPlan, ...]
    setup_petals_s: float
    setup_proposed_s: float

    def serve(
        self, subject: str, setup: str, placement: Placement, router: Router, setup_s: float
    ) -> Measured:
        served = replay(self.problem, placement, router, self.requests, setup_s)
        for metric, value in means(served).items():
            yield f"{subject}/{setup}/{metric}", value


def begin_runs(_: None) -> Callable[[Task], Record]:
    """Returns the function that does a task in a worker: see ``testbed.studies.sweep.pool``."""
    return run_task


def run_task(task: Task) -> Record:
    """Does one run.

    Measures of a policy are means over requests in seconds, with (``reference``) and without (``none``)
    session setups, the blocks on its servers, and the processor time of its decisions, on which other load of
    the machine has little effect. A policy without a placement has none. A task that is ``explained`` has
    measures of changes and of |R|, too.
    """
    experiment = case_of(Setup("", REFERENCE), task.run).experiment
    constants = CalibrationTable.model_validate(experiment.document["calibration"])
    setups_s = constants.session_setup_petals or 0.0, constants.session_setup_proposed or 0.0
    trial = _Trial(experiment.problem, experiment.workload.requests, *setups_s)
    measures: Measures = dict(chain.from_iterable(_of_policy(trial, policy) for policy in task.policies))
    if task.explained:
        measures |= {**dict(_factors(trial)), **dict(_concurrencies(trial))}
    for policy in task.emulated:
        measures |= dict(_emulated(task.run, policy))
    return Record(task.key, engine=REFERENCE, measures=measures)


def _emulated(run: Run, policy: str) -> Measured:
    """Yields the measures of a policy on the testbed's own semantics, with session setups (``emulated``).

    The fast engine serves as the nodes do in virtual time: a refused session asks again, messages wait on links.
    """
    changes = (*run.changes, Change("calibration.session_setup", True))
    case = case_of(Setup("", FAST), run._replace(changes=changes, policy=policy))
    rows = simulate(case, TESTBED).rows
    for metric, name in (("per_token_s", "per_token_s"), ("ttft_s", "ttft_s"), ("rest_s", "tpot_s")):
        found = mean_of(values_of(rows, name))
        if found is not None:
            yield f"{policy}/emulated/{metric}", found.mean


class Results:
    """The measures of all settings' runs, in the order of the seeds."""

    def __init__(self, done: dict[str, Record], settings: Iterable[Setting], seeds: Iterable[int]) -> None:
        order = sorted(seeds)
        self._runs = {s.id: [done[task_of(s, seed).key].measures for seed in order] for s in settings}

    def runs(self, setting: Setting) -> list[Measures]:
        return self._runs[setting.id]

    def values(self, setting: Setting, subject: str, setup: str, metric: str) -> list[float]:
        """Returns one value per run that had a placement, sorted by seed."""
        name = f"{subject}/{setup}/{metric}"
        return [value for measures in self.runs(setting) if (value := measures.get(name)) is not None]

    def mean(self, setting: Setting, subject: str, setup: str, metric: str) -> Mean | None:
        """Returns the mean over the runs that had a placement; None if none had."""
        return mean_of(self.values(setting, subject, setup, metric))


def means(done: Iterable[ReplayedRequest]) -> dict[str, float]:
    """Returns means over requests in seconds: per output token, first token, each remaining token."""
    requests = list(done)
    n = len(requests)
    return {
        "per_token_s": sum(r.time_s / r.plan.n_output_tokens for r in requests) / n,
        "ttft_s": sum(r.ttft_s for r in requests) / n,
        "rest_s": sum((r.time_s - r.ttft_s) / max(r.plan.n_output_tokens - 1, 1) for r in requests) / n,
    }


def _of_policy(trial: _Trial, policy: str) -> Measured:
    placement_name, routing_name = resolve_pair(policy)
    placer = resolve_placement(placement_name)
    setup_s = trial.setup_petals_s if placer.session_setup == "petals" else trial.setup_proposed_s
    try:
        began_s = time.thread_time()
        placement = placer.place(trial.problem)
        placed_s = time.thread_time() - began_s
        for setup, seconds in (("reference", setup_s), ("none", 0.0)):
            began_s = time.thread_time()
            router = _Timed(resolve_routing(routing_name).bind(trial.problem, placement))
            bound_s = time.thread_time() - began_s
            yield from trial.serve(policy, setup, placement, router, seconds)
            yield f"{policy}/{setup}/decision_s", placed_s + bound_s + router.total_s
    except PolicyError:
        return
    most: dict[str, int] = {}
    for server, held in zip(trial.problem.servers, placement.ranges, strict=True):
        most[server.hardware] = max(most.get(server.hardware, 0), held.n_blocks)
    for hardware, n_blocks in most.items():
        yield f"{policy}/blocks/{hardware}", n_blocks


def changed(on: Iterable[str]) -> str:
    """Returns the subject that is PETALS with those ``FACTORS`` as in the proposed policy."""
    return "+".join(("changed", *(factor for factor in FACTORS if factor in set(on))))


def _factors(trial: _Trial) -> Measured:
    """Yields the measures of every set of changes but the setup, with the setup ``petals``, ``proposed`` or
    ``none``.
    """
    setups_s = {"petals": trial.setup_petals_s, "proposed": trial.setup_proposed_s, "none": 0.0}
    try:
        concurrency = choose_design_concurrency(trial.problem).value
    except PolicyError:
        return
    for steps in _subsets(STEPS):
        try:
            placement = place_with(trial.problem, steps, concurrency)
            for routing in ((), ("routing",)):
                router = (WsRr() if routing else PetalsRouting()).bind(trial.problem, placement)
                for setup, seconds in setups_s.items():
                    yield from trial.serve(changed((*steps, *routing)), setup, placement, router, seconds)
        except PolicyError:
            continue


def _subsets(names: Collection[str]) -> Iterator[tuple[str, ...]]:
    return chain.from_iterable(combinations(names, n) for n in range(len(names) + 1))


def _concurrencies(trial: _Trial) -> Measured:
    """Yields measures of the proposed policy with |R| chosen in different ways, with and without session
    setup.

    They are: ``formula``: the paper's. ``formula+setup``: the same, with the session setup as part of a
    request's time. ``one``: |R| = 1. ``bound``: the memory bound. ``searched``: the best on synthetic
    arrivals. ``hindsight``: the best on this run's own arrivals, which no policy can know.
    """
    problem = trial.problem
    try:
        formula = choose_design_concurrency(problem)
        searched = search_design_concurrency(
            problem, CgBp().place, WsRr().bind, at_most=N_CONCURRENCIES, n_streams=2
        )
    except PolicyError:
        return
    bound = memory_bound(problem)
    mean_active = problem.request_rate * (formula.single_request_s + trial.setup_proposed_s)
    choices = {
        "formula": formula.value,
        "formula+setup": max(min(round(mean_active + mean_active**0.5), bound), 1),
        "one": 1,
        "bound": bound,
        "searched": searched.value,
    }
    tried = sorted({*choices.values(), *candidate_concurrencies(problem, N_CONCURRENCIES)})
    for setup, seconds in (("reference", trial.setup_proposed_s), ("none", 0.0)):
        found: dict[int, dict[str, float]] = {}
        for concurrency in tried:
            try:
                placement = CgBp().place(problem, concurrency)
                router = WsRr().bind(problem, placement)
                found[concurrency] = dict(trial.serve("", setup, placement, router, seconds))
            except PolicyError:
                continue  # the servers have no room for this |R|
        best = min(found, key=lambda r: found[r][f"/{setup}/per_token_s"])
        for choice, concurrency in {**choices, "hindsight": best}.items():
            if concurrency in found:
                yield f"{choice}/{setup}/design_concurrency", concurrency
                yield from ((f"{choice}{name}", value) for name, value in found[concurrency].items())
