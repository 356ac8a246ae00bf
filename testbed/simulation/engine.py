"""Runs one case without a network: placement, then every request under the reference semantics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from policies.problem import Hop, InfeasiblePlacement, Placement, PolicyError
from policies.registry import ROUTINGS
from policies.replay import replay
from policies.workload import RequestPlan
from testbed.errors import UserError
from testbed.placing import PlacedExperiment, place
from testbed.simulation.cases import Case

MODES = ("reference", "real")


class SimulatedRequest(NamedTuple):
    """What became of a request. Times count from its arrival; ``None``: it did not get so far.

    ``waiting_s`` ends when the attempt that was admitted begins, ``setup_s`` when the session is open.
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


@dataclass(frozen=True)
class Simulation:
    """A case and its outcome; without a feasible placement, ``error`` says why and there are no requests.

    ``placement_s`` and ``routing_s`` are the real seconds that placement and all routing decisions took.
    """

    case: Case
    mode: str
    placement: Placement | None
    requests: tuple[SimulatedRequest, ...]
    placement_s: float
    routing_s: tuple[float, ...]
    error: str | None = None


def simulate(case: Case, mode: str) -> Simulation:
    """Place and serve. Raises ``UserError`` when a policy fails or breaks a rule."""
    try:
        placed = place(case.experiment, case.stand_ins)
    except InfeasiblePlacement as error:
        return Simulation(case, mode, None, (), 0.0, (), str(error))
    except PolicyError as error:
        raise UserError(f"{case.experiment.name}: {error}") from error
    try:
        requests = _reference(case, placed)
    except PolicyError as error:
        raise UserError(f"{case.experiment.name}: {error}") from error
    return Simulation(
        case, mode, placed.placement, requests, placed.decision_s, tuple(placed.router.decisions_s)
    )


def _reference(case: Case, placed: PlacedExperiment) -> tuple[SimulatedRequest, ...]:
    """As the published simulator does: see ``policies.replay``."""
    experiment, router = case.experiment, placed.router
    # This mode takes the router's word for the wait; shipped policies are tested for it.
    router.check_waits = experiment.routing not in ROUTINGS
    setup_s = experiment.calibration.session_setup_s
    done = replay(
        experiment.problem, placed.placement, router, experiment.requests, setup_s, experiment.backoff
    )
    setup_s += experiment.problem.initial_delay_s
    return tuple(
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
