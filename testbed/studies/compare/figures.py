"""Figures of a comparison. matplotlib is imported only when they are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from testbed.results.plots import plotting, save_both
from testbed.studies.compare.align import Alignment
from testbed.studies.compare.load import Array, Run
from testbed.studies.compare.tables import ALL, KINDS, is_decode, token_times
from testbed.studies.compare.text import percent

_A, _B = "#1f5a99", "#d1762b"
_STYLE: dict[Any, Any] = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
_MOST_SERVERS = 40


def draw_comparison(out: Path, answer: dict[str, Any], a: Run, b: Run, alignment: Alignment) -> None:
    """Draw ``tokens`` (distributions of times in both runs) and ``hops`` (compute by server), as PNG and PDF.

    Raises ``OSError`` if they cannot be written.
    """
    with plotting(_STYLE) as plt:
        figures = {"tokens": _tokens(plt, answer, a, b, alignment)}
        if answer["hops"]:
            figures["hops"] = _hops(plt, answer)
        for name, figure in figures.items():
            save_both(plt, figure, out, name, tight=True)


def _tokens(plt: Any, answer: dict[str, Any], a: Run, b: Run, alignment: Alignment) -> Any:
    """Draws the distributions of requests' times per token and, if both runs have hops, of single decode
    tokens.
    """
    panels: list[tuple[str, Array, Array]] = [
        ("time per token of a request, all tokens [s]", _per_token(answer, "a"), _per_token(answer, "b"))
    ]
    if a.hops is not None and b.hops is not None:
        of_a, of_b = _decode_times(a, alignment), _decode_times(b, alignment)
        if len(of_a) and len(of_b):
            panels.append(("time of a single token after the first [s]", of_a, of_b))
    figure, row = plt.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 3.4), squeeze=False, layout="constrained"
    )
    for axes, (title, *samples) in zip(row[0], panels, strict=True):
        for side, values, colour, line in zip("ab", samples, (_A, _B), ("-", "--"), strict=True):
            axes.ecdf(values, color=colour, linestyle=line, label=_label(answer[side], side))
            axes.axvline(values.mean(), color=colour, linestyle=":", linewidth=0.9)
        axes.set_xlabel(title)
        axes.set_ylim(0, 1.01)
    row[0][0].set_ylabel("fraction at most that long")
    handles, labels = row[0][0].get_legend_handles_labels()
    handles.append(plt.Line2D([], [], color="grey", linestyle=":", linewidth=0.9))
    figure.legend(handles, [*labels, "means"], frameon=False, loc="outside upper center", ncols=1)
    return figure


def _per_token(answer: dict[str, Any], side: str) -> Array:
    return np.array([row[f"per_token_{side}_s"] for row in answer["requests"]], dtype=np.float64)


def _decode_times(run: Run, alignment: Alignment) -> Array:
    assert run.hops is not None, "asked only where both runs have hops"
    keys, times_s = token_times(run.hops.of(alignment.compared))
    return times_s[is_decode(keys)]


def _hops(plt: Any, answer: dict[str, Any]) -> Any:
    """Draws one panel per kind of step: the mean compute of a hop on each server, A above B, and the
    difference in %.
    """
    hops = answer["hops"]
    servers = list(dict.fromkeys(row["server"] for row in hops if row["server"] != ALL))[:_MOST_SERVERS]
    known = {(row["server"], row["kind"]): row for row in hops}
    kinds = [kind for kind in KINDS if any((server, kind) in known for server in servers)]
    figure, row = plt.subplots(
        1,
        len(kinds),
        figsize=(4.6 * len(kinds), 0.42 * len(servers) + 1.3),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for axes, kind in zip(row[0], kinds, strict=True):
        for at, server in enumerate(servers):
            sample = known[server, kind]["hop_compute_s"] if (server, kind) in known else None
            if sample is None:
                continue
            means = [sample[side]["mean"] for side in "ab"]
            for shift, mean, colour in zip((-0.2, 0.2), means, (_A, _B), strict=True):
                if mean is not None:
                    axes.barh(at + shift, mean, height=0.36, color=colour)
            ratio = sample["difference_ratio"]["mean"]
            note = (
                f"{percent(ratio)} %" if ratio is not None else ("only A" if means[1] is None else "only B")
            )
            end = max(mean for mean in means if mean is not None)
            axes.annotate(note, (end, at), (4, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_xlabel(f"mean compute of a hop, {kind} [s]")
        axes.margins(x=0.22)
        axes.set_xlim(left=0)
    row[0][0].set_yticks(range(len(servers)), servers)
    row[0][0].set_ylim(len(servers) - 0.5, -0.5)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (_A, _B)]
    figure.legend(
        handles,
        [_label(answer[side], side) for side in "ab"],
        frameon=False,
        loc="outside upper center",
        ncols=2,
    )
    return figure


def _label(about: dict[str, Any], side: str) -> str:
    how = about["network"] if about["engine"] == "emulation" else about["engine"]
    compute = f", {about['compute']}" if about["compute"] else ""
    return f"{side.upper()}: {Path(about['path']).name} ({how}{compute})"
