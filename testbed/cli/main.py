"""The command line. Every command is a function here or in a module beside it, and calls the code for it."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from testbed.cli.blocks import generate, hardware, model_app, model_changes
from testbed.cli.measure import calibrate, links, reproduce, topology
from testbed.cli.options import (
    ClockOption,
    ComputeOption,
    HostsOption,
    JsonOption,
    ModelOption,
    NetworkOption,
    NoPageOption,
    OutOption,
    PageOption,
    PairOption,
    PlacementOption,
    RandomOption,
    RoutingOption,
    RunOption,
    ScenarioArg,
    SeedOption,
    SetOption,
    TimeScaleOption,
    TraceOption,
    print_answer,
    with_page_port,
)
from testbed.cli.programs import execute, link, net, ps, shell
from testbed.cli.sweep import advise, capacity, explain, sweep
from testbed.cli.workload import workload_app
from testbed.errors import EXIT_INTERRUPTED, TestbedError, UserError
from testbed.faultkinds import KINDS, any_of
from testbed.terminal import warn_once

if TYPE_CHECKING:
    from testbed.experiments import Override


class _Commands(TyperGroup):
    """Reports Ctrl-C with the command's own message; Typer would print nothing."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupted:
            _fail(str(interrupted) or "stopped", EXIT_INTERRUPTED)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Start with: testbed up clustered",
)

_RUNS, _SCENARIOS, _RESULTS, _MACHINE = "Runs", "Scenarios", "Results", "Machine and models"

# Typer has a copy of click inside, whose usage error is public only as the base of this one.
_UsageError: Any = typer.BadParameter.__bases__[0]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from testbed.codeversion import code_version
        from testbed.experiments.provenance import commit

        known = commit()
        typer.echo(code_version() + (f", commit {known}" if known else ""))
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Networked emulation testbed for geographically distributed LLM inference."""


@app.command(rich_help_panel=_RUNS)
def up(
    scenario: ScenarioArg,
    clock: ClockOption = None,
    network: NetworkOption = None,
    hosts: HostsOption = None,
    compute: ComputeOption = None,
    model: ModelOption = None,
    random_weights: RandomOption = False,
    placement: PlacementOption = None,
    routing: RoutingOption = None,
    policy: PairOption = None,
    time_scale: TimeScaleOption = None,
    seed: SeedOption = None,
    runs: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of runs, one after the other, each with the next seed and its own folder in --out; "
            "prints means with intervals.",
        ),
    ] = 1,
    overrides: SetOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
    hold: Annotated[bool, typer.Option("--hold", help="Keep the testbed up after the workload.")] = False,
    slo: Annotated[str | None, typer.Option(help="Objectives for goodput, e.g. ttft=5s,tpot=1s.")] = None,
    report: Annotated[bool, typer.Option(help="Write report.html and figures after the run.")] = True,
    trace: TraceOption = True,
    twin: Annotated[
        bool,
        typer.Option(help="After a run in real time, repeat it in virtual time and compare the two."),
    ] = True,
    page: PageOption = None,
    no_page: NoPageOption = False,
) -> None:
    """Start the testbed, serve the scenario's workload, write tables and a trace, print a summary."""
    from testbed.control.choice import chosen
    from testbed.control.placing import load_to_run
    from testbed.results.slo import parse_slo
    from testbed.runs.session import RunOptions
    from testbed.runs.up import up_command

    keys = {
        "clock": clock,
        "network.backend": network,
        "hosts": hosts,
        "compute.backend": compute,
        "time_scale": time_scale,
    }
    changes = _changes(keys)
    changes += model_changes(model, random_weights)
    choice, changes = chosen(policy, placement, routing), [*(overrides or []), *changes]
    options = RunOptions(
        hold=hold,
        objectives=parse_slo(slo) if slo is not None else None,
        report=report,
        trace=trace,
        with_twin=twin,
        page_port=_page_port(page, no_page, hold),
    )
    if runs > 1:
        from testbed.studies.seeds.command import seeds_command

        raise typer.Exit(seeds_command(scenario, choice, changes, seed, runs, out, options, as_json=as_json))
    seeds = [] if seed is None else [f"seed={seed}"]
    experiment = load_to_run(scenario, [*changes, *choice.overrides(), *seeds])
    raise typer.Exit(up_command(experiment, out, options, as_json=as_json))


def _page_port(page: int | None, no_page: bool, by_default: bool) -> int | None:
    """Return the page's port, 0 for any free one, or None if no page is served. Raises ``UserError``."""
    if no_page and page is not None:
        raise UserError("--page and --no-page cannot both be given; leave one out")
    return 0 if page is None and by_default and not no_page else page


@app.command(rich_help_panel=_RUNS)
def serve(
    scenario: ScenarioArg,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; one that other machines can reach needs --api-key or --no-auth."
        ),
    ] = "127.0.0.1",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="TESTBED_API_KEY", help="Key that requests must send as Authorization: Bearer KEY."
        ),
    ] = None,
    no_auth: Annotated[
        bool,
        typer.Option("--no-auth", help="Need no key: everybody who can reach --host may use the testbed."),
    ] = False,
    workload: Annotated[
        str,
        typer.Option(help="none: serve requests from outside only; also: serve the scenario's own, too."),
    ] = "none",
    admission: Annotated[
        str,
        typer.Option(help="What happens to a request without room: wait, or reject (HTTP 429)."),
    ] = "wait",
    max_requests: Annotated[
        int,
        typer.Option(min=1, help="Open requests at most; further ones are rejected (HTTP 429)."),
    ] = 1024,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Longest request in tokens, prompt plus answer; default 4096, or the model's limit if it is "
            "lower.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer's folder; default the model's, or with the stub a small one."),
    ] = None,
    policy: PairOption = None,
    placement: PlacementOption = None,
    routing: RoutingOption = None,
    network: NetworkOption = None,
    hosts: HostsOption = None,
    compute: ComputeOption = None,
    model: ModelOption = None,
    random_weights: RandomOption = False,
    time_scale: TimeScaleOption = None,
    seed: SeedOption = None,
    overrides: SetOption = None,
    out: OutOption = None,
    report: Annotated[bool, typer.Option(help="Write report.html and figures at the end.")] = True,
    trace: TraceOption = True,
    twin: Annotated[
        bool,
        typer.Option(help="At the end, serve the same requests again in virtual time and compare the two."),
    ] = True,
    page: PageOption = None,
    no_page: NoPageOption = False,
) -> None:
    """Start the testbed and serve requests from outside through OpenAI's API until Ctrl-C."""
    from testbed.control.choice import chosen
    from testbed.runs.serve import ServeOptions, serve_command

    for name, value, known in (
        ("workload", workload, ("also", "none")),
        ("admission", admission, ("wait", "reject")),
    ):
        if value not in known:
            raise UserError(f"--{name} must be {' or '.join(known)}, not {value}")
    changes = _changes(
        {
            "network.backend": network,
            "hosts": hosts,
            "compute.backend": compute,
            "time_scale": time_scale,
            "seed": seed,
        }
    )
    changes += [*model_changes(model, random_weights), *chosen(policy, placement, routing).overrides()]
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
        _page_port(page, no_page, True),
    )
    serve_command(
        scenario,
        [*(overrides or []), *changes],
        options,
        out,
        report=report,
        trace=trace,
        with_twin=twin,
        echo=typer.echo,
    )


def _changes(options: dict[str, Any]) -> list[Override]:
    """Return ``--set`` overrides for the options that were given; keys are those of scenario files."""
    return [f"{key}={value}" for key, value in options.items() if value is not None]


@app.command(rich_help_panel=_RUNS)
def fault(
    kind: Annotated[str, typer.Argument(help=f"{any_of(KINDS)}.")],
    server: Annotated[str, typer.Argument(help="The server's name.")],
    factor: Annotated[
        float | None,
        typer.Option(help="With slow: how many times as long each step takes; 1 ends the slowdown."),
    ] = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Kill, stop, slow down or restart a server of a running testbed, or let it leave or join.

    cont lets a stopped server continue. The testbed may serve a workload or hold (--hold).
    """
    from testbed.control.faults.byhand import fault_command

    answer, text = fault_command(kind, server, factor, run)
    print_answer(answer, lambda: text, as_json)


@app.command(rich_help_panel=_RUNS)
def simulate(
    targets: Annotated[
        list[str],
        typer.Argument(
            help="Scenarios (files or shipped names) and instance files (.json).", metavar="TARGET"
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A pair of a placement and a routing policy; see `testbed policies`. Repeat to compare."
        ),
    ] = None,
    placement: PlacementOption = None,
    routing: RoutingOption = None,
    runs: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of Monte-Carlo runs, each with the next seed; of a recorded workload each takes "
            "other requests.",
        ),
    ] = 1,
    seed: SeedOption = None,
    session_setup: Annotated[
        str | None,
        typer.Option(help="reference: add the published session setup time to every request; none: do not."),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="Whose semantics: testbed (default for scenarios), or reference, the paper's public "
            "simulator (default for instances)."
        ),
    ] = None,
    clock: Annotated[
        str | None,
        typer.Option(
            help="virtual: run the testbed itself in virtual time on the network memory; auto: use a fast "
            "engine where one can serve the scenario."
        ),
    ] = None,
    design_concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Sessions that the placement is designed for, |R|: a number, auto (by formula) or searched.",
        ),
    ] = None,
    overrides: SetOption = None,
    slo: Annotated[str | None, typer.Option(help="Objectives for goodput, e.g. ttft=5s,tpot=1s.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line to stdout.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write tables to this new folder.")] = None,
) -> None:
    """Simulate scenarios or instance files: the decisions and tables of a run in a fraction of a second."""
    from testbed.control.choice import chosen
    from testbed.results.slo import parse_slo
    from testbed.simulator.command import Options, simulate_command

    choices = [chosen(name, placement, routing) for name in policy or (None,)]
    options = Options(
        choices=tuple(choices),
        n_runs=runs,
        seed=seed,
        session_setup=session_setup,
        mode=mode,
        design_concurrency=design_concurrency,
        overrides=tuple(overrides or ()),
        objectives=parse_slo(slo) if slo is not None else None,
        out=out,
        clock=clock,
    )
    raise typer.Exit(simulate_command(targets, options, as_json=as_json))


@app.command(rich_help_panel=_RUNS)
def solve(
    instances: Annotated[list[Path], typer.Argument(metavar="INSTANCE...", help="Offline instance files.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="milp, cg-bprr (default) or lp-rounding. Repeat to compare."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line to stdout.")
    ] = False,
) -> None:
    """Place and route offline instances, in which all requests arrive at once."""
    from testbed.simulator.offline import offline_command
    from testbed.simulator.text import offline_text

    answers = [answer for name in policy or ["cg-bprr"] for answer in offline_command(instances, name)]
    typer.echo("\n".join(map(json.dumps, answers)) if as_json else offline_text(answers))


@app.command(rich_help_panel=_SCENARIOS)
def show(scenario: ScenarioArg, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Print the resolved scenario: every name looked up, every unit converted."""
    from testbed.experiments import dump_toml, load_experiment

    experiment = load_experiment(scenario, overrides or [])
    print_answer(dict(experiment.document), lambda: dump_toml(experiment), as_json)


@app.command(rich_help_panel=_SCENARIOS)
def validate(
    scenario: ScenarioArg,
    compute: ComputeOption = None,
    model: ModelOption = None,
    random_weights: RandomOption = False,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a scenario, its placement included, without running anything.

    A policy that the file names as module:Class is not imported, and the placement is not checked then.
    """
    from testbed.control.placing import load_to_run, place_experiment
    from testbed.experiments import load_experiment
    from testbed.experiments.units import counted
    from testbed.runs.session import check_online
    from testbed.runtime.gpus import missing_gpu, shared_out
    from testbed.runtime.wiring import check_frames

    changes: list[Override] = [
        *(overrides or []),
        *_changes({"compute.backend": compute}),
        *model_changes(model, random_weights),
    ]
    experiment = load_experiment(scenario, changes)
    if not experiment.policy.code_in_file:
        experiment = load_to_run(scenario, changes)
    check_frames(experiment)
    missing = missing_gpu(experiment)
    remarks = [missing] if missing else []
    blocks = shared_out(experiment, remarks.append)
    placement = None
    if not experiment.policy.code_in_file:
        placement = place_experiment(experiment).placement
        check_online(experiment, placement)
    answer: dict[str, Any] = {
        "valid": True,
        "name": experiment.name,
        "n_servers": experiment.problem.n_servers,
        "n_clients": len(experiment.problem.clients),
        "n_requests": len(experiment.workload.requests),
        "design_concurrency": placement and placement.design_concurrency,
        "not_loaded": list(experiment.policy.code_in_file),
        "missing_gpu": missing,
        "devices": blocks and [blocks.device_of(n) for n in range(experiment.problem.n_servers)],
    }
    if placement is None:
        placed = (
            f"placement not checked: {', '.join(experiment.policy.code_in_file)} in the file would run code"
        )
    else:
        placed = f"{placement.policy} places all blocks"
        if placement.design_concurrency:
            placed += f" for |R| = {placement.design_concurrency}"
    print_answer(
        answer,
        lambda: (
            f"{experiment.name}: valid; {counted(answer['n_servers'], 'servers')}, "
            f"{counted(answer['n_clients'], 'clients')}, {counted(answer['n_requests'], 'requests')}; "
            f"{placed}" + "".join(f"\n{remark}" for remark in remarks)
        ),
        as_json,
    )


@app.command(rich_help_panel=_SCENARIOS)
def scenarios(as_json: JsonOption = False) -> None:
    """List the shipped scenarios."""
    from testbed.experiments import shipped_scenarios

    rows = [{"name": name, "description": text} for name, text in shipped_scenarios()]
    print_answer(
        {"scenarios": rows}, lambda: "\n".join(f"{r['name']:<14} {r['description']}" for r in rows), as_json
    )


@app.command(rich_help_panel=_SCENARIOS)
def policies(as_json: JsonOption = False) -> None:
    """List placement and routing policies, one line each."""
    from policies.registry import list_policies

    rows = list_policies()
    print_answer(
        {"policies": rows},
        lambda: "\n".join(f"{r['kind']:<10} {r['name']:<24} {r['summary']}" for r in rows),
        as_json,
    )


@app.command(rich_help_panel=_MACHINE)
def doctor(as_json: JsonOption = False) -> None:
    """Show what works on this machine, what does not, and how to get it."""
    from testbed.inspect.machine import doctor_rows, doctor_text

    rows = doctor_rows()
    print_answer({"capabilities": rows}, lambda: doctor_text(rows), as_json)


@app.command(rich_help_panel=_MACHINE)
def clean(
    out: Annotated[Path, typer.Option("--out", help="A run directory, or a folder of them.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Remove what killed runs left on this machine (processes, sockets, folders), and make missing tables.

    Tables are made for the runs in --out, from their logs.
    """
    from testbed.runs.clean import clean_command, clean_text

    if not out.is_dir() and out != Path("runs"):
        raise UserError(f"{out} is not a folder; give a run directory, or a folder of them, with --out")
    answer = clean_command(out)
    print_answer(answer, lambda: clean_text(answer), as_json)


@app.command(rich_help_panel=_RESULTS)
def report(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    trace: TraceOption = True,
    as_json: JsonOption = False,
) -> None:
    """Rebuild the tables, summary, trace and report of a run from its logs."""
    from testbed.records.base import data_of
    from testbed.results import load_run
    from testbed.results.text import summary_text
    from testbed.runs.session import exit_code, finish

    summary = finish(run, load_run(run), trace=trace)
    print_answer(data_of(summary), lambda: summary_text(summary), as_json)
    raise typer.Exit(exit_code(summary))


@app.command(rich_help_panel=_RESULTS)
def view(
    run: Annotated[
        Path, typer.Argument(help="The run directory of a finished run, a running one or a simulation.")
    ],
    others: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Finished runs with other seeds; charts then show the 95 % interval of the mean over all."
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port to listen on; 0: any free one. Default 8765 if it is free, else any."
        ),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in this machine's browser.")] = True,
) -> None:
    """Show a run in the browser, live or replayed, until Ctrl-C."""
    from testbed.page.view import view_command

    view_command(run, others or (), port, browser, typer.echo)


@app.command(rich_help_panel=_RESULTS)
def compare(
    run_a: Annotated[Path, typer.Argument(help="A run directory; differences are in percent of this run.")],
    run_b: Annotated[Path, typer.Argument(help="The run directory to compare with it.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Write JSON, tables and figures to this new folder.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two runs, emulated or simulated: request by request, token by token, hop by hop."""
    from testbed.studies.compare import compare_command

    answer, text = compare_command(run_a, run_b, out)
    print_answer(answer, lambda: text, as_json)


for command, panel in (
    (net, _RUNS),
    (ps, _RUNS),
    (shell, _RUNS),
    (link, _RUNS),
    (generate, _RUNS),
    (topology, _SCENARIOS),
    (sweep, _RESULTS),
    (capacity, _RESULTS),
    (advise, _RESULTS),
    (explain, _RESULTS),
    (reproduce, _RESULTS),
    (links, _MACHINE),
    (calibrate, _MACHINE),
    (hardware, _MACHINE),
):
    app.command(rich_help_panel=panel)(command)
app.command("exec", rich_help_panel=_RUNS)(execute)
app.add_typer(workload_app, name="workload", rich_help_panel=_SCENARIOS)
app.add_typer(model_app, name="model", rich_help_panel=_MACHINE)


def main() -> NoReturn:
    """Entry point: runs the command. Errors are one sentence on stderr; a user's mistake has exit code 2."""
    warn_once()
    try:
        code = app(with_page_port(sys.argv[1:]) or ["--help"], standalone_mode=False)
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "testbed"
        _fail(f"{_misuse(error)} (see `{command} --help`)", 2)
    except UserError as error:
        _fail(error, 2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        # Commands handle the errors of the files that they read and write: this is standard output.
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(f"cannot write the result to standard output: {error.strerror}", 1)
    except TestbedError as error:
        _fail(error, 1)
    sys.exit(code)


def _misuse(error: Any) -> str:
    """Return what is wrong with the command line; of an option's value in the words that scenario files get."""
    from pydantic import ValidationError

    from testbed.experiments.problems import explain

    if isinstance(error.__cause__, ValidationError):  # Typer has read the value with pydantic
        return f"{error.param.opts[0]} {explain(error.__cause__).what}"
    return str(error.format_message()).rstrip(".")


def _fail(error: Exception | str, code: int) -> NoReturn:
    print(f"testbed: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
