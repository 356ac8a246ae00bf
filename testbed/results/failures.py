"""Aggregates why requests failed, and the faults, recoveries and moves of a run from ``events.jsonl``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from testbed.experiments.units import counted
from testbed.faultkinds import KINDS
from testbed.records.events import BY_HAND, BY_SCENARIO, Event, FaultHappened, Replayed
from testbed.records.plan import Plan
from testbed.records.summary import RunSummary
from testbed.results.logs import RunRecords
from testbed.results.requests import stats

_NUMBER = re.compile(r"(?<![\w.-])\d+([.,]\d+)*( [kM]B)?(?!\w)")
"""A number, with the unit of a size, but not the digits of a name such as ``s-0``."""


def commonest(reasons: Iterable[tuple[str, int]], most: int) -> dict[str, int]:
    """Return the ``most`` commonest of reasons that have counts.

    Reasons that differ in numbers alone count as one, under the first of them.
    """
    shown: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for reason, count in reasons:
        counts[shown.setdefault(_NUMBER.sub("#", reason), reason)] += count
    return dict(counts.most_common(most))


def add_faults(summary: RunSummary, events: Iterable[Event], n_planned: int) -> None:
    """Add to ``summary`` how many faults there were; ``n_planned``: faults in the scenario."""
    ends = {kind.name for kind in KINDS.values() if kind.only_by_hand}  # they end a fault
    faults = [event for event in events if isinstance(event, FaultHappened) and event.kind not in ends]
    summary.n_faults = sum(fault.applies for fault in faults)
    summary.n_faults_by_hand = sum(fault.applies and fault.by == BY_HAND for fault in faults)
    summary.n_faults_without_effect = len(faults) - summary.n_faults
    summary.n_faults_never_came = max(0, n_planned - sum(fault.by == BY_SCENARIO for fault in faults))


def add_recoveries(summary: RunSummary, replays: Sequence[Replayed]) -> None:
    """Add to ``summary`` how many sessions went on with other servers, and how long that took."""
    summary.n_replays = len(replays)
    summary.recovery_s = stats(replay.recovery_s for replay in replays)
    summary.recovery_floor_s = stats(replay.floor_s for replay in replays)


def add_failures(summary: RunSummary, records: RunRecords, plan: Plan, n_planned: int) -> None:
    """Add faults, recoveries, leaks and moves to ``summary``; ``n_planned``: faults in the scenario."""
    add_faults(summary, records.faults, n_planned)
    add_recoveries(summary, records.replays)
    summary.decisions = plan.decisions
    summary.n_stale_decisions = None if plan.decisions is None else plan.decisions.n_stale_decisions
    summary.leaks = plan.leaks
    summary.moves = [move.row(plan.servers) for move in records.moves]
    summary.n_cuts = sum(move.n_cut for move in records.moves)


def disturbances_text(n_faults: int, n_idle: int, n_never: int, n_replays: int) -> str:
    """Return in words how many faults had an effect, found nothing to do and never came, and how often sessions recovered."""
    line = counted(n_faults, "faults")
    if n_idle:
        line += f", {n_idle} more found nothing to do"
    if n_never:
        line += f", {n_never} more planned for after the end"
    return f"{line}; sessions recovered {counted(n_replays, 'times')}"


def failure_text(summary: RunSummary) -> list[str]:
    """Return lines for the terminal; empty if nothing failed."""
    lines = []
    n_faults, n_replays = summary.n_faults, summary.n_replays
    n_idle, n_never = summary.n_faults_without_effect, summary.n_faults_never_came
    if n_faults or n_replays or n_idle or n_never:
        line = disturbances_text(n_faults, n_idle, n_never, n_replays)
        if n_replays:
            took, floor = summary.recovery_s, summary.recovery_floor_s
            line += f" in {took.p50:.3f} s (p50), {took.max:.3f} s (max); floor {floor.p50:.3f} s (p50)"
        lines.append(line)
    moved = [move for move in summary.moves if move.old != (0, 0)]
    if moved:
        took_s = [move.open_at_s - move.closed_at_s for move in moved]
        lines.append(
            f"servers changed their blocks {counted(len(took_s), 'times')}, in {max(took_s):.1f} s at most "
            f"from closing to opening; sessions were cut {counted(summary.n_cuts, 'times')}"
        )
    decisions = summary.decisions
    if decisions is not None and decisions.n_stale_decisions:
        lines.append(
            f"{decisions.n_stale_decisions} of {counted(decisions.n_decisions, 'routing decisions')} "
            f"{'was' if decisions.n_stale_decisions == 1 else 'were'} made on a wrong view of the "
            f"servers, {decisions.n_misled_decisions} of them for a server that was not there"
        )
    leaks = summary.leaks or {}
    if any(leaks.values()):
        left = ", ".join(counted(count, name.replace("_", " ")) for name, count in leaks.items() if count)
        lines.append(f"left behind at the end: {left}")
    return lines
