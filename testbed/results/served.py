"""Requests from outside, from the logs of ``testbed serve``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nodes.prefixes import split_ids
from testbed.errors import UserError
from testbed.experiments import changed
from testbed.experiments.experiment import Experiment
from testbed.experiments.stub import kept_tokens
from testbed.records.requests import COMPLETED
from testbed.results.errors import Tables
from testbed.results.logs import RequestRecord, read_logs


def with_guests(experiment: Experiment, run_dir: Path) -> Experiment:
    """Return ``experiment`` with the requests that came from outside; unchanged if it has no endpoint."""
    if not experiment.workload.endpoint_tokens:
        return experiment
    clients = {name: number for number, name in enumerate(experiment.problem.clients)}
    rows = [
        [r.index, r.intended_at_s, r.n_input_tokens, r.n_output_tokens, clients[r.client], *r.place]
        for r in read_logs(run_dir).requests
    ]
    return changed(experiment, {"endpoint.requests": rows})


def as_replay(experiment: Experiment, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the changes that make the logged requests the workload, each with as many tokens as it got.

    Policies know the number of tokens that it asked for. Raises ``UserError`` if no request got any.
    """
    records = _in_twin(records)
    if not records:
        raise UserError("no request got a token")
    rows = [
        [
            r.intended_at_s,
            r.n_input_tokens,
            len(r.tokens),
            experiment.problem.clients.index(r.client),
            experiment.workload.requests[r.index].known.n_output_tokens,
        ]
        for r in records
    ]
    span_s = rows[-1][0] - rows[0][0]
    # Listed arrivals are scaled to the rate: this one leaves them as they are.
    rate = (len(rows) - 1) / span_s if span_s > 0 else experiment.problem.request_rate
    workload = {"arrivals": "listed", "rate": rate, "requests": rows, "lengths": "hidden"}
    workload |= _beginnings(records, kept_tokens(experiment))
    return {"endpoint": None, "workload": {**workload, "origin": experiment.workload.source}}


def compared(run: Tables, twin: Tables) -> tuple[Tables, Tables]:
    """Return a run with requests from outside and its twin, both with those alone that completed in the run.

    In the twin, all complete: it has each for as many tokens as it got.
    """
    pairs = [
        (record.index, number)
        for number, record in enumerate(_in_twin(run.records.requests))
        if record.status == COMPLETED
    ]
    return run.only({index for index, _ in pairs}), twin.only({number for _, number in pairs})


def _in_twin(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Return the requests of the twin, in its order: all that got a token."""
    served = [record for record in records if record.tokens]
    return sorted(served, key=lambda record: (record.intended_at_s, record.index))


def _beginnings(records: Sequence[RequestRecord], page_tokens: int | None) -> dict[str, Any]:
    """Return the keys that say which of the logged requests begin alike, in pages of ``page_tokens``; none if no server keeps any.

    A request without pages, since it has not completed, begins like no other.
    """
    if page_tokens is None:
        return {}
    numbers: dict[Any, int] = {}
    prompts, answers = [], []
    for record in records:
        n_prompt = record.n_input_tokens // page_tokens
        pages: list[Any] = [*split_ids(record.pages)] or [(record.index, page) for page in range(n_prompt)]
        ids = [numbers.setdefault(page, len(numbers)) for page in pages]
        prompts.append([*(record.place or (-1, -1)), *ids[:n_prompt]])
        answers.append(ids[n_prompt:])
    return {"prompts": prompts, "prompt_block": page_tokens, "answers": answers}
