"""The report's figures. Imports matplotlib only when one is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nodes.records import Rerouted
from testbed.experiments.experiment import Experiment
from testbed.faultkinds import KINDS
from testbed.records.events import FaultHappened
from testbed.records.links import link_name
from testbed.records.requests import RequestRow
from testbed.records.summary import MOST_LINKS
from testbed.results.hop_table import HopTable
from testbed.results.logs import RequestRecord, RunRecords
from testbed.results.plots import plotting, save_both
from testbed.results.tables import UseOverTime
from testbed.rundir import own_folder

Array = NDArray[np.float64]
Rows = Sequence[RequestRow]

_MEASURED, _MODEL, _BAD = "#1f5a99", "#d1762b", "#b3202a"
_GOOD, _MANY_FAULTS, _MOVE = "#2b7a3d", 50, "#7a3d8a"
_PHASES = {"queue": "#c9c9c9", "setup": "#e0b64b", "prefill": "#d1762b", "decode": "#1f5a99"}
_STYLE: dict[Any, Any] = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
_SMALL_STEPS = 0.1
"""Height in inches of a row in figures with a row per request."""


def draw_figures(
    folder: Path,
    experiment: Experiment,
    records: RunRecords,
    hops: HopTable,
    rows: Rows,
    links: UseOverTime,
) -> list[tuple[Path, str]]:
    """Draw all figures as PNG and PDF into ``folder``; returns (PNG path, caption). Raises ``OSError``."""
    own_folder(folder)
    drawn: list[tuple[Path, str]] = []
    with plotting(_STYLE) as plt:
        for name, caption, figure in _figures(plt, experiment, records, hops, rows, links):
            drawn.append((save_both(plt, figure, folder, name, tight=True), caption))
    return drawn


def _figures(
    plt: Any,
    experiment: Experiment,
    records: RunRecords,
    hops: HopTable,
    rows: Rows,
    links: UseOverTime,
) -> Iterator[tuple[str, str, Any]]:
    """Yield (file name, caption, figure) of each figure that has something to show."""
    gaps, model = _gaps(records, hops)
    if len(gaps):
        caption = "Time between consecutive output tokens, all requests together: measured and modelled."
        yield "token_gap_cdf", caption, _cdf(plt, gaps, model)
        caption = "How far single decode tokens are from the model; positive: slower than the model."
        yield "token_error", caption, _errors(plt, 100 * (gaps / model - 1))
    if any(row.arrived_at_s is not None for row in rows):
        caption = (
            "Every request from its arrival to its end, by phase; a cross marks one that did not complete."
        )
        more = "Red lines: a fault hit a server. Dots: a session recovered."
        caption += _faults_caption(records, more) + _moves_caption(records)
        yield "requests", caption, _timeline(plt, records, rows)
    if any(r.opened_at_s is not None and r.last_seen_at_s > r.opened_at_s for r in records.requests):
        caption = (
            "Sessions whose chain includes each server, over time (a failed server until it is replaced, "
            "too), and the most at any time."
        )
        more = "Red: a fault hit it. Green: it serves (again)."
        caption += _faults_caption(records, more) + _moves_caption(records)
        yield "servers", caption, _load(plt, experiment, records)
    if links.use_ratio:
        shown = list(links.use_ratio)[:MOST_LINKS]
        most = (
            f"The {len(shown)} busiest of {len(links.use_ratio)} links"
            if len(shown) < len(links.use_ratio)
            else "Links"
        )
        caption = f"{most} over time: how much of each {links.width_s:g} s they carried hidden states, and of the run."
        yield "links", caption, _use(plt, links, shown)


def _use(plt: Any, links: UseOverTime, shown: Sequence[tuple[str, str]]) -> Any:
    """Draw a row per link."""
    use = np.array([links.use_ratio[link] for link in shown])
    instants = np.arange(use.shape[1] + 1) * links.width_s
    figure, axes = plt.subplots(figsize=(7.5, 0.28 * len(shown) + 1.4))
    edges = np.arange(len(shown) + 1) - 0.5
    mesh = axes.pcolormesh(instants, edges, use, cmap="Purples", vmin=0, vmax=1)
    figure.colorbar(mesh, ax=axes, label="use", pad=0.12, format=lambda ratio, _: f"{ratio:.0%}")
    axes.set_yticks(range(len(shown)), [link_name(*link) for link in shown])
    for row, link in enumerate(shown):
        axes.annotate(
            f"{links.of_run[link]:.0%}",
            (1.01, row),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
        )
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlabel("time since the start [s]")
    return figure


def _faults_caption(records: RunRecords, what: str) -> str:
    return f" {what}" if records.faults else ""


def _moves_caption(records: RunRecords) -> str:
    return " Violet: a server drains, loads and opens other blocks." if records.moves else ""


def _bad_and_good(records: RunRecords) -> Iterator[tuple[float, str, str]]:
    """Yield (instant, server, colour) of each fault, and of each server that begins to serve (again)."""
    for event in records.faults:
        if event.at_s is not None and event.applies:
            kind = KINDS.get(event.kind) if isinstance(event, FaultHappened) else None
            is_bad = isinstance(event, FaultHappened) and (kind is None or kind.is_bad)
            yield event.at_s, event.server, _BAD if is_bad else _GOOD


def _held(record: RequestRecord) -> list[tuple[int, float, float]]:
    """Return (server, from, until) of a session's hops; a lost hop lasts until it is replaced."""
    assert record.opened_at_s is not None
    spans: list[tuple[int, float, float]] = []
    active = [(server, first, last, record.opened_at_s) for server, first, last in record.chain]
    for event in record.recoveries:
        if isinstance(event, Rerouted):
            (lost_first, lost_last), at_s = event.blocks, event.at_s
            kept = []
            for server, first, last, since_s in active:
                if first < lost_last and last > lost_first:
                    spans.append((server, since_s, at_s))
                else:
                    kept.append((server, first, last, since_s))
            active = kept + [(server, first, last, at_s) for server, first, last in event.hops]
    spans += [(server, since_s, record.last_seen_at_s) for server, _, _, since_s in active]
    held: list[tuple[int, float, float]] = []
    for server, since_s, until_s in sorted(spans):  # two hops on one server count as one session
        if held and held[-1][0] == server and held[-1][2] >= since_s:
            _, since_s, ends_s = held.pop()
            until_s = max(ends_s, until_s)
        held.append((server, since_s, until_s))
    return held


def _gaps(records: RunRecords, hops: HopTable) -> tuple[Array, Array]:
    """Return the times of all decode tokens in seconds, measured and modelled."""
    sums = hops.tokens()
    measured = [t.at_s - t.ready_at_s for r in records.requests for t in r.decode_steps]
    return np.array(measured), sums.model_s[sums.token > 0]


def _cdf(plt: Any, gaps: Array, model: Array) -> Any:
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    lines = ((gaps, "measured", _MEASURED, "-"), (model, "model", _MODEL, "--"))
    for values, label, colour, style in lines:
        ordered = np.sort(values)
        share = np.arange(1, len(ordered) + 1) / len(ordered)
        axes.step(ordered, share, style, where="post", label=label, color=colour)
    axes.set_xlabel("time of one output token [s]")
    axes.set_ylabel("fraction of tokens")
    axes.set_ylim(0, 1.01)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    return figure


def _errors(plt: Any, error: Array) -> Any:
    """Draw a histogram of the middle 99 %; the axis label has the number of tokens outside and the range."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    low, high = np.percentile(error, (0.5, 99.5))
    inside = error[(error >= low) & (error <= high)]
    axes.hist(inside, bins=60, color=_MEASURED)
    axes.axvline(0, color="black", linewidth=0.8)
    median = float(np.median(error))
    axes.axvline(median, color=_MODEL, linestyle="--", label=f"median {median:+.3g} %")
    outside = len(error) - len(inside)
    note = f" ({outside} outside; range {error.min():+.3g} to {error.max():+.3g} %)" if outside else ""
    axes.set_xlabel(f"measured against model [%]{note}")
    axes.set_ylabel("tokens")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    return figure


def _timeline(plt: Any, records: RunRecords, rows: Rows) -> Any:
    ends = {record.index: record.last_seen_at_s for record in records.requests}
    figure, axes = plt.subplots(figsize=(7.5, max(2.4, min(9.0, _SMALL_STEPS * len(rows) + 1.4))))
    for row in rows:
        at_s = row.arrived_at_s
        if at_s is None:
            continue
        end_s = ends[row.request]
        cuts = [at_s]
        if row.times.queue_s is not None:
            cuts.append(at_s + row.times.queue_s)
        if row.times.ttft_s is not None:
            cuts += [cuts[-1] + (row.times.setup_s or 0.0), at_s + row.times.ttft_s]
        cuts.append(end_s)
        for start, stop, colour in zip(cuts, cuts[1:], _PHASES.values(), strict=False):
            axes.barh(row.request, stop - start, left=start, color=colour, height=0.8, linewidth=0)
        if not row.is_completed:
            axes.plot(end_s, row.request, "x", color=_BAD, markersize=5, clip_on=False)
    bad = [at_s for at_s, _, colour in _bad_and_good(records) if colour == _BAD]
    for at_s in bad:
        axes.axvline(at_s, color=_BAD, linewidth=1.0 if len(bad) < _MANY_FAULTS else 0.4, alpha=0.6)
    for move in records.moves:
        axes.axvspan(move.closed_at_s, move.open_at_s, color=_MOVE, alpha=0.12, linewidth=0)
    for replay in records.replays:
        axes.plot(replay.at_s, replay.request, "o", color="black", markersize=2.5, linewidth=0)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in _PHASES.values()]
    labels = list(_PHASES)
    if any(not row.is_completed for row in rows):
        handles.append(plt.Line2D([], [], color=_BAD, marker="x", linestyle=""))
        labels.append("not completed")
    axes.legend(
        handles, labels, frameon=False, ncols=len(labels), loc="lower center", bbox_to_anchor=(0.5, 1.0)
    )
    axes.set_xlabel("time since the start [s]")
    axes.set_ylabel("request")
    numbers = [row.request for row in rows]
    axes.set_ylim(max(numbers) + 0.6, min(numbers) - 0.6)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlim(left=0)
    return figure


def _load(plt: Any, experiment: Experiment, records: RunRecords) -> Any:
    """Draw a row per server, because lines of servers with the same sessions would hide each other."""
    names = [s.name for s in experiment.problem.servers]
    changes: list[tuple[float, int, int]] = []
    for record in records.requests:
        if record.opened_at_s is not None:
            for server, since_s, until_s in _held(record):
                changes += [(since_s, 1, server), (until_s, -1, server)]
    changes.sort()
    instants = sorted({0.0, *(at for at, _, _ in changes)})
    column = {at: i for i, at in enumerate(instants)}
    steps = np.zeros((len(names), len(instants)))
    for at, change, server in changes:
        steps[server, column[at]] += change
    active = np.cumsum(steps, axis=1)[:, :-1]
    figure, axes = plt.subplots(figsize=(7.5, max(2.0, min(9.0, 0.28 * len(names) + 1.2))))
    edges = np.arange(len(names) + 1) - 0.5
    mesh = axes.pcolormesh(instants, edges, active, cmap="Blues", vmin=0, vmax=max(1.0, active.max()))
    bar = figure.colorbar(mesh, ax=axes, label="sessions", pad=0.12)
    bar.locator.set_params(integer=True)
    bar.update_ticks()
    peaks = [int(peak) for peak in active.max(axis=1)]
    if len(names) <= 40:
        axes.set_yticks(range(len(names)), names)
        for server, peak in enumerate(peaks):
            axes.annotate(
                f"max {peak}", (1.01, server), xycoords=("axes fraction", "data"), va="center", fontsize=8
            )
    else:
        axes.set_ylabel("server")
    for move in records.moves:
        row = names.index(move.server)
        axes.hlines(row, move.closed_at_s, move.open_at_s, color=_MOVE, linewidth=2.5)
    for at_s, name, colour in _bad_and_good(records):
        row = names.index(name)
        axes.vlines(at_s, row - 0.5, row + 0.5, color=colour, linewidth=1.2)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("time since the start [s]")
    return figure
