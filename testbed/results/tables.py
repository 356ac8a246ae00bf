"""Makes, writes and reads the tables ``requests.parquet`` and ``hops.parquet``; files are written whole or not at all."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from testbed.errors import UserError
from testbed.experiments.experiment import Experiment
from testbed.records.hops import hop_columns
from testbed.records.links import LinksUsed, link_columns
from testbed.records.plan import is_simulated
from testbed.records.requests import RequestRow, flat, left_out, request_columns, row_of
from testbed.records.summary import read_summary
from testbed.results.hop_table import HopTable
from testbed.rundir import owner_alive, parquet_path, replacing

LINKS = "links.parquet"
_ARROW: dict[Any, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    list[int]: pa.list_(pa.int32()),
}


def _arrow_type(kind: Any) -> pa.DataType:
    """Return the Arrow type of a field's type; any column may be null."""
    return _ARROW[kind] if kind in _ARROW else next(_ARROW[part] for part in get_args(kind) if part in _ARROW)


def request_schema(lacking: Collection[str]) -> pa.Schema:
    """Return the schema of ``requests.parquet`` without the columns ``lacking``."""
    columns = {name: kind for name, (kind, _) in request_columns().items() if name not in lacking}
    return pa.schema([(name, _arrow_type(kind)) for name, kind in columns.items()])


def request_table(rows: Sequence[RequestRow]) -> pa.Table:
    """Return a table with a row per request of the scenario, with those that failed or never started."""
    return pa.Table.from_pylist([flat(row) for row in rows], schema=request_schema(left_out(rows)))


def write_requests(path: Path, rows: Sequence[RequestRow]) -> None:
    """Write ``request_table``."""
    write_table(path, request_table(rows))


def read_requests(path: Path) -> list[RequestRow]:
    """Read the rows of ``requests.parquet`` of this or an earlier version.

    Raises ``OSError``, or ``ValueError`` (``pa.ArrowInvalid``, too) if it is no such table.
    """
    return [row_of(columns) for columns in pq.read_table(parquet_path(path)).to_pylist()]


def without_table(run_dir: Path, name: str) -> UserError:
    """Return the error for a run that has no table ``name``: how to get it."""
    if is_simulated(run_dir):
        return UserError(f"{run_dir} has no {name}: simulate it again with --out")
    if owner_alive(run_dir):
        return UserError(f"{run_dir} is still running and has no {name} yet; wait until it has ended")
    return UserError(f"{run_dir} has no {name}: write its tables with `testbed report {run_dir}`")


@contextmanager
def reading(run_dir: Path, name: str) -> Iterator[Path]:
    """Yield the path of a run's file to a body that reads it.

    Raises ``UserError`` if there is none, or if it cannot be read, with how to get it.
    """
    if not (run_dir / name).is_file():
        raise without_table(run_dir, name)
    try:
        yield run_dir / name
    except (OSError, ValueError, pa.ArrowException) as error:
        remedy = (
            "simulate it again" if is_simulated(run_dir) else f"`testbed report {run_dir}` writes it again"
        )
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error.args[0])
        raise UserError(f"cannot read {run_dir / name} ({reason}); {remedy}") from error


def hop_rows_table(experiment: Experiment, hops: HopTable) -> pa.Table:
    """Return a table with a row per token and hop: see ``testbed.records.hops``."""
    is_batched, has_client = experiment.compute.batching == "continuous", experiment.problem.has_hub_time
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


def links_table(links: LinksUsed) -> pa.Table:
    """Return a table with a row per link and part of the run in which it carried something: ``LinkBin``."""
    columns: dict[str, list[Any]] = {name: [] for name in ("from", "to", "start_s", "use_ratio", "wait_s")}
    for row, series in links.series():
        bins = np.flatnonzero((series.use_ratio > 0) | ~np.isnan(series.wait_s))
        columns["from"] += [row.from_] * len(bins)
        columns["to"] += [row.to] * len(bins)
        columns["start_s"] += (bins * links.width_s).tolist()
        columns["use_ratio"] += series.use_ratio[bins].tolist()
        columns["wait_s"] += [
            None if math.isnan(wait_s) else wait_s for wait_s in series.wait_s[bins].tolist()
        ]
    columns["end_s"] = [start_s + links.width_s for start_s in columns["start_s"]]
    schema = pa.schema([(name, _arrow_type(kind)) for name, (kind, _) in link_columns().items()])
    return pa.table(columns, schema=schema)


def write_links(path: Path, links: LinksUsed) -> None:
    """Write ``links_table``."""
    write_table(path, links_table(links))


class UseOverTime(NamedTuple):
    """Use of links by (from, to), the busiest first.

    ``use_ratio``: per part of ``width_s`` seconds, from 0 on; ``of_run``: over the whole run.
    """

    width_s: float
    use_ratio: dict[tuple[str, str], NDArray[np.float64]]
    of_run: dict[tuple[str, str], float]


def read_links(run_dir: Path) -> UseOverTime:
    """Read a run's ``links.parquet``; without such a file there are no links.

    The summary has the busiest links' use over the whole run; that of others is the mean over all parts. Raises
    ``OSError``, or ``ValueError`` (``pa.ArrowInvalid``, too) if it is no such table, ``UserError`` for the summary.
    """
    path = run_dir / LINKS
    columns = pq.read_table(parquet_path(path)).to_pydict() if path.is_file() else {"start_s": []}
    if not columns["start_s"]:
        return UseOverTime(1.0, {}, {})
    width_s = columns["end_s"][0] - columns["start_s"][0]
    bins = np.rint(np.array(columns["start_s"]) / width_s).astype(np.int64)
    ends = list(zip(columns["from"], columns["to"], strict=True))
    found = {link: np.zeros(bins.max() + 1) for link in dict.fromkeys(ends)}
    for link, number, use_ratio in zip(ends, bins.tolist(), columns["use_ratio"], strict=True):
        found[link][number] = use_ratio
    of_run = {link: float(ratios.mean()) for link, ratios in found.items()}
    of_run |= {(row.from_, row.to): row.use_ratio for row in read_summary(run_dir).links or ()}
    return UseOverTime(width_s, found, of_run)


def write_table(path: Path, table: pa.Table) -> None:
    """Write ``table`` whole or not at all."""
    with replacing(path) as temporary:
        pq.write_table(table, parquet_path(temporary))
