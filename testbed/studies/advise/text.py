"""The output of ``testbed advise`` on the terminal."""

from __future__ import annotations

import io
import math
from typing import Any

from rich.table import Table

from testbed.results.costs import CARBON, COST, COSTS, ENERGY
from testbed.results.intervals import EQUAL, UNRESOLVED, Mean
from testbed.simulator.runs import drawn_text
from testbed.studies.advise.judging import over
from testbed.studies.sweep.contrast import WORSE, Difference
from testbed.studies.sweep.documents import difference, number
from testbed.terminal import console_to

Outcome = dict[str, Any]
_OF_TOKENS = {COST: "cost/1e6 tokens", ENERGY: "J/token", CARBON: "g CO2/1e6 tokens"}


def advise_text(answer: dict[str, Any], width: int = 160) -> str:
    """Returns the text: the best combination, the effect of its parts and of single additions, and of
    losses.
    """
    buffer = io.StringIO()
    console = console_to(buffer, width)
    goal, best, seeds = answer["goal"], answer["best"], answer["seeds"]
    objectives = goal.get("objectives")
    if objectives is None:
        wanted = f"to lower {goal['metric']}"
    else:
        wanted = f"for {', '.join(f'{name} at most {limit:g} s' for name, limit in objectives.items())}"
    judged_over = over(seeds) if len(seeds) == 1 else f"means over {over(seeds)}"
    console.print(
        f"{answer['scenario']} under {answer['policy']}: what to add for {answer['budget']:g} {wanted} ({judged_over})"
    )
    console.print(_best(answer))
    if doubt := _doubt(answer):
        console.print(f"{doubt} (--runs sets more seeds)")
    if cheaper := _cheaper(answer):
        console.print(f"not shown to be worse than that over these seeds: {', '.join(cheaper)}")
    console.print(_how(answer))
    if answer["drawn"] is not None:
        console.print(drawn_text(answer["drawn"]))
    if answer["engine"]:
        console.print(f"engine {answer['engine']}: {answer['engine_why']}")
    measures = list(answer["now"]["values"])
    prices = [name for name in COSTS if name in answer["now"].get("costs", {})]
    table = _table(measures, prices)
    table.add_row(
        "now", "0", *_cells({**answer["now"], "difference": {}}, measures), *_prices(answer["now"], prices)
    )
    if best["add"]:
        table.add_row("best", f"{best['cost']:g}", *_cells(best, measures), *_prices(best, prices))
    for row in best["without_one"]:
        table.add_row(
            f"best, one {row['candidate']} less",
            "",
            *_cells(row, measures, "against best: "),
            *_prices(row, prices),
        )
    for row in answer["first"]:
        over_budget = "" if row["is_paid"] else " (beyond the budget)"
        cells = _cells(row, measures)
        table.add_row(
            f"only 1 {row['candidate']}{over_budget}", f"{row['cost']:g}", *cells, *_prices(row, prices)
        )
    console.print(table)
    for row in answer["first"]:
        why = _worse(row, answer["now"])
        if why:
            console.print(f"{row['candidate']} alone makes it worse: {why}")
    judged = [row for row in answer["losses"] if row["share_without_placement"] is not None]
    felt = [row for row in judged if _is_felt(row, answer["now"])]
    if felt:
        console.print(_losses(felt, measures))
    others = sum(row["n_alike"] for row in judged if row not in felt)
    if others:
        other = "other " if felt else ""
        which = f"any one of the {other}{others} servers" if others > 1 else f"the {other}server"
        console.print(f"losing {which} changes nothing")
    for row in answer["losses"]:
        if row not in judged:
            console.print(f"the loss of {row['server']} cannot be judged: {row['reason']}")
    return buffer.getvalue().rstrip()


def _best(answer: dict[str, Any]) -> str:
    best = answer["best"]
    add = " + ".join(f"{n} {name}" for name, n in best["add"].items())
    what = f"add {add} for {best['cost']:g}" if add else "add nothing"
    if best["share_without_placement"] == 1:
        return f"no combination has a placement: {best['reason']}"
    if best["is_kept"]:
        return f"{what}: the objectives are kept" + ("" if add else " as it is")
    if best["is_kept_in_search"]:
        chosen_by, measured_by = over(answer["search_seeds"]), over(answer["seeds"])
        return (
            f"{what}: the cheapest that keeps the objectives with {chosen_by}, but with {measured_by} it "
            "does not "
            "(--runs sets more seeds)"
        )
    if best["is_kept"] is False:
        return f"no combination keeps the objectives; the nearest: {what}"
    return what if add else "add nothing: no combination is better than what is there"


def _doubt(answer: dict[str, Any]) -> str:
    """Returns why the best combination may be no better than what is there; empty if nothing speaks for that."""
    best = answer["best"]
    verdicts = {of["verdict"] for of in best["difference"].values()}
    if UNRESOLVED in verdicts:
        return "the effect of that is unresolved: its interval over these seeds contains 0"
    if not best["add"] or "metric" not in answer["goal"]:
        return ""
    if not _is_felt(best, answer["now"]):
        does = "changes nothing"
    elif _worse(best, answer["now"]):
        does = "makes it worse"
    else:
        return ""
    return f"that was better with {over(answer['search_seeds'])}, but {does} with {over(answer['seeds'])}"


def _cheaper(answer: dict[str, Any]) -> list[str]:
    """Returns the single candidates that cost less than the best combination and are not shown to be worse."""
    best = answer["best"]
    return [
        f"1 {row['candidate']} alone, for {row['cost']:g}"
        for row in answer["first"]
        if "metric" in answer["goal"] and row["cost"] < best["cost"]
        if any(of["verdict"] for of in row["against_best"].values())
        if not _worse({**row, "difference": row["against_best"]}, best)
    ]


def _how(answer: dict[str, Any]) -> str:
    by, n_tried, n_all = over(answer["search_seeds"]), answer["n_tried"], answer["n_combinations"]
    if answer["method"] == "greedy":
        return (
            f"greedy search with a look-ahead of {answer['look_ahead']}: the best of {n_tried} combinations "
            f"tried with {by}; others may be better (--exact tries all)"
        )
    if n_tried < n_all:
        return f"exact: {n_tried} of {n_all} combinations tried with {by}, and the others cost more"
    return f"exact: all {n_all} combinations that the budget pays were tried, with {by}"


def _prices(row: Outcome, names: list[str]) -> list[str]:
    """Returns what a variant's tokens cost, over its seeds."""
    found = ((row.get("costs") or {}).get(name) for name in names)
    return ["-" if of is None else number(Mean(of["value"], _half(of["ci95"]), 0)) for of in found]


def _table(measures: list[str], prices: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("added", no_wrap=True)
    table.add_column("cost", justify="right")
    for measure in measures:
        table.add_column(f"{measure} (s)", justify="right", no_wrap=True)
        table.add_column("against now", no_wrap=True)
    for name in prices:
        table.add_column(_OF_TOKENS[name], justify="right", no_wrap=True)
    return table


def _cells(row: Outcome, measures: list[str], against: str = "") -> list[str]:
    cells = []
    for measure in measures:
        value, found = row["values"][measure], row["difference"].get(measure)
        if value["value_s"] is None:
            cells += ["-", "no placement" if row["share_without_placement"] else "all requests fail"]
            continue
        cells.append(number(Mean(value["value_s"], _half(value["ci95_s"]), 0)))
        text = "" if found is None else _difference(found)
        if row["share_without_placement"]:
            text += f" ({row['share_without_placement']:.0%} of seeds: no placement)"
        if row["n_failed"]:
            text += f" ({row['n_failed']:g} requests fail)"
        cells.append(against + text.strip() if text else "")
    return cells


def _difference(found: dict[str, Any]) -> str:
    of = Difference(found["mean_s"], _half(found["ci95_s"]), found["n"], found["ratio"], found["verdict"])
    return "" if of.mean == 0 and of.verdict is None else difference(of)


def _half(ci95_s: float | None) -> float:
    return math.nan if ci95_s is None else ci95_s


def _worse(row: Outcome, now: Outcome) -> str:
    """Returns why a row is worse than another, ``now``; empty if it is not, or if that is unresolved.

    Of rows of which one has fewer seeds without a placement, or fewer requests that fail, this one is better.
    """
    for key, why in (
        ("share_without_placement", f"no placement: {row['reason']}"),
        ("n_failed", f"{row['n_failed'] or 0:g} requests fail, {now['n_failed'] or 0:g} now"),
    ):
        ours, theirs = row[key] or 0, now[key] or 0
        if ours != theirs:
            return why if ours > theirs else ""
    found = {name: of for name, of in row["difference"].items() if of["verdict"] == WORSE}
    return ", ".join(f"{name} {_difference(of)}" for name, of in found.items())


def _losses(losses: list[Outcome], measures: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("lost server", no_wrap=True)
    for measure in measures:
        table.add_column(f"{measure} (s)", justify="right", no_wrap=True)
        table.add_column("against now", no_wrap=True)
    for row in losses:
        alike = f" (as any of {row['n_alike']} alike)" if row["n_alike"] > 1 else ""
        table.add_row(f"{row['server']}{alike}", *_cells(row, measures))
    return table


def _is_felt(loss: Outcome, now: Outcome) -> bool:
    same = all(loss[key] == now[key] for key in ("share_without_placement", "n_failed"))
    return not (same and all(of["verdict"] == EQUAL for of in loss["difference"].values()))
