"""Runs one case: placement, then every request, in one of three engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from policies.online import OnlinePolicy
from policies.problem import InfeasiblePlacement, Placement, PolicyError
from policies.registry import ROUTINGS
from policies.replay import replay
from testbed.control.placing import PlacedExperiment, Placements, place
from testbed.control.steering import online_policy
from testbed.errors import UserError
from testbed.fast.engine import COMPLETED, Disturbed, SimulatedRequest, goes_step_by_step, simulate_fast
from testbed.scenario.experiment import Experiment
from testbed.simulate.cases import Case, Served
from testbed.simulate.virtual import serve_virtually

TESTBED, REFERENCE = MODES = "testbed", "reference"
"""Whose semantics: the testbed's own, or those of the paper's public simulator (an engine of its own)."""
MAX_STEPS = 5_000_000
"""Above so many hops of tokens ``hops.parquet`` is left out; ``summary.json`` says so."""
FAST, VIRTUAL = "fast", "virtual"
"""The engines of mode ``testbed``."""
EMULATED = "emulated"
"""The mode of a case that `testbed up` ran."""


@dataclass(frozen=True)
class Simulation:
    """A case and its outcome; without a feasible placement, ``error`` says why and nothing was served.

    ``engine`` is what served it, and ``why`` that one: reference, fast, or virtual (the testbed itself in
    virtual time). ``placement_s`` are the real seconds that placement took, ``placement_cpu_s`` and ``routing_cpu_s`` the CPU seconds of the
    policies: of the one placement, and of a routing decision in the mean (``None``: there was none).
    """

    case: Case
    mode: str
    engine: str
    why: str
    placement: Placement | None = None
    placement_s: float = 0.0
    served: Served = Served()  # noqa: RUF009 - immutable
    error: str | None = None
    placement_cpu_s: float = 0.0
    routing_cpu_s: float | None = None

    @property
    def requests(self) -> tuple[SimulatedRequest, ...]:
        return self.served.requests


def simulate(
    case: Case,
    mode: str,
    *,
    is_virtual: bool = False,
    folder: Path | None = None,
    announce: Callable[[str], None] = lambda text: None,
    placements: Placements | None = None,
    live: bool = True,
) -> Simulation:
    """Place and serve. ``is_virtual``: by the system itself, even if a faster engine would do.

    ``folder`` is where a run of the system itself goes, which else is not kept. ``announce`` is called with which engine
    begins, and why. ``placements``: as ``place``. ``live``: a run of the system
    shows its progress. Raises ``UserError`` when a policy fails or breaks a rule, or if the mode does not fit.
    """
    experiment = case.experiment
    try:
        online = None if mode == REFERENCE else online_policy(experiment)
        engine, why = (VIRTUAL, "asked for") if is_virtual else _engine(case, mode, online)
        placed = place(experiment, case.stand_ins, placements)
    except InfeasiblePlacement as error:
        return Simulation(case, mode, engine, why, error=str(error))
    except PolicyError as error:
        raise UserError(f"{experiment.name}: {error}") from error
    announce(f"engine {engine}: {why}")
    try:
        if engine == FAST:
            try:
                served = _fast(case, placed, online, MAX_STEPS if folder is not None else 0)
            except Disturbed as disturbed:
                engine, why = VIRTUAL, str(disturbed)
                announce(f"engine {engine}: {why}")
        if engine == REFERENCE:
            served = _reference(case, placed)
        elif engine == VIRTUAL:
            served = serve_virtually(case, placed, folder, live=live)
    except PolicyError as error:
        raise UserError(f"{experiment.name}: {error}") from error
    router = placed.router
    return Simulation(
        case,
        mode,
        engine,
        why,
        placed.placement,
        placed.decision_s,
        served,
        placement_cpu_s=placed.cpu_s,
        routing_cpu_s=router.cpu_s / len(router.decisions_s) if router.decisions_s else None,
    )


def _engine(case: Case, mode: str, online: OnlinePolicy | None) -> tuple[str, str]:
    """Which engine serves a case, and why. Raises ``UserError`` for what the reference mode does not have."""
    experiment = case.experiment
    disturbance = _disturbance(experiment, online)
    if mode == REFERENCE:
        for is_asked, what in (
            (experiment.online is not None, "policy.online"),
            (experiment.backoff.jitter_ratio > 0, "backoff.jitter"),
            (experiment.state_age_s > 0, "policy.state_age"),
            (experiment.queue is not None, "policy.queue"),
            (experiment.problem.hub_token_s > 0, "compute.hub_token"),
            (any(r.max_new_tokens is not None for r in experiment.requests), 'workload.lengths = "hidden"'),
            (experiment.batching != "none", "compute.batching"),
            (experiment.paging is not None, "cache.mode paged"),
            (disturbance is not None, disturbance),
        ):
            if is_asked:
                raise UserError(
                    f"{experiment.name}: {what} has no meaning in the reference mode; add --mode {TESTBED}"
                )
        return REFERENCE, "asked for" if case.source is None else "an instance file"
    if disturbance is not None:
        return VIRTUAL, f"{disturbance} can disturb a session midway"
    if goes_step_by_step(experiment):
        what = "caches grow" if experiment.paging is not None else "sessions share steps"
        return FAST, f"nothing disturbs a session midway; step by step, since {what}"
    return FAST, "nothing disturbs a session midway"


def _disturbance(experiment: Experiment, online: OnlinePolicy | None) -> str | None:
    """The key of a scenario that makes sessions depend on what happens midway; ``None``: they last as long as modelled."""
    found = (
        (bool(experiment.faults), "fault or churn"),
        (bool(experiment.absent), "servers.present = false"),
        (experiment.membership.kind != "instant", "membership"),
        (bool(experiment.changes), "network.event"),
        (experiment.batching == "serial", "compute.batching serial"),
        (
            online is not None and experiment.paging is not None,
            f"policy.online {experiment.online}, where caches grow,",
        ),
        (any(s.contention_ratio for s in experiment.problem.servers), "contention of hardware"),
        (
            online is not None and not online.drains,
            f"policy.online {experiment.online}, which cuts sessions,",
        ),
    )
    return next((what for is_there, what in found if is_there), None)


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
        SimulatedRequest(d.plan, COMPLETED, d.route, 0, d.waiting_s, setup_s, d.ttft_s, d.time_s, d.time_s)
        for d in done
    )
    return Served(requests, routing_s=tuple(router.decisions_s))


def _fast(case: Case, placed: PlacedExperiment, online: OnlinePolicy | None, most_steps: int) -> Served:
    """As the testbed's nodes and coordinator do: see ``testbed.fast.engine``."""
    run = simulate_fast(case.experiment, placed, online, most_steps=most_steps)
    requests, moves, decisions_s = tuple(run.requests), tuple(run.moves), tuple(run.decisions_s)
    return Served(requests, moves, decisions_s, None, run.steps, run.n_steps, run.gaps_s)
