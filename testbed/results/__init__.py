"""From a run's append-only logs to tables, summary and trace.

- ``logs`` reads what clients wrote; ``model`` puts the modelled time beside every hop
- ``requests`` has a row and its metrics per request; ``summary`` aggregates; ``slo`` reads objectives;
  ``unused``: blocks that no request used
- ``errors``: how far the run is from its twin, or from the closed model
- ``tables`` (Parquet), ``trace`` (Perfetto), ``text`` (terminal), ``figures`` and ``report``
  (the part of ``report.html`` that needs no script) write;
  ``atomic`` lets no file be left half written; ``intervals``: means over runs
- ``verified`` reads whether a run's tokens are those of the whole model
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed.errors import RunError, UserError
from testbed.results.errors import Tables
from testbed.results.logs import read_logs
from testbed.results.model import hop_table
from testbed.results.requests import request_rows
from testbed.results.served import with_guests
from testbed.results.summary import summarize
from testbed.results.verified import read_verification
from testbed.rundir import TWIN, write_json
from testbed.scenario.experiment import Experiment

__all__ = ["finish_run", "load_run", "read_tables", "write_all"]


def finish_run(
    run_dir: Path,
    experiment: Experiment,
    objectives: dict[str, float] | None = None,
    tables: Tables | None = None,
    trace: bool = True,
) -> dict[str, Any]:
    """Write tables, trace and summary of a run from its logs; returns the summary.

    Works on a run that was interrupted or killed. ``objectives`` (``slo.parse_slo``) are those of an
    earlier summary of the same run unless given; ``tables``, if they were read before, are its logs. Without ``trace``
    ``trace.json`` is left out: it is the largest file. Every file is tried even if another cannot be
    written; raises ``RunError`` naming all that could not. The logs stay as they are.
    """
    from testbed.results.tables import write_hops, write_requests
    from testbed.results.trace import write_trace

    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    if objectives is None:
        objectives = _earlier_objectives(run_dir, experiment)
    if tables is None:
        tables = read_tables(run_dir, experiment)
    records, hops, rows = tables.records, tables.hops, tables.rows
    summary = summarize(experiment, plan, tables, objectives, _twin(run_dir))
    summary.update(read_verification(run_dir, experiment))
    writers: dict[str, Callable[[Path], object]] = {
        "summary.json": lambda path: write_json(path, summary),
        "requests.parquet": lambda path: write_requests(path, rows),
        "hops.parquet": lambda path: write_hops(path, experiment, hops),
    }
    if trace:
        writers["trace.json"] = lambda path: write_trace(path, experiment, records, hops)
    write_all(run_dir, writers)
    return summary


def read_tables(run_dir: Path, experiment: Experiment) -> Tables:
    """What a run's logs say."""
    records = read_logs(run_dir)
    hops = hop_table(experiment, records)
    return Tables(records, hops, request_rows(experiment, records, hops))


def _twin(run_dir: Path) -> Tables | None:
    """The run's twin, if it was made and came to its end."""
    folder = run_dir / TWIN
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if summary["n_interrupted"]:  # it was killed, and its tables were completed later
        return None
    return read_tables(folder, load_run(folder))


def load_run(run_dir: Path) -> Experiment:
    """The experiment of a run directory. Raises ``UserError`` if it is none."""
    from testbed.scenario import load_experiment

    if (run_dir / "plan.json").exists() and not (run_dir / "events").is_dir():
        raise UserError(
            f"{run_dir} was simulated: it has no logs to rebuild its tables from; simulate it again"
        )
    if not (run_dir / "plan.json").exists() or not (run_dir / "scenario.toml").exists():
        raise UserError(f"{run_dir} is not a run directory (no scenario.toml and plan.json in it)")
    if not (run_dir / "events").is_dir():
        raise UserError(
            f"{run_dir} was simulated: it has no logs to rebuild its tables from; simulate it again"
        )
    return with_guests(load_experiment(str(run_dir / "scenario.toml")), run_dir)


def write_all(run_dir: Path, writers: dict[str, Callable[[Path], object]]) -> None:
    """Write every file of a run that is named; every one is tried. Raises ``RunError`` naming those that failed."""
    problems: dict[str, str] = {}
    for name, write in writers.items():
        try:
            write(run_dir / name)
        except OSError as error:
            problems[name] = error.strerror or str(error)
    if problems:
        what = ", ".join(f"{name} ({reason})" for name, reason in problems.items())
        raise RunError(
            f"cannot write {what} in {run_dir}; the logs are intact: make room, then `testbed report {run_dir}`"
        )


def _earlier_objectives(run_dir: Path, experiment: Experiment) -> dict[str, float]:
    """The objectives of the summary that is there; the scenario's if there is no readable one."""
    try:
        earlier = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return experiment.objectives
    return dict(earlier.get("objectives", {}))
