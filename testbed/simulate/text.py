"""Simulations as a person reads them on the terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from testbed.scenario.units import counted

_COLUMNS = (
    ("per_token_ms", "per token"),
    ("ttft_ms", "first token"),
    ("rest_ms", "each remaining"),
    ("waiting_ms", "waiting"),
    ("max_concurrent", "most at once"),
)


def comparison_text(rows: Sequence[dict[str, Any]], width: int = 120) -> str:
    """A table with a row per target and policy, means over requests in seconds, and what to know of them."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, highlight=False)
    for target in dict.fromkeys(row["target"] for row in rows):
        chosen = [row for row in rows if row["target"] == target]
        name = chosen[0]["id"]
        if any(row["id"] == name and row["target"] != target for row in rows):
            name = f"{name} ({target})"
        console.print(_headline(name, chosen))
        console.print(_table(chosen))
        for note in _drawn(chosen[0]):
            console.print(note)
        for row in chosen:
            for note in _notes(row):
                console.print(note)
        console.print()
    return buffer.getvalue().rstrip()


def _headline(name: str, rows: Sequence[dict[str, Any]]) -> str:
    runs = rows[0].get("n_runs", 1)
    what = f"means over {runs} runs with 95 % confidence intervals" if runs > 1 else "means over the requests"
    seed = f", seed {rows[0]['seed']}" if rows[0].get("seed") is not None else ""
    return f"{name} (simulated, {rows[0]['mode']} mode, {rows[0]['engine']} engine{seed}): {what}, in seconds"


def _drawn(row: dict[str, Any]) -> list[str]:
    """Which recorded requests the runs took."""
    drawn = row.get("drawn")
    if drawn is None:
        return []
    n, n_all = drawn["n_requests"], drawn["n_recorded"]
    if drawn["draw"] == "windows":
        return [f"each run takes a window of its own: {n:,} of the {n_all:,} recorded requests"]
    if drawn["draw"] == "first":
        return [f"all runs have the first {n:,} of the {n_all:,} recorded requests, as workload.draw says"]
    return [
        f"each run draws {n:,} requests, in blocks, from the same {n_all:,} recorded ones: too few for windows of their "
        "own; intervals are as wide as a recording of that length allows, more runs hardly narrow them"
    ]


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", no_wrap=True)
    for _, title in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("|R|", justify="right", no_wrap=True)
    table.add_column("decisions", justify="right", no_wrap=True)
    for row in rows:
        label = row["policy"] + (f" + {row['online']}" if "online" in row else "")
        if not row["feasible"]:
            table.add_row(label, "infeasible")
            continue
        table.add_row(label, *_cells(row, "mean"), _designed(row), f"{1e3 * row['decision_s']:.1f} ms")
        if "mean_without_session_setup" in row:
            table.add_row("  without session setup", *_cells(row, "mean_without_session_setup"))
    return table


def _cells(row: dict[str, Any], key: str) -> list[str]:
    halves = row.get(f"{key}_ci95", {})
    cells = []
    for name, _ in _COLUMNS:
        value, half = row[key][name], halves.get(name)
        if value is None:
            cells.append("-")
            continue
        scale, form = (1.0, ".0f" if half is None else ".1f") if name == "max_concurrent" else (1e-3, ".3f")
        cells.append(f"{value * scale:{form}}" + (f" ±{half * scale:{form}}" if half is not None else ""))
    return cells


def _designed(row: dict[str, Any]) -> str:
    designs = {run["bounds"]["design_concurrency"] for run in row.get("runs", [row]) if run["feasible"]}
    known = sorted(design for design in designs if design is not None)
    if not known:
        return "-"
    return str(known[0]) if len(known) == 1 else f"{known[0]}-{known[-1]}"


def _notes(row: dict[str, Any]) -> list[str]:
    notes = []
    if row.get("same_run"):
        notes.append(f"{row['policy']}: no seed changes anything in its runs, so they have no interval")
    if "note" in row:
        notes.append(row["note"])
    if "goodput_rps" in row:
        good = row["goodput_rps"]
        notes.append(f"{row['policy']}: goodput {'-' if good is None else f'{good:.4f}'} requests/s")
    if "online" in row:
        n_moves = sum(len(run.get("moves", ())) for run in row.get("runs", [row]))
        notes.append(f"{row['policy']} + {row['online']}: {n_moves} moves of servers")
    runs = row.get("runs", [row])
    if any("n_faults" in run for run in runs):
        n_faults, n_replays = (sum(run.get(key, 0) for run in runs) for key in ("n_faults", "n_replays"))
        notes.append(
            f"{row['policy']}: {counted(n_faults, 'faults')}; sessions recovered {counted(n_replays, 'times')}"
        )
    if row["session_setup_ms"]:
        notes.append(
            f"{row['policy']}: contains the published session setup of {row['session_setup_ms'] / 1e3:g} s per request"
        )
    if row.get("error"):
        of = f" in {row['n_runs'] - row['n_feasible']} of {row['n_runs']} runs" if "n_runs" in row else ""
        notes.append(f"{row['policy']} is infeasible{of}: {row['error']}")
    if row.get("n_failed"):
        means = "" if row["mean"]["per_token_ms"] is None else "; the means are of the others"
        notes.append(f"{row['policy']}: {counted(row['n_failed'], 'requests')} did not complete{means}")
    return notes


def offline_text(answers: Sequence[dict[str, Any]], width: int = 120) -> str:
    """A row per offline instance and policy: objective and bounds in milliseconds, summed over the requests."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("instance", "policy", "objective (ms)", "lower bound", "Theorem 1", "decision"):
        table.add_column(title, justify="left" if title in ("instance", "policy") else "right", no_wrap=True)
    for answer in answers:
        bounds = answer["bounds"]
        limits = (bounds["lower_bound_knapsack_ms"], bounds["theorem1_ms"])
        table.add_row(
            answer["id"],
            answer["policy"],
            f"{answer['objective_ms']:.3f}" if answer["feasible"] else "infeasible",
            *("-" if limit is None else f"{limit:.3f}" for limit in limits),
            f"{1e3 * answer['decision_s']:.1f} ms",
        )
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, highlight=False)
    console.print(table)
    for answer in answers:
        if not answer["feasible"]:
            console.print(f"{answer['id']}, {answer['policy']}: {answer['error']}")
    return buffer.getvalue().rstrip()
