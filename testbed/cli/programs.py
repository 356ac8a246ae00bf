"""Commands around a running testbed: programs of the user's on its nodes, its links by hand, which there are."""

from __future__ import annotations

from typing import Annotated

import typer

from testbed.cli.options import (
    JsonOption,
    NetworkOption,
    OutOption,
    RunOption,
    ScenarioArg,
    SetOption,
    print_answer,
)


def net(
    scenario: ScenarioArg,
    network: NetworkOption = None,
    overrides: SetOption = None,
    out: OutOption = None,
) -> None:
    """Hold a scenario's network alone until Ctrl-C, with the programs that it brings."""
    from testbed.runs.net import net_command
    from testbed.scenario import load_experiment

    changes = [f"network.backend={network}"] if network is not None else []
    net_command(load_experiment(scenario, [*(overrides or []), *changes]), out)


def ps(as_json: JsonOption = False) -> None:
    """List the testbeds that run on this machine."""
    from testbed.runs.ps import ps_command, ps_text

    answer = ps_command()
    print_answer(answer, lambda: ps_text(answer), as_json)


NodeArg = Annotated[str, typer.Argument(help="The node's name: a server, a client or a node of yours.")]


def execute(
    node: NodeArg,
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="After --: the program and what it takes.")
    ],
    run: RunOption = None,
) -> None:
    """Run a program of yours on a node of a running testbed (--hold); the exit code is the program's."""
    from testbed.runs.inside import exec_command

    raise typer.Exit(exec_command(node, command, run))


def shell(node: NodeArg, run: RunOption = None) -> None:
    """Open your shell ($SHELL) on a node of a running testbed (--hold)."""
    from testbed.runs.inside import shell_command

    raise typer.Exit(shell_command(node, run))


def link(
    action: Annotated[str, typer.Argument(help="cut, restore (as the scenario has it now) or set.")],
    a: Annotated[str, typer.Argument(help="A node's or a site's name.")],
    b: Annotated[str, typer.Argument(help="Another one's.")],
    rtt: Annotated[str | None, typer.Option(help='With set: half of it each way, e.g. "40 ms".')] = None,
    rate: Annotated[str | None, typer.Option(help='With set: e.g. "100 Mbit/s".')] = None,
    loss: Annotated[
        str | None, typer.Option(help='With set: the share of packets that is lost, 0.01 or "1 %".')
    ] = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change the link between two nodes of a running testbed, in both directions, whether it serves or holds."""
    from testbed.control.links import link_command

    answer, text = link_command(action, a, b, rtt, rate, loss, run)
    print_answer(answer, lambda: text, as_json)
