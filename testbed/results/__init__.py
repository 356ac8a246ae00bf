"""From a run's append-only logs to tables, summary and trace.

- ``logs`` reads what clients logged; ``changes``, ``slow``: changes of links and slowed servers over time
- ``model`` computes the closed model's time of every hop; ``requests`` makes a row of metrics per request
- ``links``: use of links over time
- ``summary`` aggregates; ``failures``: faults and recoveries; ``slo``: objectives and goodput; ``unused``:
  blocks that no request used; ``served``: requests from outside; ``intervals``: means over runs
- ``errors``: how far the run is from its twin, or from the closed model
- ``verified``: whether the tokens of real blocks are those of the whole model
- ``tables`` (Parquet), ``trace`` (Perfetto), ``text`` (terminal), ``figures`` with ``plots``, and ``report``
  (the part of ``report.html`` that needs no script) write
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from netem.networks import NETWORKS
from testbed.errors import RunError, UserError
from testbed.experiments.experiment import Experiment
from testbed.experiments.provenance import read_provenance
from testbed.experiments.slo import Objectives
from testbed.fast.links import never_wait
from testbed.records.base import data_of
from testbed.records.links import LinksUsed
from testbed.records.plan import Plan, is_simulated, read_plan
from testbed.records.summary import MOST_LINKS, RunSummary, read_summary
from testbed.results.errors import Tables
from testbed.results.links import use_of_links
from testbed.results.logs import read_logs
from testbed.results.model import hop_table
from testbed.results.requests import request_rows
from testbed.results.served import with_guests
from testbed.results.slo import objectives_of
from testbed.results.summary import summarize
from testbed.results.verified import read_verification
from testbed.rundir import TWIN, not_a_run, write_json

__all__ = ["finish_run", "load_run", "read_tables", "write_all"]


def finish_run(
    run_dir: Path,
    experiment: Experiment,
    objectives: Objectives | None = None,
    tables: Tables | None = None,
    trace: bool = True,
) -> RunSummary:
    """Write tables, trace and summary of a run from its logs; returns the summary.

    Works for a run that was interrupted or killed, too. ``objectives`` are by default those of an earlier summary of
    the run. ``tables`` is the result of
    ``read_tables``, if the caller has it. Without ``trace``, ``trace.json``, the largest file, is not
    written. If a file cannot be written, the others are; then raises ``RunError``, which names all that
    failed.
    """
    from testbed.results.tables import write_hops, write_links, write_requests
    from testbed.results.trace import write_trace

    plan = read_plan(run_dir)
    if objectives is None:
        objectives = _earlier_objectives(run_dir, experiment)
    if tables is None:
        tables = read_tables(run_dir, experiment)
    records, hops, rows = tables.records, tables.hops, tables.rows
    summary = summarize(experiment, plan, tables, objectives, _twin(run_dir))
    summary.code = read_provenance(run_dir).get("code")
    links = _use_of_links(experiment, plan, tables)
    if links is not None:
        summary.links = links.rows[:MOST_LINKS]
    for name, value in dict(read_verification(run_dir, experiment)).items():
        setattr(summary, name, value)
    writers: dict[str, Callable[[Path], object]] = {
        "requests.parquet": lambda path: write_requests(path, rows),
        "hops.parquet": lambda path: write_hops(path, experiment, hops),
    }
    if links is not None:
        writers["links.parquet"] = lambda path: write_links(path, links)
    if trace:
        writers["trace.json"] = lambda path: write_trace(path, experiment, records, hops)
    writers["summary.json"] = lambda path: write_json(path, data_of(summary))  # with it all is there
    write_all(run_dir, writers)
    return summary


def _use_of_links(experiment: Experiment, plan: Plan, tables: Tables) -> LinksUsed | None:
    """Return the use of the run's links; None if its network emulates none, or no time ever passes on them."""
    network = NETWORKS.get(plan.network)
    if network is None or not network.emulates or never_wait(experiment):
        return None
    return use_of_links(experiment, tables.records, tables.hops, shares_links=network.shares_links)


def read_tables(run_dir: Path, experiment: Experiment) -> Tables:
    """Read a run's logs, and compute its hops and a row per request."""
    records = read_logs(run_dir)
    hops = hop_table(experiment, records)
    return Tables(records, hops, request_rows(experiment, records, hops))


def _twin(run_dir: Path) -> Tables | None:
    """Read the run's twin; returns None if there is none, or it did not end by itself."""
    folder = run_dir / TWIN
    try:
        summary = read_summary(folder)
    except UserError:
        return None
    # A twin that was killed, and whose tables were completed later, lacks requests.
    if summary.n_interrupted or summary.n_not_started:
        return None
    return read_tables(folder, load_run(folder))


def load_run(run_dir: Path) -> Experiment:
    """Load a run directory's experiment, with requests from outside. Raises ``UserError``."""
    from testbed.experiments import load_experiment

    if is_simulated(run_dir):
        raise UserError(
            f"{run_dir} was simulated: it has no logs to rebuild its tables from; simulate it again"
        )
    if not (run_dir / "plan.json").exists():
        raise not_a_run(run_dir)
    for name in ("scenario.toml", "events"):
        if not (run_dir / name).exists():
            raise UserError(
                f"{run_dir} is not whole: its tables and page are made from {name}, which is missing; copy the "
                "whole run again, or open its report.html"
            )
    return with_guests(load_experiment(str(run_dir / "scenario.toml")), run_dir)


def write_all(run_dir: Path, writers: dict[str, Callable[[Path], object]]) -> None:
    """Call every writer with its path, even if one fails. Raises ``RunError`` naming those that failed."""
    problems: dict[str, str] = {}
    for name, write in writers.items():
        try:
            write(run_dir / name)
        except OSError as error:
            problems[name] = error.strerror or str(error)
    if problems:
        what = ", ".join(f"{name} ({reason})" for name, reason in problems.items())
        raise RunError(
            f"cannot write {what} in {run_dir}; the logs are intact: make room, then `testbed report "
            f"{run_dir}`"
        )


def _earlier_objectives(run_dir: Path, experiment: Experiment) -> Objectives:
    """Return the objectives of the run's present summary, or the scenario's if no summary can be read."""
    try:
        return objectives_of(read_summary(run_dir))
    except UserError:
        return experiment.objectives
