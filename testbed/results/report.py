"""``report.html``: one self-contained page of a run."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any

from testbed.results.text import VIRTUAL_TIME, summary_text

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.2rem .8rem .2rem 0;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}
pre{background:#f6f6f6;padding:1rem;overflow-x:auto;font-size:13px}
img{max-width:100%}figure{margin:2rem 0}figcaption{color:#555}
"""


def page_text(summary: dict[str, Any], figures: list[tuple[Path, str]], failures: list[str]) -> str:
    """The page with everything inline: it can be sent as one file. Figures are (PNG, caption)."""
    title = f"{summary['scenario']}: {summary['policy']['placement']} + {summary['policy']['routing']}"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>",
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>",
        f"<pre>{html.escape(summary_text(summary))}</pre>",
        f"<p>{html.escape(VIRTUAL_TIME[0].upper() + VIRTUAL_TIME[1:])}.</p>"
        if summary["clock"] == "virtual"
        else "",
        "<h2>Parts of a hop</h2>",
        _parts_table(summary),
    ]
    if failures:
        parts.append("<h2>Requests that did not complete</h2><ul>")
        parts += [f"<li>{html.escape(text)}</li>" for text in failures]
        parts.append("</ul>")
    for image, caption in figures:
        data = base64.b64encode(image.read_bytes()).decode()
        parts.append(
            f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{data}">'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )
    return "\n".join(parts) + "\n"


def _parts_table(summary: dict[str, Any]) -> str:
    rows = [
        "<table><tr><th>milliseconds of scenario time<th>mean<th>p50<th>p99<th>model mean<th>model p99</tr>"
    ]
    for name, label in (
        ("hop_compute_s", "compute"),
        ("hop_network_s", "network"),
        ("hop_client_s", "client"),
        ("hop_overhead_s", "own overhead (measured minus model)"),
    ):
        measured, model = summary["metrics"][name], summary["model"].get(name)
        cells = [measured["mean"], measured["p50"], measured["p99"]]
        cells += [model["mean"], model["p99"]] if model else [None, None]
        text = "".join(f"<td>{'' if cell is None else f'{1e3 * cell:.3f}'}" for cell in cells)
        rows.append(f"<tr><td>{label}{text}</tr>")
    return "".join(rows) + "</table>"
