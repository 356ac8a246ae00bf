"""Figures of the parts ``streams`` and ``serving``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed.results.plots import plotting, save

_DPI = 120


def draw_streams(folder: Path, values: dict[str, Any]) -> list[str]:
    """Draws tokens per second and latencies of steps over sessions, for each kind of weights. Returns the
    files.
    """
    found = {weights: rows for weights, rows in values["weights"].items() if rows}
    if not found:
        return []
    figure = _figure(3.2 * len(found))
    for (rate, latency), (weights, rows) in zip(
        figure.subplots(len(found), 2, squeeze=False), found.items(), strict=True
    ):
        for n_streams in sorted({row["n_streams"] for row in rows}):
            ours = [row for row in rows if row["n_streams"] == n_streams]
            sessions = [row["n_sessions"] for row in ours]
            label = "one queue" if n_streams == 1 else f"{n_streams} streams"
            (line,) = rate.plot(sessions, [row["tokens_per_s"] for row in ours], "o-", label=label)
            for key, style in (("step_p50_s", "o-"), ("step_p99_s", "^:")):
                named = f"{label}, {key[5:8]}"
                times = [1e3 * row[key] for row in ours]
                latency.plot(sessions, times, style, color=line.get_color(), label=named)
        rate.set(xlabel="sessions at once", ylabel="tokens per s", title=f"{weights} weights", ylim=(0, None))
        latency.set(
            xlabel="sessions at once", ylabel="a step, ms", title=f"{weights} weights", ylim=(0, None)
        )
        for axes in (rate, latency):
            axes.set_xticks(sorted({row["n_sessions"] for row in rows}))
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
    return [_save(figure, folder, "streams.png")]


def draw_serving(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Draws the time of each token with transformer blocks and with the calibrated stub, per request. Returns
    the files.
    """
    if not rows:
        return []
    figure = _figure(3.0 * len(rows))
    for axes, row in zip(figure.subplots(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        for name in ("blocks", "stub"):
            gaps_s = row[f"{name}_gaps_s"]
            axes.plot(range(1, len(gaps_s) + 1), [1e3 * gap_s for gap_s in gaps_s], label=name)
        axes.set(xlabel="token", ylabel="time since the last one, ms", title=f"request {row['request']}")
        axes.set_ylim(0, None)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return [_save(figure, folder, "serving.png")]


def _figure(height: float) -> Any:
    with plotting({}) as plt:
        return plt.Figure(figsize=(8, height), layout="constrained")


def _save(figure: Any, folder: Path, name: str) -> str:
    folder.mkdir(exist_ok=True)
    save(figure, folder / name, dpi=_DPI)
    return f"{folder.name}/{name}"
