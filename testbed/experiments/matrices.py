"""Reads measured RTT matrices from files: CSV (a square matrix or a list of pairs) and JSON.

An empty cell has the value of the other direction. On the diagonal (inside a site) an empty RTT is 0, and an
empty rate is the fastest rate of the file. CSV may be separated by commas, semicolons or tabs.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from testbed.experiments.fields import checked_name
from testbed.experiments.filesread import note_file
from testbed.experiments.network_tables import MatrixTable, NetworkTable, why_not_square
from testbed.experiments.problems import Key, KeyedError, cut, explain, nearest, shown, unknown
from testbed.experiments.topology_files import unique_names
from testbed.experiments.units import DURATION, RATE, Dimension

_KEY = ("network", "file")
_JSON_KEYS = ("sites", "rtt", "rate")
_FORMS = (
    "a matrix has a first row of names, and for each of these a row that begins with it; a list of pairs has the "
    "columns from, to, rtt and optionally rate"
)
_EMPTY = {"", "-", "-1", "-1.0", "nan", "null", "none", "n/a", "na", "*"}
"""How tables write that there is no measurement, in small letters."""
_COLUMNS = {
    "from": r"from|source|src|origin|sender|sending",
    "to": r"to|target|dest|destination|dst|receiver|receiving",
    "rate": r"rate|bandwidth|throughput|capacity|(?:giga|mega|kilo)?bits?|[gmk]?bps|[gmk]bits?",
    "rtt": r"rtt|latency|ping|milliseconds?|microseconds?|seconds?|ms",
}
"""What the words of a column's name say of it, the first that fits."""
_UNITS = {
    "milliseconds": "ms", "millisecond": "ms", "ms": "ms", "microseconds": "us", "us": "us", "seconds": "s", "s": "s",
    "gigabits": "Gbit/s", "gbps": "Gbit/s", "gbit": "Gbit/s", "megabits": "Mbit/s", "mbps": "Mbit/s", "mbit": "Mbit/s",
    "kbps": "kbit/s", "kbit": "kbit/s", "bps": "bit/s", "bits": "bit/s",
}  # fmt: skip
"""Units in a column's name."""
_QUANTITY = re.compile(r"([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*([a-zµ]+(?:/s)?)", re.IGNORECASE)

Cells = dict[tuple[str, str], float]


@dataclass
class Measured:
    """The cells that a file gives, by (from, to), in ``units`` ("rtt", "rate") where the file states them.

    ``rate`` is empty if it gives no rates.
    """

    sites: list[str]
    rtt: Cells
    rate: Cells
    units: dict[str, str] = field(default_factory=dict)


class _Wrong(Exception):
    """Something is wrong in a matrix file. The message follows the file's name."""


def matrix_of_file(table: MatrixTable, folder: Path, used: Mapping[str, Key] | None = None) -> MatrixTable:
    """Return ``table`` with the matrices of its ``file``, whose relative path starts at ``folder``.

    ``used`` are the sites that are kept, each with the key that names it; without it all are. Names of sites that a
    scenario could not have become ones that it can: "New York" is New-York. Raises ``KeyedError`` that names the file,
    and the row and column of what is wrong, or the key of a site that the file does not have.
    """
    assert table.file is not None
    path = note_file(folder / table.file)
    asked = {"rtt": (DURATION, table.rtt_unit), "rate": (RATE, table.rate_unit)}
    try:
        measured = _read(path, asked)
    except OSError as error:
        raise KeyedError(_KEY, f'cannot read "{path}": {error.strerror}') from None
    except UnicodeDecodeError:
        raise KeyedError(_KEY, f'"{path}" is not UTF-8 text') from None
    except csv.Error as error:
        raise KeyedError(_KEY, f'"{path}" cannot be read as CSV: {error}') from None
    except _Wrong as wrong:
        raise KeyedError(_KEY, f'"{path}": {wrong}') from None
    if measured.rate and table.rate is not None:
        raise KeyedError(("network", "rate"), f'is also in "{path}"; leave out one of the two')
    if not measured.rate and table.rate is None:
        raise KeyedError(("network", "rate"), f'is missing; give it, since "{path}" has no rates')
    measured = _with_plain_names(measured)
    document = table.model_dump(
        by_alias=True,
        exclude_none=True,
        include={*NetworkTable.model_fields, "kind", "rtt_unit", "rate", "rate_unit", "shared", "paths"},
    )
    for key, (dimension, unit) in asked.items():
        stated = measured.units.get(key)
        if stated is not None and unit not in (None, stated):
            raise KeyedError(
                ("network", f"{key}_unit"), f'is {unit}, but "{path}" states {stated}; leave it out'
            )
        if stated is not None:
            document[f"{key}_unit"] = stated
        elif key == "rtt" and unit is None:
            raise KeyedError(
                ("network", "rtt_unit"),
                f"is missing; give the unit of the file's RTTs, one of {', '.join(dimension.units)}",
            )
    for site, key_of in (used or {}).items():
        if site not in measured.sites:
            raise KeyedError(key_of, unknown("site", site, measured.sites))
    sites = [site for site in measured.sites if used is None or site in used]
    try:
        document |= {"sites": sites, "rtt": _square(sites, measured.rtt, 0.0)}
        if measured.rate:
            fastest = max(measured.rate.values())
            document["rate"] = _square(sites, measured.rate, fastest)
        if "places" in document and used is not None:
            document["places"] = {
                name: at
                for name, at in document["places"].items()
                if name in used or name not in measured.sites
            }
        return MatrixTable.model_validate(document)
    except _Wrong as wrong:
        raise KeyedError(_KEY, f'"{path}": {wrong}') from None
    except ValidationError as error:
        found = explain(error)
        if found.key[:1] in (("sites",), ("rtt",), ("rate",)):
            raise KeyedError(_KEY, f'"{path}": {found.what}') from None
        raise KeyedError(("network", *found.key), found.what) from None


_Asked = Mapping[str, tuple[Dimension, str | None]]
"""The dimension of RTTs and rates, and the unit that the scenario states."""


def _read(path: Path, asked: _Asked) -> Measured:
    kind = path.suffix.lower()
    if kind == ".json":
        return _json(path.read_text(encoding="utf-8-sig"))
    if kind != ".csv":
        raise _Wrong("must end in .csv or .json to be read as a matrix")
    text = path.read_text(encoding="utf-8-sig")
    first = next((line for line in text.splitlines() if line.strip()), "")
    separator = max(",;\t", key=first.count)
    reader = csv.reader(text.splitlines(), delimiter=separator)
    numbered = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    numbered = [(number, row) for number, row in numbered if any(row)]
    if not numbered:
        raise _Wrong("is empty")
    table = _Table(separator == ";", asked)
    if all(_is_number(cell) for cell in numbered[0][1]):
        raise _Wrong(f"begins with a row of numbers, so that the sites have no names: {_FORMS}")
    columns = _columns(numbered[0][1])
    if columns is not None:
        return _long(numbered, columns, table)
    return _wide([row for _, row in numbered], table)


@dataclass
class _Table:
    """How a CSV file writes its cells."""

    has_decimal_commas: bool
    asked: _Asked
    units: dict[str, str] = field(default_factory=dict)
    """Units that the file states."""

    def number(self, cell: str, key: str, where: str) -> float | None:
        """Returns a cell's value in the file's unit or that of its first cell with one; ``None`` if it is empty."""
        if cell.lower() in _EMPTY:
            return None
        text = cell.replace(",", ".") if self.has_decimal_commas else cell
        if (match := _QUANTITY.fullmatch(text)) is None:
            return _number(text, key, where)
        value, unit = match.groups()
        dimension, asked = self.asked[key]
        if unit not in dimension.units:
            raise _Wrong(
                f"{where}: {shown(cell)} has no unit of a {dimension.name}: {', '.join(dimension.units)}"
            )
        own = self.units.setdefault(key, asked or unit)
        if own == unit:
            return _number(value, key, where)
        try:
            return dimension.of(_number(value, key, where), unit) / dimension.of(1.0, own)
        except ValueError as error:
            raise _Wrong(f"{where}: {error}") from None


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", "."))
    except ValueError:
        return False
    return True


def _columns(names: Sequence[str]) -> list[tuple[str, str | None]] | None:
    """Returns what each column of a list of pairs holds, with its unit if the name has one; ``None`` for a matrix.

    Raises ``_Wrong`` for a list with other columns.
    """
    found = []
    for name in names:
        words = re.findall(r"[a-z]+", name.lower())
        kind = next(
            (key for key, of in _COLUMNS.items() if any(re.fullmatch(of, word) for word in words)), ""
        )
        found.append((kind, next((_UNITS[word] for word in words if word in _UNITS), None)))
    kinds = [kind for kind, _ in found]
    if not {"from", "to"} <= set(kinds[:2]):
        return None
    if sorted(kinds) not in (["from", "rtt", "to"], ["from", "rate", "rtt", "to"]):
        raise _Wrong(
            f"has the columns {cut(', '.join(names))}, but they must be from, to, rtt and optionally rate, or clearly "
            "mean these"
        )
    return found


def _wide(rows: Sequence[list[str]], table: _Table) -> Measured:
    """Read a square matrix: a row of site names, then for each site a row that begins with its name."""
    if len(rows) > 1 and len(rows[1]) == len(rows[0]) + 1:
        # Nothing stands in the corner, not even a separator.
        rows = [["", *rows[0]], *rows[1:]]
    sites = rows[0][1:]
    names = set(sites)
    if len(names) < len(sites) or "" in names:
        name = next(name for name in sites if not name or sites.count(name) > 1)
        raise _Wrong(f"its first row names {name} twice" if name else "its first row has an empty name")
    rtt: Cells = {}
    seen: set[str] = set()
    for row in rows[1:]:
        name, cells = row[0], row[1:]
        if name not in names:
            if not seen and not any(row[0] in names for row in rows[1:]):
                raise _Wrong(f"is neither a matrix nor a list of pairs: {_FORMS}")
            raise _Wrong(f"row {shown(name)} has no column of that name{nearest(name, sites)}")
        if name in seen:
            raise _Wrong(f"has two rows for {name}; keep one of them")
        seen.add(name)
        if len(cells) != len(sites):
            raise _Wrong(f"row {name} has {len(cells)} cells, but there are {len(sites)} columns")
        for column, cell in zip(sites, cells, strict=True):
            value = table.number(cell, "rtt", f"row {name}, column {column}")
            if value is not None:
                rtt[name, column] = value
    missing = [name for name in sites if name not in seen]
    if missing:
        raise _Wrong(f"has a column for {missing[0]}, but no row")
    return Measured(sites, rtt, {}, table.units)


def _long(
    rows: Sequence[tuple[int, list[str]]], columns: Sequence[tuple[str, str | None]], table: _Table
) -> Measured:
    """Read a list of pairs: what ``columns`` says. Sites are in order of appearance.

    ``rows`` are lines with their numbers in the file.
    """
    table.units |= {kind: unit for kind, unit in columns if unit is not None}
    kinds = [kind for kind, _ in columns]
    sites: dict[str, None] = {}
    cells: dict[str, Cells] = {"rtt": {}, "rate": {}}
    seen = set()
    for number, row in rows[1:]:
        if len(row) != len(kinds):
            raise _Wrong(f"row {number} has {len(row)} cells, but there are {len(kinds)} columns")
        of = dict(zip(kinds, row, strict=True))
        pair = of["from"], of["to"]
        for column, name in zip(("from", "to"), pair, strict=True):
            if not name:
                raise _Wrong(f"row {number}, column {column}: is empty")
            sites[name] = None
        if pair in seen:
            raise _Wrong(f"row {number}: has {pair[0]} to {pair[1]} a second time; keep one of the rows")
        seen.add(pair)
        for key in cells.keys() & of.keys():
            value = table.number(of[key], key, f"row {number} ({pair[0]} to {pair[1]}), column {key}")
            if value is not None:
                cells[key][pair] = value
    return Measured(list(sites), cells["rtt"], cells["rate"], table.units)


def _with_plain_names(measured: Measured) -> Measured:
    """Returns the same with names that sites of a scenario can have."""
    if all(map(_is_plain, measured.sites)):
        return measured
    names = unique_names(measured.sites)
    new = dict(zip(measured.sites, names, strict=True))
    rtt, rate = (
        {(new[a], new[b]): value for (a, b), value in of.items()} for of in (measured.rtt, measured.rate)
    )
    return Measured(names, rtt, rate, measured.units)


def _is_plain(name: str) -> bool:
    try:
        checked_name(name)
    except ValueError:
        return False
    return True


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
    if len(set(sites)) < len(sites):
        raise _Wrong("lists a site twice; each site must occur once")
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
                yield (a, b), _number(cell, key, f"{key} row {a}, column {b}")


def _number(cell: Any, key: str, where: str) -> float:
    try:
        value = math.nan if isinstance(cell, bool) else float(cell)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise _Wrong(f"{where}: must be a number, not {shown(cell)}")
    if value < 0 or (value == 0 and key == "rate"):
        must = "must be more than 0" if key == "rate" else "must not be negative"
        raise _Wrong(f"{where}: {must}, but is {cell}")
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
