"""One row per request with every metric, measured and modelled. ``docs/metrics.md`` defines them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from policies.problem import Hop, RequestSpec, service_s
from testbed.results.changes import as_carried_out
from testbed.results.logs import RequestRecord, RunRecords
from testbed.results.model import HopTable, model_setup_s, round_trip_s
from testbed.scenario.experiment import Experiment
from testbed.scenario.timeline import Timeline

METRICS = ("queue_s", "setup_s", "ttft_s", "tpot_s", "per_token_s", "rest_s", "e2e_s")


def request_rows(experiment: Experiment, records: RunRecords, hops: HopTable) -> list[dict[str, Any]]:
    """Return rows in the order of the requests; times are scenario seconds.

    A metric is None if the request did not get that far.

    ``model_*``: the closed model with queueing on links, given the chains that were routed and rejected.
    ``unqueued_*``: the paper's closed form, as if the request had been alone.
    """
    tokens = hops.tokens()
    is_first = tokens.token == 0
    first_s = dict(zip(tokens.request[is_first].tolist(), tokens.model_s[is_first].tolist(), strict=True))
    rest_s = np.bincount(
        tokens.request[~is_first], tokens.model_s[~is_first], minlength=len(experiment.workload.requests)
    )
    known = {r.index: r for r in records.requests}
    timeline = Timeline(experiment, as_carried_out(experiment, records)) if records.changes else None
    rows: list[dict[str, Any]] = []
    servers = [server.name for server in experiment.problem.servers]
    for plan in experiment.workload.requests:
        record = known.get(plan.index)
        row: dict[str, Any] = {
            "request": plan.index,
            "client": experiment.problem.clients[plan.client],
            "status": record.status if record else "not-started",
            "reason": _named(record.reason, servers) if record else "",
            "arrival_at_s": plan.arrival_at_s,
            "arrived_at_s": record.arrived_at_s if record else None,
            "n_input_tokens": plan.n_input_tokens,
            "n_output_tokens": plan.n_output_tokens,
            "max_new_tokens": plan.known.n_output_tokens,
            "n_tokens_done": len(record.tokens) if record else 0,
            "n_rejections": record.n_rejections if record else 0,
            "n_recoveries": record.n_recoveries if record else 0,
            "n_preemptions": record.n_preemptions if record else 0,
            "preempted_tokens": record.preempted_tokens if record else 0,
            "preempted_s": record.preempted_s if record else 0.0,
            "schedule_lag_s": record.arrived_at_s - record.intended_at_s if record else None,
            "decision_s": sum(record.decision_s) if record else None,
            "asked_s": sum(record.asked_s) if record else None,
            "wait_expected_s": record.wait_expected_s if record else None,
            "chain": " ".join(f"{s}:{a}-{b}" for s, a, b in record.chain) if record else "",
            "token_ids": [token.token_id for token in record.tokens] if record else [],
        }
        measured = _measured(record) if record else {}
        row.update({name: measured.get(name) for name in METRICS})
        tokens_s = first_s.get(plan.index), float(rest_s[plan.index])
        opened_at_s = hops.model_opened_at_s.get(plan.index)
        model = _model(experiment, timeline, record, row, tokens_s, opened_at_s) if record else {}
        row.update({f"model_{name}": model.get(name) for name in METRICS})
        alone: dict[str, float] = {}
        if record and row["ttft_s"] is not None:
            request = RequestSpec(plan.client, record.n_input_tokens, record.n_output_tokens)
            alone = unqueued(
                experiment,
                request,
                [Hop(*hop) for hop in record.chain],
                row["queue_s"],
                model_setup_s(experiment, record.client, record.chain),
                has_completed=record.status == "completed",
            )
        row.update({f"unqueued_{name}": alone.get(name) for name in METRICS})
        rows.append(row)
    return rows


def _named(reason: str, servers: Sequence[str]) -> str:
    """Replace the numbers of servers in a client's reason by their names."""

    def name(found: re.Match[str]) -> str:
        number = int(found[1])
        return servers[number] if number < len(servers) else found[0]

    return re.sub(r"\bserver (\d+)\b", name, reason)


def _measured(record: RequestRecord) -> dict[str, float]:
    values: dict[str, float] = {}
    if record.opening_at_s is not None:
        values["queue_s"] = record.opening_at_s - record.arrived_at_s
    if record.tokens and record.opening_at_s is not None:
        first, last = record.tokens[0], record.tokens[-1]
        values["setup_s"] = first.ready_at_s - record.opening_at_s
        values["ttft_s"] = first.at_s - record.arrived_at_s
        if record.status == "completed":
            n_rest = len(record.tokens) - 1  # fewer than asked for if the model ended its text
            values["e2e_s"] = last.at_s - record.arrived_at_s
            values["per_token_s"] = values["e2e_s"] / len(record.tokens)
            if n_rest:
                values["tpot_s"] = values["rest_s"] = (last.at_s - first.at_s) / n_rest
    return values


def _assemble(
    queue_s: float, setup_s: float, first_s: float, rest_s: float | None, n_out: int
) -> dict[str, float]:
    """Return a request's metrics from its parts in seconds; ``rest_s`` is None if it did not complete."""
    ttft_s = queue_s + setup_s + first_s
    values = {"queue_s": queue_s, "setup_s": setup_s, "ttft_s": ttft_s}
    if rest_s is not None:
        values["e2e_s"] = ttft_s + rest_s
        values["per_token_s"] = values["e2e_s"] / n_out
        if n_out > 1:
            values["tpot_s"] = values["rest_s"] = rest_s / (n_out - 1)
    return values


def _model(
    experiment: Experiment,
    timeline: Timeline | None,
    record: RequestRecord,
    row: dict[str, Any],
    tokens_s: tuple[float | None, float],
    opened_at_s: float | None,
) -> dict[str, float]:
    """Return the modelled metrics of a request, of the same requests as the measured ones.

    ``tokens_s``: the modelled seconds of the first token, and of all others together.
    """
    first_s, rest_s = tokens_s
    if row["ttft_s"] is None or record.opening_at_s is None or first_s is None:
        return {}
    setup_s = model_setup_s(
        experiment, record.client, record.chain, timeline, record.opening_at_s, opened_at_s
    )
    queue_s = model_queue_s(experiment, record, timeline)
    whole_s = rest_s if record.status == "completed" else None
    return _assemble(
        row["queue_s"] if queue_s is None else queue_s, setup_s, first_s, whole_s, len(record.tokens)
    )


def model_queue_s(
    experiment: Experiment, record: RequestRecord, timeline: Timeline | None = None
) -> float | None:
    """Return the modelled seconds from a request's arrival to its admitted attempt.

    It is the measured time in the coordinator's queue, and for each rejection the slowest hop's round trip to
    open, the slowest opened hop's to close, and the backoff. None if a server could not be reached.
    """
    at_s = record.arrived_at_s + record.queued_s
    for chain, refusal in record.attempts:
        if refusal.broken:
            return None
        servers = [hop[0] for hop in chain or ()]
        at_s += round_trip_s(experiment, record.client, servers, timeline, at_s)
        opened = [server for server in servers if server not in refusal.refused]
        at_s += round_trip_s(experiment, record.client, opened, timeline, at_s)
        at_s += refusal.backoff_s
    return at_s - record.arrived_at_s


def unqueued(
    experiment: Experiment,
    request: RequestSpec,
    hops: Sequence[Hop],
    queue_s: float,
    setup_s: float,
    *,
    has_completed: bool,
) -> dict[str, float]:
    """Return the metrics of ``request`` as if it had been alone on its chain, by the paper's closed form."""
    first_s, all_s = service_s(experiment.problem, request, hops)
    whole_s = all_s - first_s if has_completed else None
    return _assemble(queue_s, setup_s, first_s, whole_s, request.n_output_tokens)


def stats(values: Any) -> dict[str, float | int | None]:
    """Return ``{mean, std, min, p50, p90, p95, p99, max, n}`` of the values that are not None.

    All but n are None if there is no value.
    """
    array = np.asarray([v for v in values if v is not None], dtype=np.float64)
    if not len(array):
        return {**dict.fromkeys(("mean", "std", "min", "p50", "p90", "p95", "p99", "max")), "n": 0}
    p50, p90, p95, p99 = np.percentile(array, (50, 90, 95, 99))
    numbers = {
        "mean": array.mean(),
        "std": array.std(),
        "min": array.min(),
        "p50": p50,
        "p90": p90,
        "p95": p95,
        "p99": p99,
        "max": array.max(),
    }
    return {**{name: float(value) for name, value in numbers.items()}, "n": len(array)}
