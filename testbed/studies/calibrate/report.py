"""The results of a calibration for people: the tables on the terminal, and ``report.md``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from testbed.studies.calibrate.batches import BatchFit
from testbed.studies.calibrate.client import ClientFit
from testbed.studies.calibrate.fit import Fit
from testbed.studies.calibrate.linear import Estimate, LinearFit
from testbed.studies.calibrate.memory import MemoryFit
from testbed.studies.calibrate.profile import Subject
from testbed.studies.calibrate.tables import BATCH_ESTIMATES, ESTIMATES
from testbed.studies.calibrate.verdict import show_s, verdict

_NONE = "-"


def _shown(estimate: Estimate) -> str:
    if not estimate.value:
        return _NONE
    error = "" if estimate.error is None else f" ± {100 * estimate.error / estimate.value:.1f} %"
    return show_s(estimate.value) + error


def _rows(fit: Fit, client: ClientFit | None) -> Iterator[tuple[str, str, str]]:
    """Yields (name, value of the paper's model, value of the better model)."""
    for what, name in ESTIMATES:
        yield what, _shown(fit.paper.estimate(name)), _shown(fit.better.estimate(name))
    if client is not None:
        yield "client (per output token)", _NONE, show_s(client.token.time_s)
    for kind in ("decode", "prefill"):
        paper: LinearFit = getattr(fit.paper, kind)
        better: LinearFit = getattr(fit.better, kind)
        yield f"{kind}: R²", f"{paper.r2:.5f}", f"{better.r2:.5f}"
        yield f"{kind}: largest residual", _percent(paper.max_ratio), _percent(better.max_ratio)
        yield f"{kind}: rms residual", _percent(paper.rms_ratio), _percent(better.rms_ratio)


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def report_text(
    subject: Subject,
    fit: Fit,
    client: ClientFit | None,
    files: Sequence[str],
    batches: BatchFit | None = None,
) -> str:
    """Returns the text for the terminal: tables, findings, and the lines ``files``."""
    rows = [("", "paper's model", "better model"), *_rows(fit, client)]
    wide = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [subject.words, ""]
    lines += [f"{what:<{wide[0]}}  {paper:>{wide[1]}}  {better:>{wide[2]}}" for what, paper, better in rows]
    if batches is not None:
        width = max(len(what) for what, _ in _batch_rows(batches))
        lines += ["", *(f"{what:<{width}}  {value}" for what, value in _batch_rows(batches))]
    lines += ["", *verdict(fit, client, batches)]
    if files:
        lines += ["", *files]
    return "\n".join(lines)


def report_markdown(
    name: str,
    subject: Subject,
    fit: Fit,
    memory: MemoryFit | None,
    client: ClientFit | None,
    figures: Sequence[tuple[str, str]],
    how: Sequence[str],
    batches: BatchFit | None = None,
) -> str:
    """Returns the text of ``report.md``. ``figures``: (path, caption); ``how``: lines on how it was
    measured.
    """
    lines = [f"# Calibration of {name}", "", f"{subject.words}.", "", *how, "", "## Findings", ""]
    lines += [f"- {sentence}" for sentence in verdict(fit, client, batches)]
    lines += ["", "## Fits", "", "| | the paper's model | the better model |", "| --- | ---: | ---: |"]
    lines += [f"| {what} | {paper} | {better} |" for what, paper, better in _rows(fit, client)]
    lines += [
        "",
        "± is one standard error from the residuals. Both models are fitted to the medians of equal conditions, "
        "one session at a time, so that relative errors weigh the same; residuals are relative.",
        "",
        *_contention_lines(fit),
        *_batch_lines(batches),
        *_memory_lines(memory),
        *(f"![{caption}]({path})\n" for path, caption in figures),
    ]
    lines += [
        "## Use it",
        "",
        "```toml",
        'hardware_files = ["profile.toml"]    # at the top of the scenario, relative to it',
        "",
        "[[servers]]",
        f'hardware = "{name}"    # {name}-paper: the same by the paper\'s model',
        "```",
    ]
    if client is not None:
        lines += [
            "",
            f"The client of such a scenario takes {show_s(client.token.time_s)} per output token; "
            "`[compute] hub_token` of the scenario replaces that.",
        ]
    return "\n".join(lines) + "\n"


def _contention_lines(fit: Fit) -> list[str]:
    contention = fit.contention
    if contention is None:
        return []
    lines = ["## Sessions at once", "", "| sessions | a step takes, times as long |", "| ---: | ---: |"]
    lines += [f"| {n} | {ratio:.3f} |" for n, ratio in contention.ratios]
    growth = contention.ratio
    error = "" if growth.error is None else f" ± {growth.error:.3f}"
    lines += ["", f"Fitted: 1 + {growth.value:.3f}{error} per further session, R² {contention.r2:.4f}.", ""]
    return lines


def _batch_rows(batches: BatchFit) -> list[tuple[str, str]]:
    """Returns (name, estimate) for steps of several sessions."""
    rows = [("steps of several sessions", "")]
    return rows + [(what, _shown(batches.fit.estimates[name])) for what, name in BATCH_ESTIMATES]


def _batch_lines(batches: BatchFit | None) -> list[str]:
    if batches is None:
        return []
    rows = _batch_rows(batches)[1:]
    lines = [
        "## Steps of several sessions",
        "",
        "| | |",
        "| --- | ---: |",
        *(f"| {w} | {v} |" for w, v in rows),
        "",
    ]
    lines += [
        "| blocks | decodes | cached tokens | prompt | measured | fitted | |",
        "| ---: " * 6 + "| --- |",
    ]
    for p in batches.points:
        numbers = p.n_blocks, p.n_decodes, f"{p.cached_tokens:.0f}", p.n_prompt_tokens
        times = show_s(p.time_s), show_s(batches.fitted_s(p)), "held out" if p.is_held_out else ""
        lines.append(f"| {' | '.join(map(str, (*numbers, *times)))} |")
    return [*lines, ""]


def _memory_lines(memory: MemoryFit | None) -> list[str]:
    if memory is None:
        return []
    fit = memory.fit
    return [
        "## Memory",
        "",
        f"A block takes {_bytes(memory.block_bytes)} (s_m), a token in a block's attention cache "
        f"{_bytes(memory.token_bytes)}, what is there anyway {_bytes(memory.base_bytes)}; R² {fit.r2:.5f}, "
        f"off by at most {100 * fit.max_ratio:.1f} %.",
        "",
    ]


def _bytes(estimate: Estimate) -> str:
    value: Any = estimate.value
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} GB"
