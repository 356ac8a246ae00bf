"""``testbed up``: makes the run directory, runs the emulation, shows its page, writes tables and summary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from policies.problem import Placement, PolicyError
from testbed.control.placing import PlacedExperiment, place_experiment
from testbed.control.steering import Steering, online_policy
from testbed.errors import EXIT_INTERRUPTED, RunError, TestbedError, UserError
from testbed.page.beside import bind_page, page_beside
from testbed.page.report import write_report
from testbed.results import finish_run, read_tables
from testbed.results.text import summary_text
from testbed.rundir import make_run_dir
from testbed.runs.twin import run_twin
from testbed.runs.verify import verify_tokens
from testbed.runtime.blocks import blocks_model, check_fits, check_model, require_blocks
from testbed.runtime.gpus import shared_out
from testbed.runtime.launching import Launcher
from testbed.runtime.programs import check_programs
from testbed.runtime.running import emulate
from testbed.runtime.stage import choose_stage
from testbed.runtime.wiring import check_frames
from testbed.scenario.experiment import Experiment
from testbed.terminal import say


@dataclass(frozen=True)
class UpOptions:
    """Options of a run.

    ``objectives``: limits in seconds by metric (``--slo``). ``with_twin``: repeat a run in real time in
    virtual time, to compare the two. ``page_port``: serve the run's page on this port (0: any free one).
    """

    hold: bool = False
    objectives: dict[str, float] | None = None
    report: bool = True
    trace: bool = True
    with_twin: bool = True
    page_port: int | None = None


@dataclass(frozen=True)
class Ended:
    """A run that has ended, with its tables.

    ``summary`` is None if the run was interrupted before any session. ``error`` ended the run early.
    """

    run_dir: Path
    placed: PlacedExperiment
    summary: dict[str, Any] | None = None
    error: TestbedError | None = None
    interrupted: bool = False


def up_command(experiment: Experiment, out: Path | None, options: UpOptions, *, as_json: bool) -> int:
    """Run ``experiment`` and print its summary; returns the exit code (``exit_code``)."""
    ended = run_once(experiment, out, options)
    if ended.summary is None:
        return EXIT_INTERRUPTED
    typer.echo(json.dumps(ended.summary) if as_json else summary_text(ended.summary))
    if ended.error is not None:
        raise ended.error
    if ended.interrupted:
        say(f"interrupted: the record up to now is in {ended.run_dir}")
        return EXIT_INTERRUPTED
    return exit_code(ended.summary)


def run_once(experiment: Experiment, out: Path | None, options: UpOptions) -> Ended:
    """Run ``experiment`` into the new folder ``out`` (None: one in ``runs/``); its messages go to stderr.

    Raises ``TestbedError`` if no session could begin, or the tables cannot be written. A later error is
    returned in ``Ended.error``.
    """
    hold = options.hold
    if not experiment.workload.requests:
        raise UserError("this scenario takes its requests from outside: run it with `testbed serve`")
    check_can_run(experiment, say)
    stage = choose_stage(experiment, holds=hold)
    placed = placed_experiment(experiment)
    listener = bind_page(options.page_port)
    run_dir = make_run_dir(out, experiment.name)
    with page_beside(run_dir, listener, say):
        launcher = stage.begin(experiment, run_dir)
        with undone_unless_begun(run_dir, launcher):
            blocks = blocks_model(experiment, run_dir)
        say(f"run {run_dir}")
        error, interrupted = stage.run(
            launcher, emulate(experiment, placed, run_dir, stage, launcher, blocks, hold, say)
        )
        if not has_begun(run_dir, error):
            say(f"interrupted before any session; logs are in {run_dir}")
            return Ended(run_dir, placed, interrupted=True)
        with left_to_report(run_dir):
            if blocks is not None and error is None and not interrupted:
                verify_tokens(run_dir, experiment, blocks, say)
            if options.with_twin and stage.has_twin and error is None and not interrupted:
                say("running the twin in virtual time (--no-twin leaves it out)")
                run_twin(experiment, placed, run_dir, say)
            try:
                summary = finish(
                    run_dir, experiment, options.objectives, report=options.report, trace=options.trace
                )
            except RunError:
                if error is not None:
                    say(f"testbed: {error}")
                raise
    return Ended(run_dir, placed, summary, error, interrupted)


def has_begun(run_dir: Path, error: TestbedError | None) -> bool:
    """Whether a client has logged anything. Raises ``error``, if there is one, when none has."""
    if any((run_dir / "events").iterdir()):
        return True
    if isinstance(error, UserError):
        shutil.rmtree(run_dir)  # nothing began: the corrected command can use the same folder
    if error is not None:
        raise error
    return False


def exit_code(summary: dict[str, Any]) -> int:
    """Return 0 if every request completed with the right tokens or was cancelled, else 1."""
    is_whole = summary["n_completed"] + summary["n_cancelled"] == summary["n_requests"]
    return 0 if is_whole and not summary["n_tokens_altered"] else 1


def check_can_run(experiment: Experiment, announce: Callable[[str], None] = lambda _: None) -> None:
    """Check that this machine can run ``experiment``; announces the user's programs and chosen devices.

    Raises ``UserError`` if real blocks cannot be computed here, if messages would be too large, or if a
    program does not exist.
    """
    check_frames(experiment)
    check_programs(experiment, announce)
    if experiment.compute.blocks is not None:
        require_blocks('compute.backend "blocks"')
        check_model(experiment.compute.blocks)
        shared_out(experiment, announce)


def placed_experiment(experiment: Experiment) -> PlacedExperiment:
    """Place ``experiment`` by its placement policy.

    Raises ``UserError`` if a policy refuses the scenario, or real blocks do not fit on this machine.
    """
    placed = place_experiment(experiment)
    check_fits(experiment, placed.placement)
    check_online(experiment, placed.placement)
    return placed


def check_online(experiment: Experiment, placement: Placement) -> None:
    """Raise ``UserError`` if the online policy does not exist, or cannot go on from ``placement``."""
    try:
        policy = online_policy(experiment)
        if policy is not None:
            Steering(experiment.problem, placement, policy)
    except PolicyError as error:
        raise UserError(str(error)) from error


@contextmanager
def undone_unless_begun(run_dir: Path, launcher: Launcher) -> Iterator[None]:
    """Prepare a run in the body: if the body raises, the launcher is ended and ``run_dir`` removed."""
    try:
        yield
    except BaseException:
        launcher.close()
        shutil.rmtree(run_dir)
        raise


@contextmanager
def left_to_report(run_dir: Path) -> Iterator[None]:
    """Complete a served run in the body; Ctrl-C there names the command that completes it later."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped after the requests were served: `testbed report {run_dir}` completes the tables and the page"
        ) from None


def run_quietly(experiment: Experiment, out: Path, with_twin: bool = False) -> dict[str, Any]:
    """Run ``experiment`` into the new folder ``out``, and print nothing; returns the summary.

    Raises ``TestbedError`` if the run breaks.
    """
    check_can_run(experiment)
    stage = choose_stage(experiment)
    placed = placed_experiment(experiment)
    run_dir = make_run_dir(out, experiment.name)
    launcher = stage.begin(experiment, run_dir)
    with undone_unless_begun(run_dir, launcher):
        blocks = blocks_model(experiment, run_dir)
    error, _ = stage.run(
        launcher,
        emulate(experiment, placed, run_dir, stage, launcher, blocks, False, lambda _: None, live=False),
    )
    if error is not None:
        raise error
    if blocks is not None:
        verify_tokens(run_dir, experiment, blocks, lambda _: None)
    if with_twin and stage.has_twin:
        run_twin(experiment, placed, run_dir, lambda _: None)
    return finish_run(run_dir, experiment)


def finish(
    run_dir: Path,
    experiment: Experiment,
    objectives: dict[str, float] | None = None,
    *,
    report: bool = True,
    trace: bool = True,
) -> dict[str, Any]:
    """Write tables, summary and, unless switched off, trace and report of a run; returns the summary.

    Raises ``RunError`` if a file cannot be written.
    """
    try:
        tables = read_tables(run_dir, experiment)
        summary = finish_run(run_dir, experiment, objectives, tables, trace)
        if report:
            write_report(run_dir, experiment, tables)
    except OSError as error:
        raise RunError(
            f"cannot write the tables of {run_dir} ({error.strerror}); the logs are intact: make room, then "
            f"`testbed report {run_dir}`"
        ) from error
    return summary
