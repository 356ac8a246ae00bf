"""The part of the command line that is only about workloads: ``workload make`` and ``workload show``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.options import JsonOption, SeedOption, SetOption, print_answer

workload_app = typer.Typer(help="Recorded workloads: make one, or look at one (docs/workloads.md).")


@workload_app.command()
def make(
    file: Annotated[Path, typer.Argument(help="A new file.")],
    like: Annotated[
        str, typer.Option(metavar="SCENARIO", help="Whose requests to take; --set changes them.")
    ] = "clustered",
    kind: Annotated[str, typer.Option(help="azure, burstgpt or mooncake: the form of the file.")] = "azure",
    seed: SeedOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the requests of a scenario as a recorded workload, which other scenarios and tools can replay."""
    from testbed.inspect.workload import make_command

    changes = [*(overrides or []), *([] if seed is None else [f"seed={seed}"])]
    answer, text = make_command(file, like, kind, changes)
    print_answer(answer, lambda: text, as_json)


@workload_app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A trace of a kind that scenarios replay.")],
    as_json: JsonOption = False,
) -> None:
    """Say what a recorded workload holds: of what kind, how many requests, how often and how long."""
    from testbed.inspect.workload import show_command

    answer, text = show_command(file)
    print_answer(answer, lambda: text, as_json)
