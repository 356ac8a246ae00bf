"""The part of the command line that answers with many runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.options import JsonOption, ScenarioArg, SeedOption, SetOption, print_answer


def sweep(
    target: Annotated[
        str,
        typer.Argument(
            metavar="STUDY|SCENARIO",
            help="A study file, a shipped study's name, or a scenario as for other commands.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="The study's folder. What is measured in it is not run again.")
    ],
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="An axis: a list (clients.site=Cluster0,Cluster1) or a range with its end (workload.rate=0.1:2:0.1) of any "
            "key that --set takes, or policy=petals,proposed. Repeat for more.",
        ),
    ] = None,
    runs: Annotated[
        int | None, typer.Option(help="Seeds of every point and policy, counting up; default 1.")
    ] = None,
    seed: SeedOption = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="fast (default; virtual where something disturbs sessions), virtual (the testbed itself in virtual time) "
            "or real (in real time, one at a time)."
        ),
    ] = None,
    executor: Annotated[
        str,
        typer.Option(
            help="Who does the runs: local (processes on this machine), or ray (a Ray cluster: that of RAY_ADDRESS, or one "
            "begun here with `ray start --head`). RAY_ADDRESS alone chooses nothing."
        ),
    ] = "local",
    jobs: Annotated[
        int | None,
        typer.Option(help="Worker processes; default one per CPU, of the cluster with --executor ray."),
    ] = None,
    overrides: SetOption = None,
    baseline: Annotated[
        str | None, typer.Option(help="The policy that others are compared with; default the first.")
    ] = None,
    slo: Annotated[str | None, typer.Option(help="Objectives for goodput, e.g. ttft=5s,tpot=1s.")] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="What tables and figures show, e.g. ttft_s_p95,tokens_per_s; results.parquet has all."
        ),
    ] = None,
    pareto: Annotated[
        str | None, typer.Option(help="The two metrics of the Pareto front; default tokens_per_s,ttft_s.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a scenario over axes, policies and seeds: a row per run, tables, figures, a page. Goes on where it was stopped."""
    from testbed.studies.sweep.command import sweep_command
    from testbed.studies.sweep.study import Options

    options = Options(
        over=tuple(over or ()),
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


def capacity(
    scenario: ScenarioArg,
    slo: Annotated[
        str,
        typer.Option(
            metavar="OBJECTIVES",
            help="What is to be kept: METRIC_STATISTIC=DURATION, e.g. ttft_p95=5s,tpot_p95=0.5s; metrics queue, setup, ttft, "
            "tpot, per_token, e2e; statistics mean, p50, p90, p95, p99.",
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A pair, or PLACEMENT+ROUTING, see `testbed policies`. Repeat to compare."),
    ] = None,
    overrides: SetOption = None,
    runs: Annotated[int, typer.Option(help="Seeds of every rate, counting up.")] = 5,
    seed: SeedOption = None,
    jobs: Annotated[int | None, typer.Option(help="Worker processes; default one per CPU.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the highest rate of requests at which policies keep objectives, with its interval, and what limits it."""
    from testbed.studies.capacity.command import Options, capacity_command

    options = Options(slo, tuple(policy or ()), tuple(overrides or ()), runs, seed, jobs)
    answer, text, code = capacity_command(scenario, options)
    print_answer(answer, lambda: text, as_json)
    raise typer.Exit(code)


def advise(
    scenario: ScenarioArg,
    budget: Annotated[
        str,
        typer.Option(metavar="COST", help="What additions may cost together, in the unit of their costs."),
    ],
    candidates: Annotated[
        str,
        typer.Option(
            metavar="LIKE@PLACE=COST,...",
            help="What can be added, as often as the budget pays, e.g. a100@Cluster1=3.5,mig-1g@Cluster0=0.5. LIKE: a server "
            "of the scenario, whose hardware and memory it gets, or a hardware by name (`testbed hardware`). PLACE: a site or "
            "a node, whose links it gets.",
        ),
    ],
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="OBJECTIVES",
            help="What is to be reached for the least cost, as in `testbed capacity`: ttft_p95=5s,tpot_p95=0.5s.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC_STATISTIC", help="What is to be lowered, e.g. ttft_p95; default e2e_mean."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="A pair, or PLACEMENT+ROUTING, see `testbed policies`; default the scenario's."),
    ] = None,
    overrides: SetOption = None,
    runs: Annotated[int, typer.Option(help="Seeds of every combination, counting up.")] = 5,
    seed: SeedOption = None,
    jobs: Annotated[int | None, typer.Option(help="Worker processes; default one per CPU.")] = None,
    exact: Annotated[
        int, typer.Option(help="So many combinations are all tried; of more, a greedy search tries some.")
    ] = 100,
    losses: Annotated[bool, typer.Option(help="Judge the loss of each server that there is, too.")] = True,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Keep what is measured in this folder; it is not run again."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say which servers to add where within a budget, what each is worth, and whose loss would hurt most."""
    from testbed.studies.advise.command import Options, advise_command

    options = Options(
        budget, candidates, slo, metric, policy, tuple(overrides or ()), runs, seed, jobs, exact, losses, out
    )
    answer, text = advise_command(scenario, options)
    print_answer(answer, lambda: text, as_json)


def explain(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|SCENARIO", help="A run directory, or a scenario, which is simulated first."
        ),
    ],
    request: Annotated[int, typer.Option(min=0, help="The request's number.")],
    policy: Annotated[
        str | None, typer.Option(help="Of a scenario: a pair, or PLACEMENT+ROUTING, see `testbed policies`.")
    ] = None,
    overrides: SetOption = None,
    seed: SeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say why one request took its time, hop by hop, and what the best chain would have taken."""
    from testbed.studies.explain.command import explain_command

    answer, text = explain_command(target, request, policy, overrides or [], seed)
    print_answer(answer, lambda: text, as_json)
