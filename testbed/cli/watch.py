"""Commands that show runs: in the browser, as a list, and their reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.options import JsonOption, TraceOption, print_answer


def view(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="The run directory of a finished run, a running one or a simulation; or a leaderboard's folder.",
        ),
    ],
    others: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="OTHER",
            help="Finished runs with other seeds; charts then show the 95 % interval of the mean over all.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            metavar="PORT",
            help="Port to listen on; 0: any free one. Default 8765 if it is free, else any.",
        ),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in this machine's browser.")] = True,
) -> None:
    """Show a run in the browser, live or replayed, until Ctrl-C; or a leaderboard, which is a file."""
    from testbed.page.view import view_command

    view_command(run, others or (), port, browser, typer.echo)


def ps(as_json: JsonOption = False) -> None:
    """List the testbeds that run on this machine."""
    from testbed.runs.ps import ps_command, ps_text

    answer = ps_command()
    print_answer(answer, lambda: ps_text(answer), as_json)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory of a run that has ended.")],
    trace: TraceOption = True,
    as_json: JsonOption = False,
) -> None:
    """Rebuild the tables, summary, trace and report of a run from its logs."""
    from testbed.records.base import data_of
    from testbed.results.text import summary_text
    from testbed.runs.session import exit_code, report_command

    summary = report_command(run, trace=trace)
    print_answer(data_of(summary), lambda: summary_text(summary), as_json)
    raise typer.Exit(exit_code(summary))
