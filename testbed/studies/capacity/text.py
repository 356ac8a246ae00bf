"""The output of ``testbed capacity`` on the terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.table import Table

from testbed.results.costs import costs_text
from testbed.simulator.runs import SAME_RUN, drawn_text
from testbed.studies.capacity.seeds import MOST_SEEDS, most_seeds
from testbed.terminal import console_to

_NOT_TIMES = {"placement": "no placement", "failed": "requests that fail"}
_FEW = 5
"""With fewer seeds, most of the seeds that an interval is said to need are caution."""


def capacity_text(answer: dict[str, Any], width: int = 160) -> str:
    """Returns the text: a table with one row per policy, then notes on them."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", no_wrap=True)
    for title in ("requests/s", "interval", "limited by", "goodput", "requests", "rates"):
        table.add_column(title, justify="right", no_wrap=True)
    notes = []
    for row in answer["policies"]:
        table.add_row(
            row["policy"],
            _number(row["max_rate"]),
            _interval(row),
            _NOT_TIMES.get(row["limited_by"], row["limited_by"]) or "-",
            _goodput(row),
            "-" if row["n_requests"] is None else f"{row['n_requests']:,}",
            str(row["n_rates"]),
        )
        notes += _notes(row, len(answer["seeds"]), most_seeds(answer["drawn"]))
    buffer = io.StringIO()
    console = console_to(buffer, width)
    limits = ", ".join(f"{name} at most {limit:g} s" for name, limit in answer["objectives"].items())
    seeds = answer["seeds"]
    over = f"seed {seeds[0]}" if len(seeds) == 1 else f"means over seeds {seeds[0]} to {seeds[-1]}"
    console.print(
        f"{answer['scenario']}: highest rate with {limits} ({over}, within {answer['width_ratio']:.0%})"
    )
    console.print(table)
    if answer["drawn"] is not None:
        console.print(drawn_text(answer["drawn"]) if len(seeds) > 1 else f"requests: {answer['arrivals']}")
    for note in notes:
        console.print(note)
    return buffer.getvalue().rstrip()


def _interval(row: dict[str, Any]) -> str:
    if row["low"] is None and row["high"] is None:
        return "-"
    return f"{_number(row['low'])} to {_number(row['high'])}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _goodput(row: dict[str, Any]) -> str:
    half = row["goodput_rps_ci95"]
    return _number(row["goodput_rps"]) + (f" ±{half:.2g}" if half is not None else "")


def _wide(row: dict[str, Any], n_runs: int, most: int) -> str:
    """Returns what an interval needs that is too wide to plan with."""
    ends = (row["low"], row["high"])
    fold = "" if None in ends else f", {ends[1] / ends[0]:.2g}-fold,"
    text = f"the interval{fold} is wider than a third of the rate"
    n = row["runs_needed"]
    if n is None and most < MOST_SEEDS:
        return (
            f"{text}, and the recording has only {most:,} windows, too few to make it narrower than that; with a "
            "lower workload.n_requests it has more"
        )
    if n is None:
        return f"{text}, and {most:,} seeds would not make it narrower than that"
    text += f": some {n:,} seeds are needed; the same command with --runs {n} goes on from these runs"
    if n_runs < _FEW < n:
        text += f", but {n_runs} seeds hardly show the spread, and --runs {_FEW} estimates it better"
    return text


def _of_clients(row: dict[str, Any]) -> list[str]:
    """Returns which clients miss an objective by themselves: all that miss it just above the highest rate, or some at it."""
    lines = []
    for key in ("at_max", "at_broken"):
        for name, of in (row[key] or {}).items():
            if (
                name == "rate"
                or not of.get("missed_at")
                or (key == "at_broken" and name != row["limited_by"])
            ):
                continue
            values = ", ".join(
                f"{client} ({of['clients'][client]['value_s']:.3g} s)" for client in of["missed_at"]
            )
            others = len(of["clients"]) - len(of["missed_at"])
            kept = f", of {len(of['clients'])} clients" if others else ""
            verb = "is kept over all requests, but not at" if key == "at_max" else "is missed at"
            lines.append(f"at {row[key]['rate']:.4g} requests/s {name} {verb} {values}{kept}")
    return lines


def _notes(row: dict[str, Any], n_runs: int, most: int) -> list[str]:
    policy, notes = row["policy"], []
    if row["engine"]:
        notes.append(f"{policy}: engine {row['engine']}: {row['engine_why']}")
    if row["reason"]:
        notes.append(f"{policy}: {row['reason']}")
    notes += [f"{policy}: {line}" for line in _of_clients(row)]
    if row.get("costs"):
        costs = costs_text({name: of["value"] for name, of in row["costs"].items()})
        notes += [f"{policy}: {line}, at {row['max_rate']:.4g} requests/s" for line in costs]
    if row["same_run"]:
        notes.append(f"{policy}: {SAME_RUN}")
    if row["is_wide"]:
        notes.append(f"{policy}: {_wide(row, n_runs, most)}")
    if row["metastable"]:
        first_s, _, last_s = row["ttft_thirds_s"]
        stable = row["draining_rate"]
        notes.append(
            f"{policy}: a metastable edge: the limits are kept, but arrivals seem never to drain (time to the first "
            f"token {first_s:.3g} s in the first third of requests, {last_s:.3g} s in the last, still "
            "growing); "
            + (f"they drain at {stable:g} requests/s" if stable else "no rate that was judged drains")
        )
    elif row["drains_at_broken"] is False:
        notes.append(
            f"{policy}: at {row['broken_at']:.4g} requests/s arrivals seem never to drain: "
            "the limits break at once, not little by little"
        )
    if row["broken_below"]:
        rates = ", ".join(f"{rate:g}" for rate in row["broken_below"])
        notes.append(
            f"{policy}: not kept at {rates} requests/s, although that is less: "
            "the policy makes another placement for each rate"
        )
    return notes
