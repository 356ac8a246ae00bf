"""Compares one queue of steps with a CUDA stream per session: tokens per second, and latencies.

Two backends hold the same blocks with random weights. One computes one step at a time (``n_streams`` 1), the
other as many as there are sessions. All sessions decode at the same time; each requests a step as soon as its
last one is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu_parts.copies import measure_copies
from benchmarks.gpu_parts.figures import draw_streams
from benchmarks.gpu_parts.record import Record
from benchmarks.gpu_parts.sizes import Model, blocks_within, model_of, quantised_here
from nodes.blocks.compute import BlocksCompute
from nodes.blocks.spec import BlocksSpec, Weights, WeightSource
from nodes.compute import open_session
from testbed.studies.calibrate.backend import hidden_states

SESSIONS = (1, 2, 4, 8)
BETTER_RATIO = 0.05
"""Differences smaller than this do not count as better."""
_N_BLOCKS, _ROUNDS = 4, 2
_MEMORY_RATIO = 0.4
"""Share of the free memory for the blocks of both backends together."""


@dataclass(frozen=True)
class _Load:
    n_prompt: int
    n_steps: int


def run(record: Record) -> None:
    job = record.job
    record.put(copies=measure_copies(job))
    if job.device != "cpu":
        _say_copies(record)
    model = model_of(job)
    load = _Load(8, 8) if job.is_small else _Load(64, 32)
    kinds: list[Weights] = ["plain", "nf4"] if quantised_here() else ["plain"]
    record.put(model=model.name, dtype=model.dtype, n_prompt_tokens=load.n_prompt, steps=load.n_steps)
    record.put(sessions=SESSIONS, weights={})
    for done, weights in enumerate(kinds):
        stop_at_s = time.monotonic() + job.left_s / (len(kinds) - done)
        rows = asyncio.run(_measure(record, model, weights, load, stop_at_s))
        record.values["weights"][weights] = rows
        record.put(verdict=_verdicts(record.values["weights"]))
        record.find(f"{weights}: {record.values['verdict'][weights]['words']}")
    record.put(figures=draw_streams(job.folder / "figures", record.values))


async def _measure(
    record: Record, model: Model, weights: Weights, load: _Load, stop_at_s: float
) -> list[dict[str, Any]]:
    """Returns one row per number of streams and of sessions, over as many rounds as the time allows."""
    job = record.job
    n_blocks = min(_N_BLOCKS, blocks_within(job, model, weights, _MEMORY_RATIO / 2))
    if not n_blocks:
        record.fail(f"{weights}: not one block of {model.name} fits twice.")
        return []
    record.put(n_blocks={**record.values.get("n_blocks", {}), weights: n_blocks})
    spec = {"device": job.device, "dtype": model.dtype, "weights": weights}
    computes = {
        n: BlocksCompute(BlocksSpec(WeightSource(model.config), n_streams=n, **spec))  # type: ignore[arg-type]
        for n in (1, max(SESSIONS))
    }
    found: dict[tuple[int, int], list[list[float]]] = {}
    with contextlib.ExitStack() as stack:
        for compute in computes.values():
            stack.callback(compute.close)
            await compute.host(0, n_blocks)
            await _decode(compute, model, n_blocks, max(SESSIONS), load)  # warm-up: every thread and stream
        for number, n_sessions in itertools.product(range(_ROUNDS), SESSIONS):
            if found and time.monotonic() > stop_at_s:
                record.find(f"{weights}: out of time in round {number + 1} of {_ROUNDS}.")
                break
            # In turn, and in reverse order in the next round: a device that becomes slower then affects both.
            for n_streams in sorted(computes, reverse=bool(number % 2)):
                times = await _decode(computes[n_streams], model, n_blocks, n_sessions, load)
                found.setdefault((n_streams, n_sessions), []).append(times)
        for compute in computes.values():
            await compute.host(0, 0)  # frees the memory for the next kind of weights
    return [_row(n_streams, n_sessions, rounds) for (n_streams, n_sessions), rounds in sorted(found.items())]


async def _decode(
    compute: BlocksCompute, model: Model, n_blocks: int, n_sessions: int, load: _Load
) -> list[float]:
    """Returns the seconds of each step while all sessions were busy, and as the last entry the seconds from
    the first step to the end of the first session.
    """
    sessions = [
        await open_session(compute, "benchmark", 0, n_blocks, load.n_prompt + load.n_steps)
        for _ in range(n_sessions)
    ]
    prompt = hidden_states(load.n_prompt, model.hidden_size, model.dtype)
    token = hidden_states(1, model.hidden_size, model.dtype)
    steps: list[tuple[float, float]] = []
    ended_at_s = math.inf

    async def decode(session: Any) -> None:
        nonlocal ended_at_s
        for step in range(load.n_steps):
            began_at_s = time.perf_counter()
            await compute.step(session, load.n_prompt + step, 1, token, began_at_s)
            steps.append((began_at_s, time.perf_counter()))
        ended_at_s = min(ended_at_s, time.perf_counter())

    try:
        for session in sessions:
            await compute.step(session, 0, load.n_prompt, prompt, 0.0)
        began_at_s = time.perf_counter()
        await asyncio.gather(*(decode(session) for session in sessions))
    finally:
        for session in sessions:
            compute.close_session(session)
    return [*(end - start for start, end in steps if end <= ended_at_s), ended_at_s - began_at_s]


def _row(n_streams: int, n_sessions: int, rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Returns a row. ``tokens_per_s``: steps per second of all sessions together; ``step_*_s``: times of one
    step.
    """
    steps = np.concatenate([np.array(times[:-1]) for times in rounds])
    return {
        "n_streams": n_streams,
        "n_sessions": n_sessions,
        "rounds": len(rounds),
        "tokens_per_s": float(np.median([(len(times) - 1) / times[-1] for times in rounds])),
        "step_mean_s": float(steps.mean()),
        "step_p50_s": float(np.percentile(steps, 50)),
        "step_p99_s": float(np.percentile(steps, 99)),
    }


def _verdicts(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {weights: verdict(rows) for weights, rows in found.items() if rows}


def verdict(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Decides whether streams are better: they must serve more with the most sessions, and not slow one
    session down.

    Returns ``best_n_streams``, ``rate_ratio`` and ``p99_ratio`` (number of sessions -> streams / queue), and
    ``words``.
    """
    by = {(row["n_streams"], row["n_sessions"]): row for row in rows}
    many = max(n for n, _ in by)
    counts = sorted({n for _, n in by})
    rate = {n: by[many, n]["tokens_per_s"] / by[1, n]["tokens_per_s"] for n in counts}
    p99 = {n: by[many, n]["step_p99_s"] / by[1, n]["step_p99_s"] for n in counts}
    most = counts[-1]
    alone_is_slower = rate[counts[0]] < 1 - BETTER_RATIO
    is_better = rate[most] > 1 + BETTER_RATIO and not alone_is_slower
    which = (
        "a stream per session is better"
        if is_better
        else "one queue is better"
        if rate[most] < 1 - BETTER_RATIO or alone_is_slower
        else "no difference worth a choice; one queue is simpler"
    )
    words = (
        f"{which}. {most} sessions: {by[1, most]['tokens_per_s']:.4g} tokens/s with one queue, "
        f"{by[many, most]['tokens_per_s']:.4g} with {many} streams ({100 * (rate[most] - 1):+.0f} %); "
        f"p99 of a step {1e3 * by[1, most]['step_p99_s']:.3g} and {1e3 * by[many, most]['step_p99_s']:.3g} ms; "
        f"one session alone {100 * (rate[counts[0]] - 1):+.0f} %."
    )
    return {
        "best_n_streams": many if is_better else 1,
        "rate_ratio": {str(n): ratio for n, ratio in rate.items()},
        "p99_ratio": {str(n): ratio for n, ratio in p99.items()},
        "words": words,
    }


def _say_copies(record: Record) -> None:
    for row in record.values["copies"]:
        record.find(
            f"Copies of {row['n_bytes']} bytes to the device and back: pinned {1e6 * row['pinned_p50_s']:.0f} µs, "
            f"pageable {1e6 * row['pageable_p50_s']:.0f} µs."
        )
