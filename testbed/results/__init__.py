"""From a run's append-only logs to tables, summary, trace and report.

- ``logs`` reads what clients wrote; ``model`` puts the modelled time beside every hop
- ``requests`` has a row and its metrics per request; ``summary`` aggregates; ``slo`` reads objectives
- ``tables`` (Parquet), ``trace`` (Perfetto), ``text`` (terminal), ``figures`` and ``report`` write
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testbed.errors import UserError
from testbed.experiment import Experiment
from testbed.results.logs import read_logs
from testbed.results.model import hop_table
from testbed.results.requests import request_rows
from testbed.results.summary import summarize
from testbed.rundir import write_json

__all__ = ["finish_run", "load_run", "write_report"]


def finish_run(
    run_dir: Path, experiment: Experiment, objectives: dict[str, float] | None = None
) -> dict[str, Any]:
    """Write tables, trace and summary of a run from its logs; answers the summary.

    Works on a run that was interrupted or killed. Raises ``OSError`` when something cannot be
    written; the logs stay as they are.
    """
    from testbed.results.tables import write_hops, write_requests
    from testbed.results.trace import write_trace

    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    records = read_logs(run_dir)
    hops = hop_table(experiment, records)
    rows = request_rows(experiment, records, hops)
    summary = summarize(experiment, plan, records, hops, rows, objectives)
    write_json(run_dir / "summary.json", summary)
    write_requests(run_dir / "requests.parquet", rows)
    write_hops(run_dir / "hops.parquet", experiment, hops)
    write_trace(run_dir / "trace.json", experiment, records)
    return summary


def write_report(run_dir: Path, experiment: Experiment) -> Path:
    """Write ``report.html`` and ``figures/`` from the logs and ``summary.json``; answers the page."""
    from testbed.results.figures import draw_figures
    from testbed.results.report import write_page

    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    records = read_logs(run_dir)
    hops = hop_table(experiment, records)
    rows = request_rows(experiment, records, hops)
    figures = draw_figures(run_dir / "figures", experiment, records, hops, rows)
    failures = [
        f"request {row['request']}: {row['status']} {row['reason']}".strip()
        for row in rows
        if row["status"] != "completed"
    ]
    page = run_dir / "report.html"
    write_page(page, summary, figures, failures)
    return page


def load_run(run_dir: Path) -> Experiment:
    """The experiment of a run directory. Raises ``UserError`` if it is none."""
    from testbed.scenario import load_experiment

    if not (run_dir / "plan.json").exists() or not (run_dir / "scenario.toml").exists():
        raise UserError(f"{run_dir} is not a run directory (no scenario.toml and plan.json in it)")
    return load_experiment(str(run_dir / "scenario.toml"))
