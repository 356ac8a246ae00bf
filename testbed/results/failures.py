"""Aggregates the faults, recoveries and moves of a run from ``events.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from testbed.faultkinds import KINDS
from testbed.results.requests import stats
from testbed.rundir import BY_SCENARIO
from testbed.scenario.units import counted

_MOVE = ("old", "new", "decided_at_s", "closed_at_s", "drained_at_s", "open_at_s")
"""Keys of a move in ``summary.json``, beside the server's number: as in ``testbed.control.steering.Move``."""


def failure_summary(
    faults: Sequence[Mapping[str, Any]],
    replays: Sequence[Mapping[str, Any]],
    plan: Mapping[str, Any],
    moves: Sequence[Mapping[str, Any]] = (),
    n_planned: int = 0,
) -> dict[str, Any]:
    """Return these keys of ``summary.json`` (``docs/metrics.md``); ``n_planned``: faults in the scenario."""
    decisions = plan.get("decisions")
    ends = {kind.name for kind in KINDS.values() if kind.only_by_hand}  # they end a fault
    faults = [fault for fault in faults if fault.get("kind") not in ends]
    n_came = sum(fault.get("by", BY_SCENARIO) == BY_SCENARIO for fault in faults)
    return {
        "n_faults": sum(bool(fault.get("applies", True)) for fault in faults),
        "n_faults_without_effect": sum(not fault.get("applies", True) for fault in faults),
        "n_faults_never_came": max(0, n_planned - n_came),
        "n_replays": len(replays),
        "recovery_s": stats(replay["recovery_s"] for replay in replays),
        "recovery_floor_s": stats(replay["floor_s"] for replay in replays),
        "decisions": decisions,
        "n_stale_decisions": decisions["n_stale_decisions"] if decisions else None,
        "leaks": plan.get("leaks"),
        "moves": [
            {"server": plan["servers"].index(move["server"])} | {key: move[key] for key in _MOVE}
            for move in moves
        ],
        "n_cuts": sum(move["n_cut"] for move in moves),
    }


def failure_text(summary: Mapping[str, Any]) -> list[str]:
    """Return lines for the terminal; empty if nothing failed."""
    lines = []
    n_faults, n_replays = summary.get("n_faults", 0), summary.get("n_replays", 0)
    n_idle, n_never = summary.get("n_faults_without_effect", 0), summary.get("n_faults_never_came", 0)
    if n_faults or n_replays or n_idle or n_never:
        line = counted(n_faults, "faults")
        if n_idle:
            line += f", {n_idle} more found nothing to do"
        if n_never:
            line += f", {n_never} more were planned for after the end"
        line += f"; sessions recovered {counted(n_replays, 'times')}"
        if n_replays:
            took, floor = summary["recovery_s"], summary["recovery_floor_s"]
            line += (
                f" in {took['p50']:.3f} s (p50), {took['max']:.3f} s (max); floor {floor['p50']:.3f} s (p50)"
            )
        lines.append(line)
    moved = [move for move in summary.get("moves", ()) if tuple(move["old"]) != (0, 0)]
    if moved:
        took_s = [move["open_at_s"] - move["closed_at_s"] for move in moved]
        lines.append(
            f"servers changed their blocks {counted(len(took_s), 'times')}, in {max(took_s):.1f} s at most "
            f"from closing to opening; sessions were cut {counted(summary['n_cuts'], 'times')}"
        )
    if summary.get("n_stale_decisions"):
        decisions = summary["decisions"]
        lines.append(
            f"{decisions['n_stale_decisions']} of {counted(decisions['n_decisions'], 'routing decisions')} "
            f"{'was' if decisions['n_stale_decisions'] == 1 else 'were'} made on a wrong view of the "
            f"servers, {decisions['n_misled_decisions']} of them for a server that was not there"
        )
    leaks = summary.get("leaks") or {}
    if any(leaks.values()):
        left = ", ".join(counted(count, name.replace("_", " ")) for name, count in leaks.items() if count)
        lines.append(f"left behind at the end: {left}")
    return lines
