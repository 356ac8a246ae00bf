"""The links of a run over time: what the scenario planned and what was done by hand, from ``events.jsonl``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from testbed.results.logs import RunRecords
from testbed.scenario.experiment import Experiment, Link, NetworkChange


def as_carried_out(experiment: Experiment, records: RunRecords) -> list[NetworkChange]:
    """The changes of links that serve the experiment's nodes, at the instants at which they were done."""
    planned = {change.at_s: change for change in experiment.changes}
    return [_change(experiment, planned.get(line["planned_at_s"]), line) for line in records.changes]


def as_intended(experiment: Experiment, records: RunRecords) -> list[NetworkChange]:
    """The same changes at the instants for which they were planned; those by hand when they were asked for."""
    changes = zip(as_carried_out(experiment, records), records.changes, strict=True)
    intended = [
        replace(change, at_s=line["asked_at_s"] if line["planned_at_s"] is None else line["planned_at_s"])
        for change, line in changes
    ]
    return sorted(intended, key=lambda change: change.at_s)


def _change(experiment: Experiment, planned: NetworkChange | None, line: dict[str, Any]) -> NetworkChange:
    """What a line says came of the plan: its own links where it has any, else the planned ones."""
    rows: Sequence[Any] = line.get("links", ())
    said = {(a, b): Link(*values) for a, b, *values in rows if (a, b) in experiment.links}
    return NetworkChange(line["at_s"], {**(planned.links if planned else {}), **said}, line["why"])
