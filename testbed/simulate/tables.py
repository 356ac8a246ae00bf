"""Writes a simulation's run directory: the files of an emulation with the same columns, without logs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed.control.placing import placement_data
from testbed.errors import RunError
from testbed.rundir import SIMULATED, write_json
from testbed.scenario import dump_toml
from testbed.scenario.provenance import PROVENANCE, provenance
from testbed.simulate.engine import Simulation
from testbed.simulate.hops import hop_table
from testbed.simulate.summary import request_rows


def write_simulation(out: Path, simulation: Simulation, summary: dict[str, Any]) -> None:
    """Write the tables of a feasible simulation to the folder ``out``.

    Raises ``RunError`` if writing fails.
    """
    from testbed.results.tables import write_hops, write_requests

    experiment, source = simulation.case.experiment, simulation.case.source
    writers: dict[str, Callable[[Path], object]] = {
        "plan.json": lambda path: write_json(path, _plan(simulation)),
        PROVENANCE: lambda path: write_json(path, provenance(experiment)),
        "summary.json": lambda path: write_json(path, summary),
        "requests.parquet": lambda path: write_requests(path, request_rows(simulation)),
    }
    if source is None:
        writers["scenario.toml"] = lambda path: path.write_text(dump_toml(experiment), encoding="utf-8")
    else:
        writers["instance.json"] = lambda path: shutil.copyfile(source, path)
    if not summary["hops_left_out"]:
        writers["hops.parquet"] = lambda path: write_hops(path, experiment, hop_table(simulation))
    for name, write in writers.items():
        try:
            out.mkdir(parents=True, exist_ok=True)
            write(out / name)
        except OSError as error:
            raise RunError(
                f"cannot write {out / name} ({error.strerror}); make room, or choose another --out"
            ) from error


def _plan(simulation: Simulation) -> dict[str, Any]:
    experiment, placement = simulation.case.experiment, simulation.placement
    assert placement is not None, "only feasible simulations are written"
    return {
        "placement": placement_data(placement),
        "routing": experiment.policy.routing,
        "mode": simulation.mode,
        "servers": [s.name for s in experiment.problem.servers],
        "clients": list(experiment.problem.clients),
        "placement_decision_s": simulation.placement_s,
        "network": SIMULATED,
    }
