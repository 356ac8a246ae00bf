"""Checks the tokens of whole models, and of as many blocks of BLOOM-176B as fit, on servers that share the
device.

Weights are random. BLOOM-560m's and BLOOM-7B1's sizes are whole, on three servers and in each dtype; they come
first, and several run at once as far as the memory allows. BLOOM-176B's blocks are plain, in int8 and in nf4, on
one and on three servers, and run one after another, since each needs the whole device.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.commands import Here, OutOfTime, up
from benchmarks.gpu_parts.record import Job, Record
from benchmarks.gpu_parts.serving import (
    CONTEXT_BYTES,
    Shape,
    scenario_of,
    shape_in,
    tokens_of,
    write_scenario,
)
from benchmarks.gpu_parts.sizes import Model, model_of, named_model, quantised_here
from nodes.blocks.device import available_bytes, open_device
from nodes.blocks.memory import amount
from nodes.blocks.spec import Weights
from testbed.errors import RunError
from testbed.results.verified import too_many_ties

_N_OUTPUT_TOKENS, _N_OUTPUT_TOKENS_SMALL = 32, 8
_WHOLE = ("bloom-560m", "bloom-7b1")
_AT_ONCE, _N_PROCESSES = 3, 6
"""The most runs at once, and of each the most processes that use the device."""

Case = tuple[Model, Weights, int]
"""(model, kind of weights, number of servers)."""


def run(record: Record) -> None:
    job = record.job
    n_output_tokens = _N_OUTPUT_TOKENS_SMALL if job.is_small else _N_OUTPUT_TOKENS
    record.put(n_output_tokens=n_output_tokens, rows=[])
    (job.folder / "models-served").mkdir()
    cases = _cases(record)
    todo = list(enumerate(cases))
    device, _ = open_device(job.device, "float32")
    free_bytes = longest_s = 0.0
    running: dict[Future[_Served], float] = {}
    with Here() if len(cases) == 1 else ThreadPoolExecutor(_AT_ONCE) as threads:
        while todo or running:
            while todo and len(running) < _AT_ONCE:
                number, case = todo[0]
                if not running:  # what others use now must not make a shape smaller
                    free_bytes = available_bytes(device)
                elif sum(running.values()) + _needed_bytes(case) > free_bytes:
                    break
                if job.left_s < 1.2 * longest_s:
                    record.leave(f"Out of time after {number} of {len(cases)} cases.")
                    todo.clear()
                    break
                del todo[0]
                shape = shape_in(free_bytes, device.type, *case, n_output_tokens)
                if not shape.n_each:
                    record.fail(f"{_words(case)}: not one block fits.")
                    continue
                folder = job.folder / "models-served" / str(number)
                running[threads.submit(_serve, job, case, shape, folder)] = _needed_bytes(case)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                served = future.result()
                _say(record, served)
                longest_s = max(longest_s, served.took_s)


def _cases(record: Record) -> list[Case]:
    model = model_of(record.job)
    if record.job.is_small:
        return [(dataclasses.replace(model, dtype="bfloat16"), "int8", 3)]  # "serving" has plain weights
    kinds: list[Weights] = ["plain", "int8", "nf4"] if quantised_here() else ["plain", "int8"]
    if len(kinds) == 2:
        record.find("Not here: weights in nf4, which need bitsandbytes.")
    whole: list[Case] = [
        (named_model(name, dtype), "plain", 3)
        for name in _WHOLE
        for dtype in ("float32", "bfloat16", "float16")
    ]
    return whole + largest_cases(model, kinds)


def largest_cases(model: Model, kinds: Sequence[Weights]) -> list[Case]:
    """Returns the cases with as many blocks as fit."""
    return [(model, weights, n_servers) for weights in kinds for n_servers in (1, 3)]


def _needed_bytes(case: Case) -> float:
    """Returns the memory that a case needs: its servers' and the whole model's; infinite if its model does not
    fit.
    """
    model, weights, _ = case
    if model.name not in _WHOLE:
        return math.inf
    model_bytes = model.n_blocks * model.block_bytes(weights) + model.client_bytes
    return 2 * model_bytes + _N_PROCESSES * CONTEXT_BYTES


@dataclass(frozen=True)
class _Served:
    """A case that was served. ``error``: why it has no tokens."""

    case: Case
    row: dict[str, Any]
    took_s: float
    error: RunError | None = None


def _serve(job: Job, case: Case, shape: Shape, folder: Path) -> _Served:
    """Serves a case in processes of its own; safe to call in several threads."""
    began_at_s = time.monotonic()
    model, weights, n_servers = case
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
        return _Served(case, row, time.monotonic() - began_at_s, error)
    row |= {key: summary[key] for key in ("n_requests", "n_completed", "startup_s", "metrics", "memory")}
    row |= tokens_of(scenario, folder / "run")
    return _Served(case, row, time.monotonic() - began_at_s)


def _say(record: Record, served: _Served) -> None:
    row, words, error = served.row, _words(served.case), served.error
    record.append("rows", row)
    if error is not None:
        (record.leave if isinstance(error, OutOfTime) else record.fail)(f"{words}: {error}.")
        return
    if row["n_completed"] < row["n_requests"]:
        record.fail(f"{words}: {row['n_completed']} of {row['n_requests']} requests completed.")
    if row["tokens_unchecked_because"]:
        record.fail(f"{words}: tokens were not compared: {row['tokens_unchecked_because']}.")
    elif row["n_tokens_altered"]:
        record.fail(f"{words}: {row['n_tokens_altered']} of {row['n_tokens_checked']} tokens are altered.")
    elif many := too_many_ties(row["n_tokens_checked"], row["n_tokens_tied"]):
        record.fail(f"{words}: {many}.")
    record.find(
        f"{words}: {row['n_blocks']} of {row['n_blocks_of_model']} blocks, "
        f"{amount(row['n_servers'] * row['server_bytes'])} with caches, up in "
        f"{row['startup_s']:.3g} s; {row['n_tokens_checked']} tokens checked, {row['n_tokens_altered']} altered, "
        f"{row['n_tokens_tied']} by a tie."
    )


def _words(case: Case) -> str:
    model, weights, n_servers = case
    servers = f"{n_servers} server{'s' if n_servers > 1 else ''}"
    return f"{model.name}, {model.dtype}, {weights} weights on {servers}"
