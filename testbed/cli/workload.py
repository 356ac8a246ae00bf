"""The commands ``workload make`` and ``workload show``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.options import JsonOption, SeedOption, SetOption, print_answer

workload_app = typer.Typer(help="Make or describe a recorded workload (docs/workloads.md).")


@workload_app.command()
def make(
    file: Annotated[Path, typer.Argument(help="A new file.")],
    like: Annotated[
        str,
        typer.Option(
            metavar="SCENARIO", help="Scenario whose arrivals and lengths to write; --set changes it."
        ),
    ] = "clustered",
    kind: Annotated[str, typer.Option(help="Format of the file: azure, burstgpt or mooncake.")] = "azure",
    seed: SeedOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a scenario's requests (--like) as a recorded workload, which other scenarios and tools can replay."""
    from testbed.inspect.workload import make_command

    changes = [*(overrides or []), *([] if seed is None else [f"seed={seed}"])]
    answer, text = make_command(file, like, kind, changes)
    print_answer(answer, lambda: text, as_json)


@workload_app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A recorded workload in a format that scenarios replay.")],
    as_json: JsonOption = False,
) -> None:
    """Describe a recorded workload: its format, the number of requests, their arrivals and lengths."""
    from testbed.inspect.workload import show_command

    answer, text = show_command(file)
    print_answer(answer, lambda: text, as_json)
