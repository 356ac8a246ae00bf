"""The changes of a run's links, planned or by hand, from ``events.jsonl``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from testbed.results.logs import RunRecords
from testbed.scenario.experiment import Experiment, Link, NetworkChange


def as_carried_out(experiment: Experiment, records: RunRecords) -> list[NetworkChange]:
    """Return the changes of links between the experiment's nodes, when they were carried out."""
    planned = {change.at_s: change for change in experiment.network.changes}
    return [_change(experiment, planned.get(line["planned_at_s"]), line) for line in records.changes]


def as_intended(experiment: Experiment, records: RunRecords) -> list[NetworkChange]:
    """Return the same changes, when they were planned or asked for by hand, in order of time."""
    changes = zip(as_carried_out(experiment, records), records.changes, strict=True)
    intended = [
        replace(change, at_s=line["asked_at_s"] if line["planned_at_s"] is None else line["planned_at_s"])
        for change, line in changes
    ]
    return sorted(intended, key=lambda change: change.at_s)


def _change(experiment: Experiment, planned: NetworkChange | None, line: dict[str, Any]) -> NetworkChange:
    """Return the change of a line of ``events.jsonl``: the planned links, replaced by those in the line."""
    rows: Sequence[Any] = line.get("links", ())
    logged = {(a, b): Link(*values) for a, b, *values in rows if (a, b) in experiment.network.links}
    return NetworkChange(line["at_s"], {**(planned.links if planned else {}), **logged}, line["why"])
