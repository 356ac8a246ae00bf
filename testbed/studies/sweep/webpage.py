"""``index.html``: the table and the figures of a sweep in one file that loads no other."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from testbed.results.report import figures_html

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Header and rows."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page_text(
    title: str,
    paragraphs: Sequence[str],
    table: Table,
    failures: Sequence[str],
    figures: Sequence[tuple[Path, str]],
    parts_of_table: Mapping[str, Table] = MappingProxyType({}),
) -> str:
    """Returns the HTML of the page, in the style of ``report.html``, without scripts.

    ``table``: header and rows; ``parts_of_table``: tables by name that can be chosen in its place. ``failures``: reasons of
    runs without a result. ``figures``: (PNG, caption).
    """
    style = (Path(str(resources.files("testbed.page") / "static")) / "page.css").read_text(encoding="utf-8")
    parts = [
        '<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width">',
        f'<meta http-equiv=Content-Security-Policy content="{_POLICY}">',
        f"<title>{html.escape(title)}</title><style>{style}</style></head><body><article class=report>",
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p>{html.escape(paragraph)}</p>" for paragraph in paragraphs),
    ]
    if figures:
        parts.append(figures_html(figures))
    parts.append("<h2>Means and differences</h2>")
    if parts_of_table:
        parts += _chosen({"all": table, **parts_of_table})
    else:
        parts.append(_table(table))
    if failures:
        parts.append("<h2>Runs without a result</h2><ul>")
        parts += [f"<li>{html.escape(text)}</li>" for text in failures]
        parts.append("</ul>")
    return "\n".join([*parts, "</article></body></html>"]) + "\n"


def _table(table: Table) -> str:
    header, rows = table
    lines = [f"<table><tr>{''.join(f'<th>{html.escape(cell)}' for cell in header)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{html.escape(cell)}' for cell in row)}</tr>" for row in rows]
    return "\n".join([*lines, "</table>"])


def _chosen(tables: Mapping[str, Table]) -> Iterator[str]:
    """Yields a button per table, and the tables, of which the chosen one is shown."""
    for number, name in enumerate(tables):
        checked = "" if number else " checked"
        yield f"<input type=radio name=part id=part-{number}{checked}><label for=part-{number}>{html.escape(name)}</label>"
    shown = ",".join(f"#part-{number}:checked~.part-{number}" for number in range(len(tables)))
    yield f"<style>.part{{display:none}}{shown}{{display:block}}</style>"
    for number, table in enumerate(tables.values()):
        yield f"<div class='part part-{number}'>{_table(table)}</div>"
