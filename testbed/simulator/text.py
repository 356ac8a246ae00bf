"""Formats the results of simulations for the terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from rich.table import Table

from testbed.experiments.units import counted
from testbed.records.links import busy_text
from testbed.records.summary import LinkRow, PrefixUse, Speculation, Stats
from testbed.results.bounds import bounds_text
from testbed.results.conversations import conversations_text
from testbed.results.costs import COSTS, costs_text
from testbed.results.failures import disturbances_text
from testbed.results.intervals import EQUAL
from testbed.results.speculation import speculation_text
from testbed.results.unused import unused_from, unused_text
from testbed.simulator.answer import PERCENTILES
from testbed.simulator.engine import EMULATED, MAX_STEPS
from testbed.simulator.runs import SAME_RUN, drawn_text
from testbed.terminal import console_to

_COLUMNS = (
    ("per_token_ms", "per token"),
    ("ttft_ms", "first token"),
    ("rest_ms", "each remaining"),
    ("waiting_ms", "waiting"),
    ("max_concurrent", "most at once"),
)

_PERCENTILES = ("percentiles", "percentiles_ci95")
_MOST_WHYS = 3
_OFFLINE_BOUNDS = (
    "lower bound: no placement and routes have a smaller objective; Theorem 1: CG-BP's placement with the cheapest "
    "routes (cg-bprr) has none larger"
)
_VERDICTS = {
    "gain": "a gain",
    "loss": "a loss",
    "unresolved": "neither gain nor loss can be shown (the interval contains 0)",
}


def comparison_text(rows: Sequence[dict[str, Any]], width: int = 120) -> str:
    """Return a table per target with a row per policy (means over requests in seconds), and notes on it."""
    buffer = io.StringIO()
    console = console_to(buffer, width)
    wide = console_to(buffer, 2 * width)  # a truncated number would be wrong
    for target in dict.fromkeys(row["target"] for row in rows):
        chosen = [row for row in rows if row["target"] == target]
        name = chosen[0]["id"]
        if any(row["id"] == name and row["target"] != target for row in rows):
            name = f"{name} ({target})"
        console.print(_headline(name, chosen))
        wide.print(_table(chosen))
        if (drawn := chosen[0].get("drawn")) is not None:
            console.print(drawn_text(drawn))
        if "workload" in chosen[0]:
            console.print(f"requests: {chosen[0]['workload']}")
        if "assumed" in chosen[0].get("runs", chosen)[0]:
            console.print(chosen[0].get("runs", chosen)[0]["assumed"])
        for row in chosen:
            for note in _notes(row):
                console.print(note)
        console.print()
    return buffer.getvalue().rstrip()


def _headline(name: str, rows: Sequence[dict[str, Any]]) -> str:
    runs = rows[0].get("n_runs", 1)
    what = f"means over {runs} runs with 95 % confidence intervals" if runs > 1 else "means over the requests"
    seed = f", seed {rows[0]['seed']}" if rows[0].get("seed") is not None else ""
    mode, engine = rows[0]["mode"], rows[0]["engine"]
    how = f"{mode}, {engine}" if mode == EMULATED else f"simulated, {mode} mode, {engine} engine"
    return f"{name} ({how}{seed}): {what}, in seconds"


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", no_wrap=True)
    for _, title in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    is_part = any(row.get("n_failed") or row.get("n_failed_without_session_setup") for row in rows)
    if is_part:
        table.add_column("of requests", justify="right", no_wrap=True)
    table.add_column("|R|", justify="right", no_wrap=True)
    table.add_column("decisions", justify="right", no_wrap=True)
    for row in rows:
        label = row["policy"] + (f" + {row['online']}" if "online" in row else "")
        if not row["feasible"]:
            table.add_row(label, "infeasible")
            continue
        part = [f"{row['n_completed']:,} of {row['n_requests']:,}"] if is_part else []
        decided = f"{1e3 * row['decision_s']:.1f} ms"
        table.add_row(label, *_cells(row["mean"], row.get("mean_ci95")), *part, _designed(row), decided)
        for p in PERCENTILES if "runs" in row else ():
            values, halves = ({m: of[p] for m, of in row[key].items()} for key in _PERCENTILES)
            table.add_row(f"  {p}", *_cells(values, halves), *part)
        if "mean_without_session_setup" in row:
            cells = _cells(row["mean_without_session_setup"], row.get("mean_without_session_setup_ci95"))
            n_done = row["n_requests"] - row["n_failed_without_session_setup"]
            part = [f"{n_done:,} of {row['n_requests']:,}"] if is_part else []
            table.add_row("  without session setup", *cells, *part)
    return table


def _cells(values: dict[str, Any], halves: dict[str, Any] | None) -> list[str]:
    cells = []
    for name, _ in _COLUMNS:
        if name not in values:  # the most requests at once have no percentiles
            cells.append("")
            continue
        value, half = values[name], (halves or {}).get(name)
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
        notes.append(f"{row['policy']}: {SAME_RUN}")
    if "note" in row:
        notes.append(row["note"])
    if "goodput_rps" in row:
        good = row["goodput_rps"]
        half = row.get("goodput_rps_ci95")
        notes.append(
            f"{row['policy']}: goodput {'-' if good is None else f'{good:.4f}'}"
            f"{'' if half is None else f' ±{half:.4f}'} requests/s"
        )
    runs = row.get("runs", [row])
    if left_out := [run["n_hops_left_out"] for run in runs if "n_hops_left_out" in run]:
        of = f" in {len(left_out)} of {len(runs)} runs" if len(runs) > 1 else ""
        notes.append(
            f"{row['policy']}: {max(left_out):,} hops of tokens{of} are more than the {MAX_STEPS:,} that are kept: no hops.parquet, "
            "and no energy; lower workload.n_requests"
        )
    if costs := costs_text(_mean_costs(runs)):
        notes.append(f"{row['policy']}: {costs[0]}")
    if proof := _searched(row):
        notes.append(proof)
    notes += _bounds(row)
    if "online" in row:
        n_moves = sum(len(run.get("moves", ())) for run in runs)
        notes.append(f"{row['policy']} + {row['online']}: {n_moves} moves of servers")
    if any("n_faults" in run for run in runs):
        n_faults, n_never, n_replays = (
            sum(run.get(key, 0) for run in runs) for key in ("n_faults", "n_faults_never_came", "n_replays")
        )
        notes.append(f"{row['policy']}: {disturbances_text(n_faults, 0, n_never, n_replays)}")
    if any("speculation" in run for run in runs):
        notes.append(
            f"{row['policy']}: {_drafts([run['speculation'] for run in runs if 'speculation' in run])}"
        )
    if any("n_preemptions" in run for run in runs):
        n, n_tokens = (sum(run.get(key, 0) for run in runs) for key in ("n_preemptions", "preempted_tokens"))
        notes.append(f"{row['policy']}: {counted(n, 'preemptions')}, {n_tokens:,} cached tokens lost")
    if len(runs) == 1:
        prefix, turns = runs[0].get("prefix"), runs[0].get("ttft_by_turn_s")
        said = conversations_text(
            PrefixUse(**prefix) if prefix else UNSET, [Stats(**turn) for turn in turns] if turns else UNSET
        )
        notes += (f"{row['policy']}: {text}" for text in said)
    if row["session_setup_ms"]:
        notes.append(
            f"{row['policy']}: includes the published session setup of {row['session_setup_ms'] / 1e3:g} s "
            "per request"
        )
    if row.get("error"):
        of = f" in {row['n_runs'] - row['n_feasible']} of {row['n_runs']} runs" if "n_runs" in row else ""
        rest = "; the means are of the other runs" if row.get("n_feasible") else ""
        what = "has no result" if row["mode"] == EMULATED else "is infeasible"
        notes.append(f"{row['policy']} {what}{of}: {row['error']}{rest}")
    if row.get("n_failed"):
        notes.append(_left_out(row))
    links = max((run.get("links") or () for run in runs), key=_most_used, default=())
    warnings = busy_text(msgspec.convert(links, list[LinkRow]))
    if len(runs) > 1:
        warnings = [f"in the busiest of {len(runs)} runs {warning}" for warning in warnings]
    notes += [f"{row['policy']}: {warning}" for warning in warnings]
    notes += [f"{row['policy']}: {hint}" for hint in unused_text(unused_from(row.get("unused_blocks")))]
    if row.get("n_empty"):
        notes.append(
            f"{row['policy']}: in {row['n_empty']} of {row['n_runs']} runs no request completed; they are "
            "in no mean"
        )
    if "gain" in row:
        notes.append(_gain(row))
    return notes


def _mean_costs(runs: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return the means over runs of what their tokens cost, by name."""
    found: dict[str, float | None] = {}
    for name in COSTS:
        known = [run[name] for run in runs if run.get(name) is not None]
        if known:
            found[name] = sum(known) / len(known)
    return found


def _searched(row: dict[str, Any]) -> str | None:
    """Return a note on how far a search for an optimal placement came; ``None`` without one."""
    found = [
        bounds for run in row.get("runs", [row]) if "proven_optimal" in (bounds := run.get("bounds", {}))
    ]
    if not found:
        return None
    of = f" in {{}} of {len(found)} runs" if len(found) > 1 else ""
    n_proven = sum(bool(bounds["proven_optimal"]) for bounds in found)
    parts = []
    if n_proven:
        parts.append(f"the search proved its placement optimal{of.format(n_proven)}")
    if n_proven < len(found):
        gap = max(bounds["gap_ratio"] for bounds in found)
        parts.append(
            f"the search did not prove its placement optimal{of.format(len(found) - n_proven)}; its objective "
            f"is within {gap:.1%} of the best possible"
        )
    return f"{row['policy']}: " + "; ".join(parts)


def _bounds(row: dict[str, Any]) -> list[str]:
    """Return a note on what is proven about the time per token, of the first run where there are several."""
    runs = [run for run in row.get("runs", [row]) if run["feasible"]]
    if not runs:
        return []
    found = runs[0]["bounds"]
    of_first = " (of the first run)" if any(run["bounds"] != found for run in runs) else ""
    return [f"{row['policy']}: {bounds_text(found, found['design_concurrency'])}{of_first}"]


def _most_used(links: Sequence[dict[str, Any]]) -> float:
    return max((link["use_ratio"] for link in links), default=0.0)


def _left_out(row: dict[str, Any]) -> str:
    """Return a note on failed requests, which are in no mean: how many, why, and the mean wait of all."""
    named = list(row["failed_because"].items())[:_MOST_WHYS]
    whys = "; ".join(f"{n:,}: {why}" for why, n in named)
    if n_others := row["n_failed"] - sum(n for _, n in named):
        whys += f"; {n_others:,}: for other reasons"
    n_failed, n_requests = f"{row['n_failed']:,}", counted(row["n_requests"], "requests")
    text = f"{row['policy']}: {n_failed} of {n_requests} did not complete ({whys})"
    if row["mean"]["per_token_ms"] is None:
        return text
    text += "; means and percentiles are of the others"
    if row["n_never_admitted"]:
        text += f"; the mean wait of all requests is {row['mean_waiting_of_all_ms'] / 1e3:.3f} s"
    return text


def _gain(row: dict[str, Any]) -> str:
    """Return a note on what a policy gains over the first one, and whether the gain is significant."""
    gain = row["gain"]
    parts = []
    for name, title in _COLUMNS[:2]:
        for what, found in ((title, gain["mean"][name]), (f"{title}, p99", gain["percentiles"][name]["p99"])):
            if found is not None and found["verdict"] == EQUAL:
                parts.append(f"  {what}: equal in every pair")
            elif found is not None:
                ms = found["gain_ms"]
                share = "" if found["ratio"] is None else f", {abs(found['ratio']):.1%}"
                parts.append(
                    f"  {what} {abs(ms) / 1e3:.3f} s {'less' if ms >= 0 else 'more'} "
                    f"±{found['ci95_ms'] / 1e3:.3f}{share}: {_VERDICTS[found['verdict']]}"
                )
    head = f"{row['policy']} against {gain['against']}, paired by seed"
    if not parts:
        return f"{head}: both served requests in fewer than two runs, so no gain can be stated"
    if any(gain["n_left_out"]):
        theirs, own = gain["n_left_out"]
        head += f" (not of the same requests: {own:,} and {theirs:,} are left out)"
    return "\n".join([f"{head}:", *parts])


def offline_text(answers: Sequence[dict[str, Any]], width: int = 120) -> str:
    """Return a table with a row per offline instance: objective and bounds in ms, sums over its requests.

    The column on the optimum is for policies that search for it: "proven", or the share of the objective by which
    the optimum may be less.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("instance", "policy", "objective (ms)", "optimal", "lower bound", "Theorem 1", "decision"):
        table.add_column(title, justify="left" if title in ("instance", "policy") else "right", no_wrap=True)
    for answer in answers:
        bounds = answer["bounds"]
        limits = (bounds["lower_bound_knapsack_ms"], bounds["theorem1_ms"])
        table.add_row(
            answer["id"],
            answer["policy"],
            f"{answer['objective_ms']:.3f}" if answer["feasible"] else "infeasible",
            _proof(answer),
            *("-" if limit is None else f"{limit:.3f}" for limit in limits),
            f"{1e3 * answer['decision_s']:.1f} ms",
        )
    buffer = io.StringIO()
    console = console_to(buffer, width)
    console.print(table)
    for answer in answers:
        if not answer["feasible"]:
            console.print(f"{answer['id']}, {answer['policy']}: {answer['error']}")
    console.print(_OFFLINE_BOUNDS)
    return buffer.getvalue().rstrip()


def _proof(answer: dict[str, Any]) -> str:
    if "proven_optimal" not in answer:
        return "-"
    return "proven" if answer["proven_optimal"] else f"within {answer['gap']:.1%}"


def _drafts(runs: Sequence[dict[str, Any]]) -> str:
    """Return the figures of speculative decoding, over the rounds of all runs."""
    n_rounds, n_drafted, n_accepted, n_given_up = (
        sum(run[name] for run in runs) for name in ("n_rounds", "n_drafted", "n_accepted", "n_given_up")
    )
    made = sum((run["tokens_per_round"] or 0.0) * run["n_rounds"] for run in runs)
    figures = Speculation(
        drafter=runs[0]["drafter"],
        n_rounds=n_rounds,
        n_drafted=n_drafted,
        n_accepted=n_accepted,
        n_given_up=n_given_up,
        tokens_per_round=made / n_rounds if n_rounds else None,
        acceptance_ratio=n_accepted / n_drafted if n_drafted else None,
    )
    return next(iter(speculation_text(figures)), "no drafts")
