"""The ``up`` command around an emulation: run directory, signals, live view, tables, summary."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
import uvloop

from testbed.emulation import Emulation, run_emulation
from testbed.errors import EXIT_INTERRUPTED, RunError, TestbedError, UserError
from testbed.experiment import Experiment
from testbed.handle import LauncherHandle
from testbed.live import LiveView
from testbed.placing import PlacedExperiment, place_experiment
from testbed.results import finish_run, write_report
from testbed.results.slo import parse_slo
from testbed.results.text import summary_text
from testbed.rundir import make_run_dir
from testbed.scenario import dump_toml


def up_command(
    experiment: Experiment, out: Path | None, *, as_json: bool, hold: bool, slo: str | None, report: bool
) -> int:
    """Run ``experiment``; answers the exit code: 0 only when every request completed."""
    objectives = parse_slo(slo) if slo is not None else None
    if experiment.compute != "stub":
        raise UserError(
            "compute.backend 'blocks' (real transformer blocks) is not part of this version yet: take 'stub'"
        )
    _refuse_what_is_only_simulated(experiment)
    placed = place_experiment(experiment)
    run_dir = make_run_dir(out, experiment.name)
    _say(f"run {run_dir}")
    error, interrupted = uvloop.run(_emulate(experiment, placed, run_dir, hold, _say))
    if not any((run_dir / "events").iterdir()):
        if isinstance(error, UserError):
            shutil.rmtree(run_dir)  # nothing began: the corrected command may take the same folder
        if error is not None:
            raise error
        _say(f"interrupted before any session; logs are in {run_dir}")
        return EXIT_INTERRUPTED
    try:
        summary = _finish(run_dir, experiment, objectives, report)
    except RunError:
        if error is not None:
            _say(f"testbed: {error}")
        raise
    typer.echo(json.dumps(summary) if as_json else summary_text(summary))
    if error is not None:
        raise error
    if interrupted:
        _say(f"interrupted: the record up to now is in {run_dir}")
        return EXIT_INTERRUPTED
    return 0 if summary["n_completed"] == summary["n_requests"] else 1


def _refuse_what_is_only_simulated(experiment: Experiment) -> None:
    for is_asked, key, what in (
        (experiment.online is not None, "online", f"'{experiment.online}': leave it out"),
        (experiment.state_age_s > 0, "state_age", "above 0: the emulation's coordinator sees every change"),
    ):
        if is_asked:
            raise UserError(f"policy.{key} {what}; only `testbed simulate` can do that")


def run_quietly(experiment: Experiment, out: Path) -> dict[str, Any]:
    """Run ``experiment`` below ``out`` without a word; answers the summary. Raises what broke it."""
    placed = place_experiment(experiment)
    run_dir = make_run_dir(out, experiment.name)
    error, _ = uvloop.run(_emulate(experiment, placed, run_dir, False, lambda _: None))
    if error is not None:
        raise error
    return finish_run(run_dir, experiment)


async def _emulate(
    experiment: Experiment,
    placed: PlacedExperiment,
    run_dir: Path,
    hold: bool,
    announce: Callable[[str], None],
) -> tuple[TestbedError | None, bool]:
    try:
        (run_dir / "scenario.toml").write_text(dump_toml(experiment), encoding="utf-8")
    except OSError as full:
        raise RunError(
            f"cannot write to {run_dir}: {full.strerror}; make room, or choose another --out"
        ) from full
    emulation = Emulation(experiment, placed, run_dir, LauncherHandle(run_dir))
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()

    def interrupt() -> None:
        interrupted.set()
        emulation.interrupted.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupt)
    view = LiveView(emulation.progress)
    showing = asyncio.create_task(view.run())
    try:
        error = await run_emulation(emulation, hold, announce)
    finally:
        showing.cancel()
        view.close()
    return error, interrupted.is_set()


def _finish(
    run_dir: Path, experiment: Experiment, objectives: dict[str, float] | None, report: bool
) -> dict[str, Any]:
    try:
        summary = finish_run(run_dir, experiment, objectives)
        if report:
            write_report(run_dir, experiment)
    except OSError as error:
        raise RunError(
            f"cannot write the tables of {run_dir} ({error.strerror}); the logs are intact: make room, then "
            f"`testbed report {run_dir}`"
        ) from error
    return summary


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
