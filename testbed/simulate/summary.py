"""Makes the rows per request and the ``summary.json`` of a simulated run, named as in an emulation."""

from __future__ import annotations

from typing import Any

from policies.problem import RequestSpec
from testbed.codeversion import code_version
from testbed.fast.outcome import SimulatedRequest
from testbed.results.requests import METRICS, stats, unqueued
from testbed.results.slo import goodput_rps
from testbed.results.summary import active_sessions, preemption_of
from testbed.scenario.experiment import Experiment
from testbed.simulate.answer import unused_of
from testbed.simulate.engine import MAX_STEPS, Simulation


def request_rows(simulation: Simulation) -> list[dict[str, Any]]:
    """Return rows with the columns of ``testbed.results.requests``.

    Measured and model columns are equal here.

    ``decision_s`` and ``asked_s`` are empty: they are real time, but the tables of one seed must be the same
    bytes.
    """
    clients = simulation.case.experiment.problem.clients
    rows = []
    for r in simulation.requests:
        done = r.time_s is not None
        metrics, alone = _metrics(r), _alone(simulation.case.experiment, r)
        rows.append(
            {
                "request": r.plan.index,
                "client": clients[r.plan.client],
                "status": r.status,
                "reason": r.reason,
                "arrival_at_s": r.plan.arrival_at_s,
                "arrived_at_s": r.plan.arrival_at_s,
                "n_input_tokens": r.plan.n_input_tokens,
                "n_output_tokens": r.plan.n_output_tokens,
                "max_new_tokens": r.plan.known.n_output_tokens,
                "n_tokens_done": r.plan.n_output_tokens if done else r.n_done,
                "n_rejections": r.n_rejections,
                "n_recoveries": r.n_replays,
                "n_preemptions": r.n_preemptions,
                "preempted_tokens": r.preempted_tokens,
                "preempted_s": r.preempted_s,
                "schedule_lag_s": 0.0,
                "decision_s": None,
                "asked_s": None,
                "wait_expected_s": r.route.wait_s if r.route else 0.0,
                "chain": " ".join(
                    f"{h.server}:{h.first}-{h.last}" for h in (r.route.hops if r.route else ())
                ),
                "token_ids": None,  # nothing is computed
                **{prefix + name: metrics.get(name) for prefix in ("", "model_") for name in METRICS},
                **{f"unqueued_{name}": alone.get(name) for name in METRICS},
            }
        )
    return rows


def _metrics(r: SimulatedRequest) -> dict[str, float]:
    if r.route is None:  # it was never admitted
        return {}
    values = {"queue_s": r.waiting_s}
    if r.ttft_s is None:
        return values
    values |= {"setup_s": r.setup_s or 0.0, "ttft_s": r.ttft_s}
    if r.time_s is None:
        return values
    values["e2e_s"] = r.time_s
    values["per_token_s"] = r.time_s / r.plan.n_output_tokens
    if r.plan.n_output_tokens > 1:
        values["tpot_s"] = values["rest_s"] = (r.time_s - r.ttft_s) / (r.plan.n_output_tokens - 1)
    return values


def _alone(experiment: Experiment, r: SimulatedRequest) -> dict[str, float]:
    if r.route is None or r.ttft_s is None or r.setup_s is None:
        return {}
    request = RequestSpec(r.plan.client, r.plan.n_input_tokens, r.plan.n_output_tokens)
    return unqueued(
        experiment, request, r.route.hops, r.waiting_s, r.setup_s, has_completed=r.time_s is not None
    )


def _active(r: SimulatedRequest) -> tuple[float, float | None, float]:
    """Return when a request arrived, began the attempt that was admitted, and ended, in scenario seconds."""
    since_s = None if r.setup_s is None else r.plan.arrival_at_s + r.waiting_s
    return r.plan.arrival_at_s, since_s, r.plan.arrival_at_s + r.ended_s


def _n_hop_rows(simulation: Simulation) -> int:
    if simulation.served.n_steps is not None:
        return simulation.served.n_steps
    done = (r for r in simulation.requests if r.time_s is not None and r.route is not None)
    return sum(len(r.route.hops) * r.plan.n_output_tokens for r in done if r.route is not None)


def summarize_simulation(simulation: Simulation, objectives: dict[str, float]) -> dict[str, Any]:
    """Return ``summary.json``: those keys of an emulation's summary that have a meaning without a network."""
    experiment, placement = simulation.case.experiment, simulation.placement
    assert placement is not None, "only feasible simulations are summarised"
    rows = request_rows(simulation)
    statuses = [row["status"] for row in rows]
    return {
        "engine": "simulation",
        "code": code_version(),
        "mode": simulation.mode,
        "scenario": experiment.name,
        "seed": experiment.seed,
        "workload": experiment.workload.source,
        "n_requests": len(rows),
        "n_completed": statuses.count("completed"),
        "n_failed": len(rows) - statuses.count("completed"),
        "n_cancelled": 0,
        "n_interrupted": 0,
        "n_not_started": 0,
        "policy": {
            "placement": experiment.policy.placement,
            "routing": experiment.policy.routing,
            "design_concurrency": placement.design_concurrency,
        },
        "calibration": {
            "set": experiment.calibration.name,
            "session_setup_s": experiment.calibration.session_setup_s,
        },
        "metrics": {name: stats(row[name] for row in rows) for name in METRICS},
        "admission": {
            "n_never_admitted": sum(r.route is None for r in simulation.requests),
            "waited_s": stats(r.waiting_s for r in simulation.requests),
        },
        "preemption": preemption_of(experiment, simulation.requests),
        "unused_blocks": unused_of(simulation),
        "decision": {"placement_s": simulation.placement_s, "routing_s": stats(simulation.served.routing_s)},
        "achieved_concurrency": active_sessions([_active(r) for r in simulation.requests]),
        "goodput_rps": goodput_rps(rows, objectives),
        "objectives": objectives,
        "moves": [move._asdict() for move in simulation.served.moves],
        "n_hop_rows": _n_hop_rows(simulation),
        "hops_left_out": _n_hop_rows(simulation) > MAX_STEPS,
        "n_replays": 0,
        "recovery_s": stats(()),
        "recovery_floor_s": stats(()),
        "n_faults": 0,
    }
