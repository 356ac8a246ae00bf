"""Writes ``requests.parquet`` and ``hops.parquet``, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nodes.records import BATCH
from testbed.results.model import HopTable
from testbed.rundir import replacing
from testbed.scenario.experiment import Experiment

_TYPES = {
    **dict.fromkeys(("client", "status", "reason", "chain"), pa.string()),
    **dict.fromkeys(
        (
            *("request", "n_input_tokens", "n_output_tokens", "max_new_tokens"),
            *("n_tokens_done", "n_rejections", "n_recoveries"),
            *("n_preemptions", "preempted_tokens"),
        ),
        pa.int64(),
    ),
    "token_ids": pa.list_(pa.int32()),
}
"""Types of the columns of ``requests.parquet`` that are not floats."""


def write_requests(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a row per request of the scenario, with those that failed or never started."""
    write_table(path, pa.Table.from_pylist(rows, schema=request_schema(rows[0] if rows else {"request": 0})))


def request_schema(names: Iterable[str]) -> pa.Schema:
    """Return the schema of a table with these columns of ``requests.parquet``."""
    return pa.schema([(name, _TYPES.get(name, pa.float64())) for name in names])


def write_hops(path: Path, experiment: Experiment, hops: HopTable) -> None:
    """Write a row per token and hop: instants and parts in scenario seconds, and the model's times.

    Has ``model_client_s`` only if the client computes, and ``batch_*`` only with continuous batching.
    """
    names = pa.array([s.name for s in experiment.problem.servers])
    columns: dict[str, Any] = {
        "request": hops.request,
        "token": hops.token,
        "hop": hops.hop,
        "server": pa.DictionaryArray.from_arrays(pa.array(hops.server), names),
        "first_block": hops.first,
        "last_block": hops.last,
        "sent_at_s": hops.sent_at_s,
        "arrived_at_s": hops.arrived_at_s,
        "departed_at_s": hops.departed_at_s,
        "received_at_s": hops.received_at_s,
        "up_bytes": hops.up_bytes,
        "down_bytes": hops.down_bytes,
        "replayed_tokens": hops.replayed_tokens,
        "hop_client_s": hops.client_s + hops.tail_s,
        "hop_network_s": hops.network_s,
        "hop_compute_s": hops.compute_s,
        "model_network_s": hops.model_network_s,
        "model_link_queue_s": hops.model_link_queue_s,
        "model_compute_s": hops.model_compute_s,
    }
    if experiment.compute.batching == "continuous":
        columns |= {name: getattr(hops, name) for name in BATCH}
    if experiment.problem.hub_token_s:
        columns["model_client_s"] = hops.model_client_s
    write_table(path, pa.table(columns))


def write_table(path: Path, table: pa.Table) -> None:
    """Write ``table`` whole or not at all."""
    with replacing(path) as temporary:
        pq.write_table(table, temporary)
