"""Commands that run a testbed, and those that act on a running one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from netem.networks import AUTO, NETWORKS
from testbed.cli.options import (
    ClockOption,
    ComputeOption,
    GoodputOption,
    HostsOption,
    JsonOption,
    ModelOption,
    NetworkOption,
    NoPageOption,
    OutOption,
    PageOption,
    PlacementOption,
    PolicyOption,
    RandomOption,
    ReportOption,
    RoutingOption,
    RunOption,
    RunScenarioArg,
    ScenarioArg,
    SeedOption,
    SetOption,
    TimeScaleOption,
    TraceOption,
    TwinOption,
    changes,
    page_port,
    print_answer,
    runs_option,
)
from testbed.errors import UserError
from testbed.faultkinds import KINDS, any_of

if TYPE_CHECKING:
    from testbed.experiments import Override

_ENDPOINT, _SAMPLING = "Endpoint", "Sampling"

TemperatureOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="T",
        help="Sample at this temperature; 0 takes the most probable token each time.",
        rich_help_panel=_SAMPLING,
    ),
]

TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="DIR",
        help="A tokenizer's folder; default the model's, or with the stub a small one.",
        rich_help_panel=_ENDPOINT,
    ),
]


def up(
    scenario: RunScenarioArg = None,
    hold: Annotated[bool, typer.Option("--hold", help="Keep the testbed up after the workload.")] = False,
    runs: Annotated[
        int, runs_option(" (one after the other, in folders of --out; prints means with intervals)", 1)
    ] = 1,
    seed: SeedOption = None,
    overrides: SetOption = None,
    policy: PolicyOption = None,
    placement: PlacementOption = None,
    routing: RoutingOption = None,
    clock: ClockOption = None,
    network: NetworkOption = None,
    time_scale: TimeScaleOption = None,
    compute: ComputeOption = None,
    model: ModelOption = None,
    random_weights: RandomOption = False,
    hosts: HostsOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
    slo: GoodputOption = None,
    report: ReportOption = True,
    trace: TraceOption = True,
    twin: TwinOption = True,
    page: PageOption = None,
    no_page: NoPageOption = False,
) -> None:
    """Start the testbed, serve the scenario's workload, write tables and a trace, print a summary."""
    from testbed.control.choice import chosen
    from testbed.control.placing import load_to_run
    from testbed.results.slo import parse_slo
    from testbed.runs.session import RunOptions
    from testbed.runs.up import up_command

    scenario, network, fit = _scenario_of(scenario, model, network, overrides)
    keys = {
        "clock": clock,
        "network.backend": network,
        "hosts": hosts,
        "compute.backend": compute,
        "time_scale": time_scale,
    }
    changed = fit + changes(overrides, keys, model, random_weights)
    choice = chosen(policy, placement, routing)
    options = RunOptions(
        hold=hold,
        objectives=parse_slo(slo) if slo is not None else None,
        report=report,
        trace=trace,
        with_twin=twin,
        page_port=page_port(page, no_page, hold),
    )
    if runs > 1:
        from testbed.studies.seeds.command import seeds_command

        raise typer.Exit(seeds_command(scenario, choice, changed, seed, runs, out, options, as_json=as_json))
    seeds = [] if seed is None else [f"seed={seed}"]
    experiment = load_to_run(scenario, [*changed, *choice.overrides(), *seeds])
    raise typer.Exit(up_command(experiment, out, options, as_json=as_json))


def serve(
    scenario: RunScenarioArg = None,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            metavar="PORT",
            help="Port to listen on; 0: any free one.",
            rich_help_panel=_ENDPOINT,
        ),
    ] = 8000,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on; one that other machines can reach needs --api-key or --no-auth.",
            rich_help_panel=_ENDPOINT,
        ),
    ] = "127.0.0.1",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="TESTBED_API_KEY",
            metavar="KEY",
            help="Key that requests must send as Authorization: Bearer KEY.",
            rich_help_panel=_ENDPOINT,
        ),
    ] = None,
    no_auth: Annotated[
        bool,
        typer.Option(
            "--no-auth",
            help="Need no key: everybody who can reach --host may use the testbed.",
            rich_help_panel=_ENDPOINT,
        ),
    ] = False,
    admission: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What happens to a request without room: wait, or reject (HTTP 429).",
            rich_help_panel=_ENDPOINT,
        ),
    ] = "wait",
    max_requests: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Open requests at most; further ones are rejected (HTTP 429).",
            rich_help_panel=_ENDPOINT,
        ),
    ] = 1024,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="Longest request in tokens, prompt plus answer; default 4096, or the model's limit if it is "
            "lower.",
            rich_help_panel=_ENDPOINT,
        ),
    ] = None,
    tokenizer: TokenizerOption = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How the endpoint calls the model; default as in the scenario.",
            rich_help_panel=_ENDPOINT,
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Origin whose pages may use the endpoint from a browser, such as http://localhost:3000, or * for all; "
            "repeatable.",
            rich_help_panel=_ENDPOINT,
        ),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="none: serve requests from outside only; also: serve the scenario's own, too.",
        ),
    ] = "none",
    seed: SeedOption = None,
    overrides: SetOption = None,
    policy: PolicyOption = None,
    placement: PlacementOption = None,
    routing: RoutingOption = None,
    network: NetworkOption = None,
    time_scale: TimeScaleOption = None,
    compute: ComputeOption = None,
    model: ModelOption = None,
    random_weights: RandomOption = False,
    hosts: HostsOption = None,
    out: OutOption = None,
    report: ReportOption = True,
    trace: TraceOption = True,
    twin: TwinOption = True,
    page: PageOption = None,
    no_page: NoPageOption = False,
) -> None:
    """Start the testbed and serve requests from outside through OpenAI's API until Ctrl-C.

    Example, a checkpoint on the network of a scenario: testbed serve --model DIR --network clustered
    """
    from testbed.control.choice import chosen
    from testbed.runs.serve import ServeOptions, serve_command

    for name, value, known in (
        ("workload", workload, ("also", "none")),
        ("admission", admission, ("wait", "reject")),
    ):
        if value not in known:
            raise UserError(f"--{name} must be {' or '.join(known)}, not {value}")
    scenario, network, fit = _scenario_of(scenario, model, network, overrides)
    keys = {
        "network.backend": network,
        "hosts": hosts,
        "compute.backend": compute,
        "time_scale": time_scale,
        "seed": seed,
    }
    changed = fit + changes(overrides, keys, model, random_weights)
    changed += chosen(policy, placement, routing).overrides()
    options = ServeOptions(
        host,
        port,
        api_key,
        no_auth,
        workload,
        admission,
        max_requests,
        max_model_len,
        tokenizer,
        page_port(page, no_page, True),
        served_model_name or "",
        tuple(cors or ()),
    )
    raise typer.Exit(
        serve_command(
            scenario, changed, options, out, report=report, trace=trace, with_twin=twin, echo=typer.echo
        )
    )


def chat(
    scenario: RunScenarioArg = None,
    model: ModelOption = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Longest answer in tokens; default 256, or what the model's limit leaves.",
        ),
    ] = None,
    temperature: TemperatureOption = 0.0,
    port: Annotated[
        int,
        typer.Option(
            "--port", min=0, max=65535, metavar="PORT", help="The endpoint's port; 0: any free one."
        ),
    ] = 0,
    network: NetworkOption = None,
    random_weights: RandomOption = False,
    tokenizer: TokenizerOption = None,
    overrides: SetOption = None,
    out: OutOption = None,
    report: ReportOption = False,
    twin: TwinOption = False,
) -> None:
    """Chat with a model in the terminal: every token passes through a chain of servers.

    Each answer is followed by the time of every hop. Other programs can use the model meanwhile, at the endpoint whose
    address is printed. /new begins another conversation; /exit, Ctrl-D or Ctrl-C end it. Without a terminal, lines of standard input
    are the messages.

    Example: testbed chat --model smollm2 --network clustered
    """
    from testbed.runs.chat import chat_command
    from testbed.runs.serve import ServeOptions

    scenario, network, fit = _scenario_of(scenario, model, network, overrides)
    keys = {"network.backend": network, "compute.backend": "blocks"}
    raise typer.Exit(
        chat_command(
            scenario,
            fit + changes(overrides, keys, model, random_weights),
            ServeOptions.local(port, tokenizer),
            max_tokens,
            temperature or 0.0,
            out,
            _typed(),
            report=report,
            with_twin=twin,
            echo=lambda text: typer.echo(text, nl=False),
        )
    )


def _typed() -> Iterator[str]:
    """Yield the lines that the user types, until the end of standard input."""
    while True:
        if sys.stdin.isatty():
            typer.echo("you: ", nl=False)
        line = sys.stdin.readline()
        if not line:
            return
        yield line


def generate(
    scenario: RunScenarioArg = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt to continue.")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="The prompt as token ids, instead of --prompt.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Generate at most this many tokens.")
    ] = 32,
    model: ModelOption = None,
    random_weights: RandomOption = False,
    network: NetworkOption = None,
    temperature: TemperatureOption = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="K",
            help="Sample from the K most probable tokens only; 0: from all.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1,
            metavar="P",
            help="Sample from the fewest tokens whose probabilities add up to this.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2**63 - 1,
            metavar="N",
            help="Seed of the sampling; default 0.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    overrides: SetOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
    report: ReportOption = False,
) -> None:
    """Generate a text on a testbed with real blocks: every token passes through a chain of servers.

    Example, a checkpoint on three servers that are sized to it: testbed generate --model DIR --prompt "Once upon"
    """
    from testbed.runs.generate import GenerateOptions, answer_text, generate_command

    options = GenerateOptions(prompt, prompt_ids, max_new_tokens, temperature, top_k, top_p, seed)
    options.check()
    scenario, network, fit = _scenario_of(scenario, model, network, overrides)
    code, answer = generate_command(
        scenario,
        fit + changes(overrides, {"network.backend": network}, model, random_weights),
        options,
        out,
        as_json=as_json,
        report=report,
        echo=lambda text: typer.echo(text, nl=False),
    )
    if as_json:
        typer.echo(json.dumps(answer))
    elif answer:
        typer.echo(answer_text(answer), err=True)
    raise typer.Exit(code)


def _scenario_of(
    scenario: str | None, model: str | None, network: str | None, overrides: Sequence[str] | None
) -> tuple[str, str | None, list[Override]]:
    """Return the scenario to run, its network's name (``network.backend``), and what to change of it first.

    Without a scenario, servers are sized to ``model``, and ``network`` may name a scenario whose network they are on.
    Raises ``UserError``.
    """
    if scenario is not None:
        return scenario, network, []
    if model is None:
        raise UserError(
            "there is nothing to run: give a SCENARIO (`testbed scenarios` lists some), or a checkpoint with --model DIR"
        )
    from testbed.studies.fitted import fitted

    is_backend = network is None or network in (AUTO, *NETWORKS)
    base, fit = fitted(model, None if is_backend else network, overrides or [])
    return base, network if is_backend else None, fit


def net(
    scenario: ScenarioArg,
    network: NetworkOption = None,
    overrides: SetOption = None,
    out: OutOption = None,
) -> None:
    """Emulate only a scenario's network, with the programs of its node tables, until Ctrl-C."""
    from testbed.experiments import load_experiment
    from testbed.runs.net import net_command

    net_command(load_experiment(scenario, changes(overrides, {"network.backend": network})), out)


NodeArg = Annotated[
    str, typer.Argument(metavar="NODE", help="A node's name: a server, a client or a node of your own.")
]


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


def fault(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"{any_of(KINDS)}.")],
    server: Annotated[str, typer.Argument(metavar="SERVER", help="The server's name.")],
    factor: Annotated[
        float | None,
        typer.Option(
            metavar="F",
            help="With slow: how many times as long each step takes; 1 ends the slowdown.",
        ),
    ] = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Kill, stop, slow down or restart a server of a running testbed, or let it leave or join.

    cont lets a stopped server continue. The testbed may serve a workload or hold (--hold).
    """
    from testbed.runs.byhand import fault_command

    answer, text = fault_command(kind, server, factor, run)
    print_answer(answer, lambda: text, as_json)


def link(
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="cut, restore (to what the scenario has now) or set.")
    ],
    a: Annotated[str, typer.Argument(metavar="A", help="Name of a node or a site.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Name of the other node or site.")],
    rtt: Annotated[
        str | None,
        typer.Option(metavar="TIME", help='With set: round-trip time, e.g. "40 ms"; half of it each way.'),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option("--rate", metavar="RATE", help='With set: rate in each direction, e.g. "100 Mbit/s".'),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help='With set: share of packets that are lost, e.g. 0.01 or "1 %".'),
    ] = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cut, restore or set the links between two nodes or sites of a running testbed, in both directions.

    The testbed may serve a workload or hold (--hold).
    """
    from testbed.runs.byhand import link_command

    answer, text = link_command(action, a, b, rtt, rate, loss, run)
    print_answer(answer, lambda: text, as_json)
