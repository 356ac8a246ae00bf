"""Rows per request that a study keeps: stored in ``requests.jsonl`` as runs are completed, a line per run, and
written to ``requests.parquet`` at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from testbed.records.requests import OPTIONAL
from testbed.results.tables import request_schema
from testbed.rundir import parquet_path, replacing
from testbed.studies.sweep.axes import POLICY, SEED, Axis
from testbed.studies.sweep.store import Lines
from testbed.studies.sweep.table import Row, axis_types, in_order, typed

STORED, REQUESTS = "requests.jsonl", "requests.parquet"
_GROUP_ROWS = 100_000
"""Rows that are in memory at a time, and one row group of the file."""


class _Stored(msgspec.Struct):
    key: str
    requests: msgspec.Raw = msgspec.Raw(b"{}")


class Kept:
    """The stored rows of runs, by their keys; ``lines`` is ``requests.jsonl``."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._places = dict(lines.places(_key))

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def append(self, key: str, columns: bytes) -> None:
        """Store the rows of a run. Raises ``RunError`` if they cannot be written."""
        self._places[key] = self._lines.append(_Stored(key, msgspec.Raw(columns)))

    def write(self, path: Path, rows: Sequence[Row], axes: Sequence[Axis]) -> None:
        """Write the requests of all runs in the order of ``results.parquet``: the keys of the axes, policy and
        seed, and the columns of a run's ``requests.parquet``. Raises ``OSError``.
        """
        values = typed(axes)
        types = {**axis_types(values), POLICY: pa.string(), SEED: pa.int64()}
        with self._lines.path.open("rb") as file:
            stored = [self._columns(file, row).keys() for row in rows if row.record.key in self._places]
        lacking = set(OPTIONAL).difference(*stored)
        empty = pa.schema([*types.items(), *request_schema(lacking)]).empty_table()
        with (
            replacing(path) as temporary,
            self._lines.path.open("rb") as file,
            pq.ParquetWriter(parquet_path(temporary), empty.schema) as writer,
        ):
            waiting = [empty]
            for row in in_order(rows, values):
                if row.record.key in self._places:  # it has a result
                    at = {key: of[row.at[key]] for key, of in values.items()}
                    columns = self._columns(file, row)
                    n_rows = len(columns["request"])
                    columns |= {
                        name: [None] * n_rows for name in OPTIONAL if name not in {*columns, *lacking}
                    }
                    columns |= {
                        key: [value] * n_rows
                        for key, value in {**at, POLICY: row.policy, SEED: row.seed}.items()
                    }
                    waiting.append(pa.table(columns, schema=empty.schema))
                if sum(table.num_rows for table in waiting) >= _GROUP_ROWS:
                    writer.write_table(pa.concat_tables(waiting))
                    waiting = [empty]
            writer.write_table(pa.concat_tables(waiting))

    def _columns(self, file: BinaryIO, row: Row) -> dict[str, list[Any]]:
        file.seek(self._places[row.record.key])
        columns: dict[str, list[Any]] = msgspec.json.decode(
            msgspec.json.decode(file.readline(), type=_Stored).requests
        )
        return columns


def _key(line: bytes) -> str:
    return msgspec.json.decode(line, type=_Stored).key
