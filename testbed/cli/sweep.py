"""Commands that make many runs (``sweep``, ``capacity``, ``advise``), and ``explain``, about one request."""

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
            help="A study file, a shipped study's name, or a scenario (a file or a shipped one's name).",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="The study's folder. Runs that it already holds are not run again.")
    ],
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="An axis: values of any key of --set, as a list (clients.site=Cluster0,Cluster1) or as a "
            "range START:STOP:STEP (workload.rate=0.1:2:0.1); or policies (policy=petals,proposed). Repeat "
            "for more axes.",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A pair, or PLACEMENT+ROUTING, also module:A+module:B; see `testbed policies`. Repeat to "
            "compare. Default the study's, or the scenario's."
        ),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(help="Number of runs of every point and policy, each with the next seed; default 1."),
    ] = None,
    seed: SeedOption = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="fast (default; runs in which something disturbs sessions use virtual), virtual (the "
            "testbed itself in virtual time), real (the testbed in real time, one run at a time) or "
            "reference (the semantics of `testbed simulate --mode reference`)."
        ),
    ] = None,
    executor: Annotated[
        str,
        typer.Option(
            help="Where runs are made: local (processes on this machine), or ray (the Ray cluster of "
            "RAY_ADDRESS, or one started here with `ray start --head`). Setting RAY_ADDRESS alone does not "
            "choose ray."
        ),
    ] = "local",
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Number of worker processes; default one per CPU of this machine, or of the cluster with "
            "--executor ray."
        ),
    ] = None,
    overrides: SetOption = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="The policy that the others are compared with; default the first one."),
    ] = None,
    slo: Annotated[str | None, typer.Option(help="Objectives for goodput, e.g. ttft=5s,tpot=1s.")] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Metrics in tables and figures, e.g. ttft_s_p95,tokens_per_s; results.parquet has all."
        ),
    ] = None,
    pareto: Annotated[
        str | None, typer.Option(help="The two metrics of the Pareto front; default tokens_per_s,ttft_s.")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="requests: write requests.parquet, too, with a row for every request of every run."
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


def capacity(
    scenario: ScenarioArg,
    slo: Annotated[
        str,
        typer.Option(
            metavar="OBJECTIVES",
            help="Objectives to meet: METRIC_STATISTIC=DURATION, e.g. ttft_p95=5s,tpot_p95=0.5s; metrics "
            "queue, setup, ttft, tpot, per_token, e2e; statistics mean, p50, p90, p95, p99.",
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A pair, or PLACEMENT+ROUTING; see `testbed policies`. Repeat to compare. Default the "
            "scenario's."
        ),
    ] = None,
    overrides: SetOption = None,
    runs: Annotated[int, typer.Option(help="Number of runs at every rate, each with the next seed.")] = 5,
    seed: SeedOption = None,
    jobs: Annotated[int | None, typer.Option(help="Number of worker processes; default one per CPU.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the highest request rate at which policies meet objectives, its interval, and what limits it."""
    from testbed.studies.capacity.command import Options, capacity_command

    options = Options(slo, tuple(policy or ()), tuple(overrides or ()), runs, seed, jobs)
    answer, text, code = capacity_command(scenario, options)
    print_answer(answer, lambda: text, as_json)
    raise typer.Exit(code)


def advise(
    scenario: ScenarioArg,
    budget: Annotated[
        str,
        typer.Option(
            metavar="COST", help="What the added servers may cost together, in the unit of candidates' costs."
        ),
    ],
    candidates: Annotated[
        str,
        typer.Option(
            metavar="LIKE@PLACE=COST,...",
            help="Servers that can be added, each as often as the budget allows, e.g. "
            "a100@Cluster1=3.5,mig-1g@Cluster0=0.5. LIKE: a server of the scenario with the same hardware "
            "and memory, or the name of a hardware (`testbed hardware`). PLACE: a site or a node with the "
            "same links.",
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
        typer.Option(metavar="METRIC_STATISTIC", help="Metric to lower, e.g. ttft_p95; default e2e_mean."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="A pair, or PLACEMENT+ROUTING; see `testbed policies`. Default the scenario's."),
    ] = None,
    overrides: SetOption = None,
    runs: Annotated[
        int, typer.Option(help="Number of runs of every combination, each with the next seed.")
    ] = 5,
    seed: SeedOption = None,
    jobs: Annotated[int | None, typer.Option(help="Number of worker processes; default one per CPU.")] = None,
    exact: Annotated[
        int,
        typer.Option(help="Try all combinations if there are at most this many, else search greedily."),
    ] = 100,
    losses: Annotated[
        bool, typer.Option(help="Evaluate the loss of each server of the scenario, too.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Store results in this folder. Runs that it already holds are not run again."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find which servers to add where within a budget, what each is worth, and whose loss would hurt most."""
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
            metavar="RUN|SCENARIO", help="A run directory, or a scenario, which is then simulated first."
        ),
    ],
    request: Annotated[int, typer.Option(min=0, help="The request's number.")],
    policy: Annotated[
        str | None,
        typer.Option(help="For a scenario: a pair, or PLACEMENT+ROUTING; see `testbed policies`."),
    ] = None,
    overrides: SetOption = None,
    seed: SeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain where one request spent its time, hop by hop, and how long the best chain would have taken."""
    from testbed.studies.explain.command import explain_command

    answer, text = explain_command(target, request, policy, overrides or [], seed)
    print_answer(answer, lambda: text, as_json)
