"""The plot of ``testbed links``: requested and achieved RTT and rate, with one line per pair."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testbed.results.plots import plotting, save_both

Rows = list[dict[str, Any]]

_IDLE, _LOAD, _ASKED = "#1f5a99", "#d1762b", "#222222"
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
}
_MAX_NAMED = 80


def rate_error_percent(row: Mapping[str, Any]) -> float | None:
    """Returns (achieved - requested) / requested rate in percent; None if no rate was measured."""
    rate = row["rate_mbps"]
    return None if rate["achieved"] is None else 100 * (rate["achieved"] / rate["requested"] - 1)


def draw_links(folder: Path, answer: dict[str, Any]) -> None:
    """Draw ``links.png`` and ``links.pdf``, with pairs sorted by RTT from top to bottom. Imports
    matplotlib.
    """
    pairs = answer["pairs"]
    there, back = pairs[::2], pairs[1::2]
    order = sorted(range(len(there)), key=lambda i: (there[i]["rtt_ms"]["requested"], i))
    there, back = [there[i] for i in order], [back[i] for i in order]
    step = 0.2 if len(there) <= _MAX_NAMED else 0.05
    with plotting(_STYLE) as plt:
        height = max(2.6, 1.7 + step * len(there))
        figure, axes = plt.subplots(1, 4, sharey=True, figsize=(13, height), layout="constrained")
        states: list[tuple[str, Rows, Rows, str, float]] = [
            ("idle", there, back, _IDLE, -0.12 if answer["load"] else 0.0)
        ]
        if answer["load"]:
            out, home = ([{**row, **row["under_load"]} for row in rows] for rows in (there, back))
            states.append(("under load", out, home, _LOAD, 0.2))
        _asked(axes[0], [row["rtt_ms"]["requested"] for row in there])
        _asked(axes[2], [row["rate_mbps"]["requested"] for row in there])
        if any(
            a["rate_mbps"]["requested"] != b["rate_mbps"]["requested"]
            for a, b in zip(there, back, strict=True)
        ):
            _asked(axes[2], [row["rate_mbps"]["requested"] for row in back])
        for name, out, home, colour, shift in states:
            _times(axes[0], axes[1], out, colour, shift, name)
            _rates(axes[2], axes[3], out, colour, shift, ">", f"{name}, from client")
            _rates(axes[2], axes[3], home, colour, shift, "<", f"{name}, to client")
        _finish(axes, there)
        figure.suptitle(
            f"{answer['scenario']} on {answer['network']}"
            + (f", time scale {answer['time_scale']:g}" if answer["time_scale"] != 1 else "")
            + ": asked and achieved links",
            fontsize=11,
        )
        save_both(plt, figure, folder, "links")


def _asked(axis: Any, values: list[float]) -> None:
    axis.plot(
        values,
        range(len(values)),
        "|",
        color=_ASKED,
        markersize=11,
        markeredgewidth=1.6,
        label="asked",
        zorder=1,
    )


def _times(values: Any, errors: Any, rows: Rows, colour: str, shift: float, name: str) -> None:
    """Draws the p50 of each RTT as a dot, and in the panel of errors a line from there to the p99."""
    found = [(i + shift, row["rtt_ms"]) for i, row in enumerate(rows) if row["rtt_ms"]["p50"] is not None]
    heights = [height for height, _ in found]
    p50s, p99s = ([rtt[f"error_{key}"] for _, rtt in found] for key in ("p50", "p99"))
    dot = {"color": colour, "markersize": 3.5, "label": f"p50 {name}"}
    values.plot([rtt["p50"] for _, rtt in found], heights, "o", **dot)
    errors.plot(p50s, heights, "o", **dot)
    errors.hlines(heights, p50s, p99s, color=colour, linewidth=1.4, alpha=0.6, label=f"to p99 {name}")


def _rates(values: Any, errors: Any, rows: Rows, colour: str, shift: float, marker: str, name: str) -> None:
    found = [(i + shift, row["rate_mbps"]["achieved"], rate_error_percent(row)) for i, row in enumerate(rows)]
    measured = [row for row in found if row[1] is not None]
    heights, rates, percent = zip(*measured, strict=True) if measured else ((), (), ())
    for axis, places in ((values, rates), (errors, percent)):
        axis.plot(
            places,
            heights,
            marker,
            color=colour,
            markersize=3.8,
            markerfacecolor=colour if marker == ">" else "white",
            label=name,
        )


def _finish(axes: Any, rows: Rows) -> None:
    titles = ("RTT, ms", "RTT error, ms (p50 to p99)", "rate with headers, Mbit/s", "rate error, %")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=9, loc="left")
        axis.tick_params(axis="y", length=0)
        axis.legend(
            fontsize=7,
            frameon=False,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.03 - 0.5 / len(rows)),
            ncols=2,
        )
    for axis in (axes[1], axes[3]):
        axis.axvline(0, color=_ASKED, linewidth=0.8, zorder=0)
        low, high = axis.get_xlim()
        axis.set_xlim(min(low, -0.05), max(high, 0.05))
    for axis in (axes[0], axes[2]):
        axis.set_xlim(0, axis.get_xlim()[1])
    if len(rows) <= _MAX_NAMED:
        one_client = len({row["from"] for row in rows}) == 1
        names = [row["to"] if one_client else f"{row['from']} - {row['to']}" for row in rows]
        axes[0].set_yticks(range(len(rows)), names, fontsize=8)
    else:
        axes[0].set_yticks([])
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
