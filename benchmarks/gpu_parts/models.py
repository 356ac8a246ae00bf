"""Checks the tokens of whole models, and of as many blocks of BLOOM-176B as fit, on servers that share the
device.

Weights are random. BLOOM-560m's and BLOOM-7B1's sizes are whole, on three servers and in each dtype.
BLOOM-176B's blocks are plain, in int8 and in nf4, on one and on three servers.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.commands import OutOfTime, up
from benchmarks.gpu_parts.record import Record
from benchmarks.gpu_parts.serving import scenario_of, shape_of, tokens_of, write_scenario
from benchmarks.gpu_parts.sizes import Model, model_of, named_model, quantised_here
from nodes.blocks.memory import amount
from nodes.blocks.spec import Weights
from testbed.errors import RunError
from testbed.results.verified import too_many_ties

_N_OUTPUT_TOKENS, _N_OUTPUT_TOKENS_SMALL = 32, 8

Case = tuple[Model, Weights, int]
"""(model, kind of weights, number of servers)."""


def run(record: Record) -> None:
    job = record.job
    n_output_tokens = _N_OUTPUT_TOKENS_SMALL if job.is_small else _N_OUTPUT_TOKENS
    record.put(n_output_tokens=n_output_tokens, rows=[])
    (job.folder / "models-served").mkdir()
    cases = _cases(record)
    longest_s = 0.0
    for number, case in enumerate(cases):
        if job.left_s < 1.2 * longest_s:
            record.leave(f"Out of time after {number} of {len(cases)} cases.")
            break
        began_at_s = time.monotonic()
        _serve(record, case, n_output_tokens, job.folder / "models-served" / str(number))
        longest_s = max(longest_s, time.monotonic() - began_at_s)


def _cases(record: Record) -> list[Case]:
    model = model_of(record.job)
    if record.job.is_small:
        return [(dataclasses.replace(model, dtype="bfloat16"), "int8", 3)]  # "serving" has plain weights
    kinds: list[Weights] = ["plain", "int8", "nf4"] if quantised_here() else ["plain", "int8"]
    if len(kinds) == 2:
        record.find("Not here: weights in nf4, which need bitsandbytes.")
    return largest_cases(model, kinds) + [
        (named_model(name, dtype), "plain", 3)
        for name in ("bloom-560m", "bloom-7b1")
        for dtype in ("float32", "bfloat16", "float16")
    ]


def largest_cases(model: Model, kinds: Sequence[Weights]) -> list[Case]:
    """Returns the cases with as many blocks as fit."""
    return [(model, weights, n_servers) for weights in kinds for n_servers in (1, 3)]


def _serve(record: Record, case: Case, n_output_tokens: int, folder: Path) -> None:
    job = record.job
    model, weights, n_servers = case
    words = (
        f"{model.name}, {model.dtype}, {weights} weights on {n_servers} server{'s' if n_servers > 1 else ''}"
    )
    shape = shape_of(job.device, model, weights, n_servers, n_output_tokens)
    if not shape.n_each:
        record.fail(f"{words}: not one block fits.")
        return
    folder.mkdir()
    scenario = folder / "scenario.toml"
    write_scenario(scenario, scenario_of(job.device, model, shape, "shared", None))
    row: dict[str, Any] = {
        "model": model.name,
        "dtype": model.dtype,
        "weights": weights,
        "n_servers": n_servers,
        "n_blocks": shape.n_blocks,
        "n_blocks_of_model": model.n_blocks,
        "server_bytes": shape.server_bytes,
    }
    options = ["--compute", "blocks", "--set", "compute.verify=false", "--no-twin"]
    try:
        summary = up(scenario, folder / "run", options, job.left_s)
    except RunError as error:
        record.append("rows", row)
        (record.leave if isinstance(error, OutOfTime) else record.fail)(f"{words}: {error}.")
        return
    row |= {key: summary[key] for key in ("n_requests", "n_completed", "startup_s", "metrics", "memory")}
    row |= tokens_of(scenario, folder / "run")
    record.append("rows", row)
    if row["n_completed"] < row["n_requests"]:
        record.fail(f"{words}: {row['n_completed']} of {row['n_requests']} requests completed.")
    if row["tokens_unchecked_because"]:
        record.fail(f"{words}: tokens were not compared: {row['tokens_unchecked_because']}.")
    elif row["n_tokens_altered"]:
        record.fail(f"{words}: {row['n_tokens_altered']} of {row['n_tokens_checked']} tokens are altered.")
    elif many := too_many_ties(row["n_tokens_checked"], row["n_tokens_tied"]):
        record.fail(f"{words}: {many}.")
    record.find(
        f"{words}: {shape.n_blocks} of {model.n_blocks} blocks, "
        f"{amount(n_servers * shape.server_bytes)} with caches, up in "
        f"{row['startup_s']:.3g} s; {row['n_tokens_checked']} tokens checked, {row['n_tokens_altered']} altered, "
        f"{row['n_tokens_tied']} by a tie."
    )
