"""Reads further runs beside the one that a page shows, for the intervals in its charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from testbed.errors import UserError
from testbed.page.follow import Follower
from testbed.page.header import header
from testbed.page.history import History, Position
from testbed.page.simulated import read_simulation
from testbed.records.plan import is_simulated, read_plan
from testbed.results import load_run
from testbed.rundir import owner_alive


def finished_history(run_dir: Path) -> History:
    """Read the whole history of a run that has ended, or of a simulation. Raises ``UserError``."""
    if is_simulated(run_dir):
        return read_simulation(run_dir)[1]
    experiment = load_run(run_dir)
    n_tokens = sum(request.n_output_tokens for request in experiment.workload.requests)
    follower = Follower(run_dir, header(experiment, read_plan(run_dir)), n_tokens)
    follower.poll()
    return follower.history


def read_others(run_dir: Path, others: Sequence[Path]) -> bytes:
    """Return the histories of ``others`` as a JSON list.

    Raises ``UserError`` if a run has not ended, or if two are the same and so show no spread.
    """
    seen = {run_dir.resolve(): run_dir}
    found: dict[bytes, Path] = {}
    for other in others:
        if (known := seen.get(other.resolve())) is not None:
            raise UserError(f"{other} is given twice, also as {known}; leave one out")
        seen[other.resolve()] = other
        if owner_alive(other):
            raise UserError(
                f"{other} has not ended, and only the first run may still be running; give it first, or "
                "leave it out"
            )
        body = msgspec.json.encode(finished_history(other).since(Position()))
        if body in found:
            raise UserError(
                f"{other} and {found[body]} have the same requests and times: an interval needs runs with "
                "other seeds, or of another part of a trace"
            )
        found[body] = other
    return b"[" + b",".join(found) + b"]"
