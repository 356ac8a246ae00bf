"""Makes the JSON object of one simulation, for scripts. Times are in milliseconds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from policies.cgbp import lower_bounds_per_token_s
from policies.design import choose_design_concurrency
from policies.problem import PolicyError
from testbed.fast.outcome import CompletedMove, SimulatedRequest
from testbed.results.summary import active_sessions
from testbed.results.unused import unused_blocks
from testbed.simulate.engine import Simulation

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
    found: dict[str, Any] = {
        "id": experiment.name,
        "seed": None if simulation.case.source else experiment.seed,
        "policy": simulation.case.policy,
        "mode": simulation.mode,
        "engine": simulation.engine,
        "engine_why": simulation.why,
        "session_setup_ms": experiment.calibration.session_setup_s * 1e3,
        "feasible": placement is not None,
    }
    if placement is None:
        found |= {"error": simulation.error, "placement": None, "requests": None, "mean": None}
    else:
        found["placement"] = [[r.first + 1, r.n_blocks] if r.n_blocks else [0, 0] for r in placement.ranges]
        found["cache_bytes"] = list(placement.cache_bytes)
        found["requests"] = [_request(request) for request in simulation.requests]
        found["mean"] = means(simulation.requests)
        found["percentiles"] = percentiles(simulation.requests)
        found |= _left_out(simulation.requests)
        found["unused_blocks"] = unused_of(simulation)
        if experiment.policy.online is not None:
            found["online"] = experiment.policy.online
            found["moves"] = [_move(move) for move in simulation.served.moves]
        if experiment.compute.paging is not None:
            found["n_preemptions"] = sum(r.n_preemptions for r in simulation.requests)
            found["preempted_tokens"] = sum(r.preempted_tokens for r in simulation.requests)
        summary = simulation.served.summary
        if summary is not None and (experiment.faults.planned or summary["n_replays"]):
            found |= {name: summary[name] for name in ("n_faults", "n_replays")}
    found["bounds"] = _bounds(simulation)
    found["decision_s"] = simulation.placement_s + sum(simulation.served.routing_s)
    return found


def _request(request: SimulatedRequest) -> dict[str, Any]:
    row: dict[str, Any] = {
        "route": [hop.server for hop in request.route.hops] if request.route else [],
        "waiting_ms": request.waiting_s * 1e3,
        "time_ms": None if request.time_s is None else request.time_s * 1e3,
        "ttft_ms": None if request.ttft_s is None else request.ttft_s * 1e3,
    }
    if request.n_preemptions:
        row |= {"n_preemptions": request.n_preemptions, "preempted_ms": request.preempted_s * 1e3}
    if request.n_replays:
        row["n_replays"] = request.n_replays
    if request.status != "completed":
        row |= {"status": request.status, "reason": request.reason}
    return row


def _move(move: CompletedMove) -> dict[str, Any]:
    """Return a server's change of blocks: ranges as in ``placement``, instants in seconds."""
    return {
        "server": move.server,
        "old": [move.old.first + 1, move.old.n_blocks],
        "new": [move.new.first + 1, move.new.n_blocks],
        **{name: value for name, value in move._asdict().items() if name.endswith("_s")},
    }


def means(requests: Iterable[SimulatedRequest]) -> dict[str, float | None]:
    """Return means over the completed requests; ``None`` where there is nothing to average.

    ``max_concurrent`` is the largest number of requests between arrival and end at a time.
    """
    done = _completed(requests)
    found: dict[str, float | None] = {
        name: math.fsum(sample) / len(sample) if sample else None
        for name, sample in _samples_ms(done).items()
    }
    found["max_concurrent"] = concurrency(done)[1]
    return found


def percentiles(requests: Iterable[SimulatedRequest]) -> dict[str, dict[str, float | None]]:
    """Return ``PERCENTILES`` in ms of the values that ``means`` averages, over the same requests."""
    found: dict[str, dict[str, float | None]] = {}
    for name, sample in _samples_ms(_completed(requests)).items():
        values = (
            np.percentile(sample, list(PERCENTILES.values())).tolist()
            if sample
            else [None] * len(PERCENTILES)
        )
        found[name] = dict(zip(PERCENTILES, values, strict=True))
    return found


def _completed(requests: Iterable[SimulatedRequest]) -> list[SimulatedRequest]:
    return [r for r in requests if r.ttft_s is not None and r.time_s is not None]


def _samples_ms(done: Sequence[SimulatedRequest]) -> dict[str, list[float]]:
    """Return a list of values (ms) per metric, one for each completed request.

    "rest" leaves out requests with a single output token.
    """
    return {
        "per_token_ms": [1e3 * (r.time_s or 0.0) / r.plan.n_output_tokens for r in done],
        "ttft_ms": [1e3 * (r.ttft_s or 0.0) for r in done],
        "rest_ms": [
            1e3 * ((r.time_s or 0.0) - (r.ttft_s or 0.0)) / (r.plan.n_output_tokens - 1)
            for r in done
            if r.plan.n_output_tokens > 1
        ],
        "waiting_ms": [1e3 * r.waiting_s for r in done],
    }


def unused_of(simulation: Simulation) -> dict[str, Any] | None:
    """Return the blocks that no request used; ``None`` if servers joined, left or changed blocks."""
    experiment, placement, served = simulation.case.experiment, simulation.placement, simulation.served
    assert placement is not None, "only feasible simulations served anything"
    if served.summary is not None:
        found: dict[str, Any] | None = served.summary["unused_blocks"]
        return found
    if served.moves:
        return None
    names = [server.name for server in experiment.problem.servers]
    hops = ((h.server, h.first, h.last) for r in served.requests if r.route is not None for h in r.route.hops)
    return unused_blocks(names, [(r.first, r.last) for r in placement.ranges], hops)


def _left_out(requests: Sequence[SimulatedRequest]) -> dict[str, Any]:
    """Return what the means leave out: failed requests with their reasons, and the mean wait of all."""
    failed = [r for r in requests if r.status != "completed"]
    waited_ms = [1e3 * r.waiting_s for r in requests]
    return {
        "n_requests": len(requests),
        "n_completed": len(requests) - len(failed),
        "n_failed": len(failed),
        "n_never_admitted": sum(r.route is None for r in failed),
        "failed_because": dict(Counter(r.reason or r.status for r in failed).most_common(MOST_REASONS)),
        "mean_waiting_of_all_ms": math.fsum(waited_ms) / len(waited_ms) if waited_ms else None,
    }


def concurrency(requests: Iterable[SimulatedRequest]) -> tuple[float | None, int]:
    """Return the (time-averaged, largest) number of requests between arrival and end at a time."""
    done = [(r.plan.arrival_at_s, r.time_s) for r in requests if r.time_s is not None]
    found = active_sessions([(at_s, at_s, at_s + time_s) for at_s, time_s in done])
    return found["mean"], int(found["max"] or 0)


_SEARCHED = ("flow_tps", "flow_bound_tps", "gap_ratio", "proven_optimal", "stopped_by_time")
"""Bounds reported by placements that search for an optimum."""


def _bounds(simulation: Simulation) -> dict[str, float | int | None]:
    """Return |R| with its limits, Theorem 1's bound and the lower bound T^o, and their ratio.

    Bounds are in ms per decoded token. Bounds of a search for an optimum are added, if there was one. The
    published bounds are for hub-spoke communication: with forwarding there are none.
    """
    problem, placement = simulation.case.experiment.problem, simulation.placement
    found: dict[str, float | int | None] = {
        "design_concurrency": placement.design_concurrency if placement else None
    }
    try:
        chosen = choose_design_concurrency(problem)
    except PolicyError:
        found |= {"design_concurrency_bound": None, "single_request_ms": None}
    else:
        found["design_concurrency_bound"] = chosen.memory_bound
        found["single_request_ms"] = chosen.single_request_s * 1e3
    own = placement.bounds if placement else {}
    found |= {name: own[name] for name in _SEARCHED if name in own}
    if problem.forwarding:
        return found
    lower_s = min(lower_bounds_per_token_s(problem))
    found["lower_bound_per_token_ms"] = lower_s * 1e3 if lower_s < math.inf else None
    upper_s = placement.bounds.get("theorem1_per_token_s") if placement else None
    if upper_s is not None:
        found |= {"theorem1_per_token_ms": upper_s * 1e3, "theorem1_ratio": upper_s / lower_s}
    return found
