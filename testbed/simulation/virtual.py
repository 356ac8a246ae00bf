"""The engine ``virtual``: the testbed itself in virtual time, all nodes in this process (``testbed.virtual``).

It leaves a run directory like any run; what the simulator prints is read from that.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from policies.problem import BlockRange, Hop
from testbed.errors import RunError, UserError
from testbed.moving.steering import Move
from testbed.placing import PlacedExperiment
from testbed.results import finish_run, read_tables
from testbed.results.logs import RequestRecord
from testbed.rundir import EVENTS, make_run_dir
from testbed.running import emulate
from testbed.simulation.cases import Case
from testbed.simulation.engine import Served, SimulatedRequest
from testbed.simulation.record import Record, Recovery
from testbed.stage import Stage
from testbed.twin import twin_of


def serve_virtually(case: Case, placed: PlacedExperiment, out: Path | None) -> Served:
    """Serve the case's requests; ``out`` is a new folder for the run, which else is not kept.

    Raises ``UserError`` for what only a fast engine knows, and what broke the run.
    """
    if case.source is not None:
        raise UserError(
            "clock virtual runs scenarios: an instance file has no network; leave --clock out for it"
        )
    if case.experiment.state_age_s > 0:
        raise UserError(
            "policy.state_age above 0: only the fast engine can do that; leave out --clock virtual"
        )
    with tempfile.TemporaryDirectory(prefix="testbed-virtual-") as scratch:
        run_dir = make_run_dir(out or Path(scratch) / "run", case.experiment.name)
        return _serve(case, placed, run_dir)


def _serve(case: Case, placed: PlacedExperiment, run_dir: Path) -> Served:
    experiment = twin_of(case.experiment, run_dir)
    stage = Stage("virtual", "memory", "asked for")
    launcher = stage.begin(experiment, run_dir)
    error, interrupted = stage.run(
        launcher, emulate(experiment, placed, run_dir, stage, launcher, None, False, lambda _: None)
    )
    if error is not None:
        raise error
    if interrupted:
        raise KeyboardInterrupt
    finish_run(run_dir, experiment)
    tables = read_tables(run_dir, experiment)
    known = {record.index: record for record in tables.records.requests}
    plans = {plan.index: plan for plan in experiment.requests}
    requests = tuple(_request(plans[row["request"]], row, known[row["request"]]) for row in tables.rows)
    numbers = {server.name: number for number, server in enumerate(experiment.problem.servers)}
    moves = tuple(_move(move, numbers) for move in tables.records.moves)
    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    record = _record(run_dir, plan, tables.records.replays) if experiment.faults else None
    return requests, moves, placed.decision_s, tuple(plan["routing_decisions_s"]), None, record


def _request(plan: Any, row: dict[str, Any], record: RequestRecord) -> SimulatedRequest:
    if row["status"] not in ("completed", "failed"):
        raise RunError(f"request {plan.index} came to no end: {row['status']}")
    return SimulatedRequest(
        plan,
        row["status"],
        tuple(Hop(*hop) for hop in record.chain),
        record.wait_expected_s,
        record.n_rejections,
        row["queue_s"] if row["queue_s"] is not None else record.last_seen_at_s - record.arrived_at_s,
        row["setup_s"] or 0.0,
        row["ttft_s"],
        row["e2e_s"],
        row["reason"],
        n_replays=record.n_recoveries,
        n_done=row["n_tokens_done"],
    )


def _move(line: dict[str, Any], numbers: dict[str, int]) -> Move:
    times = (line[name] for name in ("decided_at_s", "closed_at_s", "drained_at_s", "open_at_s"))
    return Move(numbers[line["server"]], BlockRange(*line["old"]), BlockRange(*line["new"]), *times)


def _record(run_dir: Path, plan: dict[str, Any], replays: list[dict[str, Any]]) -> Record:
    record = Record()
    lines = (run_dir / EVENTS).read_text(encoding="utf-8").splitlines()
    record.events = [json.loads(line) for line in lines]
    record.recoveries = [
        Recovery(line["request"], line["tokens"], line["recovery_s"], line["floor_s"]) for line in replays
    ]
    for name, value in (plan["decisions"] or {}).items():
        setattr(record, name, value)
    return record
