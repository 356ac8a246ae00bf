"""Reads recordings of links over time, for ``[[network.trace]]``: mahimahi's packet traces, and CSV.

A trace becomes the kind "listed" of ``TraceTable``: steps with what the link has from each instant on.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError

from testbed.experiments.event_table import TraceTable
from testbed.experiments.fields import ratio
from testbed.experiments.filesread import note_file
from testbed.experiments.limits import MAX_TRACE_STEPS
from testbed.experiments.problems import Key, KeyedError, explain, nearest, shown
from testbed.experiments.units import DURATION, RATE, Dimension

REPEATED_AFTER_S = 3600.0
"""How long after the last arrival a repeated trace goes on, if it does not state its end."""
_INTERVAL_S = 0.1
_OPPORTUNITY_BITS = 1500 * 8
_COLUMNS = ("time", "rate", "rtt", "loss")
_NEVER = "never lets anything through"


class _Wrong(Exception):
    """Something is wrong in a trace. The message follows the file's name."""


def listed(table: TraceTable, folder: Path, key: Key) -> TraceTable:
    """Return ``table`` with the steps of its ``file``, whose relative path starts at ``folder``.

    Raises ``KeyedError`` that names the file, and the line of what is wrong.
    """
    if table.file is None:
        return table
    path = note_file(folder / table.file)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            steps = (_mahimahi if table.kind == "mahimahi" else _csv)(table, file)
    except OSError as error:
        raise KeyedError((*key, "file"), f'cannot read "{path}": {error.strerror}') from None
    except UnicodeDecodeError:
        raise KeyedError((*key, "file"), f'"{path}" is not UTF-8 text') from None
    except (_Wrong, csv.Error) as wrong:
        raise KeyedError((*key, "file"), f'"{path}": {wrong}') from None
    kept = table.model_dump(
        by_alias=True, exclude_none=True, include={"link", "direction", "at", "until", "repeat"}
    )
    try:
        return TraceTable.model_validate({**kept, "kind": "listed", **steps})
    except ValidationError as error:
        raise KeyedError((*key, "file"), f'"{path}": {explain(error).what}') from None


Steps = dict[str, list[float] | str | bool]
"""Keys of a "listed" trace."""


def _mahimahi(table: TraceTable, lines: Iterable[str]) -> Steps:
    """Read opportunities to send a packet, in ms. The last one is the end of the trace."""
    interval_s = table.interval or _INTERVAL_S
    interval_ms = 1e3 * interval_s
    counts: dict[int, int] = {}
    last_ms = 0
    for number, line in enumerate(lines, 1):
        if not (text := line.strip()):
            continue
        if not (text.isascii() and text.isdecimal()) or len(text) > 12:
            raise _Wrong(f"line {number}: must be a whole number of milliseconds, not {shown(text)}")
        at_ms = int(text)
        if at_ms < last_ms:
            raise _Wrong(f"line {number}: the time goes back, from {last_ms} to {at_ms} ms; sort the lines")
        last_ms = at_ms
        slot = max(math.ceil(at_ms / interval_ms - 1e-9) - 1, 0)
        counts[slot] = counts.get(slot, 0) + 1
    if not counts:
        raise _Wrong("is empty; it needs a line per packet that can be sent")
    if last_ms == 0:
        raise _Wrong(f"ends at 0 ms, so that it {_NEVER}; its last line is its length in ms")
    n_steps = max(counts) + 1
    if n_steps > MAX_TRACE_STEPS:
        raise _Wrong(
            f"has {n_steps:,} intervals; at most {MAX_TRACE_STEPS:,} are allowed, so give a longer one"
        )
    length_s = last_ms / 1e3
    times = [round(slot * interval_s, 9) for slot in range(n_steps)]
    rates = [
        counts.get(slot, 0) * _OPPORTUNITY_BITS / (end_s - at_s)
        for slot, (at_s, end_s) in enumerate(pairwise([*times, length_s]))
    ]
    return {
        **_merged(times, {"rates": rates}),
        "length": DURATION.format(length_s),
        "repeat": table.repeat is not False,
    }


def _merged(times: Sequence[float], columns: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Return the steps without those that repeat the one before."""
    rows = list(zip(*columns.values(), strict=True))
    kept = [i for i, row in enumerate(rows) if i == 0 or row != rows[i - 1]]
    return {"times": [times[i] for i in kept]} | {
        name: [values[i] for i in kept] for name, values in columns.items()
    }


def _csv(table: TraceTable, lines: Iterable[str]) -> Steps:
    reader = csv.reader(lines)
    rows = _rows(reader)
    names = [name.lower() for name in next(rows, (0, []))[1]]
    if not names:
        raise _Wrong(f"is empty; it needs a row with the names of its columns ({', '.join(_COLUMNS)})")
    for name in names:
        if name not in _COLUMNS or names.count(name) > 1:
            if name in _COLUMNS:
                raise _Wrong(f"has a second column {shown(name)}; leave one out")
            raise _Wrong(
                f"has an unknown column {shown(name)}{nearest(name, _COLUMNS)}; valid: {', '.join(_COLUMNS)}"
            )
    if "time" not in names or len(names) < 2:
        raise _Wrong("must have the column time, and at least one of rate, rtt and loss")
    times: list[float] = []
    columns: dict[str, list[float]] = {name: [] for name in names if name != "time"}
    for number, row in rows:
        if len(row) != len(names):
            raise _Wrong(f"line {number}: has {len(row)} cells, but there are {len(names)} columns")
        for name, cell in zip(names, row, strict=True):
            if name == "time":
                times.append(_time(table, cell, number, times))
            elif cell or not columns[name]:
                columns[name].append(_cell(table, name, cell, number))
            else:
                columns[name].append(columns[name][-1])
    if not times:
        raise _Wrong("has no rows; it needs one per instant at which the link changes")
    if len(times) > MAX_TRACE_STEPS:
        raise _Wrong(f"has {len(times):,} rows; at most {MAX_TRACE_STEPS:,} are allowed")
    ends = bool(table.repeat)
    if ends and len(times) == 1:
        raise _Wrong("has a single row, which cannot be repeated; leave out repeat")
    steps: Steps = {
        "times": [round(at_s - times[0], 9) for at_s in times],
        **{
            {"rate": "rates", "rtt": "rtts", "loss": "losses"}[name]: values
            for name, values in columns.items()
        },
        "repeat": ends,
    }
    if ends:
        steps["length"] = DURATION.format(round(2 * times[-1] - times[-2] - times[0], 9))
    return steps


def _rows(reader: Iterator[list[str]]) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that are not empty, with the number of their lines."""
    for row in reader:
        cells = [cell.strip() for cell in row]
        if any(cells):
            yield reader.line_num, cells  # type: ignore[attr-defined]


def _time(table: TraceTable, cell: str, number: int, times: Sequence[float]) -> float:
    """Return an instant in s."""
    at_s = _quantity(DURATION, cell, table.time_unit, number, "time")
    if times and at_s <= times[-1]:
        raise _Wrong(
            f"line {number}: the time {cell} is not later than that of the row before; sort the rows, and keep one "
            "per instant"
        )
    return at_s


def _cell(table: TraceTable, name: str, cell: str, number: int) -> float:
    """Return a rate in bit/s, an RTT in s or a loss as a share."""
    if name == "rate":
        return _quantity(RATE, cell, table.rate_unit, number, name)
    if name == "rtt":
        return _quantity(DURATION, cell, table.rtt_unit, number, name)
    try:
        plain = float(cell)
    except ValueError:
        plain = math.nan
    try:
        return ratio(plain if math.isfinite(plain) else cell)
    except ValueError as error:
        raise _Wrong(f"line {number}, column {name}: {error}") from None


def _quantity(dimension: Dimension, cell: str, unit: str | None, number: int, name: str) -> float:
    """Return a cell in the base unit: text with a unit, or a number in ``unit``."""
    try:
        plain = float(cell)
    except ValueError:
        plain = math.nan
    try:
        if not math.isfinite(plain):
            return dimension.parse(cell)
        if unit is None:
            raise ValueError(f"{shown(cell)} has no unit; write it there, or give {name}_unit of the trace")
        return dimension.of(plain, unit)
    except ValueError as error:
        raise _Wrong(f"line {number}, column {name}: {error}") from None
