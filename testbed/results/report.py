"""The part of ``report.html`` that needs no script; ``testbed.page.report`` makes the page around it."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from testbed.records.links import link_name
from testbed.records.summary import LinkRow, RunSummary
from testbed.results.text import VIRTUAL_TIME, model_lacks, summary_text


def report_title(summary: RunSummary) -> str:
    """Return the title of the report."""
    return f"{summary.scenario}: {summary.policy.placement} + {summary.policy.routing}"


def report_body(summary: RunSummary, figures: list[tuple[Path, str]], failures: list[str]) -> str:
    """Return HTML of the summary, the parts of a hop, failures and figures (PNG path, caption)."""
    parts = [
        f"<h2>Summary</h2><pre tabindex=0>{html.escape(summary_text(summary))}</pre>",
        f"<p>{html.escape(VIRTUAL_TIME[0].upper() + VIRTUAL_TIME[1:])}.</p>"
        if summary.clock == "virtual"
        else "",
        "<h2>Parts of a hop</h2>",
        _parts_table(summary),
    ]
    if text := model_lacks(summary):
        parts.append(f"<p>{html.escape(text[0].upper() + text[1:])}.</p>")
    if summary.links:
        parts += ["<h2>Busiest links</h2>", _links_table(summary.links)]
    if failures:
        parts.append("<h2>Requests that did not complete</h2><ul>")
        parts += [f"<li>{html.escape(text)}</li>" for text in failures]
        parts.append("</ul>")
    if figures:
        parts.append(figures_html(figures))
    return "\n".join(parts) + "\n"


def figures_html(figures: Sequence[tuple[Path, str]]) -> str:
    """Return HTML of figures (PNG path, caption), with the images inline."""
    parts = ["<h2>Figures</h2><div class=figures>"]
    for image, caption in figures:
        data = base64.b64encode(image.read_bytes()).decode()
        parts.append(
            f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{data}">'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )
    return "\n".join([*parts, "</div>"])


def _parts_table(summary: RunSummary) -> str:
    rows = [
        "<table class=parts><tr><th>milliseconds of scenario time<th>mean<th>p50<th>p99<th>model "
        "mean<th>model p99</tr>"
    ]
    for name, label in (
        ("hop_compute_s", "compute"),
        ("hop_network_s", "network"),
        ("hop_client_s", "client"),
        (
            "hop_overhead_s",
            "own overhead (measured minus model)" if summary.clock == "real" else "measured minus model",
        ),
    ):
        measured, model = summary.metrics[name], summary.model.get(name)
        cells = [measured.mean, measured.p50, measured.p99]
        cells += [model.mean, model.p99] if model else [None, None]
        text = "".join(f"<td>{'' if cell is None else f'{1e3 * cell:.3f}'}" for cell in cells)
        rows.append(f"<tr><td>{label}{text}</tr>")
    return "".join(rows) + "</table>"


def _links_table(links: Sequence[LinkRow]) -> str:
    rows = ["<table class=parts><tr><th>link<th>use<th>wait, mean [s]<th>wait, p99 [s]</tr>"]
    for link in links:
        name = html.escape(link_name(link.from_, link.to))
        cells = (f"{link.use_ratio:.1%}", f"{link.wait_s.mean:.3f}", f"{link.wait_s.p99:.3f}")
        rows.append(f"<tr><td>{name}{''.join(f'<td>{cell}' for cell in cells)}</tr>")
    return "".join(rows) + "</table>"
