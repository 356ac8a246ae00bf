"""Options that several commands of the command line have, and how all of them answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

ScenarioArg = Annotated[
    str, typer.Argument(help="A scenario file, or a shipped one's name; see `testbed scenarios`.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value, e.g. workload.rate=0.5. Repeatable."),
]
TraceOption = Annotated[
    bool, typer.Option(help="Write trace.json: 500 bytes per message; every figure is made without it.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
HostsOption = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        help="ray: servers are on all machines of the Ray cluster that this one belongs to; a scenario's hosts say which.",
    ),
]
NetworkOption = Annotated[
    str | None, typer.Option(help="auto, netem, fabric, memory or loopback; overrides network.backend.")
]
ClockOption = Annotated[
    str | None,
    typer.Option(
        help="virtual (exact, whatever else the machine does), real (measures the machine) or auto; overrides clock."
    ),
]
ComputeOption = Annotated[
    str | None, typer.Option(help="stub (calibrated times) or blocks (real transformer blocks).")
]
TimeScaleOption = Annotated[
    float | None, typer.Option(help="Run so many times faster than life; times are reported scaled back.")
]
SeedOption = Annotated[int | None, typer.Option(help="Overrides the scenario's seed.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="The run directory; default runs/<scenario>-<time>.")
]
RunOption = Annotated[
    Path | None,
    typer.Option("--run", help="The running testbed's run directory; default the latest in runs/."),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="DIR", help="A checkpoint's folder, or its name on the hub.")
]
RandomOption = Annotated[
    bool, typer.Option("--random-weights", help="Blocks of the model table's size without a checkpoint.")
]
PageOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        metavar="[PORT]",
        help="Serve the run's page while it runs, on this port or on any free one; on with --hold and `serve`.",
    ),
]
NoPageOption = Annotated[bool, typer.Option("--no-page", help="Serve no page.")]


def with_page_port(arguments: list[str]) -> list[str]:
    """``--page`` without a port is ``--page 0``, which Typer has no way to say."""
    found = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        found.append(argument)
        if argument == "--page" and not following.lstrip("-").isdigit():
            found.append("0")
    return found


def print_answer(answer: dict[str, Any], text: Callable[[], str], as_json: bool) -> None:
    """One JSON object, or ``text()``."""
    typer.echo(json.dumps(answer) if as_json else text())
