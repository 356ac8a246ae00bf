"""Makes the tables of ``docs/metrics.md`` from the records: ``python -m testbed.records.docs`` rewrites the page.

A table stands between the lines ``<!-- table: NAME -->`` and ``<!-- end of table -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from msgspec import Meta

from testbed.records.base import columns_of
from testbed.records.events import AnyEvent
from testbed.records.hops import HopRow
from testbed.records.links import link_columns
from testbed.records.plan import Plan
from testbed.records.requests import RequestRow, Times
from testbed.records.summary import RunSummary

PAGE = Path("docs/metrics.md")
_TABLE = re.compile(r"(?<=<!-- table: )(\w+)( -->\n).*?(?=\n<!-- end of table -->)", re.S)


def _columns(columns: Mapping[str, tuple[Any, Meta]]) -> Iterator[str]:
    yield "| name | unit | definition |"
    yield "| --- | --- | --- |"
    for name, (_, meta) in columns.items():
        extra = meta.extra or {}
        only = f" ({extra['engines']})" if extra.get("engines") else ""
        yield f"| `{name}` | {extra.get('unit', '')} | {meta.description}{only} |"


def _events() -> Iterator[str]:
    yield "| event | keys | meaning |"
    yield "| --- | --- | --- |"
    for event in get_args(AnyEvent):
        keys = ", ".join(f"`{name}`" for name in event.__struct_fields__ if name != "at_s")
        text = " ".join((event.__doc__ or "").split()).replace("``", "`")
        yield f"| `{event.__struct_config__.tag}` | {keys} | {text} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "summary": lambda: _columns(columns_of(RunSummary)),
    "requests": lambda: _columns(columns_of(RequestRow)),
    "times": lambda: _columns(columns_of(Times)),
    "hops": lambda: _columns(columns_of(HopRow)),
    "links": lambda: _columns(link_columns()),
    "plan": lambda: _columns(columns_of(Plan)),
    "events": _events,
}


def with_tables(page: str) -> str:
    """Return the text of the page with its tables made anew."""
    return _TABLE.sub(lambda found: f"{found[1]}{found[2]}" + "\n".join(TABLES[found[1]]()), page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
