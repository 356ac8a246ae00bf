"""Times of decoding one session with and without CUDA graphs, compared with the time to read its weights.

Also of the ways to multiply with a quantised matrix.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_parts.limits import Limits, limits_of, timed
from benchmarks.gpu_parts.record import Record
from benchmarks.gpu_parts.sizes import Model, blocks_within, launch_bound_model, model_of, quantised_here
from nodes.blocks import kernels, quantised
from nodes.blocks.compute import BlocksCompute
from nodes.blocks.device import DTYPES, open_device
from nodes.blocks.spec import BlocksSpec, Weights, WeightSource
from nodes.compute import open_session
from testbed.studies.calibrate.backend import hidden_states

NEAR_RATIO = 1.3
"""If a step takes more than so many times its roofline, its longest kernels are reported."""
_N_BLOCKS, _MOST_BLOCKS = 4, 16
"""Few blocks, and as many as a server would hold: part of a step does not depend on its blocks, and few carry much
of that each.
"""
_CONTEXT, _CONTEXT_SMALL = 64, 8
_MEMORY_RATIO = 0.8
_N_WARM, _N_STEPS = 3, 30
_N_KERNELS = 5
_TOKENS = (1, 2, 4, 5, 8, 16)


def run(record: Record) -> None:
    job = record.job
    device, _ = open_device(job.device, "float32")
    model = model_of(job)
    limits = limits_of(device, DTYPES[model.dtype], is_small=job.is_small)
    record.put(limits=vars(limits), near_ratio=NEAR_RATIO, rows=[], products=[])
    sheet = limits.sheet_bytes_per_s
    on_sheet = f", of {sheet / 1e9:.4g} on its data sheet" if sheet else ""
    record.find(f"A large copy on the device moves {limits.measured_bytes_per_s / 1e9:.4g} GB/s{on_sheet}.")
    if device.type == "cpu":
        record.find(
            'A CPU has no graphs: steps "with graphs" are computed with the code that would be recorded.'
        )
    kinds: list[Weights] = ["plain", "int8", "nf4"] if quantised_here() else ["plain", "int8"]
    contexts = (_CONTEXT_SMALL,) if job.is_small else (1, _CONTEXT, 1024, 4096)
    sizes = [(_N_BLOCKS, context) for context in contexts]
    sizes.append((_MOST_BLOCKS, _CONTEXT_SMALL if job.is_small else _CONTEXT))
    for weights in kinds:
        asyncio.run(_decode_all(record, model, weights, limits, sizes))
    if not job.is_small:
        small = launch_bound_model()
        asyncio.run(_decode_all(record, small, "plain", limits, [(small.n_blocks, _CONTEXT)]))
    for weights in kinds[1:]:
        _measure_products(record, model, device, weights)
    if device.type == "cuda":
        for each in (model, launch_bound_model()):
            asyncio.run(_explain(record, each))


async def _decode_all(
    record: Record,
    model: Model,
    weights: Weights,
    limits: Limits,
    sizes: Sequence[tuple[int, int]],
) -> None:
    """Measures steps without and with graphs, and records one row per entry of ``sizes``: (blocks, or as many as
    fit; context). The most blocks are loaded, and sessions use the first of them.
    """
    job = record.job
    fits = blocks_within(job, model, weights, _MEMORY_RATIO)
    if not fits:
        record.fail(f"{weights}: not one block of {model.name} fits.")
        return
    sizes = list(dict.fromkeys((min(n, fits), context) for n, context in sizes))
    found: dict[bool, list[dict[str, Any]]] = {}
    for has_graphs in (False, True):
        spec = BlocksSpec(WeightSource(model.config), job.device, model.dtype, weights, has_graphs=has_graphs)
        compute = BlocksCompute(spec)
        try:
            await compute.host(0, max(n_blocks for n_blocks, _ in sizes))
            found[has_graphs] = [await _decode(compute, model, *size) for size in sizes]
            if has_graphs and job.device != "cpu" and compute.n_recorded < len(sizes):
                record.fail(
                    f"{model.name}, {weights}: {compute.n_recorded} of {len(sizes)} sessions were recorded; the log of "
                    'this part says why. Of the others "with graphs" is without.'
                )
            await compute.host(0, 0)
        finally:
            compute.close()
    for (n_blocks, context), *times in zip(sizes, found[False], found[True], strict=True):
        row = _row(limits, model, weights, n_blocks, context, *times)
        record.append("rows", row)
        record.find(_words(row))


async def _decode(compute: BlocksCompute, model: Model, n_blocks: int, context: int) -> dict[str, Any]:
    """Returns the seconds of a session's second step, which graphs record, and the median of later ones.

    The session has ``context`` tokens before its first step.
    """
    session = await open_session(compute, "benchmark", 0, n_blocks, context + _N_WARM + _N_STEPS)
    token = hidden_states(1, model.hidden_size, model.dtype)
    position = context
    try:
        await compute.step(session, 0, context, hidden_states(context, model.hidden_size, model.dtype), 0.0)
        times = []
        for _ in range(_N_WARM + _N_STEPS):
            began_at_s = time.perf_counter()
            await compute.step(session, position, 1, token, began_at_s)
            times.append(time.perf_counter() - began_at_s)
            position += 1
    finally:
        compute.close_session(session)
    return {"second_s": times[1], "p50_s": float(np.median(times[_N_WARM:]))}


async def _explain(record: Record, model: Model) -> None:
    """Adds the longest kernels of a step to rows of ``model`` that are far from their roofline.

    It is done after all times are measured: once used, a profiler may slow down later steps.
    """
    far = [
        row
        for row in record.values["rows"]
        if row["model"] == model.name and row["roofline_ratio"] > NEAR_RATIO
    ]
    for weights in dict.fromkeys(row["weights"] for row in far):
        mine = [row for row in far if row["weights"] == weights]
        spec = BlocksSpec(
            WeightSource(model.config), record.job.device, model.dtype, weights, has_graphs=True
        )
        compute = BlocksCompute(spec)
        try:
            await compute.host(0, max(row["n_blocks"] for row in mine))
            for row in mine:
                row["kernels"] = await _kernels(compute, model, row["n_blocks"], row["context"])
                longest = ", ".join(
                    f"{kernel['name'][:60]} {1e3 * kernel['per_step_s']:.3g} ms" for kernel in row["kernels"]
                )
                record.find(
                    f"Longest kernels of a step of {model.name}, {weights}, {row['n_blocks']} blocks, context "
                    f"{row['context']}: {longest}."
                )
            await compute.host(0, 0)
        finally:
            compute.close()


async def _kernels(compute: BlocksCompute, model: Model, n_blocks: int, context: int) -> list[dict[str, Any]]:
    """Returns the longest kernels of a step with graphs on a GPU, with seconds and calls per step."""
    session = await open_session(compute, "benchmark", 0, n_blocks, context + _N_WARM + _N_STEPS)
    token = hidden_states(1, model.hidden_size, model.dtype)
    try:
        await compute.step(session, 0, context, hidden_states(context, model.hidden_size, model.dtype), 0.0)
        for position in range(context, context + _N_WARM):
            await compute.step(session, position, 1, token, 0.0)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for position in range(context + _N_WARM, context + _N_WARM + _N_STEPS):
                await compute.step(session, position, 1, token, 0.0)
    finally:
        compute.close_session(session)
    ranked = sorted(profile.key_averages(), key=lambda one: -one.self_device_time_total)
    return [
        {
            "name": one.key,
            "per_step_s": one.self_device_time_total * 1e-6 / _N_STEPS,
            "n_per_step": one.count / _N_STEPS,
        }
        for one in ranked[:_N_KERNELS]
    ]


def _row(
    limits: Limits,
    model: Model,
    weights: Weights,
    n_blocks: int,
    context: int,
    without: dict[str, Any],
    with_graphs: dict[str, Any],
) -> dict[str, Any]:
    roofline_s = n_blocks * limits.roofline_s(model, weights, 1, context)
    best_s = min(without["p50_s"], with_graphs["p50_s"])
    return {
        "model": model.name,
        "weights": weights,
        "dtype": model.dtype,
        "n_blocks": n_blocks,
        "context": context,
        "without_s": without["p50_s"],
        "with_s": with_graphs["p50_s"],
        "recorded_s": with_graphs["second_s"],
        "roofline_s": roofline_s,
        "roofline_ratio": best_s / roofline_s,
        "kernels": [],
    }


def _words(row: dict[str, Any]) -> str:
    ratio = row["with_s"] / row["without_s"]
    return (
        f"{row['model']} in {row['weights']} weights, {row['n_blocks']} blocks, context {row['context']}: "
        f"a step takes {1e3 * row['without_s']:.4g} ms without and {1e3 * row['with_s']:.4g} ms with graphs "
        f"({100 * (ratio - 1):+.0f} %); the step that is recorded {1e3 * row['recorded_s']:.4g} ms. "
        f"The roofline is {1e3 * row['roofline_s']:.4g} ms, and the faster step takes "
        f"{row['roofline_ratio']:.3g} times that."
    )


def _measure_products(record: Record, model: Model, device: torch.device, weights: Weights) -> None:
    """Measures the ways to multiply with one matrix of a feed-forward layer, for several numbers of tokens."""
    _, dtype = open_device(record.job.device, model.dtype)
    size = model.hidden_size
    matrix = torch.randn(4 * size, size, device=device, dtype=dtype)
    layer = quantised.LAYERS[weights](matrix)
    del matrix
    for n_tokens in _TOKENS:
        x = torch.randn(n_tokens, size, device=device, dtype=dtype)
        times = {name: timed(device, functools.partial(way, x)) for name, way in _ways(layer).items()}
        record.append("products", {"weights": weights, "n_tokens": n_tokens, **times})
    rows = [row for row in record.values["products"] if row["weights"] == weights]
    words = "; ".join(
        f"{row['n_tokens']}: "
        + ", ".join(f"{name[:-2]} {1e3 * s:.3g}" for name, s in row.items() if name.endswith("_s"))
        for row in rows
    )
    record.find(f"{weights}, a matrix of {4 * size} x {size}, ms by number of tokens: {words}.")


def _ways(layer: Any) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    device = layer.codes.device
    ways = {"triton_s": layer.by_triton} if kernels.usable(device) else {}
    if isinstance(layer, quantised.Nf4Linear):
        return {**ways, "library_s": layer.from_library}
    return {**ways, "torch_s": layer.from_codes, "matrix_s": layer.from_matrix}
