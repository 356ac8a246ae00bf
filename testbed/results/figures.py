"""The report's figures. matplotlib is imported when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from testbed.experiment import Experiment
from testbed.results.logs import RunRecords
from testbed.results.model import HopTable

_MEASURED, _MODEL = "#1f5a99", "#d1762b"
_PHASES = (("queue_s", "#c9c9c9"), ("setup_s", "#e0b64b"), ("prefill", "#d1762b"), ("decode", "#1f5a99"))


def draw_figures(
    folder: Path, experiment: Experiment, records: RunRecords, hops: HopTable, rows: list[dict[str, Any]]
) -> list[tuple[Path, str]]:
    """Draw all figures as PNG and PDF; answers (PNG path, caption)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(exist_ok=True)
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    drawn: list[tuple[Path, str]] = []

    def save(figure: Any, name: str, caption: str) -> None:
        for ending in ("png", "pdf"):
            figure.savefig(folder / f"{name}.{ending}", dpi=130, bbox_inches="tight")
        plt.close(figure)
        drawn.append((folder / f"{name}.png", caption))

    gaps, model = _gap_arrays(records, hops)
    if len(gaps):
        figure, axes = plt.subplots(figsize=(6.4, 3.6))
        for values, label, colour, style in (
            (gaps, "measured", _MEASURED, "-"),
            (model, "model", _MODEL, "--"),
        ):
            ordered = np.sort(values)
            axes.plot(
                ordered, np.arange(1, len(ordered) + 1) / len(ordered), style, label=label, color=colour
            )
        axes.set_xlim(0.98 * min(gaps.min(), model.min()), np.percentile(gaps, 99.5))
        axes.set_xlabel("time of one output token [s] (slowest 0.5 % not shown)")
        axes.set_ylabel("fraction of tokens")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        save(figure, "token_gap_cdf", "Time between consecutive output tokens: measured and modelled.")

        figure, axes = plt.subplots(figsize=(6.4, 3.6))
        error = 100 * (gaps - model) / model
        low, high = np.percentile(error, (0.5, 99.5))
        axes.hist(np.clip(error, low, high), bins=60, color=_MEASURED)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlabel("measured against model [%] (outer 1 % clipped)")
        axes.set_ylabel("tokens")
        save(figure, "token_error", "How far single tokens are from the model.")
    if any(row["ttft_s"] is not None for row in rows):
        save(_timeline(plt, rows), "requests", "Requests over time: queue, setup, prefill, decode.")
        save(_load(plt, experiment, records), "servers", "Sessions that hold attention cache, per server.")
    return drawn


def _gap_arrays(records: RunRecords, hops: HopTable) -> tuple[Any, Any]:
    modelled: dict[tuple[int, int], float] = {}
    for request, token, value in zip(
        hops.request.tolist(), hops.token.tolist(), hops.model_s.tolist(), strict=True
    ):
        modelled[request, token] = modelled.get((request, token), 0.0) + value
    pairs = [
        (t.finished_at_s - t.ready_at_s, modelled[r.index, t.token])
        for r in records.requests
        for t in r.tokens[1:]
    ]
    both = np.array(pairs).reshape(len(pairs), 2)
    return both[:, 0], both[:, 1]


def _timeline(plt: Any, rows: list[dict[str, Any]]) -> Any:
    figure, axes = plt.subplots(figsize=(7.5, max(2.5, min(9.0, 0.09 * len(rows) + 1.5))))
    for row in rows:
        if row["ttft_s"] is None:
            continue
        prefill = row["ttft_s"] - row["queue_s"] - row["setup_s"]
        decode = (row["e2e_s"] or row["ttft_s"]) - row["ttft_s"]
        left = row["arrived_at_s"]
        for width, (_, colour) in zip(
            (row["queue_s"], row["setup_s"], prefill, decode), _PHASES, strict=True
        ):
            axes.barh(row["request"], width, left=left, color=colour, height=0.8, linewidth=0)
            left += width
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for _, colour in _PHASES]
    labels = ["queue", "setup", "prefill", "decode"]
    axes.legend(handles, labels, frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes.set_xlabel("time [s]")
    axes.set_ylabel("request")
    axes.invert_yaxis()
    return figure


def _load(plt: Any, experiment: Experiment, records: RunRecords) -> Any:
    names = [s.name for s in experiment.problem.servers]
    changes: list[list[tuple[float, int]]] = [[] for _ in names]
    for record in records.requests:
        if record.opened_at_s is None or not record.tokens:
            continue
        for server in {hop[0] for hop in record.chain}:
            changes[server] += [(record.opened_at_s, 1), (record.tokens[-1].finished_at_s, -1)]
    used = [i for i, events in enumerate(changes) if events]
    figure, axes = plt.subplots(figsize=(7.5, 3.6))
    for number, server in enumerate(used):
        events = sorted(changes[server])
        axes.step(
            [at for at, _ in events],
            np.cumsum([c for _, c in events]),
            where="post",
            label=names[server],
            linestyle=("-", "--", ":")[number % 3],
        )
    axes.set_xlabel("time [s]")
    axes.set_ylabel("sessions")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
