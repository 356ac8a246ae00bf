"""One Monte-Carlo run of one setting: all policies with the same places of nodes, join order and arrivals."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from typing import Any

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
from testbed.scenario import load_experiment
from testbed.scenario.experiment import Experiment
from testbed.studies.reproduce.lines import LINES
from testbed.studies.reproduce.settings import SETUP_PROPOSED_S, Setting
from testbed.studies.reproduce.windows import STEPS, place_with

FACTORS = (*STEPS, "routing", "setup")
"""The differences between PETALS and the proposed policy in the paper's experiments."""
N_CONCURRENCIES = 16
"""How many values of |R| are tried to find the best one."""

Row = dict[str, Any]


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
    """The inputs that all policies of one run share. ``planned``: the problem that placement policies see."""

    problem: Problem
    planned: Problem
    requests: tuple[RequestPlan, ...]
    setup_petals_s: float

    def serve(self, placement: Placement, router: Router, setup_s: float) -> Row:
        return means(replay(self.problem, placement, router, self.requests, setup_s))


def experiment_of(setting: Setting, seed: int) -> Experiment:
    """Returns the setting's scenario for ``seed``, with the setting's own join order if it has one."""
    experiment = load_experiment(setting.scenario, setting.changes(seed))
    if setting.join_order is None:
        return experiment
    return replace(experiment, problem=replace(experiment.problem, join_order=setting.join_order))


def run_setting(setting: Setting, seed: int) -> Row:
    """Does one run. Returns ``{policies, factors?, concurrencies?}``, each a list of rows.

    A row of ``policies`` is one policy with (``setup`` reference) or without (none) session setups: means
    over requests in seconds, or ``infeasible`` with the reason. ``decision_s`` is processor time in seconds,
    on which other load of the machine has little effect. ``factors`` and ``concurrencies`` are there if the
    setting has ``factors``.
    """
    experiment = experiment_of(setting, seed)
    problem = experiment.problem
    planned = problem if setting.planned_rate is None else replace(problem, request_rate=setting.planned_rate)
    trial = _Trial(problem, planned, experiment.workload.requests, setting.setup_petals_s)
    answer: Row = {"policies": list(_policies(trial, seed))}
    if setting.factors:
        answer["factors"] = list(_factors(trial))
        answer["concurrencies"] = list(_concurrencies(trial))
    return answer


def begin_runs(_: None) -> Callable[[tuple[Setting, int]], Row]:
    """Returns the function that does a task in a worker: see ``testbed.studies.sweep.pool``."""
    return lambda task: run_setting(*task)


def means(done: Iterable[ReplayedRequest]) -> Row:
    """Returns means over requests in seconds: per output token, first token, each remaining token,
    waiting.
    """
    requests = list(done)
    n = len(requests)
    return {
        "per_token_s": sum(r.time_s / r.plan.n_output_tokens for r in requests) / n,
        "ttft_s": sum(r.ttft_s for r in requests) / n,
        "rest_s": sum((r.time_s - r.ttft_s) / max(r.plan.n_output_tokens - 1, 1) for r in requests) / n,
        "waiting_s": sum(r.waiting_s for r in requests) / n,
    }


def blocks_by_hardware(problem: Problem, placement: Placement) -> dict[str, int]:
    """Returns hardware -> the most blocks that a server with it holds."""
    most: dict[str, int] = {}
    for server, held in zip(problem.servers, placement.ranges, strict=True):
        most[server.hardware] = max(most.get(server.hardware, 0), held.n_blocks)
    return most


def _policies(trial: _Trial, seed: int) -> Iterator[Row]:
    for line in LINES:
        if seed % line.every:
            continue
        placement_name, routing_name = resolve_pair(line.name)
        setup_s = SETUP_PROPOSED_S if line.own_setup else trial.setup_petals_s
        try:
            began_s = time.thread_time()
            placement = resolve_placement(placement_name).place(trial.planned)
            placed_s = time.thread_time() - began_s
            for setup, seconds in (("reference", setup_s), ("none", 0.0)):
                began_s = time.thread_time()
                router = _Timed(resolve_routing(routing_name).bind(trial.problem, placement))
                bound_s = time.thread_time() - began_s
                row = {"policy": line.name, "setup": setup, **trial.serve(placement, router, seconds)}
                row["design_concurrency"] = placement.design_concurrency
                row["blocks"] = blocks_by_hardware(trial.problem, placement)
                row["decision_s"] = placed_s + bound_s + router.total_s
                yield row
        except PolicyError as error:
            yield {"policy": line.name, "infeasible": str(error)}


def _factors(trial: _Trial) -> Iterator[Row]:
    """Yields one row per set of ``FACTORS`` that are as in the proposed policy; the others are as in PETALS.

    Rows with ``setup`` "none" have no session setup at all.
    """
    try:
        concurrency = choose_design_concurrency(trial.planned).value
    except PolicyError as error:
        yield {"infeasible": str(error)}
        return
    for steps in _subsets(STEPS):
        try:
            placement = place_with(trial.planned, steps, concurrency)
            for routing in (False, True):
                router = (WsRr() if routing else PetalsRouting()).bind(trial.problem, placement)
                on = [*steps, *(["routing"] if routing else [])]
                setups: Mapping[str, float] = {
                    "petals": trial.setup_petals_s,
                    "proposed": SETUP_PROPOSED_S,
                    "none": 0.0,
                }
                for setup, seconds in setups.items():
                    yield {"on": on, "setup": setup, **trial.serve(placement, router, seconds)}
        except PolicyError as error:
            yield {"on": list(steps), "infeasible": str(error)}


def _subsets(names: Collection[str]) -> Iterator[tuple[str, ...]]:
    return chain.from_iterable(combinations(names, n) for n in range(len(names) + 1))


def _concurrencies(trial: _Trial) -> Iterator[Row]:
    """Yields rows of the proposed policy with |R| chosen in different ways, with and without session setup.

    ``choice`` is one of these: ``formula``: the paper's. ``formula+setup``: the same, with the session setup
    as part of a request's time. ``one``: |R| = 1. ``bound``: the memory bound. ``searched``: the best on
    synthetic arrivals. ``hindsight``: the best on this run's own arrivals, which no policy can know.
    """
    try:
        formula = choose_design_concurrency(trial.planned)
        searched = search_design_concurrency(
            trial.planned, CgBp().place, WsRr().bind, at_most=N_CONCURRENCIES, n_streams=2
        )
    except PolicyError as error:
        yield {"infeasible": str(error)}
        return
    bound = memory_bound(trial.planned)
    mean_active = trial.planned.request_rate * (formula.single_request_s + SETUP_PROPOSED_S)
    with_setup = max(min(round(mean_active + mean_active**0.5), bound), 1)
    choices = {
        "formula": formula.value,
        "formula+setup": with_setup,
        "one": 1,
        "bound": bound,
        "searched": searched.value,
    }
    tried = sorted({*choices.values(), *candidate_concurrencies(trial.planned, N_CONCURRENCIES)})
    for setup, seconds in (("reference", SETUP_PROPOSED_S), ("none", 0.0)):
        found: dict[int, Row] = {}
        for concurrency in tried:
            try:
                placement = CgBp().place(trial.planned, concurrency)
                router = WsRr().bind(trial.problem, placement)
                found[concurrency] = trial.serve(placement, router, seconds)
            except PolicyError:
                continue  # the servers have no room for this |R|
        best = min(found, key=lambda r: found[r]["per_token_s"])
        for choice, concurrency in {**choices, "hindsight": best}.items():
            if concurrency in found:
                yield {
                    "choice": choice,
                    "setup": setup,
                    "design_concurrency": concurrency,
                    **found[concurrency],
                }
