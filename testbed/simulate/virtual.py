"""The engine ``virtual``: the testbed itself in virtual time, all nodes in this process.

It writes a run directory like any run (``testbed.runtime.virtual``); the simulator's results are read from
that.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from policies.problem import Hop, Route
from testbed.control.placing import PlacedExperiment
from testbed.errors import RunError, UserError
from testbed.fast.outcome import SimulatedRequest, move_of
from testbed.results import finish_run, read_tables
from testbed.results.errors import Tables
from testbed.results.logs import RequestRecord
from testbed.rundir import make_run_dir, scratch
from testbed.runs.twin import twin_of
from testbed.runtime.running import run_to_end
from testbed.runtime.stage import Stage
from testbed.runtime.wiring import check_frames
from testbed.scenario.experiment import Experiment
from testbed.simulate.cases import Case, Served

_STAGE = Stage("virtual", "memory", "simulated")


def serve_virtually(case: Case, placed: PlacedExperiment, out: Path | None, *, live: bool = True) -> Served:
    """Serve the case's requests.

    ``out`` is a new folder for the run directory; ``None``: it is deleted afterwards. ``live``: show
    progress. Raises ``UserError`` for an instance file, and the ``TestbedError`` that broke the run.
    """
    if case.source is not None:
        raise UserError(
            "--clock virtual is only for scenarios, since an instance file has no network; leave it out"
        )
    with scratch("virtual") as folder:
        run_dir = make_run_dir(out or folder / "run", case.experiment.name)
        return serve_by_system(twin_of(case.experiment, run_dir), placed, run_dir, _STAGE, live=live)


def serve_by_system(
    experiment: Experiment, placed: PlacedExperiment, run_dir: Path, stage: Stage, *, live: bool = True
) -> Served:
    """Serve on ``stage`` with the run directory ``run_dir``.

    Raises the ``TestbedError`` that broke the run.
    """
    check_frames(experiment)
    run_to_end(experiment, placed, run_dir, stage, live=live)
    tables = read_tables(run_dir, experiment)
    return served_of(experiment, run_dir, tables, finish_run(run_dir, experiment, tables=tables))


def served_of(experiment: Experiment, run_dir: Path, tables: Tables, summary: dict[str, Any]) -> Served:
    """Return a run of the system as the result of an engine. Raises ``RunError`` if a request did not end."""
    known = {record.index: record for record in tables.records.requests}
    plans = {plan.index: plan for plan in experiment.workload.requests}
    requests = tuple(_request(plans[row["request"]], row, known[row["request"]]) for row in tables.rows)
    names = [server.name for server in experiment.problem.servers]
    moves = tuple(move_of(line, names) for line in tables.records.moves)
    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    gaps_s = [
        later.at_s - token.at_s
        for record in tables.records.requests
        for token, later in pairwise(record.tokens)
    ]
    return Served(requests, moves, tuple(plan["routing_decisions_s"]), summary, gaps_s=gaps_s)


def _request(plan: Any, row: dict[str, Any], record: RequestRecord) -> SimulatedRequest:
    if row["status"] not in ("completed", "failed"):
        raise RunError(f"request {plan.index} did not end: its status is {row['status']}")
    hops = tuple(Hop(*hop) for hop in record.chain)
    return SimulatedRequest(
        plan,
        row["status"],
        Route(hops, record.wait_expected_s, math.nan) if hops else None,
        record.n_rejections,
        row["queue_s"] if row["queue_s"] is not None else record.last_seen_at_s - record.arrived_at_s,
        row["setup_s"],
        row["ttft_s"],
        row["e2e_s"],
        record.last_seen_at_s - record.arrived_at_s,
        row["reason"],
        n_replays=record.n_recoveries,
        n_done=row["n_tokens_done"],
        n_preemptions=record.n_preemptions,
        preempted_tokens=record.preempted_tokens,
        preempted_s=record.preempted_s,
    )
