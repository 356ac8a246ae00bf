"""The commands about models: ``generate``, ``model`` and ``hardware``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from testbed.experiments import Change, Override

model_app = typer.Typer(
    help="List models, show the sizes of a model or a checkpoint, make a small checkpoint to try things with."
)


def model_changes(model: str | None, random_weights: bool) -> list[Change]:
    """Return --model and --random-weights as changes to a scenario."""
    from testbed.experiments import Change

    changes = [] if model is None else [Change("compute.model", model)]
    return [*changes, Change("compute.random_weights", True)] if random_weights else changes


def generate(
    scenario: ScenarioArg,
    model: ModelOption = None,
    random_weights: RandomOption = False,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt to continue.")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="The prompt as token ids, instead of --prompt.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Generate at most this many tokens.")] = 32,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="Sample at this temperature; 0 takes the most probable token each time."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Sample from the K most probable tokens only; 0: from all.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=1, help="Sample from the fewest tokens whose probabilities add up to this."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling; default 0.")
    ] = None,
    network: NetworkOption = None,
    overrides: SetOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
    report: Annotated[bool, typer.Option(help="Write report.html and figures after the run.")] = False,
) -> None:
    """Generate a text on a testbed with real blocks: every token passes through a chain of servers."""
    from testbed.runs.generate import GenerateOptions, answer_text, generate_command

    options = GenerateOptions(prompt, prompt_ids, max_new_tokens, temperature, top_k, top_p, seed)
    changes: list[Override] = [*(overrides or []), *model_changes(model, random_weights)]
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
    layers: Annotated[int, typer.Option(min=1, help="Number of transformer blocks.")] = 8,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 64,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads of a block.")] = 4,
    vocab: Annotated[int, typer.Option(min=1, help="Size of the vocabulary, at least 260.")] = 512,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the random weights.")] = 0,
    kv_heads: Annotated[
        int | None,
        typer.Option(min=1, help="Heads of keys and values of a llama; default as many as --heads."),
    ] = None,
    shards: Annotated[int, typer.Option(min=1, help="Number of files that the weights are split into.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint with random weights and a tokenizer. The same options write the same files."""
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
            help="A model of `testbed model list`, a checkpoint's folder, or its name on the Hugging Face "
            "hub.",
        ),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of a model by name: fp32, fp16, bf16, int8 or nf4; default the model's own. Of a "
            "checkpoint: float32 (default), bfloat16 or float16."
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="How a checkpoint's weights are stored: plain (default), int8 or nf4."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model's family and sizes, and the memory that its blocks and caches need."""
    from testbed.inspect.model import show_command

    answer, text = show_command(checkpoint, dtype, weights)
    print_answer(answer, lambda: text, as_json)


def hardware(
    name: Annotated[
        str | None, typer.Argument(help="A GPU, a slice of one, or a measured profile; default all.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Show the block times of this model, too; see `testbed model list`.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Data type of the model: fp32, fp16, bf16, int8 or nf4; default the model's own."),
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
