"""The twin of a run in real time: the same requests again, in virtual time with all nodes in this process.

It is the yardstick for the run's errors. It has the run's placement, policies, seed and planned faults, and
its servers are stubs with the scenario's times. Late timers and slow processes cannot change it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from netem.networks import IN_PROCESS
from testbed.control.placing import PlacedExperiment
from testbed.errors import TestbedError
from testbed.experiments import changed
from testbed.experiments.experiment import Experiment
from testbed.results import finish_run
from testbed.results.logs import read_logs
from testbed.results.served import as_replay
from testbed.rundir import TWIN, make_run_dir
from testbed.runtime.running import run_to_end
from testbed.runtime.signals import Interruption
from testbed.runtime.stage import Stage

_BLOCKS_KEYS = (
    "model",
    "random_weights",
    "device",
    "dtype",
    "weights",
    "threads",
    "streams",
    "cuda_graphs",
    "verify",
)
"""Keys of ``[compute]`` that the stub does not have."""


def twin_of(experiment: Experiment, run_dir: Path) -> Experiment:
    """Return ``experiment`` in virtual time with all nodes in this process, and requests as ``run_dir`` logged them."""
    changes: dict[str, Any] = {"clock": "virtual", "time_scale": 1.0, "network.backend": IN_PROCESS.name}
    if experiment.workload.endpoint_tokens:
        changes |= as_replay(experiment, read_logs(run_dir).requests)
    compute = {"backend": "stub", "serial": False, "batching": experiment.compute.batching}
    compute |= dict.fromkeys(_BLOCKS_KEYS)
    return changed(experiment, {**changes, **{f"compute.{key}": value for key, value in compute.items()}})


def run_twin(
    experiment: Experiment,
    placed: PlacedExperiment,
    run_dir: Path,
    announce: Callable[[str], None],
    *,
    trace: bool = True,
    live: bool = True,
    interruption: Interruption | None = None,
) -> None:
    """Run the twin of ``experiment`` into the folder ``twin`` of ``run_dir``, with a ``trace.json`` or without.

    If the twin fails or is interrupted, announces that and removes the folder: the run is usable without it.
    Raises ``KeyboardInterrupt`` if it was interrupted.
    """
    folder = run_dir / TWIN
    stage = Stage("virtual", IN_PROCESS, "the twin of a run in real time")
    try:
        make_run_dir(folder, experiment.name)
        twin = twin_of(experiment, run_dir)
        again = replace(placed, router=placed.bind(placed.placement))
        run_to_end(twin, again, folder, stage, live=live, interruption=interruption)
        finish_run(folder, twin, trace=trace)
    except KeyboardInterrupt:
        announce("interrupted: this run has no twin")
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except (TestbedError, OSError) as error:
        announce(f"this run has no twin: {error}")
        shutil.rmtree(folder, ignore_errors=True)
