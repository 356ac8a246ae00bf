"""Commands about this machine: what works on it, what killed runs left, and measurements of it."""

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
    changes,
    out_option,
    print_answer,
)
from testbed.errors import UserError
from testbed.terminal import say

_BACKEND, _MEASUREMENT = "Backend", "Measurement"


def doctor(as_json: JsonOption = False) -> None:
    """Show what works on this machine, what does not, and how to get it."""
    from testbed.inspect.machine import doctor_rows, doctor_text

    rows = doctor_rows()
    print_answer({"capabilities": rows}, lambda: doctor_text(rows), as_json)


def clean(
    out: Annotated[Path, out_option("A run directory, or a folder of them.")] = Path("runs"),
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


def links(
    scenario: ScenarioArg,
    network: NetworkOption = None,
    hosts: HostsOption = None,
    pairs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Measure only the first N client-server pairs.")
    ] = None,
    echoes: Annotated[int, typer.Option(min=2, metavar="N", help="Echoes per pair and message size.")] = 50,
    load: Annotated[
        bool, typer.Option("--load", help="Measure each pair again while up to 20 other pairs are busy.")
    ] = False,
    time_scale: TimeScaleOption = None,
    overrides: SetOption = None,
    out: Annotated[Path | None, out_option("Write JSON, tables and a plot to this new folder.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the emulated network: requested and achieved RTT and rate of every client-server pair."""
    from testbed.experiments import load_experiment
    from testbed.studies.links.check import links_command

    keys = {"network.backend": network, "hosts": hosts, "time_scale": time_scale}
    experiment = load_experiment(scenario, changes(overrides, keys))
    answer, text = links_command(experiment, pairs, echoes, load=load, out=out, announce=say)
    print_answer(answer, lambda: text, as_json)


def calibrate(
    model: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="The checkpoint to measure: its folder, or its name on the Hugging Face hub."
        ),
    ],
    compute: Annotated[
        str,
        typer.Option(metavar="NAME", help="The backend to calibrate: blocks.", rich_help_panel=_BACKEND),
    ] = "blocks",
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="cpu, cuda, or the UUID of a GPU or MIG instance.",
            rich_help_panel=_BACKEND,
        ),
    ] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="float32, bfloat16 or float16; default the model's own.",
            rich_help_panel=_BACKEND,
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            metavar="FORM",
            help="How blocks store their matrices: plain, int8 or nf4.",
            rich_help_panel=_BACKEND,
        ),
    ] = "plain",
    threads: Annotated[
        int,
        typer.Option(metavar="N", help="Number of CPU threads of a step.", rich_help_panel=_BACKEND),
    ] = 1,
    streams: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Number of steps that are computed at the same time.",
            rich_help_panel=_BACKEND,
        ),
    ] = 1,
    cuda_graphs: Annotated[
        bool,
        typer.Option(
            "--cuda-graphs",
            help="Use compute.cuda_graphs, as the runs that the profile is for.",
            rich_help_panel=_BACKEND,
        ),
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the profile; default MODEL-DEVICE.")
    ] = None,
    out: Annotated[Path | None, out_option("A new folder; default runs/calibrate-NAME-TIME.")] = None,
    blocks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Load at most this many blocks; default all.",
            rich_help_panel=_MEASUREMENT,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Input lengths in tokens, e.g. 16,64,256; default up to what the model can hold.",
            rich_help_panel=_MEASUREMENT,
        ),
    ] = None,
    sessions: Annotated[
        str,
        typer.Option(
            metavar="N,N,...",
            help="Numbers of sessions, served side by side and in one step.",
            rich_help_panel=_MEASUREMENT,
        ),
    ] = "1,2,4,8",
    output_tokens: Annotated[
        int,
        typer.Option(metavar="N", help="Output tokens of the longest session.", rich_help_panel=_MEASUREMENT),
    ] = 128,
    rounds: Annotated[
        int,
        typer.Option(
            metavar="N", help="How many times everything is measured.", rich_help_panel=_MEASUREMENT
        ),
    ] = 5,
    pause_ms: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="MS",
            help="Idle milliseconds before every step of a session alone, for the network's delay.",
            rich_help_panel=_MEASUREMENT,
        ),
    ] = 10,
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights",
            help="Read no weights: --model may then be a profile's name (bloom-176b).",
            rich_help_panel=_BACKEND,
        ),
    ] = False,
    batches: Annotated[
        bool, typer.Option(help="Measure steps of several sessions, too.", rich_help_panel=_MEASUREMENT)
    ] = True,
    keep_cpus_awake: Annotated[
        bool,
        typer.Option(
            help="Use network.keep_cpus_awake, as the runs that the profile is for.",
            rich_help_panel=_MEASUREMENT,
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
