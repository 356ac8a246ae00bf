"""Decode steps per second of one server with transformer blocks, with and without batching.

It measures n sessions that decode at the same time, in batches and one by one, and batches of exactly n
sessions. ``python -m benchmarks batches [--model NAME] [--blocks N] [--threads N] [--dtype D] [--device D]
[--context N] [--json]``: the blocks have random weights; the models are those of ``nodes.blocks.sizes``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from nodes.blocks.sizes import SIZES
from nodes.blocks.spec import BlocksSpec, WeightSource
from nodes.clock import ScaledClock
from nodes.compute import Compute, open_session
from testbed.errors import UserError
from testbed.runtime.blocks import require_blocks
from testbed.studies.calibrate.backend import hidden_states
from testbed.studies.calibrate.batches import BatchCase, BatchPlan, measure_batches

SESSIONS = (1, 2, 4, 8, 16)
STEPS = 12
ROUNDS = 3
EXACT_ROUNDS = 10


async def _steps_per_s(
    compute: Compute, clock: ScaledClock, n_sessions: int, n_blocks: int, n_context: int, payloads: Any
) -> float:
    """Returns the decode steps per second of ``n_sessions``, each of which requests a step as soon as its
    last is done.
    """
    sessions = [await open_session(compute, "c", 0, n_blocks, n_context + STEPS) for _ in range(n_sessions)]
    try:
        for session in sessions:
            await compute.step(session, 0, n_context, payloads(n_context), clock.now_s())

        async def decode(session: Any) -> None:
            for n in range(STEPS):
                await compute.step(session, n_context + n, 1, payloads(1), clock.now_s())

        began_at_s = clock.now_s()
        await asyncio.gather(*(decode(session) for session in sessions))
        return n_sessions * STEPS / (clock.now_s() - began_at_s)
    finally:
        for session in sessions:
            compute.close_session(session)


async def _measure(given: argparse.Namespace) -> list[dict[str, float]]:
    from nodes.blocks.compute import BlocksCompute  # imports torch

    config = dict(SIZES[given.model])
    how = {"device": given.device, "dtype": given.dtype, "n_threads": given.threads}
    clock = ScaledClock()
    servers = {
        "one_by_one": BlocksCompute(BlocksSpec(WeightSource(config), **how), clock),
        "batched": BlocksCompute(BlocksSpec(WeightSource(config), is_batched=True, **how), clock),
    }
    hidden_size = config["hidden_size"]

    def payloads(n_tokens: int) -> bytes:
        return hidden_states(n_tokens, hidden_size, given.dtype)

    rows = []
    for compute in servers.values():
        await compute.host(0, given.blocks)
    for n_sessions in SESSIONS:
        row: dict[str, float] = {"sessions": n_sessions}
        rates: dict[str, list[float]] = {name: [] for name in servers}
        for _ in range(ROUNDS):  # in turn, so that other load of the machine affects both alike
            for name, compute in servers.items():
                shape = n_sessions, given.blocks, given.context
                rates[name].append(await _steps_per_s(compute, clock, *shape, payloads))
        rows.append(row | {name: statistics.median(some) for name, some in rates.items()})
    plan = BatchPlan(
        tuple(BatchCase(given.blocks, False, n, 0) for n in SESSIONS), (given.context,), EXACT_ROUNDS
    )
    batched = servers["batched"]
    samples = await measure_batches(plan, batched, clock, payloads, close=batched.close_session)
    for row in rows:
        times_s = [s.time_s for s in samples if s.round >= 0 and s.n_decodes == row["sessions"]]
        row["exactly"] = row["sessions"] / statistics.median(times_s)
    for compute in servers.values():
        compute.close()
    clock.close()
    return rows


def run(arguments: Sequence[str]) -> int:
    """Measures and prints a table. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks batches", description=__doc__)
    parser.add_argument("--model", choices=sorted(SIZES), default="bloom-560m")
    parser.add_argument("--blocks", type=int, default=4, help="number of blocks of the server; default 4")
    parser.add_argument("--threads", type=int, default=1, help="number of threads on a CPU; default 1")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--context", type=int, default=64, help="number of tokens of each prompt; default 64")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        require_blocks("this benchmark")
    except UserError as error:
        print(f"benchmarks batches: {error}", file=sys.stderr)
        return 2
    rows = asyncio.run(_measure(given))
    if given.json:
        print(json.dumps(rows))
        return 0
    print("decode steps/s of n sessions at once, one by one and batched, and in steps of exactly n")
    print(f"{'n':>4}{'one by one':>12}{'batched':>10}{'ratio':>8}{'exactly n':>12}{'ratio':>8}")
    for row in rows:  # "batched" and "exactly n" were measured at different times: each has its own baseline
        n, alone, batched, exactly = (row[key] for key in ("sessions", "one_by_one", "batched", "exactly"))
        print(
            f"{n:>4.0f}{alone:>12.1f}{batched:>10.1f}{batched / alone:>8.2f}"
            f"{exactly:>12.1f}{exactly / rows[0]['exactly']:>8.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
