"""Figures of a sweep, as PNG and PDF: metrics over axes, maps over two axes, and a Pareto front."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from testbed.results.intervals import UNRESOLVED
from testbed.results.plots import LINES, plotting, save_both
from testbed.studies.sweep.axes import Axis, words_of
from testbed.studies.sweep.contrast import Cell, baselines
from testbed.studies.sweep.disk import FIGURES, writing
from testbed.studies.sweep.documents import baseline_of
from testbed.studies.sweep.measures import HIGHER_IS_BETTER, label_of
from testbed.studies.sweep.study import Study
from testbed.studies.sweep.table import Scalar, typed

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
"""Mostly the palette of Okabe and Ito. The markers distinguish policies where colours do not."""
MARKERS = "oDs^vPX*"
MOST_PANELS = 6
MOST_LABELLED = 100
"""A map with at most so many squares has its numbers written in them."""
_LOG_RATIO = 20
_PNG_DPI = 120


class Figure(NamedTuple):
    """A drawn figure. ``name``: its file's name without the suffix."""

    name: str
    caption: str
    figure: Any


def draw_figures(out: Path, study: Study, cells: Sequence[Cell]) -> list[tuple[Path, str]]:
    """Draw all figures into the folder ``figures`` of ``out``.

    Returns (path of the PNG, caption) for each. Raises ``UserError`` or ``RunError`` if they cannot be
    written.
    """
    folder = out / FIGURES
    drawn: list[tuple[Path, str]] = []
    with writing(folder):
        folder.mkdir(exist_ok=True)
    with plotting(LINES) as plt:
        for name, caption, figure in _figures(plt, study, cells):
            path = save_both(plt, figure, folder, name, dpi=_PNG_DPI, tight=True, writing=writing)
            drawn.append((path, caption))
    return drawn


def _figures(plt: Any, study: Study, cells: Sequence[Cell]) -> Iterator[Figure]:
    values = typed(study.axes)
    for metric in study.metrics:
        if all(cell.mean(metric) is None for cell in cells):
            continue
        for axis in study.axes:
            if len(axis.values) < 2:
                continue
            for number, key in enumerate(axis.keys):
                if axis.is_drawn or number == 0:  # keys that change together need only one figure
                    yield _over(plt, study, cells, metric, axis, key, values)
    grid = [axis for axis in study.axes if len(axis.values) > 1 and not axis.is_drawn][:2]
    if len(grid) == 2:
        for metric in study.metrics:
            if any(cell.mean(metric) for cell in cells):
                yield _map(plt, study, cells, metric, grid[0], grid[1])
    if len(cells) > 1 and any(cell.mean(study.pareto[0]) and cell.mean(study.pareto[1]) for cell in cells):
        yield _front(plt, study, cells)


def _looks(study: Study, cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    return looks_of({cell.policy: study.label(cell.policy) for cell in cells})


def looks_of(labels: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Returns the style of each policy's lines and markers, as keyword arguments of ``Axes.plot``.

    ``labels``: policy -> its name in the legend.
    """
    return {
        name: {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "label": label,
            # Later policies are drawn smaller, so that they do not hide earlier ones with the same values.
            "markersize": max(7.5 - i, 3.5),
            "linewidth": max(2.2 - 0.3 * i, 1.0),
        }
        for i, (name, label) in enumerate(labels.items())
    }


def _over(
    plt: Any,
    study: Study,
    cells: Sequence[Cell],
    metric: str,
    axis: Axis,
    key: str,
    values: Mapping[str, Mapping[str, Scalar]],
) -> Figure:
    """Draws ``metric`` over ``key``: one line per policy, with the interval as a band.

    There is one panel per combination of the other axes' values, at most ``MOST_PANELS``. Values of ``key``
    that are not numbers, and points of a design, are not joined by a line and have error bars.
    """
    others = [k for other in study.axes if other is not axis for k in other.keys]
    combos = list(dict.fromkeys(tuple(cell.point[k] for k in others) for cell in cells))
    shown = _spread(combos)
    n_columns = min(len(shown), 3)
    n_rows = -(-len(shown) // n_columns)
    size = (6.4, 3.8) if len(shown) == 1 else (3.4 * n_columns, 2.9 * n_rows + 0.5)
    figure, grid = plt.subplots(n_rows, n_columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    of_key = values[key]
    is_number = all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in of_key.values()
    )
    place = {text: float(value) if is_number else float(i) for i, (text, value) in enumerate(of_key.items())}
    every: list[float] = []
    for axes, combo in zip(grid.flat, shown, strict=False):
        there = [cell for cell in cells if tuple(cell.point[k] for k in others) == combo]
        policies = _looks(study, cells)
        for number, (policy, look) in enumerate(policies.items()):
            own = [cell for cell in there if cell.policy == policy]
            # Values that are not numbers have room between them: policies are drawn side by side there.
            aside = 0.0 if is_number else 0.5 * ((number + 0.5) / len(policies) - 0.5)
            joined = is_number and not axis.is_drawn
            means = [
                (place[cell.point[key]] + aside, mean.mean, mean.half_width)
                for cell in own
                if (mean := cell.mean(metric)) is not None
            ]
            every += draw_means(axes, means, look, joined=joined)
        varied = [(k, v) for k, v in zip(others, combo, strict=True) if len(values[k]) > 1]
        axes.set_title("\n".join(f"{words_of(k)} = {_plain(v)}" for k, v in varied), fontsize=8)
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_visible(False)
    set_scales(grid[0][0], list(place.values()) if is_number else [], every)
    if not is_number:
        for axes in grid.flat:
            axes.set_xticks(list(place.values()), [_plain(text) for text in place])
            axes.set_xlim(-0.5, len(place) - 0.5)
    for axes in grid[-1]:
        axes.set_xlabel(words_of(key))
    for row in grid:
        row[0].set_ylabel(label_of(metric))
    _legend(figure, grid[0][0])
    caption = f"{_upper(label_of(metric))} over {words_of(key)}: means over {_runs(study)}"
    caption += f", {'bands' if is_number and not axis.is_drawn else 'bars'}: their 95 % intervals."
    if len(axis.keys) > 1:
        together = ", ".join(words_of(k) for k in axis.keys if k != key)
        caption += f" {together} {'differs, too' if axis.is_drawn else 'changes with it'}."
    if len(shown) < len(combos):
        caption += f" {len(shown)} of the {len(combos)} combinations of other axes; results.parquet has all."
    return Figure(_file(f"{metric}-over-{key}"), caption, figure)


def draw_means(
    axes: Any, means: Sequence[tuple[float, float, float]], look: Mapping[str, Any], *, joined: bool = True
) -> list[float]:
    """Draw one policy's means, with a line and a band if ``joined``, else with error bars.

    ``means``: (place on the x axis, mean, half-width of the interval or nan). Returns the means.
    """
    if not means:
        return []
    x, y, halves = (list(column) for column in zip(*sorted(means), strict=True))
    halves = [0.0 if math.isnan(half) else half for half in halves]
    if not joined:
        axes.errorbar(x, y, yerr=halves, capsize=2, elinewidth=0.8, **{**look, "linestyle": "none"})
        return y
    axes.plot(x, y, **look)
    low = [value - half for value, half in zip(y, halves, strict=True)]
    high = [value + half for value, half in zip(y, halves, strict=True)]
    axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    return y


def set_scales(axes: Any, x: Sequence[float], y: Sequence[float]) -> None:
    """Makes axes logarithmic whose values differ by more than a factor of ``_LOG_RATIO``; else y begins at 0.

    All panels of a figure share their axes.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    plain = FuncFormatter(lambda value, _: f"{value:g}")
    if x and min(x) > 0 and max(x) / min(x) > _LOG_RATIO:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(plain)
    if y and min(y) > 0 and max(y) / min(y) > _LOG_RATIO:
        axes.set_yscale("log")
        # The limits ignore the bands: with few runs these can reach below zero.
        axes.set_ylim(min(y) / 1.5, max(y) * 1.5)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif y and min(y) >= 0:
        axes.update_datalim([(0, 0)], updatex=False)  # the margin at the top is a part of the way from 0
        axes.autoscale_view(scalex=False)
        axes.set_ylim(bottom=0)


def _map(plt: Any, study: Study, cells: Sequence[Cell], metric: str, across: Axis, up: Axis) -> Figure:
    """Draws ``metric`` as a map over two axes: the baseline's means, and the other policies' differences in
    percent.

    Axes other than these two are held at their first values.
    """
    others = [k for axis in study.axes if axis not in (across, up) for k in axis.keys]
    first = {k: cells[0].point[k] for k in others}
    there = [cell for cell in cells if all(cell.point[k] == text for k, text in first.items())]
    baseline = baseline_of(study, cells)
    policies = sorted(_looks(study, cells), key=lambda name: name != baseline)[:MOST_PANELS]
    of_base = baselines(there, baseline)
    width = 1.3 + max(2.4, 0.45 * len(across.values))
    figure, grid = plt.subplots(
        1, len(policies), figsize=(1.0 + width * len(policies), 3.4), sharey=True, squeeze=False
    )
    percent: dict[str, list[list[float]]] = {}
    for policy in policies[1:]:
        percent[policy] = [[math.nan] * len(across.values) for _ in up.values]
    level = [[math.nan] * len(across.values) for _ in up.values]
    unresolved: set[tuple[str, int, int]] = set()
    for cell in there:
        x = across.values.index(tuple(cell.point[k] for k in across.keys))
        y = up.values.index(tuple(cell.point[k] for k in up.keys))
        base = of_base.get(tuple(cell.point.values()))
        if cell.policy == policies[0]:
            mean = cell.mean(metric)
            level[y][x] = mean.mean if mean is not None else math.nan
        elif cell.policy in percent and base is not None:
            found = cell.against(base, metric)
            if found is not None and found.ratio is not None:
                percent[cell.policy][y][x] = 100 * found.ratio
                if found.verdict == UNRESOLVED:
                    unresolved.add((cell.policy, x, y))
    most = max(
        (abs(v) for rows in percent.values() for row in rows for v in row if not math.isnan(v)), default=1
    )
    for axes, policy in zip(grid[0], policies, strict=True):
        is_base = policy == policies[0]
        rows = level if is_base else percent[policy]
        colours = "viridis" if is_base else ("RdBu" if metric in HIGHER_IS_BETTER else "RdBu_r")
        limits = {} if is_base else {"vmin": -(most or 1), "vmax": most or 1}
        image = axes.pcolormesh(rows, cmap=colours, edgecolors="white", linewidth=0.5, **limits)
        bar = figure.colorbar(image, ax=axes)
        bar.ax.tick_params(labelsize=7)
        if is_base:
            bar.set_label(label_of(metric), fontsize=8)
        name = study.label(policy)
        axes.set_title(name if is_base else f"{name}: % against {study.label(baseline)}", fontsize=9)
        if len(across.values) * len(up.values) <= MOST_LABELLED:
            _write_in(axes, rows, image, lambda x, y, of=policy: (of, x, y) in unresolved, is_base)
        axes.grid(visible=False)
        _ticks(axes.set_xticks, across)
        _ticks(axes.set_yticks, up)
        axes.tick_params(axis="x", rotation=45 if len(across.values) > 6 else 0)
        axes.set_xlabel(_words(across))
    grid[0][0].set_ylabel(_words(up))
    figure.tight_layout(w_pad=2)
    caption = f"{_upper(label_of(metric))} over {_words(across)} and {_words(up)}"
    if len(policies) > 1:
        caption += (
            f"; for the others the paired difference to {study.label(policies[0])} in percent, in brackets where it is "
            "unresolved"
        )
    if any(len(axis.values) > 1 for axis in study.axes if axis not in (across, up)):
        caption += f"; at {', '.join(f'{k} = {_plain(v)}' for k, v in first.items())}"
    return Figure(_file(f"{metric}-map"), caption + ".", figure)


def _write_in(axes: Any, rows: Sequence[Sequence[float]], image: Any, is_open: Any, is_base: bool) -> None:
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            if math.isnan(value):
                continue
            text = f"{value:.3g}" if is_base else f"{value:+.0f}"
            red, green, blue, _ = image.cmap(image.norm(value))
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            axes.text(
                x + 0.5,
                y + 0.5,
                f"({text})" if is_open(x, y) else text,
                ha="center",
                va="center",
                fontsize=6.5,
                color="white" if dark else "black",
            )


def _ticks(set_ticks: Any, axis: Axis) -> None:
    step = -(-len(axis.values) // 12)
    at = range(0, len(axis.values), step)
    set_ticks([i + 0.5 for i in at], [", ".join(map(_plain, axis.values[i])) for i in at])


def _front(plt: Any, study: Study, cells: Sequence[Cell]) -> Figure:
    """Draws each point under each policy by the study's two Pareto metrics; a line joins each policy's Pareto
    front.
    """
    across, up = study.pareto
    figure, axes = plt.subplots(figsize=(6.4, 4.2))
    found = [
        (cell.policy, a.mean, b.mean)
        for cell in cells
        if (a := cell.mean(across)) is not None and (b := cell.mean(up)) is not None
    ]
    best = set(_undominated([(a, b) for _, a, b in found], study.pareto))
    for policy, look in _looks(study, cells).items():
        own = [(a, b) for name, a, b in found if name == policy]
        if not own:
            continue
        plain = {**look, "label": None}
        axes.plot(*zip(*own, strict=True), linestyle="none", alpha=0.35, **plain)
        axes.plot(*zip(*sorted(_undominated(own, study.pareto)), strict=True), **look)
    if best:
        axes.plot(
            *zip(*sorted(best), strict=True),
            linestyle="none",
            marker="o",
            markersize=10,
            markerfacecolor="none",
            markeredgecolor="#444444",
            label="front of all policies",
        )
    set_scales(axes, [a for _, a, _ in found], [b for _, _, b in found])
    axes.set_xlabel(label_of(across))
    axes.set_ylabel(label_of(up))
    _legend(figure, axes)
    caption = (
        f"{_upper(label_of(up))} against {label_of(across)}, a mark per point and policy "
        f"(means over {_runs(study)}). "
        "Lines join the Pareto front of each policy; rings mark the front of all policies together."
    )
    return Figure("pareto", caption, figure)


def _undominated(points: Sequence[tuple[float, float]], metrics: Sequence[str]) -> list[tuple[float, float]]:
    """Returns the Pareto front: points to which no other is at least equal in both metrics and better in one."""
    signs = [-1.0 if metric in HIGHER_IS_BETTER else 1.0 for metric in metrics]
    front: list[tuple[float, float]] = []
    least = math.inf
    for point in sorted(set(points), key=lambda p: (signs[0] * p[0], signs[1] * p[1])):
        if signs[1] * point[1] < least:
            least = signs[1] * point[1]
            front.append(point)
    return front


def _legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.tight_layout()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=min(len(labels), 5))


def _spread(combos: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Returns at most ``MOST_PANELS`` of ``combos``, evenly spaced from the first to the last."""
    n = min(len(combos), MOST_PANELS)
    return [combos[round(i * (len(combos) - 1) / max(n - 1, 1))] for i in range(n)]


def _runs(study: Study) -> str:
    return "1 run" if study.n_runs == 1 else f"{study.n_runs} runs"


def _words(axis: Axis) -> str:
    return ", ".join(map(words_of, axis.keys))


def _plain(text: str) -> str:
    return text.strip('"')


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _file(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)
