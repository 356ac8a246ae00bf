"""Requests from outside, from the logs of ``testbed serve``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from policies.workload import RequestPlan
from testbed.results.logs import RequestRecord, read_logs
from testbed.scenario.experiment import Experiment


def with_guests(experiment: Experiment, run_dir: Path) -> Experiment:
    """Return ``experiment`` with the requests that came from outside; unchanged if it has no endpoint."""
    if not experiment.workload.endpoint_tokens:
        return experiment
    clients = {name: number for number, name in enumerate(experiment.problem.clients)}
    plans = {plan.index: plan for plan in experiment.workload.requests}
    for r in read_logs(run_dir).requests:
        client, arrival_at_s = clients[r.client], r.intended_at_s
        plans[r.index] = RequestPlan(r.index, client, arrival_at_s, r.n_input_tokens, r.n_output_tokens)
    return replace(
        experiment,
        workload=replace(
            experiment.workload,
            requests=tuple(plans[index] for index in sorted(plans)),
            source=_source(len(plans) - len(experiment.workload.requests), experiment),
        ),
    )


def _source(n_guests: int, experiment: Experiment) -> str:
    outside = f"from outside, {n_guests:,} requests"
    return f"{outside}; and {experiment.workload.source}" if experiment.workload.requests else outside


def replayed_document(experiment: Experiment, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the scenario with the logged requests as its workload, each with as many tokens as it got.

    A request that got none has one. Policies know the number of tokens that it asked for.
    """
    rows = [
        [
            r.intended_at_s,
            r.n_input_tokens,
            max(len(r.tokens), 1),
            experiment.problem.clients.index(r.client),
            experiment.workload.requests[r.index].known.n_output_tokens,
        ]
        for r in sorted(records, key=lambda record: (record.intended_at_s, record.index))
    ]
    document = {key: value for key, value in experiment.document.items() if key != "endpoint"}
    span_s = rows[-1][0] - rows[0][0]
    # Listed arrivals are scaled to the rate: this one leaves them as they are.
    rate = (len(rows) - 1) / span_s if span_s > 0 else experiment.problem.request_rate
    workload = {"arrivals": "listed", "rate": rate, "requests": rows, "lengths": "hidden"}
    return {**document, "workload": {**workload, "origin": experiment.workload.source}}
