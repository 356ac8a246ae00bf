"""Reads further runs beside the one that a page shows, for the intervals in its charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.experiments.experiment import Experiment
from testbed.page.follow import Follower
from testbed.page.header import header
from testbed.page.history import History, Position
from testbed.page.simulated import read_simulation
from testbed.records.events import goes_on
from testbed.records.plan import is_simulated, read_plan
from testbed.results import load_run

_NOT_COMPARED = {"name", "description", "seed", "clock", "time_scale"}
_DRAWN_REQUESTS = {
    "requests",
    "request_lengths",
    "conversations",
    "prompts",
    "answers",
    "known_lengths",
    "origin",
}


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

    Raises ``UserError`` if a run has not ended, or is of another scenario than ``run_dir``, or if two have one
    seed or are the same and so show no spread.
    """
    if not others:
        return b"[]"
    first = _experiment(run_dir)
    seen = {run_dir.resolve(): run_dir}
    seeds = {first.seed: run_dir}
    found: dict[bytes, Path] = {}
    for other in others:
        if (known := seen.get(other.resolve())) is not None:
            raise UserError(f"{other} is given twice, also as {known}; leave one out")
        seen[other.resolve()] = other
        if goes_on(other):
            raise UserError(
                f"{other} has not ended, and only the first run may still be running; give it first, or "
                "leave it out"
            )
        body = msgspec.json.encode(finished_history(other).since(Position()))
        experiment = _experiment(other)
        if differs := differing(first, experiment):
            raise UserError(
                f"{other} is of another scenario than {run_dir} (what differs: {', '.join(differs)}); leave it out, "
                "since an interval needs runs that differ in their seeds alone"
            )
        if (known := seeds.get(experiment.seed)) is not None:
            raise UserError(
                f"{other} and {known} have the same seed, {experiment.seed}: an interval needs runs with other seeds"
            )
        seeds[experiment.seed] = other
        if body in found:
            raise UserError(
                f"{other} and {found[body]} have the same requests and times: an interval needs runs with "
                "other seeds, or of another part of a trace"
            )
        found[body] = other
    return b"[" + b",".join(found) + b"]"


def _experiment(run_dir: Path) -> Experiment:
    return load_experiment(str(run_dir / "scenario.toml"))


def differing(a: Experiment, b: Experiment) -> list[str]:
    """Return the tables and keys in which two resolved scenarios differ, but for what a seed draws, and how they are served.

    A resolved scenario does not state what was drawn. So these may differ: faults that end, as those of ``[churn]`` do;
    requests in a list, as those of a recording are; and sites with their links in a matrix, as those of a topology are.
    """
    of_a, of_b = _settings(a), _settings(b)
    if a.sites != b.sites and of_a["network"]["kind"] == of_b["network"]["kind"] == "matrix":
        for key in ("network", "sites"):
            of_a.pop(key, None)
            of_b.pop(key, None)
    return [key for key in {**of_a, **of_b} if of_a.get(key) != of_b.get(key)]


def _settings(experiment: Experiment) -> dict[str, Any]:
    found = {key: value for key, value in experiment.document.items() if key not in _NOT_COMPARED}
    found["network"] = {key: value for key, value in found["network"].items() if key != "backend"}
    if found["network"]["kind"] == "matrix":
        for key in ("servers", "clients"):
            found[key] = [{**group, "site": None} for group in found[key]]
    found["fault"] = [fault for fault in found.get("fault", ()) if not {"at", "for"} <= fault.keys()]
    drawn = {*_DRAWN_REQUESTS, "rate"} if found["workload"]["arrivals"] == "listed" else _DRAWN_REQUESTS
    found["workload"] = {key: value for key, value in found["workload"].items() if key not in drawn}
    return found
