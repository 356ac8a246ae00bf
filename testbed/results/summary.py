"""Makes the summary of a run: what every engine has, and what only a run of the system has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from netem.networks import NETWORKS
from policies.problem import Hop, RequestSpec, decode_step_s
from testbed.experiments.experiment import Experiment
from testbed.experiments.slo import Objectives
from testbed.records.events import BY_HAND, FaultHappened, ServerBegun
from testbed.records.plan import REFERENCE, Clock, Plan
from testbed.records.requests import COMPLETED, FAILED, NOT_STARTED, RequestRow
from testbed.records.summary import (
    EMULATION,
    Admission,
    CalibrationUsed,
    Concurrency,
    Decision,
    MemoryUse,
    PolicyUsed,
    Preemption,
    RunSummary,
    Stalls,
    WithoutSetup,
)
from testbed.results.bounds import bounds_of
from testbed.results.changes import as_carried_out
from testbed.results.clients import clients_of
from testbed.results.conversations import prefix_use, ttft_by_turn
from testbed.results.costs import add_costs
from testbed.results.errors import Array, Tables, error, model_errors, twin_errors, twin_metrics
from testbed.results.failures import add_failures, commonest
from testbed.results.hop_table import HopTable
from testbed.results.logs import RunRecords
from testbed.results.requests import stats, times_stats
from testbed.results.served import compared
from testbed.results.slo import goodput_rps
from testbed.results.slow import HALTING
from testbed.results.speculation import speculation_of
from testbed.results.unused import unused_blocks

_MOST_REASONS = 3
"""Number of reasons of failed requests in the summary, the commonest first."""
RANDOM_LOSS = "random loss"
"""How ``closed_model_lacks`` names packets that links lose at random."""


def summarize(
    experiment: Experiment,
    plan: Plan,
    run: Tables,
    objectives: Objectives | None = None,
    twin: Tables | None = None,
) -> RunSummary:
    """Return the summary of a run of the system: what any run has, and what only nodes and networks have.

    ``twin`` is the run's twin, if there is one.
    """
    records, hops, rows = run.records, run.hops, run.rows
    clock = plan.clock or Clock(name="real", why="written before there was virtual time")
    summary = common_summary(EMULATION, experiment, plan, rows, objectives or Objectives())
    gaps, model_gaps, alone_gaps, is_plain = _gaps(experiment, records, hops)
    plain = ~hops.is_replay
    overhead_s = (hops.measured_s - hops.model_s)[plain]
    summary.metrics |= {
        "token_gap_s": stats(gaps),
        "hop_network_s": stats(hops.network_s[plain]),
        "hop_compute_s": stats(hops.compute_s[plain]),
        "hop_client_s": stats((hops.client_s + hops.tail_s)[plain]),
        "hop_overhead_s": stats(overhead_s),
        "decision_s": stats(row.decision_s for row in rows),  # the only metric in real seconds
        "schedule_lag_s": stats(row.schedule_lag_s for row in rows),
    }
    summary.model |= {
        "token_gap_s": stats(model_gaps),
        "hop_network_s": stats(hops.model_network_s[plain]),
        "hop_compute_s": stats(hops.model_compute_s[plain]),
        "link_queue_s": stats(hops.model_link_queue_s[plain]),
    }
    if experiment.problem.has_hub_time:
        summary.model["hop_client_s"] = stats(hops.model_client_s[plain])
    summary.model_unqueued["token_gap_s"] = stats(alone_gaps)
    summary.clock, summary.clock_why = clock.name, clock.why
    summary.wall_s, summary.scenario_s = plan.wall_s, plan.scenario_s
    summary.hop_model_error = {
        "token_gap_s": error(gaps[is_plain], model_gaps[is_plain]),
        "hop_s": error(hops.measured_s[plain], hops.model_s[plain]),
    }
    if twin is not None and experiment.workload.endpoint_tokens:
        run, twin = compared(run, twin)
    _add_emulation_error(summary, run, twin, is_measured=experiment.compute.is_measured)
    summary.closed_model_links = hops.model_links
    summary.closed_model_lacks = _lacks(experiment, records, hops)
    # In virtual time the testbed has no overhead: the difference is what the closed model leaves out.
    network = NETWORKS.get(plan.network)
    has_overhead = clock.name == "real" and (network is None or network.emulates)
    summary.overhead_per_hop_s = _median(overhead_s / experiment.time_scale) if has_overhead else None
    summary.startup_s = plan.startup_s.get("total")
    summary.forwarder, summary.machines = plan.forwarder, plan.machines
    stalled_s = [stall.real_s for stall in plan.stalls]
    summary.stalls = Stalls(
        n=len(stalled_s), total_real_s=sum(stalled_s), max_real_s=max(stalled_s, default=None)
    )
    summary.decision = Decision(
        placement_s=plan.placement_decision_s,
        routing_s=stats(plan.routing_decisions_s or (d for r in records.requests for d in r.decision_s)),
        control_plane_s=stats(a / experiment.time_scale for r in records.requests for a in r.asked_s),
    )
    # The blocks that servers held are known only if no fault, replay or move changed them.
    if records.faults or records.moves or records.replays:
        summary.unused_blocks = None
    summary.n_link_changes_by_hand = sum(change.by == BY_HAND for change in records.changes)
    summary.dropped_log_bytes = records.dropped_bytes
    add_failures(summary, records, plan, len(experiment.faults.planned))
    add_costs(summary, experiment, rows, hops)
    if plan.memory:
        summary.memory = _memory(plan.memory)
    return summary


def common_summary(
    engine: str,
    experiment: Experiment,
    plan: Plan,
    rows: Sequence[RequestRow],
    objectives: Objectives,
) -> RunSummary:
    """Return the part of the summary that follows from the plan and the rows of the requests, in every engine.

    The rows get their ``completion_bound_s``.
    """
    count = Counter(row.status for row in rows)
    calibration = experiment.calibration
    admitted = [row for row in rows if row.times.queue_s is not None]
    preempted = [row for row in rows if row.n_preemptions]
    proved = {name: value for name, value in plan.placement.bounds.items() if value is not None}
    placement = replace(plan.placement.placement(), bounds=proved)
    return RunSummary(
        engine=engine,
        scenario=experiment.name,
        seed=experiment.seed,
        workload=experiment.workload.source,
        n_requests=len(rows),
        n_completed=count[COMPLETED],
        n_failed=count[FAILED],
        n_cancelled=count["cancelled"],
        n_interrupted=count["interrupted"] + count["unfinished"],
        n_not_started=count[NOT_STARTED],
        failed_because=commonest(((row.reason, 1) for row in rows if row.status == FAILED), _MOST_REASONS),
        network=plan.network,
        compute=experiment.compute.backend,
        time_scale=experiment.time_scale,
        policy=PolicyUsed(
            placement=experiment.policy.placement,
            routing=experiment.policy.routing,
            design_concurrency=plan.placement.design_concurrency,
        ),
        bounds=bounds_of(experiment, placement, rows, plan.mode == REFERENCE),
        calibration=CalibrationUsed(set=calibration.name, session_setup_s=calibration.session_setup_s),
        metrics=times_stats(rows),
        clients=clients_of(experiment.problem.clients, rows, objectives),
        model=times_stats(rows, "model"),
        model_unqueued=times_stats(rows, "unqueued"),
        # ``queue_s`` is of completed requests only, so it looks better when more requests give up.
        admission=Admission(
            n_never_admitted=sum(row.arrived_at_s is not None for row in rows) - len(admitted),
            waited_s=stats(row.waited_s for row in rows),
        ),
        prefix=prefix_use(rows),
        turns=ttft_by_turn(rows),
        preemption=Preemption(
            cache_mode="reserved" if experiment.compute.paging is None else "paged",
            n_preemptions=sum(row.n_preemptions for row in preempted),
            n_requests=len(preempted),
            tokens=sum(row.preempted_tokens for row in preempted),
            waited_s=stats(row.preempted_s for row in preempted),
        ),
        speculation=speculation_of(experiment.problem.decoding, rows),
        unused_blocks=unused_blocks(plan, rows),
        achieved_concurrency=active_sessions(rows),
        goodput_rps=goodput_rps(rows, objectives),
        objectives=dict(objectives.common),
        without_session_setup=_without_setup(experiment, rows) if calibration.session_setup_s else UNSET,
    )


def _memory(servers: dict[str, dict[str, float]]) -> MemoryUse:
    """Compare servers' real memory at its largest with the model's ``s_m m_j + s_c sum k`` of that instant.

    ``servers`` has ``real_bytes`` and ``model_bytes``, perhaps ``grown_bytes`` and ``n_recorded``, by name.
    """
    real, model = (sum(s[key] for s in servers.values()) for key in ("real_bytes", "model_bytes"))
    recorded = [s["n_recorded"] for s in servers.values() if "n_recorded" in s]
    off = {name: s["real_bytes"] / s["model_bytes"] - 1 for name, s in servers.items() if s["model_bytes"]}
    worst = max(off, key=lambda name: abs(off[name]), default=None)
    return MemoryUse(
        servers=servers,
        real_bytes=real,
        grown_bytes=sum(s.get("grown_bytes", 0.0) for s in servers.values()) or None,
        n_recorded=int(sum(recorded)) if recorded else None,
        model_bytes=model,
        difference_ratio=real / model - 1 if model else None,
        worst_server=worst,
        worst_difference_ratio=off[worst] if worst is not None else None,
    )


def _gaps(
    experiment: Experiment, records: RunRecords, hops: HopTable
) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
    """Return the times of all decode steps in seconds, in three columns, and which steps had no replay.

    A step makes one token, or those of a round of speculative decoding. The columns are measured, by the closed model, and by the closed form without queueing.
    """
    problem = experiment.problem
    clients = {name: i for i, name in enumerate(problem.clients)}
    lengths = {r.index: r.n_input_tokens for r in experiment.workload.requests}
    sums = hops.tokens()  # in the order of the requests and of their tokens, as below
    measured: list[float] = []
    alone: list[float] = []
    times_s: dict[tuple[int, tuple[Hop, ...], int, int], float] = {}
    for record in records.requests:
        client, chain = clients[record.client], tuple(Hop(*hop) for hop in record.chain)
        n_input_tokens = lengths[record.index]
        request = RequestSpec(client, n_input_tokens, len(record.tokens))
        rounds = iter(record.rounds)
        for token in record.decode_steps:
            measured.append(token.at_s - token.ready_at_s)
            round_ = next(rounds, None)
            key = client, chain, n_input_tokens + token.token - 1, 0 if round_ is None else round_.tokens
            if key not in times_s:
                times_s[key] = decode_step_s(problem, request, chain, *key[2:])
            alone.append(times_s[key])
    is_later = sums.token > 0
    return np.array(measured), sums.model_s[is_later], np.array(alone), ~sums.has_replay[is_later]


def _lacks(experiment: Experiment, records: RunRecords, hops: HopTable) -> list[str]:
    """Return what this run has and the closed model has not."""
    changes = [*experiment.network.changes, *as_carried_out(experiment, records)]
    links = [*experiment.network.links.values(), *(x for change in changes for x in change.links.values())]
    found = {
        "jitter": any(x.jitter_s for x in links),
        RANDOM_LOSS: any(0 < x.loss_ratio < 1 for x in links),
        "caches filled from the hub's history": any(r.n_filled_tokens for r in records.requests),
        "rounds of drafts that were sent ahead in vain": any(
            round_.given_up for r in records.requests for round_ in r.rounds
        ),
        "preemptions": any(r.n_preemptions for r in records.requests),
        "requests that were under way at the end": any(
            r.status in ("unfinished", "interrupted") for r in records.requests
        ),
        "halted servers": any(
            isinstance(event, FaultHappened) and event.applies and event.kind in HALTING
            for event in records.faults
        ),
        "connections made anew after a failure": any(
            isinstance(event, ServerBegun) for event in records.faults
        ),
    }
    return [what for what, is_there in found.items() if is_there] + hops.links_lack


def _add_emulation_error(summary: RunSummary, run: Tables, twin: Tables | None, *, is_measured: bool) -> None:
    """Add the errors, and what they are measured against.

    That is None if a run in real time has no twin, or not ``is_measured``: the twin has times of other blocks.
    """
    summary.emulation_error, summary.emulation_error_of = {}, None
    if summary.clock == "virtual":
        assert summary.hop_model_error, "set before"
        summary.emulation_error = {**model_errors(run.rows), **summary.hop_model_error}
        summary.emulation_error_of = "closed model"
    elif twin is not None:
        summary.twin = twin_metrics(twin)
        if is_measured:
            summary.emulation_error, summary.emulation_error_pairing = twin_errors(run, twin)
            summary.emulation_error_of = "twin"


def _median(values: Any) -> float | None:
    return float(np.median(values)) if len(values) else None


def active_sessions(rows: Iterable[RequestRow], *, from_arrival: bool = False) -> Concurrency:
    """Return the mean and maximum number of sessions at a time, from the first arrival to the last end of any request.

    A session is active from the start of the attempt that was admitted to its end, or ``from_arrival`` every request from
    its arrival to its end.
    """
    known = [(row, row.arrived_at_s, row.ended_at_s) for row in rows]
    arrived = [at_s for _, at_s, _ in known if at_s is not None]
    ended = [to_s for _, _, to_s in known if to_s is not None]
    spans = [
        (at_s + waited_s, to_s)
        for row, at_s, to_s in known
        if at_s is not None
        and to_s is not None
        and (waited_s := 0.0 if from_arrival else row.times.queue_s) is not None
    ]
    if not spans:
        return Concurrency()
    changes = sorted(change for since_s, to_s in spans for change in ((since_s, 1), (to_s, -1)))
    span_s = max(ended) - min(arrived)
    mean = math.fsum(to_s - since_s for since_s, to_s in spans) / span_s if span_s > 0 else 0.0
    return Concurrency(mean=mean, max=float(max(accumulate(change for _, change in changes))))


def _without_setup(experiment: Experiment, rows: Sequence[RequestRow]) -> WithoutSetup:
    """Return these metrics with the published setup constant subtracted from every request."""
    constant = experiment.calibration.session_setup_s
    done = [(row.times.ttft_s, row.times.e2e_s, row.n_tokens_done) for row in rows if row.is_completed]
    return WithoutSetup(
        ttft_s=stats(ttft_s - constant for ttft_s, _, _ in done if ttft_s is not None),
        e2e_s=stats(e2e_s - constant for _, e2e_s, _ in done if e2e_s is not None),
        per_token_s=stats((e2e_s - constant) / n for _, e2e_s, n in done if e2e_s is not None),
    )
