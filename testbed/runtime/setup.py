"""What a run is made of before it begins: what is run where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from testbed.control.placing import PlacedExperiment
from testbed.experiments.experiment import Experiment
from testbed.runtime.blocks import BlocksModel
from testbed.runtime.guests import Guests
from testbed.runtime.launching import Launcher
from testbed.runtime.stage import Stage


@dataclass(frozen=True)
class RunSetup:
    """What is run where.

    ``blocks`` is the model whose real blocks the servers compute; ``None``: the stub. ``guests`` submit
    requests from outside until the run is interrupted; ``None``: only the workload is served.
    """

    experiment: Experiment
    placed: PlacedExperiment
    run_dir: Path
    stage: Stage
    launcher: Launcher
    blocks: BlocksModel | None = None
    guests: Guests | None = None
