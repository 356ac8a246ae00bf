"""Runs one case: decides the placement, then serves every request in one of three engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from policies.online import OnlinePolicy
from policies.problem import InfeasiblePlacement, Placement, PolicyError
from policies.registry import ROUTINGS
from policies.replay import replay
from testbed.control.placing import PlacedExperiment, RememberedPlacements, place
from testbed.control.steering import online_policy
from testbed.errors import UserError
from testbed.experiments.experiment import Experiment
from testbed.experiments.hours import has_hours
from testbed.experiments.units import counted
from testbed.fast.disturbances import disturbance
from testbed.fast.engine import OnEnd, simulate_fast
from testbed.fast.outcome import Disturbed, SimulatedRequest
from testbed.fast.rehearsal import rehearsal
from testbed.records.links import link_name
from testbed.records.plan import REFERENCE, PlacementRow, Plan
from testbed.records.requests import COMPLETED, RequestRow
from testbed.records.summary import MOST_LINKS, SIMULATED, SIMULATION, LinkRow, RunSummary
from testbed.runtime.signals import Interruption
from testbed.simulator.cases import Case, Served
from testbed.simulator.rows import outcome_rows
from testbed.terminal import say

TESTBED = "testbed"
MODES = TESTBED, REFERENCE
"""The modes: the testbed's own semantics, or those of the paper's public simulator (with its own engine)."""
MAX_STEPS = 5_000_000
"""Most rows of ``hops.parquet`` (hops of tokens); with more it is left out, which ``summary.json`` states."""
FAST, VIRTUAL = "fast", "virtual"
"""The engines of mode ``testbed``."""
BUSIEST = "; the busiest link, "
"""What begins the last part of the reason for the engine ``fast``, the only one that differs between seeds."""
RECOVERED = "sessions that lose a server recover"
"""Why the engine ``fast`` serves what disturbs sessions midway."""
EMULATED = "emulated"
"""The mode of a case that `testbed up` ran: shown beside the modes of the simulator."""


@dataclass(frozen=True)
class Simulation:
    """A case and its result. Without a feasible placement nothing was served, and ``error`` is the reason.

    ``engine`` is the engine that served it (reference, fast, or virtual: the testbed itself in virtual time),
    and ``why`` the reason for it. ``placement_s`` is the real time of the placement's decision,
    ``placement_cpu_s`` its CPU time, ``routing_cpu_s`` the mean CPU time of a routing decision (``None``:
    there was none), in seconds.
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

    @cached_property
    def rows(self) -> Sequence[RequestRow]:
        """A row per request; in the engines fast and reference without the ``unqueued`` metrics, which take time."""
        if self.served.rows is not None:
            return self.served.rows
        return outcome_rows(self.case.experiment.problem, self.served.outcomes)

    @property
    def links(self) -> Sequence[LinkRow] | None:
        """The busiest links; ``None``: the engine has none of their use."""
        if (summary := self.served.summary) is not None:
            return summary.links or None
        return None if self.served.links is None else self.served.links.rows[:MOST_LINKS]

    @property
    def plan(self) -> Plan:
        """The plan. Only for a feasible simulation."""
        experiment = self.case.experiment
        assert self.placement is not None, "an infeasible placement has no plan"
        return Plan(
            placement=PlacementRow.of(self.placement),
            routing=experiment.policy.routing,
            mode=self.mode,
            servers=[s.name for s in experiment.problem.servers],
            clients=list(experiment.problem.clients),
            placement_decision_s=self.placement_s,
            network=SIMULATED,
        )


def engine_of(summary: RunSummary) -> str:
    """Return which engine served the run of ``summary``: "fast" or "reference", or the clock of one of the system itself."""
    if summary.engine == SIMULATION:
        return REFERENCE if summary.get("mode") == REFERENCE else FAST
    return summary.clock


def simulate(
    case: Case,
    mode: str,
    *,
    is_virtual: bool = False,
    folder: Path | None = None,
    announce: Callable[[str], None] = lambda text: None,
    placements: RememberedPlacements | None = None,
    live: bool = True,
    interruption: Interruption | None = None,
) -> Simulation:
    """Decide the placement and serve the requests.

    ``is_virtual``: use the engine ``virtual`` even if a faster one could serve the case. ``folder``: where
    that engine leaves its run directory; ``None``: it is deleted. ``announce`` is called with the engine that
    begins and the reason. ``placements``: as in ``place``. ``live``: the progress is shown; ``interruption`` ends
    the engine ``virtual``. Raises ``UserError`` if a policy fails or breaks a rule, or if the mode cannot serve the case.
    """
    experiment = case.experiment
    try:
        online = None if mode == REFERENCE else online_policy(experiment)
        engine, why = (VIRTUAL, "asked for") if is_virtual else _engine(case, mode, online)
        placed = place(
            experiment,
            case.stand_ins,
            placements,
            as_reference=mode == REFERENCE,
            rehearse=None if mode == REFERENCE else rehearsal,
        )
    except InfeasiblePlacement as error:
        return Simulation(case, mode, engine, why, error=str(error))
    except PolicyError as error:
        raise UserError(f"{experiment.name}: {error}") from error
    try:
        if engine == FAST:
            try:
                needs_steps = folder is not None or bool(experiment.costs.power_w)
                says = Says(len(experiment.workload.requests)) if live else None
                served, how = _fast(case, placed, online, MAX_STEPS if needs_steps else 0, says)
                why = f"{why if served.is_undisturbed else RECOVERED}; {how}"
            except Disturbed as disturbed:
                engine, why = VIRTUAL, str(disturbed)
        announce(f"engine {engine}: {why}")
        if engine == REFERENCE:
            served = _reference(case, placed)
        elif engine == VIRTUAL:
            from testbed.simulator.virtual import serve_virtually  # with all that a run needs

            served = serve_virtually(case, placed, folder, live=live, interruption=interruption)
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
    """Return the engine for a case, and why.

    Raises ``UserError`` for keys that mode ``reference`` does not have.
    """
    experiment = case.experiment
    disturbing = disturbance(experiment, online)
    if mode == REFERENCE:
        for is_asked, what in (
            (experiment.policy.online is not None, "policy.online"),
            (experiment.workload.backoff.jitter_ratio > 0, "backoff.jitter"),
            (experiment.workload.backoff.give_up_s > 0, "backoff.give_up"),
            (any(link.jitter_s for link in experiment.network.links.values()), "jitter of links"),
            (any(link.loss_ratio for link in experiment.network.links.values()), "loss of packets"),
            (experiment.policy.state_age_s > 0, "policy.state_age"),
            (experiment.policy.queue is not None, "policy.queue"),
            (experiment.problem.hub_token_s > 0, "compute.hub_token"),
            (bool(experiment.problem.hub_tokens_s), "hardware of clients"),
            (
                any(r.max_new_tokens is not None for r in experiment.workload.requests),
                'workload.lengths = "hidden"',
            ),
            (experiment.compute.batching != "none", "compute.batching"),
            (experiment.compute.paging is not None, "cache.mode paged"),
            (experiment.compute.prefix is not None, "cache.prefix"),
            (experiment.problem.decoding is not None, "decoding.drafter"),
            (has_hours(experiment), "servers.hours"),
            (has_further_turns(experiment), "workload.turns"),
            (bool(experiment.faults.planned), "fault or churn"),
            (bool(experiment.faults.absent), "servers.present = false"),
            (bool(experiment.network.changes), "network.event"),
            (disturbing is not None, disturbing),
        ):
            if is_asked:
                raise UserError(
                    f"{experiment.name}: {what} has no meaning in the reference mode; add --mode {TESTBED}"
                )
        return REFERENCE, "asked for" if case.source is None else "an instance file"
    if disturbing is not None:
        return VIRTUAL, f"{disturbing} can disturb a session midway"
    return FAST, "nothing disturbs a session midway"


def has_further_turns(experiment: Experiment) -> bool:
    """Whether requests arrive when earlier ones have ended."""
    return any(r.turn is not None and r.turn.after is not None for r in experiment.workload.requests)


def _reference(case: Case, placed: PlacedExperiment) -> Served:
    """Serve a case as the published simulator does; see ``policies.replay``."""
    experiment, router = case.experiment, placed.router
    # This mode uses the wait that the router returns. Tests check it for shipped policies, this for others.
    router.check_waits = experiment.policy.routing not in ROUTINGS
    setup_s = experiment.calibration.session_setup_s
    done = replay(
        experiment.problem,
        placed.placement,
        router,
        experiment.workload.requests,
        setup_s,
        experiment.workload.backoff,
    )
    setup_s += experiment.problem.initial_delay_s
    requests = tuple(
        SimulatedRequest(
            d.plan,
            COMPLETED,
            d.route,
            0,
            d.waiting_s,
            setup_s,
            d.ttft_s,
            d.time_s,
            d.time_s,
            cost_s=d.route.cost_s,
            wait_expected_s=d.route.wait_s,
        )
        for d in done
    )
    return Served(requests, routing_s=tuple(router.decisions_s))


class Says:
    """Called with how many requests have ended, says so on stderr every ``EVERY_S`` of ``clock``, which returns seconds."""

    EVERY_S = 10.0

    def __init__(self, n_requests: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._n_requests, self._clock = n_requests, clock
        self._began_at_s = self._said_at_s = clock()

    def __call__(self, n_ended: int) -> None:
        now_s = self._clock()
        if now_s - self._said_at_s >= self.EVERY_S:
            self._said_at_s = now_s
            took_s = now_s - self._began_at_s
            say(f"{n_ended:,} of {counted(self._n_requests, 'requests')} have ended after {took_s:.0f} s")


def _fast(
    case: Case,
    placed: PlacedExperiment,
    online: OnlinePolicy | None,
    most_steps: int,
    on_end: OnEnd | None,
) -> tuple[Served, str]:
    """Serve a case as the testbed's nodes and coordinator do; see ``testbed.fast.engine``.

    Returns also how it was served, and why so.
    """
    run = simulate_fast(case.experiment, placed, online, on_end=on_end, most_steps=most_steps)
    served = Served(
        outcomes=tuple(run.requests),
        moves=tuple(run.moves),
        routing_s=tuple(run.decisions_s),
        steps=run.steps,
        n_steps=run.n_steps,
        gaps_s=run.gaps_s,
        links=run.links,
        faults=run.faults,
        is_undisturbed=not run.is_cut,
    )
    if run.links is None or not run.links.rows:
        return served, run.why
    busiest = run.links.rows[0]
    link = link_name(busiest.from_, busiest.to)
    return served, f"{run.why}{BUSIEST}{link}, is used {busiest.use_ratio:.0%} of the time"
