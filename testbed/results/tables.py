"""Makes, writes and reads the tables ``requests.parquet`` and ``hops.parquet``; files are written whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from testbed.experiments.experiment import Experiment
from testbed.records.hops import hop_columns
from testbed.records.requests import RequestRow, flat, request_columns, row_of
from testbed.results.model import HopTable
from testbed.rundir import parquet_path, replacing

_ARROW: dict[Any, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    list[int]: pa.list_(pa.int32()),
}


def _arrow_type(kind: Any) -> pa.DataType:
    """Return the Arrow type of a field's type; any column may be null."""
    return _ARROW[kind] if kind in _ARROW else next(_ARROW[part] for part in get_args(kind) if part in _ARROW)


def request_schema() -> pa.Schema:
    """Return the schema of ``requests.parquet``."""
    return pa.schema([(name, _arrow_type(kind)) for name, (kind, _) in request_columns().items()])


def request_table(rows: Sequence[RequestRow]) -> pa.Table:
    """Return a table with a row per request of the scenario, with those that failed or never started."""
    return pa.Table.from_pylist([flat(row) for row in rows], schema=request_schema())


def write_requests(path: Path, rows: Sequence[RequestRow]) -> None:
    """Write ``request_table``."""
    write_table(path, request_table(rows))


def read_requests(path: Path) -> list[RequestRow]:
    """Read the rows of ``requests.parquet`` of this or an earlier version.

    Raises ``OSError``, or ``ValueError`` (``pa.ArrowInvalid``, too) if it is no such table.
    """
    return [row_of(columns) for columns in pq.read_table(parquet_path(path)).to_pylist()]


def hop_rows_table(experiment: Experiment, hops: HopTable) -> pa.Table:
    """Return a table with a row per token and hop: see ``testbed.records.hops``."""
    is_batched, has_client = experiment.compute.batching == "continuous", bool(experiment.problem.hub_token_s)
    names = pa.array([s.name for s in experiment.problem.servers])
    values = {
        "first_block": hops.first,
        "last_block": hops.last,
        "hop_client_s": hops.client_s + hops.tail_s,
        "hop_network_s": hops.network_s,
        "hop_compute_s": hops.compute_s,
    }
    columns = {
        name: pa.DictionaryArray.from_arrays(pa.array(hops.server, pa.int32()), names)
        if name == "server"
        else values[name]
        if name in values
        else getattr(hops, name)
        for name in hop_columns(is_batched=is_batched, has_client=has_client)
    }
    return pa.table(columns)


def write_hops(path: Path, experiment: Experiment, hops: HopTable) -> None:
    """Write ``hop_rows_table``."""
    write_table(path, hop_rows_table(experiment, hops))


def write_table(path: Path, table: pa.Table) -> None:
    """Write ``table`` whole or not at all."""
    with replacing(path) as temporary:
        pq.write_table(table, parquet_path(temporary))
