"""Runs one case without a network: placement, then every request, in one of two modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from policies.problem import Hop, InfeasiblePlacement, Placement, PolicyError, Problem
from policies.registry import ROUTINGS
from policies.replay import replay
from policies.workload import RequestPlan
from testbed.errors import UserError
from testbed.moving.steering import Move, online_policy
from testbed.placing import CheckedRouter, PlacedExperiment, place
from testbed.simulation import real
from testbed.simulation.cases import Case
from testbed.simulation.failing import simulate_failing
from testbed.simulation.failures import failures_of
from testbed.simulation.moving import Online
from testbed.simulation.network import ChangingNetwork
from testbed.simulation.real import simulate_real
from testbed.simulation.record import Record

MODES = ("reference", "real")


class SimulatedRequest(NamedTuple):
    """What became of a request. Times count from its arrival; ``None``: it did not get so far.

    ``waiting_s`` ends when the attempt that was admitted begins, ``setup_s`` when the session is open.
    ``n_cuts`` is how often a moving server cut the session.
    """

    plan: RequestPlan
    status: str
    hops: tuple[Hop, ...]
    expected_wait_s: float
    n_rejections: int
    waiting_s: float
    setup_s: float
    ttft_s: float | None
    time_s: float | None
    reason: str = ""
    n_cuts: int = 0
    n_replays: int = 0
    n_done: int = 0
    """Tokens of one that did not complete."""


@dataclass(frozen=True)
class Simulation:
    """A case and its outcome; without a feasible placement, ``error`` says why and there are no requests.

    ``moves`` are the servers' changes under an online policy, and of servers that joined. ``record`` is what
    happened in a run with faults.
    ``engine`` is what served it: reference, fast, or virtual (the testbed itself in virtual time).
    ``placement_s`` and ``routing_s`` are the real seconds that placement and all routing decisions took.
    """

    case: Case
    mode: str
    placement: Placement | None
    requests: tuple[SimulatedRequest, ...]
    moves: tuple[Move, ...]
    placement_s: float
    routing_s: tuple[float, ...]
    error: str | None = None
    record: Record | None = None
    engine: str = ""


def simulate(case: Case, mode: str, serve: Serve | None = None) -> Simulation:
    """Place and serve, as ``serve`` does if given, else as ``mode`` says.

    Raises ``UserError`` when a policy fails or breaks a rule, or if the mode does not fit.
    """
    experiment = case.experiment
    failures = failures_of(experiment)
    if mode == "reference":
        for is_asked, what in (
            (experiment.online is not None, "policy.online"),
            (experiment.backoff.jitter_ratio > 0, "backoff.jitter"),
            (experiment.state_age_s > 0, "policy.state_age"),
            (experiment.serial_compute, "compute.serial"),
            (experiment.problem.hub_token_s > 0, "compute.hub_token"),
            (bool(experiment.changes), "network.event"),
            (any(s.contention_ratio for s in experiment.problem.servers), "contention of hardware"),
            (failures is not None, "what happens to servers (fault, churn, present = false, membership)"),
        ):
            if is_asked:
                raise UserError(
                    f"{experiment.name}: {what} has no meaning in the reference mode; add --mode real"
                )
    engine = "virtual" if serve is not None else "reference" if mode == "reference" else "fast"
    try:
        placed = place(experiment, case.stand_ins)
    except InfeasiblePlacement as error:
        return Simulation(case, mode, None, (), (), 0.0, (), str(error), None, engine)
    except PolicyError as error:
        raise UserError(f"{experiment.name}: {error}") from error
    try:
        if serve is None:
            serve = _reference if mode == "reference" else _real
        served = serve(case, placed)
    except PolicyError as error:
        raise UserError(f"{experiment.name}: {error}") from error
    return Simulation(case, mode, placed.placement, *served, engine)


Served = tuple[tuple[SimulatedRequest, ...], tuple[Move, ...], float, tuple[float, ...], None, Record | None]
"""Requests, moves of servers, the real seconds of placing and of each routing decision, no error, what happened."""
Serve = Callable[[Case, PlacedExperiment], Served]


def _reference(case: Case, placed: PlacedExperiment) -> Served:
    """As the published simulator does: see ``policies.replay``."""
    experiment, router = case.experiment, placed.router
    # This mode takes the router's word for the wait; shipped policies are tested for it.
    router.check_waits = experiment.routing not in ROUTINGS
    setup_s = experiment.calibration.session_setup_s
    done = replay(
        experiment.problem, placed.placement, router, experiment.requests, setup_s, experiment.backoff
    )
    setup_s += experiment.problem.initial_delay_s
    requests = tuple(
        SimulatedRequest(
            d.plan,
            "completed",
            d.route.hops,
            d.route.wait_s,
            0,
            d.waiting_s,
            setup_s,
            d.ttft_s,
            d.time_s,
        )
        for d in done
    )
    return requests, (), placed.decision_s, tuple(router.decisions_s), None, None


def _real(case: Case, placed: PlacedExperiment) -> Served:
    """As the testbed's nodes and coordinator do: see ``testbed.simulation.real`` and ``failing``."""
    experiment = case.experiment
    routers = [placed.router]

    def bind_to(problem: Problem, placement: Placement) -> CheckedRouter:
        routers.append(placed.bind_to(problem, placement))
        return routers[-1]

    def bind(placement: Placement) -> CheckedRouter:
        return bind_to(experiment.problem, placement)

    done: Sequence[real.SimulatedRequest]
    moves: Sequence[Move]
    record = None
    failures = failures_of(experiment)
    policy = online_policy(experiment)
    online = Online(policy, experiment.load_bps, bind) if policy is not None else None
    if failures is not None:
        done, moves, record = simulate_failing(
            experiment.problem,
            placed.placement,
            bind_to,
            experiment.requests,
            failures,
            session_setup_s=experiment.calibration.session_setup_s,
            backoff=experiment.backoff,
            serial_compute=experiment.serial_compute,
            state_age_s=experiment.state_age_s,
            network=ChangingNetwork(experiment, loses_nothing=True) if experiment.changes else None,
            online=online,
        )
    else:
        done, moves = simulate_real(
            experiment.problem,
            placed.placement,
            placed.router,
            experiment.requests,
            session_setup_s=experiment.calibration.session_setup_s,
            backoff=experiment.backoff,
            serial_compute=experiment.serial_compute,
            state_age_s=experiment.state_age_s,
            online=online,
            network=ChangingNetwork(experiment) if experiment.changes else None,
        )
    requests = tuple(
        SimulatedRequest(
            r.plan,
            r.status,
            r.route.hops if r.route else (),
            r.route.wait_s if r.route else 0.0,
            r.n_attempts - 1,
            r.waiting_s,
            r.setup_s or 0.0,
            r.ttft_s,
            r.time_s if r.status == real.COMPLETED else None,
            r.reason,
            r.n_cuts,
            r.n_replays,
            r.n_done,
        )
        for r in done
    )
    decisions_s = tuple(chain.from_iterable(router.decisions_s for router in routers))
    return requests, tuple(moves), placed.decision_s, decisions_s, None, record
