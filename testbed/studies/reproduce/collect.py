"""The records of finished runs by setting, and means over them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from testbed.results.intervals import Mean, mean_of
from testbed.studies.reproduce.record import Done
from testbed.studies.reproduce.settings import Setting


class Results:
    """The records of all settings, each sorted by the same seeds."""

    def __init__(self, done: Done, settings: Iterable[Setting], seeds: Iterable[int]) -> None:
        order = sorted(seeds)
        self._records = {s.id: [done[s.id, seed] for seed in order] for s in settings}

    def records(self, setting: Setting) -> list[dict[str, Any]]:
        return self._records[setting.id]

    def values(self, setting: Setting, policy: str, setup: str, metric: str) -> list[float]:
        """Returns one value per run that had a placement, sorted by seed."""
        return [
            row[metric]
            for record in self._records[setting.id]
            for row in record["policies"]
            if row["policy"] == policy and row.get("setup") == setup
        ]

    def blocks(self, setting: Setting, policy: str) -> list[dict[str, int]]:
        """Returns hardware -> most blocks of a server, one entry per run that had a placement."""
        return [
            row["blocks"]
            for record in self._records[setting.id]
            for row in record["policies"]
            if row["policy"] == policy and row.get("setup") == "none"
        ]

    def mean(self, setting: Setting, policy: str, setup: str, metric: str) -> Mean | None:
        """Returns the mean over the runs that had a placement; None if none had."""
        return mean_of(self.values(setting, policy, setup, metric))

    def choice(self, setting: Setting, choice: str, setup: str, metric: str) -> Mean | None:
        """Returns the mean of the proposed policy with |R| chosen by ``choice`` (see ``runs``); None without
        any run.
        """
        return mean_of(
            [
                row[metric]
                for record in self._records[setting.id]
                for row in record["concurrencies"]
                if row.get("choice") == choice and row.get("setup") == setup
            ]
        )
