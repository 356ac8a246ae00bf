"""Requests from outside, from the logs of ``testbed serve``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.experiments import changed
from testbed.experiments.experiment import Experiment
from testbed.results.logs import RequestRecord, read_logs


def with_guests(experiment: Experiment, run_dir: Path) -> Experiment:
    """Return ``experiment`` with the requests that came from outside; unchanged if it has no endpoint."""
    if not experiment.workload.endpoint_tokens:
        return experiment
    clients = {name: number for number, name in enumerate(experiment.problem.clients)}
    rows = [
        [r.index, r.intended_at_s, r.n_input_tokens, r.n_output_tokens, clients[r.client]]
        for r in read_logs(run_dir).requests
    ]
    return changed(experiment, {"endpoint.requests": rows})


def as_replay(experiment: Experiment, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the changes that make the logged requests the workload, each with as many tokens as it got.

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
    span_s = rows[-1][0] - rows[0][0]
    # Listed arrivals are scaled to the rate: this one leaves them as they are.
    rate = (len(rows) - 1) / span_s if span_s > 0 else experiment.problem.request_rate
    workload = {"arrivals": "listed", "rate": rate, "requests": rows, "lengths": "hidden"}
    return {"endpoint": None, "workload": {**workload, "origin": experiment.workload.source}}
