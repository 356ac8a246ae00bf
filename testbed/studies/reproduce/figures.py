"""Figures of the reproduction, as PNG and PDF. matplotlib is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from testbed.results.plots import LINES, plotting, save_both
from testbed.studies.reproduce.explain import FACTOR_LABELS, mean_shares
from testbed.studies.reproduce.paper import METRICS
from testbed.studies.reproduce.runs import Results
from testbed.studies.reproduce.settings import CLOSEST, STATED, SWEEPS, TOPOLOGIES, Sweep, labels
from testbed.studies.sweep.disk import writing
from testbed.studies.sweep.figures import draw_means, looks_of, set_scales

_SETUPS = (("reference", "with"), ("none", "without"))
_FACTOR_COLOURS = {
    "order": "#56b4e9",
    "number": "#0072b2",
    "windows": "#009e73",
    "routing": "#e69f00",
    "setup": "#bbbbbb",
}


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
    with plotting(LINES) as plt:
        for name, figure in figures(plt, results):
            drawn.append(save_both(plt, figure, folder, name, dpi=110, writing=writing))
    return drawn


def _sweep_figures(plt: Any, results: Results) -> Iterator[tuple[str, Any]]:
    for sweep in SWEEPS:
        for setup, words in _SETUPS:
            rows = [(sweep, metric, f"{title.lower()} [s]", 1.0) for metric, title in METRICS.items()]
            title = f"{sweep.title}, {words} the session-setup constants"
            yield f"{sweep.name}-{words}-setup", _panels(plt, results, setup, rows, title, 8.2)
    rows = [(sweep, "decision_s", "run time [ms]", 1e3) for sweep in SWEEPS]
    title = "Processor time of the algorithms in one run: placement, and routes of all requests"
    yield "run-times", _panels(plt, results, "reference", rows, title, 12.5)


def _panels(
    plt: Any,
    results: Results,
    setup: str,
    rows: Sequence[tuple[Sweep, str, str, float]],
    title: str,
    height: float,
) -> Any:
    """Draws a row of panels per (sweep, metric, label, factor), one panel per topology: means over the
    sweep's values with their intervals, without values for which no run has a placement.
    """
    figure, grid = plt.subplots(len(rows), len(TOPOLOGIES), figsize=(9.5, height), sharey="row")
    for panels, (sweep, metric, label, factor) in zip(grid, rows, strict=True):
        every: list[float] = []
        for axes, place in zip(panels, TOPOLOGIES, strict=True):
            for policy, look in looks_of(labels()).items():
                means = [
                    (value, mean.mean * factor, mean.half_width * factor)
                    for value, setting in sweep.points[place]
                    if (mean := results.mean(setting, policy, setup, metric)) is not None
                ]
                every += draw_means(axes, means, look)
            axes.set_xlabel(sweep.x_label if sweep is not rows[0][0] or panels is grid[-1] else "")
        set_scales(panels[0], [], every)
        panels[0].set_ylabel(label)
    for axes, place in zip(grid[0], TOPOLOGIES, strict=True):
        axes.set_title(place, fontsize=10)
    _finish(figure, grid[0][0], title, 0.03)
    return figure


def _finish(figure: Any, axes: Any, title: str, bottom: float) -> None:
    figure.suptitle(title, fontsize=11)
    figure.legend(*axes.get_legend_handles_labels(), loc="lower center", ncols=3 if bottom > 0.05 else 6)
    figure.tight_layout(rect=(0, bottom, 1, 0.99))


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
    _finish(
        figure,
        grid[0][0],
        "From PETALS to the proposed policy (white): changes that save time per token; below zero: that cost time",
        0.07,
    )
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
