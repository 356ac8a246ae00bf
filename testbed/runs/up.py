"""``testbed up``: runs a scenario once, and prints its summary."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from testbed.errors import EXIT_INTERRUPTED
from testbed.experiments.experiment import Experiment
from testbed.records.base import data_of
from testbed.results.text import summary_text
from testbed.runs.session import RunOptions, RunSession, exit_code
from testbed.terminal import say


def up_command(experiment: Experiment, out: Path | None, options: RunOptions, *, as_json: bool) -> int:
    """Run ``experiment`` and print its summary; returns the exit code (``exit_code``)."""
    ended = RunSession(experiment, out, options, say).run()
    if ended.summary is None:
        return EXIT_INTERRUPTED
    typer.echo(json.dumps(data_of(ended.summary)) if as_json else summary_text(ended.summary))
    if ended.error is not None:
        raise ended.error
    if ended.interrupted:
        say(f"interrupted: the record up to now is in {ended.run_dir}")
        return EXIT_INTERRUPTED
    return exit_code(ended.summary)
