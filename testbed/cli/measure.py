"""The part of the command line that measures: the emulated network, a backend, the paper's evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.options import (
    HostsOption,
    JsonOption,
    NetworkOption,
    ScenarioArg,
    SetOption,
    TimeScaleOption,
    print_answer,
)
from testbed.errors import UserError


def links(
    scenario: ScenarioArg,
    network: NetworkOption = None,
    hosts: HostsOption = None,
    pairs: Annotated[
        int | None, typer.Option(min=1, help="Measure only the first N client-server pairs.")
    ] = None,
    echoes: Annotated[int, typer.Option(min=2, help="Echoes per pair and message size.")] = 50,
    load: Annotated[
        bool, typer.Option("--load", help="Measure each pair also while up to 20 others are busy.")
    ] = False,
    time_scale: TimeScaleOption = None,
    overrides: SetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write JSON, tables and a plot to this new folder.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the emulated network itself: requested and achieved RTT and rate of every pair."""
    from testbed.scenario import load_experiment
    from testbed.studies.links.check import links_command

    options = {"network.backend": network, "hosts": hosts, "time_scale": time_scale}
    changes = [f"{key}={value}" for key, value in options.items() if value is not None]
    experiment = load_experiment(scenario, [*(overrides or []), *changes])
    answer, text = links_command(
        experiment, pairs, echoes, load=load, out=out, announce=lambda text: typer.echo(text, err=True)
    )
    print_answer(answer, lambda: text, as_json)


def topology(
    name: Annotated[
        str,
        typer.Argument(
            help="A shipped topology, or a file (.toml, .graphml, .gml, .graph, .xml, .txt; RTT matrix: .csv, .json)."
        ),
    ],
    scenario: Annotated[str | None, typer.Option(help="Mark this scenario's servers and clients.")] = None,
    delays: Annotated[str, typer.Option(help="given, or fibre: from coordinates.")] = "given",
    detour: Annotated[float | None, typer.Option(min=1, help="With fibre: cable per distance.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw a map to this file (.png, .svg, .pdf).")] = None,
    rtt_unit: Annotated[str, typer.Option(help="Unit of an RTT matrix file.")] = "ms",
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a topology: nodes, links, round-trip times, and a map."""
    from testbed.inspect.topology import topology_command
    from testbed.scenario import load_experiment

    if overrides and scenario is None:
        raise UserError("--set changes a scenario: name one with --scenario")
    experiment = load_experiment(scenario, overrides or []) if scenario else None
    answer, text = topology_command(name, delays, detour, experiment, picture, rtt_unit)
    print_answer(answer, lambda: text, as_json)


_ONLY_FOR = {
    **dict.fromkeys(("only", "out", "jobs"), ("paper",)),
    **dict.fromkeys(("runs", "seed"), ("paper", "chain")),
    **dict.fromkeys(("log", "cluster", "tables", "warm_up", "step_base"), ("helix",)),
}
"""Options of ``testbed reproduce`` that not all of its studies have."""


def reproduce(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            help="paper; chain: its successor's Table I; helix: a logged run of that system beside its simulation."
        ),
    ],
    only: Annotated[str | None, typer.Option(help="tables or figures; default both.")] = None,
    runs: Annotated[int, typer.Option(help="Monte-Carlo runs of every setting.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the first run; the next runs have the next seeds.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Default runs/reproduce-paper. What is in it is not run again."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Worker processes; default one per CPU.")] = None,
    log: Annotated[
        Path | None, typer.Option(help="helix: folder with events.txt and query_route.txt (or .gz).")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="helix: the cluster's .ini file.")] = None,
    tables: Annotated[
        Path | None, typer.Option(help="helix: folder with KIND_prompt.csv and KIND_decode.csv.")
    ] = None,
    warm_up: Annotated[float, typer.Option(help="helix: seconds of the log that are left out.")] = 30.0,
    step_base: Annotated[
        float | None, typer.Option(help="helix: seconds of a step besides its layers; default 0.004.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the paper's evaluation and set its printed numbers beside ours. Goes on where it was stopped.

    chain: the successor paper's response times beside simulated ones. helix: serve a log's queries on their routes, and set
    its measured latencies beside the simulated ones. docs/validation.md has both.
    """
    from testbed.studies.reproduce.command import WHAT

    for name, studies in _ONLY_FOR.items():
        source = context.get_parameter_source(name)
        if what in WHAT and what not in studies and source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise UserError(
                f"{option} is for reproduce {' and '.join(studies)}; leave it out of reproduce {what}"
            )
    if what == "helix":
        from testbed.studies.helix.command import STEP_BASE_S, helix_command

        if log is None or cluster is None or tables is None:
            raise UserError(
                "reproduce helix needs --log DIR, --cluster FILE and --tables DIR of its artifact"
            )
        answer, text = helix_command(
            log, cluster, tables, warm_up, STEP_BASE_S if step_base is None else step_base
        )
        print_answer(answer, lambda: text, as_json)
        return
    if what == "chain":
        from testbed.studies.chain.command import chain_command

        answer, text = chain_command(runs, seed, lambda text: typer.echo(text, err=True))
        print_answer(answer, lambda: text, as_json)
        return
    from testbed.studies.reproduce.command import reproduce_command

    answer, text = reproduce_command(what, only, runs, seed, out, jobs)
    print_answer(answer, lambda: text, as_json)


def calibrate(
    model: Annotated[str, typer.Option(help="A checkpoint's folder, or its name on the hub.")],
    compute: Annotated[str, typer.Option(help="What is calibrated: blocks.")] = "blocks",
    device: Annotated[str, typer.Option(help="cpu, cuda, or the UUID of a GPU or MIG instance.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default the model's own.")
    ] = None,
    weights: Annotated[
        str, typer.Option(help="How blocks hold their matrices: plain, int8 or nf4.")
    ] = "plain",
    threads: Annotated[int, typer.Option(help="CPU threads of a step.")] = 1,
    streams: Annotated[int, typer.Option(help="Steps that are computed at once.")] = 1,
    cuda_graphs: Annotated[
        bool,
        typer.Option("--cuda-graphs", help="As compute.cuda_graphs of the runs that the profile is for."),
    ] = False,
    name: Annotated[str | None, typer.Option(help="Name of the profile; default MODEL-DEVICE.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="A new folder; default runs/calibrate-NAME-TIME.")
    ] = None,
    blocks: Annotated[int | None, typer.Option(help="Load at most so many blocks; default all.")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Input lengths, e.g. 16,64,256; default as far as the model goes.")
    ] = None,
    sessions: Annotated[str, typer.Option(help="Numbers of sessions at once, and in one step.")] = "1,2,4,8",
    output_tokens: Annotated[int, typer.Option(help="Output tokens of the longest session.")] = 128,
    rounds: Annotated[int, typer.Option(help="How often everything is measured.")] = 5,
    pause_ms: Annotated[
        float, typer.Option(min=0, help="Idle before every step of a session alone, as the network's delay.")
    ] = 10,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="No weights are read: --model may be a profile (bloom-176b)."),
    ] = False,
    batches: Annotated[
        bool, typer.Option("--batches/--no-batches", help="Measure steps of several sessions, too.")
    ] = True,
    keep_cpus_awake: Annotated[
        bool,
        typer.Option(
            "--keep-cpus-awake/--no-keep-cpus-awake",
            help="As network.keep_cpus_awake of the runs that the profile is for.",
        ),
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Measure a backend's times and memory, fit the model to them, write a hardware profile for scenarios."""
    from testbed.studies.calibrate.command import Options, calibrate_command, numbers

    options = Options(
        model=model,
        compute=compute,
        device=device,
        dtype=dtype,
        weights=weights,
        n_threads=threads,
        n_streams=streams,
        has_graphs=cuda_graphs,
        name=name,
        out=out,
        n_blocks=blocks,
        lengths=numbers("--lengths", lengths),
        sessions=numbers("--sessions", sessions) or (),
        n_output_tokens=output_tokens,
        rounds=rounds,
        pause_s=pause_ms / 1e3,
        random_weights=random_weights,
        batches=batches,
        keep_cpus_awake=keep_cpus_awake,
    )
    answer, text = calibrate_command(options, lambda text: typer.echo(text, err=True))
    print_answer(answer, lambda: text, as_json)
