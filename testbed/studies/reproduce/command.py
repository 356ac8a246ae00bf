"""`testbed reproduce paper`: does the runs that are missing, then writes tables and figures."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from testbed.errors import UserError
from testbed.studies.reproduce.commands import settings_lines
from testbed.studies.reproduce.duel import duel_lines
from testbed.studies.reproduce.explain import breakdown_lines, concurrency_lines
from testbed.studies.reproduce.figures import draw_breakdown, draw_sweeps
from testbed.studies.reproduce.measured import SOURCES, fits, measured_cells, measured_lines
from testbed.studies.reproduce.measured import summary as measured_summary
from testbed.studies.reproduce.runs import Results, begin_runs, task_of
from testbed.studies.reproduce.settings import SWEEPS, TABLES, Setting, settings_of
from testbed.studies.reproduce.sweeps import run_time_lines, sweep_lines
from testbed.studies.reproduce.tables import (
    block_lines,
    deviations,
    mismatch_lines,
    run_time_table,
    summary,
    table_lines,
)
from testbed.studies.sweep.disk import FIGURES, make_folder, save_text
from testbed.studies.sweep.pool import Local, n_workers, sigterm_as_ctrl_c
from testbed.studies.sweep.progress import with_progress
from testbed.studies.sweep.runs import Record
from testbed.studies.sweep.store import Lines, read_records

ONLY = ("tables", "figures")
RESULTS = "results.jsonl"
DOCUMENTS = ("tables.md", "run-times.md", "sweeps.md")
DEFAULT_OUT = Path("runs") / "reproduce-paper"
MAX_RUNS = 1000
"""So many runs take hours; the results of ten times as many would not fit into memory."""


def reproduce_command(
    only: str | None, n_runs: int, seed: int, out: Path | None, jobs: int | None
) -> tuple[dict[str, Any], str]:
    """Do the reproduction, or continue one whose folder ``out`` has some of the runs already.

    Run r of each setting has the seed ``seed + r``. Returns the object for ``--json`` and the text for the
    terminal. Raises ``UserError`` for invalid options and if ``out`` holds something else;
    ``RunError`` if a worker dies or the disk is full or read-only. Results stored until then are kept.
    """
    _check(only, n_runs, seed, jobs)
    out = out or DEFAULT_OUT
    settings = settings_of(only)
    seeds = range(seed, seed + n_runs)
    make_folder(out, RESULTS, DOCUMENTS)
    began_at = time.monotonic()
    with sigterm_as_ctrl_c(), Lines(out / RESULTS) as lines:
        done = read_records(lines)
        n_computed = _complete(lines, done, settings, seeds, n_workers(jobs))
        computed_s = time.monotonic() - began_at
        collected = Results(done, settings, seeds)
        files = list(_write(out, collected, only, seeds))
    answer: dict[str, Any] = {
        "out": str(out),
        "runs": n_runs,
        "seed": seed,
        "n_settings": len(settings),
        "n_computed": n_computed,
        "n_found": len(settings) * n_runs - n_computed,
        "computing_s": round(computed_s, 3),
        "total_s": round(time.monotonic() - began_at, 3),
        "files": [str(file) for file in files],
    }
    text = [
        f"{len(settings)} settings x {n_runs} runs: {n_computed} computed in {computed_s:.0f} s, "
        f"{answer['n_found']} found in {out}"
    ]
    if only != "figures":
        answer["deviations"] = {
            variant.name: [{**cell._asdict(), "ratio": cell.ratio} for cell in deviations(collected, variant)]
            for variant in TABLES
        }
        text += [f"{v.title}: {summary(deviations(collected, v))}" for v in TABLES]
        cells = measured_cells(collected)
        answer["measured"] = [
            {**cell._asdict(), "ratios": {source: cell.ratio(source) for source in SOURCES}} for cell in cells
        ]
        answer["fits"] = [fit._asdict() for fit in fits(cells)]
        text += measured_summary(cells)
    documents = [file.name for file in files if file.suffix == ".md"]
    text.append(
        f"written: {', '.join(documents)} and {len(files) - len(documents)} figures (PNG and PDF) in {out}"
    )
    return answer, "\n".join(text)


def _check(only: str | None, n_runs: int, seed: int, jobs: int | None) -> None:
    if only is not None and only not in ONLY:
        raise UserError(f'--only "{only}" is unknown; valid: {", ".join(ONLY)}')
    if n_runs < 2:
        raise UserError(f"--runs must be at least 2 for confidence intervals, not {n_runs}")
    if n_runs > MAX_RUNS:
        raise UserError(f"--runs must be at most {MAX_RUNS}, not {n_runs}")
    if seed < 0:
        raise UserError(f"--seed must not be negative, but is {seed}")
    n_workers(jobs)


def _complete(
    lines: Lines, done: dict[str, Record], settings: Sequence[Setting], seeds: Sequence[int], jobs: int
) -> int:
    """Do the missing runs, store them and add them to ``done``. Returns how many they were."""
    tasks = [
        task for seed in seeds for setting in settings if (task := task_of(setting, seed)).key not in done
    ]
    random.Random(0).shuffle(tasks)  # long and short ones mixed, for a better estimate of the time left
    if not tasks:
        return 0
    n_left = len(tasks)
    found = Local(jobs).results(begin_runs, None, [[task] for task in tasks])
    with closing(found), closing(with_progress(found, n_left)) as shown:
        try:
            for task, record in shown:
                lines.append(record)
                done[task.key] = record
                n_left -= 1
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped; {n_left} runs are left: the same command goes on") from None
    return len(tasks)


def _document(lines: Sequence[str]) -> str:
    return "\n\n".join(lines) + "\n"


def _write(out: Path, collected: Results, only: str | None, seeds: range) -> Iterator[Path]:
    about = (
        f"Written by `testbed reproduce paper --runs {len(seeds)} --seed {seeds.start}`. Every number is the "
        f"mean of {len(seeds)} Monte-Carlo runs (seeds {seeds.start} to {seeds[-1]}) ± the half-width of its "
        "95 % confidence interval (Student's t). "
        'Policies marked "every 5th run" take part in these runs only.'
    )
    if only != "figures":
        lines = ["# The paper's tables, reproduced", about, *mismatch_lines(), *table_lines(collected)]
        lines += [*measured_lines(collected)]
        lines += [*breakdown_lines(collected), *concurrency_lines(collected), *block_lines(collected)]
        lines += [*duel_lines(collected, TABLES), *settings_lines(seeds)]
        yield save_text(out / "tables.md", _document(lines))
        yield from draw_breakdown(out / FIGURES, collected)
    run_times = [
        "# Run times",
        "Processor time in milliseconds for all decisions in one run, the placement and all routes: mean ± 95 %. It is "
        "measured while the runs are computed, so it differs every time.",
    ]
    if only != "figures":
        run_times += [
            "## The tables' settings",
            "As the paper states them, 100 requests.",
            run_time_table(collected),
        ]
    if only != "tables":
        run_times += run_time_lines(collected)
    yield save_text(out / "run-times.md", _document(run_times))
    if only != "tables":
        lines = ["# The paper's sweeps, reproduced", about, *sweep_lines(collected)]
        yield save_text(out / "sweeps.md", _document([*lines, *duel_lines(collected, SWEEPS)]))
        yield from draw_sweeps(out / FIGURES, collected)
