"""How results that were computed again differ from those of the bundle: table by table, in words."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from testbed.experiments.units import counted
from testbed.rundir import parquet_path

_MOST = 5
"""So many columns of a table, or keys of an object, are named."""


def differences_of(
    name: str,
    bundled: Path,
    found: Path,
    tolerance_s: float = 0.0,
    measured: Collection[str] = (),
    renamed: Callable[[str], str] = str,
) -> list[str]:
    """Return how the file ``name`` differs between two folders, a sentence per difference; none: it is the same.

    Numbers may differ by ``tolerance_s``. Columns and keys called as one of ``measured`` are left out: they are times of
    the machine. ``renamed`` returns a text of the bundle with the names that files have now.
    """
    if not (found / name).is_file():
        return [f"{name}: is not there any more"]
    if (bundled / name).read_bytes() == (found / name).read_bytes():
        return []
    if name.endswith(".parquet"):
        wrong = _tables(bundled / name, found / name, tolerance_s, measured, renamed)
    elif name.endswith(".json"):
        wrong = _objects(bundled / name, found / name, measured, renamed)
    else:
        wrong = _lines(bundled / name, found / name, renamed)
    return [f"{name}: {text}" for text in wrong]


def _tables(
    bundled: Path,
    found: Path,
    tolerance_s: float,
    measured: Collection[str],
    renamed: Callable[[str], str],
) -> list[str]:
    one, other = (pq.read_table(parquet_path(path)) for path in (bundled, found))
    wrong = []
    for title, names, others in (
        ("does not have the column", one.column_names, other.column_names),
        ("has the new column", other.column_names, one.column_names),
    ):
        wrong += [f"{title} {column}" for column in names if column not in others]
    if one.num_rows != other.num_rows:
        return [*wrong, f"has {counted(other.num_rows, 'rows')}, and not {one.num_rows}"]
    differing = []
    for column in one.column_names:
        if column in measured or column not in other.column_names or one[column].equals(other[column]):
            continue
        then = [renamed(value) if isinstance(value, str) else value for value in one[column].to_pylist()]
        pairs = list(zip(then, other[column].to_pylist(), strict=True))
        unequal = [pair for pair in pairs if not _same(*pair, tolerance_s)]
        if unequal:
            gaps = [abs(b - a) for a, b in unequal if _is_number(a) and _is_number(b)]
            most = (
                f", by at most {max(gaps):.6g}" if gaps else f": {unequal[0][0]!r} is {unequal[0][1]!r} now"
            )
            differing.append(f"{column} differs in {len(unequal)} of {counted(one.num_rows, 'rows')}{most}")
    return wrong + _first(differing, "columns")


def _objects(
    bundled: Path, found: Path, measured: Collection[str], renamed: Callable[[str], str]
) -> list[str]:
    texts = renamed(bundled.read_text(encoding="utf-8")), found.read_text(encoding="utf-8")
    one, other = (dict(_values(json.loads(text), "", measured)) for text in texts)
    differing = [
        f"{key} is {other.get(key)!r}, and not {one.get(key)!r}"
        for key in dict.fromkeys([*one, *other])
        if not _same(one.get(key), other.get(key), 0.0)
    ]
    return _first(differing, "values")


def _values(value: Any, key: str, measured: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield all values within a JSON value, each with its path."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in items:
            if name not in measured:
                yield from _values(inner, f"{key}.{name}".lstrip("."), measured)
    else:
        yield key, value


def _lines(bundled: Path, found: Path, renamed: Callable[[str], str]) -> list[str]:
    one, other = (path.read_text(encoding="utf-8", errors="replace") for path in (bundled, found))
    then, now = renamed(one).splitlines(), other.splitlines()
    if len(then) != len(now):
        return [f"has {counted(len(now), 'lines')}, and not {len(then)}"]
    n = sum(a != b for a, b in zip(then, now, strict=True))
    return [f"differs in {n} of {counted(len(then), 'lines')}"] if n else []


def _first(texts: Sequence[str], of: str) -> list[str]:
    more = len(texts) - _MOST
    return [*texts[:_MOST], *([f"{more} more {of} differ"] if more > 0 else [])]


def _same(a: Any, b: Any, tolerance_s: float) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y, tolerance_s) for x, y in zip(a, b, strict=True))
    if _is_number(a) and _is_number(b):
        return a == b or abs(a - b) <= tolerance_s or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
