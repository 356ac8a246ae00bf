"""``testbed sweep``: does the runs that are missing, then writes a table of all runs, means, figures and a
page.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from policies.registry import offer
from testbed.errors import UserError
from testbed.experiments.filesread import files_read
from testbed.experiments.inputs import INPUTS, keep_inputs
from testbed.experiments.provenance import PROVENANCE, provenance
from testbed.experiments.units import counted
from testbed.results.tables import write_table
from testbed.rundir import STUDY, STUDY_PAGE, write_json
from testbed.studies.sweep.axes import Point
from testbed.studies.sweep.contrast import cells_of
from testbed.studies.sweep.disk import make_folder, save_text, writing
from testbed.studies.sweep.documents import csv_text, header_and_rows, latex, many_text, markdown, notes
from testbed.studies.sweep.engines import engines_of, engines_text
from testbed.studies.sweep.executors import LOCAL, executor_of
from testbed.studies.sweep.figures import draw_figures
from testbed.studies.sweep.kept import REQUESTS, STORED, Kept
from testbed.studies.sweep.pool import Executor, sigterm_as_ctrl_c
from testbed.studies.sweep.progress import with_progress
from testbed.studies.sweep.runs import (
    FAILED,
    OK,
    REAL,
    Record,
    Run,
    Runner,
    Setup,
    case_of,
    key_of,
    lost_record,
)
from testbed.studies.sweep.store import Lines, read_records
from testbed.studies.sweep.study import Options, Study, call_of, read_study
from testbed.studies.sweep.table import RESULTS, Row, results_table
from testbed.studies.sweep.webpage import page_text

RUNS = "runs.jsonl"
PAGE = STUDY_PAGE
TABLES = ("table.md", "table.csv", "table.tex")
MAX_RUNS = 1_000_000
_MOST_REASONS = 10
_LOOKING_S = 10.0
_MOST_TRIED = 20


Shown = Callable[[Iterable[tuple[Run, Record]], int], Generator[tuple[Run, Record], None, None]]
"""Called with the runs as they are done and their number; yields the same, and shows the progress."""


class Task(NamedTuple):
    """A run and the point of the study that it belongs to."""

    point: Point
    run: Run


def sweep_command(
    target: str, options: Options, out: Path, executor: str, jobs: int | None
) -> tuple[dict[str, Any], str, int]:
    """Do a study, or continue one whose folder ``out`` has some of the runs already.

    ``executor``: ``local`` or ``ray``. ``jobs``: how many workers (None: one per CPU). Returns the object for
    ``--json``, the text for the terminal, and the exit code (1 if a run failed). Raises ``UserError`` for
    invalid options and if ``out`` holds anything else; ``RunError`` if a worker dies or the disk is full or
    read-only. Results stored until then are kept.
    """
    began_at_s = time.monotonic()
    study = read_study(target, options)
    workers = workers_of(study, executor, jobs)
    with sigterm_as_ctrl_c(), measured(study, out, workers) as results:
        computed_s = time.monotonic() - began_at_s
        files = write_study(out, study, results) if results.rows or not results.stopped else []
        if results.stopped:
            so_far = f"; {out / PAGE} shows those that are done" if files else ""
            raise KeyboardInterrupt(f"{results.stopped}{so_far}")
    rows, n_computed, own_s = results.rows, results.n_computed, results.own_s
    n_runs, statuses = len(rows), Counter(row.record.status for row in rows)
    engines = engines_of(row.record for row in rows)
    about = notes(study, cells_of(rows)) if rows else []
    answer: dict[str, Any] = {
        "out": str(out),
        "scenario": str(study.target),
        "engine": engines[0].engine if engines else study.engine,
        "engine_why": engines[0].engine_why if engines else None,
        "engines": [share._asdict() for share in engines],
        "n_runs": n_runs,
        "n_computed": n_computed,
        "n_found": n_runs - n_computed,
        "statuses": dict(sorted(statuses.items())),
        "reasons": dict(_reasons(rows)),
        "notes": about,
        "executor": executor,
        "jobs": workers.n_jobs,
        "own_s": round(own_s, 3),
        "computing_s": round(computed_s, 3),
        "total_s": round(time.monotonic() - began_at_s, 3),
        "files": [str(file) for file in files],
    }
    text = [
        f"{counted(n_runs, 'runs')}: {n_computed} computed in {computed_s:.1f} s, {answer['n_found']} found in {out}"
    ]
    text += engines_text(engines)
    text += [f"{count} x {reason}" for reason, count in _reasons(rows)]
    text += about
    text.append(f"{out / PAGE} shows the results; {out / RESULTS} has a row per run")
    return answer, "\n".join(text), 1 if statuses[FAILED] else 0


def workers_of(study: Study, executor: str, jobs: int | None) -> Executor:
    """Returns what does the runs of ``study``: ``jobs`` workers (None: one per CPU) of the executor of that name.

    Raises ``UserError`` if it does not exist, or not for this study.
    """
    if study.engine == REAL and jobs not in (None, 1):
        raise UserError(
            "runs in real time measure this machine, so only one runs at a time: leave out --jobs or "
            "--engine real"
        )
    if study.engine == REAL and executor != LOCAL:
        raise UserError(
            f"runs in real time measure this machine: leave out --executor {executor} or --engine real"
        )
    workers = executor_of(executor, 1 if study.engine == REAL else jobs)
    n_most = study.n_points * max(len(study.policies), 1) * study.n_runs
    if n_most > MAX_RUNS:
        raise UserError(
            f"the study has {n_most:,} runs, but at most {MAX_RUNS:,} are allowed; give fewer values or a "
            "smaller --runs"
        )
    return workers


class Measured(NamedTuple):
    """The results of a study: one row per run, and the seeds.

    ``n_computed``: how many of the runs this command did. ``own_s``: the sum of their durations in real
    seconds. ``kept``: the rows per request, if the study keeps them. ``stopped``: what is left, if the command was
    stopped before all were done; then there are rows of those that are.
    """

    rows: list[Row]
    seeds: range
    n_computed: int
    own_s: float
    kept: Kept | None = None
    stopped: str = ""


@contextmanager
def measured(study: Study, out: Path, workers: Executor, shown: Shown = with_progress) -> Iterator[Measured]:
    """Yields the results of ``study``: reads those that the folder ``out`` has, computes and stores the
    missing ones.

    The folder is locked against other commands until the body ends. ``shown`` passes on the runs as they are done,
    and shows how many are. Raises the errors of ``sweep_command``.
    """
    with files_read() as read:
        seeds = _checked_seeds(study)
    read.add(study.read)
    groups = [
        [Task(point, study.run(point, policy, seed)) for seed in study.seeds(policy, seeds)]
        for point in study.points
        for policy in study.policies or (None,)
    ]
    make_folder(out, RUNS, (STUDY, STORED, PROVENANCE, RESULTS, REQUESTS, PAGE, *TABLES))
    with ExitStack() as opened:
        lines = opened.enter_context(Lines(out / RUNS))
        _claim(out, study)
        kept = Kept(opened.enter_context(Lines(out / STORED))) if study.keeps_requests else None
        with writing(out / PROVENANCE):
            write_json(out / PROVENANCE, provenance())
        if study.given is not None and not study.objects:
            with writing(out / INPUTS):
                keep_inputs(out, call_of(*study.given), read)
        else:  # those of an earlier command are not what these results are computed from
            shutil.rmtree(out / INPUTS, ignore_errors=True)
        rows, n_computed, own_s, stopped = _complete(study, groups, lines, kept, workers, shown)
        yield Measured(rows, seeds, n_computed, own_s, kept, stopped)


def _checked_seeds(study: Study) -> range:
    """Returns the seeds of the runs, after checking that the scenario accepts each value of each axis.

    Of a design only the first ``_MOST_TRIED`` points are tried, and one of them must be accepted. Raises
    ``UserError`` for the first value that the scenario does not accept.
    """
    seed = study.seed
    if seed is None:
        seed = study.experiment().seed
    seeds = range(seed, seed + study.n_runs)
    policies = study.policies or (None,)
    setup = study.setup()
    first = {key: text for axis in study.axes for key, text in axis.points[0].items()}
    for axis in study.axes:
        if axis.is_drawn:  # some drawn points may be invalid scenarios, but not all of them
            first |= _readable(study, [{**first, **point} for point in axis.points[:_MOST_TRIED]], seeds)
    for axis in study.axes:
        for point in () if axis.is_drawn else axis.points:
            case_of(setup, study.run({**first, **point}, policies[0], seeds[0]))
    for policy in policies:
        case_of(setup, study.run(first, policy, seeds[0]))
    return seeds


def _readable(study: Study, points: Sequence[Point], seeds: range) -> Point:
    """Returns the first of ``points`` that makes a valid scenario. Raises the first one's ``UserError`` if
    none does.
    """
    wrong: list[UserError] = []
    for point in points:
        try:
            case_of(study.setup(), study.run(point, (study.policies or (None,))[0], seeds[0]))
        except UserError as error:
            wrong.append(error)
        else:
            return point
    raise wrong[0]


def _claim(out: Path, study: Study) -> None:
    """Make ``out``, which is locked, the folder of ``study``, or check that it is one already.

    An existing folder must be of the same scenario, keys and engine; values, policies and seeds may differ.
    Raises ``UserError`` if it holds anything else.
    """
    about = {"scenario": str(study.target), "axes": sorted(study.keys), "engine": study.engine}
    path = out / STUDY
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            there = {key: before[key] for key in about}
        except (OSError, ValueError, TypeError, KeyError):
            raise UserError(f"{path} does not describe a study; choose another --out") from None
        wrong = next((key for key in about if there[key] != about[key]), None)
        if wrong is not None:
            raise UserError(
                f"{out} holds another study, with {wrong} {_shown(there[wrong])} and not "
                f"{_shown(about[wrong])}; "
                "choose another --out, or remove it"
            )
        return
    with writing(path):
        write_json(path, about)


def _shown(value: Any) -> str:
    return ", ".join(value) or "none" if isinstance(value, list) else str(value)


def _complete(
    study: Study,
    groups: Sequence[Sequence[Task]],
    lines: Lines,
    kept: Kept | None,
    executor: Executor,
    shown: Shown,
) -> tuple[list[Row], int, float, str]:
    """Do the runs that are not in ``lines`` and store them there; their rows per request in ``kept``.

    Returns one row per task that is done, how many were computed, the sum of their durations in real seconds, and
    what is left if the command was stopped.
    """
    n_tasks, n_computed, own_s = sum(map(len, groups)), 0, 0.0
    known = read_records(lines)
    if kept is not None:  # a run that was done without keeping its requests is done again
        known = {key: record for key, record in known.items() if record.status != OK or key in kept}
    done: dict[Run, Record] = {}
    stopped = ""
    runs = [[task.run for task in group] for group in groups]
    setup = study.setup(frozenset(known))
    found = executor.results(Runner, setup, runs, lost_record)
    with closing(found), closing(shown(found, n_tasks)) as done_now:
        try:
            for run, record in done_now:
                if record.is_known:
                    record = known[record.key]
                else:
                    n_computed += 1
                    own_s += record.took_s
                    if kept is not None and record.requests:
                        kept.append(record.key, record.requests)
                        record = msgspec.structs.replace(record, requests=b"")
                    if record.key:
                        lines.append(record)
                done[run] = record
        except KeyboardInterrupt:
            done |= _stored(setup, [run for group in runs for run in group if run not in done], known)
            stopped = f"stopped; {n_tasks - len(done)} of {n_tasks} runs are left: the same command goes on"
    rows = []
    for group in groups:
        for point, run in group:
            if run in done:
                record = done[run]
                rows.append(Row(point, run.policy or record.policy, run.seed, record))
    return rows, n_computed, own_s, stopped


def _stored(setup: Setup, runs: Sequence[Run], known: Mapping[str, Record]) -> dict[Run, Record]:
    """Return those of ``runs`` whose results an earlier command has stored. Whoever stopped this one waits ``_LOOKING_S`` at most."""
    found: dict[Run, Record] = {}
    offer(setup.objects)
    ends_at_s = time.monotonic() + _LOOKING_S
    for run in runs if known else ():
        if time.monotonic() > ends_at_s:
            break
        with suppress(UserError):  # its scenario is not valid
            key = key_of(case_of(setup, run).experiment, setup, run.engine)
            if key in known:
                found[run] = known[key]
    return found


def _reasons(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Returns the reasons why runs have no result, each with its count, the most frequent first."""
    why = Counter(f"{row.record.status}: {row.record.reason}" for row in rows if row.record.status != OK)
    return why.most_common(_MOST_REASONS)


def write_study(out: Path, study: Study, results: Measured) -> list[Path]:
    """Write tables, figures and the page of ``results`` to the folder ``out``; returns their paths."""
    files = write_tables(out, study, results)
    cells, about = cells_of(results.rows), _about(study, results)
    figures = draw_figures(out, study, cells)
    failures = [f"{count} x {reason}" for reason, count in _reasons(results.rows)]
    page = page_text(study.title, about, header_and_rows(study, cells), failures, figures)
    return [*files, save_text(out / PAGE, page), *(path for path, _ in figures)]


def write_tables(out: Path, study: Study, results: Measured) -> list[Path]:
    """Write the tables of ``results`` to the folder ``out``; returns their paths."""
    rows, kept = results.rows, results.kept
    cells = cells_of(rows)
    path = out / RESULTS
    with writing(path):
        write_table(path, results_table(rows, study.axes, study.measures))
    texts = (
        "\n\n".join([f"# {study.title}", *_about(study, results), markdown(*header_and_rows(study, cells))]),
        csv_text(study, cells),
        latex(study, cells),
    )
    files = [path]
    if kept is not None:
        with writing(out / REQUESTS):
            kept.write(out / REQUESTS, rows, study.axes)
        files.append(out / REQUESTS)
    return files + [save_text(out / name, text) for name, text in zip(TABLES, texts, strict=True)]


def _about(study: Study, results: Measured) -> list[str]:
    """Returns the paragraphs above the table: description, setting, engines, and what the numbers mean."""
    seeds = results.seeds
    setting = f"Scenario {study.target}, "
    setting += f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    if study.fixed:
        setting += f", with {', '.join(study.fixed)}"
    if study.objectives:
        setting += f"; objectives {', '.join(f'{name} {limit:g} s' for name, limit in study.objectives.common.items())}"
    means = (
        "Means over runs ± the half-width of their 95 % interval (Student's t). Differences are paired, "
        "seed by seed: "
        "the same seed gives every policy the same requests. Unresolved: the interval of the difference "
        "contains 0."
    )
    if results.stopped:
        setting += f". {results.stopped.capitalize()}, which completes this page"
    engines = [
        f"{line[0].upper()}{line[1:]}."
        for line in engines_text(engines_of(row.record for row in results.rows))
    ]
    cells = cells_of(results.rows)
    many = many_text(study, cells)
    about = [*([study.description] if study.description else []), setting + ".", *engines, means]
    about += notes(study, cells)
    return [*about, many] if many else about
