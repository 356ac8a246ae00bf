"""Commands that say what would happen: simulations, studies of many runs, and what a run's tables tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.options import (
    POLICIES,
    RESULTS,
    GoodputOption,
    JobsOption,
    JsonLinesOption,
    JsonOption,
    KeptRunsOption,
    PlacementOption,
    PoliciesOption,
    PolicyOption,
    RoutingOption,
    ScenarioArg,
    SeedOption,
    SetOption,
    out_option,
    print_answer,
    runs_option,
)
from testbed.errors import UserError

_WHERE = "Where runs are made"
ExecutorOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="local (processes on this machine) or ray (the cluster of RAY_ADDRESS, or one started here "
        "with `ray start --head`; --jobs then defaults to its CPUs).",
        rich_help_panel=_WHERE,
    ),
]


def simulate(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET", help="Scenarios (files or shipped names) and instance files (.json)."
        ),
    ],
    policy: PoliciesOption = None,
    placement: PlacementOption = None,
    routing: RoutingOption = None,
    runs: Annotated[int, runs_option(" (of a recorded workload each takes other requests)", 1)] = 1,
    seed: SeedOption = None,
    overrides: SetOption = None,
    slo: GoodputOption = None,
    as_json: JsonLinesOption = False,
    out: Annotated[Path | None, out_option("Write tables to this new folder.")] = None,
    design_concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Sessions that the placement is designed for, |R|: a number, auto (by formula) or searched.",
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            metavar="MODE",
            help="Whose semantics: testbed (default for scenarios), or reference, the paper's public "
            "simulator (default for instances).",
        ),
    ] = None,
    clock: Annotated[
        str | None,
        typer.Option(
            "--clock",
            metavar="CLOCK",
            help="virtual: run the testbed itself in virtual time on the network memory; auto: use a fast "
            "engine where one can serve the scenario.",
        ),
    ] = None,
    session_setup: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="reference: add the published session setup time to every request; none: do not.",
        ),
    ] = None,
) -> None:
    """Simulate scenarios or instance files: the decisions and tables of a run in a fraction of a second."""
    from testbed.control.choice import chosen
    from testbed.results.slo import parse_slo
    from testbed.simulator.command import Options, simulate_command

    options = Options(
        choices=tuple(chosen(name, placement, routing) for name in policy or (None,)),
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


def sweep(
    target: Annotated[
        str,
        typer.Argument(
            metavar="STUDY|SCENARIO",
            help="A study file, a shipped study's name, or a scenario (a file or a shipped one's name).",
        ),
    ],
    out: Annotated[Path, out_option("The study's folder. Runs that it already holds are not run again.")],
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="An axis: a key of --set with a list (clients.site=Cluster0,Cluster1) or a range "
            "(workload.rate=0.1:2:0.1), or policies (policy=petals,proposed). Repeat for more axes.",
        ),
    ] = None,
    runs: Annotated[int | None, runs_option(" of every point and policy (default 1)")] = None,
    seed: SeedOption = None,
    overrides: SetOption = None,
    policy: PoliciesOption = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="PAIR",
            help="The policy that the others are compared with; default the first one.",
            rich_help_panel=POLICIES,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="ENGINE",
            help="fast (default; virtual where something disturbs sessions), virtual (the testbed in virtual "
            "time), real (in real time, one run at a time) or reference (the paper's public simulator).",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    executor: ExecutorOption = "local",
    jobs: JobsOption = None,
    slo: GoodputOption = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="METRICS",
            help="Metrics in tables and figures, e.g. ttft_s_p95,tokens_per_s; results.parquet has all.",
            rich_help_panel=RESULTS,
        ),
    ] = None,
    pareto: Annotated[
        str | None,
        typer.Option(
            metavar="METRICS",
            help="The two metrics of the Pareto front; default tokens_per_s,ttft_s.",
            rich_help_panel=RESULTS,
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="requests",
            help="Write requests.parquet, too, with a row for every request of every run.",
            rich_help_panel=RESULTS,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a scenario over axes, policies and seeds; writes a row per run, tables, figures and a page.

    A stopped sweep continues when it is started again.
    """
    from testbed.studies.sweep.command import sweep_command
    from testbed.studies.sweep.study import Options

    options = Options(
        over=tuple(over or ()),
        policies=tuple(policy or ()),
        keep=keep,
        overrides=tuple(overrides or ()),
        n_runs=runs,
        seed=seed,
        engine=engine,
        baseline=baseline,
        slo=slo,
        metrics=metrics,
        pareto=pareto,
    )
    answer, text, code = sweep_command(target, options, out, executor, jobs)
    print_answer(answer, lambda: text, as_json)
    raise typer.Exit(code)


def compare(
    run_a: Annotated[
        Path,
        typer.Argument(metavar="RUN_A", help="A run directory; differences are in percent of this run."),
    ],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="The run directory to compare with it.")],
    out: Annotated[Path | None, out_option("Write JSON, tables and figures to this new folder.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two runs, emulated or simulated: request by request, token by token, hop by hop."""
    from testbed.studies.compare import compare_command

    answer, text = compare_command(run_a, run_b, out)
    print_answer(answer, lambda: text, as_json)


def explain(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|SCENARIO", help="A run directory, or a scenario, which is then simulated first."
        ),
    ],
    request: Annotated[int, typer.Option(min=0, metavar="N", help="The request's number.")],
    policy: PolicyOption = None,
    overrides: SetOption = None,
    seed: SeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain where one request spent its time, hop by hop, and how long the best chain would have taken."""
    from testbed.studies.explain.command import explain_command

    answer, text = explain_command(target, request, policy, overrides or [], seed)
    print_answer(answer, lambda: text, as_json)


def capacity(
    scenario: ScenarioArg,
    slo: Annotated[
        str,
        typer.Option(
            metavar="OBJECTIVES",
            help="Objectives to meet, e.g. ttft_p95=5s,tpot_p95=0.5s: queue, setup, ttft, tpot, per_token or "
            "e2e, with mean, p50, p90, p95 or p99.",
        ),
    ],
    policy: PoliciesOption = None,
    overrides: SetOption = None,
    runs: Annotated[int, runs_option(" at every rate")] = 5,
    seed: SeedOption = None,
    jobs: JobsOption = None,
    out: KeptRunsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the highest request rate at which policies meet objectives, its interval, and what limits it.

    A stopped search continues when it is started again.
    """
    from testbed.studies.capacity.command import Options, capacity_command

    options = Options(slo, tuple(policy or ()), tuple(overrides or ()), runs, seed, jobs, out)
    answer, text, code = capacity_command(scenario, options)
    print_answer(answer, lambda: text, as_json)
    raise typer.Exit(code)


def score(
    policy: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="POLICY",
            help="A pair by its name, PLACEMENT+ROUTING (each a name or module:Class), or a module:Class that is both.",
        ),
    ] = None,
    suite: Annotated[
        str, typer.Option("--suite", metavar="SUITE", help="A shipped suite, or a folder with one.")
    ] = "geo-4",
    quick: Annotated[bool, typer.Option("--quick", help="A few small settings, with one seed.")] = False,
    seeds: Annotated[
        str,
        typer.Option(
            "--seeds",
            metavar="SEEDS",
            help="frozen: the suite's own; fresh: these, and as many that are drawn now; or numbers, 20,21,22.",
        ),
    ] = "frozen",
    all_policies: Annotated[
        bool,
        typer.Option(
            "--all", help="Make the leaderboard: score the reference policies, and any POLICY beside them."
        ),
    ] = False,
    executor: ExecutorOption = "local",
    jobs: JobsOption = None,
    out: KeptRunsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score a policy on a frozen suite of settings, against reference policies; exit code 0 if it broke no rule.

    A stopped score goes on when the same command is started again.
    """
    from testbed.studies.score.command import Options, leaderboard_command, score_command

    options = Options(suite, quick, seeds, jobs, out, executor=executor)
    policies = policy or []
    if all_policies:
        answer, text, code = leaderboard_command(policies, options)
    elif len(policies) == 1:
        answer, text, code = score_command(policies[0], options)
    else:
        raise UserError("give one POLICY, or --all for the leaderboard")
    print_answer(answer, lambda: text, as_json)
    raise typer.Exit(code)


def advise(
    scenario: ScenarioArg,
    budget: Annotated[
        str,
        typer.Option(
            metavar="COST", help="What all that is added may cost together, in the unit of candidates' costs."
        ),
    ],
    candidates: Annotated[
        str,
        typer.Option(
            "--candidates",
            metavar="CANDIDATES",
            help="Servers to add, LIKE@PLACE=COST, and links to widen, uplink@PLACE=RATE=COST, e.g. "
            "'a100@Cluster1=3.5,uplink@home=100 Mbit/s=2'.",
        ),
    ],
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="OBJECTIVES",
            help="Objectives to meet for the least cost, as in `testbed capacity`: "
            "ttft_p95=5s,tpot_p95=0.5s.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option("--metric", metavar="METRIC", help="Metric to lower, e.g. ttft_p95; default e2e_mean."),
    ] = None,
    policy: PolicyOption = None,
    overrides: SetOption = None,
    runs: Annotated[int, runs_option(" of every combination")] = 5,
    seed: SeedOption = None,
    jobs: JobsOption = None,
    exact: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Try all combinations if there are at most this many, else search greedily.",
        ),
    ] = 100,
    losses: Annotated[
        bool, typer.Option(help="Evaluate the loss of each server of the scenario, too.")
    ] = True,
    out: KeptRunsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find which servers or wider links to add where within a budget, what each is worth, and whose loss would
    hurt most.

    In --candidates, LIKE is a server of the scenario with the same hardware and memory, or the name of a
    hardware (`testbed hardware`); PLACE is a site or a node with the same links. Each can be added as often as
    the budget allows. A link to widen is the uplink or downlink that a site has in [[sites]]; without =COST it
    costs 1.

    A stopped search continues when it is started again.
    """
    from testbed.studies.advise.command import Options, advise_command

    options = Options(
        budget, candidates, slo, metric, policy, tuple(overrides or ()), runs, seed, jobs, exact, losses, out
    )
    answer, text = advise_command(scenario, options)
    print_answer(answer, lambda: text, as_json)


def solve(
    instances: Annotated[list[Path], typer.Argument(metavar="INSTANCE", help="Offline instance files.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="milp, milp-paper, cg-bprr (default) or lp-rounding. Repeat to compare."
        ),
    ] = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Place and route offline instances, in which all requests arrive at once."""
    from testbed.simulator.offline import offline_command
    from testbed.simulator.text import offline_text

    answers = [answer for name in policy or ["cg-bprr"] for answer in offline_command(instances, name)]
    typer.echo("\n".join(map(json.dumps, answers)) if as_json else offline_text(answers))
