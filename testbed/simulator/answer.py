"""Makes the JSON object of one simulation that is printed for scripts: milliseconds, blocks counted from 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import UnsetType

from policies.design import choose_design_concurrency
from policies.problem import PolicyError
from testbed.experiments.assumed import assumed_batching
from testbed.records.base import data_of
from testbed.records.events import FaultHappened
from testbed.records.plan import REFERENCE
from testbed.records.requests import RequestRow
from testbed.records.summary import MoveRow, UnusedBlocks
from testbed.results.bounds import bounds_of, in_ms
from testbed.results.conversations import prefix_use, ttft_by_turn
from testbed.results.failures import commonest
from testbed.results.requests import values_of
from testbed.results.speculation import speculation_of
from testbed.results.summary import active_sessions
from testbed.results.unused import unused_blocks
from testbed.simulator.engine import Simulation
from testbed.simulator.summary import simulated_costs

MEANS = ("per_token_ms", "ttft_ms", "rest_ms", "waiting_ms", "max_concurrent")
TIMES = MEANS[:-1]
PERCENTILES = {"p50": 50, "p95": 95, "p99": 99}
MOST_REASONS = 10
"""Most reasons of failures that are listed; there can be as many as requests."""


def answer(simulation: Simulation) -> dict[str, Any]:
    """Return ``{id, policy, engine, feasible, error?, placement, requests, mean, bounds, decision_s, ...}``.

    ``placement`` is ``[first_block, n_blocks]`` per server, 1-based, ``[0, 0]`` for none. ``cache_bytes`` is
    the room for caches per server. ``requests`` are ``{route, waiting_ms, time_ms, ttft_ms}`` (and ``status``
    if not completed); a route is a list of 0-based servers. ``percentiles`` are of the same values as
    ``mean``; failed requests (``n_failed``) are in neither. If the placement is infeasible, ``placement``,
    ``requests`` and ``mean`` are ``None``.
    """
    experiment, placement = simulation.case.experiment, simulation.placement
    workload = experiment.workload
    found: dict[str, Any] = {
        "id": experiment.name,
        "seed": None if simulation.case.source else experiment.seed,
        "policy": simulation.case.policy,
        "mode": simulation.mode,
        "engine": simulation.engine,
        "engine_why": simulation.why,
        **({} if (assumed := assumed_batching(experiment)) is None else {"assumed": assumed}),
        **({} if workload.sample is None else {"workload": workload.source}),
        "session_setup_ms": experiment.calibration.session_setup_s * 1e3,
        "feasible": placement is not None,
    }
    if placement is None:
        found |= {"error": simulation.error, "placement": None, "requests": None, "mean": None}
    else:
        found["placement"] = [[r.first + 1, r.n_blocks] if r.n_blocks else [0, 0] for r in placement.ranges]
        found["cache_bytes"] = list(placement.cache_bytes)
        found["requests"] = [request_of(row) for row in simulation.rows]
        found["mean"] = means(simulation.rows)
        found["percentiles"] = percentiles(simulation.rows)
        found |= _left_out(simulation.rows)
        if simulation.links is not None:
            found["links"] = [data_of(row) for row in simulation.links]
        unused = unused_of(simulation)
        found["unused_blocks"] = None if unused is None else data_of(unused)
        found |= simulated_costs(simulation)
        if experiment.policy.online is not None:
            found["online"] = experiment.policy.online
            found["moves"] = [_move(move) for move in simulation.served.moves]
        if experiment.compute.paging is not None:
            found["n_preemptions"] = sum(row.n_preemptions for row in simulation.rows)
            found["preempted_tokens"] = sum(row.preempted_tokens for row in simulation.rows)
        if prefix := prefix_use(simulation.rows):
            found["prefix"] = data_of(prefix)
        if turns := ttft_by_turn(simulation.rows):
            found["ttft_by_turn_s"] = [data_of(turn) for turn in turns]
        speculation = speculation_of(experiment.problem.decoding, simulation.rows)
        if not isinstance(speculation, UnsetType):
            found["speculation"] = data_of(speculation)
        n_faults, n_never, n_replays = _disturbances(simulation)
        if experiment.faults.planned or n_replays:
            found |= {"n_faults": n_faults, "n_faults_never_came": n_never, "n_replays": n_replays}
    found["bounds"] = _bounds(simulation)
    found["decision_s"] = simulation.placement_s + sum(simulation.served.routing_s)
    return found


def _disturbances(simulation: Simulation) -> tuple[int, int, int]:
    """Return how many faults had an effect, how many would have come after the end, and how many standstills ended."""
    summary = simulation.served.summary
    if summary is not None:
        return summary.n_faults, summary.n_faults_never_came, summary.n_replays
    faults = [event for event in simulation.served.faults if isinstance(event, FaultHappened)]
    n_never = len(simulation.case.experiment.faults.planned) - len(faults)
    return sum(fault.applies for fault in faults), n_never, sum(row.n_recoveries for row in simulation.rows)


def request_of(row: RequestRow) -> dict[str, Any]:
    """Return a request as in ``answer``: times in ms, and its route as 0-based servers."""
    times = row.times
    found: dict[str, Any] = {
        "route": [hop.server for hop in row.hops],
        "waiting_ms": _ms(row.waited_s),
        "time_ms": _ms(times.e2e_s),
        "ttft_ms": _ms(times.ttft_s),
    }
    if row.n_preemptions:
        found |= {"n_preemptions": row.n_preemptions, "preempted_ms": row.preempted_s * 1e3}
    if row.n_recoveries:
        found["n_replays"] = row.n_recoveries
    if not row.is_completed:
        found |= {"status": row.status, "reason": row.reason}
    return found


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None else time_s * 1e3


def _move(move: MoveRow) -> dict[str, Any]:
    """Return a server's change of blocks: ranges as in ``placement``, instants in seconds."""
    data = data_of(move)
    return data | {name: [data[name][0] + 1, data[name][1] - data[name][0]] for name in ("old", "new")}


def means(rows: Sequence[RequestRow]) -> dict[str, float | None]:
    """Return means over the completed requests; ``None`` where there is nothing to average.

    ``max_concurrent`` is the largest number of requests between arrival and end at a time, of all requests.
    """
    found: dict[str, float | None] = {
        name: math.fsum(sample) / len(sample) if sample else None
        for name, sample in _samples_ms(rows).items()
    }
    found["max_concurrent"] = int(active_sessions(rows, from_arrival=True).max or 0)
    return found


def percentiles(rows: Sequence[RequestRow]) -> dict[str, dict[str, float | None]]:
    """Return ``PERCENTILES`` in ms of the values that ``means`` averages, over the same requests."""
    found: dict[str, dict[str, float | None]] = {}
    for name, sample in _samples_ms(rows).items():
        values = (
            np.percentile(sample, list(PERCENTILES.values())).tolist()
            if sample
            else [None] * len(PERCENTILES)
        )
        found[name] = dict(zip(PERCENTILES, values, strict=True))
    return found


_METRICS = {"per_token_ms": "per_token_s", "ttft_ms": "ttft_s", "rest_ms": "tpot_s", "waiting_ms": "queue_s"}


def _samples_ms(rows: Sequence[RequestRow]) -> dict[str, list[float]]:
    """Return a list of values (ms) per metric, one for each completed request that has it."""
    return {name: [1e3 * value for value in values_of(rows, metric)] for name, metric in _METRICS.items()}


def unused_of(simulation: Simulation) -> UnusedBlocks | None:
    """Return the blocks that no request used; ``None`` if servers joined, left or changed blocks."""
    served = simulation.served
    if served.summary is not None:
        return served.summary.unused_blocks
    return None if served.moves or served.faults else unused_blocks(simulation.plan, simulation.rows)


def _left_out(rows: Sequence[RequestRow]) -> dict[str, Any]:
    """Return what the means leave out: failed requests with their reasons, and the mean wait of all."""
    failed = [row for row in rows if not row.is_completed]
    waited_ms = [1e3 * (row.waited_s or 0.0) for row in rows]
    return {
        "n_requests": len(rows),
        "n_completed": len(rows) - len(failed),
        "n_failed": len(failed),
        "n_never_admitted": sum(row.times.queue_s is None for row in failed),
        "failed_because": commonest(((row.reason or row.status, 1) for row in failed), MOST_REASONS),
        "mean_waiting_of_all_ms": math.fsum(waited_ms) / len(waited_ms) if waited_ms else None,
    }


_SEARCHED = ("flow_tps", "flow_bound_tps", "gap_ratio", "proven_optimal")
"""Bounds reported by placements that search for an optimum."""


def _bounds(simulation: Simulation) -> dict[str, Any]:
    """Return |R| with its limits, what a search for an optimum proved, if there was one, and the bounds in ms."""
    problem, placement = simulation.case.experiment.problem, simulation.placement
    found: dict[str, Any] = {"design_concurrency": placement.design_concurrency if placement else None}
    try:
        chosen = choose_design_concurrency(problem)
    except PolicyError:
        found |= {"design_concurrency_bound": None, "single_request_ms": None}
    else:
        found["design_concurrency_bound"] = chosen.memory_bound
        found["single_request_ms"] = chosen.single_request_s * 1e3
    if placement is None:
        return found | {"applies": False, "why": "there is no placement"}
    found |= {name: placement.bounds[name] for name in _SEARCHED if name in placement.bounds}
    proven = bounds_of(simulation.case.experiment, placement, simulation.rows, simulation.mode == REFERENCE)
    return found | in_ms(proven)
