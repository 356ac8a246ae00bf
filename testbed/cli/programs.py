"""Commands for running testbeds: list them, run the user's programs on nodes, change links by hand."""

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
    """Emulate only a scenario's network, with the programs of its node tables, until Ctrl-C."""
    from testbed.experiments import load_experiment
    from testbed.runs.net import net_command

    changes = [f"network.backend={network}"] if network is not None else []
    net_command(load_experiment(scenario, [*(overrides or []), *changes]), out)


def ps(as_json: JsonOption = False) -> None:
    """List the testbeds that run on this machine."""
    from testbed.runs.ps import ps_command, ps_text

    answer = ps_command()
    print_answer(answer, lambda: ps_text(answer), as_json)


NodeArg = Annotated[str, typer.Argument(help="A node's name: a server, a client or a node of your own.")]


def execute(
    node: NodeArg,
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="After --: the program and its arguments.")
    ],
    run: RunOption = None,
) -> None:
    """Run a program on a node of a running testbed (--hold). The exit code is the program's."""
    from testbed.runs.inside import exec_command

    raise typer.Exit(exec_command(node, command, run))


def shell(node: NodeArg, run: RunOption = None) -> None:
    """Open your shell ($SHELL) on a node of a running testbed (--hold)."""
    from testbed.runs.inside import shell_command

    raise typer.Exit(shell_command(node, run))


def link(
    action: Annotated[str, typer.Argument(help="cut, restore (to what the scenario has now) or set.")],
    a: Annotated[str, typer.Argument(help="Name of a node or a site.")],
    b: Annotated[str, typer.Argument(help="Name of the other node or site.")],
    rtt: Annotated[
        str | None, typer.Option(help='With set: round-trip time, e.g. "40 ms"; half of it each way.')
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help='With set: rate in each direction, e.g. "100 Mbit/s".')
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help='With set: share of packets that are lost, e.g. 0.01 or "1 %".')
    ] = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cut, restore or set the links between two nodes or sites of a running testbed, in both directions.

    The testbed may serve a workload or hold (--hold).
    """
    from testbed.control.links import link_command

    answer, text = link_command(action, a, b, rtt, rate, loss, run)
    print_answer(answer, lambda: text, as_json)
