"""Seconds per block by sessions, context and prompt, compared with the device's roofline and the paper's
constants.

Decode steps of several sessions are computed in one batch (``nodes.batching``), and measured as in ``testbed
calibrate``, but on caches with random contents: prompts of so many sessions would take longer than all that is
measured.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np

from benchmarks.gpu_parts.limits import Limits, limits_of
from benchmarks.gpu_parts.record import Record
from benchmarks.gpu_parts.sizes import Model, model_of, quantised_here
from nodes.blocks.compute import BlocksCompute
from nodes.blocks.device import available_bytes, open_device
from nodes.blocks.spec import BlocksSpec, Weights, WeightSource
from nodes.clock import ScaledClock
from testbed.experiments.catalogue import shipped
from testbed.experiments.units import DURATION
from testbed.studies.calibrate.backend import hidden_states
from testbed.studies.calibrate.batches import BatchCase, BatchPlan, measure_batches

PAPERS = ("a100", "mig-1g")
"""Hardware for which the paper states constants, for BLOOM-176B in nf4."""
_N_BLOCKS, _ROUNDS = 2, 2
_MEMORY_RATIO = 0.6
"""Share of the free memory for blocks and the sessions of a case."""


def run(record: Record) -> None:
    job = record.job
    model = model_of(job)
    device, dtype = open_device(job.device, model.dtype)
    limits = limits_of(device, dtype, is_small=job.is_small)
    record.put(model=model.name, dtype=model.dtype, n_blocks=_N_BLOCKS, limits=vars(limits), rows=[])
    sessions, contexts = (
        ((1, 4), (4, 16)) if job.is_small else ((1, 2, 4, 8, 16, 32, 64), (1, 128, 1024, 4096))
    )
    kinds: list[Weights] = ["plain", "nf4"] if quantised_here() else ["plain"]
    for weights in kinds:
        asyncio.run(_measure(record, model, weights, limits, sessions, contexts))
        _say(record, weights)


async def _measure(
    record: Record,
    model: Model,
    weights: Weights,
    limits: Limits,
    sessions: tuple[int, ...],
    contexts: tuple[int, ...],
) -> None:
    """Records one row per number of sessions and context, and one per prompt, as far as time and memory
    allow.
    """
    job = record.job
    device, _ = open_device(job.device, model.dtype)
    free_bytes = _MEMORY_RATIO * available_bytes(device) - _N_BLOCKS * model.block_bytes(weights)
    payload = functools.partial(hidden_states, hidden_size=model.hidden_size, dtype=model.dtype)
    clock = ScaledClock()
    compute = BlocksCompute(
        BlocksSpec(WeightSource(model.config), job.device, model.dtype, weights, is_batched=True), clock
    )
    try:
        await compute.host(0, _N_BLOCKS)
        for context in contexts:
            # A session makes a step in each case, so its cache needs room for as many more tokens.
            session_bytes = _N_BLOCKS * model.cache_bytes(context + len(sessions) + 1)
            cases = [BatchCase(_N_BLOCKS, False, n, 0) for n in sessions if n * session_bytes <= free_bytes]
            cases.append(BatchCase(_N_BLOCKS, False, 0, context))
            if job.left_s <= 0:
                record.leave(f"{weights}: out of time before context {context}.")
                return
            plan = BatchPlan(tuple(cases), (context,), _ROUNDS)
            samples = await measure_batches(
                plan,
                compute,
                clock,
                payload,
                close=compute.close_session,
                fill=compute.fill,
            )
            for case in cases:
                mine = [
                    sample
                    for sample in samples
                    if sample.round >= 0
                    and (sample.n_decodes, sample.n_prompt_tokens) == (case.n_decodes, case.n_prompt_tokens)
                ]
                n_cached = round(np.median([sample.cached_tokens for sample in mine]))
                n_tokens = case.n_decodes or case.n_prompt_tokens
                block_s = float(np.median([sample.time_s for sample in mine])) / _N_BLOCKS
                least_s = limits.roofline_s(model, weights, n_tokens, n_cached)
                row: dict[str, Any] = {
                    "weights": weights,
                    "n_sessions": case.n_decodes,
                    "context": context,
                    "block_s": block_s,
                    "roofline_s": least_s,
                    "roofline_ratio": block_s / least_s,
                }
                record.append("rows", row | _papers(case.n_decodes, context))
        await compute.host(0, 0)
    finally:
        compute.close()
        clock.close()


def _papers(n_sessions: int, context: int) -> dict[str, float]:
    """Returns the paper's seconds per block for a decode step of one session or (``n_sessions`` 0) for a
    prompt.

    Its decode time does not depend on the context. Empty for several sessions, for which it has no constants.
    """
    if n_sessions > 1:
        return {}
    found = {}
    for name in PAPERS:
        table = shipped("hardware")[name]
        decode_s, base_s, slope_s = (
            DURATION.parse(table[key]) for key in ("decode", "prefill_base", "prefill_per_token")
        )
        found[f"{name}_s"] = decode_s if n_sessions else base_s + slope_s * context
    return found


def _say(record: Record, weights: Weights) -> None:
    rows = [row for row in record.values["rows"] if row["weights"] == weights]
    for row in rows:
        if row["n_sessions"] not in (0, 1, max(r["n_sessions"] for r in rows)):
            continue
        what = (
            f"{row['n_sessions']} at once, context {row['context']}"
            if row["n_sessions"]
            else f"a prompt of {row['context']}"
        )
        paper = "".join(f", {name} {1e3 * row[f'{name}_s']:.4g} ms" for name in PAPERS if f"{name}_s" in row)
        record.find(
            f"{weights}, {what}: {1e3 * row['block_s']:.4g} ms per block, "
            f"{row['roofline_ratio']:.3g} times the roofline"
            + (f" (the paper, BLOOM-176B in nf4: {paper[2:]})." if paper else ".")
        )
