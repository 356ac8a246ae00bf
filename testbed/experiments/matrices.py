"""Reads measured RTT matrices from files: CSV (a square matrix or a list of pairs) and JSON.

An empty cell has the value of the other direction. On the diagonal (inside a site) an empty RTT is 0, and an
empty rate is the fastest rate of the file.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from testbed.experiments.network_tables import MatrixTable, NetworkTable, why_not_square
from testbed.experiments.problems import KeyedError, explain, nearest, shown
from testbed.experiments.units import DURATION

_KEY = ("network", "file")
_LONG = ("from", "to", "rtt")
_JSON_KEYS = ("sites", "rtt", "rate")

Cells = dict[tuple[str, str], float]


@dataclass
class Measured:
    """The cells that a file gives, by (from, to), in the file's own units.

    ``rate`` is empty if it gives no rates.
    """

    sites: list[str]
    rtt: Cells
    rate: Cells


class _Wrong(Exception):
    """Something is wrong in a matrix file. The message follows the file's name."""


def matrix_of_file(table: MatrixTable, folder: Path) -> MatrixTable:
    """Return ``table`` with the matrices of its ``file``, whose relative path starts at ``folder``.

    Raises ``KeyedError`` that names the file, and the row and column of what is wrong.
    """
    assert table.file is not None
    path = folder / table.file
    if table.rtt_unit is None:
        raise KeyedError(
            ("network", "rtt_unit"),
            f"is missing; give the unit of the file's RTTs, one of {', '.join(DURATION.units)}",
        )
    try:
        measured = _read(path)
    except OSError as error:
        raise KeyedError(_KEY, f'cannot read "{path}": {error.strerror}') from None
    except UnicodeDecodeError:
        raise KeyedError(_KEY, f'"{path}" is not UTF-8 text') from None
    except _Wrong as wrong:
        raise KeyedError(_KEY, f'"{path}": {wrong}') from None
    if measured.rate and table.rate is not None:
        raise KeyedError(("network", "rate"), f'is also in "{path}"; leave out one of the two')
    if not measured.rate and table.rate is None:
        raise KeyedError(("network", "rate"), f'is missing; give it, since "{path}" has no rates')
    document = table.model_dump(
        by_alias=True,
        exclude_none=True,
        include={*NetworkTable.model_fields, "kind", "rtt_unit", "rate", "rate_unit", "shared", "paths"},
    )
    try:
        document |= {"sites": measured.sites, "rtt": _square(measured.sites, measured.rtt, 0.0)}
        if measured.rate:
            fastest = max(measured.rate.values())
            document["rate"] = _square(measured.sites, measured.rate, fastest)
        return MatrixTable.model_validate(document)
    except _Wrong as wrong:
        raise KeyedError(_KEY, f'"{path}": {wrong}') from None
    except ValidationError as error:
        found = explain(error)
        if found.key[:1] in (("sites",), ("rtt",), ("rate",)):
            raise KeyedError(_KEY, f'"{path}": {found.what}') from None
        raise KeyedError(("network", *found.key), found.what) from None


def _read(path: Path) -> Measured:
    kind = path.suffix.lower()
    if kind == ".json":
        return _json(path.read_text(encoding="utf-8-sig"))
    if kind != ".csv":
        raise _Wrong("must end in .csv or .json to be read as a matrix")
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        numbered = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    numbered = [(number, row) for number, row in numbered if any(row)]
    if not numbered:
        raise _Wrong("is empty")
    is_long = tuple(name.lower() for name in numbered[0][1][:3]) == _LONG
    return _long(numbered) if is_long else _wide([row for _, row in numbered])


def _wide(rows: Sequence[list[str]]) -> Measured:
    """Read a square matrix: a row of site names, then for each site a row that begins with its name."""
    sites = rows[0][1:]
    for name in sites:
        if not name or sites.count(name) > 1:
            raise _Wrong(f"its first row names {name} twice" if name else "its first row has an empty name")
    rtt: Cells = {}
    seen: set[str] = set()
    for row in rows[1:]:
        name, cells = row[0], row[1:]
        if name not in sites:
            raise _Wrong(f'row "{name}" has no column of that name{nearest(name, sites)}')
        if name in seen:
            raise _Wrong(f"has two rows for {name}; keep one of them")
        seen.add(name)
        if len(cells) != len(sites):
            raise _Wrong(f"row {name} has {len(cells)} cells, but there are {len(sites)} columns")
        for column, cell in zip(sites, cells, strict=True):
            if cell:
                rtt[name, column] = _number(cell, f"row {name}, column {column}")
    missing = [name for name in sites if name not in seen]
    if missing:
        raise _Wrong(f"has a column for {missing[0]}, but no row")
    return Measured(sites, rtt, {})


def _long(rows: Sequence[tuple[int, list[str]]]) -> Measured:
    """Read a list of pairs: columns from, to, rtt and optionally rate. Sites are in order of appearance.

    ``rows`` are lines with their numbers in the file.
    """
    names = rows[0][1]
    header = [name.lower() for name in names]
    if header[3:] not in ([], ["rate"]):
        raise _Wrong(
            f"has the columns {', '.join(names)}, but they must be from, to, rtt and optionally rate"
        )
    measured = Measured([], {}, {})
    for number, row in rows[1:]:
        if len(row) != len(header):
            raise _Wrong(f"row {number} has {len(row)} cells, but there are {len(header)} columns")
        pair = row[0], row[1]
        for column, name in zip(("from", "to"), pair, strict=True):
            if not name:
                raise _Wrong(f"row {number}, column {column}: is empty")
            if name not in measured.sites:
                measured.sites.append(name)
        if pair in measured.rtt:
            raise _Wrong(f"row {number}: has {pair[0]} to {pair[1]} a second time; keep one of the rows")
        for column, cell, cells in zip(("rtt", "rate"), row[2:], (measured.rtt, measured.rate), strict=False):
            cells[pair] = _number(cell, f"row {number} ({pair[0]} to {pair[1]}), column {column}")
    return measured


def _json(text: str) -> Measured:
    """Read ``{"sites": [...], "rtt": [[...]], "rate": [[...]]}``.

    ``null`` is an empty cell; rate is optional.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise _Wrong(f"is not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except ValueError as error:
        raise _Wrong(f"cannot be read: {error}") from None
    except RecursionError:
        raise _Wrong("is nested too deeply") from None
    if not isinstance(document, dict):
        raise _Wrong(f"must hold an object with {', '.join(_JSON_KEYS)}")
    for key in document:
        if key not in _JSON_KEYS:
            raise _Wrong(f'unknown key "{key}"{nearest(key, _JSON_KEYS)}; valid: {", ".join(_JSON_KEYS)}')
    sites = document.get("sites")
    if not isinstance(sites, list) or not all(isinstance(site, str) and site for site in sites):
        raise _Wrong("sites must be a list of names")
    cells = {key: dict(_json_cells(key, document[key], sites)) for key in ("rtt", "rate") if key in document}
    if "rtt" not in cells:
        raise _Wrong("has no rtt; give a matrix with a row and a column per site")
    return Measured(sites, cells["rtt"], cells.get("rate", {}))


def _json_cells(key: str, matrix: Any, sites: list[str]) -> Iterator[tuple[tuple[str, str], float]]:
    why_not = why_not_square(matrix, len(sites))
    if why_not is not None:
        raise _Wrong(f"{key} {why_not}")
    for a, row in zip(sites, matrix, strict=True):
        for b, cell in zip(sites, row, strict=True):
            if cell is not None:
                yield (a, b), _number(cell, f"{key} row {a}, column {b}")


def _number(cell: Any, where: str) -> float:
    try:
        value = math.nan if isinstance(cell, bool) else float(cell)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise _Wrong(f"{where}: must be a number, not {shown(cell)}")
    if value < 0:
        raise _Wrong(f"{where}: must not be negative, but is {cell}")
    return value


def _square(sites: Sequence[str], cells: Cells, inside: float) -> list[list[float]]:
    """Return the full matrix.

    ``inside`` fills empty cells on the diagonal, the other direction's value other cells.
    """

    def value(a: str, b: str) -> float:
        known = cells.get((a, b), cells.get((b, a), inside if a == b else None))
        if known is None:
            raise _Wrong(f"row {a}, column {b}: is empty in both directions")
        return known

    return [[value(a, b) for b in sites] for a in sites]
