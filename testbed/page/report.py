"""``report.html``: the page of a run in one file, which has the run's data in it and loads nothing."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import re
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from testbed.errors import TestbedError
from testbed.experiments.experiment import Experiment
from testbed.page.follow import Follower
from testbed.page.header import header
from testbed.page.history import Position
from testbed.page.linkuse import use_between_sites
from testbed.records.plan import read_plan
from testbed.records.summary import read_summary
from testbed.results import load_run, read_tables, write_all
from testbed.results.errors import Tables
from testbed.results.figures import draw_figures
from testbed.results.report import report_body, report_title
from testbed.results.tables import read_links
from testbed.rundir import TWIN, replacing

MAX_TOKENS = 100_000
"""About the most tokens in a report, so that the file stays small enough to be sent."""
_VENDOR = ("uPlot.iife.min.js", "d3-array.min.js", "d3-geo.min.js", "topojson-client.min.js")
_ATLAS = "countries-50m.json"
_IMPORT = re.compile(r"^import (\{[^}]+\}) from '\./(\w+)\.js';$", re.M)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.M)


def write_report(run_dir: Path, experiment: Experiment, tables: Tables | None = None) -> Path:
    """Write ``report.html`` and ``figures/`` from the logs and ``summary.json``; returns the page's path.

    ``tables`` is the result of ``read_tables``, if the caller has it. Raises ``RunError`` if a file cannot be
    written.
    """
    summary = read_summary(run_dir)
    if tables is None:
        tables = read_tables(run_dir, experiment)
    records, hops, rows = tables.records, tables.hops, tables.rows
    failures = [
        f"request {row.request}: {row.status} {row.reason}".strip() for row in rows if not row.is_completed
    ]

    def write_page(path: Path) -> None:
        used = read_links(run_dir)
        figures = draw_figures(run_dir / "figures", experiment, records, hops, rows, used)
        body = report_body(summary, figures, failures)
        data = run_data(run_dir, experiment)
        with replacing(path) as temporary:
            temporary.write_text(page_text(report_title(summary), body, data), encoding="utf-8")

    write_all(run_dir, {"report.html": write_page})
    return run_dir / "report.html"


def run_data(run_dir: Path, experiment: Experiment) -> dict[str, Any]:
    """Return the header and the history of a run and of its twin, as the page's server sends them."""
    head, follower = _followed(run_dir, experiment)
    status = {
        **{"phase": follower.phase(False), "is_live": False, "faults": False},
        **{"twin": False, "links": True, "why": follower.failure, "now_s": None},
    }
    data = {
        "header": head,
        "update": {**follower.history.since(Position()), "status": status},
        "links": use_between_sites(run_dir, experiment),
    }
    folder = run_dir / TWIN
    if (folder / "summary.json").is_file():
        try:
            twin = _followed(folder, load_run(folder))[1].history.since(Position())
        except TestbedError:  # it was cut short: show the run without its twin
            return data
        data["twin"] = twin
        status["twin"] = True
    return data


def _followed(run_dir: Path, experiment: Experiment) -> tuple[dict[str, Any], Follower]:
    head = header(experiment, read_plan(run_dir))
    n_tokens = sum(request.n_output_tokens for request in experiment.workload.requests)
    follower = Follower(run_dir, head, n_tokens, MAX_TOKENS)
    follower.poll()
    return head, follower


def page_text(title: str, body: str, data: dict[str, Any]) -> str:
    """Return the page with everything inline; its Content-Security-Policy allows its own scripts only."""
    static = Path(str(resources.files("testbed.page") / "static"))
    scripts = [(static / "vendor" / name).read_text(encoding="utf-8").strip() for name in _VENDOR]
    scripts.append(bundle(static / "js"))
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:"
    style = (static / "vendor" / "uPlot.min.css").read_text(encoding="utf-8") + (
        static / "page.css"
    ).read_text(encoding="utf-8")
    parts = [
        '<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width">',
        f'<meta http-equiv=Content-Security-Policy content="{policy}">',
        f"<title>{html.escape(title)}</title><style>{style}</style></head><body>",
        "<div id=app><p class=starting>The page needs JavaScript; the summary below does not.</p></div>",
        f"<article class=report>{body}</article>",
        _packed("run-data", msgspec.json.encode(data)),
    ]
    if data["header"]["layout"] == "places":
        parts.append(_packed("atlas-data", (static / "vendor" / _ATLAS).read_bytes()))
    parts += [f"<script>{script}</script>" for script in scripts]
    return "\n".join(parts) + "\n</body></html>\n"


def bundle(folder: Path) -> str:
    """Return the page's modules as one script: each is a function that is called once, after its imports."""
    sources = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.js"))}
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name not in done:
            for _, needed in _IMPORT.findall(sources[name]):
                add(needed)
            done[name] = _as_function(name, sources[name])

    for name in sources:
        add(name)
    return '"use strict";\n' + "\n".join(done.values())


def _as_function(name: str, source: str) -> str:
    exports = ", ".join(exported for _, exported in _EXPORT.findall(source))
    body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const \1 = module_\2;", source))
    return f"const module_{name} = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();"


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _packed(name: str, data: bytes) -> str:
    """Return data in a script element that browsers do not run: gzip in base64, always the same bytes."""
    text = base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()
    return f"<script type=application/octet-stream id={name}>{text}</script>"
