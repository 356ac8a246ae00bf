"""Writes a simulation's run directory: the files of an emulation with the same columns, without logs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from testbed.errors import RunError
from testbed.experiments import dump_toml
from testbed.experiments.inputs import INPUTS, keep_policies
from testbed.experiments.provenance import PROVENANCE, provenance
from testbed.fast.outcome import ServerEvent
from testbed.records.base import data_of
from testbed.records.events import EVENTS, LinksChanged, RecoveryEvent
from testbed.records.summary import RunSummary
from testbed.rundir import write_json
from testbed.simulator.engine import Simulation
from testbed.simulator.hops import hop_table, links_over_time


def write_simulation(out: Path, simulation: Simulation, summary: RunSummary) -> None:
    """Write the tables of a feasible simulation to the folder ``out``; ``summary`` is that of the simulation.

    Raises ``RunError`` if writing fails.
    """
    from testbed.results.tables import write_hops, write_links, write_requests

    experiment, source = simulation.case.experiment, simulation.case.source
    hops = None if summary.hops_left_out else hop_table(simulation)
    writers: dict[str, Callable[[Path], object]] = {
        "plan.json": lambda path: write_json(path, data_of(simulation.plan)),
        PROVENANCE: lambda path: write_json(path, provenance(experiment)),
        INPUTS: lambda path: keep_policies(path.parent, experiment),
        "requests.parquet": lambda path: write_requests(path, simulation.rows),
    }
    if source is None:
        writers["scenario.toml"] = lambda path: path.write_text(dump_toml(experiment), encoding="utf-8")
    else:
        writers["instance.json"] = lambda path: shutil.copyfile(source, path)
    if (links := links_over_time(simulation, hops)) is not None:
        writers["links.parquet"] = lambda path: write_links(path, links)
    if hops is not None:
        writers["hops.parquet"] = lambda path: write_hops(path, experiment, hops)
    if lines := [msgspec.json.encode(event) + b"\n" for event in _events(simulation)]:
        writers[EVENTS] = lambda path: path.write_bytes(b"".join(lines))
    writers["summary.json"] = lambda path: write_json(path, data_of(summary))  # with it all is there
    for name, write in writers.items():
        try:
            out.mkdir(parents=True, exist_ok=True)
            write(out / name)
        except OSError as error:
            raise RunError(
                f"cannot write {out / name} ({error.strerror}); make room, and choose another --out"
            ) from error


def _events(simulation: Simulation) -> list[ServerEvent | RecoveryEvent | LinksChanged]:
    """Return what happened to servers and links until the last request ended, as a run logs it."""
    ended_at_s = max((row.ended_at_s or 0.0 for row in simulation.rows), default=0.0)
    changes = [
        LinksChanged(
            at_s=change.at_s, planned_at_s=change.at_s, late_s=0.0, why=change.why, n_links=len(change.links)
        )
        for change in simulation.case.experiment.network.changes
        if change.at_s <= ended_at_s
    ]
    return sorted([*simulation.served.faults, *changes], key=lambda event: event.at_s or 0.0)
