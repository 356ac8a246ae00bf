"""Objectives (``ttft=5s,tpot=1s``) and the goodput: completed requests per second that met them."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.errors import UserError
from testbed.experiments.slo import Objective, Objectives, parse_objectives, parse_statistics
from testbed.records.requests import RequestRow
from testbed.records.summary import RunSummary


def parse_slo(text: str) -> Objectives:
    """Parse ``--slo`` (``parse_objectives``): the objectives of all clients. Raises ``UserError``."""
    try:
        return Objectives(parse_objectives(text))
    except ValueError as error:
        raise UserError(f"--slo: {error}") from error


def parse_slo_statistics(text: str) -> tuple[Objective, ...]:
    """Parse ``--slo`` with statistics (``parse_statistics``). Raises ``UserError``."""
    try:
        return parse_statistics(text)
    except ValueError as error:
        raise UserError(f"--slo: {error}") from error


def objectives_of(summary: RunSummary) -> Objectives:
    """Return the objectives that a summary was made with."""
    own = {name: client.objectives for name, client in summary.clients.items()}
    return Objectives(
        summary.objectives, {name: limits_s for name, limits_s in own.items() if isinstance(limits_s, dict)}
    )


def n_met(rows: Sequence[RequestRow], objectives: Objectives) -> int:
    """Return how many requests completed and met every objective of their client.

    A metric that a request does not have (``tpot_s`` of a single token) counts as met.
    """
    return sum(
        row.is_completed
        and all((row.times[f"{k}_s"] or 0.0) <= v for k, v in objectives.of(row.client).items())
        for row in rows
    )


def goodput_rps(rows: Sequence[RequestRow], objectives: Objectives) -> float | None:
    """Return the requests per second that met every objective (``n_met``), over ``served_span_s``.

    None if no request ended.
    """
    span_s = served_span_s(rows)
    return n_met(rows, objectives) / span_s if span_s else None


def served_span_s(rows: Sequence[RequestRow]) -> float | None:
    """Return the seconds from the first arrival of any request to the last end, also of one that failed or was cut short.

    None if no request ended but those that the run's end cut short.
    """
    ends = [(row.ended_at_s, row.status) for row in rows if row.ended_at_s is not None]
    if all(status in ("interrupted", "unfinished") for _, status in ends):
        return None
    return max(ends)[0] - min(row.arrived_at_s for row in rows if row.arrived_at_s is not None)
