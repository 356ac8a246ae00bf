"""Figures of measured and fitted times, as PNG and PDF. matplotlib is imported only when they are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from testbed.results.plots import plotting, save_both
from testbed.studies.calibrate.fit import Contention, Fit, time_s
from testbed.studies.calibrate.measure import Sample
from testbed.studies.calibrate.memory import MemoryFit
from testbed.studies.calibrate.points import Point

_STYLE: dict[Any, Any] = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
_COLOURS = ("#1f5a99", "#d1762b", "#3c8d5a", "#8f4a9e", "#b3202a")
_SIZE = (5.6, 3.8)
_NAMES = {"n_input_tokens": "input tokens", "n_blocks": "blocks", "cached_tokens": "cached tokens"}
"""Fields of a point, and their names in figures."""
_STEPS = {"decode": "decode step", "prefill": "prefill"}


def draw_figures(
    folder: Path, fit: Fit, samples: Sequence[Sample], memory: MemoryFit | None
) -> list[tuple[Path, str]]:
    """Draw all figures for which there are samples. Returns (path of the PNG, caption) for each. Raises
    ``OSError``.
    """
    folder.mkdir(exist_ok=True)
    drawn = []
    with plotting(_STYLE) as plt:
        for name, caption, figure in _figures(plt, fit, samples, memory):
            drawn.append((save_both(plt, figure, folder, name, tight=True), caption))
    return drawn


def _figures(
    plt: Any, fit: Fit, samples: Sequence[Sample], memory: MemoryFit | None
) -> Iterator[tuple[str, str, Any]]:
    models = "; solid: the better model, dashed: the paper's."
    prefill, decode = fit.alone("prefill"), fit.alone("decode")
    caption = "Prefill time against input length" + models
    yield "prefill", caption, _lines(plt, fit, prefill, "n_input_tokens", "n_blocks")
    caption = "Decode time of a step against its blocks" + models
    yield (
        "decode_blocks",
        caption,
        _lines(plt, fit, _first_part(decode), "n_blocks", "n_input_tokens"),
    )
    caption = "Decode time of a step against the tokens cached before it" + models
    yield "decode_context", caption, _lines(plt, fit, decode, "cached_tokens", "n_blocks")
    longest = _longest(samples)
    if longest:
        caption = "Time of all decode steps of a session against its output length" + models
        yield "decode_output", caption, _output(plt, fit, longest)
    if fit.contention is not None:
        caption = "How many times as long a decode step takes while several sessions compute at once."
        yield "decode_sessions", caption, _sessions(plt, fit.contention)
    if memory is not None:
        yield "memory", "Memory against blocks and sessions: measured, and fitted.", _memory(plt, memory)


def _first_part(decode: Sequence[Point]) -> list[Point]:
    """Returns one point per number of blocks and input length: that of the first steps."""
    first: dict[tuple[int, int], Point] = {}
    for p in sorted(decode, key=lambda p: p.cached_tokens):
        first.setdefault((p.n_blocks, p.n_input_tokens), p)
    return list(first.values())


def _lines(plt: Any, fit: Fit, points: Sequence[Point], x_name: str, group_name: str) -> Any:
    """Draws medians with quartiles in a colour per group, and the fitted times of both models as lines."""
    figure, axes = plt.subplots(figsize=_SIZE)
    for number, group in enumerate(sorted({getattr(p, group_name) for p in points})):
        colour = _COLOURS[number % len(_COLOURS)]
        members = sorted(
            (p for p in points if getattr(p, group_name) == group), key=lambda p: float(getattr(p, x_name))
        )
        x = [getattr(p, x_name) for p in members]
        y = np.array([p.time_s for p in members]) * 1e3
        spread = np.abs(np.array([[p.low_s, p.high_s] for p in members]).T * 1e3 - y)
        name = f"{group} {_NAMES[group_name]}".removesuffix("s" if group == 1 else "")
        axes.errorbar(x, y, spread, fmt="o", ms=4, capsize=2, color=colour, label=name)
        along = np.linspace(min(x), max(x), 50)
        for model, style in ((fit.better, "-"), (fit.paper, "--")):
            times = [time_s(model.times, replace(members[0], **{x_name: at})) * 1e3 for at in along]
            axes.plot(along, times, style, color=colour, lw=1.1)
    for style, name in (("-", "better model"), ("--", "paper's model")):
        axes.plot([], [], style, color="#222222", lw=1.1, label=name)
    axes.set(xlabel=_NAMES[x_name], ylabel=f"time of a {_STEPS[points[0].kind]}, ms")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _longest(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Returns the decode steps of the longest sessions that ran alone, one list per round."""
    alone = [s for s in samples if s.is_used and s.kind == "decode" and s.n_sessions == 1 and s.is_paced]
    if not alone:
        return []
    most = max(s.n_blocks for s in alone)
    last = max((s for s in alone if s.n_blocks == most), key=lambda s: s.step)
    if last.step == 0:
        return []
    shape = (last.n_blocks, last.n_input_tokens)
    rounds: dict[int, list[Sample]] = {}
    for s in alone:
        if (s.n_blocks, s.n_input_tokens) == shape:
            rounds.setdefault(s.round, []).append(s)
    # A short case of the same round may have the same blocks and length: then its steps are in the list, too.
    # The longest session is on all blocks, which are one range, so that each of its steps has one sample.
    return [_one_run(steps, last.step) for steps in rounds.values()]


def _one_run(steps: Sequence[Sample], last_step: int) -> list[Sample]:
    end = next(i for i, s in enumerate(steps) if s.step == last_step)
    return list(steps[end - last_step : end + 1])


def _output(plt: Any, fit: Fit, runs: Sequence[Sequence[Sample]]) -> Any:
    figure, axes = plt.subplots(figsize=_SIZE)
    tokens = np.arange(1, len(runs[0]) + 1)
    for number, run in enumerate(runs):
        label = "measured, a line per round" if number == 0 else None
        axes.plot(tokens, np.cumsum([s.time_s for s in run]), color="#9db8d6", lw=1.5, label=label)
    first = runs[0][0]
    point = Point("decode", first.n_blocks, first.n_input_tokens, 0.0, 1, 1, 0.0, 0.0, 0.0)
    for model, style, name in ((fit.better, "-", "better model"), (fit.paper, "--", "paper's model")):
        steps = [time_s(model.times, replace(point, cached_tokens=float(s.cached_tokens))) for s in runs[0]]
        axes.plot(tokens, np.cumsum(steps), style, color="#222222", lw=1.1, label=name)
    axes.set(
        xlabel=f"tokens decoded ({first.n_blocks} blocks, {first.n_input_tokens} input tokens)",
        ylabel="time of all steps so far, s",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _sessions(plt: Any, contention: Contention) -> Any:
    figure, axes = plt.subplots(figsize=_SIZE)
    n = np.array([sessions for sessions, _ in contention.ratios])
    axes.plot(n, [ratio for _, ratio in contention.ratios], "o", color=_COLOURS[0], label="measured")
    x = np.array([1, n.max()])
    growth = contention.ratio.value
    axes.plot(x, 1 + growth * (x - 1), "-", color="#222222", lw=1.1, label=f"1 + {growth:.2f} (n - 1)")
    axes.plot(x, [1, 1], "--", color="#222222", lw=1.1, label="paper's model")
    axes.plot(x, x, ":", color="#888888", lw=1.1, label="one after another")
    axes.set(xlabel="sessions at once", ylabel="a step takes, times as long")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _memory(plt: Any, memory: MemoryFit) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    idle = sorted((s for s in memory.samples if s.n_sessions == 0), key=lambda s: s.n_blocks)
    most = max(s.n_blocks for s in memory.samples)
    busy = sorted((s for s in memory.samples if s.n_blocks == most), key=lambda s: s.n_sessions)
    busy_label = f"sessions of {busy[-1].session_tokens} tokens on {most} blocks"
    for axes, some, x, label in (
        (left, idle, [s.n_blocks for s in idle], "blocks, no session"),
        (right, busy, [s.n_sessions for s in busy], busy_label),
    ):
        axes.plot(x, [s.used_bytes / 1e6 for s in some], "o", color=_COLOURS[0], label="measured")
        fitted = [memory.used_bytes(s.n_blocks, s.n_sessions, s.session_tokens) / 1e6 for s in some]
        axes.plot(x, fitted, "-", color="#222222", lw=1.1, label="fitted")
        axes.set(xlabel=label, ylabel="memory in use, MB")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
    return figure
