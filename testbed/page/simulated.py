"""Reads the tables of a simulation, which has no logs, into a ``History``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.experiments.experiment import Experiment
from testbed.page.header import header
from testbed.page.history import History
from testbed.records.plan import read_plan
from testbed.records.requests import RequestRow
from testbed.results.tables import read_requests, reading
from testbed.rundir import parquet_path

_HOPS = (
    *("request", "token", "hop", "server", "sent_at_s", "arrived_at_s", "departed_at_s", "received_at_s"),
    "hop_client_s",
)


def read_simulation(run_dir: Path) -> tuple[dict[str, Any], History]:
    """Read the header and the history of a simulation. Raises ``UserError`` if it has no such tables."""
    if not (run_dir / "scenario.toml").is_file():
        raise UserError(
            f"{run_dir} was simulated from an instance file, which has neither sites nor links to show; "
            "give the run directory of a scenario"
        )
    experiment = load_experiment(str(run_dir / "scenario.toml"))
    head = header(experiment, read_plan(run_dir))
    n_tokens = sum(request.n_output_tokens for request in experiment.workload.requests)
    history = History(list(experiment.problem.clients), n_tokens)
    _read_requests(run_dir, history, experiment)
    return head, history


def _read_requests(run_dir: Path, history: History, experiment: Experiment) -> None:
    import pyarrow.parquet as pq

    with reading(run_dir, "requests.parquet") as path:
        rows = read_requests(path)
    hops = None
    if (run_dir / "hops.parquet").is_file():
        with reading(run_dir, "hops.parquet") as path:
            hops = pq.read_table(parquet_path(path), columns=list(_HOPS))
    number = {name: i for i, name in enumerate(experiment.problem.clients)}
    for row in rows:
        _take_request(history, row, number)
    if hops is not None:
        _take_hops(history, hops, {s.name: j for j, s in enumerate(experiment.problem.servers)})
    for row in rows:
        if row.ended_at_s is not None:
            history.ended(row.request, row.ended_at_s, row.status, row.reason)


def _take_request(history: History, row: RequestRow, client: dict[str, int]) -> None:
    at_s, queue_s = row.arrived_at_s, row.times.queue_s
    if at_s is None:
        return
    number = client.get(row.client, 0)
    history.add("a", row.request, at_s, number, row.n_input_tokens, row.n_output_tokens)
    if queue_s is None:
        return
    opened_at_s = at_s + queue_s
    history.add("m", row.request, opened_at_s, [list(hop) for hop in row.hops])
    history.add("o", row.request, opened_at_s, opened_at_s + (row.times.setup_s or 0.0))


def _take_hops(history: History, table: Any, number: dict[str, int]) -> None:
    """Add tokens and their parts; the rows of a token are consecutive."""
    columns = table.to_pydict()
    begin, n_rows = 0, table.num_rows
    request, token = columns["request"], columns["token"]
    while begin < n_rows:
        end = begin
        while end < n_rows and request[end] == request[begin] and token[end] == token[begin]:
            end += 1
        parts = []
        for i in range(begin, end):
            parts.append(
                [
                    number.get(columns["server"][i], 0),
                    columns["hop_client_s"][i],
                    columns["arrived_at_s"][i] - columns["sent_at_s"][i],
                    columns["departed_at_s"][i] - columns["arrived_at_s"][i],
                    columns["received_at_s"][i] - columns["departed_at_s"][i],
                ]
            )
        ready_at_s = columns["sent_at_s"][begin] - columns["hop_client_s"][begin]
        history.token(request[begin], token[begin], columns["received_at_s"][end - 1])
        history.token_parts(request[begin], token[begin], ready_at_s, parts)
        begin = end
