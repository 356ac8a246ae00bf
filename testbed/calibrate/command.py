"""``testbed calibrate``: measure, fit, and write what scenarios and people need."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from nodes.clock import ScaledClock
from nodes.compute import Compute, ComputeError
from testbed.calibrate.backend import (
    Source,
    default_dtype,
    hidden_states,
    measure_memory,
    open_blocks,
    read_source,
)
from testbed.calibrate.fit import Fit, fit_times
from testbed.calibrate.measure import Sample, measure
from testbed.calibrate.memory import MemoryFit, MemorySample, fit_memory
from testbed.calibrate.plan import OUTPUT_TOKENS, ROUNDS, SESSIONS, Plan, make_plan
from testbed.calibrate.points import points_of
from testbed.calibrate.profile import Subject, profile_text
from testbed.calibrate.report import report_markdown, report_text
from testbed.calibrate.tables import answer_of, samples_csv
from testbed.errors import RunError, UserError
from testbed.rundir import check_new_folder, write_json
from testbed.scenario.fields import checked_name

Announce = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What the command line gives. ``n_blocks`` ``None``: all of the model; ``lengths``: the usual ones."""

    model: Path
    compute: str = "blocks"
    device: str = "cpu"
    dtype: str | None = None
    n_threads: int = 1
    name: str | None = None
    out: Path | None = None
    n_blocks: int | None = None
    lengths: tuple[int, ...] | None = None
    sessions: tuple[int, ...] = SESSIONS
    n_output_tokens: int = OUTPUT_TOKENS
    rounds: int = ROUNDS
    random_weights: bool = False


def numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """``1,2,4`` as given to ``option``. Raises ``UserError``."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f'{option} must be whole numbers such as 16,64,256, not "{text}"') from None


def calibrate_command(options: Options, announce: Announce = lambda _: None) -> tuple[dict[str, Any], str]:
    """Calibrate; answers (JSON object, text). Raises ``UserError`` and ``RunError``."""
    if options.compute != "blocks":
        raise UserError(
            f'--compute must be blocks, not "{options.compute}": only real blocks are calibrated, the stub '
            "takes the times of its profile"
        )
    if options.n_threads < 1:
        raise UserError(f"--threads must be at least 1, not {options.n_threads}")
    source = read_source(options.model)
    name = _name(options, source)
    if options.out is not None:
        check_new_folder(options.out)
    if options.n_blocks is not None and not 1 <= options.n_blocks <= source.n_blocks:
        raise UserError(f"--blocks must be from 1 to the model's {source.n_blocks}, not {options.n_blocks}")
    plan = make_plan(
        options.n_blocks or source.n_blocks,
        source.max_tokens,
        lengths=options.lengths,
        sessions=options.sessions,
        n_output_tokens=options.n_output_tokens,
        rounds=options.rounds,
    )
    dtype = options.dtype or default_dtype(source.config)
    compute = open_blocks(
        source, options.device, dtype, options.n_threads, random_weights=options.random_weights
    )
    began_at_s = time.monotonic()
    try:
        memory_samples, samples = uvloop.run(_measure(compute, plan, source, dtype, announce))
    except ComputeError as error:
        raise RunError(f"the calibration broke: {error}") from error
    finally:
        compute.close()
    subject = _subject(options, source, dtype, compute)
    fit, memory = fit_times(points_of(samples)), fit_memory(memory_samples)
    answer = answer_of(name, subject, fit, memory)
    how = _how(plan, samples, time.monotonic() - began_at_s)
    folder = _write(options, name, subject, fit, memory, samples, answer, how)
    answer["out"] = str(folder)
    files = [f"written to {folder}: profile.toml, report.md, measurements.csv, calibration.json, figures/"]
    return answer, report_text(subject, fit, files)


def _name(options: Options, source: Source) -> str:
    usual = f"{source.folder.resolve().name}-{options.device}"
    name = options.name or re.sub(r"[^A-Za-z0-9._-]+", "-", usual).strip("-._") or "calibrated"
    try:
        return checked_name(name)
    except ValueError as error:
        raise UserError(f"--name {error}") from None


async def _measure(
    compute: Compute, plan: Plan, source: Source, dtype: str, announce: Announce
) -> tuple[list[MemorySample], list[Sample]]:
    clock = ScaledClock()
    per_round = len(plan.cases)

    def progress(done: int, total: int) -> None:
        if done % per_round == 0:
            announce(f"calibrating: round {done // per_round} of {total // per_round} done")

    try:
        memory = await measure_memory(compute, plan)
        samples = await measure(
            plan,
            compute,
            clock,
            lambda n_tokens: hidden_states(n_tokens, source.hidden_size, dtype),
            close=compute.close_session,
            progress=progress,
        )
    finally:
        clock.close()
    return memory, samples


def _subject(options: Options, source: Source, dtype: str, compute: Compute) -> Subject:
    memory_bytes = compute.memory().get("device_bytes", 0.0)
    if not memory_bytes:
        memory_bytes = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return Subject(
        backend=options.compute,
        model=source.folder.resolve().name,
        family=source.family,
        n_blocks=source.n_blocks,
        hidden_size=source.hidden_size,
        token_bytes=compute.token_bytes,
        device=options.device,
        dtype=dtype,
        threads=options.n_threads if options.device == "cpu" else None,
        memory_bytes=memory_bytes,
    )


def _how(plan: Plan, samples: Sequence[Sample], took_s: float) -> list[str]:
    n_used = sum(sample.is_used for sample in samples)
    return [
        f"Measured in {took_s:.0f} s: {len(plan.cases)} cases in {plan.rounds} rounds of different order after "
        f"{plan.n_warm_up} to warm up; {len(samples)} samples, {n_used} used.",
    ]


def _write(
    options: Options,
    name: str,
    subject: Subject,
    fit: Fit,
    memory: MemoryFit | None,
    samples: Sequence[Sample],
    answer: dict[str, Any],
    how: Sequence[str],
) -> Path:
    from testbed.calibrate.figures import draw_figures

    folder = options.out or Path("runs") / f"calibrate-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "measurements.csv").write_text(samples_csv(samples), encoding="utf-8")
        write_json(folder / "calibration.json", answer)
        (folder / "profile.toml").write_text(profile_text(name, fit, subject), encoding="utf-8")
        drawn = draw_figures(folder / "figures", fit, samples, memory)
        figures = [(str(path.relative_to(folder)), caption) for path, caption in drawn]
        report = report_markdown(name, subject, fit, memory, figures, how)
        (folder / "report.md").write_text(report, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another with --out") from error
    return folder
