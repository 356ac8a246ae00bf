"""The commands that measure: the emulated network, topologies, a compute backend, the paper's evaluation."""

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
from testbed.terminal import say


def links(
    scenario: ScenarioArg,
    network: NetworkOption = None,
    hosts: HostsOption = None,
    pairs: Annotated[
        int | None, typer.Option(min=1, help="Measure only the first N client-server pairs.")
    ] = None,
    echoes: Annotated[int, typer.Option(min=2, help="Echoes per pair and message size.")] = 50,
    load: Annotated[
        bool, typer.Option("--load", help="Measure each pair again while up to 20 other pairs are busy.")
    ] = False,
    time_scale: TimeScaleOption = None,
    overrides: SetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write JSON, tables and a plot to this new folder.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the emulated network: requested and achieved RTT and rate of every client-server pair."""
    from testbed.experiments import load_experiment
    from testbed.studies.links.check import links_command

    options = {"network.backend": network, "hosts": hosts, "time_scale": time_scale}
    changes = [f"{key}={value}" for key, value in options.items() if value is not None]
    experiment = load_experiment(scenario, [*(overrides or []), *changes])
    answer, text = links_command(experiment, pairs, echoes, load=load, out=out, announce=say)
    print_answer(answer, lambda: text, as_json)


def topology(
    name: Annotated[
        str,
        typer.Argument(
            help="A shipped topology's name, or a file (.toml, .graphml, .gml, .graph, .xml, .txt; RTT matrix: "
            ".csv, .json).",
        ),
    ],
    scenario: Annotated[str | None, typer.Option(help="Mark this scenario's servers and clients.")] = None,
    delays: Annotated[
        str,
        typer.Option(help="given: those of the topology; fibre: from coordinates and the speed of light."),
    ] = "given",
    detour: Annotated[
        float | None,
        typer.Option(min=1, help="With fibre: cable length over straight distance; default 1.5."),
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw a map to this file (.png, .svg, .pdf).")] = None,
    rtt_unit: Annotated[
        str | None, typer.Option(help="Unit of the times in an RTT matrix file; default ms.")
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a topology: nodes, links, round-trip times, and a map."""
    from testbed.experiments import load_experiment
    from testbed.inspect.topology import topology_command

    if overrides and scenario is None:
        raise UserError("--set changes a scenario: name one with --scenario, or leave out --set")
    experiment = load_experiment(scenario, overrides or []) if scenario else None
    answer, text = topology_command(name, delays, detour, experiment, picture, rtt_unit)
    print_answer(answer, lambda: text, as_json)


_ONLY_FOR = {
    **dict.fromkeys(("only", "out"), ("paper",)),
    **dict.fromkeys(("runs", "seed", "jobs"), ("paper", "chain")),
    **dict.fromkeys(("log", "cluster", "tables", "warm_up", "step_base"), ("helix",)),
}
"""Options that only some studies of ``testbed reproduce`` have, and these studies."""


def reproduce(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            help="paper: the paper's evaluation; chain: Table I of its successor; helix: a logged run of "
            "Helix beside its simulation."
        ),
    ],
    only: Annotated[str | None, typer.Option(help="tables or figures; default both.")] = None,
    runs: Annotated[int, typer.Option(help="Number of Monte-Carlo runs of every setting.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the first run; the next runs have the next seeds.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The results' folder; default runs/reproduce-paper. Runs in it are not run again."
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Number of worker processes; default one per CPU.")] = None,
    log: Annotated[
        Path | None, typer.Option(help="helix: folder with events.txt and query_route.txt (or .gz).")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="helix: the cluster's .ini file.")] = None,
    tables: Annotated[
        Path | None, typer.Option(help="helix: folder with KIND_prompt.csv and KIND_decode.csv.")
    ] = None,
    warm_up: Annotated[float, typer.Option(help="helix: seconds at the log's start to leave out.")] = 30.0,
    step_base: Annotated[
        float | None,
        typer.Option(help="helix: seconds that a step takes besides its layers; default 0.004."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the paper's evaluation and compare its printed numbers with ours.

    A stopped evaluation continues when it is started again. docs/validation.md describes chain and helix.

    chain: compare the successor paper's response times with simulated ones.

    helix: serve a log's queries on their logged routes, and compare measured with simulated latencies.
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
        from testbed.studies.reproduce.helix import STEP_BASE_S, helix_command

        if log is None or cluster is None or tables is None:
            raise UserError(
                "reproduce helix needs --log DIR, --cluster FILE and --tables DIR of Helix' artifact"
            )
        answer, text = helix_command(
            log, cluster, tables, warm_up, STEP_BASE_S if step_base is None else step_base
        )
        print_answer(answer, lambda: text, as_json)
        return
    if what == "chain":
        from testbed.studies.reproduce.chain import chain_command

        answer, text = chain_command(runs, seed, jobs)
        print_answer(answer, lambda: text, as_json)
        return
    from testbed.studies.reproduce.command import reproduce_command

    answer, text = reproduce_command(what, only, runs, seed, out, jobs)
    print_answer(answer, lambda: text, as_json)


def calibrate(
    model: Annotated[str, typer.Option(help="A checkpoint's folder, or its name on the Hugging Face hub.")],
    compute: Annotated[str, typer.Option(help="The backend to calibrate: blocks.")] = "blocks",
    device: Annotated[str, typer.Option(help="cpu, cuda, or the UUID of a GPU or MIG instance.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default the model's own.")
    ] = None,
    weights: Annotated[
        str, typer.Option(help="How blocks store their matrices: plain, int8 or nf4.")
    ] = "plain",
    threads: Annotated[int, typer.Option(help="Number of CPU threads of a step.")] = 1,
    streams: Annotated[int, typer.Option(help="Number of steps that are computed at the same time.")] = 1,
    cuda_graphs: Annotated[
        bool,
        typer.Option("--cuda-graphs", help="Use compute.cuda_graphs, as the runs that the profile is for."),
    ] = False,
    name: Annotated[str | None, typer.Option(help="Name of the profile; default MODEL-DEVICE.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="A new folder; default runs/calibrate-NAME-TIME.")
    ] = None,
    blocks: Annotated[int | None, typer.Option(help="Load at most this many blocks; default all.")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="Input lengths in tokens, e.g. 16,64,256; default up to what the model can hold."),
    ] = None,
    sessions: Annotated[
        str, typer.Option(help="Numbers of sessions, served side by side and in one step.")
    ] = "1,2,4,8",
    output_tokens: Annotated[int, typer.Option(help="Output tokens of the longest session.")] = 128,
    rounds: Annotated[int, typer.Option(help="How many times everything is measured.")] = 5,
    pause_ms: Annotated[
        float,
        typer.Option(
            min=0, help="Idle milliseconds before every step of a session alone, for the network's delay."
        ),
    ] = 10,
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights", help="Read no weights: --model may then be a profile's name (bloom-176b)."
        ),
    ] = False,
    batches: Annotated[
        bool, typer.Option("--batches/--no-batches", help="Measure steps of several sessions, too.")
    ] = True,
    keep_cpus_awake: Annotated[
        bool,
        typer.Option(
            "--keep-cpus-awake/--no-keep-cpus-awake",
            help="Use network.keep_cpus_awake, as the runs that the profile is for.",
        ),
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Measure a backend's times and memory, fit the timing model to them, write a hardware profile."""
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
    answer, text = calibrate_command(options, say)
    print_answer(answer, lambda: text, as_json)
