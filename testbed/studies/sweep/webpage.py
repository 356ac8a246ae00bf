"""``index.html``: the table and the figures of a sweep in one file that loads no other."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from testbed.results.report import figures_html

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page_text(
    title: str,
    paragraphs: Sequence[str],
    table: tuple[Sequence[str], Sequence[Sequence[str]]],
    failures: Sequence[str],
    figures: Sequence[tuple[Path, str]],
) -> str:
    """Returns the HTML of the page, in the style of ``report.html``, without scripts.

    ``table``: header and rows. ``failures``: reasons of runs without a result. ``figures``: (PNG, caption).
    """
    style = (Path(str(resources.files("testbed.page") / "static")) / "page.css").read_text(encoding="utf-8")
    header, rows = table
    parts = [
        '<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width">',
        f'<meta http-equiv=Content-Security-Policy content="{_POLICY}">',
        f"<title>{html.escape(title)}</title><style>{style}</style></head><body><article class=report>",
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p>{html.escape(paragraph)}</p>" for paragraph in paragraphs),
    ]
    if figures:
        parts.append(figures_html(figures))
    parts += [
        "<h2>Means and differences</h2><table><tr>",
        *(f"<th>{html.escape(cell)}" for cell in header),
        "</tr>",
    ]
    for row in rows:
        parts.append(f"<tr>{''.join(f'<td>{html.escape(cell)}' for cell in row)}</tr>")
    parts.append("</table>")
    if failures:
        parts.append("<h2>Runs without a result</h2><ul>")
        parts += [f"<li>{html.escape(text)}</li>" for text in failures]
        parts.append("</ul>")
    return "\n".join([*parts, "</article></body></html>"]) + "\n"
