"""The measures of a run, which are columns of ``results.parquet``. Times are in scenario seconds."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from testbed.experiments.slo import Objectives
from testbed.records.requests import RequestRow, flat, left_out, request_columns
from testbed.results.requests import stats, times_stats
from testbed.results.slo import goodput_rps, n_met, served_span_s
from testbed.results.summary import active_sessions
from testbed.simulator.engine import Simulation
from testbed.simulator.gaps import token_gaps_s
from testbed.simulator.summary import simulated_costs, whole_rows

GAP = "token_gap_s"
TIMES = ("queue_s", "setup_s", "ttft_s", "tpot_s", "per_token_s", "e2e_s", GAP)
STATISTICS = ("mean", "p50", "p95", "p99")
COUNTS = ("n_requests", "n_completed", "n_failed")
GOODPUT, MET = "goodput_rps", "met_ratio"
FAIRNESS = "length_fairness_ratio"
MEASURES = (
    *COUNTS,
    *(f"{time}_{statistic}" for time in TIMES for statistic in STATISTICS),
    "tokens_per_s",
    "decode_tokens_per_s",
    FAIRNESS,
    "concurrent_mean",
    "concurrent_max",
    "design_concurrency",
)
"""The measures of every run. A run with objectives has those of ``UNDER_OBJECTIVES``, too."""
UNDER_OBJECTIVES = (GOODPUT, MET)
HIGHER_IS_BETTER = frozenset(
    {"tokens_per_s", "decode_tokens_per_s", *UNDER_OBJECTIVES, "n_completed", "design_concurrency"}
)
BEST_AT_ONE = frozenset({FAIRNESS})
"""Measures of which neither more nor less is better."""
LABELS = {
    "queue_s": "waiting for room",
    "setup_s": "session setup",
    "ttft_s": "time to first token",
    "tpot_s": "time per further token",
    "per_token_s": "time per token",
    "e2e_s": "time of a request",
    GAP: "time from a token to the next",
    "tokens_per_s": "output tokens per second",
    "decode_tokens_per_s": "output tokens after the first, per second",
    FAIRNESS: "time per token, longest outputs over shortest",
    GOODPUT: "goodput [requests/s]",
    MET: "part of the requests that met the objectives",
    "cost_per_million_tokens": "cost per million output tokens",
    "energy_j_per_token": "energy per output token [J]",
    "carbon_g_per_million_tokens": "carbon dioxide per million output tokens [g]",
    "n_requests": "requests",
    "n_completed": "completed requests",
    "n_failed": "failed requests",
    "concurrent_mean": "requests at a time, mean",
    "concurrent_max": "requests at a time, most",
    "design_concurrency": "|R|: sessions designed for",
}


def measures_of(simulation: Simulation, objectives: Objectives) -> dict[str, float | int | None]:
    """Returns ``MEASURES`` of a run that had a placement, and ``UNDER_OBJECTIVES`` if there are
    ``objectives``.

    Statistics of a time cover the completed requests; ``token_gap_s`` covers all gaps between tokens of all requests. Tokens per second
    count the tokens of completed requests, over the time from the first arrival to the last end of any; decode
    tokens are all but a request's first. A measure without any value is None.
    """
    assert simulation.placement is not None, "only feasible runs are measured"
    rows = simulation.rows
    done = [row for row in rows if row.is_completed]
    found: dict[str, float | int | None] = {
        "n_requests": len(rows),
        "n_completed": len(done),
        "n_failed": len(rows) - len(done),
    }
    of_time = {**times_stats(rows), GAP: stats(token_gaps_s(simulation))}
    for time in TIMES:
        over = of_time[time]
        found |= {f"{time}_{statistic}": over[statistic] for statistic in STATISTICS}
    span_s, n_tokens = served_span_s(rows), sum(row.n_tokens_done for row in done)
    found["tokens_per_s"] = n_tokens / span_s if span_s else None
    found["decode_tokens_per_s"] = (n_tokens - len(done)) / span_s if span_s else None
    found[FAIRNESS] = _fairness(done)
    active = active_sessions(rows, from_arrival=True)
    found |= {"concurrent_mean": active.mean, "concurrent_max": active.max or 0.0}
    found["design_concurrency"] = simulation.placement.design_concurrency
    found |= simulated_costs(simulation)
    if objectives:
        found[GOODPUT] = goodput_rps(rows, objectives)
        found[MET] = n_met(rows, objectives) / len(rows)
    return found


def _fairness(done: Sequence[RequestRow]) -> float | None:
    """Returns the mean time per token of the quarter of requests with the longest outputs, divided by that of
    the quarter with the shortest outputs.

    Requests of equal length keep their order of arrival. None if fewer than four requests were completed.
    """
    quarter = len(done) // 4
    if not quarter:
        return None
    per_token_s = [row.times.per_token_s or 0.0 for row in sorted(done, key=lambda row: row.n_output_tokens)]
    return float(sum(per_token_s[-quarter:]) / sum(per_token_s[:quarter]))


def label_of(measure: str) -> str:
    """Returns a measure's name in words, with its unit if it is a time."""
    for statistic in STATISTICS:
        time = measure.removesuffix(f"_{statistic}")
        if time in TIMES and time != measure:
            return f"{LABELS[time]}, {statistic} [s]"
    return LABELS.get(measure, measure)


def columns_of(simulation: Simulation) -> bytes:
    """Returns the columns of a run's ``requests.parquet`` as JSON: name -> a value per request."""
    of_requests = whole_rows(simulation)
    rows, lacking = [flat(row) for row in of_requests], left_out(of_requests)
    names = [name for name in request_columns() if name not in lacking]
    return msgspec.json.encode({name: [row[name] for row in rows] for name in names})
