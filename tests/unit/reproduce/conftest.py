from __future__ import annotations

from typing import Any

import pytest

from testbed.studies.reproduce import runs
from testbed.studies.reproduce.runs import run_setting
from testbed.studies.reproduce.settings import CLOSEST, Setting


@pytest.fixture(scope="session")
def one_result() -> dict[str, Any]:
    """What one real run of one setting gives, everything between PETALS and proposed included."""
    return run_setting(CLOSEST.cells["Cluster0", 0], 1)


@pytest.fixture
def quick_runs(monkeypatch: pytest.MonkeyPatch, one_result: dict[str, Any]) -> list[tuple[str, int]]:
    """Every run gives that result, slower by a bit per seed; the list says which have been run."""
    ran: list[tuple[str, int]] = []

    def run(setting: Setting, seed: int) -> dict[str, Any]:
        ran.append((setting.id, seed))
        factor = 1 + seed / 100
        return {
            kind: [
                {key: value * factor if key.endswith("_s") else value for key, value in row.items()}
                for row in rows
            ]
            for kind, rows in one_result.items()
        }

    monkeypatch.setattr(runs, "run_setting", run)
    return ran
