"""``results.parquet``: one row per run, sorted. Its bytes do not depend on the executor or the order of the
runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from testbed.experiments.sources import value_of
from testbed.studies.sweep.axes import POLICY, SEED, Axis
from testbed.studies.sweep.measures import COUNTS
from testbed.studies.sweep.runs import OK, Record

RESULTS = "results.parquet"
_WHOLE = (*COUNTS, "design_concurrency")

Scalar = bool | int | float | str


@dataclass(frozen=True)
class Row:
    """A run: its point in the study (``at``: key -> value as text), policy, seed and result."""

    at: Mapping[str, str]
    policy: str
    seed: int
    record: Record

    def value(self, measure: str) -> float | None:
        """Returns the value of ``measure``, or None if the run has none."""
        return self.record.measures.get(measure) if self.record.status == OK else None


def typed(axes: Sequence[Axis]) -> dict[str, dict[str, Scalar]]:
    """Returns key -> text -> value in the table's column.

    All values of a key have one type: bool, int, float or str; integers become floats beside floats, and
    values of other mixtures stay texts.
    """
    found: dict[str, dict[str, Scalar]] = {}
    for axis in axes:
        for number, key in enumerate(axis.keys):
            texts = list(dict.fromkeys(value[number] for value in axis.values))
            found[key] = _of_one_type({text: value_of(text) for text in texts})
    return found


def _of_one_type(values: Mapping[str, Any]) -> dict[str, Scalar]:
    kinds = {type(value) for value in values.values()}
    if kinds in ({bool}, {int}, {float}, {str}):
        return dict(values)
    if kinds == {int, float}:
        return {text: float(value) for text, value in values.items()}
    return {text: value if isinstance(value, str) else text for text, value in values.items()}


def results_table(rows: Sequence[Row], axes: Sequence[Axis], measures: Sequence[str]) -> pa.Table:
    """Returns a table of ``rows``, given in any order, sorted by point, policy and seed.

    The columns are the keys, policy, seed, engine and why, ``measures``, status and reason.
    """
    values = typed(axes)
    types = axis_types(values)
    rows = in_order(rows, values)
    columns: dict[str, Any] = {
        key: pa.array([of[row.at[key]] for row in rows], types[key]) for key, of in values.items()
    }
    columns[POLICY] = pa.array([row.policy for row in rows], pa.string())
    columns[SEED] = pa.array([row.seed for row in rows], pa.int64())
    columns["engine"] = pa.array([row.record.engine for row in rows], pa.string())
    columns["engine_why"] = pa.array([row.record.engine_why for row in rows], pa.string())
    for measure in measures:
        kind = pa.int64() if measure in _WHOLE else pa.float64()
        columns[measure] = pa.array([row.value(measure) for row in rows], kind)
    columns["status"] = pa.array([row.record.status for row in rows], pa.string())
    columns["reason"] = pa.array([row.record.reason for row in rows], pa.string())
    return pa.table(columns)


def in_order(rows: Sequence[Row], values: Mapping[str, Mapping[str, Scalar]]) -> list[Row]:
    """Returns ``rows`` sorted by point, policy and seed; ``values`` are those of ``typed``."""
    return sorted(rows, key=lambda r: (*(values[key][r.at[key]] for key in values), r.policy, r.seed))


def axis_types(values: Mapping[str, Mapping[str, Scalar]]) -> dict[str, Any]:
    """Returns the type of each key's column."""
    kinds = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    return {key: kinds[type(next(iter(of.values())))] for key, of in values.items()}
