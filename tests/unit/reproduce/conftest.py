from __future__ import annotations

import pytest

from testbed.studies.reproduce import runs
from testbed.studies.reproduce.runs import Task, run_task, task_of
from testbed.studies.reproduce.settings import CLOSEST
from testbed.studies.sweep.runs import Measures, Record


@pytest.fixture(scope="session")
def one_result() -> Measures:
    """What one real run of one setting gives, everything between PETALS and proposed included."""
    return run_task(task_of(CLOSEST.cells["Cluster0", 0], 1)).measures


@pytest.fixture
def quick_runs(monkeypatch: pytest.MonkeyPatch, one_result: Measures) -> list[str]:
    """Every run gives that result, slower by a bit per seed; the list has the keys of those that were run."""
    ran: list[str] = []

    def run(task: Task) -> Record:
        ran.append(task.key)
        factor = 1 + task.run.seed / 100
        measures = {
            name: value * factor if name.endswith("_s") and value is not None else value
            for name, value in one_result.items()
        }
        return Record(task.key, measures=measures)

    monkeypatch.setattr(runs, "run_task", run)
    return ran
