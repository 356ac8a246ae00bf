"""Options that several commands share, what they change of a scenario, and how commands print their result."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from netem.networks import AUTO, NETWORKS, one_of
from testbed.errors import UserError

if TYPE_CHECKING:
    from testbed.experiments import Override

POLICIES, SYSTEM, RESULTS = "Policies", "Emulated system", "Results"
"""Groups of options, shown in the help of commands that have many."""


def out_option(about: str) -> Any:
    """Return ``--out`` of a command that writes no run directory."""
    return typer.Option("--out", metavar="DIR", help=about, rich_help_panel=RESULTS)


def runs_option(of_what: str = "", at_least: int | None = None) -> Any:
    """Return ``--runs``: how many runs ``of_what``."""
    about = f"Number of runs{of_what}, each with the next seed."
    return typer.Option("--runs", metavar="N", min=at_least, help=about)


ScenarioArg = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO", help="A scenario file, or a shipped one's name; see `testbed scenarios`."
    ),
]
RunScenarioArg = Annotated[
    str | None,
    typer.Argument(
        metavar="SCENARIO",
        show_default=False,
        help="A scenario file, or a shipped one's name. Without one, --model is served by servers that are sized to it, on "
        "the network of the scenario wan, or of the one that --network names.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value, e.g. workload.rate=0.5. Repeatable."),
]
SeedOption = Annotated[int | None, typer.Option(metavar="N", help="Overrides the scenario's seed.")]
FirstSeedOption = Annotated[
    int, typer.Option("--seed", metavar="N", help="Seed of the first run; the next runs have the next seeds.")
]
JobsOption = Annotated[
    int | None, typer.Option(metavar="N", help="Number of worker processes; default one per CPU.")
]

KeptRunsOption = Annotated[
    Path | None,
    out_option(
        "Keep the runs in this folder; default one in runs/. Runs that it already holds are not run again."
    ),
]

_A_PAIR = (
    "A pair by its name, or PLACEMENT+ROUTING, also of your own: module:A+module:B; see `testbed policies`."
)
PolicyOption = Annotated[
    str | None,
    typer.Option(metavar="PAIR", help=f"{_A_PAIR} Default the scenario's.", rich_help_panel=POLICIES),
]
PoliciesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="PAIR",
        help=f"{_A_PAIR} Default the scenario's. Repeat to compare.",
        rich_help_panel=POLICIES,
    ),
]
PlacementOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Placement policy; keeps the scenario's routing policy.",
        rich_help_panel=POLICIES,
    ),
]
RoutingOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Routing policy; keeps the scenario's placement policy.",
        rich_help_panel=POLICIES,
    ),
]

ClockOption = Annotated[
    str | None,
    typer.Option(
        "--clock",
        metavar="CLOCK",
        help="virtual (exact on a busy machine, too), real (measures the machine) or auto; overrides clock.",
        rich_help_panel=SYSTEM,
    ),
]
_EMULATING = [network for network in NETWORKS.values() if network.emulates]
NetworkOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"{AUTO}, {one_of(_EMULATING)}; overrides network.backend.",
        rich_help_panel=SYSTEM,
    ),
]
HostsOption = Annotated[
    str | None,
    typer.Option(
        metavar="ray",
        help="Use all machines of the Ray cluster of this machine; the scenario's hosts tables can choose "
        "some.",
        rich_help_panel=SYSTEM,
    ),
]
ComputeOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="stub (waits for calibrated times) or blocks (computes with torch).",
        rich_help_panel=SYSTEM,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="A checkpoint's folder, or its name on the Hugging Face hub.",
        rich_help_panel=SYSTEM,
    ),
]
RandomOption = Annotated[
    bool,
    typer.Option(
        "--random-weights",
        help="Compute blocks of the model table's size with random weights.",
        rich_help_panel=SYSTEM,
    ),
]
TimeScaleOption = Annotated[
    float | None,
    typer.Option(
        metavar="FACTOR",
        help="Scenario seconds per real second; times are reported in scenario seconds.",
        rich_help_panel=SYSTEM,
    ),
]

OutOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="The run directory; default runs/<scenario>-<time>.",
        rich_help_panel=RESULTS,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to stdout.", rich_help_panel=RESULTS)
]
JsonLinesOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per line to stdout.", rich_help_panel=RESULTS)
]
GoodputOption = Annotated[
    str | None,
    typer.Option(
        "--slo",
        metavar="OBJECTIVES",
        help="Objectives for goodput, e.g. ttft=5s,tpot=1s.",
        rich_help_panel=RESULTS,
    ),
]
ReportOption = Annotated[
    bool, typer.Option(help="Write report.html and figures at the end.", rich_help_panel=RESULTS)
]
TraceOption = Annotated[
    bool,
    typer.Option(
        help="Write trace.json (500 bytes per message). No table or figure needs it.", rich_help_panel=RESULTS
    ),
]
TwinOption = Annotated[
    bool,
    typer.Option(
        help="Repeat a run in real time in virtual time at its end, and compare the two.",
        rich_help_panel=RESULTS,
    ),
]
PageOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        metavar="[PORT]",
        help="Serve the run's page during the run, on this port or any free one; default with --hold and "
        "`serve`.",
        rich_help_panel=RESULTS,
    ),
]
NoPageOption = Annotated[bool, typer.Option("--no-page", help="Serve no page.", rich_help_panel=RESULTS)]
RunOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The running testbed's run directory; default the latest in runs/."),
]


def with_page_port(arguments: list[str]) -> list[str]:
    """Insert the port 0 after a ``--page`` without a port: Typer has no options with an optional value."""
    found = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        found.append(argument)
        if argument == "--page" and not following.lstrip("-").isdigit():
            found.append("0")
    return found


def page_port(page: int | None, no_page: bool, by_default: bool) -> int | None:
    """Return the page's port, 0 for any free one, or None if no page is served. Raises ``UserError``."""
    if no_page and page is not None:
        raise UserError("--page and --no-page cannot both be given; leave one out")
    return 0 if page is None and by_default and not no_page else page


def changes(
    overrides: Sequence[str] | None,
    keys: dict[str, Any],
    model: str | None = None,
    random_weights: bool = False,
) -> list[Override]:
    """Return what options change of a scenario: ``--set``, then ``keys`` of scenario files that were given (not
    None), then ``--model`` and ``--random-weights``.
    """
    from testbed.experiments import Change

    found: list[Override] = [*(overrides or [])]
    found += [f"{key}={value}" for key, value in keys.items() if value is not None]
    if model is not None:
        found.append(Change("compute.model", model))
    if random_weights:
        found.append(Change("compute.random_weights", True))
    return found


def print_answer(answer: dict[str, Any], text: Callable[[], str], as_json: bool) -> None:
    """Print ``answer`` as one JSON object, or else ``text()``."""
    typer.echo(json.dumps(answer) if as_json else text())
