"""The changes of a run's links, planned or by hand, from ``events.jsonl``."""

from __future__ import annotations

from dataclasses import replace

from msgspec import UNSET

from policies.links import Link
from testbed.experiments.experiment import Experiment, NetworkChange
from testbed.records.events import LinksChanged
from testbed.results.logs import RunRecords


def as_carried_out(experiment: Experiment, records: RunRecords) -> list[NetworkChange]:
    """Return the changes of links between the experiment's nodes, when they were carried out."""
    planned: dict[float | None, NetworkChange] = {
        change.at_s: change for change in experiment.network.changes
    }
    return [_change(experiment, planned.get(line.planned_at_s), line) for line in records.changes]


def as_intended(experiment: Experiment, records: RunRecords) -> list[NetworkChange]:
    """Return the same changes, when they were planned or asked for by hand, in order of time."""
    changes = zip(as_carried_out(experiment, records), records.changes, strict=True)
    intended = [replace(change, at_s=_intended_at_s(line)) for change, line in changes]
    return sorted(intended, key=lambda change: change.at_s)


def _intended_at_s(event: LinksChanged) -> float:
    at_s = event.planned_at_s if event.planned_at_s is not None else event.asked_at_s
    assert at_s is not UNSET, "a change is planned, or asked for by hand"
    return at_s


def _change(experiment: Experiment, planned: NetworkChange | None, event: LinksChanged) -> NetworkChange:
    """Return the change of an event: the planned links, replaced by those in the event."""
    assert event.at_s is not None, "changes have instants"
    logged = {
        (a, b): Link(*values) for a, b, *values in event.links or () if (a, b) in experiment.network.links
    }
    return NetworkChange(event.at_s, {**(planned.links if planned else {}), **logged}, event.why)
