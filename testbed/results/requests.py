"""Makes the row of every request from the logs: its metrics, measured and modelled."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from policies.problem import Hop, RequestSpec, service_s
from testbed.experiments.experiment import Experiment
from testbed.experiments.timeline import Timeline
from testbed.records.requests import COMPLETED, METRICS, NOT_STARTED, RequestRow, Times, chain_text
from testbed.records.summary import Stats
from testbed.results.changes import as_carried_out
from testbed.results.hop_table import HopTable
from testbed.results.logs import RequestRecord, RunRecords
from testbed.results.model import model_setup_s, round_trip_s


def request_rows(experiment: Experiment, records: RunRecords, hops: HopTable) -> list[RequestRow]:
    """Return rows in the order of the requests."""
    tokens = hops.tokens()
    is_first = tokens.token == 0
    first_s = dict(zip(tokens.request[is_first].tolist(), tokens.model_s[is_first].tolist(), strict=True))
    rest_s = np.bincount(
        tokens.request[~is_first], tokens.model_s[~is_first], minlength=len(experiment.workload.requests)
    )
    known = {r.index: r for r in records.requests}
    timeline = Timeline(experiment, as_carried_out(experiment, records)) if records.changes else None
    rows: list[RequestRow] = []
    servers = [server.name for server in experiment.problem.servers]
    for plan in experiment.workload.requests:
        record = known.get(plan.index)
        row = RequestRow(
            request=plan.index,
            client=experiment.problem.clients[plan.client],
            status=NOT_STARTED,
            arrival_at_s=plan.arrival_at_s,
            arrived_at_s=None,
            ended_at_s=None,
            n_input_tokens=plan.n_input_tokens,
            n_output_tokens=plan.n_output_tokens,
            max_new_tokens=plan.known.n_output_tokens,
            token_ids=[],
            conversation=None if plan.turn is None else plan.turn.conversation,
            turn=None if plan.turn is None else plan.turn.number,
        )
        rows.append(row)
        if record is None:
            continue
        row.status, row.reason = record.status, with_names(record.reason, servers)
        row.arrival_at_s = record.intended_at_s
        row.arrived_at_s, row.ended_at_s = record.arrived_at_s, record.last_seen_at_s
        row.n_tokens_done = len(record.tokens)
        row.n_rejections, row.n_recoveries = record.n_rejections, record.n_recoveries
        row.n_cached_tokens = record.n_cached_tokens
        row.n_preemptions = record.n_preemptions
        row.preempted_tokens, row.preempted_s = record.preempted_tokens, record.preempted_s
        row.schedule_lag_s = record.arrived_at_s - record.intended_at_s
        row.decision_s, row.asked_s = sum(record.decision_s), sum(record.asked_s)
        row.wait_expected_s = record.wait_expected_s
        row.wsrr_cost_s = record.cost_s
        row.chain = chain_text(record.chain)
        if experiment.problem.decoding is not None:
            row.n_rounds = len(record.rounds)
            row.n_drafted = sum(round_.tokens for round_ in record.rounds)
            row.n_accepted = sum(round_.accepted for round_ in record.rounds)
            if experiment.problem.decoding.in_flight > 1:
                row.n_given_up = sum(round_.given_up for round_ in record.rounds)
        row.token_ids = [token.token_id for token in record.tokens]
        row.times = _measured(record)
        tokens_s = first_s.get(plan.index), float(rest_s[plan.index])
        row.model = _model(experiment, timeline, record, row, tokens_s, hops)
        if row.times.queue_s is not None and row.times.ttft_s is not None:
            request = RequestSpec(plan.client, record.n_input_tokens, len(record.tokens))
            setup_s = model_setup_s(experiment, record.client, record.chain)
            row.unqueued = unqueued(experiment, request, row.hops, setup_s, has_completed=row.is_completed)
    return rows


def with_names(reason: str, servers: Sequence[str]) -> str:
    """Return a client's reason with the names of servers in place of their numbers."""

    def name(found: re.Match[str]) -> str:
        number = int(found[1])
        return servers[number] if number < len(servers) else found[0]

    return re.sub(r"\bserver (\d+)\b", name, reason)


def _measured(record: RequestRecord) -> Times:
    if record.opening_at_s is None:
        return Times()
    queue_s = record.opening_at_s - record.arrived_at_s
    if not record.tokens:
        return Times(queue_s=queue_s)
    first, last = record.tokens[0], record.tokens[-1]
    return Times.of(
        queue_s,
        first.ready_at_s - record.opening_at_s,
        first.at_s - record.arrived_at_s,
        last.at_s - record.arrived_at_s if record.status == COMPLETED else None,
        len(record.tokens),  # fewer than asked for if the model ended its text
    )


def _assembled(queue_s: float, setup_s: float, first_s: float, rest_s: float | None, n_tokens: int) -> Times:
    """Return the metrics that the parts of a request result in; ``rest_s`` is None if it did not complete."""
    ttft_s = queue_s + setup_s + first_s
    return Times.of(queue_s, setup_s, ttft_s, None if rest_s is None else ttft_s + rest_s, n_tokens)


def _model(
    experiment: Experiment,
    timeline: Timeline | None,
    record: RequestRecord,
    row: RequestRow,
    tokens_s: tuple[float | None, float],
    hops: HopTable,
) -> Times:
    """Return the modelled metrics of a request, of the same requests as the measured ones.

    ``tokens_s``: the modelled seconds of the first token, and of all others together.
    """
    first_s, rest_s = tokens_s
    if row.times.ttft_s is None or record.opening_at_s is None or first_s is None:
        return Times()
    setup_s = 0.0
    if not record.was_open:
        opened_at_s = hops.model_opened_at_s.get(record.index)
        setup_s = model_setup_s(
            experiment, record.client, record.chain, timeline, record.opening_at_s, opened_at_s
        )
    queue_s = _model_queue_s(experiment, record, timeline, hops)
    if queue_s is None:
        queue_s = record.opening_at_s - record.arrived_at_s
    return _assembled(queue_s, setup_s, first_s, rest_s if row.is_completed else None, len(record.tokens))


def _model_queue_s(
    experiment: Experiment, record: RequestRecord, timeline: Timeline | None, hops: HopTable
) -> float | None:
    """Return the modelled seconds from a request's arrival to its admitted attempt.

    It is the measured time in the coordinator's queue, and for each rejection its messages and the backoff: what the model's
    links say, or the slowest hop's round trip to open and the slowest opened hop's to close. None if a server could not be
    reached.
    """
    at_s = record.arrived_at_s + record.queued_s
    for number, (chain, refusal, _) in enumerate(record.attempts):
        if refusal.broken:
            return None
        took_s = hops.model_attempts_s.get((record.index, number))
        if took_s is None:
            servers = [hop[0] for hop in chain or ()]
            took_s = round_trip_s(experiment, record.client, servers, timeline, at_s)
            opened = [server for server in servers if server not in refusal.refused]
            took_s += round_trip_s(experiment, record.client, opened, timeline, at_s + took_s)
        at_s += took_s + refusal.backoff_s
    return at_s - record.arrived_at_s


def unqueued(
    experiment: Experiment,
    request: RequestSpec,
    hops: Sequence[Hop],
    setup_s: float,
    *,
    has_completed: bool,
) -> Times:
    """Return the metrics of ``request`` as if it had been alone on its chain, by the paper's closed form.

    It waits for no room; ``setup_s``: what opening the chain takes on idle links (``model_setup_s``).
    """
    first_s, all_s = service_s(experiment.problem, request, hops)
    rest_s = all_s - first_s if has_completed else None
    return _assembled(0.0, setup_s, first_s, rest_s, request.n_output_tokens)


def stats(values: Any) -> Stats:
    """Return the statistics of the values that are not None."""
    array = np.asarray([v for v in values if v is not None], dtype=np.float64)
    if not len(array):
        return Stats()
    p50, p90, p95, p99 = np.percentile(array, (50, 90, 95, 99)).tolist()
    return Stats(
        mean=float(array.mean()),
        std=float(array.std()),
        min=float(array.min()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(array.max()),
        n=len(array),
    )


def values_of(rows: Iterable[RequestRow], metric: str, which: str = "times") -> list[float]:
    """Return a metric of the requests that completed; ``which``: "times", "model" or "unqueued".

    Means and percentiles over requests are of these, in every command, so that all metrics are of the same requests.
    """
    values = (getattr(row, which)[metric] for row in rows if row.is_completed)
    return [value for value in values if value is not None]


def times_stats(rows: Sequence[RequestRow], which: str = "times") -> dict[str, Stats]:
    """Return the statistics of every metric of requests (``values_of``)."""
    return {name: stats(values_of(rows, name, which)) for name in METRICS}
