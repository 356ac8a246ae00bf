"""``summary.json``: what a run came to. Scenario seconds unless a key says otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from testbed.experiment import Experiment
from testbed.results.failures import failure_summary
from testbed.results.logs import RunRecords
from testbed.results.model import HopTable
from testbed.results.requests import METRICS, stats
from testbed.results.slo import goodput_rps

_ERROR_METRICS = ("ttft_s", "tpot_s", "per_token_s", "e2e_s")


def summarize(
    experiment: Experiment,
    plan: dict[str, Any],
    records: RunRecords,
    hops: HopTable,
    rows: list[dict[str, Any]],
    objectives: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Counts, metrics, the model beside them, the emulation's error, and its own overhead."""
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
    metrics["decision_s"] = stats(row["decision_s"] for row in rows)  # the only one in real seconds
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
    error = {
        "token_gap_s": _error(np.array(gaps)[is_plain], np.array(model_gaps)[is_plain]),
        "hop_s": _error(hops.measured_s[plain], hops.model_s[plain]),
        **{name: _error(*_pairs(rows, name)) for name in _ERROR_METRICS},
    }
    n_completed = statuses.count("completed")
    summary: dict[str, Any] = {
        "engine": "emulation",
        "scenario": experiment.name,
        "seed": experiment.seed,
        "n_requests": len(rows),
        "n_completed": n_completed,
        "n_failed": statuses.count("failed"),
        "n_interrupted": len(rows) - n_completed - statuses.count("failed"),
        "network": plan["network"],
        "compute": experiment.compute,
        "time_scale": experiment.time_scale,
        "policy": {
            "placement": experiment.placement,
            "routing": experiment.routing,
            "design_concurrency": plan["placement"]["design_concurrency"],
        },
        "calibration": {
            "set": experiment.calibration.name,
            "session_setup_s": experiment.calibration.session_setup_s,
        },
        "metrics": metrics,
        "model": model,
        "model_unqueued": unqueued,
        "emulation_error": error,
        "overhead_per_hop_s": _median(overhead_s / experiment.time_scale),
        "startup_s": plan["startup_s"].get("total"),
        "forwarder": plan.get("forwarder"),
        "decision": {
            "placement_s": plan["placement_decision_s"],
            "routing_s": stats(d for r in records.requests for d in r.decision_s),
            "control_plane_s": stats(a / experiment.time_scale for r in records.requests for a in r.asked_s),
        },
        "achieved_concurrency": _concurrency(records),
        "goodput_rps": goodput_rps(rows, objectives or {}),
        "objectives": objectives or {},
        "dropped_log_bytes": records.dropped_bytes,
        **failure_summary(
            [f for f in records.faults if f["event"] == "fault"],
            records.replays,
            plan,
            records.moves,
            len(experiment.faults),
        ),
    }
    if plan.get("memory"):
        summary["memory"] = _memory(plan["memory"])
    if experiment.calibration.session_setup_s:
        summary["without_session_setup"] = _without_setup(experiment, rows)
    return summary


def _memory(servers: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Real memory of servers when it was largest, beside the model's ``s_m m_j + s_c sum k`` of that moment."""
    real, model = (sum(s[key] for s in servers.values()) for key in ("real_bytes", "model_bytes"))
    off = {name: s["real_bytes"] / s["model_bytes"] - 1 for name, s in servers.items() if s["model_bytes"]}
    worst = max(off, key=lambda name: abs(off[name]), default=None)
    return {
        "servers": servers,
        "real_bytes": real,
        "model_bytes": model,
        "difference_ratio": real / model - 1 if model else None,
        "worst_server": worst,
        "worst_difference_ratio": off[worst] if worst is not None else None,
    }


def _gaps(
    experiment: Experiment, records: RunRecords, hops: HopTable
) -> tuple[list[float], list[float], list[float], NDArray[np.bool_]]:
    """Decode tokens' times: measured, modelled, by the closed form without queueing, and which had no replay."""
    modelled: dict[tuple[int, int], float] = {}
    keys = zip(hops.request.tolist(), hops.token.tolist(), hops.model_s.tolist(), strict=True)
    for request, token, value in keys:
        modelled[request, token] = modelled.get((request, token), 0.0) + value
    problem = experiment.problem
    clients = {name: i for i, name in enumerate(problem.clients)}
    lengths = {r.index: r.n_input_tokens for r in experiment.requests}
    measured: list[float] = []
    model: list[float] = []
    alone: list[float] = []
    is_plain: list[bool] = []
    for record in records.requests:
        row = problem.token_rtt_s[clients[record.client]]
        chain = [(row[s], b - a, problem.servers[s]) for s, a, b in record.chain]
        n_input_tokens = lengths[record.index]
        for token in record.tokens[1:]:
            cached_tokens = n_input_tokens + token.token - 1
            one_s = sum(hop_s + k * server.decode_at_s(cached_tokens) for hop_s, k, server in chain)
            measured.append(token.finished_at_s - token.ready_at_s)
            model.append(modelled[record.index, token.token])
            alone.append(one_s + problem.hub_token_s)
            is_plain.append(not any(hop[-1] for hop in token.hops))
    return measured, model, alone, np.array(is_plain, dtype=bool)


def _pairs(rows: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    # The model knows nothing of failures: requests that outlived one are no measure of the emulation.
    undisturbed = [row for row in rows if row[name] is not None and not row["n_recoveries"]]
    both = [(row[name], row[f"model_{name}"]) for row in undisturbed]
    both = [pair for pair in both if pair[1] is not None]
    return [pair[0] for pair in both], [pair[1] for pair in both]


def _error(measured: Any, modelled: Any) -> dict[str, float | None]:
    """|measured - modelled| / modelled: its mean and its 99th percentile."""
    model = np.asarray(modelled, dtype=np.float64)
    some = model > 0  # a model of nothing takes no time, and no ratio to it is finite
    if not some.any():
        return {"mean_abs_ratio": None, "p99_abs_ratio": None}
    ratio = np.abs(np.asarray(measured)[some] - model[some]) / model[some]
    return {"mean_abs_ratio": float(ratio.mean()), "p99_abs_ratio": float(np.percentile(ratio, 99))}


def _median(values: Any) -> float | None:
    return float(np.median(values)) if len(values) else None


def _concurrency(records: RunRecords) -> dict[str, float | None]:
    """Active sessions (admitted, not ended): time-averaged from the first arrival to the last end."""
    changes: list[tuple[float, int]] = []
    for record in records.requests:
        if record.opened_at_s is not None:
            changes += [(record.opened_at_s, 1), (record.last_seen_at_s, -1)]
    if not changes:
        return {"mean": None, "max": None}
    changes.sort()
    active = highest = 0
    area_s, previous_s = 0.0, changes[0][0]
    for at_s, change in changes:
        area_s += active * (at_s - previous_s)
        active += change
        highest, previous_s = max(highest, active), at_s
    span_s = changes[-1][0] - min(record.arrived_at_s for record in records.requests)
    return {"mean": area_s / span_s if span_s > 0 else 0.0, "max": float(highest)}


def _without_setup(experiment: Experiment, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The same measurements with the published setup constant taken off every request."""
    constant = experiment.calibration.session_setup_s
    done = [row for row in rows if row["ttft_s"] is not None]
    whole = [row for row in done if row["e2e_s"] is not None]
    return {
        "ttft_s": stats(row["ttft_s"] - constant for row in done),
        "e2e_s": stats(row["e2e_s"] - constant for row in whole),
        "per_token_s": stats((row["e2e_s"] - constant) / row["n_output_tokens"] for row in whole),
    }
