"""``summary.json``: the results of a run. Times are scenario seconds unless a key says otherwise."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from policies.problem import Hop, RequestSpec, decode_step_s
from testbed.results.changes import as_carried_out
from testbed.results.errors import Array, Tables, error, model_errors, twin_errors, twin_metrics
from testbed.results.failures import failure_summary
from testbed.results.logs import RunRecords
from testbed.results.model import HopTable
from testbed.results.requests import METRICS, stats
from testbed.results.slo import goodput_rps
from testbed.results.unused import unused_blocks
from testbed.rundir import BY_HAND
from testbed.scenario.experiment import Experiment

_MOST_REASONS = 3
"""Number of reasons of failed requests in the summary, the commonest first."""


def summarize(
    experiment: Experiment,
    plan: dict[str, Any],
    run: Tables,
    objectives: dict[str, float] | None = None,
    twin: Tables | None = None,
) -> dict[str, Any]:
    """Return the summary: counts, metrics, the closed model's metrics, the emulation's errors and overhead.

    ``plan`` is the run's ``plan.json``, ``objectives`` are limits in seconds by metric, ``twin`` is the run's
    twin, if there is one. ``docs/metrics.md`` describes the keys.
    """
    records, hops, rows = run.records, run.hops, run.rows
    statuses = [row["status"] for row in rows]
    gaps, model_gaps, alone_gaps, is_plain = _gaps(experiment, records, hops)
    plain = ~hops.is_replay
    overhead_s = (hops.measured_s - hops.model_s)[plain]
    metrics = {name: stats(row[name] for row in rows) for name in METRICS}
    metrics["token_gap_s"] = stats(gaps)
    metrics["hop_network_s"] = stats(hops.network_s[plain])
    metrics["hop_compute_s"] = stats(hops.compute_s[plain])
    metrics["hop_client_s"] = stats((hops.client_s + hops.tail_s)[plain])
    metrics["hop_overhead_s"] = stats(overhead_s)
    metrics["decision_s"] = stats(row["decision_s"] for row in rows)  # the only metric in real seconds
    metrics["schedule_lag_s"] = stats(row["schedule_lag_s"] for row in rows)
    model = {name: stats(row[f"model_{name}"] for row in rows) for name in METRICS}
    model["token_gap_s"] = stats(model_gaps)
    model["hop_network_s"] = stats(hops.model_network_s[plain])
    model["hop_compute_s"] = stats(hops.model_compute_s[plain])
    model["link_queue_s"] = stats(hops.model_link_queue_s[plain])
    if experiment.problem.hub_token_s:
        model["hop_client_s"] = stats(hops.model_client_s[plain])
    unqueued = {name: stats(row[f"unqueued_{name}"] for row in rows) for name in METRICS}
    unqueued["token_gap_s"] = stats(alone_gaps)
    by_hop = {
        "token_gap_s": error(gaps[is_plain], model_gaps[is_plain]),
        "hop_s": error(hops.measured_s[plain], hops.model_s[plain]),
    }
    clock = plan.get("clock") or {"name": "real", "why": "written before there was virtual time"}
    n_completed = statuses.count("completed")
    summary: dict[str, Any] = {
        "engine": "emulation",
        "scenario": experiment.name,
        "seed": experiment.seed,
        "workload": experiment.workload.source,
        "n_requests": len(rows),
        "n_completed": n_completed,
        "n_failed": statuses.count("failed"),
        "n_cancelled": statuses.count("cancelled"),
        "n_interrupted": statuses.count("interrupted") + statuses.count("unfinished"),
        "n_not_started": statuses.count("not-started"),
        "failed_because": dict(
            Counter(row["reason"] for row in rows if row["status"] == "failed").most_common(_MOST_REASONS)
        ),
        "clock": clock["name"],
        "clock_why": clock["why"],
        "wall_s": plan.get("wall_s"),
        "scenario_s": plan.get("scenario_s"),
        "network": plan["network"],
        "compute": experiment.compute.backend,
        "time_scale": experiment.time_scale,
        "policy": {
            "placement": experiment.policy.placement,
            "routing": experiment.policy.routing,
            "design_concurrency": plan["placement"]["design_concurrency"],
        },
        "calibration": {
            "set": experiment.calibration.name,
            "session_setup_s": experiment.calibration.session_setup_s,
        },
        "metrics": metrics,
        "model": model,
        "model_unqueued": unqueued,
        **_emulation_error(clock["name"], run, by_hop, twin),
        "hop_model_error": by_hop,
        "closed_model_lacks": _lacks(experiment, records),
        # In virtual time the testbed has no overhead: the difference is what the closed model leaves out.
        "overhead_per_hop_s": None
        if clock["name"] == "virtual" or plan["network"] == "hosts"
        else _median(overhead_s / experiment.time_scale),
        "startup_s": plan["startup_s"].get("total"),
        "forwarder": plan.get("forwarder"),
        "machines": plan.get("machines") or [],
        "stalls": _stalls(plan.get("stalls") or []),
        "decision": {
            "placement_s": plan["placement_decision_s"],
            "routing_s": stats(
                plan.get("routing_decisions_s") or (d for r in records.requests for d in r.decision_s)
            ),
            "control_plane_s": stats(a / experiment.time_scale for r in records.requests for a in r.asked_s),
        },
        "admission": _admission(records),
        "preemption": preemption_of(experiment, records.requests),
        "unused_blocks": _unused(records, plan),
        "achieved_concurrency": active_sessions(
            [(r.arrived_at_s, r.opening_at_s, r.last_seen_at_s) for r in records.requests]
        ),
        "goodput_rps": goodput_rps(rows, objectives or {}),
        "objectives": objectives or {},
        "n_link_changes_by_hand": sum(change.get("by") == BY_HAND for change in records.changes),
        "dropped_log_bytes": records.dropped_bytes,
        **failure_summary(
            [f for f in records.faults if f["event"] == "fault"],
            records.replays,
            plan,
            records.moves,
            len(experiment.faults.planned),
        ),
    }
    if plan.get("memory"):
        summary["memory"] = _memory(plan["memory"])
    if experiment.calibration.session_setup_s:
        summary["without_session_setup"] = _without_setup(experiment, rows)
    return summary


def _admission(records: RunRecords) -> dict[str, Any]:
    """Return how long every request waited until it was admitted, ended without, or the log ends.

    The metric ``queue_s`` is of admitted requests only, so it looks better when more requests give up.
    """
    waited_s = [
        (r.last_seen_at_s if r.opening_at_s is None else r.opening_at_s) - r.arrived_at_s
        for r in records.requests
    ]
    return {
        "n_never_admitted": sum(r.opening_at_s is None for r in records.requests),
        "waited_s": stats(waited_s),
    }


class _MayBePreempted(Protocol):
    """A request of a run, or of a simulation."""

    @property
    def n_preemptions(self) -> int: ...
    @property
    def preempted_tokens(self) -> int: ...
    @property
    def preempted_s(self) -> float: ...


def preemption_of(experiment: Experiment, requests: Iterable[_MayBePreempted]) -> dict[str, Any]:
    """Return how often sessions lost their caches to others, and how long they had no chain then.

    With ``cache_mode`` "reserved" there are no preemptions.
    """
    preempted = [r for r in requests if r.n_preemptions]
    return {
        "cache_mode": "reserved" if experiment.compute.paging is None else "paged",
        "n_preemptions": sum(r.n_preemptions for r in preempted),
        "n_requests": len(preempted),
        "tokens": sum(r.preempted_tokens for r in preempted),
        "waited_s": stats(r.preempted_s for r in preempted),
    }


def _unused(records: RunRecords, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Return the blocks that no request used; None if held blocks changed, by faults, replays or moves."""
    if records.faults or records.moves or records.replays:
        return None
    hops = (hop for r in records.requests if r.opened_at_s is not None for hop in r.chain)
    return unused_blocks(plan["servers"], [(r[0], r[1]) for r in plan["placement"]["ranges"]], hops)


def _stalls(stalls: list[dict[str, float]]) -> dict[str, Any]:
    """Summarize how often and how long the whole machine stood still, in real seconds."""
    took_s = [stall["real_s"] for stall in stalls]
    return {"n": len(stalls), "total_real_s": sum(took_s), "max_real_s": max(took_s, default=None)}


def _memory(servers: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Compare servers' real memory at its largest with the model's ``s_m m_j + s_c sum k`` of that instant.

    ``servers`` has ``real_bytes`` and ``model_bytes``, perhaps ``grown_bytes`` and ``n_recorded`` (sessions whose
    steps were recorded as CUDA graphs), by name.
    """
    real, model = (sum(s[key] for s in servers.values()) for key in ("real_bytes", "model_bytes"))
    recorded = [s["n_recorded"] for s in servers.values() if "n_recorded" in s]
    off = {name: s["real_bytes"] / s["model_bytes"] - 1 for name, s in servers.items() if s["model_bytes"]}
    worst = max(off, key=lambda name: abs(off[name]), default=None)
    return {
        "servers": servers,
        "real_bytes": real,
        "grown_bytes": sum(s.get("grown_bytes", 0.0) for s in servers.values()) or None,
        "n_recorded": int(sum(recorded)) if recorded else None,
        "model_bytes": model,
        "difference_ratio": real / model - 1 if model else None,
        "worst_server": worst,
        "worst_difference_ratio": off[worst] if worst is not None else None,
    }


def _gaps(
    experiment: Experiment, records: RunRecords, hops: HopTable
) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
    """Return the times of all decode tokens in seconds, in three columns, and which tokens had no replay.

    The columns are measured, by the closed model, and by the closed form without queueing.
    """
    problem = experiment.problem
    clients = {name: i for i, name in enumerate(problem.clients)}
    lengths = {r.index: r.n_input_tokens for r in experiment.workload.requests}
    sums = hops.tokens()  # in the order of the requests and of their tokens, as below
    measured: list[float] = []
    alone: list[float] = []
    times_s: dict[tuple[int, tuple[Hop, ...], int], float] = {}
    for record in records.requests:
        client, chain = clients[record.client], tuple(Hop(*hop) for hop in record.chain)
        n_input_tokens = lengths[record.index]
        request = RequestSpec(client, n_input_tokens, len(record.tokens))
        for token in record.tokens[1:]:
            measured.append(token.at_s - token.ready_at_s)
            key = client, chain, n_input_tokens + token.token - 1
            if key not in times_s:
                times_s[key] = decode_step_s(problem, request, chain, key[-1])
            alone.append(times_s[key])
    is_later = sums.token > 0
    return np.array(measured), sums.model_s[is_later], np.array(alone), ~sums.has_replay[is_later]


def _lacks(experiment: Experiment, records: RunRecords) -> list[str]:
    """Return what this run has and the closed model has not."""
    changes = [*experiment.network.changes, *as_carried_out(experiment, records)]
    links = [*experiment.network.links.values(), *(x for change in changes for x in change.links.values())]
    found = {
        "jitter": any(x.jitter_s for x in links),
        "random loss": any(0 < x.loss_ratio < 1 for x in links),
        "preemptions": any(r.n_preemptions for r in records.requests),
        "connections made anew after a failure": any(e["event"] == "begun" for e in records.faults),
    }
    return [what for what, is_there in found.items() if is_there]


def _emulation_error(clock: str, run: Tables, by_hop: dict[str, Any], twin: Tables | None) -> dict[str, Any]:
    """Return ``emulation_error``, and what it is measured against: None if a run in real time has no twin."""
    if clock == "virtual":
        return {"emulation_error": {**model_errors(run.rows), **by_hop}, "emulation_error_of": "closed model"}
    if twin is None:
        return {"emulation_error": {}, "emulation_error_of": None}
    errors, pairing = twin_errors(run, twin)
    return {
        "emulation_error": errors,
        "emulation_error_of": "twin",
        "emulation_error_pairing": pairing,
        "twin": twin_metrics(twin),
    }


def _median(values: Any) -> float | None:
    return float(np.median(values)) if len(values) else None


def active_sessions(requests: Sequence[tuple[float, float | None, float]]) -> dict[str, float | None]:
    """Return the mean and maximum number of sessions at a time, from the first arrival to the last end.

    ``requests``: for each its arrival, the start of its admitted attempt (None if it was never admitted), its
    end.
    """
    admitted = [(since_s, to_s) for _, since_s, to_s in requests if since_s is not None]
    if not admitted:
        return {"mean": None, "max": None}
    changes = sorted(change for since_s, to_s in admitted for change in ((since_s, 1), (to_s, -1)))
    span_s = changes[-1][0] - min(arrived_at_s for arrived_at_s, _, _ in requests)
    mean = math.fsum(to_s - since_s for since_s, to_s in admitted) / span_s if span_s > 0 else 0.0
    return {"mean": mean, "max": float(max(accumulate(change for _, change in changes)))}


def _without_setup(experiment: Experiment, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return these metrics with the published setup constant subtracted from every request."""
    constant = experiment.calibration.session_setup_s
    done = [row for row in rows if row["ttft_s"] is not None]
    whole = [row for row in done if row["e2e_s"] is not None]
    return {
        "ttft_s": stats(row["ttft_s"] - constant for row in done),
        "e2e_s": stats(row["e2e_s"] - constant for row in whole),
        "per_token_s": stats((row["e2e_s"] - constant) / row["n_output_tokens"] for row in whole),
    }
