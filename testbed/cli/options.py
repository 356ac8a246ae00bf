"""Options that several commands share, and how commands print their result."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from netem.networks import AUTO, NETWORKS, one_of

ScenarioArg = Annotated[
    str, typer.Argument(help="A scenario file, or a shipped one's name; see `testbed scenarios`.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value, e.g. workload.rate=0.5. Repeatable."),
]
TraceOption = Annotated[
    bool, typer.Option(help="Write trace.json (500 bytes per message). No table or figure needs it.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
HostsOption = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        help="ray: use all machines of the Ray cluster of this machine; the scenario's hosts tables can "
        "choose some.",
    ),
]
_EMULATING = [network for network in NETWORKS.values() if network.emulates]
NetworkOption = Annotated[
    str | None, typer.Option(help=f"{AUTO}, {one_of(_EMULATING)}; overrides network.backend.")
]
ClockOption = Annotated[
    str | None,
    typer.Option(
        help="virtual (exact on a busy machine, too), real (measures the machine) or auto; overrides clock."
    ),
]
ComputeOption = Annotated[
    str | None, typer.Option(help="stub (waits for calibrated times) or blocks (computes with torch).")
]
PairOption = Annotated[
    str | None,
    typer.Option("--policy", help="A pair of a placement and a routing policy; see `testbed policies`."),
]
PlacementOption = Annotated[
    str | None, typer.Option(help="Placement policy; keeps the scenario's routing policy.")
]
RoutingOption = Annotated[
    str | None, typer.Option(help="Routing policy; keeps the scenario's placement policy.")
]
TimeScaleOption = Annotated[
    float | None,
    typer.Option(help="Scenario seconds per real second; times are reported in scenario seconds."),
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
    str | None,
    typer.Option(
        "--model", metavar="DIR", help="A checkpoint's folder, or its name on the Hugging Face hub."
    ),
]
RandomOption = Annotated[
    bool,
    typer.Option("--random-weights", help="Compute blocks of the model table's size with random weights."),
]
PageOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        metavar="[PORT]",
        help="Serve the run's page during the run, on this port or any free one; default with --hold and "
        "`serve`.",
    ),
]
NoPageOption = Annotated[bool, typer.Option("--no-page", help="Serve no page.")]


def with_page_port(arguments: list[str]) -> list[str]:
    """Insert the port 0 after a ``--page`` without a port: Typer has no options with an optional value."""
    found = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        found.append(argument)
        if argument == "--page" and not following.lstrip("-").isdigit():
            found.append("0")
    return found


def print_answer(answer: dict[str, Any], text: Callable[[], str], as_json: bool) -> None:
    """Print ``answer`` as one JSON object, or else ``text()``."""
    typer.echo(json.dumps(answer) if as_json else text())
