"""The engine ``virtual``: the testbed itself in virtual time, all nodes in this process.

It writes a run directory like any run (``testbed.runtime.virtual``); the simulator's results are read from
that.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from netem.networks import IN_PROCESS
from testbed.control.placing import PlacedExperiment
from testbed.errors import RunError, UserError
from testbed.experiments.experiment import Experiment
from testbed.records.plan import read_plan
from testbed.records.requests import COMPLETED, FAILED
from testbed.records.summary import SIMULATED, RunSummary
from testbed.results import finish_run, read_tables
from testbed.results.errors import Tables
from testbed.rundir import make_run_dir, scratch
from testbed.runs.session import Ended
from testbed.runs.twin import twin_of
from testbed.runtime.running import run_to_end
from testbed.runtime.signals import Interruption
from testbed.runtime.stage import Stage
from testbed.runtime.wiring import check_frames
from testbed.simulator.cases import Case, Served

_STAGE = Stage("virtual", IN_PROCESS, SIMULATED)


def serve_virtually(
    case: Case,
    placed: PlacedExperiment,
    out: Path | None,
    *,
    live: bool = True,
    interruption: Interruption | None = None,
) -> Served:
    """Serve the case's requests.

    ``out`` is a new folder for the run directory; ``None``: it is deleted afterwards. ``live``: show
    progress. ``interruption`` ends the run. Raises ``UserError`` for an instance file, and the ``TestbedError`` that broke the run.
    """
    if case.source is not None:
        raise UserError(
            "--clock virtual is only for scenarios, since an instance file has no network; leave it out"
        )
    with scratch("virtual") as folder:
        run_dir = make_run_dir(out or folder / "run", case.experiment.name)
        return serve_by_system(
            twin_of(case.experiment, run_dir), placed, run_dir, _STAGE, live=live, interruption=interruption
        )


def serve_by_system(
    experiment: Experiment,
    placed: PlacedExperiment,
    run_dir: Path,
    stage: Stage,
    *,
    live: bool = True,
    interruption: Interruption | None = None,
) -> Served:
    """Serve on ``stage`` with the run directory ``run_dir``.

    Raises the ``TestbedError`` that broke the run.
    """
    check_frames(experiment)
    run_to_end(experiment, placed, run_dir, stage, live=live, interruption=interruption)
    tables = read_tables(run_dir, experiment)
    return served_of(experiment, run_dir, tables, finish_run(run_dir, experiment, tables=tables))


def served_by(ended: Ended) -> Served:
    """Return a whole run as the result of an engine.

    Raises the ``TestbedError`` that broke the run, ``KeyboardInterrupt`` if it was interrupted, ``RunError`` if
    a request did not end.
    """
    if ended.error is not None:
        raise ended.error
    if ended.summary is None or ended.interrupted:
        raise KeyboardInterrupt
    tables = read_tables(ended.run_dir, ended.experiment)
    return served_of(ended.experiment, ended.run_dir, tables, ended.summary)


def served_of(experiment: Experiment, run_dir: Path, tables: Tables, summary: RunSummary) -> Served:
    """Return a run of the system as the result of an engine. Raises ``RunError`` if a request did not end."""
    for row in tables.rows:
        if row.status not in (COMPLETED, FAILED):
            raise RunError(f"request {row.request} did not end: its status is {row.status}")
    gaps_s = [
        later.at_s - token.at_s
        for record in tables.records.requests
        for token, later in pairwise(record.tokens)
    ]
    return Served(
        moves=tuple(summary.moves),
        routing_s=tuple(read_plan(run_dir).routing_decisions_s or ()),
        rows=tables.rows,
        summary=summary,
        gaps_s=gaps_s,
    )
