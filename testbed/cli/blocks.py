"""The part of the command line that is about models: ``generate``, ``model`` and ``hardware``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.options import (
    JsonOption,
    ModelOption,
    NetworkOption,
    OutOption,
    RandomOption,
    ScenarioArg,
    SetOption,
    print_answer,
)
from testbed.errors import UserError

_Whole = typer.Option(min=1)

model_app = typer.Typer(
    help="Models by name, small checkpoints to try things with, and what a checkpoint holds."
)


def model_overrides(model: str | None, random_weights: bool) -> list[str]:
    """The options of a real model as ``--set`` takes them."""
    # As JSON, so that a name is never read as a number or a list.
    changes = [] if model is None else [f"compute.model={json.dumps(model)}"]
    return [*changes, "compute.random_weights=true"] if random_weights else changes


def generate(
    scenario: ScenarioArg,
    model: ModelOption = None,
    random_weights: RandomOption = False,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="What the text begins with.")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="The same as token ids, instead of --prompt.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens at most.")] = 32,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sample; 0: take the likeliest.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sample from so many tokens; 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.001, max=1, help="Sample from this much odds.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Of the sampling.")] = None,
    network: NetworkOption = None,
    overrides: SetOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
    report: Annotated[bool, typer.Option(help="Write report.html and figures after the run.")] = False,
) -> None:
    """Generate a text: the testbed comes up with real blocks, and every token goes through its chain."""
    from testbed.runs.generate import GenerateOptions, answer_text, generate_command

    options = GenerateOptions(prompt, prompt_ids, max_new_tokens, temperature, top_k, top_p, seed)
    changes = [*(overrides or []), *model_overrides(model, random_weights)]
    if network is not None:
        changes.append(f"network.backend={network}")
    code, answer = generate_command(
        scenario,
        changes,
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


@model_app.command()
def make_tiny(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    family: Annotated[str, typer.Option(help="bloom or llama.")] = "bloom",
    layers: Annotated[int, _Whole] = 8,
    hidden: Annotated[int, _Whole] = 64,
    heads: Annotated[int, _Whole] = 4,
    vocab: Annotated[int, _Whole] = 512,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="llama: heads of keys and values.")] = None,
    shards: Annotated[int, typer.Option(min=1, help="Files that the weights are split into.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint with random weights and a tokenizer: equal options give equal files."""
    from testbed.inspect.model import make_tiny_command

    answer, text = make_tiny_command(
        folder, family, layers, hidden, heads, vocab, seed, n_kv_heads=kv_heads, n_shards=shards
    )
    print_answer(answer, lambda: text, as_json)


@model_app.command("list")
def list_models(as_json: JsonOption = False) -> None:
    """List the models that a scenario can name, with their published sizes."""
    from testbed.inspect.hardware import list_command

    answer, text = list_command()
    print_answer(answer, lambda: text, as_json)


@model_app.command()
def show(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name of `testbed model list`, a checkpoint's folder, or its name on the hub.",
        ),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="By name: fp32, fp16, bf16, int8 or nf4; default its own. Checkpoint: float32 (default), bfloat16 or "
            "float16."
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Of a checkpoint: plain (default), int8 or nf4.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model's family and sizes, and the memory that its blocks and caches take."""
    from testbed.inspect.model import show_command

    answer, text = show_command(checkpoint, dtype, weights)
    print_answer(answer, lambda: text, as_json)


def hardware(
    name: Annotated[
        str | None, typer.Argument(help="A GPU, a slice of one, or a measured profile; default all.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With the block times of this model; see `testbed model list`.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the model: fp32, fp16, bf16, int8 or nf4; default its own.")
    ] = None,
    errors: Annotated[
        bool, typer.Option("--errors", help="How far derived times are from all that were measured.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show GPUs with their data sheets, and the block times that follow for a model beside measured ones."""
    from testbed.inspect.hardware import errors_command, hardware_command

    if errors and (name, model, dtype) != (None, None, None):
        raise UserError("--errors is over all measured profiles: give nothing else")
    answer, text = errors_command() if errors else hardware_command(name, model, dtype)
    print_answer(answer, lambda: text, as_json)
