"""Figures of the reproduction, as PNG and PDF. matplotlib is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from testbed.results.plots import LINES as LINES_STYLE
from testbed.results.plots import plotting, save
from testbed.studies.reproduce.collect import Results
from testbed.studies.reproduce.explain import FACTOR_LABELS, mean_shares
from testbed.studies.reproduce.lines import LINES
from testbed.studies.reproduce.paper import METRICS
from testbed.studies.reproduce.settings import CLOSEST, STATED, SWEEPS, TOPOLOGIES, Sweep
from testbed.studies.sweep.disk import writing

_SETUPS = (("reference", "with"), ("none", "without"))
_FACTOR_COLOURS = {
    "order": "#56b4e9",
    "number": "#0072b2",
    "windows": "#009e73",
    "routing": "#e69f00",
    "setup": "#bbbbbb",
}
_LOG_RATIO = 20
"""Rows of panels whose values differ by more than this factor have logarithmic axes."""


def draw_sweeps(folder: Path, results: Results) -> list[Path]:
    """Draw per sweep one figure with and one without session setups, and one of the run times. Returns the
    PNGs.

    Raises ``UserError`` or ``RunError`` if they cannot be written.
    """
    return _draw(folder, _sweep_figures, results)


def draw_breakdown(folder: Path, results: Results) -> list[Path]:
    """Draw the breakdown of the gain by place. Returns the PNGs; raises as ``draw_sweeps``."""
    return _draw(folder, _breakdown_figures, results)


def _draw(folder: Path, figures: Any, results: Results) -> list[Path]:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with plotting(LINES_STYLE) as plt:
        for name, figure in figures(plt, results):
            try:
                for path in (folder / f"{name}.png", folder / f"{name}.pdf"):
                    with writing(path):
                        save(figure, path, dpi=110)
            finally:
                plt.close(figure)
            drawn.append(folder / f"{name}.png")
    return drawn


def _sweep_figures(plt: Any, results: Results) -> Iterator[tuple[str, Any]]:
    for sweep in SWEEPS:
        for setup, words in _SETUPS:
            yield f"{sweep.name}-{words}-setup", _sweep(plt, results, sweep, setup, words)
    yield "run-times", _run_times(plt, results)


def _sweep(plt: Any, results: Results, sweep: Sweep, setup: str, words: str) -> Any:
    figure, grid = plt.subplots(
        len(METRICS), len(TOPOLOGIES), figsize=(9.5, 8.2), sharex="col", squeeze=False
    )
    for row, (metric, title) in zip(grid, METRICS.items(), strict=True):
        for axes, place in zip(row, TOPOLOGIES, strict=True):
            _panel(axes, results, sweep, place, setup, metric)
        _scale(row)
        row[0].set_ylabel(f"{title.lower()} [s]")
    _finish(figure, grid, [sweep.x_label], f"{sweep.title}, {words} the session-setup constants")
    return figure


def _run_times(plt: Any, results: Results) -> Any:
    figure, grid = plt.subplots(len(SWEEPS), len(TOPOLOGIES), figsize=(9.5, 12.5), squeeze=False)
    for row, sweep in zip(grid, SWEEPS, strict=True):
        for axes, place in zip(row, TOPOLOGIES, strict=True):
            _panel(axes, results, sweep, place, "reference", "decision_s", 1e3)
        _scale(row)
        row[0].set_ylabel("run time [ms]")
    title = "Processor time of the algorithms in one run: placement, and routes of all requests"
    _finish(figure, grid, [sweep.x_label for sweep in SWEEPS], title)
    return figure


def _panel(
    axes: Any, results: Results, sweep: Sweep, place: str, setup: str, metric: str, scale: float = 1.0
) -> None:
    """Draws means with their confidence intervals; values for which no run has a placement are left out."""
    for number, line in enumerate(LINES):
        points = []
        for value, setting in sweep.points[place]:
            mean = results.mean(setting, line.name, setup, metric)
            if mean is not None:
                points.append((value, mean.mean * scale, mean.half_width * scale))
        if not points:
            continue
        x, y, errors = zip(*points, strict=True)
        axes.errorbar(
            x,
            y,
            yerr=errors,
            label=line.label,
            color=line.colour,
            marker=line.marker,
            markerfacecolor="white" if number % 2 else line.colour,
            capsize=2,
            elinewidth=0.8,
            zorder=3 + number,
        )


def _scale(row: Sequence[Any]) -> None:
    """Sets the y axes of a row of panels: all from 0, or all logarithmic if means differ by more than
    ``_LOG_RATIO``.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    means = [[y for bars in axes.containers for y in bars.lines[0].get_ydata()] for axes in row]
    low, high = min(map(min, means)), max(map(max, means))
    for axes, values in zip(row, means, strict=True):
        if low > 0 and high / low > _LOG_RATIO:
            axes.set_yscale("log")
            # The limits ignore the error bars: with few runs these can reach below zero.
            axes.set_ylim(min(values) / 1.5, max(values) * 1.5)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_ylim(bottom=0)


def _finish(figure: Any, grid: Any, x_labels: Sequence[str], title: str) -> None:
    for axes, place in zip(grid[0], TOPOLOGIES, strict=True):
        axes.set_title(place, fontsize=10)
    for row, x_label in zip(grid[-len(x_labels) :], x_labels, strict=True):
        for axes in row:
            axes.set_xlabel(x_label)
    figure.suptitle(title, fontsize=11)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="lower center", ncols=len(labels), columnspacing=1.0, handletextpad=0.4
    )
    figure.tight_layout(rect=(0, 0.03, 1, 0.99))


def _breakdown_figures(plt: Any, results: Results) -> Iterator[tuple[str, Any]]:
    figure, grid = plt.subplots(2, 2, figsize=(9.5, 6.8), sharey="row")
    for column, variant in enumerate((CLOSEST, STATED)):
        for axes, (with_setup, words) in zip(
            grid[:, column], ((True, "with"), (False, "without")), strict=True
        ):
            _stacks(axes, mean_shares(results, variant, with_setup=with_setup))
            axes.set_title(f"{variant.title},\n{words} the constants", fontsize=9)
    for row in grid:
        row[0].set_ylabel("time per token [s]")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.suptitle(
        "From PETALS to the proposed policy (white): changes that save time per token; below zero: that "
        "cost time",
        fontsize=11,
    )
    figure.legend(handles, labels, loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.07, 1, 0.99))
    yield "breakdown", figure


def _stacks(axes: Any, places: dict[str, tuple[float, float, dict[str, float]]]) -> None:
    """Draws one bar per place: the proposed policy's time, and the shares stacked on it; negative ones below
    zero.
    """
    names = list(places)
    bottom = [after_s for _, after_s, _ in places.values()]
    below = [0.0] * len(names)
    axes.bar(names, bottom, color="white", edgecolor="black", linewidth=0.8, label="proposed: remaining time")
    for factor, colour in _FACTOR_COLOURS.items():
        shares = [place_shares.get(factor, 0.0) for _, _, place_shares in places.values()]
        if not any(shares):
            continue
        starts = [top if s >= 0 else low for s, top, low in zip(shares, bottom, below, strict=True)]
        axes.bar(names, shares, bottom=starts, color=colour, label=FACTOR_LABELS[factor], width=0.8)
        bottom = [top + max(s, 0.0) for top, s in zip(bottom, shares, strict=True)]
        below = [low + min(s, 0.0) for low, s in zip(below, shares, strict=True)]
    axes.axhline(0, color="black", linewidth=0.8)
    axes.grid(axis="x", visible=False)
    axes.tick_params(axis="x", labelsize=8)
