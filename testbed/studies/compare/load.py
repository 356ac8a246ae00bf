"""Reads a run directory that ``testbed up`` or ``testbed simulate --out`` has written."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from testbed.errors import UserError
from testbed.records.requests import RequestRow
from testbed.records.summary import RunSummary, read_summary
from testbed.results.tables import read_requests, reading, without_table
from testbed.rundir import not_a_run, parquet_path

METRICS = ("per_token_s", "ttft_s", "tpot_s", "e2e_s", "queue_s")
PARTS = ("hop_compute_s", "hop_network_s", "hop_client_s")
_HOP_COLUMNS = {
    **dict.fromkeys(("request", "token", "hop", "first_block", "last_block"), "int64"),
    **dict.fromkeys(PARTS, "float64"),
    "server": None,
}
"""Column -> type. None: not checked, since servers' names are written as plain or as dictionary-encoded
strings.
"""

Whole = NDArray[np.int64]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Hops:
    """The hops of a run as arrays with one entry per token and hop. ``server`` is an index into ``names``."""

    names: tuple[str, ...]
    request: Whole
    token: Whole
    hop: Whole
    server: Whole
    n_blocks: Whole
    parts: dict[str, Array]
    """Name of ``PARTS`` -> scenario seconds."""

    def of(self, requests: list[int]) -> Hops:
        """Returns only the hops of these requests."""
        rows = np.isin(self.request, np.array(requests, dtype=np.int64))
        return Hops(
            self.names,
            self.request[rows],
            self.token[rows],
            self.hop[rows],
            self.server[rows],
            self.n_blocks[rows],
            {name: values[rows] for name, values in self.parts.items()},
        )


@dataclass(frozen=True)
class Run:
    """The content of one run directory."""

    path: Path
    about: dict[str, Any]
    """A description of the run: path, engine, network, compute, time scale, policies, counts."""
    form: str
    """``scenario`` or ``instance``: the kind of file that ``settings`` were read from."""
    settings: dict[str, Any]
    requests: dict[int, RequestRow]
    hops: Hops | None
    """None if a simulation left them out, because they were too many."""


def load_run(path: Path) -> Run:
    """Read tables, summary and scenario of the run directory ``path``.

    Raises ``UserError`` if something is missing or cannot be read, with how to get it.
    """
    if not (path / "plan.json").exists():
        raise not_a_run(path)
    missing = [name for name in ("requests.parquet", "summary.json") if not (path / name).exists()]
    if missing:
        raise without_table(path, missing[0])
    summary = read_summary(path)
    requests = {row.request: row for row in _requests(path)}
    form, settings = _settings(path)
    hops = None
    if (path / "hops.parquet").exists():
        hops = _hops(_table(path, "hops.parquet", _HOP_COLUMNS))
    elif not summary.hops_left_out:
        raise without_table(path, "hops.parquet")
    return Run(path, _about(path, summary), form, settings, requests, hops)


def _json(path: Path, name: str) -> dict[str, Any]:
    with reading(path, name) as file:
        data = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("no JSON object")
    return data


def _settings(path: Path) -> tuple[str, dict[str, Any]]:
    if (path / "instance.json").exists():
        return "instance", _json(path, "instance.json")
    try:
        return "scenario", tomllib.loads((path / "scenario.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {path / 'scenario.toml'} ({error}); a run is compared with its scenario: restore it"
        ) from error


def _table(path: Path, name: str, columns: Mapping[str, str | None]) -> pa.Table:
    with reading(path, name) as file:
        table = pq.read_table(parquet_path(file))
        lacking = [column for column in columns if column not in table.column_names]
        if lacking:
            raise pa.ArrowKeyError(f"it has no column {lacking[0]}")
        table = table.select(list(columns))
        types = [
            table.schema.field(column) if kind is None else (column, kind) for column, kind in columns.items()
        ]
        return table.cast(pa.schema(types))


def _requests(path: Path) -> list[RequestRow]:
    with reading(path, "requests.parquet") as file:
        return read_requests(file)


def _hops(table: pa.Table) -> Hops:
    server = table.column("server")
    if not pa.types.is_dictionary(server.type):
        server = server.dictionary_encode()
    server = server.unify_dictionaries().combine_chunks()

    def whole(name: str) -> Whole:
        return np.asarray(table.column(name).to_numpy(), dtype=np.int64)

    return Hops(
        names=tuple(server.dictionary.to_pylist()),
        request=whole("request"),
        token=whole("token"),
        hop=whole("hop"),
        server=np.asarray(server.indices.to_numpy(zero_copy_only=False), dtype=np.int64),
        n_blocks=whole("last_block") - whole("first_block"),
        parts={name: np.asarray(table.column(name).to_numpy(), dtype=np.float64) for name in PARTS},
    )


def _about(path: Path, summary: RunSummary) -> dict[str, Any]:
    keys = (
        *("scenario", "engine", "mode", "compute", "time_scale", "seed", "policy"),
        *("overhead_per_hop_s", "n_requests", "n_completed", "clock", "clock_why", "code"),
    )
    known = {key: summary.get(key) for key in keys} | {"policy": dict(summary.policy)}
    # With real blocks it would be the measured time minus that of another machine's profile: not an overhead.
    if known["compute"] == "blocks":
        known["overhead_per_hop_s"] = None
    return {"path": str(path), **known, "network": summary.network}
